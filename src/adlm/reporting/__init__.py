"""Reports for the browser: one self-contained HTML file with charts and reveals."""

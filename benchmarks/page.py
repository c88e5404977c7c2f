"""Time until a visitor sees the first complete text: the page in a browser, the model in the package, default settings.

    python benchmarks/page.py          on idle cores; needs the extras serve and test, and chromium

Prints one JSON document: seconds from the click to the complete text, evaluations, milliseconds of each, and the layout
shift of the film and of the run.
"""

import json
import shutil
import subprocess
import sys
import time
import urllib.request

from playwright.sync_api import sync_playwright

PORT = 8765
RUNS = 3
WATCH = """window.shifts = [];
new PerformanceObserver((list) => {
    for (const shift of list.getEntries()) if (!shift.hadRecentInput) shifts.push(shift.value);
}).observe({ type: "layout-shift", buffered: true });"""
DONE = "() => document.getElementById('announce').textContent.startsWith('Finished')"


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url)
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def measure(browser) -> dict:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.add_init_script(WATCH)
    page.goto(f"http://127.0.0.1:{PORT}/")
    page.wait_for_selector("#generate:enabled")
    page.wait_for_selector("#play:not(.playing)", timeout=60_000)  # the film has ended
    film = sum(page.evaluate("() => shifts"))
    began = time.perf_counter()
    page.click("#generate")
    page.wait_for_function(DONE, timeout=120_000)
    seconds = time.perf_counter() - began
    page.wait_for_selector("#play:not(.playing)", timeout=60_000)
    status = page.locator(".status").inner_text()
    evaluations = int(status.split(" evaluation")[0].split(", ")[-1])
    shift = sum(page.evaluate("() => shifts")) - film
    page.close()
    return {
        "seconds": round(seconds, 2),
        "evaluations": evaluations,
        "ms_per_evaluation": round(1000 * seconds / evaluations, 1),
        "layout_shift_film": round(film, 4),
        "layout_shift_run": round(shift, 4),
    }


if __name__ == "__main__":
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server = subprocess.Popen([sys.executable, "-m", "adlm", "serve", f"port={PORT}"])
    try:
        wait_for(f"http://127.0.0.1:{PORT}/readyz")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            print(json.dumps([measure(browser) for _ in range(RUNS)], indent=1))
    finally:
        server.terminate()
        server.wait()

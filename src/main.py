"""`python -m main mode=... key=value ...`: the public release's command lines, run by adlm (docs/configuration.md)."""

import sys

from adlm.cli import release_main

if __name__ == "__main__":
    sys.exit(release_main("main"))

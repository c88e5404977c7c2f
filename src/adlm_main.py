"""`python -m adlm_main mode=... key=value ...`: the public release's command lines (docs/configuration.md)."""

import sys

from adlm.cli import release_main

if __name__ == "__main__":
    sys.exit(release_main("adlm_main"))

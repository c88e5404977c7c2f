"""`python -m adlm ...` is `adlm ...`."""

import sys

from adlm.cli import main

if __name__ == "__main__":
    sys.exit(main())

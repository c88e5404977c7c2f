"""`python -m adlm ...` and `torchrun -m adlm ...` are the `adlm` command."""

import sys

from adlm.cli import main

if __name__ == "__main__":
    sys.exit(main())

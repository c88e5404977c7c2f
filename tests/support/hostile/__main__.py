"""Runs every case, or those named, below a folder."""

import sys
from pathlib import Path

from hostile import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

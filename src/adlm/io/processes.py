"""Processes that end together."""

import contextlib
import ctypes
import signal
import sys

KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""What ends a process at once; Windows has one signal for both."""


def die_with_parent() -> None:
    """Let Linux kill this process when the one that started it is killed: nobody would mind it then, and it would hold
    on to its files and its GPU."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, KILL)

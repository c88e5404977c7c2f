"""Processes that die at a chosen file operation: forked from one that has imported torch, so that each costs little."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

# What Python tells its audit hooks of before it does it. `os.rename` is `os.replace`, too; an fsync is told of by us.
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree")
DIED = 77


def in_a_fork(do: Callable[[], object]) -> int:
    """Run `do` in a child of this process; its exit status: 0, 1 after an exception, or what the child died with."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        result = do()
        status = result if isinstance(result, int) else 0
    finally:
        os._exit(status)


def count_operations(folder: Path, die_at: int = 0) -> Callable[[], int]:
    """Count the operations of this process that change `folder`, and die before the one numbered `die_at` (from 1): at
    once, so that what is buffered is lost. Meant for a fork: an audit hook stays. The result says how many there were.
    """
    seen, place, fsync = 0, str(folder), os.fsync

    def meet() -> None:
        nonlocal seen
        seen += 1
        if seen == die_at:
            os._exit(DIED)

    def hook(event: str, arguments: tuple) -> None:
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        reads = event == "open" and isinstance(arguments[2], int) and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not reads and place in os.fspath(arguments[0]):
            meet()

    def counted(descriptor: int) -> None:
        meet()
        fsync(descriptor)

    os.fsync = counted
    sys.addaudithook(hook)
    return lambda: seen

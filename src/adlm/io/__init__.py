"""Reading and writing: paths as users name them, exported folders, a model from whatever a user points at; and, here,
how far a long piece of work is."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

RARE = 30.0
"""Seconds between lines where stderr is no terminal: enough to see in a log that something happens."""


class ProgressBar:
    """A bar on the terminal, or without one a line every so many seconds."""

    def __init__(self, label: str, total: int, bar: Any = None, seconds: float = RARE):
        self.label, self.total, self.done, self.bar, self.seconds = label, total, 0, bar, seconds
        self.task = bar.add_task(label, total=total) if bar else None
        self.began = self.said = time.monotonic()

    def __call__(self) -> None:
        """Advance by one."""
        self.done = min(self.total, self.done + 1)
        now = time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=self.done)
        elif now - self.said >= self.seconds:
            self.said = now
            print(f"adlm: {self.label}: {self.done:,} of {self.total:,}, {now - self.began:.0f} s", file=sys.stderr)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something is printed."""
        if self.bar:
            self.bar.stop()
        yield
        if self.bar:
            self.bar.start()


@contextlib.contextmanager
def progress(label: str, total: int, shown: bool = True) -> Iterator[ProgressBar]:
    """Say on stderr how far something is, if `shown` (ranks other than the first are silent); calling the result
    advances it by one."""
    if not shown or not sys.stderr.isatty():
        yield ProgressBar(label, total, seconds=RARE if shown else math.inf)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # stdout is left alone: it may be a file, and what is printed there must not go to the terminal of the bar
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        yield ProgressBar(label, total, bar)

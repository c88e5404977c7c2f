"""Reading and writing: paths that users name, exported folders, and models from any place; and, in this file, the
progress bar of long work."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

RARE = 30.0
"""Seconds between lines if stderr is not a terminal: a log shows that the work goes on."""


class ProgressBar:
    """A bar on the terminal; without a terminal, a line every RARE seconds."""

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
        """Hide the bar while something is printed."""
        if self.bar:
            self.bar.stop()
        yield
        if self.bar:
            self.bar.start()


@contextlib.contextmanager
def progress(label: str, total: int, shown: bool = True) -> Iterator[ProgressBar]:
    """Show progress on stderr if `shown` (only the first rank shows it); calling the result advances it by one."""
    if not shown or not sys.stderr.isatty():
        yield ProgressBar(label, total, seconds=RARE if shown else math.inf)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # stdout is not redirected: it may be a file, and its output must not go to the terminal of the bar
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        yield ProgressBar(label, total, bar)

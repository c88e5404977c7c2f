"""One progress line for preparation: documents, tokens, tokens per second. Silent unless stderr is a terminal."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    def __init__(self, title: str) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[documents]:,} documents  {task.completed:,.0f} tokens"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task = self.bar.add_task(title, total=None, documents=0, rate=0.0)

    def update(self, documents: int, tokens: int) -> None:
        """Totals so far."""
        elapsed = self.bar.tasks[0].elapsed or 0.0
        rate = tokens / elapsed if elapsed else 0.0
        self.bar.update(self.task, completed=tokens, documents=documents, rate=rate)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

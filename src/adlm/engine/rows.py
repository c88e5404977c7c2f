"""Rows join, are worked on, and leave: the part of an engine that does not depend on the kind of model."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from adlm.engine.request import Frame, Request, Result, check_request
from adlm.errors import require
from adlm.models import Network


@dataclass(eq=False)
class Row:
    """A row in progress."""

    id: int
    request: Request
    nfe: int = 0
    began: float = field(default_factory=time.perf_counter)


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """A queue and a table of slots. Subclasses say how a slot is opened, stepped and read."""

    def __init__(self, model: Network, slots: int):
        require(slots >= 1, f"sampling.batch_size must be at least 1, got {slots}")
        self.model = model
        self.slots: list[R | None] = [None] * slots
        self.waiting: deque[tuple[int, Request]] = deque()
        self.cancelled: set[int] = set()
        self.next_id = 0
        self.updates: list[Frame | Result] = []
        self.awaited: set[int] = set()
        """Rows of iterators (`run`, `stream`) that are under way."""
        self.unread: list[Frame | Result] = []
        """What one iterator's step said of another one's rows."""

    def check(self, request: Request) -> None:
        """Refuse a bad request with a ValueError. Touches nothing that changes, so any thread may ask."""
        m = self.model
        check_request(request, m.vocab_size, m.mask_id, m.config.length)

    def submit(self, request: Request) -> int:
        """Queue a row; returns its id. Bad requests are refused here, not when a slot is free."""
        self.check(request)
        self.next_id += 1
        self.waiting.append((self.next_id, request))
        return self.next_id

    def cancel(self, id: int) -> None:
        """Stop a row; it leaves at the next step with an unfinished Result. Ids of rows that have ended are ignored."""
        self.cancelled.add(id)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(s is not None for s in self.slots)

    def step(self) -> list[Frame | Result]:
        """Admit rows, evaluate every row once, and report: Frames of watched rows, Results of ended ones."""
        self.updates = []
        self.drop_cancelled()
        for i in range(len(self.slots)):
            while self.slots[i] is None and self.waiting:
                self.admit(i, *self.waiting.popleft())
        self.evaluate()
        return self.updates

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in the order they finish; requests are taken as slots become free, so there may be any number.

        Iterators, `stream` too, may be read in turn: each step works for all of them. Rows of an iterator that is given
        up are dropped.
        """
        source, more, mine = iter(requests), True, set()
        try:
            while more or mine:
                while more and len(self.waiting) < self.slots.count(None):
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        mine.add(self.await_row(request))
                for update in self.read(mine):
                    if isinstance(update, Result):
                        mine.remove(update.id)
                        yield update
        finally:
            self.drop(mine)

    def stream(self, request: Request) -> Iterator[Frame | Result]:
        """Frames of one row (if request.watch) and its Result."""
        id, ended = self.await_row(request), False
        try:
            while not ended:
                for update in self.read({id}):
                    ended = isinstance(update, Result)
                    yield update
        finally:
            self.drop({id} if not ended else set())

    def await_row(self, request: Request) -> int:
        id = self.submit(request)
        self.awaited.add(id)
        return id

    def read(self, ids: set[int]) -> list[Frame | Result]:
        """What is new of these rows: what other iterators' steps have left, or else what a step says."""
        if not any(u.id in ids for u in self.unread):
            self.unread += [u for u in self.step() if u.id in self.awaited]
        found = [u for u in self.unread if u.id in ids]
        self.unread = [u for u in self.unread if u.id not in ids]
        self.awaited -= {u.id for u in found if isinstance(u, Result)}
        return found

    def drop(self, ids: set[int]) -> None:
        """Forget rows at once, without a Result."""
        if ids:
            self.cancelled |= ids
            self.drop_cancelled()
            self.updates = [u for u in self.updates if u.id not in ids]
            self.unread = [u for u in self.unread if u.id not in ids]
            self.awaited -= ids

    def finish(self, i: int, tokens: list[int], finished: bool = True, problem: str = "") -> None:
        row = self.slots[i]
        assert row is not None
        seconds = time.perf_counter() - row.began
        self.updates.append(Result(row.id, tokens, row.request.seed, row.nfe, seconds, finished, problem))
        self.slots[i] = None

    def drop_cancelled(self) -> None:
        if not self.cancelled:
            return
        for i, row in enumerate(self.slots):
            if row is not None and row.id in self.cancelled:
                self.finish(i, self.tokens(i), finished=False)
        for id, request in [w for w in self.waiting if w[0] in self.cancelled]:
            self.waiting.remove((id, request))
            self.updates.append(Result(id, list(request.tokens), request.seed, 0, 0.0, finished=False))
        self.cancelled.clear()

    # What a kind of model adds

    def admit(self, i: int, id: int, request: Request) -> None:
        """Put the request into slot i (it may end at once)."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """One network evaluation of every row."""
        raise NotImplementedError

    def tokens(self, i: int) -> list[int]:
        """The row of slot i as it stands, on the host."""
        raise NotImplementedError

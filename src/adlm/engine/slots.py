"""A queue and a table of slots: sequences join, are evaluated together, and leave. engine.py says how a sequence is
filled."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from adlm.engine.request import Frame, Request, Result
from adlm.errors import require
from adlm.models import Network


@dataclass(eq=False)
class ActiveSequence:
    """A sequence in progress, in a slot."""

    id: int
    request: Request
    nfe: int = 0
    began: float = field(default_factory=time.perf_counter)
    kept: Any = None
    """While it is paused: what its slot held on the device."""
    stood: list[int] = field(default_factory=list)
    """While it is paused: its tokens so far."""


S = TypeVar("S", bound=ActiveSequence)


class BaseEngine(Generic[S]):
    """A queue and a table of slots. Subclasses define how a slot is opened, stepped and read.

    `run` and `stream` may be used from any number of threads; `submit`, `cancel` and `step` only by a single thread
    that owns the engine.
    """

    def __init__(self, model: Network, slots: int):
        require(slots >= 1, f"sampling.batch_size must be at least 1, got {slots}")
        self.model = model
        self.slots: list[S | None] = [None] * slots
        self.waiting: deque[tuple[int, Request]] = deque()
        self.paused: dict[int, S] = {}
        """Sequences taken out of their slots, to be resumed later."""
        self.cancelled: set[int] = set()
        self.next_id = 0
        self.updates: list[Frame | Result] = []
        self.awaited: set[int] = set()
        """Sequences of the iterators (`run`, `stream`) in progress."""
        self.unread: list[Frame | Result] = []
        """Updates that one iterator's step produced for another iterator's sequences."""
        self.abandoned: deque[int] = deque()
        """Sequences of abandoned iterators, kept until a thread holds the lock."""
        self.lock = threading.Lock()

    def submit(self, request: Request) -> int:
        """Queue a sequence and return its id. Bad requests are refused here, not once a slot is free."""
        self.check(request)
        self.next_id += 1
        self.waiting.append((self.next_id, request))
        return self.next_id

    def cancel(self, id: int) -> None:
        """Stop a sequence; it leaves at the next step with an unfinished Result. Ids of ended ones are ignored."""
        self.cancelled.add(id)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or bool(self.paused) or any(s is not None for s in self.slots)

    def pause(self, id: int) -> None:
        """Take a sequence out of its slot, to make room for another one. Once resumed, it continues unchanged."""
        i = next(i for i, s in enumerate(self.slots) if s is not None and s.id == id)
        active = self.active(i)
        active.stood, active.kept = self.tokens(i), self.keep(i)
        self.paused[id] = active
        self.slots[i] = None

    def resume(self, id: int) -> None:
        """Put a paused sequence into any free slot."""
        i = self.slots.index(None)
        active = self.slots[i] = self.paused.pop(id)
        self.bring_back(i, active.kept)
        active.kept = None

    def step(self, only: Collection[int] | None = None) -> list[Frame | Result]:
        """Admit sequences, evaluate each once, and return Frames of watched sequences and Results of ended ones.
        `only`: ids of those to evaluate; the others keep their slots and wait."""
        self.updates = []
        self.drop_cancelled()
        for i in range(len(self.slots)):
            while self.slots[i] is None and self.waiting:
                self.admit(i, *self.waiting.popleft())
        self.evaluate([i for i, s in enumerate(self.slots) if s is not None and (only is None or s.id in only)])
        return self.updates

    def run(self, requests: Iterable[Request], tick: Callable[[], None] = lambda: None) -> Iterator[Result]:
        """Yield Results in the order they finish. Requests are taken as slots become free, so there may be any number.
        `tick` is called after each step.

        Several iterators, of `stream` too, may be read in turn or in several threads: each step serves all of them.
        The sequences of an abandoned iterator are dropped.
        """
        source, more, mine = iter(requests), True, set()
        try:
            while more or mine:
                while more and len(self.waiting) < self.slots.count(None):
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        mine.add(self.submit_awaited(request))
                updates = self.read(mine)
                tick()
                for update in updates:
                    if isinstance(update, Result):
                        mine.remove(update.id)
                        yield update
        finally:
            self.drop(mine)

    def stream(self, request: Request) -> Iterator[Frame | Result]:
        """Yield the Frames of one sequence (if request.watch) and its Result."""
        id, ended = self.submit_awaited(request), False
        try:
            while not ended:
                for update in self.read({id}):
                    ended = isinstance(update, Result)
                    yield update
        finally:
            self.drop({id} if not ended else set())

    def submit_awaited(self, request: Request) -> int:
        with self.lock:
            id = self.submit(request)
            self.awaited.add(id)
            return id

    def read(self, ids: set[int]) -> list[Frame | Result]:
        """The updates of these sequences: those that other iterators' steps have left, or else those of a new step."""
        with self.lock:
            self.forget_abandoned()
            if not any(u.id in ids for u in self.unread):
                self.unread += [u for u in self.step() if u.id in self.awaited]
            found = [u for u in self.unread if u.id in ids]
            self.unread = [u for u in self.unread if u.id not in ids]
            self.awaited -= {u.id for u in found if isinstance(u, Result)}
            return found

    def drop(self, ids: set[int]) -> None:
        """Drop sequences without a Result: at once if the engine is idle, else before its next step. The garbage
        collector may call this at any moment, even inside a step of the same thread, so it never waits."""
        self.abandoned.extend(ids)
        if ids and self.lock.acquire(blocking=False):
            try:
                self.forget_abandoned()
            finally:
                self.lock.release()

    def forget_abandoned(self) -> None:
        ids = {self.abandoned.popleft() for _ in range(len(self.abandoned))}
        if ids:
            self.cancelled |= ids
            self.drop_cancelled()
            self.updates = [u for u in self.updates if u.id not in ids]
            self.unread = [u for u in self.unread if u.id not in ids]
            self.awaited -= ids

    def finish(self, i: int, tokens: list[int], finished: bool = True, problem: str = "") -> None:
        active = self.active(i)
        seconds = time.perf_counter() - active.began
        self.updates.append(Result(active.id, tokens, active.request.seed, active.nfe, seconds, finished, problem))
        self.slots[i] = None

    def drop_cancelled(self) -> None:
        if not self.cancelled:
            return
        for i, active in enumerate(self.slots):
            if active is not None and active.id in self.cancelled:
                self.finish(i, self.tokens(i), finished=False)
        for id in self.paused.keys() & self.cancelled:
            left = self.paused.pop(id)
            seconds = time.perf_counter() - left.began
            self.updates.append(Result(id, left.stood, left.request.seed, left.nfe, seconds, finished=False))
        for id, request in [w for w in self.waiting if w[0] in self.cancelled]:
            self.waiting.remove((id, request))
            self.updates.append(Result(id, list(request.tokens), request.seed, 0, 0.0, finished=False))
        self.cancelled.clear()

    def active(self, i: int) -> S:
        """The sequence in slot i, which must not be free."""
        active = self.slots[i]
        assert active is not None
        return active

    # What a subclass adds

    def check(self, request: Request) -> None:
        """Refuse a bad request with a ValueError. Uses no mutable state, so any thread may call it."""
        raise NotImplementedError

    def admit(self, i: int, id: int, request: Request) -> None:
        """Put the request into slot i (it may end at once)."""
        raise NotImplementedError

    def evaluate(self, chosen: list[int]) -> None:
        """Evaluate the network once for the sequences in these slots."""
        raise NotImplementedError

    def keep(self, i: int) -> Any:
        """A copy of what slot i holds on the device."""
        raise NotImplementedError

    def bring_back(self, i: int, kept: Any) -> None:
        """Restore the device state of a resumed sequence to its new slot i."""
        raise NotImplementedError

    def tokens(self, i: int) -> list[int]:
        """The current tokens of the sequence in slot i, on the host."""
        raise NotImplementedError

"""Running requests: their sequences and updates, and how they share one network.

Slots: the request with the fewest slots gets the next one, and a request with more slots than a waiting one gives one
back. Time: if a step with all sequences would take long, or there is a score to compute, the requests that have used
the network least since they came go first. So a request of a few tokens takes its ordinary time beside the largest
ones; those get the remaining time, and at least a turn now and then.

The first part of the module has the server's metrics, in the text format of Prometheus.
"""

import asyncio
import re
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from adlm.api.scoring import Parts
from adlm.engine import Frame, Request, Result
from adlm.serving.bodies import Problem
from adlm.serving.frames import AnchorGuess

# ---- metrics ---------------------------------------------------------------------------------------------------------
# Counters and a histogram in Prometheus' text format (version 0.0.4), which takes one page of code and no dependency.
#
# Workers and the event loop count at the same time, so every change takes a lock.

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 300.0)
Labels = tuple[str, ...]


class ServerMetrics:
    """The counters of the server. The service adds gauges."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.help: dict[str, tuple[str, str, Labels]] = {}
        self.values: dict[str, dict[Labels, float]] = {}
        self.buckets: dict[str, dict[Labels, list[float]]] = {}
        self.gauges: dict[str, Callable[[], Iterable[tuple[Labels, float]]]] = {}
        path, model = ("path",), ("model",)
        self.counter(
            "adlm_requests_total", "HTTP requests by route and status (499: the client left).", ("path", "status")
        )
        self.histogram(
            "adlm_request_seconds",
            "Time from the end of a request's head, before its body, to the end of its answer.",
            path,
        )
        self.counter(
            "adlm_rows_total", "Sequences by how they ended: finished, cancelled or failed.", ("model", "outcome")
        )
        self.counter("adlm_tokens_total", "Tokens drawn.", model)
        self.counter("adlm_evaluations_total", "Network evaluations of single sequences.", model)
        self.counter("adlm_steps_total", "Steps of the engine: each evaluates every sequence in a slot.", model)

    def counter(self, name: str, help: str, labels: Labels = ()) -> None:
        self.help[name], self.values[name] = ("counter", help, labels), {}

    def histogram(self, name: str, help: str, labels: Labels = ()) -> None:
        self.help[name], self.values[name], self.buckets[name] = ("histogram", help, labels), {}, {}

    def gauge(self, name: str, help: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """Add a value that is read whenever the metrics are requested."""
        self.help[name], self.gauges[name] = ("gauge", help, labels), read

    def add(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        with self.lock:
            self.values[name][labels] = self.values[name].get(labels, 0) + amount

    def observe(self, name: str, seconds: float, labels: Labels = ()) -> None:
        with self.lock:
            counts = self.buckets[name].setdefault(labels, [0.0] * (len(SECONDS) + 1))
            counts[bisect_left(SECONDS, seconds)] += 1
            self.values[name][labels] = self.values[name].get(labels, 0) + seconds

    def text(self) -> str:
        """All metrics, as the answer of `GET /metrics`."""
        lines = []
        with self.lock:
            for name, (kind, help, labels) in self.help.items():
                lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
                if kind == "gauge":
                    lines += [line(name, labels, at, value) for at, value in self.gauges[name]()]
                elif kind == "counter":
                    lines += [line(name, labels, at, value) for at, value in self.values[name].items()]
                else:
                    for at, counts in self.buckets[name].items():
                        below = 0.0
                        for edge, count in zip((*map(str, SECONDS), "+Inf"), counts):
                            below += count
                            lines.append(line(f"{name}_bucket", (*labels, "le"), (*at, edge), below))
                        lines.append(line(f"{name}_sum", labels, at, self.values[name][at]))
                        lines.append(line(f"{name}_count", labels, at, below))
        return "\n".join(lines) + "\n"


def line(name: str, labels: Labels, at: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{escape(text)}"' for label, text in zip(labels, at))
    return f"{name}{{{pairs}}} {value:.10g}" if pairs else f"{name} {value:.10g}"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def merged(own: str, others: list[str]) -> str:
    """The metrics of a front, and the sums of its workers' metrics for those that it does not count itself. All lines
    of one metric are together, as the format requires."""
    families: dict[str, tuple[dict[str, None], dict[str, float]]] = {}  # metric -> help lines, samples
    counted: set[str] = set()
    for number, text in enumerate((own, *others)):
        for line in text.splitlines():
            name = line.split()[2] if line.startswith("#") else re.sub(r"(_bucket|_sum|_count)?[{ ].*", "", line)
            heads, samples = families.setdefault(name, ({}, {}))
            if line.startswith("#"):
                heads[line] = None
            elif name not in counted:
                key, value = line.rsplit(" ", 1)
                samples[key] = samples.get(key, 0.0) + float(value)
        if number == 0:
            counted = {name for name, (_, samples) in families.items() if samples}
    lines: list[str] = []
    for heads, samples in families.values():
        lines += [*heads, *(f"{key} {value:.10g}" for key, value in samples.items())]
    return "\n".join(lines) + "\n"


# ---- jobs ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
# Seconds of network time by which a request may be ahead of another that waits for its turn or for a slot. Requests of
# a few tokens need less in all, so they never wait for each other.
TURN = 0.5
# Every so many seconds the request that has waited longest gets a turn, however much time it has had.
SPARED = 1.0


class Update(NamedTuple):
    """An update of one sequence of a job: a frame, or its result."""

    index: int
    """Index of the sequence in the job."""
    frame: Frame | None = None
    result: Result | None = None
    guesses: list[AnchorGuess] | None = None


class Job:
    """The sequences of one HTTP request. It belongs to the event loop; workers only post updates to it."""

    def __init__(self, requests: Sequence[Request], seconds: float, guesses: bool = False):
        self.requests = list(requests)
        self.seconds = seconds
        self.end = asyncio.get_running_loop().time() + seconds
        self.guesses = guesses
        self.updates: asyncio.Queue[Update | Problem] = asyncio.Queue()
        self.left = len(self.requests)
        """Sequences without a result."""
        self.open = set(range(len(self.requests)))
        """Sequences for which the reader of the updates still waits."""

    async def next(self) -> Update:
        """The next frame or result of an open sequence. Raises a Problem if the job has ended, if its time is over, or
        if a sequence was abandoned because of the request (such as bans that contradict each other)."""
        while True:
            try:
                async with asyncio.timeout_at(self.end):
                    update = await self.updates.get()
            except TimeoutError:
                raise out_of_time(self.seconds) from None
            if isinstance(update, Problem):
                raise update
            if update.index not in self.open:
                continue
            if update.result is not None:
                if update.result.problem:
                    raise Problem(400, update.result.problem)
                self.open.remove(update.index)
            return update

    async def results(self) -> AsyncIterator[tuple[int, Result]]:
        """(index, result) of every sequence, in the order in which they end."""
        while self.open:
            update = await self.next()
            if update.result is not None:
                yield update.index, update.result


async def within(seconds: float, end: float, answer: Awaitable[T]) -> T:
    """The answer; raises a timeout Problem if it does not come before `end`, `seconds` after the request."""
    try:
        async with asyncio.timeout_at(end):
            return await answer
    except TimeoutError:
        raise out_of_time(seconds) from None


def out_of_time(seconds: float) -> Problem:
    return Problem(504, f"the request took longer than {seconds:g} s (serve.timeout)", "timeout")


class Share:
    """One request's claim on the network: its work, and the time it has used. Only the thread touches it."""

    def __init__(
        self, job: Job | None = None, use: Parts[Any] | None = None, answer: asyncio.Future[Any] | None = None
    ):
        self.job, self.use, self.answer = job, use, answer
        self.had = 0.0
        """Seconds of network time so far."""
        self.last = time.monotonic()
        """Time of its last turn."""
        self.fresh = deque(range(len(job.requests) if job else 0))
        """Indices of sequences that have not begun."""
        self.paused: deque[int] = deque()
        """Engine ids of paused sequences."""
        self.seated: list[int] = []
        """Engine ids of sequences that have a slot, in the order in which they got it."""

    @property
    def waiting(self) -> bool:
        return bool(self.fresh or self.paused)

    @property
    def able(self) -> bool:
        """Whether it could use the network now."""
        return bool(self.seated or self.use)

    @property
    def over(self) -> bool:
        return self.use is None and not (self.waiting or self.seated)

    def forget(self, id: int) -> None:
        for ids in (self.seated, self.paused):
            if id in ids:
                ids.remove(id)


def next_seat(shares: Sequence[Share], free: int) -> tuple[Share, Share | None] | None:
    """The request that gets the next slot, and the request that gives it up (None if a slot is free). The first of the
    requests with the fewest slots gets it; if none is free, from one that has two more, or has had its one for long
    while the other has none. None: nothing changes."""
    wanting = [share for share in shares if share.waiting]
    if not wanting:
        return None
    share = min(wanting, key=lambda share: len(share.seated))
    if free:
        return share, None
    holder = max(shares, key=lambda share: (len(share.seated), share.had))
    more = len(holder.seated) - len(share.seated)
    long = not share.seated and holder.had > share.had + TURN
    return (share, holder) if more >= 2 or (more == 1 and long) else None


def take_part(shares: Sequence[Share], first: Share, sizes: Callable[[int], int], budget: int) -> list[int]:
    """Engine ids of the sequences in the next step: all, if they are few and there are no other uses; else those of
    `first`, whose turn it is, and of requests that have used about as little: the first sequence of each, then the
    second of each, up to `budget` tokens."""
    seated = [id for share in shares for id in share.seated]
    if not any(share.use for share in shares) and sum(map(sizes, seated)) <= budget:
        return seated
    found, left = [], budget
    near = [first, *(s for s in shares if s is not first and s.had < least_had(shares) + TURN)]
    for rank in range(max(len(share.seated) for share in near)):
        for share in near:
            if rank < len(share.seated):
                size = sizes(share.seated[rank])
                if found and size > left:
                    return found
                found.append(share.seated[rank])
                left -= size
    return found


def least_had(shares: Sequence[Share]) -> float:
    return min((share.had for share in shares if share.able), default=0.0)


def whose_turn(shares: Sequence[Share], spared: bool) -> Share | None:
    """The request that gets the next turn: the one with the least network time or, if `spared`, the longest wait."""
    able = [share for share in shares if share.able]
    return min(able, key=lambda share: share.last if spared else share.had, default=None)


def in_one_part(use: Callable[[], T]) -> Parts[T]:
    """A short use of the network, as a computation of one part."""
    return use()
    yield

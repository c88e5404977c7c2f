"""The thread that owns a model's engine; the event loop talks to it through an inbox and gets updates back in batches.

Nothing in the engine is shared: requests, cancellations and other uses of the network are functions put into the
inbox, run between two steps. A step evaluates every row that has a slot, so rows of any sampler and step share it, and
a row that arrives joins at the next step. Updates of a step cross to the loop in one call.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from adlm.api import LanguageModel
from adlm.engine import CausalEngine, Engine, Frame, Request, Result
from adlm.schema import SamplingConfig
from adlm.serving.guesses import Guess, best_guesses
from adlm.serving.metrics import Metrics
from adlm.serving.problems import Problem
from adlm.tables import SAMPLERS

log = logging.getLogger("adlm.serving")
T = TypeVar("T")
# Frames that wait for a slow reader; more are left out, and the next one shows what they showed.
BACKLOG = 64
# Frames of a row that carry the anchor network's guesses: each costs a pass of its own.
GUESSED_FRAMES = 32


class Update(NamedTuple):
    row: int
    """Which of the job's rows."""
    frame: Frame | None = None
    result: Result | None = None
    guesses: list[Guess] | None = None


class Job:
    """The rows of one HTTP request. Belongs to the event loop; workers only post to it."""

    def __init__(self, requests: Sequence[Request], seconds: float, guesses: bool = False):
        self.requests = list(requests)
        self.seconds = seconds
        self.end = asyncio.get_running_loop().time() + seconds
        self.guesses = guesses
        self.updates: asyncio.Queue[Update | Problem] = asyncio.Queue()
        self.left = len(self.requests)
        """Rows without a result."""

    async def next(self) -> Update:
        """The next frame or result; raises the Problem that ended the job, or that its time is over."""
        update = await within(self.seconds, self.end, self.updates.get())
        if isinstance(update, Problem):
            raise update
        return update

    async def results(self) -> AsyncIterator[tuple[int, Result]]:
        """(row, result) of every row, in the order they end."""
        for _ in self.requests:
            while (update := await self.next()).result is None:
                pass
            yield update.row, sound(update.result)


async def within(seconds: float, end: float, answer: Awaitable[T]) -> T:
    """The answer, or the Problem that it did not come before `end`, `seconds` after the request."""
    try:
        async with asyncio.timeout_at(end):
            return await answer
    except TimeoutError:
        raise Problem(504, f"the request took longer than {seconds:g} s (serve.timeout)", "timeout") from None


def sound(result: Result) -> Result:
    """The result, unless its row was given up: that is the request's fault (bans that contradict each other)."""
    if result.problem:
        raise Problem(400, result.problem)
    return result


class Worker:
    def __init__(self, name: str, lm: LanguageModel, slots: int, waiting: int, metrics: Metrics):
        self.name, self.lm, self.slots, self.waiting, self.metrics = name, lm, slots, waiting, metrics
        self.engine: Engine | CausalEngine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.inbox: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self.jobs: dict[int, tuple[Job, int]] = {}
        """Engine id -> job and its row. Only the thread touches it, as it does the next two."""
        self.frames: dict[int, int] = {}
        """Engine id -> frames seen."""
        self.stopping = False
        self.calls: set[asyncio.Future[Any]] = set()
        """Answers to other uses of the network that somebody waits for. Only the loop touches it."""
        self.taken = 0
        """Rows accepted and not ended, other uses of the network included. Only the loop changes it."""
        self.thread = threading.Thread(target=self.run, name=f"adlm-{name}", daemon=True)

    # From the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end after the step it is in; rows still there are forgotten."""

        def stop() -> bool:
            self.stopping = True
            return True

        self.inbox.put(stop)

    @property
    def undone(self) -> str:
        """What the thread is busy with, in words."""
        return f"{self.name}, " + ("starting" if self.engine is None else f"{self.taken} rows or scores")

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.thread.is_alive()

    @property
    def in_use(self) -> int:
        return 0 if self.engine is None else sum(s is not None for s in self.engine.slots)

    def running(self) -> Engine | CausalEngine:
        """The engine, if it runs."""
        if self.engine is None or not self.thread.is_alive():
            raise Problem(503, "the model is not ready", "not_ready", headers={"Retry-After": "5"})
        return self.engine

    def reserve(self, rows: int, admitted: bool = False) -> None:
        """Take places, or refuse: what may wait is bounded. What belongs to an `admitted` job is not refused: all that
        was done for the job would be lost."""
        self.running()
        if not admitted and self.taken + rows > self.slots + self.waiting:
            message = f"the queue is full (serve.queue={self.waiting}); try again later"
            raise Problem(429, message, "queue_full", headers={"Retry-After": "1"})
        self.taken += rows

    def check(self, requests: Iterable[Request]) -> None:
        """ValueError for what the engine would refuse; from any thread."""
        engine = self.running()
        for request in requests:
            engine.check(request)

    def submit(self, job: Job) -> None:
        """Queue the rows of a job; its updates follow. The caller must `cancel` a job that it gives up."""
        self.reserve(len(job.requests))
        self.inbox.put(lambda: self.take_in(job))

    def cancel(self, job: Job, row: int | None = None) -> None:
        """Free the slots of a job, or of one of its rows; harmless after their end."""
        if job.left:
            self.inbox.put(lambda: self.take_out(job, row))

    async def call(self, use: Callable[[], T], admitted: bool = False) -> T:
        """Another use of the network (a score), between two steps: it would compete for the same cores."""
        self.reserve(1, admitted)
        assert self.loop is not None
        loop, answer = self.loop, self.loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self.taken -= 1
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(value)

        def action() -> bool:
            value, error = None, None
            if not answer.done():
                try:
                    value = use()
                except Exception as problem:
                    error = problem
            self.post(loop, settle, value, error)
            return True

        self.calls.add(answer)
        answer.add_done_callback(self.calls.discard)
        self.inbox.put(action)
        return await answer

    def give_up_calls(self, problem: Problem) -> None:
        """Answer every `call` with the problem; one that runs goes on unheard."""
        for answer in list(self.calls):
            if not answer.done():
                answer.set_exception(problem)

    def deliver(self, updates: list[tuple[Job, Update | Problem]]) -> None:
        for job, update in updates:
            if isinstance(update, Update) and update.result is None:
                if job.updates.qsize() < BACKLOG:
                    job.updates.put_nowait(update)
                continue
            ended = 1 if isinstance(update, Update) else job.left
            job.left -= ended
            self.taken -= ended
            job.updates.put_nowait(update)

    # In the thread

    def run(self) -> None:
        try:
            self.engine = self.warm_up()
        except Exception:
            log.exception("%s: the engine could not be started", self.name)
            return
        while not self.stopping:
            self.read_inbox()
            if self.engine.busy and not self.stopping:
                self.step()

    def warm_up(self) -> Engine | CausalEngine:
        """The engine, after one row: on a GPU this is where the compiling is done."""
        engine = self.lm.engine(self.slots)
        if isinstance(engine, Engine):
            engine.network.warm_up()
        request = self.lm.request(steps=2) if not self.lm.model.config.causal else self.lm.request(length=2)
        list(engine.run([request]))
        return engine

    def read_inbox(self) -> None:
        """Everything that waits, but at most one long use of the network; waits itself if there is nothing to do."""
        assert self.engine is not None
        block = not self.engine.busy
        while True:
            try:
                action = self.inbox.get(block=block)
            except queue.Empty:
                return
            if action():
                return
            block = False

    def take_in(self, job: Job) -> bool:
        assert self.engine is not None
        for row, request in enumerate(job.requests):
            try:
                self.jobs[self.engine.submit(request)] = (job, row)
            except ValueError as problem:
                result = Result(0, list(request.tokens), request.seed, 0, 0.0, finished=False, problem=str(problem))
                self.post(self.loop, self.deliver, [(job, Update(row, result=result))])
        return False

    def take_out(self, job: Job, row: int | None) -> bool:
        assert self.engine is not None
        for id, (owner, number) in self.jobs.items():
            if owner is job and row in (None, number):
                self.engine.cancel(id)
        return False

    def step(self) -> None:
        assert self.engine is not None
        updates = None
        try:
            updates = self.engine.step()
        except Exception:
            log.exception("%s: a step failed; its rows are given up", self.name)
        if updates is None:  # not in the handler: there the traceback keeps the old engine in memory beside the new one
            self.give_up()
            return
        self.metrics.add("adlm_steps_total", 1, (self.name,))
        sent = []
        guesses: dict[int, list[Guess]] = {}
        try:
            guesses = self.guesses_of([u for u in updates if isinstance(u, Frame)])
        except Exception:  # an ornament: rows go on without it
            log.exception("%s: the anchor network's guesses failed; frames go without", self.name)
        for update in updates:
            job, row = self.jobs[update.id]
            if isinstance(update, Frame):
                sent.append((job, Update(row, frame=update, guesses=guesses.get(update.id))))
            else:
                self.count(update, job.requests[row])
                del self.jobs[update.id]
                self.frames.pop(update.id, None)
                sent.append((job, Update(row, result=update)))
        if sent:
            self.post(self.loop, self.deliver, sent)

    def guesses_of(self, frames: list[Frame]) -> dict[int, list[Guess]]:
        """Frames whose job wants them, at most GUESSED_FRAMES of a row's expected evaluations, evenly."""
        due = []
        for frame in frames:
            job, row = self.jobs[frame.id]
            if not job.guesses:
                continue
            number = self.frames[frame.id] = self.frames.get(frame.id, 0) + 1
            request = job.requests[row]
            holes = sum(t == self.lm.model.mask_id for t in request.tokens)
            every = max(1, -(-expected_evaluations(request.settings, holes) // GUESSED_FRAMES))
            if number % every == 0:
                due.append(frame)
        return dict(zip([f.id for f in due], best_guesses(self.lm, [f.tokens for f in due])))

    def count(self, result: Result, request: Request) -> None:
        outcome = "failed" if result.problem else "finished" if result.finished else "cancelled"
        drawn = sum(t == self.lm.model.mask_id for t in request.tokens[: len(result.tokens)])
        drawn -= result.tokens.count(self.lm.model.mask_id)
        self.metrics.add("adlm_rows_total", 1, (self.name, outcome))
        self.metrics.add("adlm_tokens_total", drawn, (self.name,))
        self.metrics.add("adlm_evaluations_total", result.nfe, (self.name,))

    def give_up(self) -> None:
        """After a failed step the engine's state is unknown: answer everybody, start a fresh one."""
        problem = Problem(500, "the engine failed while this request was running; try again", "engine_failed")
        jobs = {id(job): job for job, _ in self.jobs.values()}
        self.jobs.clear()
        self.frames.clear()
        self.engine = None
        self.lm.drop_engine()
        try:
            self.engine = self.lm.engine(self.slots)
        finally:  # not earlier: whoever tries again at once shall find it
            self.post(self.loop, self.deliver, [(job, problem) for job in jobs.values()])

    def post(self, loop: asyncio.AbstractEventLoop | None, function: Callable[..., None], *arguments: Any) -> None:
        assert loop is not None
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.stopping = True


def expected_evaluations(settings: SamplingConfig, holes: int) -> int:
    """About how many frames a row will have."""
    return settings.steps if SAMPLERS.load(settings.sampler).steps_matter else holes

"""The thread that owns a model's engine; the event loop talks to it through an inbox and gets updates back in batches.

Nothing in the engine is shared: requests, cancellations and other uses of the network are functions put into the
inbox, run between two steps. A step evaluates every sequence that has a slot, so sequences of any sampler and step
share it, and one that arrives joins at the next step. The updates of a step cross to the loop in one call.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from adlm.api import LanguageModel
from adlm.engine import CausalEngine, Engine, Frame, Request, Result
from adlm.engine.drawing import LOGITS_AT_ONCE
from adlm.serving.bodies import Problem
from adlm.serving.metrics import ServerMetrics
from adlm.tables import SAMPLERS

log = logging.getLogger("adlm.serving")
T = TypeVar("T")
# Frames that wait for a slow reader; more are left out, and the next one shows what they showed.
BACKLOG = 64
# Frames of a sequence that carry the anchor network's guesses: each costs a pass of its own.
GUESSED_FRAMES = 32


class AnchorGuess(NamedTuple):
    """What the anchor network would put into a hole."""

    position: int
    tokens: list[int]
    """Most probable first."""
    probabilities: list[float]


class Update(NamedTuple):
    """News of one sequence of a job: a frame, or its result."""

    index: int
    """Which of the job's sequences."""
    frame: Frame | None = None
    result: Result | None = None
    guesses: list[AnchorGuess] | None = None


class Job:
    """The sequences of one HTTP request. Belongs to the event loop; workers only post to it."""

    def __init__(self, requests: Sequence[Request], seconds: float, guesses: bool = False):
        self.requests = list(requests)
        self.seconds = seconds
        self.end = asyncio.get_running_loop().time() + seconds
        self.guesses = guesses
        self.updates: asyncio.Queue[Update | Problem] = asyncio.Queue()
        self.left = len(self.requests)
        """Sequences without a result."""
        self.open = set(range(len(self.requests)))
        """Sequences that the reader of the updates still waits for."""

    async def next(self) -> Update:
        """The next frame or result of an open sequence. Raises the Problem that ended the job, or that its time is
        over, or that a sequence was given up: that is the request's fault (bans that contradict each other)."""
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
        """(index, result) of every sequence, in the order they end."""
        while self.open:
            update = await self.next()
            if update.result is not None:
                yield update.index, update.result


async def within(seconds: float, end: float, answer: Awaitable[T]) -> T:
    """The answer, or the Problem that it did not come before `end`, `seconds` after the request."""
    try:
        async with asyncio.timeout_at(end):
            return await answer
    except TimeoutError:
        raise out_of_time(seconds) from None


def out_of_time(seconds: float) -> Problem:
    return Problem(504, f"the request took longer than {seconds:g} s (serve.timeout)", "timeout")


def not_ready() -> Problem:
    return Problem(503, "the model is not ready", "not_ready", headers={"Retry-After": "5"})


class Worker:
    """One model's thread, and what the event loop may ask of it."""

    def __init__(self, name: str, lm: LanguageModel, slots: int, waiting: int, metrics: ServerMetrics):
        self.name, self.lm, self.slots, self.waiting, self.metrics = name, lm, slots, waiting, metrics
        self.engine: Engine | CausalEngine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.inbox: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self.jobs: dict[int, tuple[Job, int]] = {}
        """Engine id -> job and the index of its sequence. Only the thread touches it, as it does the next two."""
        self.frames: dict[int, int] = {}
        """Engine id -> frames seen."""
        self.stopping = False
        self.calls: set[asyncio.Future[Any]] = set()
        """Answers to other uses of the network that somebody waits for. Only the loop touches it."""
        self.taken = 0
        """Sequences accepted and not ended, other uses of the network included. Only the loop changes it."""
        self.thread = threading.Thread(target=self.run, name=f"adlm-{name}", daemon=True)

    # From the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end after the step it is in; sequences still there are forgotten."""

        def stop() -> bool:
            self.stopping = True
            return True

        self.inbox.put(stop)

    @property
    def undone(self) -> str:
        """What the thread is busy with, in words."""
        return f"{self.name}, " + ("starting" if self.engine is None else f"{self.taken} sequences or scores")

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.thread.is_alive()

    @property
    def in_use(self) -> int:
        return 0 if self.engine is None else sum(s is not None for s in self.engine.slots)

    def check(self, request: Request) -> None:
        """Raise ValueError for what the engine would refuse, Problem if it does not run; from any thread."""
        engine = self.engine
        if engine is None or not self.thread.is_alive():
            raise not_ready()
        engine.check(request)

    def reserve(self, places: int, admitted: bool = False) -> None:
        """Take places, or refuse: what may wait is bounded. What belongs to an `admitted` job is not refused: all that
        was done for the job would be lost."""
        if self.engine is None or not self.thread.is_alive():
            raise not_ready()
        if not admitted and self.taken + places > self.slots + self.waiting:
            message = f"the queue is full (serve.queue={self.waiting}); try again later"
            raise Problem(429, message, "queue_full", headers={"Retry-After": "1"})
        self.taken += places

    def submit(self, job: Job) -> None:
        """Queue the sequences of a job; its updates follow. The caller must `cancel` a job that it gives up."""
        self.reserve(len(job.requests))
        self.inbox.put(lambda: self.take_in(job))

    def cancel(self, job: Job, index: int | None = None) -> None:
        """Free the slots of a job, or of one of its sequences; harmless after their end."""
        if job.left:
            self.inbox.put(lambda: self.take_out(job, index))

    async def call(self, use: Callable[[], T], admitted: bool = False) -> T:
        """Another use of the network (a score), between two steps: it would compete for the same cores."""
        self.reserve(1, admitted)
        assert self.loop is not None
        loop, answer = self.loop, self.loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
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
            self.post(loop, finish, value, error)
            return True

        self.calls.add(answer)
        answer.add_done_callback(self.calls.discard)
        self.inbox.put(action)
        return await answer

    def give_up_calls(self, problem: Problem) -> None:
        """Answer every `call` with the problem; the one that runs continues unheard."""
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
        """The engine, after one sequence: on a GPU this is where the compiling is done."""
        engine = self.lm.engine(self.slots)
        if isinstance(engine, Engine):
            engine.evaluator.warm_up()
        request = self.lm.request(steps=2) if not self.lm.model.config.causal else self.lm.request(length=2)
        list(engine.run([request]))
        return engine

    def read_inbox(self) -> None:
        """Do everything that waits, but at most one long use of the network; wait if there is nothing to do."""
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
        for index, request in enumerate(job.requests):
            try:
                self.jobs[self.engine.submit(request)] = (job, index)
            except ValueError as problem:
                result = Result(0, list(request.tokens), request.seed, 0, 0.0, finished=False, problem=str(problem))
                self.post(self.loop, self.deliver, [(job, Update(index, result=result))])
        return False

    def take_out(self, job: Job, index: int | None) -> bool:
        assert self.engine is not None
        for id, (owner, number) in self.jobs.items():
            if owner is job and index in (None, number):
                self.engine.cancel(id)
        return False

    def step(self) -> None:
        """Step the engine, count, and post what happened to the loop."""
        assert self.engine is not None
        updates = None
        try:
            updates = self.engine.step()
        except Exception:
            log.exception("%s: a step failed; its sequences are given up", self.name)
        if updates is None:  # not in the handler: there the traceback keeps the old engine in memory beside the new one
            self.give_up()
            return
        self.metrics.add("adlm_steps_total", 1, (self.name,))
        sent = []
        watched = [u for u in updates if isinstance(u, Frame) and self.jobs[u.id][0].guesses]
        guesses = self.guesses_of(watched) if watched else {}
        for update in updates:
            job, index = self.jobs[update.id]
            if isinstance(update, Frame):
                sent.append((job, Update(index, frame=update, guesses=guesses.get(update.id))))
            else:
                self.count(update, job.requests[index])
                del self.jobs[update.id]
                self.frames.pop(update.id, None)
                sent.append((job, Update(index, result=update)))
        if sent:
            self.post(self.loop, self.deliver, sent)

    def guesses_of(self, frames: list[Frame]) -> dict[int, list[AnchorGuess]]:
        """Engine id -> the anchor network's guesses, for some of the frames: at most GUESSED_FRAMES of a sequence's
        expected evaluations, evenly."""
        chosen = []
        for frame in frames:
            job, index = self.jobs[frame.id]
            number = self.frames[frame.id] = self.frames.get(frame.id, 0) + 1
            request = job.requests[index]
            holes = sum(t == self.lm.model.mask_id for t in request.tokens)
            steps_matter = SAMPLERS.load(request.settings.sampler).steps_matter
            expected = request.settings.steps if steps_matter else holes
            if number % max(1, -(-expected // GUESSED_FRAMES)) == 0:
                chosen.append(frame)
        try:
            return dict(zip([f.id for f in chosen], best_guesses(self.lm, [f.tokens for f in chosen])))
        except Exception:  # an ornament: sequences continue without it
            log.exception("%s: the anchor network's guesses failed; frames go without", self.name)
            return {}

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


@torch.inference_mode()
def best_guesses(lm: LanguageModel, canvases: list[list[int]], top: int = 1) -> list[list[AnchorGuess]]:
    """For every canvas, the anchor network's `top` tokens at each hole; canvases of one length share a pass.

    Only holes go through the head. Canvases longer than the model are read by their last window.
    """
    model, found = lm.model, [[] for _ in canvases]
    if model.anchor_head is None:
        return found
    length = model.config.length
    for size in sorted({min(len(c), length) for c in canvases}):
        members = [i for i, c in enumerate(canvases) if min(len(c), length) == size]
        tokens_BL = torch.tensor([canvases[i][-size:] for i in members], device=lm.device)
        at = (tokens_BL == model.mask_id).nonzero()
        if not len(at):
            continue
        anchor_BLD = model(tokens_BL, lm.noise_level(tokens_BL)).anchor_BLD
        assert anchor_BLD is not None
        for piece in at.split(max(1, LOGITS_AT_ONCE // model.vocab_size)):
            logits_NV = model.anchor_head(anchor_BLD[piece[:, 0], piece[:, 1]]).float()
            logits_NV[:, model.mask_id] = -torch.inf
            p, token = logits_NV.softmax(-1).topk(min(top, model.vocab_size - 1))
            for (b, l), tokens, probabilities in zip(piece.tolist(), token.tolist(), p.tolist()):
                i = members[b]
                found[i].append(AnchorGuess(len(canvases[i]) - size + l, tokens, probabilities))
    return found

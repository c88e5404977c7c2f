"""The thread that owns a model's engine; the event loop talks to it through an inbox and gets updates back in batches.

Nothing in the engine is shared between threads: requests, cancellations and other uses of the network are functions in
the inbox, which run between two steps. A step evaluates sequences of any sampler and step together; a new sequence
joins at the next step. All updates of a step go to the loop in one call.

Requests share the network fairly (jobs.py): their sequences are paused and resumed exactly, and scores come in parts,
one pass each.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from adlm.api import LanguageModel
from adlm.api.scoring import Parts
from adlm.engine import Engine, Frame, Request, Result, block_of
from adlm.serving.bodies import Problem
from adlm.serving.frames import FrameGuesses
from adlm.serving.jobs import SPARED, Job, ServerMetrics, Share, Update, next_seat, take_part, whose_turn

log = logging.getLogger("adlm.serving")
T = TypeVar("T")
# Work (parameters times tokens) of a step that others may wait for: about 0.1 s on one core, less on a GPU.
STEP_WORK = {"cpu": 6e9}
STEP_WORK_ELSEWHERE = 1e13
MATCHED = 5_000_000
"""Edges of an automaton times positions that take as long: constraints are computed on the CPU."""
# Most frames that wait for a slow reader; further ones are dropped, and the next frame includes their changes.
BACKLOG = 64
LONGEST_RETRY = 60
"""The largest Retry-After, in seconds."""


def not_ready() -> Problem:
    return Problem(503, "the model is not ready", "not_ready", headers={"Retry-After": "5"})


def matching_work(request: Request, length: int) -> int:
    """Edges of the constraint's automaton times positions: the work of a step of the sequence; 0 without one."""
    edges = 0 if request.constraint is None else len(request.constraint.automaton.source_E)
    return edges * min(len(request.tokens), length)


class Worker:
    """One model's thread, and its interface for the event loop."""

    def __init__(self, name: str, lm: LanguageModel, slots: int, waiting: int, metrics: ServerMetrics):
        self.name, self.lm, self.slots, self.waiting, self.metrics = name, lm, slots, waiting, metrics
        self.engine: Engine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.shares: list[Share] = []
        """Running requests, in the order in which they came. Only the thread touches it and the next three fields."""
        self.sequences: dict[int, tuple[Share, Job, int]] = {}
        """Engine id -> its share, its job, and its index in the job."""
        self.guesses = FrameGuesses(lm)
        self.spared = 0.0
        """Time of the last turn that went to the longest wait."""
        self.stopping = False
        parameters = sum(p.numel() for p in lm.model.parameters())
        work = STEP_WORK.get(lm.device.type, STEP_WORK_ELSEWHERE)
        self.budget = max(lm.length, int(work / parameters))
        """Tokens of a step that others may wait for."""
        self.calls: set[asyncio.Future[Any]] = set()
        """Pending answers to other uses of the network. Only the loop touches it."""
        self.taken = 0
        """Accepted sequences that have not ended, and other uses of the network. Only the loop changes it."""
        self.ends: deque[float] = deque(maxlen=64)
        """Times at which the last of them ended."""
        self.thread = threading.Thread(target=self.run, name=f"adlm-{name}", daemon=True)

    # From the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end after its current step; unfinished sequences are dropped."""

        def stop() -> None:
            self.stopping = True

        self.inbox.put(stop)

    @property
    def undone(self) -> str:
        """What the thread is doing, in words."""
        return f"{self.name}, " + ("starting" if self.engine is None else f"{self.taken} sequences or scores")

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.thread.is_alive()

    @property
    def in_use(self) -> int:
        return 0 if self.engine is None else sum(s is not None for s in self.engine.slots)

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that the engine would refuse, Problem if the engine does not run. May be
        called from any thread."""
        engine = self.engine
        if engine is None or not self.thread.is_alive():
            raise not_ready()
        engine.check(request)

    def reserve(self, places: int, admitted: bool = False) -> None:
        """Take places in the queue, or refuse if it is full. Work for an `admitted` job is never refused, since all
        that was done for the job would be lost."""
        if self.engine is None or not self.thread.is_alive():
            raise not_ready()
        if not admitted and self.taken + places > self.slots + self.waiting:
            message = f"the queue is full (serve.queue={self.waiting}); try again later"
            raise Problem(429, message, "queue_full", headers={"Retry-After": str(self.retry_after(places))})
        if not self.taken:
            self.ends.clear()
            self.ends.append(time.monotonic())
        self.taken += places

    def retry_after(self, places: int) -> int:
        """Seconds until that many places should be free, at the recent rate."""
        needed = self.taken + places - self.slots - self.waiting
        elapsed, ended = time.monotonic() - self.ends[0], len(self.ends) - 1
        return max(1, min(LONGEST_RETRY, math.ceil(needed * elapsed / max(1, ended))))

    def place(self, job: Job) -> int:
        """A request's place among those that wait for a first slot: 1 is next, 0 has one or need not wait. Changes that
        the thread makes meanwhile show at the next call."""
        if self.taken <= self.slots:
            return 0
        before = 0
        for share in list(self.shares):
            if share.job is job:
                return 0 if share.seated or not share.fresh else before + 1
            before += share.waiting and not share.seated
        return before + 1 if job.left else 0

    def submit(self, job: Job) -> None:
        """Queue the sequences of a job; its updates follow. The caller must `cancel` a job that it abandons."""
        self.reserve(len(job.requests))
        self.inbox.put(lambda: self.shares.append(Share(job)))

    def cancel(self, job: Job, index: int | None = None) -> None:
        """Free the slots of a job, or of one of its sequences; harmless after their end."""
        if job.left:
            self.inbox.put(lambda: self.take_out(job, index))

    async def call(self, use: Parts[T], admitted: bool = False) -> T:
        """Run another use of the network (a score), part by part between steps, since it needs the same cores."""
        self.reserve(1, admitted)
        assert self.loop is not None
        answer = self.loop.create_future()
        self.calls.add(answer)
        answer.add_done_callback(self.calls.discard)
        self.inbox.put(lambda: self.shares.append(Share(use=use, answer=answer)))
        return await answer

    def answer(self, answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self.free(1)
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(value)

    def free(self, places: int) -> None:
        self.taken -= places
        self.ends.extend([time.monotonic()] * places)

    def give_up_calls(self, problem: Problem) -> None:
        """Answer every `call` with the problem; the result of the running one is dropped."""
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
            self.free(ended)
            job.updates.put_nowait(update)

    # In the thread

    def run(self) -> None:
        began = time.perf_counter()
        log.info("%s: warming up", self.name)
        try:
            self.engine = self.warm_up()
        except Exception:
            log.exception("%s: the engine could not be started", self.name)
            return
        log.info("%s: ready after %.1f s", self.name, time.perf_counter() - began)
        while not self.stopping:
            self.read_inbox()
            if not self.stopping:
                self.turn()

    def warm_up(self) -> Engine:
        """The engine, after one sequence: on a GPU this compiles the network."""
        engine = self.lm.engine(self.slots)
        engine.evaluator.warm_up()
        request = self.lm.request(steps=2)
        if block := block_of(request, self.lm.model):  # one block
            request = self.lm.request(steps=2, length=max(2, min(block, self.lm.length)))
        list(engine.run([request]))
        return engine

    def read_inbox(self) -> None:
        """Run all waiting actions; if there is no work at all, wait for one."""
        block = not self.shares
        while True:
            try:
                action = self.inbox.get(block=block)
            except queue.Empty:
                return
            action()
            block = False

    def take_out(self, job: Job, index: int | None) -> None:
        """Cancel a job or one of its sequences. Sequences that have begun end with their results at the next step."""
        assert self.engine is not None
        for id, (_, owner, number) in self.sequences.items():
            if owner is job and index in (None, number):
                self.engine.cancel(id)
        for share in [share for share in self.shares if share.job is job]:
            for number in [number for number in share.fresh if index in (None, number)]:
                share.fresh.remove(number)
                self.refuse(job, number)
            if share.over:
                self.shares.remove(share)

    def refuse(self, job: Job, index: int, problem: str = "") -> None:
        """Post the result of a sequence that never began."""
        request = job.requests[index]
        result = Result(0, list(request.tokens), request.seed, 0, 0.0, finished=False, problem=problem)
        self.post(self.loop, self.deliver, [(job, Update(index, result=result))])

    def turn(self) -> None:
        """Give out slots; then run a step, or a part of another use, for the request whose turn it is."""
        assert self.engine is not None
        self.seat()
        now = time.monotonic()
        spared = now > self.spared + SPARED
        first = whose_turn(self.shares, spared)
        self.spared = now if spared else self.spared
        if first is not None and first.use is not None:
            first.last = now
            self.advance(first)
        elif first is not None or self.engine.cancelled:
            ids = take_part(self.shares, first, self.size, self.budget) if first is not None else []
            for id in ids:
                self.sequences[id][0].last = now
            self.step(ids)

    def size(self, id: int) -> int:
        """Tokens that the network reads in one evaluation of a sequence, plus the work of a constraint in tokens."""
        _, job, index = self.sequences[id]
        request = job.requests[index]
        matching = self.budget * matching_work(request, self.lm.length) // MATCHED
        return matching + (block_of(request, self.lm.model) or min(len(request.tokens), self.lm.length))

    def seat(self) -> None:
        """Give out slots. If admission takes long, the rest get theirs before the next step."""
        engine = self.engine
        assert engine is not None
        submitted = {id for id, _ in engine.waiting}  # these get their slots at the next step
        free, reading = engine.slots.count(None) - len(submitted), 0
        while (seat := next_seat(self.shares, free)) is not None and reading < self.budget:
            share, holder = seat
            if holder is None:
                free -= 1
            elif holder.seated[-1] in submitted:
                break
            else:
                holder.paused.append(holder.seated.pop())
                engine.pause(holder.paused[-1])
            if share.paused:
                share.seated.append(share.paused.popleft())
                engine.resume(share.seated[-1])
            else:
                reading += self.begin(share)
        self.shares = [share for share in self.shares if not share.over]

    def begin(self, share: Share) -> int:
        """Submit the next sequence of a request; return the number of tokens that the network reads to admit it."""
        assert self.engine is not None and share.job is not None
        index = share.fresh.popleft()
        request = share.job.requests[index]
        try:
            id = self.engine.submit(request)
        except ValueError as problem:
            self.refuse(share.job, index, str(problem))
            return 0
        self.sequences[id] = (share, share.job, index)
        share.seated.append(id)
        prompt = len(request.tokens) if block_of(request, self.lm.model) else 0
        return prompt + len(request.required) * len(request.tokens)

    def advance(self, share: Share) -> None:
        """Run the next part of another use of the network, unless its answer is no longer wanted."""
        assert share.use is not None and share.answer is not None
        began, value, error = time.perf_counter(), None, None
        try:
            if not share.answer.done():
                next(share.use)
                share.had += time.perf_counter() - began
                return
        except StopIteration as end:
            value = end.value
        except Exception as problem:
            error = problem
        self.shares.remove(share)
        self.post(self.loop, self.answer, share.answer, value, error)

    def step(self, ids: Collection[int]) -> None:
        """Step the engine, count, and post the updates to the loop."""
        assert self.engine is not None
        updates, began = None, time.perf_counter()
        mine = {id: self.sequences[id] for id in ids}
        self.guesses.watch(self.engine, {id: job.requests[i] for id, (_, job, i) in mine.items() if job.guesses})
        try:
            updates = self.engine.step(ids)
        except Exception:
            log.exception("%s: a step failed; its sequences are given up", self.name)
        if updates is None:  # not in the handler: its traceback would keep the old engine in memory beside the new
            self.give_up()
            return
        self.metrics.add("adlm_steps_total", 1, (self.name,))
        sent = []
        charge = (time.perf_counter() - began) / max(1, sum(map(self.size, ids)))
        for id in ids:
            self.sequences[id][0].had += charge * self.size(id)
        for update in updates:
            share, job, index = self.sequences[update.id]
            if isinstance(update, Frame):
                sent.append((job, Update(index, frame=update, guesses=self.guesses.found.get(update.id))))
                continue
            self.count(update, job.requests[index])
            del self.sequences[update.id]
            self.guesses.seen.pop(update.id, None)
            share.forget(update.id)
            sent.append((job, Update(index, result=update)))
        self.shares = [share for share in self.shares if not share.over]
        if sent:
            self.post(self.loop, self.deliver, sent)

    def count(self, result: Result, request: Request) -> None:
        outcome = "failed" if result.problem else "finished" if result.finished else "cancelled"
        drawn = sum(t == self.lm.model.mask_id for t in request.tokens[: len(result.tokens)])
        drawn -= result.tokens.count(self.lm.model.mask_id)
        self.metrics.add("adlm_rows_total", 1, (self.name, outcome))
        self.metrics.add("adlm_tokens_total", drawn, (self.name,))
        self.metrics.add("adlm_evaluations_total", result.nfe, (self.name,))

    def give_up(self) -> None:
        """Answer all requests with an error and start a new engine: after a failed step its state is unknown."""
        problem = Problem(500, "the engine failed while this request was running; try again", "engine_failed")
        failed = {id(share): share for share, _, _ in self.sequences.values()}
        jobs = [share.job for share in failed.values() if share.job is not None]
        self.shares = [share for share in self.shares if id(share) not in failed]
        self.sequences.clear()
        self.guesses.seen.clear()
        self.engine = None
        self.lm.drop_engine()
        try:
            self.engine = self.lm.engine(self.slots)
        finally:  # not earlier: a client that retries at once must find the new engine
            self.post(self.loop, self.deliver, [(job, problem) for job in jobs])

    def post(self, loop: asyncio.AbstractEventLoop | None, function: Callable[..., None], *arguments: Any) -> None:
        assert loop is not None
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            self.stopping = True

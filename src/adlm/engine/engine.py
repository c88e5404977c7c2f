"""Engines: sequences join, are worked on together, and leave; whatever sampler each uses, they share network calls.

`BaseEngine` is a queue and a table of slots, and does not depend on the kind of model. `Engine` fills the holes of
canvases with a diffusion model: a slot holds the canvas (on the device), the windows of its request, and the trajectory
of its sampler. A step evaluates the next event of every slot, whatever step of whatever sampler each is at. Sequences
of different length do not share a call: the network has no notion of padding, so results never depend on neighbours.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from adlm.diffusion.schedules import LogLinear, Schedule
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.engine.drawing import Draws, DrawSettings
from adlm.engine.evaluator import Call, Evaluator
from adlm.engine.request import Frame, Request, Result, Window, Windows, check_request, end_of_text, windows
from adlm.errors import require
from adlm.models import Network
from adlm.samplers.base import NOWHERE, Event, Prediction, Sampler, Trajectory, make_sampler
from adlm.schema import ObjectiveConfig

IDLE = Event(0, 0.0, NOWHERE, NOWHERE)


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
    """While it is paused: the sequence as it stands."""


S = TypeVar("S", bound=ActiveSequence)


class BaseEngine(Generic[S]):
    """A queue and a table of slots. Subclasses say how a slot is opened, stepped and read.

    `run` and `stream` may be used from any number of threads; `submit`, `cancel` and `step` are for one that owns the
    engine.
    """

    def __init__(self, model: Network, slots: int):
        require(slots >= 1, f"sampling.batch_size must be at least 1, got {slots}")
        self.model = model
        self.slots: list[S | None] = [None] * slots
        self.waiting: deque[tuple[int, Request]] = deque()
        self.paused: dict[int, S] = {}
        """Sequences that were taken out of their slots, to be resumed."""
        self.cancelled: set[int] = set()
        self.next_id = 0
        self.updates: list[Frame | Result] = []
        self.awaited: set[int] = set()
        """Sequences of iterators (`run`, `stream`) that are under way."""
        self.unread: list[Frame | Result] = []
        """What one iterator's step said of another one's sequences."""
        self.abandoned: deque[int] = deque()
        """Sequences of iterators that were given up, until somebody holds the lock."""
        self.lock = threading.Lock()

    def check(self, request: Request) -> None:
        """Refuse a bad request with a ValueError. Touches nothing that changes, so any thread may ask."""
        m = self.model
        check_request(request, m.vocab_size, m.mask_id, m.config.length)

    def submit(self, request: Request) -> int:
        """Queue a sequence; returns its id. Bad requests are refused here, not when a slot is free."""
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
        """Take a sequence out of its slot, for another one. Resumed, it continues as if nothing had happened."""
        i = next(i for i, s in enumerate(self.slots) if s is not None and s.id == id)
        active = self.active(i)
        active.stood, active.kept = self.tokens(i), self.keep(i)
        self.paused[id] = active
        self.slots[i] = None

    def resume(self, id: int) -> None:
        """Put a paused sequence into a free slot, whichever."""
        i = self.slots.index(None)
        active = self.slots[i] = self.paused.pop(id)
        self.bring_back(i, active.kept)
        active.kept = None

    def step(self, only: Collection[int] | None = None) -> list[Frame | Result]:
        """Admit sequences, evaluate each once, and report: Frames of watched ones, Results of ended ones. `only`: ids
        of those to evaluate; others keep their slots and stand still."""
        self.updates = []
        self.drop_cancelled()
        for i in range(len(self.slots)):
            while self.slots[i] is None and self.waiting:
                self.admit(i, *self.waiting.popleft())
        self.evaluate([i for i, s in enumerate(self.slots) if s is not None and (only is None or s.id in only)])
        return self.updates

    def run(self, requests: Iterable[Request], tick: Callable[[], None] = lambda: None) -> Iterator[Result]:
        """Results in the order they finish; requests are taken as slots become free, so there may be any number. `tick`
        is called after each step.

        Iterators, `stream` too, may be read in turn, and in several threads: each step works for all of them.
        Sequences of an iterator that is given up are dropped.
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
        """Frames of one sequence (if request.watch) and its Result."""
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
        """What is new of these sequences: what other iterators' steps have left, or else what a step says."""
        with self.lock:
            self.forget_abandoned()
            if not any(u.id in ids for u in self.unread):
                self.unread += [u for u in self.step() if u.id in self.awaited]
            found = [u for u in self.unread if u.id in ids]
            self.unread = [u for u in self.unread if u.id not in ids]
            self.awaited -= {u.id for u in found if isinstance(u, Result)}
            return found

    def drop(self, ids: set[int]) -> None:
        """Forget sequences without a Result: at once if the engine is idle, else before its next step. The garbage
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
        """The sequence in slot i, which is taken."""
        active = self.slots[i]
        assert active is not None
        return active

    # What a kind of model adds

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
        """Make slot i, in which a resumed sequence stands, hold what its slot held."""
        raise NotImplementedError

    def tokens(self, i: int) -> list[int]:
        """The sequence of slot i as it stands, on the host."""
        raise NotImplementedError


@dataclass(eq=False)
class Canvas(ActiveSequence):
    """A sequence whose holes are being filled, window after window."""

    sampler: Sampler = None  # type: ignore[assignment]
    windows: Windows = None  # type: ignore[assignment]
    window: Window = None  # type: ignore[assignment]
    trajectory: Trajectory = None  # type: ignore[assignment]
    event: Event = IDLE
    guided: bool = False
    open_fraction: float = 1.0
    """Fraction of the window's positions that are holes. A sampler's times are fractions of holes; what the network is
    conditioned on is the fraction of masks in all it reads, as in training."""


class Engine(BaseEngine[Canvas]):
    """The engine of diffusion models."""

    def __init__(
        self,
        model: Network,
        schedule: Schedule | None = None,
        slots: int = 16,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        compile: str = "auto",
        tau: int = ObjectiveConfig.tau,
    ):
        """`schedule` and `tau` are those the model was trained with (default log-linear, 5)."""
        require(not model.config.causal, "this engine fills holes; a causal model needs CausalEngine")
        super().__init__(model, slots)
        self.schedule = schedule or LogLinear()
        self.evaluator = Evaluator(model, self.schedule, slots, device, precision, compile, tau)

    def check(self, request: Request) -> None:
        super().check(request)
        misfit = make_sampler(request.settings, self.schedule).misfit(self.model.config)
        require(not misfit, f"sampling.sampler={request.settings.sampler!r} {misfit}")

    # The life of a sequence: admit, then open - advance ... advance - close for each of its windows

    def admit(self, i: int, id: int, request: Request) -> None:
        conversation = windows(request, self.evaluator.length, self.evaluator.mask_id)
        window = next(conversation)
        sampler = make_sampler(request.settings, self.schedule)
        canvas = Canvas(id, request, sampler=sampler, windows=conversation, window=window)
        self.slots[i] = canvas
        try:
            if request.required:
                window = conversation.send(self.place_required(canvas, window))
        except ValueError as problem:
            self.finish(i, list(request.tokens), finished=False, problem=str(problem))
        else:
            self.open(i, window)

    def open(self, i: int, window: Window) -> None:
        """Put a window into the slot and start its trajectory."""
        canvas = self.active(i)
        canvas.window = window
        self.evaluator.load(i, window.tokens, window.banned)
        holes = np.flatnonzero(np.array(window.tokens) == self.evaluator.mask_id)
        # where nothing is fixed there is nothing to hide: the second sequence would be the first one again
        canvas.guided = canvas.request.settings.guidance > 0 and len(holes) < len(window.tokens)
        # the release conditions on the sampler's time, whatever is given
        canvas.open_fraction = 1.0 if canvas.request.settings.parity else len(holes) / len(window.tokens)
        canvas.trajectory = canvas.sampler.trajectory(holes, window.seed)
        self.advance(i, None)

    def advance(self, i: int, prediction: Prediction | None) -> None:
        """Ask the sampler for the next event; at the end of the trajectory the window is done."""
        canvas = self.active(i)
        try:
            canvas.event = next(canvas.trajectory) if prediction is None else canvas.trajectory.send(prediction)
        except StopIteration:
            self.close(i, self.window_tokens(i))

    def close(self, i: int, tokens: list[int]) -> None:
        """Hand the filled window to the request's conversation, which asks for another one or ends."""
        canvas = self.active(i)
        try:
            window = canvas.windows.send(tokens)
        except StopIteration as end:
            self.finish(i, end.value)
        except ValueError as problem:
            self.finish(i, [*canvas.window.before, *tokens], finished=False, problem=str(problem))
        else:
            self.open(i, window)

    def window_tokens(self, i: int) -> list[int]:
        """The slot's canvas as the next evaluation would see it."""
        canvas = self.active(i)
        tokens = self.evaluator.read([i], len(canvas.window.tokens))[0]
        tokens[canvas.event.mask] = self.evaluator.mask_id
        return tokens.tolist()

    def tokens(self, i: int) -> list[int]:
        return [*self.active(i).window.before, *self.window_tokens(i)]

    def keep(self, i: int) -> torch.Tensor:
        return self.evaluator.canvas_SL[i, : len(self.active(i).window.tokens)].clone()

    def bring_back(self, i: int, kept: torch.Tensor) -> None:
        window = self.active(i).window
        self.evaluator.load(i, window.tokens, window.banned)  # which says what is fixed
        self.evaluator.canvas_SL[i, : len(kept)] = kept

    # One network call per length

    def evaluate(self, chosen: list[int]) -> None:
        lengths = {i: len(self.active(i).window.tokens) for i in chosen}
        for length in sorted(set(lengths.values())):
            self.evaluate_group([i for i in chosen if lengths[i] == length], length)

    def evaluate_group(self, group: list[int], length: int) -> None:
        canvases = [self.active(i) for i in group]
        reads = frozenset(c.sampler.reads for c in canvases) - {""}
        predicted = self.evaluator.evaluate(self.call(group, canvases, length), reads)
        ended = self.ended(group, canvases, length)
        drawn = [c.event.draw for c in canvases]
        stop = np.cumsum([len(d) for d in drawn])
        for i, canvas, d, b in zip(group, canvases, drawn, stop):
            canvas.nfe += 2 if canvas.guided else 1
            if i in ended:
                # all of the mask is after the end: the conversation drops it
                canvas.event = IDLE
                self.close(i, self.window_tokens(i))
                continue
            seen = None
            if canvas.sampler.reads:
                seen = Prediction(**{f: v[b - len(d) : b] for f, v in predicted._asdict().items() if v is not None})
            canvas.event = canvas.event._replace(mask=NOWHERE)
            before = len(canvas.window.before)  # of the window drawn in; the next may be open when the frame is made
            self.advance(i, seen)
            if canvas.request.watch and self.slots[i] is canvas:
                self.updates.append(self.frame(i, [before + l for l in d.tolist()]))

    def call(self, group: list[int], canvases: list[Canvas], length: int) -> Call:
        """The network call of a group of slots, as arrays."""
        events = [c.event for c in canvases]
        draws = Draws.of([draw_settings(i, c) for i, c in zip(group, canvases)], [e.draw for e in events])
        # A guided sequence takes part twice: as it is, and with its fixed positions hidden.
        n, guided = len(group), [k for k, c in enumerate(canvases) if c.guided]
        away = np.arange(n)
        away[guided] = n + np.arange(len(guided))
        t, open_fraction = np.array([(e.t, c.open_fraction) for e, c in zip(events, canvases)]).T
        return Call(
            length=length,
            slots=np.array([[*group, *(group[k] for k in guided)], [0] * n + [1] * len(guided)], dtype=np.int64),
            t=np.concatenate([t * open_fraction, 1 - (1 - t[guided]) * open_fraction[guided]]),
            mask=np.stack([np.repeat(group, [len(e.mask) for e in events]), np.concatenate([e.mask for e in events])]),
            source=np.repeat(np.stack([np.arange(n), away]), [len(e.draw) for e in events], axis=1),
            draws=draws,
        )

    def ended(self, group: list[int], canvases: list[Canvas], length: int) -> set[int]:
        """Slots whose text has ended: nothing before the end is open, and nothing there will be masked again."""
        # Samplers that read predictions leave guesses on the canvas until they have chosen.
        able = [c.request.stop_id is not None and c.sampler.writes_once and not c.sampler.reads for c in canvases]
        may = [(i, c) for i, c, a in zip(group, canvases, able) if a]
        if not may:
            return set()
        ended = set()
        for (i, canvas), tokens in zip(may, self.evaluator.read([i for i, _ in may], length).tolist()):
            first = canvas.window.first - len(canvas.window.before)
            end = end_of_text(tokens, canvas.request.stop_id, max(0, first), length)
            if end is not None and self.evaluator.mask_id not in tokens[:end]:
                ended.add(i)
        return ended

    def frame(self, i: int, drawn: list[int]) -> Frame:
        canvas, tokens = self.active(i), self.tokens(i)
        visible = [l for l in drawn if tokens[l] != self.evaluator.mask_id]
        return Frame(canvas.id, tokens, canvas.event.step, canvas.nfe, visible)

    def place_required(self, canvas: Canvas, window: Window) -> list[int]:
        """Fix each required word at a start drawn by the model's own probability of the word there, given the rest."""
        tokens, mask_id = list(window.tokens), self.evaluator.mask_id
        for k, word in enumerate(canvas.request.required):
            n = len(word)
            starts = [l for l in range(len(tokens) - n + 1) if all(t == mask_id for t in tokens[l : l + n])]
            require(bool(starts), f"required word number {k + 1} ({n} tokens) does not fit into the remaining holes")
            log_p = self.evaluator.word_log_probs(tokens, list(word), tokens.count(mask_id) / len(tokens))
            score = sum(log_p[np.array(starts) + j, j] for j in range(n))
            u = uniforms(window.seed, Stream.ORDER, k, torch.tensor(starts)).numpy()
            best = starts[int(np.argmax(score - np.log(-np.log(u))))]
            tokens[best : best + n] = list(word)
            canvas.nfe += 1
        return tokens


def draw_settings(slot: int, canvas: Canvas) -> DrawSettings:
    """How the next event of a slot draws."""
    event, s = canvas.event, canvas.request.settings
    settings = DrawSettings(slot, canvas.window.seed, event.step, s.parity == "release", guidance=s.guidance)
    if event.greedy:
        return settings._replace(temperature=0.0)
    if s.parity and not canvas.sampler.filtered_in_release:
        return settings
    return settings._replace(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)

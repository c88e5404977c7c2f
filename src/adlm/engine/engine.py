"""The engine fills the holes of canvases. Sequences with different samplers share network calls.

A slot holds a canvas (on the device), the windows of its request, and the trajectory of its sampler. A step evaluates
the next event of every slot; each may be at a different step of a different sampler. A canvas is read as a whole, or
block by block with a cache (blocks.py): causal models write blocks of one position. Canvases of different lengths that
are read as a whole do not share a call: the network knows no padding, so results never depend on neighbours.
"""

from dataclasses import dataclass

import numpy as np
import torch

from adlm.constrain.matching import Match
from adlm.diffusion.process import LogLinear, Schedule
from adlm.diffusion.random import Stream, uniforms
from adlm.engine.blocks import Kept, block_of
from adlm.engine.drawing import Draws, DrawSettings
from adlm.engine.evaluator import Call, Canvases, Evaluator
from adlm.engine.prepare import SEQUENCE_SIZES
from adlm.engine.request import Frame, Request, Window, Windows, check_request, end_of_text, windows
from adlm.engine.slots import ActiveSequence, BaseEngine
from adlm.errors import require
from adlm.models import Network
from adlm.samplers.base import NOWHERE, Event, Positions, Prediction, Sampler, Trajectory, make_sampler
from adlm.samplers.scheduled import LeftToRight
from adlm.schema import ObjectiveConfig

IDLE = Event(0, 0.0, NOWHERE, NOWHERE)


@dataclass(eq=False)
class Canvas(ActiveSequence):
    """A sequence whose holes are being filled, window after window."""

    sampler: Sampler = None  # type: ignore[assignment]
    windows: Windows = None  # type: ignore[assignment]
    window: Window = None  # type: ignore[assignment]
    trajectory: Trajectory = None  # type: ignore[assignment]
    event: Event = IDLE
    block: int = 0
    """Length of its blocks; 0: it is read as a whole."""
    open_fraction: float = 1.0
    """Fraction of the window's positions that are holes. A sampler's times are fractions of holes; the network is
    conditioned on the fraction of masks in everything it reads, as in training."""

    @property
    def start(self) -> int:
        """First position of the block in which the next event draws."""
        first = int(self.event.draw[0])
        return first - first % self.block


class Engine(BaseEngine[Canvas]):
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
        super().__init__(model, slots)
        self.schedule = schedule or LogLinear()
        self.evaluator = Evaluator(model, self.schedule, slots, device, precision, compile, tau)

    def check(self, request: Request) -> None:
        check_request(request, self.model.vocab_size, self.model.mask_id, self.model.config.length)
        block_of(request, self.model)
        misfit = "" if self.model.config.causal else self.sampler(request).misfit(self.model.config)
        require(not misfit, f"sampling.sampler={request.settings.sampler!r} {misfit}")

    def sampler(self, request: Request) -> Sampler:
        """The request's sampler; a causal model writes from left to right, whatever the request names."""
        if self.model.config.causal:
            return LeftToRight(request.settings, self.schedule)
        return make_sampler(request.settings, self.schedule)

    # The life of a sequence: admit, then open - advance ... advance - close for each of its windows

    def admit(self, i: int, id: int, request: Request) -> None:
        block, mask_id = block_of(request, self.model), self.evaluator.mask_id
        conversation = windows(request, self.evaluator.length, mask_id, block)
        window = next(conversation)
        canvas = Canvas(id, request, sampler=self.sampler(request), windows=conversation, window=window, block=block)
        self.slots[i] = canvas
        if block:
            tokens = list(request.tokens)
            first = tokens.index(mask_id)
            rest = min(-len(tokens) % block, self.evaluator.length - len(tokens))  # completes the last block: not drawn
            self.evaluator.load(i, tokens + [mask_id] * rest, window.banned)
            self.evaluator.blocks.admit(i, block, tokens[: first - first % block])
        elif "blocks" in vars(self.evaluator):
            self.evaluator.blocks.forget(i)
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
        self.evaluator.load(i, window.tokens, window.banned, window.at)
        holes = np.flatnonzero(np.array(window.tokens) == self.evaluator.mask_id) + window.at
        # the release conditions on the sampler's time, even if tokens are given
        canvas.open_fraction = 1.0 if canvas.request.settings.parity else len(holes) / len(window.tokens)
        if canvas.block:
            canvas.trajectory = canvas.sampler.in_blocks(holes, window.seed, canvas.block)
        else:
            canvas.trajectory = canvas.sampler.trajectory(holes, window.seed)
        if not self.advance(i, None):
            self.close(i, list(window.tokens))

    def advance(self, i: int, prediction: Prediction | None) -> bool:
        """Ask the sampler for the next event; False at the end of the trajectory."""
        canvas = self.active(i)
        try:
            canvas.event = next(canvas.trajectory) if prediction is None else canvas.trajectory.send(prediction)
        except StopIteration:
            return False
        return True

    def close(self, i: int, tokens: list[int]) -> None:
        """Send the filled window to the request's generator, which asks for another window or ends."""
        canvas = self.active(i)
        try:
            window = canvas.windows.send(tokens)
        except StopIteration as end:
            self.finish(i, end.value)
        except ValueError as problem:
            self.finish(i, [*canvas.window.before, *tokens], finished=False, problem=str(problem))
        else:
            self.open(i, window)

    def finish(self, i: int, tokens: list[int], finished: bool = True, problem: str = "") -> None:
        if self.active(i).block:  # a request that continues this text can reuse the cache
            self.evaluator.blocks.held[i].tokens = tokens
        super().finish(i, tokens, finished, problem)

    def window_tokens(self, i: int) -> list[int]:
        """The slot's window as the next evaluation would see it."""
        canvas = self.active(i)
        return self.as_seen(canvas, self.evaluator.read([i], [canvas.window.at], len(canvas.window.tokens))[0])

    def as_seen(self, canvas: Canvas, tokens: np.ndarray, at: int | None = None) -> list[int]:
        """Tokens of a canvas from position `at` on, as the next evaluation would see them."""
        again = canvas.event.mask - (canvas.window.at if at is None else at)
        tokens[again[(again >= 0) & (again < len(tokens))]] = self.evaluator.mask_id
        return tokens.tolist()

    def tokens(self, i: int) -> list[int]:
        canvas = self.active(i)
        if not canvas.block:
            return [*canvas.window.before, *self.window_tokens(i)]
        return self.as_seen(canvas, self.evaluator.read([i], [0], len(canvas.request.tokens))[0], at=0)

    def keep(self, i: int) -> tuple[torch.Tensor, Kept | None]:
        blocks = self.evaluator.blocks.keep(i) if self.active(i).block else None
        return self.evaluator.canvas_SL[i].clone(), blocks

    def bring_back(self, i: int, kept: tuple[torch.Tensor, Kept | None]) -> None:
        window, (canvas_L, blocks) = self.active(i).window, kept
        self.evaluator.load(i, window.tokens, window.banned, window.at)
        self.evaluator.canvas_SL[i] = canvas_L
        if blocks is not None:
            self.evaluator.blocks.bring_back(i, blocks)
        elif "blocks" in vars(self.evaluator):
            self.evaluator.blocks.forget(i)

    # One network call per length of canvases, and one for all blocks

    def evaluate(self, chosen: list[int]) -> None:
        matched = {i for i in chosen if self.active(i).request.constraint is not None}
        for alike in ([i for i in chosen if i not in matched], sorted(matched)):  # all constrained, or none
            lengths = {i: len(self.active(i).window.tokens) for i in alike if not self.active(i).block}
            for length in sorted(set(lengths.values())):
                group = [i for i in alike if lengths.get(i) == length]
                canvases = [self.active(i) for i in group]
                self.take_event(group, canvases, self.call(group, canvases, length))
            blocks = [i for i in alike if self.slots[i] is not None and i not in lengths]
            if blocks:
                self.evaluate_blocks(blocks)

    def evaluate_blocks(self, group: list[int]) -> None:
        starts = {i: self.active(i).start for i in group}
        reading, drawing = self.evaluator.blocks.plan(starts, SEQUENCE_SIZES)
        canvases = [self.active(i) for i in drawing]
        t_B = np.zeros(reading.rows.shape[1])
        t_B[drawing] = [c.event.t * c.open_fraction for c in canvases]
        places, matches = self.places(drawing, canvases)
        slot_N = np.repeat(np.array(drawing, dtype=np.int64), [len(p) for p in places])
        draws = draws_of(drawing, canvases, places)
        call = Call(reading, t_B, masks(drawing, canvases), slot_N, draws, matches)
        self.take_event(drawing, canvases, call)

    def call(self, group: list[int], canvases: list[Canvas], length: int) -> Call:
        """The network call of a group of canvases, as arrays."""
        places, matches = self.places(group, canvases)
        return Call(
            read=Canvases(length, np.array(group, dtype=np.int64)),
            t=np.array([c.event.t * c.open_fraction for c in canvases]),
            mask=masks(group, canvases),
            source=np.repeat(np.arange(len(group)), [len(p) for p in places]),
            draws=draws_of(group, canvases, places),
            matches=matches,
        )

    def places(self, group: list[int], canvases: list[Canvas]) -> tuple[list[Positions], tuple[Match, ...]]:
        """The positions at which predictions are needed, and what they must match. Those are the drawn positions, or
        all masked ones if the text must match a constraint."""
        if not canvases or canvases[0].request.constraint is None:
            return [c.event.draw for c in canvases], ()
        matches = [self.match(i, c) for i, c in zip(group, canvases)]
        return [m.masked + at for m, at in matches], tuple(m for m, _ in matches)

    def match(self, i: int, canvas: Canvas) -> tuple[Match, int]:
        """What the next event of slot i may draw, and the position on its canvas where that begins."""
        request, window, mask_id = canvas.request, canvas.window, self.evaluator.mask_id
        assert request.constraint is not None
        tokens = self.tokens(i)
        start = canvas.start if canvas.block else len(window.before)
        stop = min(start + canvas.block, len(tokens)) if canvas.block else len(tokens)
        whole = tokens + list(request.tokens[len(tokens) :])
        span = request.constraint.span(whole, request.tokens, mask_id, start, stop)
        masked = np.flatnonzero(np.array(tokens[start:stop]) == mask_id)
        at = start - len(window.before) + window.at
        return Match(span, tokens[start:stop], masked, np.isin(masked + at, canvas.event.draw)), at

    def take_event(self, group: list[int], canvases: list[Canvas], call: Call) -> None:
        """Run the call and send the samplers the predictions they read. Then move each slot to its next event or next
        window, or end its sequence."""
        predicted = self.evaluator.evaluate(call, frozenset(c.sampler.reads for c in canvases) - {""})
        shown, filled, asked, b = [], [], [], 0
        for i, canvas in zip(group, canvases):
            canvas.nfe += 1
            d, window, request, seen = canvas.event.draw, canvas.window, canvas.request, None
            b += len(d)
            if request.watch:
                shown.append((i, canvas, (d + len(window.before) - window.at).tolist()))
            if canvas.sampler.reads:
                seen = Prediction(**{f: v[b - len(d) : b] for f, v in predicted._asdict().items() if v is not None})
            start = window.at if request.stop_id is None or not canvas.block else canvas.start
            if not self.advance(i, seen):
                filled.append(i)
            elif request.stop_id is not None and self.certain(canvas, start):
                asked.append((i, start, canvas.block or len(window.tokens)))
        self.close_all(filled + self.ended(asked))
        self.updates += [self.frame(i, drawn) for i, canvas, drawn in shown if self.slots[i] is canvas]

    def certain(self, canvas: Canvas, start: int) -> bool:
        """Whether tokens drawn from `start` on are final: in a finished block, or on a canvas where nothing is masked
        again. Samplers that read predictions leave guesses on the canvas until they have chosen."""
        if canvas.block:
            return canvas.start != start
        return canvas.sampler.writes_once and not canvas.sampler.reads

    def ended(self, asked: list[tuple[int, int, int]]) -> list[int]:
        """The slots of (slot, position, length) whose text ends there, with no hole before the end."""
        found = []
        for length in {length for _, _, length in asked}:
            own = [(i, start) for i, start, n in asked if n == length]
            read = self.evaluator.read([i for i, _ in own], [start for _, start in own], length)
            for (i, start), tokens in zip(own, read.tolist()):
                canvas = self.active(i)
                first = canvas.window.first - len(canvas.window.before) + canvas.window.at - start
                end = end_of_text(tokens, canvas.request.stop_id, max(0, first), length)
                if end is not None and self.evaluator.mask_id not in tokens[:end]:
                    found.append(i)
        return found

    def close_all(self, slots: list[int]) -> None:
        """Close the windows of these slots, filled or ended early; canvases of one shape are read together."""
        shapes = {i: (self.active(i).window.at, len(self.active(i).window.tokens)) for i in slots}
        for at, length in set(shapes.values()):
            own = [i for i in slots if shapes[i] == (at, length)]
            for i, tokens in zip(own, self.evaluator.read(own, [at] * len(own), length)):
                self.active(i).event = IDLE  # it would mask positions after the end only, which are dropped
                self.close(i, tokens.tolist())

    def frame(self, i: int, drawn: list[int]) -> Frame:
        canvas, tokens = self.active(i), self.tokens(i)
        visible = [l for l in drawn if tokens[l] != self.evaluator.mask_id]
        step = canvas.nfe if canvas.block else canvas.event.step
        return Frame(canvas.id, tokens, step, canvas.nfe, visible, settled(canvas, len(tokens)))

    def place_required(self, canvas: Canvas, window: Window) -> list[int]:
        """Place each required word at a start drawn by the model's probability of the word there, given the rest."""
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


def settled(canvas: Canvas, length: int) -> int:
    """Number of positions, from the left, whose tokens are final once drawn."""
    r = canvas.request
    # A banned phrase is drawn again, and so is an end of text before the last required word.
    repaired = canvas.block != 1 and any(len(word) > 1 for word in r.banned)
    if canvas.sampler.writes_once and not repaired and not (r.required and r.stop_id is not None):
        return length
    return canvas.start if canvas.block else 0


def most_evaluations(request: Request, model: Network, schedule: Schedule) -> int:
    """Largest number of network evaluations that a request takes, without repairs."""
    s, block, mask_id = request.settings, block_of(request, model), model.mask_id
    sampler = make_sampler(s, schedule)
    steps = len(getattr(sampler, "t", ())) or s.steps  # a sampler with its own times may take more or fewer
    rates = getattr(sampler, "rates", None)
    if rates is not None and bool(rates.reveal[-1] < 1 or rates.remask[-1] > 0):
        steps += 1  # the filling step, for what the last one leaves masked
    size = block or len(request.tokens)
    holes = [list(request.tokens[a : a + size]).count(mask_id) for a in range(0, len(request.tokens), size)]
    if not sampler.steps_matter:
        each = holes
    elif sampler.writes_once and (sampler.always_keeps or not sampler.reads):  # a step that draws nothing costs nothing
        each = [min(steps, n) for n in holes]
    else:
        each = [steps * (n > 0) for n in holes]
    windows = 1 + max(0, -(-(len(request.tokens) - model.config.length) // s.stride)) if s.stride else 1
    return sum(each) * windows


def masks(group: list[int], canvases: list[Canvas]) -> np.ndarray:
    """[2, M]: slot and position of everything that the next events mask before the evaluation."""
    again = [c.event.mask for c in canvases]
    return np.stack(
        [np.repeat(np.array(group, dtype=np.int64), [len(m) for m in again]), np.concatenate([NOWHERE, *again])]
    )


def draws_of(group: list[int], canvases: list[Canvas], places: list[Positions]) -> Draws:
    return Draws.of([draw_settings(i, c) for i, c in zip(group, canvases)], places)


def draw_settings(slot: int, canvas: Canvas) -> DrawSettings:
    """How the next event of a slot draws."""
    event, s = canvas.event, canvas.request.settings
    filters = s.temperature, s.top_k, s.top_p, s.min_p
    if event.greedy:
        filters = 0.0, 0, 1.0, 0.0
    elif s.parity and not canvas.sampler.filtered_in_release:
        filters = 1.0, 0, 1.0, 0.0
    return DrawSettings(slot, canvas.window.seed, event.step, s.parity == "release", *filters)

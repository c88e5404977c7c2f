"""One engine for the command line, evaluation and the server: rows of any sampler share network calls.

A slot holds one row: its canvas (on the device), its conversation of windows, and the trajectory of its sampler. A step
of the engine evaluates the next event of every slot, whatever step of whatever sampler each is at. Rows of different
length do not share a call: the network has no notion of padding, so results never depend on neighbours.
"""

from dataclasses import dataclass

import numpy as np
import torch

from adlm.diffusion.schedules import LogLinear, Schedule
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.engine.drawing import Draws
from adlm.engine.evaluator import Batch, Evaluator
from adlm.engine.request import Frame, Request
from adlm.engine.rows import Row, Rows
from adlm.engine.windows import Window, Windows, end_of_text, windows
from adlm.errors import require
from adlm.models import Network
from adlm.samplers.base import NOWHERE, Event, Prediction, Sampler, Trajectory, make_sampler
from adlm.schema import ObjectiveConfig

IDLE = Event(0, 0.0, NOWHERE, NOWHERE)


@dataclass(eq=False)
class Canvas(Row):
    """A row whose holes are being filled."""

    sampler: Sampler = None  # type: ignore[assignment]
    windows: Windows = None  # type: ignore[assignment]
    window: Window = None  # type: ignore[assignment]
    trajectory: Trajectory = None  # type: ignore[assignment]
    event: Event = IDLE
    guided: bool = False


class Engine(Rows[Canvas]):
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
        """`schedule` and `tau` are those the model was trained with (default log-linear, 5); the rest: see Evaluator."""
        require(not model.config.causal, "this engine fills holes; a causal model needs CausalEngine")
        super().__init__(model, slots)
        self.schedule = schedule or LogLinear()
        self.evaluator = Evaluator(model, self.schedule, slots, device, precision, compile, tau)

    def row(self, i: int) -> Canvas:
        row = self.slots[i]
        assert row is not None
        return row

    def check(self, request: Request) -> None:
        super().check(request)
        misfit = make_sampler(request.settings, self.schedule).misfit(self.model.config)
        require(not misfit, f"sampling.sampler={request.settings.sampler!r} {misfit}")

    # A row's life: admit, then open - advance ... advance - close for each of its windows

    def admit(self, i: int, id: int, request: Request) -> None:
        conversation = windows(request, self.evaluator.length, self.evaluator.mask_id)
        window = next(conversation)
        sampler = make_sampler(request.settings, self.schedule)
        row = Canvas(id, request, sampler=sampler, windows=conversation, window=window)
        self.slots[i] = row
        try:
            if request.required:
                window = conversation.send(self.place_required(row, window))
        except ValueError as problem:
            self.finish(i, list(request.tokens), finished=False, problem=str(problem))
        else:
            self.open(i, window)

    def open(self, i: int, window: Window) -> None:
        """Put a canvas into the slot and start its trajectory."""
        row = self.row(i)
        row.window = window
        self.evaluator.load(i, window.tokens, window.banned)
        holes = np.flatnonzero(np.array(window.tokens) == self.evaluator.mask_id)
        # where nothing is fixed there is nothing to hide: the second row would be the first one again
        row.guided = row.request.settings.guidance > 0 and len(holes) < len(window.tokens)
        row.trajectory = row.sampler.trajectory(holes, window.seed)
        self.advance(i, None)

    def advance(self, i: int, prediction: Prediction | None) -> None:
        """Ask the sampler for the next event; at the end of the trajectory the window is done."""
        row = self.row(i)
        try:
            row.event = next(row.trajectory) if prediction is None else row.trajectory.send(prediction)
        except StopIteration:
            self.close(i, self.canvas(i))

    def close(self, i: int, tokens: list[int]) -> None:
        """Hand the filled canvas to the row's conversation, which asks for another one or ends."""
        row = self.row(i)
        try:
            window = row.windows.send(tokens)
        except StopIteration as end:
            self.finish(i, end.value)
        except ValueError as problem:
            self.finish(i, [*row.window.before, *tokens], finished=False, problem=str(problem))
        else:
            self.open(i, window)

    def canvas(self, i: int) -> list[int]:
        """The slot's canvas as the next evaluation would see it."""
        row = self.row(i)
        tokens = self.evaluator.read([i], len(row.window.tokens))[0]
        tokens[row.event.mask] = self.evaluator.mask_id
        return tokens.tolist()

    def tokens(self, i: int) -> list[int]:
        return [*self.row(i).window.before, *self.canvas(i)]

    # One network call per length

    def evaluate(self) -> None:
        lengths = {len(s.window.tokens) for s in self.slots if s is not None}
        for length in sorted(lengths):
            group = [i for i, s in enumerate(self.slots) if s is not None and len(s.window.tokens) == length]
            self.evaluate_group(group, length)

    def evaluate_group(self, group: list[int], length: int) -> None:
        rows = [self.row(i) for i in group]
        reads = frozenset(r.sampler.reads for r in rows) - {""}
        predicted = self.evaluator.evaluate(self.batch(group, rows, length), reads)
        ended = self.ended(group, rows, length)
        drawn = [r.event.draw for r in rows]
        stop = np.cumsum([len(d) for d in drawn])
        for i, row, d, b in zip(group, rows, drawn, stop):
            row.nfe += 2 if row.guided else 1
            if i in ended:
                # all of the mask is after the end: cut off by the conversation
                row.event = IDLE
                self.close(i, self.canvas(i))
                continue
            seen = None
            if row.sampler.reads:
                seen = Prediction(**{f: v[b - len(d) : b] for f, v in predicted._asdict().items() if v is not None})
            row.event = row.event._replace(mask=NOWHERE)
            before = len(row.window.before)  # of the window drawn in; the next may be open when the frame is made
            self.advance(i, seen)
            if row.request.watch and self.slots[i] is row:
                self.updates.append(self.frame(i, [before + l for l in d.tolist()]))

    def batch(self, group: list[int], rows: list[Canvas], length: int) -> Batch:
        """The call as arrays: each row's settings repeated for each of its draws."""
        events, settings = [r.event for r in rows], [r.request.settings for r in rows]
        uncut = [
            e.greedy or (c.parity != "" and not r.sampler.filtered_in_release)
            for r, e, c in zip(rows, events, settings)
        ]
        counts = [len(e.draw) for e in events]
        draws = Draws.of(
            counts,
            slot=group,
            position=np.concatenate([e.draw for e in events]),
            seed=[r.window.seed for r in rows],
            step=[e.step for e in events],
            top_k=[0 if u else c.top_k for u, c in zip(uncut, settings)],
            release=[c.parity == "release" for c in settings],
            temperature=[0.0 if e.greedy else 1.0 if u else c.temperature for e, u, c in zip(events, uncut, settings)],
            top_p=[1.0 if u else c.top_p for u, c in zip(uncut, settings)],
            min_p=[0.0 if u else c.min_p for u, c in zip(uncut, settings)],
            guidance=[c.guidance for c in settings],
        )
        # A guided row takes part twice: as it is, and with its fixed positions hidden.
        n, guided = len(group), [k for k, r in enumerate(rows) if r.guided]
        away = np.arange(n)
        away[guided] = n + np.arange(len(guided))
        t = np.array([e.t for e in events])
        return Batch(
            length=length,
            rows=np.array([[*group, *(group[k] for k in guided)], [0] * n + [1] * len(guided)], dtype=np.int64),
            t=np.concatenate([t, t[guided]]),
            mask=np.stack([np.repeat(group, [len(e.mask) for e in events]), np.concatenate([e.mask for e in events])]),
            source=np.repeat(np.stack([np.arange(n), away]), counts, axis=1),
            draws=draws,
        )

    def ended(self, group: list[int], rows: list[Canvas], length: int) -> set[int]:
        """Slots whose text has ended: nothing before the end is open, and nothing there will be masked again."""
        # Samplers that read predictions leave guesses on the canvas until they have chosen.
        able = [r.request.stop_id is not None and r.sampler.writes_once and not r.sampler.reads for r in rows]
        may = [(i, r) for i, r, a in zip(group, rows, able) if a]
        if not may:
            return set()
        ended = set()
        for (i, row), tokens in zip(may, self.evaluator.read([i for i, _ in may], length).tolist()):
            first = row.window.first - len(row.window.before)
            end = end_of_text(tokens, row.request.stop_id, max(0, first), length)
            if end is not None and self.evaluator.mask_id not in tokens[:end]:
                ended.add(i)
        return ended

    def frame(self, i: int, drawn: list[int]) -> Frame:
        row, tokens = self.row(i), self.tokens(i)
        visible = [l for l in drawn if tokens[l] != self.evaluator.mask_id]
        return Frame(row.id, tokens, row.event.step, row.nfe, visible)

    def place_required(self, row: Canvas, window: Window) -> list[int]:
        """Fix each required word at a start drawn by the model's own probability of the word there, given the row."""
        tokens, mask_id = list(window.tokens), self.evaluator.mask_id
        holes = tokens.count(mask_id)
        for k, word in enumerate(row.request.required):
            n = len(word)
            starts = [l for l in range(len(tokens) - n + 1) if all(t == mask_id for t in tokens[l : l + n])]
            require(bool(starts), f"required word number {k + 1} ({n} tokens) does not fit into the remaining holes")
            log_p = self.evaluator.word_log_probs(tokens, list(word), tokens.count(mask_id) / holes)
            score = sum(log_p[np.array(starts) + j, j] for j in range(n))
            u = uniforms(window.seed, Stream.ORDER, k, torch.tensor(starts)).numpy()
            best = starts[int(np.argmax(score - np.log(-np.log(u))))]
            tokens[best : best + n] = list(word)
            row.nfe += 1
        return tokens

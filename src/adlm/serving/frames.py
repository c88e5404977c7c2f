"""Canvases as server-sent events: the start of a text, the changes of each evaluation, and its end; and the anchor
network's guesses for holes.

A frame has the differences from the frame sent before it, so a frame that a slow reader missed is part of the next.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adlm.api import LanguageModel
from adlm.engine import Engine, Request, Result, block_of, most_evaluations
from adlm.engine.drawing import LOGITS_AT_ONCE, Head
from adlm.engine.evaluator import Call, Canvases
from adlm.objectives.anchors import counts_in_sequence
from adlm.serving.bodies import Problem
from adlm.tables import SAMPLERS

if TYPE_CHECKING:  # they need the guesses
    from adlm.serving.jobs import Job, Update
    from adlm.serving.service import Served

log = logging.getLogger("adlm.serving")
# Most frames of a sequence that have the anchor network's guesses: each costs a pass of its head.
GUESSED_FRAMES = 32
SURE = 0.3
"""Minimum probability of a guess that is sent."""
LOOKS_AT_THE_QUEUE = 0.1
"""Seconds between two looks at the place of a waiting request in the queue."""


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def counts(tokens: Sequence[int]) -> list[int]:
    """How often each token occurs in its sequence."""
    return counts_in_sequence(torch.tensor([list(tokens)]))[0].tolist() if len(tokens) else []


class Film:
    """The events of one text."""

    def __init__(self, served: "Served", request: Request):
        self.served, self.request = served, request
        self.mask = served.lm.model.mask_id
        self.canvas = list(request.tokens)
        self.texts = served.with_holes(self.canvas)[1]
        self.holes = self.canvas.count(self.mask)
        self.step = 0

    def start(self) -> str:
        r, lm = self.request, self.served.lm
        block = block_of(r, lm.model)
        tokens, texts = self.served.with_holes(r.tokens)
        tok = self.served.lm.tokenizer
        return event(
            "start",
            {
                "id": f"row-{secrets.token_hex(8)}",
                "model": self.served.id,
                "seed": r.seed,
                "sampler": r.settings.sampler,
                "steps": most_evaluations(r, lm.model, lm.schedule) if block else r.settings.steps,
                # for clients that count frames: one per hole without steps_matter, at most that with writes_once
                "steps_matter": SAMPLERS.load(r.settings.sampler).steps_matter,
                "writes_once": self.served.writes_once(r.settings),
                "block_length": block,
                "length": len(r.tokens),
                "tokens": tokens,
                "texts": texts,
                "longest": self.served.longest_token,
                "fixed": [l for l, t in enumerate(r.tokens) if t != self.mask],
                "special": sorted(tok.special_ids - {tok.mask_id}),
            },
        )

    def frame(self, update: "Update") -> str:
        """The changes since the last frame."""
        assert update.frame is not None
        self.step = update.frame.step
        guesses = [
            [g.position, g.tokens[0], self.served.piece(g.tokens[0]), round(g.probabilities[0], 4)]
            for g in update.guesses or []
        ]
        # A sequence longer than the model is written window by window; the rest is still unchanged.
        seen = update.frame.tokens
        return self.change([*seen, *self.request.tokens[len(seen) :]], update.frame.nfe, guesses)

    def change(self, tokens: list[int], nfe: int, guesses: list[list[Any]]) -> str:
        """A frame. A token also counts as changed if only its text changes, since a neighbour completed a character."""
        texts = self.served.with_holes(tokens)[1]
        changed = [l for l, t in enumerate(tokens) if (self.canvas[l], self.texts[l]) != (t, texts[l])]
        self.canvas, self.texts = list(tokens), texts
        return event(
            "frame",
            {
                "step": self.step,
                "nfe": nfe,
                "masked": round(tokens.count(self.mask) / self.holes, 4),
                "set": [[l, tokens[l], texts[l]] for l in changed if tokens[l] != self.mask],
                "unset": [l for l in changed if tokens[l] == self.mask],
                "anchors": guesses,
            },
        )

    def end(self, result: Result) -> list[str]:
        """The last change, and the whole text."""
        lm = self.served.lm
        if self.step != self.request.settings.steps:  # filling the rest after the last step is no new step
            self.step += 1
        whole = {
            "text": lm.text(result.tokens),
            "tokens": result.tokens,
            "texts": self.served.pieces(result.tokens),
            "nfe": result.nfe,
            "seconds": round(result.seconds, 4),
            "finished": result.finished,
            "counts": counts(result.tokens),
            "tau": lm.loaded.objective.tau,
        }
        return [self.change(result.tokens, result.nfe, []), event("end", whole)]


async def film(served: "Served", job: "Job") -> AsyncIterator[str]:
    """Events until the text is complete; an error is an event, too, since the status has already been sent."""
    shown = Film(served, job.requests[0])
    yield shown.start()
    try:
        async for place in queue_places(served, job):
            yield event("queue", {"position": place})
        while True:
            update = await job.next()
            if update.result is None:
                yield shown.frame(update)
                continue
            for text in shown.end(update.result):
                yield text
            return
    except Problem as problem:
        yield event("error", problem.body["error"] | {"status": problem.status})


async def queue_places(served: "Served", job: "Job") -> AsyncIterator[int]:
    """The job's place in the queue (1: next), whenever it changes, until its first update or its time limit."""
    loop, told = asyncio.get_running_loop(), 0
    while job.updates.empty() and loop.time() < job.end and (place := served.worker.place(job)):
        if place != told:
            yield place
        told = place
        await asyncio.sleep(LOOKS_AT_THE_QUEUE)


# The anchor network's guesses


class AnchorGuess(NamedTuple):
    """The anchor network's likeliest tokens for a hole."""

    position: int
    tokens: list[int]
    """Most probable first."""
    probabilities: list[float]


class FrameGuesses:
    """The anchor network's guesses, read in the pass that draws the next tokens, so they need no pass of their own. At
    most GUESSED_FRAMES of a sequence's expected evaluations are read, evenly spaced; guesses below SURE are omitted."""

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.seen: dict[int, int] = {}
        """Engine id -> number of evaluations so far."""
        self.found: dict[int, list[AnchorGuess]] = {}
        """Engine id -> guesses of the last step."""

    def watch(self, engine: Engine, watched: Mapping[int, Request]) -> None:
        """Read the next step's passes for those of the watched sequences (by engine id) that are due."""
        self.found = {}
        wanted = {id for id, request in watched.items() if self.due(id, request)}
        engine.evaluator.observer = self.observer(engine, wanted) if wanted else None

    def due(self, id: int, request: Request) -> bool:
        self.seen[id] = self.seen.get(id, 0) + 1
        holes = sum(t == self.lm.model.mask_id for t in request.tokens)
        steps_matter = SAMPLERS.load(request.settings.sampler).steps_matter
        expected = request.settings.steps if steps_matter else holes
        return (self.seen[id] - 1) % max(1, -(-expected // GUESSED_FRAMES)) == 0

    def observer(self, engine: Engine, wanted: set[int]):
        def read(call: Call, tokens_BL: Tensor, anchor_BLD: Tensor) -> None:
            if not isinstance(call.read, Canvases):  # a block is too short to show the order of tokens
                return
            try:
                for b, slot in enumerate(call.read.slots.tolist()):
                    canvas = engine.slots[slot]
                    if canvas is None or canvas.id not in wanted:
                        continue
                    head = self.lm.model.anchor_head
                    assert head is not None
                    at_N = (tokens_BL[b] == self.lm.model.mask_id).nonzero()[:, 0]
                    best = likeliest(head, anchor_BLD[b, at_N], self.lm.model.mask_id)
                    before = len(canvas.window.before)
                    self.found[canvas.id] = [
                        AnchorGuess(before + l, tokens, p)
                        for l, (tokens, p) in zip(at_N.tolist(), best)
                        if p[0] >= SURE
                    ]
            except Exception:  # guesses are optional: sequences continue without them
                log.exception("the anchor network's guesses failed; frames go without")

        return read


def likeliest(head: Head, hidden_ND: Tensor, mask_id: int, top: int = 1) -> list[tuple[list[int], list[float]]]:
    """For every hidden state, the `top` most probable tokens of the head, and their probabilities."""
    found: list[tuple[list[int], list[float]]] = []
    size: int = head.out_features  # type: ignore[attr-defined]
    for part_ND in hidden_ND.split(max(1, LOGITS_AT_ONCE // size)):
        logits_NV = head(part_ND.to(next(head.parameters()).dtype)).float()  # type: ignore[attr-defined]
        logits_NV[:, mask_id] = -torch.inf
        p, token = logits_NV.softmax(-1).topk(min(top, size - 1))
        found += zip(token.tolist(), p.tolist())
    return found


@torch.inference_mode()
def best_guesses(lm: LanguageModel, tokens: list[int], top: int = 1) -> list[AnchorGuess]:
    """The anchor network's `top` tokens at each hole, from a separate pass. Only holes go through the head. Of a canvas
    longer than the model, the last window is read."""
    model = lm.model
    if model.anchor_head is None:
        return []
    size = min(len(tokens), model.config.length)
    tokens_1L = torch.tensor([tokens[-size:]], device=lm.device)
    at_N = (tokens_1L[0] == model.mask_id).nonzero()[:, 0]
    if not len(at_N):
        return []
    anchor_1LD = model(tokens_1L, lm.noise_level(tokens_1L)).anchor_BLD
    assert anchor_1LD is not None
    best = likeliest(model.anchor_head, anchor_1LD[0, at_N], model.mask_id, top)
    return [AnchorGuess(len(tokens) - size + l, *found) for l, found in zip(at_N.tolist(), best)]

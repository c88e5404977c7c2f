"""Canvases as server-sent events: where a text starts, what changed in each evaluation, how it ended; and what the
anchor network would put into their holes.

Frames carry differences to the frame sent before, so one that was left out for a slow reader is contained in the next.
"""

import json
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from adlm.api import LanguageModel
from adlm.engine import Frame, Request, Result, block_of, most_evaluations
from adlm.engine.drawing import LOGITS_AT_ONCE
from adlm.objectives.anchors import counts_in_sequence
from adlm.serving.bodies import Problem
from adlm.tables import SAMPLERS

if TYPE_CHECKING:  # they need the guesses
    from adlm.serving.jobs import Job, Update
    from adlm.serving.service import Served

log = logging.getLogger("adlm.serving")
# Frames of a sequence that carry the anchor network's guesses: each costs a pass of its own.
GUESSED_FRAMES = 32


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
        self.holes = self.canvas.count(self.mask)
        self.step = 0

    def start(self) -> str:
        r, lm = self.request, self.served.lm
        block = block_of(r, lm.model)
        tokens, texts = self.served.with_holes(r.tokens)
        return event(
            "start",
            {
                "id": f"row-{secrets.token_hex(8)}",
                "model": self.served.id,
                "seed": r.seed,
                "sampler": r.settings.sampler,
                "steps": most_evaluations(r, lm.model, lm.schedule) if block else r.settings.steps,
                # for who counts frames: without the first there is one for each hole, with the second not more
                "steps_matter": SAMPLERS.load(r.settings.sampler).steps_matter,
                "writes_once": self.served.writes_once(r.settings),
                "block_length": block,
                "length": len(r.tokens),
                "tokens": tokens,
                "texts": texts,
                "fixed": [l for l, t in enumerate(r.tokens) if t != self.mask],
            },
        )

    def frame(self, update: "Update") -> str:
        """What changed since the last frame."""
        assert update.frame is not None
        self.step = update.frame.step
        guesses = [
            [g.position, g.tokens[0], self.served.piece(g.tokens[0]), round(g.probabilities[0], 4)]
            for g in update.guesses or []
        ]
        # A sequence longer than the model comes window by window: what is not reached yet is as it was.
        seen = update.frame.tokens
        return self.change([*seen, *self.request.tokens[len(seen) :]], update.frame.nfe, guesses)

    def change(self, tokens: list[int], nfe: int, guesses: list[list[Any]]) -> str:
        changed = [(l, t) for l, (was, t) in enumerate(zip(self.canvas, tokens)) if was != t]
        self.canvas = list(tokens)
        return event(
            "frame",
            {
                "step": self.step,
                "nfe": nfe,
                "masked": round(tokens.count(self.mask) / self.holes, 4),
                "set": [[l, t, self.served.piece(t)] for l, t in changed if t != self.mask],
                "unset": [l for l, t in changed if t == self.mask],
                "anchors": guesses,
            },
        )

    def end(self, result: Result) -> list[str]:
        """The last change, and the whole text."""
        lm = self.served.lm
        if self.step != self.request.settings.steps:  # filling what is left after the last step is not one more
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
    """Events until the text is whole; a problem is an event too, since the status has been sent."""
    shown = Film(served, job.requests[0])
    yield shown.start()
    try:
        while True:
            update = await job.next()
            if update.result is None:
                yield shown.frame(update)
                continue
            for text in shown.end(update.result):
                yield text
            return
    except Problem as problem:
        yield event("error", {"message": problem.message})


# The anchor network's guesses


class AnchorGuess(NamedTuple):
    """What the anchor network would put into a hole."""

    position: int
    tokens: list[int]
    """Most probable first."""
    probabilities: list[float]


class FrameGuesses:
    """The anchor network's guesses for some of the frames of each sequence: at most GUESSED_FRAMES of its expected
    evaluations, evenly."""

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.seen: dict[int, int] = {}
        """Engine id -> frames seen."""

    def of(self, frames: Sequence[tuple[Frame, Request]]) -> dict[int, list[AnchorGuess]]:
        """Engine id -> guesses."""
        chosen = []
        for frame, request in frames:
            number = self.seen[frame.id] = self.seen.get(frame.id, 0) + 1
            holes = sum(t == self.lm.model.mask_id for t in request.tokens)
            steps_matter = SAMPLERS.load(request.settings.sampler).steps_matter
            expected = request.settings.steps if steps_matter else holes
            if number % max(1, -(-expected // GUESSED_FRAMES)) == 0:
                chosen.append(frame)
        try:
            return dict(zip([f.id for f in chosen], best_guesses(self.lm, [f.tokens for f in chosen])))
        except Exception:  # an ornament: sequences continue without it
            log.exception("the anchor network's guesses failed; frames go without")
            return {}


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

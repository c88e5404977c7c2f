"""Canvases as server-sent events: where a text starts, what changed in each evaluation, how it ended.

Frames carry differences to the frame sent before, so one that was left out for a slow reader is contained in the next.
"""

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from adlm.engine import Request, Result
from adlm.objectives.anchors import counts_in_sequence
from adlm.serving.bodies import Problem
from adlm.serving.service import Served
from adlm.serving.worker import Job, Update
from adlm.tables import SAMPLERS


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def counts(tokens: Sequence[int]) -> list[int]:
    """How often each token occurs in its sequence."""
    return counts_in_sequence(torch.tensor([list(tokens)]))[0].tolist() if len(tokens) else []


class Film:
    """The events of one text."""

    def __init__(self, served: Served, request: Request):
        self.served, self.request = served, request
        self.mask = served.lm.model.mask_id
        self.canvas = list(request.tokens)
        self.holes = self.canvas.count(self.mask)
        self.step = 0

    def start(self) -> str:
        r = self.request
        tokens, texts = self.served.with_holes(r.tokens)
        return event(
            "start",
            {
                "id": f"row-{secrets.token_hex(8)}",
                "model": self.served.id,
                "seed": r.seed,
                "sampler": r.settings.sampler,
                "steps": r.settings.steps,
                # for who counts frames: without the first there is one for each hole, with the second not more
                "steps_matter": SAMPLERS.load(r.settings.sampler).steps_matter,
                "writes_once": self.served.writes_once(r.settings),
                "length": len(r.tokens),
                "tokens": tokens,
                "texts": texts,
                "fixed": [l for l, t in enumerate(r.tokens) if t != self.mask],
            },
        )

    def frame(self, update: Update) -> str:
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


async def film(served: Served, job: Job) -> AsyncIterator[str]:
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

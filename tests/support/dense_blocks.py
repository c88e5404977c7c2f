"""The slow, obvious reference implementation of generation in blocks: no cache, every prediction from the whole
[noisy ; clean] sequence with its full mask, one position after another."""

import math
from functools import lru_cache

import numpy as np
import torch

from adlm.diffusion.process import LogLinear
from adlm.diffusion.random import Stream, filter_logits, gumbel_argmax, uniforms
from adlm.engine import Request
from adlm.models import Network
from adlm.samplers.base import Prediction, make_sampler


class DenseBlocks:
    """Predictions of a network that reads blocks of K: for a canvas, those of the block that holds its first mask."""

    def __init__(self, model: Network, K: int):
        self.model, self.K, self.mask_id, self.vocab_size = model, K, model.mask_id, model.vocab_size
        self.states = lru_cache(maxsize=None)(self.states)
        self.p, self.anchor_p = (lru_cache(maxsize=None)(f) for f in (self.p, self.anchor_p))

    @torch.no_grad()
    def states(self, z: tuple[int, ...], start: int) -> list[torch.Tensor]:
        """States of denoiser and anchor network that predict each position of the block at `start`."""
        row = torch.tensor([*z, *[self.mask_id] * (self.model.config.length - len(z))])
        # no other block sees what is noisy, and what is clean from here on is seen by none before
        hidden = self.model(torch.cat([row, row])[None], block_B=torch.tensor([self.K]))
        return [h_1LD[0, start : start + self.K] for h_1LD in hidden if h_1LD is not None]

    def logits(self, z: tuple[int, ...], start: int, which: int = 0) -> torch.Tensor:
        """float32 [K, V], as the engine draws."""
        head = (self.model.head, self.model.anchor_head)[which]
        assert head is not None
        with torch.no_grad():
            return head(self.states(z, start)[which]).float()

    def block(self, z: tuple[int, ...]) -> int:
        first = z.index(self.mask_id)
        return first - first % self.K

    def p(self, z: tuple[int, ...]) -> list[list[float]]:
        """For `dense_loop.Walk`: prediction at every position of the canvas; only those of the block are numbers."""
        return self.probabilities(z, 0)

    def anchor_p(self, z: tuple[int, ...]) -> list[list[float]]:
        return self.probabilities(z, 1)

    def probabilities(self, z: tuple[int, ...], which: int) -> list[list[float]]:
        found = [[math.nan] * self.vocab_size for _ in z]
        if self.mask_id in z:
            start = self.block(z)
            logits = self.logits(z, start, which).double()
            logits[:, self.mask_id] = -torch.inf
            for l, p in zip(range(start, min(start + self.K, len(z))), logits.softmax(-1).tolist()):
                found[l] = p
        return found


def generate(dense: DenseBlocks, request: Request, tau: float = 5) -> list[int]:
    """The sequence of a request, block after block."""
    K, m, c = dense.K, dense.mask_id, request.settings
    row, first = list(request.tokens), list(request.tokens).index(m)
    sampler = make_sampler(c, LogLinear())
    for start in range(first - first % K, len(row), K):
        holes = np.array([l for l in range(start, min(start + K, len(row))) if row[l] == m])
        trajectory, seen = sampler.trajectory(holes, request.seed), None
        while True:
            try:
                event = next(trajectory) if seen is None else trajectory.send(seen)
            except StopIteration:
                break
            for l in event.mask:
                row[l] = m
            at = event.draw - start
            logits = dense.logits(tuple(row), start)[at]
            open_logits = logits.clone()
            open_logits[:, m] = -torch.inf
            log_p = filter_logits(open_logits, c.temperature, c.top_k, c.top_p, c.min_p)
            u = uniforms(
                request.seed,
                Stream.TOKEN,
                event.step,
                torch.from_numpy(event.draw)[:, None],
                torch.arange(len(log_p[0])),
            )
            token = gumbel_argmax(log_p, u)
            before = list(row)
            for l, v in zip(event.draw, token.tolist()):
                row[l] = v
            if sampler.reads:
                seen = look(dense, sampler.reads, before, start, event.draw, (logits, log_p, token), tau)
        ended = [l for l in range(max(first, start), min(start + K, len(row))) if row[l] == request.stop_id]
        if ended:
            return row[: ended[0] + 1]
    return row


def look(dense: DenseBlocks, what: str, before: list[int], start: int, drawn, found, tau: float) -> Prediction:
    logits, log_p, token = found
    m = dense.mask_id
    others = logits.clone()
    others[:, m] = -torch.inf
    p = others.double().softmax(-1)
    if what == "probability":
        value = log_p.exp()[torch.arange(len(token)), token]
    elif what == "confidence":
        value = p.amax(-1)
    elif what == "entropy":
        value = -(p * p.clamp(min=1e-300).log()).sum(-1)
    elif what == "normaliser":
        value = others.double().exp().sum(-1) / (len(p[0]) - 1)
    else:
        q = dense.logits(tuple(before), start, 1)[drawn - start].double()
        q[:, m] = -torch.inf
        q = q.softmax(-1)
        count = [sum(t == v for t in before if t != m) + float(q[:, v].sum()) for v in range(len(p[0]))]
        value = q.masked_fill(~(torch.tensor(count) <= tau), 0.0).amax(-1)
    return Prediction(**{what: value.double().numpy()})

"""What the two networks of an anchored model predict where anchors are hidden, as more and more of a text is hidden.

To hide a fraction r of a sequence, its maskable positions are put into a random order and hidden window by window, so
that every one of them is hidden at least once, with r of the others. At each hidden position both heads are read once
per window.

A network *finds* an anchor if the truth is its first guess; *recall* is the fraction of hidden anchors found. It
*claims* one where its first guess would be an anchor of the sequence it imagines (all holes filled with first guesses,
the same rule applied); *precision* is the fraction of claims that are right.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm.api import LanguageModel
from adlm.diffusion.schedules import Schedule, noise_level
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.io import progress
from adlm.models import Network
from adlm.objectives.anchors import anchor_rule
from adlm.schema import ObjectiveConfig

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
NETWORKS = ("anchor", "denoiser")


class Guesses(NamedTuple):
    """The likeliest tokens at a position with their probabilities, and where the true one stands (1: first)."""

    tokens: list[int]
    probabilities: list[float]
    rank: int
    probability: float
    """Probability of the true token."""


class Reading(NamedTuple):
    """What both networks predict at one hidden position."""

    position: int
    truth: int
    anchor: Guesses
    denoiser: Guesses


@torch.no_grad()
def read_hidden(model: Network, schedule: Schedule, tokens_L: Tensor, hidden_L: Tensor, top: int = 3) -> list[Reading]:
    """Mask the hidden positions of a clean sequence, run the model once, and read both heads there."""
    require(model.anchor_head is not None, "this model has no anchor network (model.anchored=false)")
    z_BL = torch.where(hidden_L, model.mask_id, tokens_L)[None]
    sigma_B = noise_level(hidden_L.float().mean()[None], schedule) if model.config.is_time_conditioned else None
    hidden = model(z_BL, sigma_B)
    positions = hidden_L.nonzero().squeeze(1)
    truth_N = tokens_L[positions]
    assert hidden.anchor_BLD is not None and model.anchor_head is not None
    denoiser_NV = model.head(hidden.denoiser_BLD[0, positions]).float()
    denoiser_NV[:, model.mask_id] = -torch.inf  # SUBS: a prediction is never the mask
    anchor = guesses(model.anchor_head(hidden.anchor_BLD[0, positions]).float(), truth_N, top)
    denoiser = guesses(denoiser_NV, truth_N, top)
    return [Reading(*reading) for reading in zip(positions.tolist(), truth_N.tolist(), anchor, denoiser)]


def guesses(logits_NV: Tensor, truth_N: Tensor, top: int) -> list[Guesses]:
    """The `top` likeliest tokens of each position, and the rank of the true one."""
    p_NV = logits_NV.softmax(-1)
    p_N = p_NV.gather(1, truth_N[:, None])
    rank_N = 1 + (p_NV > p_N).sum(-1)
    best = p_NV.topk(min(top, p_NV.shape[1]))
    columns = (best.indices.tolist(), best.values.tolist(), rank_N.tolist(), p_N.squeeze(1).tolist())
    return [Guesses(*found) for found in zip(*columns)]


def anchors_of(rule: ObjectiveConfig, tokens_L: Tensor) -> Tensor:
    """Which positions of a sequence are anchors, boolean [L]."""
    return anchor_rule(rule)(tokens_L[None], rule)[0]


@dataclass
class Tally:
    """One network at one fraction of masks."""

    ranks: list[int] = field(default_factory=list)
    """Where the truth stands at each hidden anchor (1: first)."""
    nats: list[float] = field(default_factory=list)
    claims: int = 0
    right_claims: int = 0

    @property
    def recall(self) -> float | None:
        return sum(r == 1 for r in self.ranks) / len(self.ranks) if self.ranks else None

    @property
    def precision(self) -> float | None:
        return self.right_claims / self.claims if self.claims else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "recall": self.recall,
            "median_rank": statistics.median(self.ranks) if self.ranks else None,
            "nats": statistics.fmean(self.nats) if self.nats else None,
            "hidden_anchors": len(self.ranks),
            "claims": self.claims,
        }


@dataclass
class Level:
    """Everything read at one fraction of masks."""

    fraction: float
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in NETWORKS})
    agree: list[bool] = field(default_factory=list)
    """At hidden anchors: do both networks have the same first guess?"""
    first: dict[int, Reading] = field(default_factory=dict)
    """The first reading of each anchor, by position in the text."""

    def add(
        self, rule: ObjectiveConfig, tokens_L: Tensor, anchors_L: Tensor, readings: list[Reading], offset: int
    ) -> None:
        """Count what both networks say of one window; `offset` is where the sequence begins in the text."""
        for name, tally in self.tallies.items():
            filled_L = tokens_L.clone()
            for reading in readings:
                filled_L[reading.position] = getattr(reading, name).tokens[0]
            claimed_L = anchors_of(rule, filled_L)
            for reading in readings:
                said: Guesses = getattr(reading, name)
                if anchors_L[reading.position]:
                    tally.ranks.append(said.rank)
                    tally.nats.append(-math.log(max(said.probability, 1e-30)))
                if claimed_L[reading.position]:
                    tally.claims += 1
                    tally.right_claims += said.rank == 1
        for reading in readings:
            if anchors_L[reading.position]:
                self.agree.append(reading.anchor.tokens[0] == reading.denoiser.tokens[0])
                self.first.setdefault(offset + reading.position, reading)

    def as_dict(self) -> dict[str, Any]:
        networks = {name: tally.as_dict() for name, tally in self.tallies.items()}
        return {"share": self.fraction, **networks, "agreement": statistics.fmean(self.agree) if self.agree else None}


def windows(maskable_L: Tensor, fraction: float, seed: int, turn: int) -> Iterator[Tensor]:
    """Boolean [L] masks of round(fraction * n) of the n maskable positions (at least one), which together cover all."""
    require(0 < fraction <= 1, f"a fraction of masks must lie in (0, 1], got {fraction}")
    positions = maskable_L.nonzero().squeeze(1)
    require(len(positions) > 0, "there is no position to hide: the text has only special tokens")
    order = positions[uniforms(seed, Stream.ORDER, turn, positions).argsort()]
    n = len(order)
    k = max(1, round(fraction * n))
    for start in range(0, math.ceil(n / k) * k, k):
        hidden_L = torch.zeros_like(maskable_L)
        hidden_L[order[(start + torch.arange(k)) % n]] = True
        yield hidden_L


def read_levels(
    lm: LanguageModel, rule: ObjectiveConfig, sequences: Sequence[Tensor], draws: int, seed: int
) -> list[Level]:
    """Hide every maskable position of every sequence of a text, `draws` times at each fraction, and read both
    networks. Every sequence begins with a token that is not of the text."""
    levels = [Level(fraction) for fraction in FRACTIONS]
    passes = sum(math.ceil(1 / level.fraction) for level in levels) * len(sequences) * draws
    with progress("reading", passes) as advance:
        for level in levels:
            for number, tokens_L in enumerate(sequences):
                special = [t in lm.tokenizer.special_ids for t in tokens_L.tolist()]
                tokens_L, maskable_L = tokens_L.to(lm.device), ~torch.tensor(special, device=lm.device)
                anchors_L = anchors_of(rule, tokens_L) & maskable_L
                for draw in range(draws):
                    for hidden_L in windows(maskable_L, level.fraction, seed, number * draws + draw):
                        readings = read_hidden(lm.model, lm.schedule, tokens_L, hidden_L)
                        level.add(rule, tokens_L, anchors_L, readings, number * (lm.length - 1) - 1)
                        advance()
    return levels

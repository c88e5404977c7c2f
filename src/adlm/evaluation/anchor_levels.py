"""How well both networks of an anchored model predict anchors, as more and more of a row is hidden.

At a share r of masks the maskable positions are put into a random order and hidden window by window, so that every one
of them is hidden at least once, with r of the others. At each hidden position both heads are read once per window.

A network *finds* an anchor if the truth is its first guess; *recall* is the share of hidden anchors found. It *claims*
one where its first guess would be an anchor of the row it imagines (all holes filled with first guesses, the same rule
applied); *precision* is the share of claims that are right.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adlm.diffusion.schedules import Schedule
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.evaluation.anchors import Guess, Reading, read_hidden
from adlm.models import Network
from adlm.objectives.anchors import find_anchors
from adlm.schema import ObjectiveConfig

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
NETWORKS = ("anchor", "denoiser")


@dataclass
class Tally:
    """One network at one share of masks."""

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
    """Everything read at one share of masks."""

    share: float
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in NETWORKS})
    agree: list[bool] = field(default_factory=list)
    """At hidden anchors: do both networks have the same first guess?"""
    first: dict[int, Reading] = field(default_factory=dict)
    """The first reading of each anchor, by position in the text."""

    def as_dict(self) -> dict[str, Any]:
        networks = {name: tally.as_dict() for name, tally in self.tallies.items()}
        return {"share": self.share, **networks, "agreement": statistics.fmean(self.agree) if self.agree else None}


def windows(maskable_L: Tensor, share: float, seed: int, turn: int) -> Iterator[Tensor]:
    """Boolean [L] masks of round(share * n) of the n maskable positions (at least one), which together cover all."""
    require(0 < share <= 1, f"a share of masks must lie in (0, 1], got {share}")
    positions = maskable_L.nonzero().squeeze(1)
    require(len(positions) > 0, "there is no position to hide: the text has only special tokens")
    order = positions[uniforms(seed, Stream.ORDER, turn, positions).argsort()]
    n = len(order)
    k = max(1, round(share * n))
    for start in range(0, math.ceil(n / k) * k, k):
        hidden_L = torch.zeros_like(maskable_L)
        hidden_L[order[(start + torch.arange(k)) % n]] = True
        yield hidden_L


def read_level(
    level: Level, model: Network, schedule: Schedule, rule: ObjectiveConfig, tokens_L: Tensor, maskable_L: Tensor,
    offset: int, seed: int, turn: int,
) -> None:  # fmt: skip
    """Hide every maskable position of one row at this share, and add what both networks say; `offset` is where the row
    begins in the text."""
    anchors_L = anchors_of(rule, tokens_L) & maskable_L
    for hidden_L in windows(maskable_L, level.share, seed, turn):
        readings = read_hidden(model, schedule, tokens_L, hidden_L)
        for name, tally in level.tallies.items():
            claimed_L = claims(rule, tokens_L, name, readings)
            for reading in readings:
                guess: Guess = getattr(reading, name)
                if anchors_L[reading.position]:
                    tally.ranks.append(guess.rank)
                    tally.nats.append(-math.log(max(guess.probability, 1e-30)))
                if claimed_L[reading.position]:
                    tally.claims += 1
                    tally.right_claims += guess.rank == 1
        for reading in readings:
            if anchors_L[reading.position]:
                level.agree.append(reading.anchor.tokens[0] == reading.denoiser.tokens[0])
                level.first.setdefault(offset + reading.position, reading)


def anchors_of(rule: ObjectiveConfig, tokens_L: Tensor) -> Tensor:
    return find_anchors(tokens_L[None], rule)[0]


def claims(rule: ObjectiveConfig, tokens_L: Tensor, network: str, readings: list[Reading]) -> Tensor:
    """Anchors of the row in which the network's first guesses fill the holes."""
    filled_L = tokens_L.clone()
    for reading in readings:
        filled_L[reading.position] = getattr(reading, network).tokens[0]
    return anchors_of(rule, filled_L)

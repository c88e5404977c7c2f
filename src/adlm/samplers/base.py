"""The interface of samplers: a sampler decides which positions change, never which tokens they become.

In every masked-diffusion sampler of this package the choices of positions and of tokens are separate. So a sampler
yields events for the holes of one canvas - "mask these positions, evaluate the network, draw those" - and the engine
does the rest (network, filters, draw), for sequences with different samplers at once. A sampler that needs predictions
names them in `reads` and is sent a `Prediction` after each event. It may then mask again what it does not accept, so
acceptance needs no mechanism of its own. A step that draws nothing is no event, and costs no network evaluation.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adlm import tables
from adlm.diffusion.process import Schedule
from adlm.diffusion.random import Stream, uniforms
from adlm.errors import require
from adlm.objectives.base import Objective
from adlm.schema import ModelConfig, ObjectiveConfig, SamplingConfig

Positions = NDArray[np.int64]
NOWHERE: Positions = np.empty(0, dtype=np.int64)


class Event(NamedTuple):
    """One network evaluation of one canvas."""

    step: int
    """Number of the step; it is also a counter of the sequence's random draws."""
    t: float
    """Expected fraction of the holes that are masked; time-conditioned models are conditioned on it."""
    mask: Positions
    """Positions to mask before the evaluation: masked again since the last event."""
    draw: Positions
    """Positions to draw, from p(x0 | canvas); never empty."""
    greedy: bool = False
    """Take the most probable token instead of drawing (the release's last step)."""


class Prediction(NamedTuple):
    """What the network predicted at the drawn positions, in their order; None where the sampler did not ask."""

    probability: NDArray[np.float64] | None = None
    """Probability of the token that was drawn, under the distribution it was drawn from."""
    confidence: NDArray[np.float64] | None = None
    """Probability of the most probable token, before temperature and filters."""
    entropy: NDArray[np.float64] | None = None
    """Entropy of the prediction before temperature and filters, in nats."""
    anchor: NDArray[np.float64] | None = None
    """Largest probability that the anchor network gives to a token that is rare in this sequence."""
    normaliser: NDArray[np.float64] | None = None
    """Sum of e^logit over all tokens but the mask, divided by their number: 1 for a score that is normalised."""


Trajectory = Generator[Event, Prediction | None, None]


class Sampler:
    """Base class of samplers. A subclass writes `trajectory`, and the class attributes in which it differs."""

    reads: str = ""
    """Field of `Prediction` that is needed after each event; empty: none, and the host never waits for the device."""
    writes_once: bool = True
    """A token that was drawn and kept is never masked again."""
    always_keeps: bool = False
    """Every evaluation keeps at least one of the tokens it draws; set only by samplers that read predictions."""
    steps_matter: bool = True
    """sampling.steps changes what is drawn; False: one evaluation per hole, whatever its value."""
    causal: bool = False
    """It draws from causal models, too."""
    in_release: bool = True
    """The public release has this sampler, so sampling.parity=release applies."""
    filtered_in_release: bool = True
    """The release applies its nucleus (top-p) filter to what this sampler draws from."""

    def __init__(self, cfg: SamplingConfig, schedule: Schedule):
        """`schedule` is the masking schedule that the model was trained with."""
        self.cfg, self.schedule = cfg, schedule

    @classmethod
    def check(cls, cfg: SamplingConfig) -> None:
        """Refuse settings that do not fit together. For samplers of other packages (ours: SamplingConfig.check)."""

    @classmethod
    def misfit(cls, model: ModelConfig, learns_score: bool = True) -> str:
        """Say why this sampler cannot draw from a model; empty if it can. `learns_score`: see `Objective`."""
        if model.causal and not cls.causal:
            return "needs a diffusion model; a causal one has 'autoregressive'"
        if cls.reads == "anchor" and not model.anchored:
            return "needs a model with an anchor network (model.anchored=true)"
        if cls.reads == "normaliser" and not learns_score:
            return "needs a model that learned a score (algo=sedd); others have 'analytic'"
        return ""

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        """Yield the events of a sequence whose positions `holes` are masked; its other positions are fixed."""
        raise NotImplementedError

    def in_blocks(self, holes: Positions, seed: int, block: int) -> Trajectory:
        """Yield the events of a sequence that is filled in blocks of `block` positions: a trajectory for the holes of
        each, one block after the other."""
        for own in np.split(holes, np.flatnonzero(np.diff(holes // block)) + 1):
            yield from self.trajectory(own, seed)


IN_BLOCKS = "confidence"
"""The default sampler of models that write in blocks: a third of mdlm's judged perplexity at the same entropy, for 16
evaluations of a block in place of 10 (docs/results.md)."""


def with_sampler(cfg: SamplingConfig, objective: ObjectiveConfig, model: ModelConfig) -> SamplingConfig:
    """The settings for a model trained with `objective`: if they name no sampler, the default is filled in. All code
    that draws from a model calls this."""
    in_blocks = any(1 < K < model.length for K in model.block_lengths)
    default = IN_BLOCKS if in_blocks else tables.OBJECTIVES.load(objective.name).sampler
    return replace(cfg, sampler=cfg.sampler or default)


def make_sampler(cfg: SamplingConfig, schedule: Schedule) -> Sampler:
    """Build the sampler of sampling.sampler; refuse settings that do not fit together. An empty name means masked
    diffusion's default, since the model is not known here (`with_sampler` knows it)."""
    kind: type[Sampler] = tables.SAMPLERS.load(cfg.sampler or Objective.sampler, "sampling.sampler")
    cfg.check()
    require(
        not cfg.parity or kind.in_release,
        f"sampling.parity=release: the release has no sampler {cfg.sampler!r}; leave sampling.parity empty",
    )
    with torch.no_grad():
        return kind(cfg, schedule)


def draw_uniforms(seed: int, stream: Stream, turn: int, positions: Positions) -> NDArray[np.float64]:
    """One uniform per position; `turn` separates the draws of one stream."""
    return uniforms(seed, stream, turn, torch.from_numpy(positions)).numpy()

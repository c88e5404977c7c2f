"""Objectives: what a network is trained on. Adding one = one file, one line of OBJECTIVES, one YAML, one law test."""

from collections.abc import Callable

from torch import Tensor

from adlm.diffusion.schedules import make_schedule
from adlm.errors import choose
from adlm.objectives.anelbo import Anelbo
from adlm.objectives.autoregressive import Autoregressive
from adlm.objectives.base import LossOutput, Objective, Rows, Task, Term, loss, row_bounds
from adlm.objectives.d3pm import D3pm
from adlm.objectives.nelbo import Nelbo
from adlm.objectives.score_entropy import ScoreEntropy
from adlm.schema import NoiseConfig, ObjectiveConfig

__all__ = [
    "OBJECTIVES",
    "SUBS_OBJECTIVES",
    "LossOutput",
    "Objective",
    "Rows",
    "Task",
    "Term",
    "loss",
    "make_objective",
    "row_bounds",
]

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "nelbo": lambda cfg, schedule, mask_id, seed, share_V: Nelbo(cfg, schedule, mask_id, seed),
    "anelbo": Anelbo,
    "score-entropy": lambda cfg, schedule, mask_id, seed, share_V: ScoreEntropy(cfg, schedule, mask_id, seed),
    "d3pm": lambda cfg, schedule, mask_id, seed, share_V: D3pm(cfg, schedule, mask_id, seed),
    "autoregressive": lambda cfg, schedule, mask_id, seed, share_V: Autoregressive(cfg, mask_id, seed, share_V),
}
# Those whose head is the probability of the token at a mask (SUBS); the others have bounds of their own.
SUBS_OBJECTIVES = ("nelbo", "anelbo")


def make_objective(
    cfg: ObjectiveConfig, noise: NoiseConfig, mask_id: int, seed: int, share_V: Tensor | None = None
) -> Objective:
    """`share_V`: share of each token in the training corpus, for objective.anchor_rule=rarity."""
    build = OBJECTIVES[choose("objective.name", cfg.name, OBJECTIVES)]
    return build(cfg, make_schedule(noise), mask_id, seed, share_V)

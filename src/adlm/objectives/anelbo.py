"""ANELBO (Eq. 7, Theorem 4.1): the NELBO through both networks + gamma * the anchor network's own cross-entropy.

The anchor term has the same weight w(t) and acts where the rule A(x) says anchor: at every such position, visible ones
included, as in the release (anchor_positions=all), or at masked ones only. It is a plain softmax over all V entries,
without SUBS. gamma is a function of the step (`gamma_at`). Perplexity never contains it.
"""

from collections.abc import Callable

from torch import Tensor

from adlm.diffusion.schedules import Schedule
from adlm.errors import choose, require
from adlm.objectives.anchors import anchor_floor, draw_share, make_anchor_rule
from adlm.objectives.base import Rows, Task, Term, count_tokens
from adlm.objectives.nelbo import Nelbo
from adlm.schema import ModelConfig, ObjectiveConfig

ANCHOR_POSITIONS = ("all", "masked")


def gamma_at(cfg: ObjectiveConfig, progress: float) -> float:
    """Up a straight line from 0 to gamma at gamma_warmup; from there on gamma, or another line to gamma_end at 1."""
    if progress < cfg.gamma_warmup:
        return cfg.gamma * (progress / cfg.gamma_warmup)
    if cfg.gamma_end < 0:
        return cfg.gamma
    share = min(1.0, (progress - cfg.gamma_warmup) / (1 - cfg.gamma_warmup))
    return (1 - share) * cfg.gamma + share * cfg.gamma_end


def anchor_term(
    cfg: ObjectiveConfig,
    gamma: float,
    anchors_BL: Tensor,
    where: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    example_B: Tensor,
    seed: int,
    step: int,
) -> Term:
    """The anchor network's cross-entropy at the anchors; `where`: rows, targets and weights of positions.

    As in Eq. 7 it is a sum, divided by all tokens and not by the anchors among them, whatever the rule. So under
    anchor_rule=loss it fades as the network learns; a mean over the hard tokens would keep their pull constant
    however few are left, and their number would have to be known before the loss is.

    With anchor_fraction = 1/4 a random quarter of the anchors is scored, and counts four times: the same sum on average,
    and the head, most of what anchors cost in training, reads a quarter of the rows.
    """
    rows_N, targets_N, weights_N = where(draw_share(cfg, anchors_BL, example_B, seed, step))
    return Term("anchor", rows_N, targets_N, weights_N / cfg.anchor_fraction, scale=gamma, floor=anchor_floor(cfg))


class Anelbo(Nelbo):
    def __init__(
        self, cfg: ObjectiveConfig, schedule: Schedule, mask_id: int, seed: int, share_V: Tensor | None = None
    ):
        super().__init__(cfg, schedule, mask_id, seed)
        check_anchor_options(cfg)
        self.anchors = make_anchor_rule(cfg, share_V)

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        require(model.anchored, "objective.name=anelbo needs model.anchored=true (objective.name=nelbo does not)")

    def draw(self, rows: Rows, step: int, progress: float) -> Task:
        noised = self.draw_training(rows, step, progress)
        terms = {"nelbo": self.bound_term(noised)}
        gamma = gamma_at(self.cfg, progress)
        if gamma > 0:
            anchors_BL = self.anchors(rows)
            if self.cfg.anchor_positions == "masked":
                anchors_BL = anchors_BL & noised.masked_BL
            terms["anchor"] = anchor_term(self.cfg, gamma, anchors_BL, noised.where, rows.example_B, self.seed, step)
        return Task(noised.z_BL, noised.sigma_B, count_tokens(rows), terms)


def check_anchor_options(cfg: ObjectiveConfig) -> None:
    choose("objective.anchor_positions", cfg.anchor_positions, ANCHOR_POSITIONS)
    require(cfg.gamma >= 0, f"objective.gamma={cfg.gamma} must not be negative")
    require(
        0 < cfg.anchor_fraction <= 1,
        f"objective.anchor_fraction={cfg.anchor_fraction} is a share of anchors, in (0, 1]",
    )
    require(0 <= cfg.gamma_warmup <= 1, f"objective.gamma_warmup={cfg.gamma_warmup} is a share of the run, in [0, 1]")
    require(
        cfg.gamma_end == -1 or cfg.gamma_end >= 0,
        f"objective.gamma_end={cfg.gamma_end} must be at least 0, or -1: gamma stays",
    )
    require(
        cfg.gamma_end < 0 or cfg.gamma_warmup < 1,
        "objective.gamma_warmup=1 leaves nothing of the run for objective.gamma_end",
    )

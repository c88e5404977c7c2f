"""Next-token cross-entropy: AR, and A2R when the model is anchored (section 4 of the paper).

The row is read up to its last but one token and every following token is a target; the likelihood is exact, not a
bound. A2R adds gamma * the anchor network's next-token cross-entropy where the *target* is an anchor.
"""

from functools import partial

import torch
from torch import Tensor

from adlm.errors import require
from adlm.objectives.anchors import make_anchor_rule
from adlm.objectives.anelbo import anchor_term, check_anchor_options, gamma_at
from adlm.objectives.base import Rows, Task, Term, select
from adlm.schema import ModelConfig, ObjectiveConfig


class Autoregressive:
    def __init__(self, cfg: ObjectiveConfig, mask_id: int, seed: int, share_V: Tensor | None = None):
        check_anchor_options(cfg)
        self.cfg, self.mask_id, self.seed = cfg, mask_id, seed
        self.anchors = make_anchor_rule(cfg, share_V)

    def check(self, model: ModelConfig) -> None:
        require(model.causal, "objective.name=autoregressive needs model.causal=true")
        gamma, end = self.cfg.gamma, self.cfg.gamma_end
        require(
            model.anchored or max(gamma, end) <= 0,
            (f"objective.gamma={gamma}" if gamma > 0 else f"objective.gamma_end={end}")
            + " needs model.anchored=true (A2R); plain AR has objective.gamma=0 and no gamma_end",
        )

    def draw(self, rows: Rows, step: int, progress: float) -> Task:
        task = self.draw_bound(rows, 0)
        gamma = gamma_at(self.cfg, progress)
        if gamma <= 0:
            return task
        anchors_BL = self.anchors(rows)[:, 1:] & valid(rows)
        where = partial(next_tokens, rows)
        anchor = anchor_term(self.cfg, gamma, anchors_BL, where, rows.example_B, self.seed, step)
        return task._replace(terms=task.terms | {"anchor": anchor})

    def draw_bound(self, rows: Rows, draw: int) -> Task:
        positions_BL = valid(rows)
        term = Term("denoiser", *next_tokens(rows, positions_BL), exclude=self.mask_id)
        count = positions_BL.numel() if rows.attention_mask_BL is None else int(positions_BL.sum())
        return Task(rows.tokens_BL[:, :-1], None, count, {"nll": term})


def valid(rows: Rows) -> Tensor:
    """Targets that are not padding, [B, L-1]."""
    if rows.attention_mask_BL is None:
        return torch.ones_like(rows.tokens_BL[:, 1:], dtype=torch.bool)
    return rows.attention_mask_BL[:, 1:].bool()


def next_tokens(rows: Rows, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ones_B = torch.ones(len(rows.tokens_BL), device=rows.tokens_BL.device)
    return select(positions_BL, rows.tokens_BL[:, 1:], ones_B)

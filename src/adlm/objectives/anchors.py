"""Who is an anchor: the operator A(x) of the paper as a table of vectorised rules.

A rule maps clean rows to a boolean [B, L]. The paper's rule counts inside the row, so the same word is an anchor in one
row and not in another; `rarity` uses the share of a token in the whole training corpus instead.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adlm.errors import choose, require
from adlm.objectives.base import Rows
from adlm.schema import ObjectiveConfig

AnchorRule = Callable[[Rows], Tensor]


def counts_in_row(x_BL: Tensor) -> Tensor:
    """How often each token occurs in its own row, at every position. Sorting, no host sync, no [B, L, L] table."""
    ordered_BL, order_BL = x_BL.sort(dim=-1)
    first_BL = torch.ones_like(ordered_BL, dtype=torch.bool)
    first_BL[:, 1:] = ordered_BL[:, 1:] != ordered_BL[:, :-1]
    run_BL = first_BL.cumsum(-1) - 1
    size_BL = torch.zeros_like(run_BL).scatter_add_(1, run_BL, torch.ones_like(run_BL))
    return torch.empty_like(run_BL).scatter_(1, order_BL, size_BL.gather(1, run_BL))


def count_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """At most tau occurrences in the row (the paper; ties are anchors, special tokens count like others)."""
    require(cfg.tau >= 0, f"objective.tau={cfg.tau} must not be negative")
    return lambda rows: counts_in_row(rows.tokens_BL) <= cfg.tau


def rarity_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """A share of at most `rarity` of the training corpus."""
    if share_V is None:
        raise ValueError("objective.anchor_rule=rarity needs the token frequencies of a prepared training corpus")
    rare_V = share_V <= cfg.rarity
    return lambda rows: rare_V.to(rows.tokens_BL.device)[rows.tokens_BL]


def given_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """The rows carry their own anchors."""

    def rule(rows: Rows) -> Tensor:
        if rows.anchors_BL is None:
            raise ValueError("objective.anchor_rule=given, but the rows carry no anchors")
        return rows.anchors_BL

    return rule


def no_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    return lambda rows: torch.zeros_like(rows.tokens_BL, dtype=torch.bool)


ANCHOR_RULES: dict[str, Callable[[ObjectiveConfig, Tensor | None], AnchorRule]] = {
    "count": count_rule,
    "rarity": rarity_rule,
    "given": given_rule,
    "none": no_rule,
}


def make_anchor_rule(cfg: ObjectiveConfig, share_V: Tensor | None = None) -> AnchorRule:
    """`share_V`: share of each token in the training corpus, for the rarity rule."""
    return ANCHOR_RULES[choose("objective.anchor_rule", cfg.anchor_rule, ANCHOR_RULES)](cfg, share_V)

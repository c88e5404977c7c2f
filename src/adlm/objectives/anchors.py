"""Which tokens are anchors: the operator A(x) of the paper, as vectorised rules named in tables.ANCHOR_RULES.

A rule maps clean sequences and the settings of the objective to a boolean [B, L]. The paper's rule counts inside the
sequence, so the same word may be an anchor in one sequence and not in another. `all` makes no choice: the anchor
network predicts every token.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from adlm import tables
from adlm.schema import ObjectiveConfig

AnchorRule = Callable[[Tensor, ObjectiveConfig], Tensor]


def anchor_rule(cfg: ObjectiveConfig) -> AnchorRule:
    """A(x) of objective.anchor_rule: True at the anchors of clean sequences."""
    return tables.ANCHOR_RULES.load(cfg.anchor_rule, "objective.anchor_rule")


def count(tokens_BL: Tensor, cfg: ObjectiveConfig) -> Tensor:
    """Tokens that occur at most tau times in their sequence (the paper's rule); special tokens count like others."""
    return counts_in_sequence(tokens_BL) <= cfg.tau


def common(tokens_BL: Tensor, cfg: ObjectiveConfig) -> Tensor:
    """Tokens that occur more than tau times: the control experiment for whether rare tokens are the right choice."""
    return ~count(tokens_BL, cfg)


def every(tokens_BL: Tensor, cfg: ObjectiveConfig) -> Tensor:
    return torch.ones_like(tokens_BL, dtype=torch.bool)


def none(tokens_BL: Tensor, cfg: ObjectiveConfig) -> Tensor:
    return torch.zeros_like(tokens_BL, dtype=torch.bool)


def given(tokens_BL: Tensor, cfg: ObjectiveConfig) -> Tensor:
    """Stand-in for positions that a task gives: its objective replaces this rule (`adlm.reasoning.answers`)."""
    raise ValueError("objective.anchor_rule=given is for tasks that say where their anchors are, not for plain text")


def counts_in_sequence(x_BL: Tensor) -> Tensor:
    """How often each token occurs in its own sequence, at every position. By sorting: no host sync, no [B, L, L]."""
    ordered_BL, order_BL = x_BL.sort(dim=-1)
    first_BL = torch.ones_like(ordered_BL, dtype=torch.bool)
    first_BL[:, 1:] = ordered_BL[:, 1:] != ordered_BL[:, :-1]
    run_BL = first_BL.cumsum(-1) - 1
    size_BL = torch.zeros_like(run_BL).scatter_add_(1, run_BL, torch.ones_like(run_BL))
    return torch.empty_like(run_BL).scatter_(1, order_BL, size_BL.gather(1, run_BL))


def for_texts(cfg: ObjectiveConfig) -> ObjectiveConfig:
    """The settings by which a text's anchors are shown. The paper's rule replaces the model's own if that does not
    select among tokens, or comes from an earlier version."""
    chooses = cfg.anchor_rule in tables.ANCHOR_RULES and cfg.anchor_rule not in ("all", "none", "given")
    return cfg if chooses else replace(cfg, anchor_rule="count")


def describe_rule(cfg: ObjectiveConfig) -> str:
    """Say in words which tokens are anchors."""
    times = f"{cfg.tau} time{'s' * (cfg.tau != 1)} in their sequence"
    return {
        "count": f"tokens that occur at most {times}",
        "common": f"tokens that occur more than {times}",
        "all": "all tokens",
        "none": "none",
        "given": "tokens where the task says so",
    }.get(cfg.anchor_rule, f"tokens that the rule {cfg.anchor_rule!r} chooses")


def describe_for_texts(cfg: ObjectiveConfig) -> str:
    """Say in words which tokens of a text are shown as anchors, and whose rule it is if not the model's own."""
    shown = for_texts(cfg)
    own = "" if shown is cfg else f" (the paper's rule; this model was trained with: {describe_rule(cfg)})"
    return describe_rule(shown) + own


def describe_anchors(cfg: ObjectiveConfig) -> str:
    """Say in words what carries the anchor loss."""
    if cfg.gamma == 0:
        return "none"
    masked = ", where masked" if cfg.name == "anelbo" and cfg.anchor_positions == "masked" else ""
    part = f"; a random {cfg.anchor_fraction:.4g} of them at each step" if cfg.anchor_fraction < 1 else ""
    until = f"; in the first {cfg.gamma_until:.4g} of the run" if cfg.gamma_until < 1 else ""
    return describe_rule(cfg) + masked + part + until

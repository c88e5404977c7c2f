"""Who is an anchor: the operator A(x) of the paper as a table of vectorised rules.

A rule maps clean rows to a boolean [B, L]. The paper's rule counts inside the row, so the same word is an anchor in one
row and not in another; `rarity` uses the share of a token in the whole training corpus instead. `all` makes no choice:
whatever is to be predicted is predicted early. `loss` asks the anchor network, which only the loss can: as a rule it
lets every position through, and `anchor_floor` decides there.

Of the anchors that a rule finds, a share may be scored for all of them (`draw_share`, for `anelbo.anchor_term`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from adlm.diffusion.uniforms import Stream, uniforms32
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


def common_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """The others: more than tau occurrences. The control for whether rare tokens are the right ones."""
    rare = count_rule(cfg, share_V)
    return lambda rows: ~rare(rows)


def rarity_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """A share of at most `rarity` of the training corpus."""
    if share_V is None:
        raise ValueError("objective.anchor_rule=rarity needs the token frequencies of a prepared training corpus")
    rare_V = share_V <= cfg.rarity
    return lambda rows: rare_V.to(rows.tokens_BL.device)[rows.tokens_BL]


def all_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    return lambda rows: torch.ones_like(rows.tokens_BL, dtype=torch.bool)


def loss_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    """Any token may be one that the anchor network finds hard (`anchor_floor`)."""
    require(cfg.hard > 0, f"objective.hard={cfg.hard} must be above 0 nats for objective.anchor_rule=loss")
    return lambda rows: torch.ones_like(rows.tokens_BL, dtype=torch.bool)


def no_rule(cfg: ObjectiveConfig, share_V: Tensor | None) -> AnchorRule:
    return lambda rows: torch.zeros_like(rows.tokens_BL, dtype=torch.bool)


ANCHOR_RULES: dict[str, Callable[[ObjectiveConfig, Tensor | None], AnchorRule]] = {
    "count": count_rule,
    "common": common_rule,
    "rarity": rarity_rule,
    "all": all_rule,
    "loss": loss_rule,
    "none": no_rule,
}


def make_anchor_rule(cfg: ObjectiveConfig, share_V: Tensor | None = None) -> AnchorRule:
    """`share_V`: share of each token in the training corpus, for the rarity rule."""
    return ANCHOR_RULES[choose("objective.anchor_rule", cfg.anchor_rule, ANCHOR_RULES)](cfg, share_V)


def draw_share(cfg: ObjectiveConfig, anchors_BL: Tensor, example_B: Tensor, seed: int, step: int) -> Tensor:
    """Those of the anchors that are scored at this step, each with probability `anchor_fraction`."""
    if cfg.anchor_fraction == 1:
        return anchors_BL
    position_L = torch.arange(anchors_BL.shape[1], device=anchors_BL.device)
    return anchors_BL & (uniforms32(seed, Stream.ANCHOR, step, example_B[:, None], position_L) < cfg.anchor_fraction)


def anchor_floor(cfg: ObjectiveConfig) -> float:
    """Cross-entropy of the anchor network, in nats, below which a position that the rule allows is no anchor."""
    return cfg.hard if cfg.anchor_rule == "loss" else 0.0


# Rules that need nothing but a text. The others are no choice of tokens, or need a network's loss.
RULES_OF_TEXTS = ("count", "common", "rarity")


def for_texts(cfg: ObjectiveConfig) -> ObjectiveConfig:
    """The options by which a text's anchors are shown: the paper's rule where the text alone does not tell."""
    return cfg if cfg.anchor_rule in RULES_OF_TEXTS else replace(cfg, anchor_rule="count")


def describe_rule(cfg: ObjectiveConfig) -> str:
    """Which tokens are anchors, in words."""
    often = "more than" if cfg.anchor_rule == "common" else "at most"
    counted = f"tokens that occur {often} {cfg.tau} time{'s' * (cfg.tau != 1)} in their row"
    return {
        "count": counted,
        "common": counted,
        "rarity": f"tokens with at most {cfg.rarity:g} of the corpus",
        "all": "all tokens",
        "loss": f"tokens that cost the anchor network at least {cfg.hard:g} nats",
        "none": "none",
    }[cfg.anchor_rule]


def describe_anchors(cfg: ObjectiveConfig) -> str:
    """What carries the anchor loss, in words."""
    if cfg.gamma == 0 and cfg.gamma_end <= 0:
        return "none"
    masked = ", where masked" if cfg.name == "anelbo" and cfg.anchor_positions == "masked" else ""
    share = f"; a random {cfg.anchor_fraction:.4g} of them at each step" if cfg.anchor_fraction < 1 else ""
    return describe_rule(cfg) + masked + share

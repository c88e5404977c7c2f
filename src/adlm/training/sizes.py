"""How large a step is: how many rows, in how many pieces, and how many rows came before it.

A run may start with a part of its batch (`train.batch_parts`) and with rows cut into pieces (`train.length_warmup`). Both
are functions of the step alone, so that a resumed run knows where it stands.
"""

import math

from adlm.schema import TrainConfig


def rows_at(cfg: TrainConfig, step: int) -> int:
    """Rows of all ranks together."""
    return rows_from(cfg, rows_before(cfg, step))


def rows_from(cfg: TrainConfig, first: int) -> int:
    """Rows of the batch that begins with row `first` of the run."""
    small = cfg.global_batch_size // cfg.batch_parts
    return small if first < early(cfg, cfg.batch_parts_share) * small else cfg.global_batch_size


def rows_before(cfg: TrainConfig, step: int) -> int:
    """Rows read in the steps before this one; before step `cfg.steps`: in the whole run."""
    small = min(step, early(cfg, cfg.batch_parts_share))
    return small * (cfg.global_batch_size // cfg.batch_parts) + (step - small) * cfg.global_batch_size


def pieces_at(cfg: TrainConfig, step: int) -> int:
    return cfg.length_warmup if step < early(cfg, cfg.length_warmup_fraction) else 1


def early(cfg: TrainConfig, share: float) -> int:
    """Steps that lie in the first `share` of the run."""
    return math.ceil(share * cfg.steps)

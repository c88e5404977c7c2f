"""The bound during training: the same rows and the same noise every time, so that curves are comparable."""

import math

import numpy as np
import torch
from torch import nn

from adlm.data.blocks import Blocks
from adlm.objectives import Objective
from adlm.schema import TrainConfig
from adlm.training.draw import rows_on
from adlm.training.parallel import World


def padded_indices(n: int, rank: int, size: int, batch: int) -> np.ndarray:
    """Rows of one rank: [batches, batch], -1 where there is none; the same number of batches on every rank."""
    batches = math.ceil(n / (size * batch))
    indices = np.full(batches * size * batch, -1, dtype=np.int64)
    indices[:n] = np.arange(n)
    return indices.reshape(batches, size, batch)[:, rank]


@torch.no_grad()
def validate(wrapped: nn.Module, objective: Objective, valid: Blocks, cfg: TrainConfig, ranks: World) -> float:
    """The bound on the first valid_sequences rows of the validation split, nats per token, with fixed noise."""
    n = min(len(valid), cfg.valid_sequences or len(valid))
    batch = cfg.valid_batch_size or cfg.batch_size or cfg.global_batch_size // ranks.size
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    was_training = wrapped.training
    wrapped.eval()
    for indices in padded_indices(n, ranks.rank, ranks.size, batch):
        real, indices = indices >= 0, np.maximum(indices, 0)
        tokens, mask = valid.rows(indices), valid.attention_masks(indices)
        if not real.all():
            mask = (np.ones_like(tokens, dtype=bool) if mask is None else mask) & real[:, None]
        task = objective.corrupt_for_bound(rows_on(ranks.device, tokens, mask, indices, n), 0)
        with ranks.autocast():
            output = wrapped(task)
        (bound,) = output.terms.values()
        sums += torch.stack(
            [bound.double(), torch.tensor(float(output.count), dtype=torch.float64, device=bound.device)]
        )
    wrapped.train(was_training)
    if hasattr(wrapped, "reshard"):
        wrapped.reshard()  # type: ignore[operator]  # gathered weights are those of the averages, which go away now
    nats, count = ranks.sum(sums).tolist()
    return nats / count

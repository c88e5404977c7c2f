"""From batches of sequences to corrupted batches, on the host and ahead of the network; and the bound in validation.

The host has to know how many positions are masked. If the device drew the noise, the host would wait for the answer at
every step; drawing itself takes it 2 ms for 16 sequences of 1024, while the step before is still running. Noise is a
hash of counters, so it does not matter where it is drawn.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from adlm.data.blocks import Blocks
from adlm.data.loader import Batch, read_ahead
from adlm.objectives import CorruptedBatch, Objective, Sequences
from adlm.objectives.base import on_device, put, rounded
from adlm.schema import Config, TrainConfig
from adlm.training.parallel import World

FEWEST_VALIDATED = 8
"""A bound of fewer noised sequences is mostly chance: one of them may have no mask at all."""


def sequences_on(device: torch.device, batch: Batch, total: int) -> Sequences:
    """Clean sequences as tensors of a device."""
    found = (batch.tokens, batch.examples, batch.attention_mask, batch.prompts)
    tokens_BL, example_B, mask_BL, given_BL = (None if x is None else put(torch.from_numpy(x), device) for x in found)
    assert tokens_BL is not None and example_B is not None
    return Sequences(tokens_BL, example_B, total, mask_BL, given_BL=given_BL)


def batch_of(blocks: Blocks, indices: np.ndarray, examples: np.ndarray) -> Batch:
    """Stored sequences, numbered as examples."""
    return Batch(blocks.rows(indices), blocks.attention_masks(indices), examples, blocks.prompts(indices))


def shortened(batch: Batch, pieces: int) -> Batch:
    """The sequence-length warmup: the same tokens in sequences of a `pieces`-th of the length, numbered anew."""
    B, L = batch.tokens.shape
    examples = (batch.examples[:, None] * pieces + np.arange(pieces)).ravel()
    parts = (batch.tokens, batch.attention_mask, batch.prompts)
    tokens, mask, prompts = (None if x is None else x.reshape(B * pieces, L // pieces) for x in parts)
    assert tokens is not None
    return Batch(tokens, mask, examples, prompts)


def corrupt(objective: Objective, batch: Batch, step: int, parts: int, cfg: Config) -> list[CorruptedBatch]:
    """One rank's batch of optimizer step `step` as corrupted micro-batches, `parts` of them, on the host."""
    total = cfg.train.global_batch_size
    if step < math.ceil(cfg.train.length_warmup_fraction * cfg.train.steps) and cfg.train.length_warmup > 1:
        batch, total = shortened(batch, cfg.train.length_warmup), total * cfg.train.length_warmup
    corrupted = []
    for part in np.array_split(np.arange(len(batch.tokens)), parts):
        own = Batch(*(None if x is None else x[part] for x in batch))  # type: ignore[arg-type]
        clean = sequences_on(torch.device("cpu"), own._replace(examples=own.examples % total), total)
        micro_batch = objective.corrupt(clean, step, step / cfg.train.steps)
        corrupted.append(rounded(micro_batch) if cfg.train.cuda_graphs else micro_batch)
    return corrupted


def corrupted_batches(
    objective: Objective, batches: Iterator[Batch], first: int, cfg: Config, ranks: World
) -> Iterator[tuple[Batch, list[CorruptedBatch]]]:
    """Batches with their corrupted micro-batches, from optimizer step `first` on; beside a GPU a thread draws ahead."""
    parts = cfg.train.micro_batches(ranks.size)
    steps = ((batch, corrupt(objective, batch, i, parts, cfg)) for i, batch in enumerate(batches, first))
    return read_ahead(steps) if ranks.device.type == "cuda" else steps


def padded_indices(n: int, rank: int, size: int, batch: int) -> np.ndarray:
    """Sequences of one rank: [batches, batch], -1 where there is none; the same number of batches on every rank."""
    batches = math.ceil(n / (size * batch))
    indices = np.full(batches * size * batch, -1, dtype=np.int64)
    indices[:n] = np.arange(n)
    return indices.reshape(batches, size, batch)[:, rank]


@torch.no_grad()
def validate(wrapped: nn.Module, objective: Objective, valid: Blocks, cfg: TrainConfig, ranks: World) -> float:
    """The bound on the first valid_sequences of the validation split, nats per token. The noise is the same every time,
    so that curves are comparable. A few sequences are read several times, at other times of the noise each."""
    found = min(len(valid), cfg.valid_sequences or len(valid))
    n = found if found >= FEWEST_VALIDATED else found * math.ceil(FEWEST_VALIDATED / found)
    batch = cfg.at_once(ranks.size)
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.float64_device)
    was_training = wrapped.training
    wrapped.eval()
    for indices in padded_indices(n, ranks.rank, ranks.size, batch):
        real, indices = indices >= 0, np.maximum(indices, 0)
        part = batch_of(valid, indices % found, indices)
        if not real.all():
            mask = np.ones_like(part.tokens, dtype=bool) if part.attention_mask is None else part.attention_mask
            part = part._replace(attention_mask=mask & real[:, None])
        corrupted = objective.corrupt_for_validation(sequences_on(sums.device, part, n))
        with ranks.autocast():
            output = wrapped(on_device(corrupted, ranks.device))
        (bound,) = output.terms.values()
        sums += torch.stack(
            [bound.to(sums.device).double(), torch.tensor(float(output.count), dtype=torch.float64, device=sums.device)]
        )
    wrapped.train(was_training)
    if hasattr(wrapped, "reshard"):
        wrapped.reshard()  # type: ignore[operator]  # gathered weights are those of the EMA, which go away now
    nats, count = ranks.sum(sums).tolist()
    return nats / count

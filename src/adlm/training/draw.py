"""From a batch of rows to the tasks of a step, on the host and ahead of the network.

The host has to know how many positions are masked. If the device drew the noise, the host would wait for the answer at
every step; drawing itself takes it 2 ms for 16 rows of 1024, while the step before is still running. Noise is a hash of
counters, so it does not matter where it is drawn.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from adlm.data.loader import Batch, read_ahead
from adlm.objectives import CorruptedBatch, Objective, Sequences
from adlm.objectives.base import rounded
from adlm.schema import Config
from adlm.training.sizes import pieces_at, rows_at

HOST = torch.device("cpu")


def rows_on(
    device: torch.device, tokens: np.ndarray, mask: np.ndarray | None, examples: np.ndarray, total: int
) -> Sequences:
    """Rows as tensors of a device."""
    tokens_BL, example_B = (put(torch.from_numpy(x), device) for x in (tokens, examples))
    return Sequences(tokens_BL, example_B, total, None if mask is None else put(torch.from_numpy(mask), device))


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; the copy to a GPU does not make the host wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def in_pieces(batch: Batch, pieces: int) -> Batch:
    """The same tokens in rows of a `pieces`-th of the length, with examples numbered anew."""
    B, L = batch.tokens.shape
    examples = (batch.examples[:, None] * pieces + np.arange(pieces)).ravel()
    mask = None if batch.attention_mask is None else batch.attention_mask.reshape(B * pieces, L // pieces)
    return Batch(batch.tokens.reshape(B * pieces, L // pieces), mask, examples)


def draw_tasks(objective: Objective, batch: Batch, step: int, micro_batches: int, cfg: Config) -> list[CorruptedBatch]:
    """The tasks of a rank's micro-batches of optimizer step `step`, on the host. `micro_batches`: of a whole batch."""
    pieces, rows = pieces_at(cfg.train, step), rows_at(cfg.train, step)
    micro_batches = math.ceil(micro_batches * rows / cfg.train.global_batch_size)
    batch, total = in_pieces(batch, pieces), rows * pieces
    tasks = []
    for part in np.array_split(np.arange(len(batch.tokens)), micro_batches):
        mask = None if batch.attention_mask is None else batch.attention_mask[part]
        clean = rows_on(HOST, batch.tokens[part], mask, batch.examples[part] % total, total)
        task = objective.corrupt(clean, step, step / cfg.train.steps)
        tasks.append(rounded(task) if cfg.train.cuda_graphs else task)
    return tasks


def drawn(
    objective: Objective, batches: Iterator[Batch], first: int, micro_batches: int, cfg: Config, device: torch.device
) -> Iterator[tuple[Batch, list[CorruptedBatch]]]:
    """Every batch with its tasks, from optimizer step `first` on; beside a GPU a thread draws ahead."""
    steps = ((batch, draw_tasks(objective, batch, i, micro_batches, cfg)) for i, batch in enumerate(batches, first))
    return read_ahead(steps) if device.type == "cuda" else steps


def on_device(task: CorruptedBatch, device: torch.device) -> CorruptedBatch:
    terms = {
        name: term._replace(
            positions_N=put(term.positions_N, device),
            targets_N=put(term.targets_N, device),
            weights_N=put(term.weights_N, device),
        )
        for name, term in task.terms.items()
    }
    sigma_B, read_M = (None if x is None else put(x, device) for x in (task.sigma_B, task.read_M))
    return task._replace(tokens_BL=put(task.tokens_BL, device), sigma_B=sigma_B, read_M=read_M, terms=terms)

"""From a batch of rows to the tasks of a step, ahead of the network."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.data.loader import Batch
from adlm.objectives import Objective, Rows, Task
from adlm.schema import Config
from adlm.training.parallel import World


def rows_on(
    device: torch.device, tokens: np.ndarray, mask: np.ndarray | None, examples: np.ndarray, total: int
) -> Rows:
    """Rows as tensors of a device; the copy to a GPU does not make the host wait."""

    def put(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return Rows(put(tokens), put(examples), total, None if mask is None else put(mask))


def in_pieces(batch: Batch, pieces: int) -> Batch:
    """The same tokens in rows of a `pieces`-th of the length, with examples numbered anew."""
    B, L = batch.tokens.shape
    examples = (batch.examples[:, None] * pieces + np.arange(pieces)).ravel()
    mask = None if batch.attention_mask is None else batch.attention_mask.reshape(B * pieces, L // pieces)
    return Batch(batch.tokens.reshape(B * pieces, L // pieces), mask, examples)


def draw_tasks(
    objective: Objective, batch: Batch, step: int, progress: float, micro_batches: int, cfg: Config, ranks: World
) -> tuple[list[Task], Tensor]:
    """The tasks of this rank's micro-batches, and the token count of the global batch (on the device).

    The host has to know how many positions are masked: on a GPU it waits for these few small operations on a stream of
    their own, while the step before is still running.
    """
    pieces = cfg.train.row_pieces if progress < cfg.train.row_pieces_share else 1
    batch, total = in_pieces(batch, pieces), cfg.train.global_batch_size * pieces

    def draw() -> list[Task]:
        tasks = []
        for part in np.array_split(np.arange(len(batch.tokens)), micro_batches):
            mask = None if batch.attention_mask is None else batch.attention_mask[part]
            rows = rows_on(ranks.device, batch.tokens[part], mask, batch.examples[part] % total, total)
            tasks.append(objective.draw(rows, step, progress))
        return tasks

    tasks = ahead(ranks.device, draw)
    count = torch.full((), float(sum(task.count for task in tasks)), dtype=torch.float64, device=ranks.device)
    return tasks, ranks.sum(count).float()


def ahead(device: torch.device, draw: Callable[[], list[Task]]) -> list[Task]:
    """Draw on a stream beside the one the network runs on; on a CPU simply draw."""
    if device.type != "cuda":
        return draw()
    main, side = torch.cuda.current_stream(), side_stream(device)
    with torch.cuda.stream(side):
        tasks = draw()
    main.wait_stream(side)
    for tensor in (x for task in tasks for x in task_tensors(task)):
        tensor.record_stream(main)  # its memory must not be reused before the main stream is done with it
    return tasks


_SIDE_STREAMS: dict[torch.device, Any] = {}


def side_stream(device: torch.device) -> Any:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]


def task_tensors(task: Task) -> list[Tensor]:
    parts = [task.tokens_BL, task.sigma_B]
    for term in task.terms.values():
        parts += [term.rows_N, term.targets_N, term.weights_N]
    return [x for x in parts if x is not None]

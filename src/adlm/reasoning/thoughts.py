"""Rows through a network, with or without continuous thoughts.

Coconut feeds the final hidden state of a position back as the input of the next one, at the slots. The slots must be
read one after another, everything else at once: with n slots, n + 2 reads of a memory instead of n + 1 reads of whole
rows. Rows of a batch have equally many slots, at different places.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.models import Hidden
from adlm.objectives.base import CorruptedBatch, LossOutput, Term, sum_terms
from adlm.reasoning.methods import IGNORE, Layout
from adlm.reasoning.networks import Network
from adlm.training.draw import put


class Rows(NamedTuple):
    """Layouts as a batch, padded on the right."""

    tokens_BL: Tensor
    length_B: Tensor
    first_slot_B: Tensor
    n_slots: int
    """Positions fed back in every row; 0: plain tokens."""


class Batch(NamedTuple):
    """A batch with what its outputs are scored against."""

    rows: Rows
    task: CorruptedBatch


def make_rows(
    token_lists: list[list[int]], slots: list[range], fed_back: bool, device: torch.device, multiple: int = 1
) -> Rows:
    tokens = padded(token_lists, 0, multiple)
    length, first = np.array([len(ids) for ids in token_lists]), np.array([at.start for at in slots])
    on_device = (put(torch.from_numpy(array), device) for array in (tokens, length, first))
    return Rows(*on_device, n_slots=len(slots[0]) if fed_back else 0)


def padded(lists: list[list[int]], filler: int, multiple: int = 1) -> np.ndarray:
    """One row a list; as long as the longest of them, rounded up to a multiple: fewer shapes, and kinder to a GPU."""
    length = -(-max(map(len, lists)) // multiple) * multiple
    out = np.full((len(lists), length), filler, dtype=np.int64)
    for row, values in zip(out, lists):
        row[: len(values)] = values
    return out


def make_batch(
    layouts: list[Layout], fed_back: bool, gamma: float, mask_id: int, device: torch.device, multiple: int = 1
) -> Batch:
    """The sums of a step: next tokens of trace and answer, and gamma times the anchors at the slots."""
    rows = make_rows([l.tokens for l in layouts], [l.slots for l in layouts], fed_back, device, multiple)
    terms = {}
    for name, lists, scale in (
        ("nll", [l.targets for l in layouts], 1.0),
        ("anchor", [l.anchors for l in layouts], gamma),
    ):
        labels_N = padded(lists, IGNORE, multiple).reshape(-1)
        (at_N,) = np.nonzero(labels_N != IGNORE)
        if len(at_N):
            position_N, target_N = (put(torch.from_numpy(x), device) for x in (at_N, labels_N[at_N]))
            weight_N = torch.ones(len(at_N), device=device)
            terms[name] = Term("denoiser", position_N, target_N, weight_N, scale, exclude=mask_id)
    return Batch(rows, CorruptedBatch(rows.tokens_BL, None, len(terms["nll"].positions_N), terms))


def batch_loss(network: Network, batch: Batch) -> LossOutput:
    hidden_BLD = read_rows(network, batch.rows)
    return sum_terms(network, Hidden(hidden_BLD, None), batch.task)


def read_rows(network: Network, rows: Rows, memory: Any = None) -> Tensor:
    """Final hidden states of every position of every row, [B, L, D]; a memory is filled for what comes after."""
    x_BLD = network.embed(rows.tokens_BL)
    if rows.n_slots == 0:
        return network.read(x_BLD, memory, rows.length_B)
    B, L = rows.tokens_BL.shape
    n, first_B = rows.n_slots, rows.first_slot_B
    if memory is None:
        memory = network.remember(B, L, gradients=torch.is_grad_enabled())
    row_B, one_B = torch.arange(B, device=first_B.device), torch.ones_like(first_B)
    before = int(first_B.max())
    parts = [network.read(x_BLD[:, :before], memory, first_B)]
    thought_BD = parts[0][row_B, first_B - 1]
    for _ in range(n):
        parts.append(network.read(thought_BD[:, None].to(x_BLD.dtype), memory, one_B))
        thought_BD = parts[-1][:, 0]
    after_B = rows.length_B - first_B - n
    position_Bl = first_B[:, None] + n + torch.arange(int(after_B.max()), device=first_B.device)
    rest_BlD = x_BLD[row_B[:, None], position_Bl.clamp(max=L - 1)]
    parts.append(network.read(rest_BlD, memory, after_B))
    # back to the places of the rows: the three parts of a row stand at 0, at `before` and at `before + n`
    at_L = torch.arange(L, device=first_B.device)
    index_BL = torch.where(at_L < first_B[:, None], at_L, at_L - first_B[:, None] + before)
    read_BKD = torch.cat(parts, dim=1)
    return read_BKD[row_B[:, None], index_BL.clamp(max=read_BKD.shape[1] - 1)]

"""Kernels written by hand, where the compiler's reading and writing costs more than the arithmetic. Imported on a GPU
only: triton comes with torch's CUDA builds.

The loss of a chunk of logits is memory traffic: n x V numbers that a matrix product has just written. Compiled, they
are read three times and written once, by kernels of their own; here a row is one program, which reads it once from
memory, once more from cache, and writes the gradient in its place.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK, WARPS = 2048, 8  # numbers of a load, eight to a thread


@triton.jit
def _load(start, at, V, BLOCK: tl.constexpr):
    lane = at + tl.arange(0, BLOCK)
    return tl.load(start + lane, mask=lane < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _cross_entropy_rows(logits, target, weight, loss, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    # Every lane has its own running peak and sum of exponentials, joined once, at the end. Four numbers at a time: an
    # exponential for each and one for the peak's move, and exponentials are what this pass waits for.
    for at in range(0, V, 4 * BLOCK):
        a, b = _load(start, at, V, BLOCK), _load(start, at + BLOCK, V, BLOCK)
        c, d = _load(start, at + 2 * BLOCK, V, BLOCK), _load(start, at + 3 * BLOCK, V, BLOCK)
        higher = tl.maximum(peak, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(a - safe) + tl.exp(b - safe) + tl.exp(c - safe) + tl.exp(d - safe)
        peak = higher
    row_peak = tl.max(peak, 0)
    row_total = tl.sum(total * tl.exp(peak - row_peak), 0)

    gold_at = tl.load(target + row)
    w = tl.load(weight + row)
    gold = tl.load(start + gold_at).to(tl.float32)
    tl.store(loss + row, (tl.log(row_total) + row_peak - gold) * w)
    scale = w / row_total
    for at in range(0, V, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        g = tl.exp(_load(start, at, V, BLOCK) - row_peak) * scale - tl.where(lane == gold_at, w, 0.0)
        tl.store(start + lane, g.to(logits.dtype.element_ty), mask=lane < V)


def cross_entropy_rows(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy_chunk`: weighted cross-entropies, and their gradient in the memory of the logits."""
    n, V = logits_nV.shape
    assert logits_nV.is_contiguous() and weight_n.dtype == torch.float32
    loss_n = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    if n:
        launch = _cross_entropy_rows[(n,)]  # type: ignore[index]
        launch(logits_nV, target_n, weight_n.contiguous(), loss_n, V, BLOCK, num_warps=WARPS)
    return loss_n, logits_nV

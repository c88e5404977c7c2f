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

BLOCK = 4096


@triton.jit
def _cross_entropy_rows(logits, bias, target, weight, loss, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    lane = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    # every lane has its own running peak and sum of exponentials; they are joined once, at the end
    for at in range(0, V, BLOCK):
        inside = at + lane < V
        z = tl.load(start + at + lane, mask=inside, other=-float("inf")).to(tl.float32)
        z += tl.load(bias + at + lane, mask=inside, other=-float("inf"))
        higher = tl.maximum(peak, z)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(z - safe)
        peak = higher
    row_peak = tl.max(peak, 0)
    row_total = tl.sum(total * tl.exp(peak - row_peak), 0)

    gold_at = tl.load(target + row)
    w = tl.load(weight + row)
    gold = tl.load(start + gold_at).to(tl.float32) + tl.load(bias + gold_at)
    tl.store(loss + row, (tl.log(row_total) + row_peak - gold) * w)
    scale = w / row_total
    for at in range(0, V, BLOCK):
        inside = at + lane < V
        z = tl.load(start + at + lane, mask=inside, other=-float("inf")).to(tl.float32)
        z += tl.load(bias + at + lane, mask=inside, other=-float("inf"))
        g = tl.exp(z - row_peak) * scale - tl.where(at + lane == gold_at, w, 0.0)
        tl.store(start + at + lane, g.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_rows(logits_nV: Tensor, bias_V: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy_chunk`: weighted cross-entropies, and their gradient in the memory of the logits."""
    n, V = logits_nV.shape
    assert logits_nV.is_contiguous() and bias_V.dtype == weight_n.dtype == torch.float32
    loss_n = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    if n:
        launch = _cross_entropy_rows[(n,)]  # type: ignore[index]
        launch(logits_nV, bias_V, target_n, weight_n.contiguous(), loss_n, V, BLOCK, num_warps=8)
    return loss_n, logits_nV

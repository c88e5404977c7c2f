"""The passes over memory of `bias_gradients`. Imported on a GPU only: triton comes with torch's CUDA builds.

Both kernels write the gradient of a linear map's output, a matrix with a row for every position, and sum its columns on
the way. A program takes some columns and one of `groups` shares of the rows; it adds in registers, row upon row, and
writes one row of partial sums in the end. No atomic additions: every run has the same bits.

Sizes, for Hopper and bf16: 128 columns are 256 bytes of a row, 16 for each of 16 threads (runs of 64 bytes where halves
of heads of 64 are read apart). 16 rows at a time are then 64 bytes under way to each of 128 threads, and with nine
programs on a multiprocessor (56 registers a thread) more than the 25 KB that keep the memory busy. At 3,072 columns and
128 groups 3,072 programs want the 1,188 places, so that few wait for the last; and the partial sums of 16,384 rows are
a hundredth of what is read and written, and few enough to be added by one kernel.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from adlm.models.pointwise import GELU_CUBE, GELU_SCALE

ROWS, COLUMNS, WARPS = 16, 128, 4


# M, the number of rows, is another one at every step: not a reason to compile again.
@triton.jit(do_not_specialize=["M", "share"])
def _gelu_backward(
    g, x, g_x, sums, M, share, F,
    DOUBLE: tl.constexpr, CUBE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < F
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(group * share, tl.minimum(group * share + share, M), ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        mask = (row < M)[:, None] & inside[None, :]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        square = z * z  # gelu is z s, s = sigmoid(2 u), as in `pointwise`; DOUBLE is 2 GELU_SCALE
        s = tl.sigmoid(z * (DOUBLE + DOUBLE * CUBE * square))
        slope = s * (1 + (1 - s) * z * (DOUBLE + 3 * DOUBLE * CUBE * square))
        g_z = tl.load(g + at, mask=mask, other=0.0).to(tl.float32) * slope
        tl.store(g_x + at, g_z.to(g_x.dtype.element_ty), mask=mask)
        total += g_z
    tl.store(sums + group * F + column, tl.sum(total, 0), mask=inside)


def gelu_backward(g: Tensor, x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    g, x = g.contiguous(), x.contiguous()  # products have written them: nothing is copied
    F = x.shape[-1]
    M = x.numel() // F
    g_x, sums_GF = torch.empty_like(x), x.new_empty(groups, F, dtype=torch.float32)
    launch = _gelu_backward[(triton.cdiv(F, COLUMNS), groups)]  # type: ignore[index]
    launch(
        g, x, g_x, sums_GF, M, rows_of_group(M, groups), F, 2 * GELU_SCALE, GELU_CUBE, ROWS, COLUMNS, num_warps=WARPS
    )
    return g_x, sums_GF


@triton.jit
def _stack_part(
    g, b_stride, l_stride, n_stride, cos, sin, cos_b_stride, cos_l_stride, g_qkv, sums,
    part, block, group, M, share, L, N,
    HALF: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of one of the three parts of g_qkv. TURNED: its pairs are turned back by the angles of `rotate`."""
    pair = block * PAIRS + tl.arange(0, PAIRS)
    inside = pair < N * HALF
    head, i = pair // HALF, pair % HALF
    E = 6 * N * HALF
    column = (part * N + head) * (2 * HALF) + i
    total_a, total_b = tl.zeros((ROWS, PAIRS), tl.float32), tl.zeros((ROWS, PAIRS), tl.float32)
    for first in range(group * share, tl.minimum(group * share + share, M), ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & inside[None, :]
        b, l = (row // L).to(tl.int64), (row % L).to(tl.int64)
        source = g + (b * b_stride + l * l_stride)[:, None] + (head * n_stride + i)[None, :]
        g_a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        g_b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        if TURNED:
            angle = (b * cos_b_stride + l * cos_l_stride)[:, None] + i[None, :]
            c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
            g_a, g_b = g_a * c + g_b * s, g_b * c - g_a * s
        goal = g_qkv + row.to(tl.int64)[:, None] * E + column[None, :]
        tl.store(goal, g_a.to(g_qkv.dtype.element_ty), mask=mask)
        tl.store(goal + HALF, g_b.to(g_qkv.dtype.element_ty), mask=mask)
        total_a += g_a
        total_b += g_b
    tl.store(sums + group * E + column, tl.sum(total_a, 0), mask=inside)
    tl.store(sums + group * E + column + HALF, tl.sum(total_b, 0), mask=inside)


@triton.jit(do_not_specialize=["M", "share", "L"])
def _heads_backward(
    g_q, q_b, q_l, q_n, g_k, k_b, k_l, k_n, g_v, v_b, v_l, v_n, cos, sin, cos_b, cos_l, g_qkv, sums, M, share, L, N,
    HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0) // 3
    part, block, group = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    if part == 0:
        _stack_part(
            g_q, q_b, q_l, q_n, cos, sin, cos_b, cos_l, g_qkv, sums, 0, block, group, M, share, L, N,
            HALF, True, ROWS, PAIRS,
        )  # fmt: skip
    elif part == 1:
        _stack_part(
            g_k, k_b, k_l, k_n, cos, sin, cos_b, cos_l, g_qkv, sums, 1, block, group, M, share, L, N,
            HALF, True, ROWS, PAIRS,
        )  # fmt: skip
    else:
        _stack_part(
            g_v, v_b, v_l, v_n, cos, sin, cos_b, cos_l, g_qkv, sums, 2, block, group, M, share, L, N,
            HALF, False, ROWS, PAIRS,
        )  # fmt: skip


def heads_backward(
    gq_BLNH: Tensor, gk_BLNH: Tensor, gv_BLNH: Tensor, cos: Tensor, sin: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    B, L, N, H = gq_BLNH.shape
    M, pairs = B * L, COLUMNS // 2
    g_BLE = gq_BLNH.new_empty(B, L, 3 * N * H)
    sums_GE = gq_BLNH.new_empty(groups, 3 * N * H, dtype=torch.float32)
    parts = [argument for g_BLNH in (gq_BLNH, gk_BLNH, gv_BLNH) for argument in with_strides(g_BLNH)]
    (cos, *strides, _), (sin, *same, _) = (with_strides(table.expand(B, L, 1, H // 2)) for table in (cos, sin))
    assert strides == same
    launch = _heads_backward[(3 * triton.cdiv(N * H // 2, pairs), groups)]  # type: ignore[index]
    launch(
        *parts, cos, sin, *strides, g_BLE, sums_GE, M, rows_of_group(M, groups), L, N,
        H // 2, ROWS, pairs, num_warps=WARPS,
    )  # fmt: skip
    return g_BLE, sums_GE


def with_strides(x_BLNH: Tensor) -> tuple[Tensor, int, int, int]:
    """As attention kernels leave it, in whatever order; only the numbers of a head have to lie together."""
    x_BLNH = x_BLNH if x_BLNH.stride(-1) == 1 else x_BLNH.contiguous()
    return x_BLNH, x_BLNH.stride(0), x_BLNH.stride(1), x_BLNH.stride(2)


def rows_of_group(M: int, groups: int) -> int:
    return ROWS * triton.cdiv(triton.cdiv(M, groups), ROWS)

"""The backward pass of `folding.fold`, five kernels a block. Imported on a GPU only: triton comes with torch's CUDA
builds.

A kernel reads a matrix and its gradient once and writes the gradient of the weight and all sums of their product that
it can: complete ones along rows, for the gate of a map out of a branch, and one for every strip of rows along columns,
for shift and scale of a map into it. No two programs add to the same number, so sums are the same in every run.

Letters: O outputs and I inputs of a linear map, S strips of rows, D width, C width of the conditioning vector.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from adlm.models.folding import Maps, Parts

# Numbers of a matrix that a program holds, 32 to a thread: enough requests on their way to keep the memory busy, and
# more than three programs for every multiprocessor at width 768.
ROWS, COLUMNS, WARPS = 32, 128, 4


@triton.jit
def _entry(
    g_folded, g_bias, weight, norm, shift, scale, g_weight, sums, O, I, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    strip = tl.program_id(0)
    row, column = strip * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row, in_column = row < O, column < I
    here, at = in_row[:, None] & in_column[None, :], row[:, None] * I + column[None, :]
    g = tl.load(g_folded + at, mask=here, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=here, other=0.0)
    b = tl.load(g_bias + row, mask=in_row, other=0.0).to(tl.float32)
    factor = 1 + tl.load(scale + column, mask=in_column, other=0.0)
    factor *= tl.load(norm + column, mask=in_column, other=0.0)
    offset = tl.load(shift + column, mask=in_column, other=0.0)
    tl.store(g_weight + at, g * factor[None, :] + b[:, None] * offset[None, :], mask=here)
    out = sums + strip * 2 * I + column  # for shift, then for scale and norm
    tl.store(out, tl.sum(b[:, None] * w, 0), mask=in_column)
    tl.store(out + I, tl.sum(g * w, 0), mask=in_column)


@triton.jit
def _exit(
    g_folded, g_bias, weight, bias, gate, g_weight, g_gate, g_of_bias, O, I, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_row = row < O
    here, at = in_row[:, None] & (column < I)[None, :], row[:, None] * I + column[None, :]
    g = tl.load(g_folded + at, mask=here, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=here, other=0.0)
    factor = tl.load(gate + row, mask=in_row, other=0.0)
    tl.store(g_weight + at, g * factor[:, None], mask=here)
    total = tl.sum(g * w, 1)
    if bias is not None:
        b = tl.load(g_bias + row, mask=in_row, other=0.0).to(tl.float32)
        total += b * tl.load(bias + row, mask=in_row, other=0.0)
        tl.store(g_of_bias + row, b * factor, mask=in_row)
    tl.store(g_gate + row, total, mask=in_row)


@triton.jit
def _vectors(
    sums, norm1, norm2, vectors, modulation, c, g_vectors, g_norm1, g_norm2, g_modulation, g_c, S1, S2, D, C,
    STRIPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A few numbers of one of the six vectors: their gradients, and those of the rows of the linear map behind them."""
    vector = tl.program_id(1)
    first, kind = vector < 3, vector % 3  # of attention, or of the MLP; shift, scale, gate
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, row = lane < D, vector * D + lane
    if kind == 2:  # complete
        g = tl.load(g_vectors + row, mask=inside, other=0.0)
    else:
        strip = tl.arange(0, STRIPS)
        here = (strip < tl.where(first, S1, S2))[:, None] & inside[None, :]
        at = ((tl.where(first, 0, S1) + strip) * 2 + kind)[:, None] * D + lane[None, :]
        g = tl.sum(tl.load(sums + at, mask=here, other=0.0), 0)
        if kind == 1:
            factor = 1 + tl.load(vectors + row, mask=inside, other=0.0)
            if first:
                tl.store(g_norm1 + lane, g * factor, mask=inside)
                g *= tl.load(norm1 + lane, mask=inside, other=0.0)
            else:
                tl.store(g_norm2 + lane, g * factor, mask=inside)
                g *= tl.load(norm2 + lane, mask=inside, other=0.0)
        tl.store(g_vectors + row, g, mask=inside)

    column = tl.arange(0, COLUMNS)
    in_column = column < C
    here, at = inside[:, None] & in_column[None, :], row[:, None] * C + column[None, :]
    w = tl.load(modulation + at, mask=here, other=0.0)
    tl.store(g_modulation + at, g[:, None] * tl.load(c + column, mask=in_column, other=0.0)[None, :], mask=here)
    piece = vector * tl.num_programs(0) + tl.program_id(0)
    tl.store(g_c + piece * C + column, tl.sum(g[:, None] * w, 0), mask=in_column)


def unfold_entry(
    g: Tensor, g_bias: Tensor, weight: Tensor, norm: Tensor, shift: Tensor, scale: Tensor, sums_S2I: Tensor
) -> Tensor:
    """Gradient of the weight. The sums of every strip are written to `sums_S2I`."""
    g_weight, (O, I) = torch.empty_like(weight), weight.shape
    launch = _entry[triton.cdiv(O, ROWS), triton.cdiv(I, COLUMNS)]  # type: ignore[index]
    launch(g, g_bias, weight, norm, shift, scale, g_weight, sums_S2I, O, I, ROWS, COLUMNS, num_warps=WARPS)
    return g_weight


def unfold_exit(
    g: Tensor,
    g_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor,
    g_gate: Tensor,
    g_of_bias: Tensor | None,
) -> Tensor:
    """Gradient of the weight. Those of the gate and of the bias are written to `g_gate` and `g_of_bias`."""
    g_weight, (O, I) = torch.empty_like(weight), weight.shape
    columns = triton.next_power_of_2(I)  # whole rows, of which a program has several if they are short
    rows = max(1, ROWS * COLUMNS // columns)
    launch = _exit[(triton.cdiv(O, rows),)]  # type: ignore[index]
    launch(g, g_bias, weight, bias, gate, g_weight, g_gate, g_of_bias, O, I, rows, columns, num_warps=WARPS)
    return g_weight


def unfold_block(maps: Maps, parts: Parts, vectors_6D: Tensor) -> list[Tensor]:
    """`folding.unfold`."""
    maps = Maps(*(None if g is None else g.contiguous() for g in maps))  # type: ignore[arg-type]
    D, C = parts.norm1.shape[0], parts.c_1C.shape[1]
    S1, S2 = (triton.cdiv(weight.shape[0], ROWS) for weight in (parts.qkv, parts.mlp_in))
    sums_S2D = vectors_6D.new_empty(S1 + S2, 2, D)
    g_6D, g_norm1, g_norm2 = (torch.empty_like(x) for x in (vectors_6D, parts.norm1, parts.norm2))
    g_out_bias = None if parts.mlp_out_bias is None else torch.empty_like(parts.mlp_out_bias)
    shift1, scale1, gate1, shift2, scale2, gate2 = vectors_6D.chunk(6)
    _, _, g_gate1, _, _, g_gate2 = g_6D.chunk(6)

    g_qkv = unfold_entry(maps.qkv, maps.qkv_bias, parts.qkv, parts.norm1, shift1, scale1, sums_S2D)
    g_attn_out = unfold_exit(maps.attn_out, None, parts.attn_out, None, gate1, g_gate1, None)
    g_mlp_in = unfold_entry(maps.mlp_in, maps.mlp_in_bias, parts.mlp_in, parts.norm2, shift2, scale2, sums_S2D[S1:])
    g_mlp_out = unfold_exit(
        maps.mlp_out, maps.mlp_out_bias, parts.mlp_out, parts.mlp_out_bias, gate2, g_gate2, g_out_bias
    )

    g_modulation, tiles = torch.empty_like(parts.modulation), triton.cdiv(D, ROWS)
    g_c_pieces = vectors_6D.new_empty(6 * tiles, C)
    _vectors[tiles, 6](  # type: ignore[index]
        sums_S2D, parts.norm1, parts.norm2, vectors_6D, parts.modulation, parts.c_1C,
        g_6D, g_norm1, g_norm2, g_modulation, g_c_pieces, S1, S2, D, C,
        triton.next_power_of_2(max(S1, S2)), ROWS, triton.next_power_of_2(C), num_warps=WARPS,
    )  # fmt: skip
    g_c = g_c_pieces.sum(0, keepdim=True)
    g_out_bias = vectors_6D.new_empty(0) if g_out_bias is None else g_out_bias
    return [g_c, g_modulation, g_6D, g_norm1, g_qkv, g_attn_out, g_norm2, g_mlp_in, g_mlp_out, g_out_bias]

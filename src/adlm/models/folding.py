"""Vectors that all rows share, in the weights of the linear maps next to them.

The norm's weight and, without time conditioning, the modulations of adaLN are products with diagonal matrices. In the
weights they leave a plain norm and a plain sum for the activations; what is saved, for every vector, is its gradient's
sum over all positions and the activations kept for that.

`fold` does this for a whole block at once, with a backward pass of its own. What comes back for a folded weight is a
matrix that the gradients of the weight and of the vectors both need. Compiled from the formulas below, a block's
backward pass reads these matrices twice, by thirteen kernels of microseconds each; here every matrix is read once, by
one kernel, and one more does all that is left for the vectors and for the linear map that made them. (Doing that last
part for all blocks at once would save nothing: their sums would have to be copied together, a kernel for each block.)

Letters: D width, C width of the conditioning vector.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IN_ONE_PASS = True
"""Whether compiled blocks on a GPU use `fold`; if not, the compiler makes its own kernels of the formulas."""


def entry_map(
    weight: Tensor, bias: Tensor | None, norm: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """weight and bias of linear(x norm (1 + scale) + shift) as a map of x."""
    if shift is None or scale is None:
        return weight * norm, bias
    through = (weight * shift).sum(-1)
    return weight * (norm * (1 + scale)), through if bias is None else bias + through


def exit_map(weight: Tensor, bias: Tensor | None, gate: Tensor) -> tuple[Tensor, Tensor | None]:
    """weight and bias of gate linear(h) as a map of h."""
    return gate[:, None] * weight, None if bias is None else gate * bias


class Parts(NamedTuple):
    """What `fold` reads: the conditioning vector and the parameters of a block. Also, the gradients of all these."""

    c_1C: Tensor
    modulation: Tensor
    """From c to the six vectors: shift, scale and gate of attention, the same of the MLP."""
    modulation_bias: Tensor
    norm1: Tensor
    qkv: Tensor
    attn_out: Tensor
    norm2: Tensor
    mlp_in: Tensor
    mlp_out: Tensor
    mlp_in_bias: Tensor | None = None
    mlp_out_bias: Tensor | None = None


class Maps(NamedTuple):
    """What `fold` makes: linear maps of normalised activations, or into the stream. Also, the gradients of these."""

    qkv: Tensor
    qkv_bias: Tensor
    attn_out: Tensor
    mlp_in: Tensor
    mlp_in_bias: Tensor
    mlp_out: Tensor
    mlp_out_bias: Tensor | None = None


def fold(parts: Parts, dtype: torch.dtype) -> Maps:
    """In the precision of the products that follow, in which their gradients come back, too."""
    # the vectors are tiny and scale every activation: not worth rounding to bf16
    with torch.autocast(parts.c_1C.device.type, enabled=False):
        return Maps(*_Fold.apply(dtype, *parts))  # type: ignore[misc]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor | None):
        parts = Parts(*tensors)  # type: ignore[arg-type]
        vectors_6D = F.linear(parts.c_1C, parts.modulation, parts.modulation_bias).view(-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors_6D.chunk(6)
        made = (
            *entry_map(parts.qkv, None, parts.norm1, shift1, scale1),
            exit_map(parts.attn_out, None, gate1)[0],
            *entry_map(parts.mlp_in, parts.mlp_in_bias, parts.norm2, shift2, scale2),
            *exit_map(parts.mlp_out, parts.mlp_out_bias, gate2),
        )
        ctx.save_for_backward(vectors_6D, *tensors)
        # no output is None, which a compiler need not know how to differentiate; and for the condition see _Normalise
        return tuple(x if x.dtype == dtype else x.to(dtype) for x in made if x is not None)

    @staticmethod
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        vectors_6D, *tensors = ctx.saved_tensors
        maps, parts = Maps(*grad_outputs), Parts(*tensors)
        biases = {}
        *gradients, g_out_bias = unfold(list(maps), list(parts), vectors_6D)
        if parts.mlp_in_bias is not None:
            biases["mlp_in_bias"] = maps.mlp_in_bias.to(parts.mlp_in_bias.dtype)
        if parts.mlp_out_bias is not None:
            biases["mlp_out_bias"] = g_out_bias
        return None, *Parts(*gradients, **biases)


# An operator that the compiler does not look into: nothing could be fused with it, whose inputs are parameters and what
# matrix products wrote. (torch.library.triton_op would show it the kernels, and depend on more of it for nothing.)
@torch.library.custom_op("adlm::unfold", mutates_args=(), device_types="cpu")
def unfold(gradients: Sequence[Tensor | None], parts: Sequence[Tensor | None], vectors_6D: Tensor) -> list[Tensor]:
    """Gradients of `Parts`, from those of `Maps`, without that of mlp_in_bias (which is one of `Maps`); the last, of
    mlp_out_bias, is empty if there is none.

    This is the slow twin of the kernels.
    """
    maps, p = Maps(*gradients), Parts(*parts)  # type: ignore[arg-type]
    exact = vectors_6D.dtype
    shift1, scale1, gate1, shift2, scale2, gate2 = vectors_6D.chunk(6)
    g_qkv, g_shift1, g_scale1, g_norm1 = _unfold_entry(maps.qkv, maps.qkv_bias, p.qkv, p.norm1, shift1, scale1)
    g_in, g_shift2, g_scale2, g_norm2 = _unfold_entry(maps.mlp_in, maps.mlp_in_bias, p.mlp_in, p.norm2, shift2, scale2)
    g_attn_out, g_gate1 = gate1[:, None] * maps.attn_out, (maps.attn_out * p.attn_out).sum(1)
    g_out, g_gate2 = gate2[:, None] * maps.mlp_out, (maps.mlp_out * p.mlp_out).sum(1)
    g_out_bias = vectors_6D.new_empty(0)
    if maps.mlp_out_bias is not None and p.mlp_out_bias is not None:
        g_gate2, g_out_bias = g_gate2 + maps.mlp_out_bias * p.mlp_out_bias, gate2 * maps.mlp_out_bias
    g_6D = torch.cat((g_shift1, g_scale1, g_gate1, g_shift2, g_scale2, g_gate2)).to(exact)
    g_c = (g_6D @ p.modulation)[None]
    return [g_c, g_6D[:, None] * p.c_1C, g_6D, g_norm1, g_qkv, g_attn_out, g_norm2, g_in, g_out, g_out_bias]


def _unfold_entry(g, g_bias, weight, norm, shift, scale) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of weight, shift, scale and norm."""
    g_product = (g * weight).sum(0)
    g_weight = g * (norm * (1 + scale)) + g_bias[:, None] * shift
    return g_weight, (g_bias[:, None] * weight).sum(0), g_product * norm, g_product * (1 + scale)


@unfold.register_kernel("cuda")
def _(gradients, parts, vectors_6D):
    from adlm.models.folding_kernels import unfold_block

    return unfold_block(Maps(*gradients), Parts(*parts), vectors_6D)


@unfold.register_fake
def _(gradients, parts, vectors_6D):
    p = Parts(*parts)
    bias = vectors_6D.new_empty(0) if p.mlp_out_bias is None else p.mlp_out_bias
    like = [p.c_1C, p.modulation, vectors_6D, p.norm1, p.qkv, p.attn_out, p.norm2, p.mlp_in, p.mlp_out, bias]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]

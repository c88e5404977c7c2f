"""Gradients of biases, summed by the kernels that make what they are sums of.

The gradient of a linear map's bias is that of the map's output, summed over all positions. The compiler first writes
the latter, then reads it all again for the sum. Here the map takes its bias without gradient, and the function that
reads the map's output gives it one: it gets the bias, too, ignores it on the way forward, and on the way back returns
two gradients of one pass over memory. Only in compiled graphs on a GPU (`sums_here`); elsewhere autograd does it.
"""

import torch
from torch import Tensor

from adlm.models.pointwise import gelu, rotate, split_heads

GROUPS = 128
"""Rows of partial sums that a kernel leaves, each over a share of the positions. A constant, so that no shape but that
of the activations depends on how many positions a batch scores; a sum of more rows would be compiled to two kernels."""


def sums_here(x: Tensor) -> bool:
    """Whether gradients of biases of maps of x are summed here. To have all of them from autograd: return False."""
    return torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64  # kernels compute in float32


# Opaque to the compiler, since products stand before and after these passes and there is nothing to fuse into them: the
# kernels that run are then those that were tested by themselves. The partial sums are left to the compiler to add.


@torch.library.custom_op("adlm::gelu_backward", mutates_args=(), device_types="cuda")
def gelu_backward(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gelu's input x, and its partial sums over all dimensions but the last, in float32."""
    from adlm.models import backward_kernels

    return backward_kernels.gelu_backward(g, x, GROUPS)


@gelu_backward.register_fake
def _(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(GROUPS, x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("adlm::heads_backward", mutates_args=(), device_types="cuda")
def heads_backward(
    gq_BLNH: Tensor, gk_BLNH: Tensor, gv_BLNH: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rotated queries, rotated keys and values -> that of all three before, [B, L, E], and its partial
    sums over positions, in float32."""
    from adlm.models import backward_kernels

    return backward_kernels.heads_backward(gq_BLNH, gk_BLNH, gv_BLNH, cos, sin, GROUPS)


@heads_backward.register_fake
def _(gq_BLNH: Tensor, gk_BLNH: Tensor, gv_BLNH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    B, L, N, H = gq_BLNH.shape
    return gq_BLNH.new_empty(B, L, 3 * N * H), gq_BLNH.new_empty(GROUPS, 3 * N * H, dtype=torch.float32)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = bias.dtype
        return gelu(x)

    @staticmethod
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        g_x, sums_GF = gelu_backward(*grad_outputs, *ctx.saved_tensors)
        return g_x, sums_GF.sum(0).to(ctx.dtype)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_BLE: Tensor, bias_E: Tensor, n_heads: int, cos: Tensor, sin: Tensor):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = bias_E.dtype
        q_BLNH, k_BLNH, v_BLNH = split_heads(qkv_BLE, n_heads)
        return rotate(q_BLNH, cos, sin), rotate(k_BLNH, cos, sin), v_BLNH

    @staticmethod
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        g_BLE, sums_GE = heads_backward(*grad_outputs, *ctx.saved_tensors)
        return g_BLE, sums_GE.sum(0).to(ctx.dtype), None, None, None


def gelu_after(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x), where x is a linear map's output that holds `bias` without gradient."""
    return _Gelu.apply(x, bias)  # type: ignore[return-value]


def heads_after(
    qkv_BLE: Tensor, bias_E: Tensor, n_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, rotated keys, and values (a view) of a linear map's output that holds the bias without gradient:
    whoever else reads that output has to read it from these."""
    return _Heads.apply(qkv_BLE, bias_E, n_heads, cos, sin)  # type: ignore[return-value]

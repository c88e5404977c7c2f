"""Losses behind a linear head that never hold more than one chunk of logits, forward or backward.

The logits of N positions over a vocabulary of V are by far the largest tensor of a language model. Here the positions
go through the head a chunk at a time, and the gradients with respect to hidden states, weight and bias are computed in
the same pass (softmax minus one-hot, times the position's weight), so nothing V-wide has to be kept for the backward
pass, which only scales these gradients. The price: they are computed even if backward never runs. Under no_grad, and
for a frozen head, they are skipped.

Letters: N positions, D width, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Elements of one chunk of logits: large enough for full-speed matrix products, small beside the activations.
CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**24}
# Matrix products on the GPU want aligned columns; 50258 is only even.
COLUMN_MULTIPLE = {"cuda": 128, "cpu": 1}


def cross_entropy_chunk(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropies of a chunk, and their gradient with respect to the logits (in the logits' dtype).

    Columns at -inf are classes that do not exist. Works in place, on the chunk itself if its precision allows: a pass
    over n x V numbers costs as much as the product that made them.
    """
    z = logits_nV.to(weight_n.dtype)
    peak_n1 = z.amax(-1, keepdim=True)
    gold_n1 = z.gather(1, target_n[:, None])
    p = z.sub_(peak_n1).exp_()
    sum_n1 = p.sum(-1, keepdim=True)
    loss_n = (sum_n1.log() + peak_n1 - gold_n1).squeeze(1) * weight_n
    gradient = p.mul_(weight_n[:, None] / sum_n1).to(logits_nV.dtype)
    gradient.scatter_add_(1, target_n[:, None], -weight_n[:, None].to(gradient.dtype))
    return loss_n, gradient


ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits_nV, target_n, weight_n) -> (loss of each position, gradient with respect to the logits)."""


@functools.cache
def on_gpu(chunk_loss: ChunkLoss, dtype: torch.dtype) -> ChunkLoss:
    """The Triton kernel if there is one, else the compiled loss: a kernel or two instead of a dozen passes."""
    if chunk_loss is cross_entropy_chunk and dtype == torch.float32:
        try:
            from adlm.models.kernels import cross_entropy_rows
        except ImportError:  # a build of torch without triton
            pass
        else:
            return cross_entropy_rows
    return torch.compile(chunk_loss, dynamic=True)  # the number of positions varies


class Head(Protocol):
    """A linear map to logits, as nn.Linear is."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


class _Options(NamedTuple):
    """Arguments of `_ChunkedHead` that are not tensors."""

    exclude: int | None
    chunk_loss: ChunkLoss
    chunk_size: int
    dtype: torch.dtype
    """Precision of the matrix products."""
    gradients: bool
    trains_head: bool
    """Weight and bias need gradients, too."""


class _ChunkedHead(torch.autograd.Function):
    """sum_i loss(h_i W^T + b, target_i, weight_i), for any loss of a position that gives its own gradient."""

    @staticmethod
    def forward(ctx, h_ND, weight_VD, bias_V, target_N, weight_N, options: _Options):
        (V, D), dtype, gradients = weight_VD.shape, options.dtype, options.gradients
        columns = -(-V // COLUMN_MULTIPLE.get(h_ND.device.type, 1)) * COLUMN_MULTIPLE.get(h_ND.device.type, 1)
        accumulate = torch.promote_types(dtype, torch.float32)
        w = weight_VD
        if columns != V or w.dtype != dtype:
            w = weight_VD.new_zeros(columns, D, dtype=dtype)
            w[:V] = weight_VD
        b = offsets(weight_VD, bias_V, options.exclude, columns, dtype)

        per_chunk = on_gpu(options.chunk_loss, accumulate) if h_ND.is_cuda else options.chunk_loss
        total = h_ND.new_zeros((), dtype=accumulate)
        grad_h = torch.zeros_like(h_ND) if gradients else None
        grad_w: Tensor | None = None
        trains = gradients and options.trains_head
        grad_b = h_ND.new_zeros(columns, dtype=accumulate) if trains and bias_V is not None else None
        for start in range(0, h_ND.shape[0], options.chunk_size):
            part = slice(start, start + options.chunk_size)
            h = h_ND[part].to(dtype)
            loss, g = per_chunk(torch.addmm(b, h, w.t()), target_N[part], weight_N[part].to(accumulate))
            total += loss.sum()
            if grad_h is not None:
                grad_h[part] = g @ w
                grad_w = add_product(grad_w, g, h, accumulate) if trains else None
                if grad_b is not None:
                    grad_b += g.sum(0, dtype=accumulate)
        if gradients:
            if trains:
                grad_w = torch.zeros_like(weight_VD, dtype=accumulate) if grad_w is None else grad_w[:V]
            ctx.save_for_backward(grad_h, grad_w, None if grad_b is None else grad_b[:V])
        return total

    @staticmethod
    def backward(ctx, *grad_outputs):
        (scale,) = grad_outputs
        grad_h, grad_w, grad_b = ctx.saved_tensors
        grad_w, grad_b = (None if grad is None else grad * scale for grad in (grad_w, grad_b))
        return grad_h * scale.to(grad_h.dtype), grad_w, grad_b, None, None, None


def offsets(weight_VD: Tensor, bias_V: Tensor | None, exclude: int | None, columns: int, dtype: torch.dtype) -> Tensor:
    """What the product that makes the logits adds to them: the bias, and -inf where there is no class."""
    b = weight_VD.new_full((columns,), -torch.inf, dtype=dtype)
    b[: weight_VD.shape[0]] = 0 if bias_V is None else bias_V
    if exclude is not None:
        b[exclude : exclude + 1].fill_(-torch.inf)  # b[exclude] = ... would copy from the host, and wait
    return b


def add_product(out_VD: Tensor | None, g_nV: Tensor, h_nD: Tensor, dtype: torch.dtype) -> Tensor:
    """out + g^T h, summed in `dtype`; out is None for the first chunk, and updated in place after it."""
    if dtype == g_nV.dtype:
        return g_nV.t() @ h_nD if out_VD is None else out_VD.addmm_(g_nV.t(), h_nD)
    if g_nV.is_cuda and dtype == torch.float32:  # bf16 factors, but the product is not rounded to bf16
        if out_VD is None:
            return torch.mm(g_nV.t(), h_nD, out_dtype=torch.float32)
        return torch.addmm(out_VD, g_nV.t(), h_nD, out_dtype=torch.float32, out=out_VD)
    product = (g_nV.t() @ h_nD).to(dtype)
    return product if out_VD is None else out_VD.add_(product)


def linear_cross_entropy(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    weights_N: Tensor,
    exclude: int | None = None,
    chunk_loss: ChunkLoss = cross_entropy_chunk,
    chunk_size: int = 0,
) -> Tensor:
    """sum_i weights_i * CE(softmax(head(hidden_i)), targets_i), a scalar.

    `exclude` takes one class out of the softmax (the mask: SUBS zero-masking); it must not be a target.
    `chunk_size` is the number of positions that have logits at a time (0: chosen from the vocabulary).
    Under autocast the products run in its dtype; sums and the weight's gradient stay in float32.
    """
    check_shapes(hidden_ND, head, targets_N, weights_N)
    weight_VD, bias_V, device = head.weight, head.bias, hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    trains_head = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    gradients = torch.is_grad_enabled() and (hidden_ND.requires_grad or trains_head)
    size = chunk_size or max(1, CHUNK_ELEMENTS.get(device, 2**24) // weight_VD.shape[0])
    options = _Options(exclude, chunk_loss, size, dtype, gradients, trains_head)
    return _ChunkedHead.apply(hidden_ND, weight_VD, bias_V, targets_N, weights_N, options)  # type: ignore[return-value]


@torch.no_grad()
def linear_losses(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    weights_N: Tensor,
    exclude: int | None = None,
    chunk_loss: ChunkLoss = cross_entropy_chunk,
) -> Tensor:
    """The loss of every position, without gradients, for evaluation; `linear_cross_entropy` is their sum."""
    check_shapes(hidden_ND, head, targets_N, weights_N)
    size = max(1, CHUNK_ELEMENTS.get(hidden_ND.device.type, 2**24) // head.weight.shape[0])
    accumulate = torch.promote_types(hidden_ND.dtype, torch.float32)
    b = offsets(head.weight, head.bias, exclude, head.weight.shape[0], head.weight.dtype)
    losses = [hidden_ND.new_zeros(0, dtype=accumulate)]
    for start in range(0, hidden_ND.shape[0], size):  # not `split`, which makes one chunk even of no positions
        part = slice(start, start + size)
        logits_nV = torch.nn.functional.linear(hidden_ND[part], head.weight, b)
        losses.append(chunk_loss(logits_nV, targets_N[part], weights_N[part].to(accumulate))[0])
    return torch.cat(losses)


def linear_nll(hidden_ND: Tensor, head: Head, targets_N: Tensor, exclude: int | None = None) -> Tensor:
    """-log softmax(head(hidden_i))[targets_i] for every position."""
    ones_N = torch.ones(hidden_ND.shape[0], device=hidden_ND.device)
    return linear_losses(hidden_ND, head, targets_N, ones_N, exclude)


def check_shapes(h_ND: Tensor, head: Head, target_N: Tensor, weight_N: Tensor) -> None:
    """Check shapes only: reading values would make the host wait for the device."""
    weight_VD, bias_V = head.weight, head.bias
    if h_ND.ndim != 2 or weight_VD.ndim != 2 or h_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden {tuple(h_ND.shape)} and weight {tuple(weight_VD.shape)} must be [N, D] and [V, D]")
    N, V, targets = h_ND.shape[0], weight_VD.shape[0], tuple(target_N.shape)
    if targets != (N,) or len(weight_N) != N:
        weights = tuple(weight_N.shape)
        raise ValueError(f"targets {targets} and weights {weights} must both be [{N}], one per hidden state")
    if bias_V is not None and bias_V.shape != (V,):
        raise ValueError(f"bias must be [{V}] or None")

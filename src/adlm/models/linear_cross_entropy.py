"""Losses behind a linear head that never hold more than one chunk of logits, forward or backward.

The logits of N rows over a vocabulary of V are by far the largest tensor of a language model. Here the rows go through
the head a chunk at a time, and the gradients with respect to hidden states, weight and bias are computed in the same
pass (softmax minus one-hot, times the row's weight), so nothing V-wide has to be kept for the backward pass, which is
two scalings. The price: gradients are computed even if nobody asks for them; under no_grad they are skipped.

Letters: N rows, D width, V vocabulary.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from adlm.errors import require

# Elements of one chunk of logits: large enough for full-speed matrix products, small beside the activations.
CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**24}
# Matrix products on the GPU want aligned columns; 50258 is only even.
COLUMN_MULTIPLE = {"cuda": 128, "cpu": 1}


def cross_entropy_chunk(
    logits_nV: Tensor, target_n: Tensor, weight_n: Tensor, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropies of a chunk, and their gradient with respect to the logits (in the logits' dtype).

    A row whose cross-entropy, before its weight, is below `floor` has neither loss nor gradient (0: every row counts).
    Columns at -inf are classes that do not exist. Works in place, on the chunk itself where its precision allows: a
    pass over n x V numbers costs as much as the products that made them.
    """
    z = logits_nV.to(weight_n.dtype)
    peak_n1 = z.amax(-1, keepdim=True)
    gold_n1 = z.gather(1, target_n[:, None])
    p = z.sub_(peak_n1).exp_()
    sum_n1 = p.sum(-1, keepdim=True)
    nats_n = (sum_n1.log() + peak_n1 - gold_n1).squeeze(1)
    if floor > 0:
        weight_n = weight_n.masked_fill(nats_n < floor, 0)
    loss_n = nats_n * weight_n
    gradient = p.mul_(weight_n[:, None] / sum_n1).to(logits_nV.dtype)
    gradient.scatter_add_(1, target_n[:, None], -weight_n[:, None].to(gradient.dtype))
    return loss_n, gradient


ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def on_gpu(chunk_loss: ChunkLoss, dtype: torch.dtype) -> ChunkLoss:
    """Our kernel where there is one, else compiled: a kernel or two instead of a dozen passes over the chunk."""
    if chunk_loss is cross_entropy_chunk and dtype == torch.float32:
        try:
            from adlm.models.kernels import cross_entropy_rows
        except ImportError:  # a build of torch without triton
            pass
        else:
            return cross_entropy_rows
    return torch.compile(chunk_loss, dynamic=True)  # the number of rows varies


def with_floor(chunk_loss: ChunkLoss, floor: float) -> ChunkLoss:
    """Only cross-entropy has a floor; other chunk losses take no such argument."""
    return functools.partial(chunk_loss, floor=floor) if floor > 0 else chunk_loss


class _ChunkedHead(torch.autograd.Function):
    """sum_i loss(h_i W^T + b, target_i, weight_i), any per-row loss that gives its own gradient."""

    @staticmethod
    def forward(
        ctx, h_ND, weight_VD, bias_V, target_N, weight_N, exclude, chunk_loss, floor, chunk_rows, dtype, gradients
    ):
        V, D = weight_VD.shape
        columns = -(-V // COLUMN_MULTIPLE.get(h_ND.device.type, 1)) * COLUMN_MULTIPLE.get(h_ND.device.type, 1)
        accumulate = torch.promote_types(dtype, torch.float32)
        w = weight_VD
        if columns != V or w.dtype != dtype:
            w = weight_VD.new_zeros(columns, D, dtype=dtype)
            w[:V] = weight_VD
        b = offsets(weight_VD, bias_V, exclude, columns, dtype)

        per_chunk = with_floor(on_gpu(chunk_loss, accumulate) if h_ND.is_cuda else chunk_loss, floor)
        total = h_ND.new_zeros((), dtype=accumulate)
        grad_h = torch.zeros_like(h_ND) if gradients else None
        grad_w: Tensor | None = None
        grad_b = h_ND.new_zeros(columns, dtype=accumulate) if gradients and bias_V is not None else None
        for start in range(0, h_ND.shape[0], chunk_rows):
            part = slice(start, start + chunk_rows)
            h = h_ND[part].to(dtype)
            loss, g = per_chunk(torch.addmm(b, h, w.t()), target_N[part], weight_N[part].to(accumulate))
            total += loss.sum()
            if grad_h is not None:
                grad_h[part] = g @ w
                grad_w = add_product(grad_w, g, h, accumulate)
                if grad_b is not None:
                    grad_b += g.sum(0, dtype=accumulate)
        if gradients:
            no_rows = grad_w is None
            grad_w = torch.zeros_like(weight_VD, dtype=accumulate) if no_rows else grad_w[:V]
            ctx.save_for_backward(grad_h, grad_w, None if grad_b is None else grad_b[:V])
        return total

    @staticmethod
    def backward(ctx, *grad_outputs):
        (scale,) = grad_outputs
        grad_h, grad_w, grad_b = ctx.saved_tensors
        grad_b = None if grad_b is None else grad_b * scale
        return grad_h * scale.to(grad_h.dtype), grad_w * scale, grad_b, *[None] * 8


def offsets(weight_VD: Tensor, bias_V: Tensor | None, exclude: int | None, columns: int, dtype: torch.dtype) -> Tensor:
    """What is added to the logits, inside the product that makes them: the bias, and -inf where there is no class."""
    b = weight_VD.new_full((columns,), -torch.inf, dtype=dtype)
    b[: weight_VD.shape[0]] = 0 if bias_V is None else bias_V
    if exclude is not None:
        b[exclude : exclude + 1].fill_(-torch.inf)  # b[exclude] = ... would copy from the host, and wait
    return b


def add_product(out_VD: Tensor | None, g_nV: Tensor, h_nD: Tensor, dtype: torch.dtype) -> Tensor:
    """out + g^T h, summed in `dtype`; out is None before the first chunk, and changed in place after it."""
    if dtype == g_nV.dtype:
        return g_nV.t() @ h_nD if out_VD is None else out_VD.addmm_(g_nV.t(), h_nD)
    if g_nV.is_cuda and dtype == torch.float32:  # a product of bf16 factors, not rounded to bf16
        if out_VD is None:
            return torch.mm(g_nV.t(), h_nD, out_dtype=torch.float32)
        return torch.addmm(out_VD, g_nV.t(), h_nD, out_dtype=torch.float32, out=out_VD)
    product = (g_nV.t() @ h_nD).to(dtype)
    return product if out_VD is None else out_VD.add_(product)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    weights_N: Tensor,
    exclude: int | None = None,
    chunk_loss: ChunkLoss = cross_entropy_chunk,
    floor: float = 0.0,
    chunk_rows: int = 0,
) -> Tensor:
    """sum_i weights_i * CE(softmax(hidden_i W^T + b), targets_i), a scalar.

    `exclude` takes one class out of the softmax (the mask: SUBS zero-masking); it must not be a target.
    `floor` leaves out the rows with a smaller cross-entropy (before their weight).
    `chunk_rows` is how many rows of logits exist at a time (0: chosen from the vocabulary).
    Under autocast the products run in its dtype; sums and the weight's gradient stay in float32.
    """
    check_rows(hidden_ND, weight_VD, bias_V, targets_N, weights_N)
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    if chunk_rows <= 0:
        chunk_rows = max(1, CHUNK_ELEMENTS.get(device, 2**24) // weight_VD.shape[0])
    needed = (hidden_ND, weight_VD) if bias_V is None else (hidden_ND, weight_VD, bias_V)
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed)
    return _ChunkedHead.apply(
        hidden_ND, weight_VD, bias_V, targets_N, weights_N, exclude, chunk_loss, floor, chunk_rows, dtype, gradients
    )


@torch.no_grad()
def linear_row_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    weights_N: Tensor,
    exclude: int | None = None,
    chunk_loss: ChunkLoss = cross_entropy_chunk,
    floor: float = 0.0,
) -> Tensor:
    """The loss of every row, of which `linear_cross_entropy` is the sum; no gradients: for evaluation."""
    check_rows(hidden_ND, weight_VD, bias_V, targets_N, weights_N)
    device = hidden_ND.device.type
    rows = max(1, CHUNK_ELEMENTS.get(device, 2**24) // weight_VD.shape[0])
    accumulate = torch.promote_types(hidden_ND.dtype, torch.float32)
    b = offsets(weight_VD, bias_V, exclude, weight_VD.shape[0], accumulate)
    per_chunk = with_floor(chunk_loss, floor)
    losses = [hidden_ND.new_zeros(0, dtype=accumulate)]
    for start in range(0, hidden_ND.shape[0], rows):  # not `split`: it makes one chunk of no rows, too
        part = slice(start, start + rows)
        logits_nV = torch.nn.functional.linear(hidden_ND[part], weight_VD, b)
        losses.append(per_chunk(logits_nV, targets_N[part], weights_N[part].to(accumulate))[0])
    return torch.cat(losses)


def linear_nll(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, exclude: int | None = None
) -> Tensor:
    """-log softmax(hidden_i W^T + b)[targets_i] for every row."""
    ones_N = torch.ones(hidden_ND.shape[0], device=hidden_ND.device)
    return linear_row_losses(hidden_ND, weight_VD, bias_V, targets_N, ones_N, exclude)


def check_rows(h_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, weight_N: Tensor) -> None:
    """Shapes only: reading values would make the host wait for the device."""
    require(
        h_ND.ndim == 2 and weight_VD.ndim == 2 and h_ND.shape[1] == weight_VD.shape[1],
        f"hidden {tuple(h_ND.shape)} and weight {tuple(weight_VD.shape)} must be [N, D] and [V, D]",
    )
    N, V = h_ND.shape[0], weight_VD.shape[0]
    require(
        tuple(target_N.shape) == (N,) and len(weight_N) == N,
        f"targets {tuple(target_N.shape)} and weights {tuple(weight_N.shape)} must both be [{N}], one per hidden row",
    )
    require(bias_V is None or bias_V.shape == (V,), f"bias must be [{V}] or None")

"""Drawing tokens: temperature, top-k, nucleus, min-p, and float64 Gumbel-max, for gathered rows of logits [N, V].

Rows are positions that were chosen to be drawn, from any number of requests, so every parameter may be a float or a
tensor [N]. Parameters left at None are off and cost nothing; whether one is on is decided by the caller on the host,
never by looking at a tensor. Filters act in the usual order - temperature, top-k, nucleus, min-p - each on what the one
before left.
"""

import torch
from torch import Tensor

from adlm.diffusion.checks import check_not_nan
from adlm.errors import require

PerRow = Tensor | float | None


def _per_row(x: Tensor | float, like: Tensor) -> Tensor:
    x = torch.as_tensor(x, device=like.device)
    return x.unsqueeze(-1) if x.dim() else x


def check_drawing(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, where: str = "sampling."
) -> None:
    """Host-side check of one request's settings; the names in the message are the configuration keys."""
    require(temperature >= 0, f"{where}temperature must be 0 (greedy) or more, got {temperature}")
    require(top_k >= 0, f"{where}top_k must be 0 (off) or a number of tokens, got {top_k}")
    require(0 < top_p <= 1, f"{where}top_p must lie in (0, 1], got {top_p}")
    require(0 <= min_p < 1, f"{where}min_p must lie in [0, 1), got {min_p}")


def filter_logits(
    logits: Tensor,
    temperature: PerRow = None,
    top_k: Tensor | int | None = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    release_cut: Tensor | bool = False,
) -> Tensor:
    """Float32 log-probabilities [N, V] of the cut and renormalised distribution (-inf where cut).

    temperature 0 means greedy; top_k 0, top_p 1 and min_p 0 cut nothing in their row. The nucleus keeps the smallest
    set of most probable tokens with at least top_p; with `release_cut` it drops the token that crosses top_p, as the
    public release does (the most probable token always stays). Ties are broken towards smaller ids.
    """
    require(logits.dim() >= 1 and logits.shape[-1] > 0, f"logits must be [N, V], got shape {tuple(logits.shape)}")
    check_not_nan("logits", logits)
    logits = logits.float()
    if temperature is not None:
        t = _per_row(temperature, logits)
        # Greedy as a limit: all mass on the best token. A tiny temperature would overflow float32 instead.
        best = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0).log()
        logits = torch.where(t > 0, logits / torch.where(t > 0, t, 1.0), best)
    if top_k is not None or top_p is not None:
        order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        keep = torch.ones_like(order.values, dtype=torch.bool)
        if top_k is not None:
            k = _per_row(top_k, logits)
            keep &= (rank < k) | (k <= 0)
        if top_p is not None:
            p = _per_row(top_p, logits)
            # float64: on a flat distribution 50,000 float32 additions move the cut
            q = order.values.double().masked_fill(~keep, -torch.inf).softmax(-1)
            inclusive = q.cumsum(-1)
            if isinstance(release_cut, Tensor):
                inside = torch.where(release_cut.unsqueeze(-1), inclusive <= p, inclusive - q < p)
            else:
                inside = inclusive <= p if release_cut else inclusive - q < p
            keep &= inside | (rank == 0) | (p >= 1)
        keep = torch.zeros_like(keep).scatter_(-1, order.indices, keep)
        logits = logits.masked_fill(~keep, -torch.inf)
    if min_p is not None:
        m = _per_row(min_p, logits)
        logits = torch.where(logits >= logits.amax(-1, keepdim=True) + torch.log(m), logits, -torch.inf)
    return logits.log_softmax(-1)


def gumbel_argmax(log_p: Tensor, u: Tensor) -> Tensor:
    """One draw per row of (possibly unnormalised) log_p by Gumbel-max, from uniforms in (0, 1) of the same shape.

    float64: float32 noise cannot reach the tail, which acts as a hidden temperature below 1.
    """
    require(u.shape == log_p.shape, f"u must have the shape of log_p, {tuple(log_p.shape)}, got {tuple(u.shape)}")
    require(u.dtype == torch.float64, f"u must be float64, got {u.dtype}")
    return (log_p.double() - torch.log(-torch.log(u))).argmax(-1)

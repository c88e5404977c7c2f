"""Drawing tokens: temperature, top-k, nucleus, min-p, and float64 Gumbel-max, for gathered rows of logits [N, V].

Rows are positions that were chosen to be drawn, from any number of requests, so every parameter may be a float or a
tensor [N]. Parameters left at None are off and cost nothing; whether one is on is decided by the caller on the host,
never by looking at a tensor. Filters act in the usual order - temperature, top-k, nucleus, min-p - each on what the one
before left.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adlm.diffusion import check_not_nan, visible
from adlm.errors import require

PerRow = Tensor | float | None
ENOUGH = 2048
"""Most probable tokens that nearly always hold the nucleus."""
LEAST_TEMPERATURE = 1e-6
"""Below it a draw is greedy: dividing by much less overflows float32, and every token would be as good as any."""


def _per_row(x: Tensor | float, like: Tensor) -> Tensor:
    x = torch.as_tensor(x, device=like.device)
    return x.unsqueeze(-1) if x.dim() else x


def filter_logits(
    logits: Tensor,
    temperature: PerRow = None,
    top_k: Tensor | int | None = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    release_nucleus: Tensor | bool = False,
) -> Tensor:
    """Float32 log-probabilities [N, V] of the filtered and renormalised distribution (-inf where filtered out).

    temperature 0, or less than LEAST_TEMPERATURE, means greedy; top_k 0, top_p 1 and min_p 0 keep all of their row.
    The nucleus keeps the smallest set of most probable tokens with at least top_p; with `release_nucleus` it drops the
    token that crosses top_p, as the public release does (the most probable token always stays). Ties are broken
    towards smaller ids.
    """
    require(logits.dim() >= 1 and logits.shape[-1] > 0, f"logits must be [N, V], got shape {tuple(logits.shape)}")
    check_not_nan("logits", logits)
    logits = logits.float()
    if temperature is not None:
        t = _per_row(temperature, logits)
        # Greedy as a limit: all mass on the best token. A tiny temperature would overflow float32 instead.
        best = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0).log()
        warm = t >= LEAST_TEMPERATURE
        logits = torch.where(warm, logits / torch.where(warm, t, 1.0), best)
    if top_k is not None or top_p is not None:
        k = None if top_k is None else _per_row(top_k, logits)
        p = None if top_p is None else _per_row(top_p, logits).double()
        logits = logits.masked_fill(~most_probable(logits, k, p, release_nucleus), -torch.inf)
    if min_p is not None:
        m = _per_row(min_p, logits)
        logits = torch.where(logits >= logits.amax(-1, keepdim=True) + torch.log(m), logits, -torch.inf)
    return logits.log_softmax(-1)


def most_probable(logits: Tensor, k: Tensor | None, p: Tensor | None, release_nucleus: Tensor | bool = False) -> Tensor:
    """Mask [N, V] of the tokens that top-k and then the nucleus keep; k and p broadcast to [N, 1], None is off."""
    if isinstance(release_nucleus, Tensor):
        release_nucleus = release_nucleus.unsqueeze(-1)
    if visible(logits) and logits.shape[-1] > ENOUGH:
        # On a CPU it is fastest to look among the best few.
        kept = among_best(logits, k, p, release_nucleus)
        if kept is not None:
            return kept
    kept = torch.ones_like(logits, dtype=torch.bool)
    if k is not None:
        kept = leading(logits, torch.ones_like(logits), torch.where(k > 0, k, logits.shape[-1]).double())
    if p is not None:
        weight = (logits - logits.amax(-1, keepdim=True)).exp().masked_fill(~kept, 0.0)
        need = p * weight.sum(-1, keepdim=True, dtype=torch.float64)
        kept = kept & (leading(logits, weight, need, release_nucleus) | (p >= 1))
    return kept


def among_best(logits: Tensor, k: Tensor | None, p: Tensor | None, release_nucleus: Tensor | bool) -> Tensor | None:
    """`most_probable` if the ENOUGH most probable tokens decide it in every row, else None."""
    k = torch.zeros((), dtype=torch.int64) if k is None else k
    p = torch.ones((), dtype=torch.float64) if p is None else p
    everything = (k <= 0) & (p >= 1)
    values = logits.topk(ENOUGH, sorted=True).values
    n, mass = prefix(values, logits.double().logsumexp(-1, keepdim=True), k, p, release_nucleus)
    if not bool((everything | ((k > 0) & (k <= ENOUGH)) | ((k <= 0) & (mass >= p))).all()):
        return None
    # Only values were ordered: among equals at the edge, as many as belong are taken from the smallest ids on.
    edge = values.gather(-1, n - 1)
    above, at = logits > edge, logits == edge
    room = n - above.sum(-1, keepdim=True)
    return above | (at & (at.cumsum(-1) <= room)) | everything


def leading(logits: Tensor, weight: Tensor, need: Tensor, short: Tensor | bool = False) -> Tensor:
    """Mask of the shortest prefix, in descending order of logits and among equals of ids, whose weights (equal where
    logits are) add up to `need`; where `short`, of the longest one that does not exceed it, at least one token.

    Found by bisection, without sorting: 32 sums find the value at the edge bit by bit, 17 or so the last id. Each is a
    pass over numbers that stay in a GPU's cache; a sort moves them ten times with their ids, and does not compile.
    """

    def mass(inside: Tensor) -> Tensor:
        return torch.where(inside, weight, 0.0).sum(-1, keepdim=True, dtype=torch.float64)

    edge = float_of(largest(32, lambda bits: mass(logits >= float_of(bits)) >= need, need))
    above, at = logits > edge, logits == edge
    each = torch.where(at, weight, 0.0).amax(-1, keepdim=True).double()
    ties = (need - mass(above)) / each
    none_yet = ~above.any(-1, keepdim=True)
    at_most = torch.maximum(ties.floor(), none_yet.double())
    room = torch.where(torch.as_tensor(short, device=logits.device), at_most, ties.ceil())
    ids = torch.arange(logits.shape[-1], device=logits.device)
    stop = largest(logits.shape[-1].bit_length(), lambda n: (at & (ids < n)).sum(-1, keepdim=True) <= room, need)
    return above | (at & (ids < stop))


def largest(bits: int, holds: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The largest integer of so many bits for which `holds`, in each row; it holds at 0 and, once false, stays so."""
    found = torch.zeros_like(like, dtype=torch.int64)
    for bit in reversed(range(bits)):
        candidate = found + (1 << bit)
        found = torch.where(holds(candidate), candidate, found)
    return found


def float_of(rank: Tensor) -> Tensor:
    """The float32 number `rank` from -inf (0) upwards; NaN, which nothing reaches, beyond +inf."""
    pattern = (rank + BELOW_INFINITY).clamp(max=(1 << 32) - 1)
    signed = torch.where(pattern >= 1 << 31, pattern - (1 << 31), ~pattern)
    return signed.to(torch.int32).view(torch.float32)


BELOW_INFINITY = (1 << 23) - 1  # bit patterns of negative NaNs, which would come before -inf


def prefix(
    values: Tensor, total: Tensor, k: Tensor, p: Tensor, release_nucleus: Tensor | bool = False
) -> tuple[Tensor, Tensor]:
    """(how many of the descending `values` are kept, at least 1; the probability they hold together), each [N, 1].

    `total` is the log of the normaliser of the whole row, of which `values` may be only the largest part. float64: on
    a flat distribution 50,000 float32 additions move the edge of the nucleus.
    """
    first = torch.arange(values.shape[-1], device=values.device)
    inside = ((first < k) | (k <= 0)).expand_as(values)
    v = values.double().masked_fill(~inside, -torch.inf)
    q = (v - torch.where(k > 0, v.logsumexp(-1, keepdim=True), total)).exp()
    inclusive = q.cumsum(-1)
    within = torch.where(torch.as_tensor(release_nucleus, device=values.device), inclusive <= p, inclusive - q < p)
    kept = inside & (within | (p >= 1))
    return kept.sum(-1, keepdim=True).clamp(min=1), inclusive[..., -1:]


def gumbel_argmax(log_p: Tensor, u: Tensor) -> Tensor:
    """One draw per row of (possibly unnormalised) log_p by Gumbel-max, from uniforms in (0, 1) of the same shape.

    float64: float32 noise cannot reach the tail, which acts as a hidden temperature below 1.
    """
    require(u.shape == log_p.shape, f"u must have the shape of log_p, {tuple(log_p.shape)}, got {tuple(u.shape)}")
    require(u.dtype == torch.float64, f"u must be float64, got {u.dtype}")
    return (log_p.double() - torch.log(-torch.log(u))).argmax(-1)

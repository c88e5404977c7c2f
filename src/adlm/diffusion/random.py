"""Random numbers as functions of counters, and draws from categorical distributions."""

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from adlm.diffusion import check_not_nan, visible
from adlm.errors import require

# ---- uniform numbers -------------------------------------------------------------------------------------------------
# Random numbers without a generator: a uniform is a pure function of (seed, counters).
#
# A number depends on its purpose (seed, stream, step, position, ...), not on the order of draws. Resuming a run,
# changing the number of ranks or sharing a batch with other requests therefore changes nothing, and there is no state
# to save. The price is about ten integer operations per number.
#
# The function is a chain of splitmix64 steps in int64: the hash of the counters so far seeds a splitmix64 stream, and
# the next counter is the index in that stream. Multiplication wraps and a mask makes shifts logical, so CPU and GPU
# give the same bits.


class Stream(enum.IntEnum):
    """First counter after the seed: what the numbers are for. Two purposes never share numbers."""

    TIME = 1  # times t of a training or evaluation batch
    MASK = 2  # which positions the forward process masks
    REVEAL = 3  # which masked positions a sampler reveals
    REMASK = 4  # which revealed positions a sampler masks again
    TOKEN = 5  # Gumbel noise of a drawn token
    ORDER = 6  # orders and permutations
    SPLIT = 7  # anything that the caller separates further by its own counters
    ANCHOR = 8  # which anchors are scored, if not all are
    BLOCK = 9  # block lengths of a training batch
    LETTER = 10  # which letter of an automaton a position takes


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: splitmix64's increment
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WORD = (1 << 64) - 1


def _signed(x: int) -> int:
    """The int64 with the same 64 bits as `x`."""
    x &= WORD
    return x - (1 << 64) if x >> 63 else x


_GOLDEN, _MIX_1, _MIX_2 = _signed(GOLDEN), _signed(MIX_1), _signed(MIX_2)


def _absorb(h: int | Tensor, counter: int | Tensor) -> int | Tensor:
    """mix(h + (counter + 1) * GOLDEN): different counters never collide, since both maps are one-to-one.

    Python ints are masked to 64 bits. A shift of int64 copies the sign bit, and a mask removes the copies.
    """
    if isinstance(h, int) and isinstance(counter, int):
        n = (h + (counter + 1) * GOLDEN) & WORD
        n = ((n ^ (n >> 30)) * MIX_1) & WORD
        n = ((n ^ (n >> 27)) * MIX_2) & WORD
        return n ^ (n >> 31)
    if isinstance(counter, int):
        x: Tensor = h + _signed((counter + 1) * GOLDEN)  # type: ignore[assignment]
    elif counter.dtype != torch.int64:
        raise ValueError(f"counters must be ints or int64 tensors, got {counter.dtype}")
    else:
        # ~c = -(c + 1). The counter is often an arange, and torch.compile would fold (c + 1) * GOLDEN into an index
        # expression and compute it in 32 bits. It leaves bitwise operations alone.
        x = (_signed(h) if isinstance(h, int) else h) - ~counter * _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def hash_counters(seed: int | Tensor, *counters: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """64 hashed bits (as int64) for every element of the broadcast of seed and counters.

    Leading ints are folded on the host, so a prefix such as (seed, stream, step) costs nothing per element.
    """
    if isinstance(seed, Tensor) and seed.dtype != torch.int64:
        raise ValueError(f"the seed must be an int or an int64 tensor, got {seed.dtype}")
    h: int | Tensor = (int(seed) & WORD) if isinstance(seed, int) else seed
    for counter in counters:
        h = _absorb(h, int(counter) if isinstance(counter, int) else counter)
    return torch.tensor(_signed(h), device=device) if isinstance(h, int) else h


def fold(seed: int, *counters: int) -> int:
    """The seed of an independent stream: the same hash, on the host, as a non-negative 63-bit int."""
    h: int | Tensor = int(seed) & WORD
    for counter in counters:
        h = _absorb(h, int(counter))
    assert isinstance(h, int)
    return h >> 1


def uniforms(seed: int | Tensor, *counters: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Float64 uniforms in (0, 1), from the top 52 bits; adding one half excludes 0 and 1, so that log(-log(u)) is
    finite. By convention the first counter is a `Stream`."""
    bits = hash_counters(seed, *counters, device=device)
    return (((bits >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52


def uniforms32(seed: int | Tensor, *counters: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Float32 uniforms in (0, 1) from the top 23 bits: enough to compare with a probability, not for Gumbel noise."""
    bits = hash_counters(seed, *counters, device=device)
    return (((bits >> 41) & 0x7FFFFF).float() + 0.5) * 2.0**-23


# For compiled kernels whose bottleneck is arithmetic: 32 bits, a third of the instructions, 2^32 numbers per key.
_MIX32_1, _MIX32_2 = -0x7A143595, -0x3D4D51CB  # murmur3's, 0x85EBCA6B and 0xC2B2AE35, as int32


def coins32(key_2: Tensor, position: Tensor, p: float) -> Tensor:
    """True with probability p (to 2^-32), a pure function of two words of key and a position, all int32.

    The second word enters between the rounds of the hash: with the first word alone, two keys would give the same
    numbers in a different order. Two products must follow it: after only one, keys that differ in one bit correlate.
    """
    if key_2.dtype != torch.int32 or position.dtype != torch.int32:
        raise ValueError(f"key and position must be int32, got {key_2.dtype} and {position.dtype}")
    x = position ^ key_2[0]
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX32_1
    x = (x ^ key_2[1] ^ ((x >> 13) & 0x7FFFF)) * _MIX32_2
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX32_1
    return x < round(p * 2**32) - 2**31  # the upper bits decide, which products mix best


# ---- categorical draws -----------------------------------------------------------------------------------------------
# Drawing tokens: temperature, top-k, nucleus, min-p, and float64 Gumbel-max, for gathered rows of logits [N, V].
#
# Each row is a position to draw. Rows may come from different requests, so every parameter is a float or a tensor [N].
# A parameter left at None is off and costs nothing: the caller decides that on the host, and no tensor is read for it.
# Filters act in the usual order (temperature, top-k, nucleus, min-p), each on the result of the one before.

PerRow = Tensor | float | None
ENOUGH = 2048
"""Number of most probable tokens that nearly always contain the nucleus."""
LEAST_TEMPERATURE = 1e-6
"""Below it a draw is greedy: dividing by a much smaller number overflows float32, and all tokens would tie."""


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

    A temperature below LEAST_TEMPERATURE, such as 0, means greedy; top_k 0, top_p 1 and min_p 0 keep the whole row.
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
        # On a CPU it is fastest to look at the most probable tokens first.
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
    # topk orders by value alone: of the equal logits at the edge, keep as many as belong, smallest ids first.
    edge = values.gather(-1, n - 1)
    above, at = logits > edge, logits == edge
    room = n - above.sum(-1, keepdim=True)
    return above | (at & (at.cumsum(-1) <= room)) | everything


def leading(logits: Tensor, weight: Tensor, need: Tensor, short: Tensor | bool = False) -> Tensor:
    """Mask of the shortest prefix whose weights add up to at least `need`; where `short`, of the longest prefix whose
    weights do not exceed it, but at least one token. A prefix runs by descending logit, then by ascending id; equal
    logits have equal weights.

    Bisection, without sorting: 32 sums find the value at the edge bit by bit, about 17 more find the last id. Each is
    a pass over numbers that stay in a GPU's cache. A sort moves them ten times with their ids, and does not compile.
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
    """The largest integer of `bits` bits at which `holds` is true, in each row. It is true at 0, and monotonic."""
    found = torch.zeros_like(like, dtype=torch.int64)
    for bit in reversed(range(bits)):
        candidate = found + (1 << bit)
        found = torch.where(holds(candidate), candidate, found)
    return found


def float_of(rank: Tensor) -> Tensor:
    """The float32 number of this rank, counted upwards from -inf (rank 0); NaN, which no logit reaches, above +inf."""
    pattern = (rank + BELOW_INFINITY).clamp(max=(1 << 32) - 1)
    signed = torch.where(pattern >= 1 << 31, pattern - (1 << 31), ~pattern)
    return signed.to(torch.int32).view(torch.float32)


BELOW_INFINITY = (1 << 23) - 1  # number of negative NaNs, whose bit patterns would come before -inf


def prefix(
    values: Tensor, total: Tensor, k: Tensor, p: Tensor, release_nucleus: Tensor | bool = False
) -> tuple[Tensor, Tensor]:
    """(number of the descending `values` that are kept, at least 1; total probability of `values`), each [N, 1].

    `total` is the log-normaliser of the whole row; `values` may be only its largest entries. float64: on a flat
    distribution 50,000 float32 additions move the edge of the nucleus.
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

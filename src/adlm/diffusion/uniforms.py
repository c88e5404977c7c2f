"""Random numbers without a generator: a uniform is a pure function of (seed, counters).

A draw belongs to what it is for - (seed, stream, step, position, ...) - and not to the order in which draws were made.
Resuming a run, changing the number of ranks or sharing a batch with other requests therefore changes nothing, and there
is no state to save. The price is about ten integer operations per number.

The function is a chain of splitmix64 steps in int64: the hash of the counters so far is a splitmix64 seed, and the next
counter says how far along that stream to go. Multiplication wraps and shifts are made logical by a mask, so CPU and GPU
give the same bits.
"""

import enum

import torch
from torch import Tensor


class Stream(enum.IntEnum):
    """First counter after the seed: what the numbers are for. Two purposes never share numbers."""

    TIME = 1  # times t of a training or evaluation batch
    MASK = 2  # which positions the forward process masks
    REVEAL = 3  # which masked positions a sampler reveals
    REMASK = 4  # which revealed positions a sampler masks again
    TOKEN = 5  # Gumbel noise of a drawn token
    ORDER = 6  # orders and permutations
    SPLIT = 7  # anything the caller separates further by counters of its own
    ANCHOR = 8  # which anchors are scored, where not all are
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
    """mix(h + (counter + 1) * GOLDEN): counters that differ never meet, since both maps are one-to-one.

    Ints of Python are masked to 64 bits. The shift of int64 copies the sign bit, and a mask removes the copies.
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
        # ~c = -(c + 1). Written so because the counter is often an arange: torch.compile would fold (c + 1) * GOLDEN
        # into an index expression and compute it in 32 bits; it leaves bitwise operations alone.
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
    """Float64 uniforms in (0, 1), from the top 52 bits; the half keeps 0 and 1 out, so that log(-log(u)) is finite. By
    convention the first counter is a `Stream`."""
    bits = hash_counters(seed, *counters, device=device)
    return (((bits >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52


def uniforms32(seed: int | Tensor, *counters: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Float32 uniforms in (0, 1) from the top 23 bits: enough to compare with a probability, not for Gumbel noise."""
    bits = hash_counters(seed, *counters, device=device)
    return (((bits >> 41) & 0x7FFFFF).float() + 0.5) * 2.0**-23


# For compiled kernels that wait for arithmetic: 32 bits, a third of the instructions, 2^32 numbers a key.
_MIX32_1, _MIX32_2 = -0x7A143595, -0x3D4D51CB  # murmur3's, 0x85EBCA6B and 0xC2B2AE35, as int32


def coins32(key_2: Tensor, position: Tensor, p: float) -> Tensor:
    """True with probability p (to 2^-32), a pure function of two words of key and a position, all int32.

    The second word comes between the rounds of the hash: with the first alone, two keys would give the same numbers in
    another order. After it there must be two more products: after one, keys that differ in a bit know each other.
    """
    if key_2.dtype != torch.int32 or position.dtype != torch.int32:
        raise ValueError(f"key and position must be int32, got {key_2.dtype} and {position.dtype}")
    x = position ^ key_2[0]
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX32_1
    x = (x ^ key_2[1] ^ ((x >> 13) & 0x7FFFF)) * _MIX32_2
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX32_1
    return x < round(p * 2**32) - 2**31  # the upper bits decide, and those a product has mixed best

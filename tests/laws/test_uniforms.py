"""Counter-based uniforms: uniform, independent in every direction a sampler walks, and a fixed function of integers."""

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from scipy import stats

from adlm.diffusion import random as module
from adlm.diffusion.random import Stream, coins32, fold, hash_counters, uniforms, uniforms32

MILLION = 1_000_000


def naive_hash(seed: int, *counters: int) -> int:
    """The definition in unbounded Python integers."""
    word = 2**64
    h = seed % word
    for c in counters:
        h = (h + (c + 1) * 0x9E3779B97F4A7C15) % word
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) % word
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) % word
        h ^= h >> 31
    return h - word if h >= word // 2 else h


def test_golden_values():
    """The same integers on every machine and device, now and later: seeds in published results depend on them."""
    got = hash_counters(torch.tensor([0, 1, -1, 2**62]), Stream.TOKEN, torch.tensor([0, 1, 1023, 7]), 50257)
    assert got.tolist() == GOLDEN
    assert uniforms(0, 0, torch.tensor([0])).item().hex() == "0x1.4e0dba5e9a32fp-1"


GOLDEN = [6645412142192486607, 2291684424278568263, -1777717769010389929, -8759899510013620695]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bits_on_the_gpu():
    c = torch.arange(MILLION)
    assert torch.equal(hash_counters(3, Stream.MASK, c), hash_counters(3, Stream.MASK, c.cuda()).cpu())
    assert torch.equal(uniforms(3, Stream.MASK, c), uniforms(3, Stream.MASK, c.cuda()).cpu())
    assert torch.equal(uniforms32(3, Stream.MASK, c), uniforms32(3, Stream.MASK, c.cuda()).cpu())

    @torch.compile(fullgraph=True)
    def compiled(seed):
        return hash_counters(seed[:, None], Stream.TOKEN, torch.arange(50_258, device="cuda"))

    seeds = torch.tensor([0, 5, -1, 2**62])
    expected = hash_counters(seeds[:, None], Stream.TOKEN, torch.arange(50_258))
    assert torch.equal(compiled(seeds.cuda()).cpu(), expected)


@pytest.mark.slow
def test_same_bits_when_compiled():
    """An arange that is multiplied by a large constant must not become an index expression."""

    @torch.compile(fullgraph=True)
    def compiled(seed):
        return hash_counters(seed[:, None], Stream.TOKEN, torch.arange(1000))

    seeds = torch.tensor([0, 5, -1, 2**62])
    assert torch.equal(compiled(seeds), hash_counters(seeds[:, None], Stream.TOKEN, torch.arange(1000)))


def test_equals_the_definition_for_ints_and_tensors():
    rng = np.random.default_rng(0)
    for _ in range(50):
        seed, a, b, c = (int(v) for v in rng.integers(-(2**63), 2**63 - 1, 4))
        expected = naive_hash(seed, a, b, c)
        assert hash_counters(seed, a, b, c).item() == expected
        assert hash_counters(torch.tensor(seed), torch.tensor(a), b, torch.tensor([c])).item() == expected
        assert hash_counters(seed, torch.tensor([a]), b, c).item() == expected
        assert fold(seed, a, b, c) == expected % 2**64 >> 1


@pytest.mark.parametrize("make", [uniforms, uniforms32])
def test_a_million_draws_are_uniform(make):
    u = make(7, Stream.MASK, torch.arange(1000)[:, None], torch.arange(1000)).double().numpy().ravel()
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > LEVEL
    for cells in (10, 1000, 4096):
        assert chi_square(np.bincount((u * cells).astype(int), minlength=cells), np.full(cells, 1 / cells)) > LEVEL


@pytest.mark.parametrize("bit", range(0, 64, 3))
def test_every_bit_is_a_fair_coin(bit):
    ones = int((hash_counters(1, Stream.TOKEN, torch.arange(MILLION)) >> bit & 1).sum())
    assert stats.binomtest(ones, MILLION, 0.5).pvalue > LEVEL


def pairs_independent(a: torch.Tensor, b: torch.Tensor) -> float:
    cells = 16
    table = np.histogram2d(a.numpy().ravel(), b.numpy().ravel(), bins=cells, range=[[0, 1], [0, 1]])[0]
    return chi_square(table, np.full((cells, cells), cells**-2))


def test_neighbours_are_independent_in_every_direction():
    """Serial pairs at several lags, and neighbouring seeds, streams, steps and positions."""
    p, seeds = torch.arange(MILLION), torch.arange(1000)[:, None]
    u = uniforms(11, Stream.REVEAL, p)
    values = {f"lag {lag}": pairs_independent(u[:-lag], u[lag:]) for lag in (1, 2, 3, 7, 64, 1024, 50258)}
    values["stream"] = pairs_independent(u, uniforms(11, Stream.REMASK, p))
    values["seed"] = pairs_independent(u, uniforms(12, Stream.REVEAL, p))
    grid = uniforms(seeds, Stream.REVEAL, torch.arange(1001))
    values["step"] = pairs_independent(grid[:, :-1], grid[:, 1:])
    values["seeds as rows"] = pairs_independent(grid[:-1], grid[1:])
    # (seed, step) and (seed + 1, step - 1): the classic clash of additive keys
    values["diagonal"] = pairs_independent(grid[:-1, 1:], grid[1:, :-1])
    assert min(values.values()) > LEVEL, values


def test_correlations_vanish():
    u = (uniforms(5, Stream.TIME, torch.arange(MILLION)) - 0.5) * 12**0.5
    for lag in (1, 2, 5, 100):
        z = (u[:-lag] * u[lag:]).sum().item() / MILLION**0.5
        assert abs(z) < stats.norm.isf(LEVEL / 2), (lag, z)


def test_a_draw_does_not_depend_on_the_batch_it_is_in():
    seeds, positions = torch.tensor([4, 9, 2]), torch.arange(33)
    whole = uniforms(seeds[:, None], Stream.REVEAL, 5, positions)
    for i, seed in enumerate(seeds.tolist()):
        assert torch.equal(whole[i], uniforms(seed, Stream.REVEAL, 5, positions))
        for j in (0, 17, 32):
            assert whole[i, j] == uniforms(seed, Stream.REVEAL, 5, j)
    assert torch.equal(whole.flip(0), uniforms(seeds.flip(0)[:, None], Stream.REVEAL, 5, positions))


@pytest.mark.parametrize("make", [uniforms, uniforms32])
def test_extreme_bits_stay_inside_the_open_interval(make, monkeypatch):
    monkeypatch.setattr(module, "hash_counters", lambda *counters, device: torch.tensor([0, -1]))
    ends = make(0, 0)
    assert 0 < ends[0] < ends[1] < 1
    assert torch.isfinite(torch.log(-torch.log(ends))).all()


def test_bad_counters_are_answered():
    with pytest.raises(ValueError, match="int64"):
        uniforms(0, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="seed"):
        uniforms(torch.tensor([1], dtype=torch.int32), 1)


def naive_coin(key: tuple[int, int], position: int, p: float) -> bool:
    """The definition of `coins32` in unbounded Python integers."""
    word = 2**32
    x = (position ^ key[0]) % word
    x = (x ^ (x >> 16)) * 0x85EBCA6B % word
    x = (x ^ (x >> 13) ^ key[1] % word) * 0xC2B2AE35 % word
    x = (x ^ (x >> 16)) * 0x85EBCA6B % word
    return (x - word if x >= word // 2 else x) < round(p * word) - word // 2


KEYS = [(0, 0), (0, 1), (1, 0), (1, 1), (-(2**31), 2**31 - 1), (123456789, -987654321)]


def flips(key: tuple[int, int], n: int, p: float = 0.1) -> torch.Tensor:
    return coins32(torch.tensor(key, dtype=torch.int32), torch.arange(n, dtype=torch.int32), p)


@pytest.mark.parametrize("key", KEYS)
def test_coins_are_the_definition_and_fall_at_their_rate(key):
    coins = flips(key, MILLION)
    some = [*range(50), 999_999]
    assert coins[some].tolist() == [naive_coin(key, i, 0.1) for i in some]
    assert torch.equal(torch.compile(flips, backend="aot_eager")(key, 2000), coins[:2000])
    for p in (0.1, 0.5, 0.9):
        assert abs(flips(key, MILLION, p).float().mean() - p) < 4.5 * (p * (1 - p) / MILLION) ** 0.5
    assert flips(key, 1000, 0.0).sum() == 0


def test_coins_do_not_know_each_other():
    """Neighbours at the distances of a tensor's rows, and two keys, also where only one word differs and where one is
    read in the order in which the other's first word would permute it."""
    pairs = [(flips(key, MILLION)[: -d or None], flips(key, MILLION)[d:]) for key in KEYS for d in (1, 2, 768, 3072)]
    pairs += [(flips(a, MILLION), flips(b, MILLION)) for a in KEYS for b in KEYS if a < b]
    order = torch.arange(2**19) ^ 1
    pairs.append((flips((0, 7), 2**19), flips((1, 8), 2**19)[order]))
    for a, b in pairs:
        counts = torch.bincount(2 * a.long() + b.long(), minlength=4).numpy()
        p_value = stats.chi2_contingency(counts.reshape(2, 2), correction=False).pvalue
        assert p_value > LEVEL / len(pairs), counts


def test_coins_need_int32():
    with pytest.raises(ValueError, match="int32"):
        coins32(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0.1)

"""Cuts against naive loops over one row; Gumbel draws against their distribution, far into the tail."""

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm.diffusion import random
from adlm.diffusion.random import Stream, filter_logits, gumbel_argmax, uniforms


def naive_filter(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, release_nucleus=False):
    """One row, one token at a time, in Python floats."""
    if temperature == 0:
        best = int(np.argmax(logits))
        return np.eye(len(logits))[best]
    e = np.exp((np.asarray(logits, dtype=np.float64) - max(logits)) / temperature)
    p = e / e.sum()
    order = sorted(range(len(p)), key=lambda v: (-p[v], v))
    if top_k:
        order = order[:top_k]
    p = np.array([p[v] if v in set(order) else 0.0 for v in range(len(p))])
    p /= p.sum()
    if top_p < 1:
        kept, total = [], 0.0
        for v in order:
            if release_nucleus:
                total += p[v]
                if total <= top_p or not kept:
                    kept.append(v)
            else:
                if total < top_p:
                    kept.append(v)
                total += p[v]
        p = np.array([p[v] if v in set(kept) else 0.0 for v in range(len(p))])
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


rows = st.lists(st.integers(-40, 40).map(lambda i: i / 8 + 1e-3), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    rows, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 13), st.sampled_from([0.07, 0.33, 0.61, 0.93, 1.0]),
    st.sampled_from([0.0, 0.05, 0.4]), st.booleans(),
)  # fmt: skip
def test_cut_equals_the_naive_twin(row, temperature, top_k, top_p, min_p, release):
    got = filter_logits(torch.tensor([row]), temperature, top_k, top_p, min_p, release_nucleus=release).exp()[0]
    np.testing.assert_allclose(
        got.numpy(), naive_filter(np.float32(row), temperature, top_k, top_p, min_p, release), atol=2e-6
    )


@settings(max_examples=200, deadline=None)
@given(
    rows.filter(lambda r: len(r) > 4), st.integers(0, 13), st.sampled_from([0.07, 0.33, 0.61, 0.93, 1.0]), st.booleans()
)
def test_the_shortcut_through_the_best_few_changes_nothing(row, top_k, top_p, release):
    """Only the best 4 are looked at first; the rest are sorted when the cut reaches further."""
    more = [row, row[::-1], [0.0] * len(row)]
    whole = filter_logits(torch.tensor(more), None, top_k, top_p, release_nucleus=release)
    before, random.ENOUGH = random.ENOUGH, 4
    try:
        assert torch.equal(filter_logits(torch.tensor(more), None, top_k, top_p, release_nucleus=release), whole)
    finally:
        random.ENOUGH = before


@pytest.mark.parametrize("release", [False, True])
def test_bisection_equals_the_ordered_prefix_with_many_ties(release):
    """What a GPU does against what a CPU does, on logits of bf16, of which thousands are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(24, 5000, generator=generator)).to(torch.bfloat16).float()
    logits[:, ::7] = -torch.inf
    k = torch.tensor([0, 1, 7, 600]).repeat(6)[:, None]
    p = torch.tensor([0.2, 0.5, 0.9, 0.97, 0.999, 1.0], dtype=torch.float64).repeat_interleave(4)[:, None]
    ordered = random.among_best(logits, k, p, release)
    assert ordered is not None, "the best few decide"
    all_kept = random.leading(logits, torch.ones_like(logits), torch.where(k > 0, k, 5000).double())
    weight = (logits - logits.amax(-1, keepdim=True)).exp().masked_fill(~all_kept, 0.0)
    need = p * weight.sum(-1, keepdim=True, dtype=torch.float64)
    nucleus = all_kept & (random.leading(logits, weight, need, release) | (p >= 1))
    assert torch.equal(nucleus, ordered)
    assert int(ordered[8].sum()) > 30, "not a trivial case"


def test_bisection_is_used_where_nothing_may_be_read_back(monkeypatch):
    monkeypatch.setattr(random, "visible", lambda x: False)
    monkeypatch.setattr(random, "among_best", None)
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    got = filter_logits(logits, top_k=torch.tensor([0, 3, 50]), top_p=torch.tensor([0.9, 1.0, 0.5]))
    monkeypatch.undo()
    expected = filter_logits(logits, top_k=torch.tensor([0, 3, 50]), top_p=torch.tensor([0.9, 1.0, 0.5]))
    assert torch.equal(got, expected)


def test_usual_and_release_nucleus_differ_by_the_crossing_token():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    usual, release = (filter_logits(logits, top_p=0.7, release_nucleus=r).exp()[0] for r in (False, True))
    torch.testing.assert_close(usual, torch.tensor([0.625, 0.375, 0, 0]))
    torch.testing.assert_close(release, torch.tensor([1.0, 0, 0, 0]))
    # the first token stays even when it alone exceeds top_p
    assert filter_logits(logits, top_p=0.1, release_nucleus=True).exp()[0].tolist() == [1, 0, 0, 0]


def test_each_row_has_its_own_settings():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    t, k = torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([0, 3, 7, 0])
    p, m = torch.tensor([0.9, 1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.1])
    together = filter_logits(logits, t, k, p, m)
    for i in range(4):
        alone = filter_logits(logits[i : i + 1], t[i].item(), int(k[i]), p[i].item(), m[i].item())
        torch.testing.assert_close(together[i : i + 1], alone)


def test_off_means_off():
    logits = torch.randn(3, 20)
    plain = logits.log_softmax(-1)
    torch.testing.assert_close(filter_logits(logits), plain)
    torch.testing.assert_close(filter_logits(logits, 1.0, 0, 1.0, 0.0), plain)


def test_flat_nucleus_at_a_real_vocabulary():
    """float32 sums would move this cut: 0.9 of 50,000 equal tokens is 45,000 tokens."""
    kept = filter_logits(torch.zeros(1, 50_000), top_p=0.9).isfinite().sum().item()
    assert abs(kept - 45_000) <= 1


def test_gumbel_draws_have_the_distribution():
    n = 400_000
    p = torch.tensor([0.5, 0.25, 0.15, 0.0, 0.0999, 1e-4], dtype=torch.float64)
    u = uniforms(0, Stream.TOKEN, torch.arange(n)[:, None], torch.arange(6))
    counts = np.bincount(gumbel_argmax(p.log().expand(n, 6), u).numpy(), minlength=6)
    assert chi_square(counts, p.numpy()) > LEVEL


def test_gumbel_ignores_a_constant_and_takes_float32():
    u = uniforms(0, Stream.TOKEN, torch.arange(100)[:, None], torch.arange(7))
    log_p = torch.randn(100, 7)
    assert torch.equal(gumbel_argmax(log_p, u), gumbel_argmax(log_p.double() + 3.0, u))


def test_the_tail_is_reached():
    """Many rare tokens together get their share, and the noise spans what float32 (at most 17) cannot."""
    v, n = 20_000, 2_000
    log_p = torch.full((v,), -12.0, dtype=torch.float64)
    log_p[0] = 0.0
    rare = (v - 1) * np.exp(-12.0) / (1 + (v - 1) * np.exp(-12.0))
    hits = 0
    for chunk in range(20):
        u = uniforms(1, Stream.TOKEN, chunk, torch.arange(n // 20)[:, None], torch.arange(v))
        hits += int((gumbel_argmax(log_p.expand(n // 20, v), u) != 0).sum())
    assert chi_square([hits, n - hits], [rare, 1 - rare]) > LEVEL
    # A token 36 nats below the best still wins where its own uniform is the largest there is.
    u = torch.tensor([[0.5, 1 - 2.0**-53]], dtype=torch.float64)
    assert gumbel_argmax(torch.tensor([[0.0, -36.0]]), u).item() == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: filter_logits(torch.tensor([[0.0, torch.nan]])), "logits holds NaN in 1 of 2"),
        (lambda: filter_logits(torch.zeros(3, 0)), "logits must be"),
        (lambda: gumbel_argmax(torch.zeros(1, 2), torch.rand(1, 3).double()), "shape of log_p"),
        (lambda: gumbel_argmax(torch.zeros(1, 2), torch.rand(1, 2)), "float64"),
    ],
)
def test_bad_input_is_answered(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("temperature", [1e-7, 1e-39, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    """In float32 the division would overflow: all tokens, or none, would be the best."""
    logits = torch.tensor([[1.0, 40.0, 39.5, -3.0], [-60.0, -50.0, -90.0, -51.0]])
    per_row = torch.tensor([temperature] * 2, dtype=torch.float32)
    for t in (temperature, per_row):
        assert torch.equal(filter_logits(logits, temperature=t).exp(), torch.eye(4)[[1, 1]])

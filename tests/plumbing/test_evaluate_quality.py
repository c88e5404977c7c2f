"""Numbers about samples, by hand: entropy, distinct-n, shared n-grams, bootstrap coverage, MAUVE's area and limits."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from adlm.evaluation.intervals import Interval, bootstrap_mean, bootstrap_ratio
from adlm.evaluation.measures import area, distinct, entropy, mauve, measure_tokens, shared


def test_entropy_by_hand():
    assert entropy([7, 7, 7, 7]) == 0
    assert entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert entropy([1, 1, 2, 3]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_distinct_by_hand():
    row = [1, 2, 1, 2, 3]
    assert distinct(row, 1) == 3 / 5
    assert distinct(row, 2) == 3 / 4  # 12 21 12 23
    assert distinct(row, 3) == 1
    assert distinct([1], 2) == 1, "too short to repeat itself"


def test_shared_sees_the_same_text_again_and_again():
    rows = [[1, 2, 3, 4, 5], [9, 1, 2, 3, 4], [6, 7, 8, 9, 10], []]
    assert shared(rows, 4).tolist() == [0.5, 0.5, 0, 0]
    copies = measure_tokens([list(range(50))] * 8)
    assert copies["shared_4"].value == 1
    assert copies["distinct_1"] == Interval(1.0, 1.0, 1.0), "which no number about single samples notices"


def test_one_sample_has_no_interval():
    assert bootstrap_mean(np.array([3.0])) == Interval(3.0)


def test_ratio_weighs_samples_by_their_tokens():
    found = bootstrap_ratio(np.array([10.0, 300.0]), np.array([10.0, 100.0]))
    assert found.value == pytest.approx(310 / 110)
    assert (found.low, found.high) == (1.0, 3.0), "either sample may be drawn twice"
    assert found.through(math.exp).value == pytest.approx(math.exp(310 / 110))


def test_samples_without_a_token_leave_the_interval_a_number():
    """Texts that ended at once have nothing to judge; results.json said NaN, which is no JSON."""
    nats, tokens = np.array([10.0, 300.0, 0.0, 0.0]), np.array([10.0, 100.0, 0.0, 0.0])
    value, low, high = bootstrap_ratio(nats, tokens)
    assert value == 310 / 110 and low == 1.0 and high == 3.0
    assert bootstrap_ratio(nats[1:], tokens[1:]) == Interval(3.0)


def test_intervals_cover():
    """Ratio of sums of a skewed quantity, 60 samples, 300 repeats: 95% intervals cover in 90 to 98% (z = 4 around
    the 94% that a percentile bootstrap of so few samples reaches)."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        tokens = rng.integers(50, 150, 60).astype(float)
        nats = tokens * rng.gamma(9, 0.4, 60)  # mean 3.6 nats per token
        low, high = bootstrap_ratio(nats, tokens)[1:]
        hits += low <= 3.6 <= high
    assert 0.885 <= hits / 300 <= 0.99


def test_area_is_that_of_the_package():
    pytest.importorskip("mauve")
    import importlib

    theirs = importlib.import_module("mauve.compute_mauve")
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(20), 2)
    p[:3] = 0
    p /= p.sum()
    curve = theirs.get_divergence_curve_for_multinomials(p, q, np.linspace(1e-6, 1 - 1e-6, 25), 5)
    x, y = curve.T
    expected = 0.5 * sum(
        theirs.compute_area_under_curve(a[np.argsort(a)], b[np.argsort(a)]) for a, b in ((x, y), (y, x))
    )
    assert area(p[None], q[None])[0] == pytest.approx(expected, rel=1e-9)
    assert area(p[None], p[None])[0] == pytest.approx(1)
    disjoint = area(np.array([[1.0, 0]]), np.array([[0, 1.0]]))[0]
    assert disjoint < 0.01


def test_the_interval_of_mauve_is_two_standard_deviations_wide(monkeypatch):
    """With given histograms: 1.96 times the spread of the score of texts drawn again, to both sides."""
    p, q = np.arange(10, 0, -1) / 55, np.arange(1, 11) / 55
    found = SimpleNamespace(p_hist=p, q_hist=q, mauve=float(area(p[None], q[None])[0]), num_buckets=10)
    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=lambda **settings: found))
    (value, low, high), _ = mauve(np.zeros((200, 1)), np.zeros((300, 1)))
    rng = np.random.default_rng(7)
    again = area(rng.multinomial(200, p, size=4000) / 200, rng.multinomial(300, q, size=4000) / 300)
    assert 0 < low < value < high < 1
    assert (high - value) / again.std() == pytest.approx(1.96, rel=0.08)
    assert value - low == pytest.approx(high - value)


def test_mauve_of_equal_and_of_different_features():
    pytest.importorskip("mauve")
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(300, 8)), rng.normal(size=(300, 8)), rng.normal(size=(300, 8)) + 2.0
    same, other = mauve(a, b), mauve(a, c)
    assert same[0].value > 0.9 > 0.3 > other[0].value
    assert same[1] == 30
    for found in (same, other):
        assert 0 <= found[0].low <= found[0].value <= found[0].high <= 1
    assert other[0].high < same[0].low
    with pytest.raises(ValueError, match="at least 2 texts"):
        mauve(a[:1], b)

"""Intervals of estimates: quantiles, variances of neighbours, summaries and units."""

import math

import numpy as np
import pytest
from scipy import stats

from adlm.evaluation.intervals import Estimate, neighbour_variance, student, summarise


def test_student_quantiles():
    for freedom in (1, 2, 3, 4, 9, 30, 1000):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_neighbour_variance_ignores_a_trend():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=4000)
    assert neighbour_variance(noise) == pytest.approx(1, rel=0.1)
    assert neighbour_variance(noise + np.linspace(0, 50, 4000)) == pytest.approx(1, rel=0.1)


def test_neighbour_variance_by_hand():
    """Each difference of two has twice the variance; three values have two differences."""
    assert neighbour_variance(np.array([1.0, 3.0, 2.0])) == (4 + 1) / 2 / 2
    assert neighbour_variance(np.array([0.0, 2.0])) == 2


def test_summary_of_rows_of_unequal_length():
    """A ratio of sums; and an exact likelihood has only the error over rows."""
    values, tokens = np.array([[2.0], [9.0], [4.0]]), np.array([1, 3, 2])
    e = summarise(values, tokens, None)
    assert e.nats == 15 / 6 and e.tokens == 6 and e.monte_carlo_error == 0
    rest = values[:, 0] - 2.5 * tokens
    assert e.row_error == pytest.approx(math.sqrt(3 * rest.var(ddof=1)) / 6)


def test_one_row_or_one_draw_has_no_error_to_tell():
    one = summarise(np.array([[3.0, 4.0]]), np.array([2]), np.array([0.5]))
    assert one.row_error is None and one.monte_carlo_error is None and one.interval is None
    assert one.as_dict()["perplexity_interval"] is None
    few = summarise(np.array([[3.0], [4.0]]), np.array([2, 2]), np.array([0.5, 0.1]))
    assert few.row_error is not None and few.monte_carlo_error is None


def test_units():
    e = Estimate(math.log(8), 100, 10, 1, 0.0, None).as_dict()
    assert e["perplexity"] == pytest.approx(8) and e["bits_per_token"] == pytest.approx(3)

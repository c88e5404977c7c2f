"""Intervals of numbers about samples: they are independent of each other, and a bootstrap over them is enough.

(The bounds of intervals.py are stratified over time and need more.)
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adlm.evaluation.intervals import CONFIDENCE

# The ends of an interval are then known to about a thirtieth of its length.
RESAMPLES = 2000
TAIL = (1 - CONFIDENCE) / 2


class Interval(NamedTuple):
    """A number with the ends of its 95% interval (None where one sample cannot tell)."""

    value: float
    low: float | None = None
    high: float | None = None

    def through(self, f: Callable[[float], float]) -> "Interval":
        """The interval of an increasing function of the number."""
        return Interval(f(self.value), *(None if end is None else f(end) for end in (self.low, self.high)))


def bootstrap_ratio(over_N: np.ndarray, under_N: np.ndarray, seed: int = 0) -> Interval:
    """sum(over) / sum(under) with a percentile bootstrap over the N samples.

    Samples are drawn again together with their denominators, so that long ones count as they do in the number itself.
    A resample of nothing but empty samples has no ratio, and is left out.
    """
    n = len(over_N)
    value = float(over_N.sum() / under_N.sum())
    if (under_N > 0).sum() < 2:
        return Interval(value)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES // 100):  # how often each sample was drawn, a hundred resamples at a time
        times = rng.multinomial(n, np.full(n, 1 / n), size=100).astype(np.float64)
        over, under = times @ over_N, times @ under_N
        found.append(over[under > 0] / under[under > 0])
    low, high = np.quantile(np.concatenate(found), [TAIL, 1 - TAIL])
    return Interval(value, float(low), float(high))


def bootstrap_mean(values_N: np.ndarray, seed: int = 0) -> Interval:
    return bootstrap_ratio(np.asarray(values_N, dtype=np.float64), np.ones(len(values_N)), seed)

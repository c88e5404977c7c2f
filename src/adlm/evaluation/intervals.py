"""Numbers with their errors: bounds of sequences (`Estimate`), and measures of samples (`Interval`).

A bound has two errors. The error over sequences says how much it would change for other text of the same kind; it
includes all noise. The Monte Carlo error says how much it would change for the same sequences with other noise; only
this one shrinks with eval.draws.

Sequence i is seen at the times (d + phase_i) / D, with phases stratified over sequences (perplexity.py). Sequences
with neighbouring phases are therefore seen at almost the same times: their difference is free of the trend in time,
which stratification also removes from the mean, and squared differences estimate the remaining variance (von Neumann).
The usual sample variance would still contain the trend, and intervals would be far too wide.

Samples are independent of each other, so a bootstrap over them is enough.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054
# Resamples of a bootstrap: enough to know the ends of an interval to about a thirtieth of its length.
RESAMPLES = 2000


def student(freedom: float) -> float:
    """97.5% quantile of Student's t: exact for one and two degrees of freedom, from three on within 1%
    (Cornish-Fisher expansion)."""
    z, n = _Z, freedom
    if n == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if n == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


@dataclass(frozen=True)
class Estimate:
    """Nats per token with its errors (None if a single sequence or draw gives no estimate of them)."""

    nats: float
    tokens: int
    rows: int
    draws: int
    row_error: float | None
    """Standard error over sequences, noise included."""
    monte_carlo_error: float | None
    """Standard error of the noise alone; 0 for an exact likelihood."""
    row_nats: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Nats of every sequence, for paired differences with another model."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval over sequences."""
        if self.row_error is None:
            return None
        half = student(self.rows - 1) * self.row_error
        return self.nats - half, self.nats + half

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))

    @property
    def perplexity_interval(self) -> tuple[float, float] | None:
        ends = self.interval
        return None if ends is None else (math.exp(min(ends[0], 700.0)), math.exp(min(ends[1], 700.0)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: nats and bits per token, perplexity, intervals and errors."""
        return {
            "nats_per_token": self.nats,
            "nats_interval": self.interval,
            "bits_per_token": self.nats / math.log(2),
            "perplexity": self.perplexity,
            "perplexity_interval": self.perplexity_interval,
            "confidence": CONFIDENCE,
            "row_error_nats": self.row_error,
            "monte_carlo_error_nats": self.monte_carlo_error,
            "rows": self.rows,
            "tokens": self.tokens,
            "draws": self.draws,
        }


def summarise(values_ND: np.ndarray, tokens_N: np.ndarray, phase_N: np.ndarray | None) -> Estimate:
    """Nats per token with errors, from N sequences and D draws of noise.

    values: nats of each sequence and draw, summed over the sequence; tokens: scored tokens of each; phase: None if
    exact. Sequences may differ in length: the result is a ratio of sums, and its error that of the linearised ratio.
    """
    n, draws = values_ND.shape
    total = float(tokens_N.sum())
    row_N = values_ND.mean(1)
    nats = float(row_N.sum() / total)
    rest_N = row_N - nats * tokens_N
    row_error = noise_error = None
    if phase_N is None:
        noise_error = 0.0
        if n > 1:
            row_error = math.sqrt(n * rest_N.var(ddof=1)) / total
    elif n > 1:
        order = np.argsort(phase_N, kind="stable")
        row_error = math.sqrt(n * neighbour_variance(rest_N[order])) / total
        if draws > 1:
            # neighbours have the same times and the draws of a sequence the same text: the residual is noise
            difference = np.diff(values_ND[order], axis=0)
            residual = difference - difference.mean(1, keepdims=True)
            per_draw = (residual**2).sum(1).mean() / (draws - 1) / 2
            noise_error = math.sqrt(n * per_draw / draws) / total
    return Estimate(nats, round(total), n, draws, row_error, noise_error, row_N)


def neighbour_variance(x_N: np.ndarray) -> float:
    """Variance around a smooth trend, from differences of successive values."""
    return float((np.diff(x_N) ** 2).sum() / (2 * (len(x_N) - 1)))


class Interval(NamedTuple):
    """A number with the ends of its 95% interval (None if there is only one sample)."""

    value: float
    low: float | None = None
    high: float | None = None

    def through(self, f: Callable[[float], float]) -> "Interval":
        """The interval of f(number), for an increasing function f."""
        return Interval(f(self.value), *(None if end is None else f(end) for end in (self.low, self.high)))


def bootstrap_ratio(over_N: np.ndarray, under_N: np.ndarray, seed: int = 0) -> Interval:
    """The ratio sum(over) / sum(under) with a percentile bootstrap over the N samples.

    Samples are resampled together with their denominators, so that long ones count as they do in the ratio itself.
    A resample of only empty samples has no ratio and is left out.
    """
    n = len(over_N)
    value = float(over_N.sum() / under_N.sum())
    if (under_N > 0).sum() < 2:
        return Interval(value)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES // 100):  # a hundred resamples at a time, as counts of each sample
        times = rng.multinomial(n, np.full(n, 1 / n), size=100).astype(np.float64)
        over, under = times @ over_N, times @ under_N
        found.append(over[under > 0] / under[under > 0])
    low, high = np.quantile(np.concatenate(found), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_mean(values_N: np.ndarray, seed: int = 0) -> Interval:
    """The mean over samples with a percentile bootstrap."""
    return bootstrap_ratio(np.asarray(values_N, dtype=np.float64), np.ones(len(values_N)), seed)

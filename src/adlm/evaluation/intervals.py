"""From the bounds of rows to one number with its errors.

Two questions, two errors. Over rows: how far off would the number be for other text of the same kind? That contains all
noise. Monte Carlo: how far off for the same rows with other noise? Only that one shrinks with eval.draws.

Row r is seen at the times (d + phase_r) / D, its phase being stratified over rows (perplexity.py). Rows that are
neighbours in phase were therefore seen at the same times: their difference is free of the trend in time, which
stratification removes from the mean as well, and squared differences estimate what is left (von Neumann). The usual
sample variance would still contain the trend, and intervals would be far too wide.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054


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
    """Nats per token with its errors (None where one row or one draw cannot tell)."""

    nats: float
    tokens: int
    rows: int
    draws: int
    row_error: float | None
    """Standard error over rows, noise included."""
    monte_carlo_error: float | None
    """Standard error of the noise alone; 0 for an exact likelihood."""
    row_nats: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Nats of every row, for paired differences with another model."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95%, over rows."""
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
    """values: nats of each row and draw, summed over the row; tokens: scored tokens of each row; phase: None if exact.

    Rows may differ in length: the number is a ratio of sums, its error that of the linearised ratio.
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
            # neighbours share their times, a row its text: what differs beyond both is noise
            difference = np.diff(values_ND[order], axis=0)
            residual = difference - difference.mean(1, keepdims=True)
            per_draw = (residual**2).sum(1).mean() / (draws - 1) / 2
            noise_error = math.sqrt(n * per_draw / draws) / total
    return Estimate(nats, round(total), n, draws, row_error, noise_error, row_N)


def neighbour_variance(x_N: np.ndarray) -> float:
    """Variance about a smooth trend, from differences of successive values."""
    return float((np.diff(x_N) ** 2).sum() / (2 * (len(x_N) - 1)))

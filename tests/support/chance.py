"""Statistical helpers of the tests: every random check states the p-value it would take to fail."""

import numpy as np
from scipy import stats

# Seeds are fixed, so a test either passes for good or fails for good; the level only has to make luck implausible.
LEVEL = 1e-4


def chi_square(counts, probabilities, least: float = 5.0) -> float:
    """p-value of observed counts under the given probabilities; rare cells pooled, impossible ones must be empty."""
    counts = np.asarray(counts, dtype=float).ravel()
    p = np.asarray(probabilities, dtype=float).ravel()
    assert abs(p.sum() - 1) < 1e-6, f"probabilities sum to {p.sum()}"
    if counts[p <= 0].sum() > 0:
        return 0.0
    counts, p = counts[p > 0], p[p > 0] / p.sum()
    expected = p * counts.sum()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    rare = np.searchsorted(np.cumsum(expected), least, side="left") + 1 if expected[0] < least else 0
    if rare:
        counts = np.append(counts[rare:], counts[:rare].sum())
        expected = np.append(expected[rare:], expected[:rare].sum())
    if len(counts) < 2:
        return 1.0
    return float(stats.chisquare(counts, expected).pvalue)


def two_sample(a, b) -> float:
    """p-value that two count tables come from one distribution; cells seen fewer than ten times are pooled."""
    table = np.stack([np.asarray(a, dtype=float).ravel(), np.asarray(b, dtype=float).ravel()])
    total = table.sum(0)
    often = table[:, total >= 10]
    rest = table[:, total < 10].sum(1, keepdims=True)
    table = np.concatenate([often, rest], 1) if rest.sum() >= 10 else often
    return float(stats.chi2_contingency(table).pvalue)

"""MAUVE (Pillutla et al., 2021): how much two sets of texts overlap, as areas under a divergence curve of histograms.

The score is mauve-text's own, for comparable numbers; features are computed by us, in batches (judge.py). It quantises
both sets together with k-means; given those cells, drawing texts again is drawing from the two histograms, so a
bootstrap costs no clustering. A resample carries the sampling noise twice and lies lower on average, so its spread is
used and not its quantiles. Only compare scores of the same features, number of texts and script.
"""

import importlib
import importlib.util
import math
from typing import NamedTuple

import numpy as np

from adlm.errors import require
from adlm.evaluation.bootstrap import RESAMPLES, Interval
from adlm.evaluation.intervals import student

SCALE = 5.0
POINTS = 25
SEED = 25
# Below this many texts a side the histograms have few cells, and the score says little.
ENOUGH = 500
DEFINITION = (
    "MAUVE of mauve-text: k-means with n/10 cells on l2-normalised features kept to 90% of their variance,"
    f" scale {SCALE:g}, seed {SEED}; features: last hidden state at the last token; interval: 1.96 standard deviations"
    " of a bootstrap given the cells"
)


class Mauve(NamedTuple):
    score: Interval
    cells: int


def available() -> bool:
    return importlib.util.find_spec("mauve") is not None


def mauve(reference_ND: np.ndarray, samples_ND: np.ndarray) -> Mauve:
    """Of two sets of features, the texts of people first."""
    for name, features in (("reference", reference_ND), ("samples", samples_ND)):
        require(len(features) >= 2, f"MAUVE needs at least 2 texts a side, got {len(features)} as {name}")
    package = importlib.import_module("mauve")
    found = package.compute_mauve(
        p_features=reference_ND,
        q_features=samples_ND,
        seed=SEED,
        mauve_scaling_factor=SCALE,
        divergence_curve_discretization_size=POINTS,
        verbose=False,
    )
    rng = np.random.default_rng(0)
    p_RK = rng.multinomial(len(reference_ND), found.p_hist, size=RESAMPLES) / len(reference_ND)
    q_RK = rng.multinomial(len(samples_ND), found.q_hist, size=RESAMPLES) / len(samples_ND)
    half = student(math.inf) * float(area(p_RK, q_RK).std(ddof=1))
    score = float(found.mauve)
    return Mauve(Interval(score, max(0.0, score - half), min(1.0, score + half)), int(found.num_buckets))


def area(p_RK: np.ndarray, q_RK: np.ndarray) -> np.ndarray:
    """MAUVE of pairs of histograms: with r = w p + (1-w) q, the area under (exp(-c KL(q|r)), exp(-c KL(p|r)))."""
    x, y = [np.ones(len(p_RK))], [np.zeros(len(p_RK))]
    for w in np.linspace(1e-6, 1 - 1e-6, POINTS):
        r_RK = w * p_RK + (1 - w) * q_RK
        x.append(np.exp(-SCALE * divergence(q_RK, r_RK)))
        y.append(np.exp(-SCALE * divergence(p_RK, r_RK)))
    x.append(np.zeros(len(p_RK)))
    y.append(np.ones(len(p_RK)))
    # from w = 0 to 1, x falls and y rises: the same area whichever axis is integrated
    return np.asarray(-np.trapezoid(np.stack(y), np.stack(x), axis=0))


def divergence(p_RK: np.ndarray, r_RK: np.ndarray) -> np.ndarray:
    """KL(p | r); cells that p does not have count nothing."""
    ratio = np.divide(p_RK, r_RK, out=np.ones_like(p_RK), where=p_RK > 0)
    return (p_RK * np.log(ratio)).sum(-1)

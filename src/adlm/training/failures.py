"""How often to save when GPUs fail: the formula of Young and Daly, and a simulation that it can be held against.

A run of n GPUs fails when one of them does. With exponential failures of mean time m for one GPU that is a mean time
M = m / n between failures of the run. Saving takes delta seconds of training, a restart R. An interval of tau seconds
of work between two checkpoints makes a run with W seconds of work last, on average,

    T = M exp(R / M) (exp((tau + delta) / M) - 1) W / tau                 J. T. Daly, 2006, equation 20

which is least near tau = sqrt(2 delta M) (J. W. Young, 1974), or, for larger delta / M, Daly's longer series.
"""

import heapq
import math
import random
from typing import NamedTuple


def best_interval(delta: float, M: float) -> float:
    """Seconds of work between two checkpoints (Daly's equation 37; Young's is its first term)."""
    if delta >= 2 * M:
        return M
    root = math.sqrt(delta / (2 * M))
    return math.sqrt(2 * delta * M) * (1 + root / 3 + root**2 / 9) - delta


def expected_seconds(work: float, tau: float, delta: float, R: float, M: float) -> float:
    """How long a run lasts on average, failures included."""
    return M * math.exp(R / M) * math.expm1((tau + delta) / M) * work / tau


class Outcome(NamedTuple):
    """A simulated run."""

    seconds: float
    failures: int
    lost: float
    """Seconds of work that were done again."""


def simulate(work: float, tau: float, delta: float, R: float, gpus: int, m: float, seed: int = 0) -> Outcome:
    """One run as events: every GPU has a clock of its own that says when it fails next. After a failure the run takes
    R seconds to start again, another failure included, and continues from its last complete checkpoint; the GPU that
    failed is replaced by a fresh one."""
    rng = random.Random(seed)
    clocks = [(rng.expovariate(1 / m), gpu) for gpu in range(gpus)]
    heapq.heapify(clocks)
    now = saved = lost = 0.0
    failures = 0
    while True:
        segments = math.ceil((work - saved) / tau)
        at, gpu = clocks[0]
        end = now + (work - saved) + segments * delta
        if end <= at:
            return Outcome(end, failures, lost)
        if at > now:  # else it failed during the restart
            whole = min(math.floor((at - now) / (tau + delta)), segments)
            lost += min(at - now - whole * (tau + delta), tau)
            saved += whole * tau
        failures += 1
        heapq.heapreplace(clocks, (at + rng.expovariate(1 / m), gpu))
        now = at + R

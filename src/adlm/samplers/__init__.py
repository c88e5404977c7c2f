"""Samplers: which positions of a row change at each step. See plan.py for the protocol and docs/sampling.md for the
list.

plan.py           Event, Look, Plan: what a sampler is
rates.py          the formulas: probability of reveal and remask for each step
scheduled.py      plans made of rates: the whole trajectory drawn before the network runs
first_hitting.py  exact continuous-time reveals
looking.py        plans that look at predictions: score, remdm-conf, confidence, entropy, anchor-first
autoregressive.py left to right
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from adlm.diffusion.schedules import (
    RELEASE_LAST_TIME,
    Schedule,
    mask_share,
    profile_grid,
    release_grid,
    uniform_grid,
)
from adlm.errors import choose, require
from adlm.io.paths import path_of
from adlm.samplers import rates
from adlm.samplers.autoregressive import LeftToRight
from adlm.samplers.first_hitting import FirstHitting
from adlm.samplers.looking import AnchorFirst, Conf, Confidence, Entropy, Score
from adlm.samplers.plan import Event, Look, Plan, Positions, Trajectory
from adlm.samplers.scheduled import Scheduled
from adlm.schema import SamplingConfig

__all__ = [
    "RELEASE_WITHOUT_CUT",
    "SAMPLERS",
    "Event",
    "Look",
    "Plan",
    "Positions",
    "Trajectory",
    "check_sampling",
    "make_plan",
    "profile_of",
    "takes_grid",
    "times",
]

Maker = Callable[[SamplingConfig, Schedule], Plan]


def _scheduled(
    formula: Callable[..., rates.Rates], kind: type = Scheduled, greedy: bool = True, own_time: bool = False
) -> Maker:
    """A plan on the uniform grid, or on the release's grid followed by its filling step.

    `own_time`: the grid is of the training schedule's time, and not of shares of masks, which networks are told.
    """

    def make(c: SamplingConfig, schedule: Schedule) -> Plan:
        release = c.parity == "release"
        grid = release_grid(c.steps) if release else times(c)
        share = mask_share(grid, schedule) if own_time else grid
        found = formula(grid[:-1], grid[1:], c, schedule, release)
        return kind(share[:-1], found, last_t=float(share[-1]), greedy_fill=release and greedy)

    return make


def times(c: SamplingConfig) -> Tensor:
    """The T+1 times of a sampler's steps."""
    return profile_grid(c.steps, *profile_of(c.grid)) if c.grid else uniform_grid(c.steps)


def profile_of(grid: str) -> tuple[Tensor, Tensor]:
    """Mask shares and nats of the file sampling.grid."""
    path = path_of(grid)
    require(path.is_file(), f"sampling.grid={grid!r} does not exist; `adlm profile CHECKPOINT` writes such a file")
    return read_profile(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def read_profile(path: Path, changed: int) -> tuple[Tensor, Tensor]:
    """Mask shares and nats of a file of `adlm profile`; read again if it has `changed`."""
    try:
        found = json.loads(path.read_text())
        return torch.tensor(found["share"], dtype=torch.float64), torch.tensor(found["nats"], dtype=torch.float64)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"sampling.grid={str(path)!r} is not a file of `adlm profile`: share and nats") from None


def _dfm(c: SamplingConfig, schedule: Schedule) -> Plan:
    release = c.parity == "release"
    times = rates.dfm_times(c.steps, (1 - RELEASE_LAST_TIME if release else 1.0) / c.steps)
    t = times[:-1]
    return Scheduled(t, rates.dfm(t, c.steps)[1], last_t=float(times[-1]), greedy_fill=release)


def _analytic(t: Tensor, s: Tensor, c: SamplingConfig, schedule: Schedule, release: bool) -> rates.Rates:
    return rates.analytic(t, s, schedule)


# Each line: how the formula reads its settings. The last column of docs/sampling.md says which are exact.
SAMPLERS: dict[str, Maker] = {
    "mdlm": _scheduled(lambda t, s, c, schedule, release: rates.mdlm(t, s)),
    "remdm-cap": _scheduled(lambda t, s, c, schedule, release: rates.remdm_cap(t, s, c.eta)),
    "remdm-rescale": _scheduled(lambda t, s, c, schedule, release: rates.remdm_rescale(t, s, c.eta)),
    "remdm-conf": _scheduled(lambda t, s, c, schedule, release: rates.remdm_conf(t, s), kind=Conf),
    "remdm-loop": _scheduled(
        lambda t, s, c, schedule, release: rates.remdm_loop(t, s, c.eta, c.t_on, c.t_off, c.alpha_on, release)
    ),
    "forward-backward": _scheduled(lambda t, s, c, schedule, release: rates.forward_backward(t, s, release)),
    "dfm": _dfm,
    "ddpm": _scheduled(lambda t, s, c, schedule, release: rates.ddpm(t, s, schedule), own_time=True),
    "analytic": _scheduled(_analytic, greedy=False, own_time=True),
    "score": _scheduled(_analytic, kind=Score, greedy=False, own_time=True),
    "first-hitting": lambda c, schedule: FirstHitting(),
    "confidence": lambda c, schedule: Confidence(c.steps, c.threshold),
    "entropy": lambda c, schedule: Entropy(c.steps, c.threshold),
    "anchor-first": lambda c, schedule: AnchorFirst(c.steps),
    "autoregressive": lambda c, schedule: LeftToRight(),
}
PARITIES = ("", "release")
# Whose steps may be placed anywhere; others place their own (dfm), give some times a meaning (remdm-loop), or run along
# the training schedule's time, which is not the share of masks (ddpm)
ANY_GRID = ("mdlm", "remdm-cap", "remdm-rescale")
NOT_IN_THE_RELEASE = {"first-hitting", "confidence", "entropy", "anchor-first"}
# The release draws these from the uncut prediction whatever its nucleus_p
RELEASE_WITHOUT_CUT = {"ddpm", "analytic", "score"}


def takes_grid(sampler: str, parity: str) -> bool:
    return sampler in ANY_GRID and not parity


def check_sampling(c: SamplingConfig) -> None:
    """What can be said about the settings without a model; messages name the configuration keys."""
    choose("sampling.sampler", c.sampler, SAMPLERS)
    choose("sampling.parity", c.parity, PARITIES)
    require(c.steps >= 1, f"sampling.steps must be at least 1, got {c.steps}")
    require(0 <= c.eta <= 1, f"sampling.eta must lie in [0, 1], got {c.eta}")
    require(
        not c.grid or takes_grid(c.sampler, c.parity),
        f"sampling.grid is for {', '.join(ANY_GRID)} without parity; got {c.sampler}"
        + (f", sampling.parity={c.parity}" if c.parity else ""),
    )
    require(c.threshold >= 0, f"sampling.threshold must not be negative, got {c.threshold}")
    require(
        not (c.parity and c.sampler in NOT_IN_THE_RELEASE),
        f"sampling.parity=release: the release has no sampler {c.sampler!r}; leave sampling.parity empty",
    )


def make_plan(c: SamplingConfig, schedule: Schedule) -> Plan:
    """The plan of sampling.sampler; `schedule` is the model's masking schedule (used by ddpm and analytic)."""
    check_sampling(c)
    with torch.no_grad():
        return SAMPLERS[c.sampler](c, schedule)

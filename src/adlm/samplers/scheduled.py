"""Samplers that read no predictions: a canvas's whole mask trajectory is drawn before the network runs.

Most are defined by rates: each position is a two-state chain (masked, visible) with given probabilities per step, so
the step of its next change has a known law. With H the running sum of -log(1 - p), the chain leaves its state at the
first step where H has grown by an Exp(1) number. One uniform per change, instead of one per step, gives the same
distribution; the steps in between are never visited, which is why a sequence needs far fewer network evaluations than
it has steps.

Two take one position per evaluation: first-hitting and left to right.

The module starts with the rates, one formula per function.
"""

import functools
import sys
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.process import (
    RELEASE_LAST_TIME,
    Schedule,
    mask_fraction,
    release_grid,
    reveal_probability,
    sigma_max,
    uniform_grid,
)
from adlm.diffusion.random import Stream, uniforms
from adlm.errors import require
from adlm.samplers.base import NOWHERE, Event, Positions, Sampler, Trajectory, draw_uniforms
from adlm.schema import SamplingConfig

# ---- rates -----------------------------------------------------------------------------------------------------------
# Formulas of the scheduled samplers: the probabilities, at each step, that a masked position is revealed and that a
# revealed one is masked.
#
# All times are float64 tensors; step i goes from t[i] to s[i] < t[i] and alpha(t) = 1 - t, as the release samples,
# unless a function says otherwise. `reveal` is the first line of Eq. 6 for masked positions, `remask` is sigma_t for
# visible ones. By default every step is a proper distribution (sigma_t <= sigma_max, no overshoot); `release=True`
# gives the public release's numbers, including those that are not.


class Rates(NamedTuple):
    """Probabilities of every step, float64 [steps]."""

    reveal: Tensor
    remask: Tensor


def mdlm(t: Tensor, s: Tensor) -> Rates:
    """Locked-in (Eq. 3): reveal with (alpha_s - alpha_t) / (1 - alpha_t), never mask again."""
    return Rates(reveal_probability(1 - s, 1 - t), torch.zeros_like(t))


def ddpm(t: Tensor, s: Tensor, schedule: Schedule) -> Rates:
    """Locked-in along the training schedule's own alpha(t)."""
    return Rates(reveal_probability(schedule.alpha(s), schedule.alpha(t)), torch.zeros_like(t))


def analytic(t: Tensor, s: Tensor, schedule: Schedule) -> Rates:
    """The score form of the same step: (e^D - 1) / (e^sigma(t) - 1) with D = sigma(t) - sigma(s), or its limit
    e^-sigma(s) where sigma(t) is infinite."""
    sigma_t, sigma_s = schedule.sigma(t), schedule.sigma(s)
    reveal = torch.expm1(sigma_t - sigma_s) / torch.expm1(sigma_t)
    return Rates(torch.where(sigma_t.isfinite(), reveal, torch.exp(-sigma_s)), torch.zeros_like(t))


def remasking(t: Tensor, s: Tensor, sigma: Tensor) -> Rates:
    """Eq. 6 with a given sigma_t. Clamped: beyond sigma_max the release has negative entries, which are never drawn."""
    return Rates(reveal_probability(1 - s, 1 - t, sigma).clamp(0, 1), sigma.clamp(0, 1))


def remdm_cap(t: Tensor, s: Tensor, eta: float) -> Rates:
    """sigma = min(eta, sigma_max)."""
    return remasking(t, s, sigma_max(1 - s, 1 - t).clamp(max=eta))


def remdm_rescale(t: Tensor, s: Tensor, eta: float) -> Rates:
    """sigma = eta * sigma_max."""
    return remasking(t, s, eta * sigma_max(1 - s, 1 - t))


def remdm_conf(t: Tensor, s: Tensor) -> Rates:
    """Reveal as MDLM (sigma is 0 at masked positions); `remask` is sigma_max, divided among the visible positions."""
    return Rates(mdlm(t, s).reveal, sigma_max(1 - s, 1 - t))


def forward_backward(t: Tensor, s: Tensor, release: bool = False) -> Rates:
    """sigma = (alpha_s - alpha_t) / alpha_t: the forward process undoes what the step reveals. It exceeds sigma_max in
    the last step only.
    """
    alpha_s, alpha_t = 1 - s, 1 - t
    sigma = torch.where(alpha_t > 0, (alpha_s - alpha_t) / alpha_t, 1.0)
    return remasking(t, s, sigma if release else torch.minimum(sigma, sigma_max(alpha_s, alpha_t)))


def remdm_loop(
    t: Tensor, s: Tensor, eta: float, t_on: float, t_off: float, alpha_on: float, release: bool = False
) -> Rates:
    """Three phases: MDLM up to alpha_on; alpha held there while sigma = eta; MDLM to the end.

    The release lets the last step of the first phase run past alpha_on; ours stops the phase at t_on.
    SamplingConfig.check refuses numbers that make no sense.
    """
    first, last = t > t_on, t <= t_off
    end = s if release else s.clamp(min=t_on)
    rising = mdlm(1 - (1 - t) * alpha_on / (1 - t_on), 1 - (1 - end) * alpha_on / (1 - t_on)).reveal
    falling = mdlm(t, s).reveal  # t (1 - alpha_on) / t_off: the factor cancels
    hold = torch.full_like(t, eta * alpha_on / (1 - alpha_on))
    reveal = torch.where(first, rising, torch.where(last, falling, hold))
    return Rates(reveal.clamp(0, 1), torch.where(first | last, 0.0, torch.full_like(t, eta)))


def dfm(t: Tensor, steps: int) -> tuple[Tensor, Rates]:
    """Discrete flow matching with a corrector: (dt, rates) at times t; a = 10 t^.25 (1-t)^.25 + 1, b = a - 1."""
    a = 10 * t**0.25 * (1 - t) ** 0.25 + 1
    b = a - 1
    start = t >= 1
    out = torch.where(start, 0.0, b / (1 - t))  # rate at which visible tokens are masked; b = 0 at t = 1
    dt = torch.where(start, 1 / steps, (1 / (a / t + out)).clamp(max=1 / steps))
    return dt, Rates((a * dt / t).clamp(0, 1), out * dt)


def expected_masks(rates: Rates) -> Tensor:
    """Expected fraction of masks before each step and after the last, float64 [steps + 1]."""
    masked = [1.0]
    for reveal, remask in zip(rates.reveal.tolist(), rates.remask.tolist()):
        masked.append(masked[-1] * (1 - reveal) + (1 - masked[-1]) * remask)
    return torch.tensor(masked, dtype=torch.float64)


@functools.lru_cache(maxsize=64)  # takes most of a second at T = 4096, and every sequence of a request needs it
def dfm_times(steps: int, last: float) -> Tensor:
    """The times that dfm visits: from t = 1 in steps of its own dt while t > last; the filling step follows."""
    times = [torch.tensor(1.0, dtype=torch.float64)]
    while times[-1] > last:
        times.append(times[-1] - dfm(times[-1], steps)[0])
    return torch.stack(times)


# ---- samplers --------------------------------------------------------------------------------------------------------

# exp(-64) is below the resolution of a 52-bit uniform: a hazard of 64 is certainty
CERTAIN = 64.0


class Scheduled(Sampler):
    """A sampler defined by rates. A subclass gives its formula: `step_rates`.

    Steps follow the uniform grid, or the release's grid under sampling.parity=release. One more step fills what is
    still masked after the last.
    """

    along_schedule = False
    """Times are those of the training schedule; False: fractions of masks, alpha(t) = 1 - t."""
    greedy_release = True
    """Under sampling.parity=release the filling step takes the most probable tokens, as the release does."""

    def __init__(self, cfg: SamplingConfig, schedule: Schedule):
        super().__init__(cfg, schedule)
        self.release = cfg.parity == "release"
        grid = self.grid()
        self.rates = self.step_rates(grid[:-1], grid[1:])
        for name, p in zip(Rates._fields, self.rates):
            require(p.shape == grid[:-1].shape, f"{name} needs one probability per step")
            require(bool(((p >= 0) & (p <= 1)).all()), f"{name} probabilities must lie in [0, 1]")
        fraction = self.fractions(grid)
        self.t, self.last_t = fraction[:-1], float(fraction[-1])
        self.greedy_fill = self.release and self.greedy_release
        self.writes_once = not bool(self.rates.remask.any())

    def grid(self) -> Tensor:
        """The times 1 = t_0 > t_1 > ... of the steps, float64."""
        return (release_grid if self.release else uniform_grid)(self.cfg.steps)

    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        """Rates of the steps from t to s < t."""
        raise NotImplementedError

    def fractions(self, grid: Tensor) -> Tensor:
        """The fraction of masks that the network is conditioned on at each time of the grid."""
        return mask_fraction(grid, self.schedule) if self.along_schedule else grid

    def changes(self, holes: Positions, seed: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """(step, position) of every reveal and of every remask; each hole ends revealed, at the latest by the fill."""
        n = len(self.t)
        reveal = np.append(cumulative_hazard(self.rates.reveal), np.inf)  # the filling step reveals what is left
        remask = cumulative_hazard(self.rates.remask)
        reveals, remasks = [], []
        live, step, turn = holes, np.zeros(len(holes), dtype=np.int64), 0
        while len(live):
            step = next_change(reveal, step, draw_uniforms(seed, Stream.REVEAL, turn, live))
            reveals.append((step, live))
            if self.writes_once:
                break
            again = next_change(remask, np.minimum(step + 1, n), draw_uniforms(seed, Stream.REMASK, turn, live))
            alive = again < n
            live, again = live[alive], again[alive]
            remasks.append((again, live))
            step, turn = again + 1, turn + 1
        empty = [(NOWHERE, NOWHERE)]
        (reveal_step, revealed), (remask_step, remasked) = (
            (np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))
            for pairs in (reveals, remasks or empty)
        )
        return reveal_step, revealed, remask_step, remasked

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        return self.all_blocks(holes, seed, sys.maxsize)

    def in_blocks(self, holes: Positions, seed: int, block: int) -> Trajectory:
        # The trajectory of a subclass may depend on more than its rates.
        plain = type(self).trajectory is Scheduled.trajectory
        return self.all_blocks(holes, seed, block) if plain else super().in_blocks(holes, seed, block)

    def all_blocks(self, holes: Positions, seed: int, block: int) -> Trajectory:
        """The events of all blocks, one after the other. Positions change independently of each other, so the changes
        of all blocks are drawn at once."""
        if not len(holes):
            return
        reveal_step, revealed, remask_step, remasked = self.changes(holes, seed)
        steps = len(self.t) + 1
        times, inverse = np.unique(revealed // block * steps + reveal_step, return_inverse=True)
        draws = split(revealed, inverse, len(times))
        # masked in step j: the network first sees it in a later step
        masks = split(remasked, np.searchsorted(times, remasked // block * steps + remask_step, "right"), len(times))
        for step, mask, drawn in zip((times % steps).tolist(), masks, draws):
            fill = step == len(self.t)
            yield Event(step, self.last_t if fill else float(self.t[step]), mask, drawn, fill and self.greedy_fill)


def cumulative_hazard(p: Tensor) -> NDArray[np.float64]:
    """H[i] = sum over steps before i of -log(1 - p): survival from step i to before step j is exp(H[i] - H[j])."""
    hazard = (-torch.log1p(-p.double())).clamp(max=CERTAIN)
    return np.concatenate([[0.0], hazard.cumsum(0).numpy()])


def next_change(H: NDArray, step: NDArray, u: NDArray) -> NDArray:
    """First step j >= step at which the state is left; len(H) - 1 when it never is."""
    # maximum: if -log(u) is lost in rounding, the search would go back to the start of a plateau of H
    return np.maximum(np.searchsorted(H, H[step] - np.log(u), side="left") - 1, step)


def split(values: NDArray, group: NDArray, n: int) -> list[NDArray]:
    """`values` by group 0..n-1, in increasing order of value within a group."""
    order = np.lexsort((values, group))
    return np.split(values[order], np.searchsorted(group[order], np.arange(1, n)))


class Mdlm(Scheduled):
    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return mdlm(t, s)


class RemdmCap(Scheduled):
    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return remdm_cap(t, s, self.cfg.eta)


class RemdmRescale(Scheduled):
    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return remdm_rescale(t, s, self.cfg.eta)


class RemdmLoop(Scheduled):
    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        c = self.cfg
        return remdm_loop(t, s, c.eta, c.t_on, c.t_off, c.alpha_on, self.release)

    def fractions(self, grid: Tensor) -> Tensor:
        """The expected fraction of masks, 1 - alpha_on between t_on and t_off; the release uses the plain time."""
        return grid if self.release else expected_masks(self.rates)


class ForwardBackward(Scheduled):
    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return forward_backward(t, s, self.release)


class Dfm(Scheduled):
    def grid(self) -> Tensor:
        last = (1 - RELEASE_LAST_TIME if self.release else 1.0) / self.cfg.steps
        return dfm_times(self.cfg.steps, last)

    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return dfm(t, self.cfg.steps)[1]


class Ddpm(Scheduled):
    along_schedule = True
    filtered_in_release = False

    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return ddpm(t, s, self.schedule)


class Analytic(Scheduled):
    along_schedule = True
    filtered_in_release = False
    greedy_release = False

    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return analytic(t, s, self.schedule)


class FirstHitting(Sampler):
    """The continuous-time reverse process, simulated exactly, one revealed position per evaluation.

    With n masks left at time t, the next one is revealed at t' = t u^(1/n), at a uniformly chosen position. These are
    the order statistics of n independent uniforms: one uniform per hole, in descending order, gives the same law.
    """

    steps_matter = False
    in_release = False

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        t = uniforms(seed, Stream.REVEAL, torch.from_numpy(holes)).numpy()
        for step, i in enumerate(np.argsort(-t, kind="stable")):
            yield Event(step, float(t[i]), NOWHERE, holes[i : i + 1])


class LeftToRight(Sampler):
    """The chain rule: left to right, one position per evaluation.

    For causal models the engine keeps a key-value cache, so that an evaluation reads one new token, not the sequence.
    """

    steps_matter = False
    causal = True

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        for step in range(len(holes)):
            yield Event(step, 1 - step / len(holes), NOWHERE, holes[step : step + 1])

    def in_blocks(self, holes: Positions, seed: int, block: int) -> Trajectory:
        if block > 1:
            yield from super().in_blocks(holes, seed, block)
        else:  # the hot loop of causal models
            for i in range(len(holes)):
                yield Event(0, 1.0, NOWHERE, holes[i : i + 1])

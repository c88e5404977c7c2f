"""Masking schedules: alpha(t) is the probability that a token is still visible at time t.

Time runs from t=0 (data) to t=1 (all masks) and s < t throughout the package; alpha falls from 1 to about 0. Each
schedule gives alpha, its derivative, its inverse, the noise level sigma(t) = -log alpha(t), and the loss weight of the
bound w(t) = -alpha'(t) / (1 - alpha(t)) in a closed form that does not cancel as t -> 0. Functions are elementwise on
tensors; a Python float is taken as float64.
"""

import functools
import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.checks import check_range
from adlm.errors import choose, require
from adlm.schema import NoiseConfig

RELEASE_LAST_TIME = 1e-5  # the public release's samplers stop here and fill what is left by argmax


class Schedule(Protocol):
    def alpha(self, t: Tensor | float) -> Tensor: ...
    def dalpha(self, t: Tensor | float) -> Tensor: ...
    def inverse(self, alpha: Tensor | float) -> Tensor: ...
    def sigma(self, t: Tensor | float) -> Tensor: ...
    def weight(self, t: Tensor | float) -> Tensor: ...


def _time(t: Tensor | float) -> Tensor:
    t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
    check_range("time t", t, 0.0, 1.0)
    return t


def _share(alpha: Tensor | float) -> Tensor:
    alpha = alpha if isinstance(alpha, Tensor) else torch.tensor(alpha, dtype=torch.float64)
    check_range("alpha", alpha, 0.0, 1.0)
    return alpha


def _check_eps(eps: float) -> None:
    require(0.0 <= eps < 1.0, f"noise.eps must lie in [0, 1), got {eps}")


@dataclass(frozen=True)
class Polynomial:
    """alpha = 1 - (1-eps) t^power."""

    power: float = 2.0
    eps: float = 1e-3

    def __post_init__(self):
        _check_eps(self.eps)
        require(self.power > 0, f"noise.power must be positive, got {self.power}")

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - (1 - self.eps) * _time(t) ** self.power

    def dalpha(self, t: Tensor | float) -> Tensor:
        return -(1 - self.eps) * self.power * _time(t) ** (self.power - 1)

    def inverse(self, alpha: Tensor | float) -> Tensor:
        return ((1 - _share(alpha)) / (1 - self.eps)) ** (1 / self.power)

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * _time(t) ** self.power)

    def weight(self, t: Tensor | float) -> Tensor:
        return self.power / _time(t)


@dataclass(frozen=True)
class LogLinear(Polynomial):
    """alpha = 1 - (1-eps) t, the default: sigma(t) = -log(1-(1-eps)t) and w(t) = 1/t exactly."""

    power: float = 1.0
    eps: float = 1e-3


@dataclass(frozen=True)
class Linear(LogLinear):
    """alpha = 1 - t: log-linear without the floor, so sigma(1) is infinite."""

    eps: float = 0.0


@dataclass(frozen=True)
class Geometric:
    """sigma = sigma_min^(1-t) sigma_max^t; alpha(0) = exp(-sigma_min) is not quite 1."""

    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def __post_init__(self):
        require(
            0 < self.sigma_min < self.sigma_max,
            f"noise.sigma_min must lie between 0 and noise.sigma_max, got {self.sigma_min} and {self.sigma_max}",
        )

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def sigma(self, t: Tensor | float) -> Tensor:
        return self.sigma_min * torch.exp(self._log_ratio * _time(t))

    def alpha(self, t: Tensor | float) -> Tensor:
        return torch.exp(-self.sigma(t))

    def dalpha(self, t: Tensor | float) -> Tensor:
        sigma = self.sigma(t)
        return -self._log_ratio * sigma * torch.exp(-sigma)

    def inverse(self, alpha: Tensor | float) -> Tensor:
        return torch.log(-torch.log(_share(alpha)) / self.sigma_min) / self._log_ratio

    def weight(self, t: Tensor | float) -> Tensor:
        sigma = self.sigma(t)
        return self._log_ratio * sigma / torch.expm1(sigma)


@dataclass(frozen=True)
class Cosine:
    """alpha = eps + (1-eps) cos(pi t / 2); 1 - alpha is written 2 (1-eps) sin^2(pi t / 4), which does not cancel."""

    eps: float = 1e-3

    def __post_init__(self):
        _check_eps(self.eps)

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - 2 * (1 - self.eps) * torch.sin(math.pi / 4 * _time(t)) ** 2

    def dalpha(self, t: Tensor | float) -> Tensor:
        return -(1 - self.eps) * math.pi / 2 * torch.sin(math.pi / 2 * _time(t))

    def inverse(self, alpha: Tensor | float) -> Tensor:
        return 4 / math.pi * torch.asin(((1 - _share(alpha)) / (2 * (1 - self.eps))).sqrt())

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-2 * (1 - self.eps) * torch.sin(math.pi / 4 * _time(t)) ** 2)

    def weight(self, t: Tensor | float) -> Tensor:
        return math.pi / 2 / torch.tan(math.pi / 4 * _time(t))


@dataclass(frozen=True)
class CosineSquared:
    """alpha = eps + (1-eps) cos^2(pi t / 2)."""

    eps: float = 1e-3

    def __post_init__(self):
        _check_eps(self.eps)

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - (1 - self.eps) * torch.sin(math.pi / 2 * _time(t)) ** 2

    def dalpha(self, t: Tensor | float) -> Tensor:
        return -(1 - self.eps) * math.pi / 2 * torch.sin(math.pi * _time(t))

    def inverse(self, alpha: Tensor | float) -> Tensor:
        return 2 / math.pi * torch.asin(((1 - _share(alpha)) / (1 - self.eps)).sqrt().clamp(max=1))

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * torch.sin(math.pi / 2 * _time(t)) ** 2)

    def weight(self, t: Tensor | float) -> Tensor:
        return math.pi / torch.tan(math.pi / 2 * _time(t))


SCHEDULES = {
    "loglinear": lambda c: LogLinear(eps=c.eps),
    "linear": lambda c: Linear(),
    "geometric": lambda c: Geometric(sigma_min=c.sigma_min, sigma_max=c.sigma_max),
    "cosine": lambda c: Cosine(eps=c.eps),
    "cosine-squared": lambda c: CosineSquared(eps=c.eps),
    "polynomial": lambda c: Polynomial(power=c.power, eps=c.eps),
}


def make_schedule(cfg: NoiseConfig) -> Schedule:
    return SCHEDULES[choose("noise.name", cfg.name, SCHEDULES)](cfg)


LEAST_VISIBLE = 1e-9
"""alpha below which noise levels no longer grow: a schedule may end at 0, whose level is infinite."""
MOST_NOISE = -math.log(LEAST_VISIBLE)


@functools.cache
def masked_at_1(schedule: Schedule) -> float:
    """Share of masks at t = 1: all that the network has seen."""
    return 1 - float(schedule.alpha(1.0))


Shares = TypeVar("Shares", Tensor, NDArray[np.float64])


def noise_level(share: Shares, schedule: Schedule) -> Shares:
    """The sigma a network is told for a canvas with a share of masks, 1 being the schedule's end: -log alpha, with
    1 - alpha in proportion to the share. At the time that `mask_share` comes from it is the schedule's own sigma."""
    if isinstance(share, np.ndarray):  # the engine's, at every step: tensors this small cost ten times as much
        return -np.log1p(-np.minimum(masked_at_1(schedule) * share, 1 - LEAST_VISIBLE))
    masked = (masked_at_1(schedule) * share.double()).clamp(max=1 - LEAST_VISIBLE)  # which float32 rounds to 1
    return -torch.log1p(-masked).to(share.dtype)


def mask_share(t: Tensor, schedule: Schedule) -> Tensor:
    """1 - alpha(t), as a share of what it is at the schedule's end (t itself if log-linear)."""
    return (1 - schedule.alpha(t)) / masked_at_1(schedule)


def stratified_times(u: Tensor, index: Tensor, total: int, eps: float) -> Tensor:
    """t_i = eps + (1-eps) * ((i + u)/total mod 1): example i of `total` gets its own slice of [eps, 1].

    `index` is the global example index, so the strata cover the whole batch however it is split over ranks; `u` in
    (0, 1) is one number per batch (a shifted lattice) or one per example (jittered strata).
    """
    require(total >= 1, f"total must be a positive number of examples, got {total}")
    require(0.0 <= eps < 1.0, f"eps must lie in [0, 1), got {eps}")
    return eps + (1 - eps) * torch.remainder((index + u) / total, 1.0)


def uniform_grid(T: int) -> Tensor:
    """T+1 float64 times 1, (T-1)/T, ..., 0: step i goes from grid[i] to grid[i+1]."""
    require(T >= 1, f"sampling.steps must be at least 1, got {T}")
    return 1 - torch.arange(T + 1, dtype=torch.float64) / T


def release_grid(T: int) -> Tensor:
    """The public release's times: linspace(1, 1e-5, T+1), after which what is still masked is filled by argmax."""
    require(T >= 1, f"sampling.steps must be at least 1, got {T}")
    return torch.linspace(1.0, RELEASE_LAST_TIME, T + 1, dtype=torch.float64)


LEAST_SLOPE = 0.01
"""Of the mean slope: where a profile is flat, steps are long but not endless."""


def profile_grid(T: int, share_K: Tensor, nats_K: Tensor) -> Tensor:
    """T+1 times like `uniform_grid`, with steps where they matter: their density is proportional to sqrt(m'(t)).

    m(t), given at increasing shares, is the cross-entropy of a masked token when a share t of the row is masked.
    Drawing a share d of L tokens at once, each from its own marginal, costs what they would have learned from each
    other, about L d^2 m'(t) / 2 nats; T steps cost least in all with that density (Lagrange).
    """
    require(T >= 1, f"sampling.steps must be at least 1, got {T}")
    share, nats = share_K.double(), nats_K.double()
    require(len(share) >= 2 and bool((share.diff() > 0).all()), "a profile needs two or more increasing shares")
    sound = nats.isfinite().all() & (share[0] > 0) & (share[-1] <= 1)
    require(bool(sound), "a profile has shares in (0, 1] and finite values")
    slope = (nats.diff() / share.diff()).clamp(min=0)  # noise can make it fall, which no step length could use
    slope = slope + LEAST_SLOPE * slope.mean() if bool(slope.any()) else torch.ones_like(slope)
    edges = torch.cat([share.new_zeros(1), share[1:-1], share.new_ones(1)])  # the outer slopes go on to 0 and to 1
    area = torch.cat([share.new_zeros(1), (slope.sqrt() * edges.diff()).cumsum(0)])
    wanted = area[-1] * (1 - torch.arange(T + 1, dtype=torch.float64) / T)
    k = torch.searchsorted(area, wanted, right=True).clamp(1, len(slope)) - 1
    grid = edges[k] + (wanted - area[k]) / slope.sqrt()[k]
    grid[0], grid[-1] = 1.0, 0.0
    return grid


def parallel_cost(grid: Tensor, share_K: Tensor, nats_K: Tensor) -> float:
    """Nats per token lost by drawing each step's tokens at once, to second order: sum of d^2 m'(t) / 2 over steps."""
    m = torch.from_numpy(np.interp(grid.numpy(), share_K.double().numpy(), nats_K.double().numpy()))
    return float(((grid[:-1] - grid[1:]) * (m[:-1] - m[1:])).sum() / 2)

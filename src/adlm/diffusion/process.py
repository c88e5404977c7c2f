"""The masking process: schedules alpha(t), and the forward and reverse steps they give."""

import functools
import math
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm import tables
from adlm.diffusion import check_not_nan, check_range, check_tokens, visible
from adlm.diffusion.random import Stream, uniforms
from adlm.errors import require
from adlm.schema import NoiseConfig

# ---- schedules -------------------------------------------------------------------------------------------------------
# Masking schedules: alpha(t) is the probability that a token is still visible at time t.
#
# Time runs from t=0 (data) to t=1 (all masks) and s < t throughout the package; alpha falls from 1 to about 0. Each
# schedule gives alpha, the noise level sigma(t) = -log alpha(t), and the loss weight of the bound
# w(t) = -alpha'(t) / (1 - alpha(t)) in a closed form that does not cancel as t -> 0. Functions are elementwise on
# tensors; a Python float is treated as float64.
#
# After the schedules: the noise level of a canvas, the times of a batch, and the times of a sampler's steps.

LEAST_VISIBLE = 1e-9
"""Smallest alpha of a noise level: a schedule may end at alpha = 0, where sigma is infinite."""
MOST_NOISE = -math.log(LEAST_VISIBLE)
RELEASE_LAST_TIME = 1e-5
"""The public release's samplers stop at this time and fill what is left by argmax."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Schedule:
    """Base class of the schedules in tables.SCHEDULES."""

    def __init__(self, cfg: NoiseConfig | None = None):
        self.cfg = cfg or NoiseConfig()

    def alpha(self, t: Tensor | float) -> Tensor:
        raise NotImplementedError

    def sigma(self, t: Tensor | float) -> Tensor:
        """-log alpha(t)."""
        raise NotImplementedError

    def weight(self, t: Tensor | float) -> Tensor:
        """-alpha'(t) / (1 - alpha(t))."""
        raise NotImplementedError

    @functools.cached_property
    def masked_at_1(self) -> float:
        """Fraction of masks at t = 1, the most that the network sees in training."""
        return 1 - float(self.alpha(1.0))


def make_schedule(cfg: NoiseConfig) -> Schedule:
    return tables.SCHEDULES.load(cfg.name, "noise.name")(cfg)


def as_time(t: Tensor | float) -> Tensor:
    t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
    check_range("time t", t, 0.0, 1.0)
    return t


class LogLinear(Schedule):
    """alpha = 1 - (1-eps) t, the default: sigma(t) = -log(1-(1-eps)t) and w(t) = 1/t exactly."""

    def __init__(self, cfg: NoiseConfig | None = None):
        super().__init__(cfg)
        self.eps = self.cfg.eps

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - (1 - self.eps) * as_time(t)

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * as_time(t))

    def weight(self, t: Tensor | float) -> Tensor:
        return 1 / as_time(t)


class Linear(LogLinear):
    """alpha = 1 - t: log-linear without eps, so sigma(1) is infinite."""

    def __init__(self, cfg: NoiseConfig | None = None):
        super().__init__(cfg)
        self.eps = 0.0


class Geometric(Schedule):
    """sigma = sigma_min^(1-t) sigma_max^t; alpha(0) = exp(-sigma_min) is not quite 1."""

    def __init__(self, cfg: NoiseConfig | None = None):
        super().__init__(cfg)
        self.log_ratio = math.log(self.cfg.sigma_max / self.cfg.sigma_min)

    def alpha(self, t: Tensor | float) -> Tensor:
        return torch.exp(-self.sigma(t))

    def sigma(self, t: Tensor | float) -> Tensor:
        return self.cfg.sigma_min * torch.exp(self.log_ratio * as_time(t))

    def weight(self, t: Tensor | float) -> Tensor:
        sigma = self.sigma(t)
        return self.log_ratio * sigma / torch.expm1(sigma)


class Cosine(Schedule):
    """alpha = eps + (1-eps) cos(pi t / 2); 1 - alpha is written 2 (1-eps) sin^2(pi t / 4), which does not cancel."""

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - 2 * (1 - self.cfg.eps) * torch.sin(math.pi / 4 * as_time(t)) ** 2

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-2 * (1 - self.cfg.eps) * torch.sin(math.pi / 4 * as_time(t)) ** 2)

    def weight(self, t: Tensor | float) -> Tensor:
        return math.pi / 2 / torch.tan(math.pi / 4 * as_time(t))


class CosineSquared(Schedule):
    """alpha = eps + (1-eps) cos^2(pi t / 2)."""

    def alpha(self, t: Tensor | float) -> Tensor:
        return 1 - (1 - self.cfg.eps) * torch.sin(math.pi / 2 * as_time(t)) ** 2

    def sigma(self, t: Tensor | float) -> Tensor:
        return -torch.log1p(-(1 - self.cfg.eps) * torch.sin(math.pi / 2 * as_time(t)) ** 2)

    def weight(self, t: Tensor | float) -> Tensor:
        return math.pi / torch.tan(math.pi / 2 * as_time(t))


# The noise level of a canvas

Fractions = TypeVar("Fractions", Tensor, NDArray[np.float64])


def noise_level(fraction: Fractions, schedule: Schedule) -> Fractions:
    """The sigma that a network is conditioned on, for a canvas with this fraction of masks (1: the schedule's end).

    It is -log alpha, with 1 - alpha proportional to the fraction. For `mask_fraction(t)` it is the schedule's sigma(t).
    """
    if isinstance(fraction, np.ndarray):  # called by the engine at every step: small tensors cost ten times as much
        return -np.log1p(-np.minimum(schedule.masked_at_1 * fraction, 1 - LEAST_VISIBLE))
    masked = (schedule.masked_at_1 * fraction.double()).clamp(max=1 - LEAST_VISIBLE)  # float32 would round this to 1
    return -torch.log1p(-masked).to(fraction.dtype)


def mask_fraction(t: Tensor, schedule: Schedule) -> Tensor:
    """1 - alpha(t), relative to its value at the schedule's end (t itself if log-linear)."""
    return (1 - schedule.alpha(t)) / schedule.masked_at_1


# The times of a batch
#
# Stratified: the unit interval is divided into as many slices as the global batch has examples, and each example gets
# one slice, so the average over times has far less variance than independent draws. The order of slices is a
# low-discrepancy permutation: any run of consecutive examples (a micro-batch, a rank's part) is spread evenly over
# [0, 1] too, which keeps the number of masked positions in each forward pass nearly constant.


def draw_times(seed: int, counter: int, example_B: Tensor, total: int) -> Tensor:
    """Stratified times in [0, 1), float64, one per example; `counter` separates steps or draws."""
    if total < 1:
        raise ValueError(f"total must be a positive number of examples, got {total}")
    u_B = uniforms(seed, Stream.TIME, counter, example_B)
    slice_B = strata(total, example_B.device)[example_B]
    return torch.remainder((slice_B + u_B) / total, 1.0)


def strata(total: int, device: torch.device | str) -> Tensor:
    """A permutation of 0..total-1: the ranks of frac(i * golden ratio). Every run of it is evenly spread."""
    keys = torch.arange(total, dtype=torch.float64, device=device) * GOLDEN_RATIO % 1.0
    return keys.argsort().argsort()


def beta_quantile(u: Tensor, a: float, resolution: int = 8192) -> Tensor:
    """Inverse distribution function of Beta(a, a): trapezoidal rule on a fine grid (error below 1e-3 for a >= 1)."""
    if a == 1.0:
        return u
    x = torch.linspace(0, 1, resolution + 1, dtype=torch.float64, device=u.device)
    log_density = torch.xlogy(a - 1, x) + torch.xlogy(a - 1, 1 - x)
    density = (log_density - log_density.max()).exp()  # relative to the peak: for large a it underflows float64
    mass = torch.cat((density.new_zeros(1), ((density[1:] + density[:-1]) / 2).cumsum(0)))
    mass = mass / mass[-1]
    right = torch.searchsorted(mass, u.double().clamp(0, 1)).clamp(1, resolution)
    left = right - 1
    between = (u - mass[left]) / (mass[right] - mass[left]).clamp_min(1e-300)
    return (left + between.clamp(0, 1)) / resolution


# The times of a sampler's steps


def uniform_grid(T: int) -> Tensor:
    """T+1 float64 times 1, (T-1)/T, ..., 0: step i goes from grid[i] to grid[i+1]. They are quotients of integers, so
    that the time 1/20 equals a setting of 0.05 exactly."""
    return torch.arange(T, -1, -1, dtype=torch.float64) / T


def release_grid(T: int) -> Tensor:
    """The public release's times: linspace(1, 1e-5, T+1). Positions that are still masked are then filled by argmax."""
    return torch.linspace(1.0, RELEASE_LAST_TIME, T + 1, dtype=torch.float64)


# ---- the absorbing process -------------------------------------------------------------------------------------------
# The absorbing (masking) process and its posteriors: Eq. 1, 2, 3, 6 of the paper and the SUBS parameterisation.
#
# Pure functions of tensors. alpha_s, alpha_t, sigma_t are tensors or floats that broadcast against the token tensor.
# The posterior is dense ([..., V]) here because this is the definition. Samplers never build it: the two probabilities
# `reveal_probability` and sigma_t determine everything about *positions*.

# Finite, so that 0 * log p stays 0; exp(-1e6) is 0 in every float format.
NO_MASS = -1e6

Number = Tensor | float


def _column(x: Number, like: Tensor) -> Number:
    """Numbers [B], one per sequence, with trailing axes added so that they broadcast against tokens [B, L]."""
    if isinstance(x, Tensor) and 0 < x.dim() < like.dim():
        return x.reshape(x.shape + (1,) * (like.dim() - x.dim()))
    return x


def _number(x: Number) -> Tensor:
    """A number as a tensor. A float becomes float64: as float32 a probability would lose half its digits."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def mask_tokens(x0: Tensor, u: Tensor, alpha_t: Number, mask_id: int) -> Tensor:
    """Eq. 1: z_t keeps the token of x0 with probability alpha_t, else it is the mask; uniforms `u` are shaped as x0."""
    if u.shape != x0.shape:
        raise ValueError(f"u must have the shape of x0, {tuple(x0.shape)}, got {tuple(u.shape)}")
    if isinstance(alpha_t, Tensor):
        check_range("alpha_t", alpha_t, 0.0, 1.0)
    return torch.where(u < alpha_t, x0, mask_id)


def sigma_max(alpha_s: Number, alpha_t: Number) -> Tensor:
    """Largest sigma_t that leaves Eq. 6 a distribution: min(1, (1 - alpha_s) / alpha_t); 1 at alpha_t = 0."""
    alpha_s, alpha_t = _number(alpha_s), _number(alpha_t)
    return torch.where(1 - alpha_s < alpha_t, (1 - alpha_s) / alpha_t, torch.ones_like(alpha_t))


def reveal_probability(alpha_s: Number, alpha_t: Number, sigma_t: Number = 0.0) -> Tensor:
    """Eq. 6: probability that a masked position takes a token, (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t)."""
    alpha_s, alpha_t = _number(alpha_s), _number(alpha_t)
    return (alpha_s - (1 - sigma_t) * alpha_t) / (1 - alpha_t)


def posterior(
    z_t: Tensor, p_x0: Tensor, alpha_s: Number, alpha_t: Number, mask_id: int, sigma_t: Number = 0.0
) -> Tensor:
    """Eq. 6: distribution of z_s at every position, [..., V]; `p_x0` is the SUBS prediction (no mass on the mask).

    Without remasking (sigma_t = 0) it is Eq. 3, and Eq. 2 where p_x0 is one-hot.
    """
    require(p_x0.shape[:-1] == z_t.shape, f"p_x0 must be {tuple(z_t.shape)} by the vocabulary, got {tuple(p_x0.shape)}")
    check_tokens("z_t", z_t, p_x0.shape[-1])
    check_not_nan("p_x0", p_x0)
    alpha_s, alpha_t, sigma_t = (_number(_column(a, z_t)) for a in (alpha_s, alpha_t, sigma_t))
    _check_posterior(alpha_s, alpha_t, sigma_t)
    is_mask = F.one_hot(torch.as_tensor(mask_id, device=z_t.device), p_x0.shape[-1]).to(p_x0)
    reveal = reveal_probability(alpha_s, alpha_t, sigma_t).expand(z_t.shape).unsqueeze(-1).to(p_x0)
    remask = sigma_t.expand(z_t.shape).unsqueeze(-1).to(p_x0)
    from_mask = reveal * p_x0 + (1 - reveal) * is_mask
    from_token = (1 - remask) * F.one_hot(z_t, p_x0.shape[-1]).to(p_x0) + remask * is_mask
    return torch.where((z_t == mask_id).unsqueeze(-1), from_mask, from_token)


def _check_posterior(alpha_s: Tensor, alpha_t: Tensor, sigma_t: Tensor) -> None:
    if not (visible(alpha_s) and visible(alpha_t) and visible(sigma_t)):
        return
    check_range("alpha_t", alpha_t, 0.0, 1.0)
    check_range("alpha_s", alpha_s, 0.0, 1.0)
    require(bool((alpha_s >= alpha_t).all()), "alpha_s must not be below alpha_t: time s comes before t")
    require(bool((alpha_t < 1).all()), "alpha_t must be below 1: at t=0 nothing is masked and there is no step to take")
    top = sigma_max(alpha_s, alpha_t)
    require(
        bool(((sigma_t >= 0) & (sigma_t <= top * (1 + 1e-9))).all()),
        f"sigma_t must lie in [0, min(1, (1 - alpha_s) / alpha_t)], got up to {sigma_t.max().item()}"
        f" where at most {top.min().item()} is allowed",
    )


def subs(logits: Tensor, z_t: Tensor, mask_id: int) -> Tensor:
    """SUBS log p(x0 | z_t) in float32 (float64 for float64 logits).

    Zero-masking: the mask gets no mass. Carry-over: a visible token predicts itself.
    """
    require(
        logits.shape[:-1] == z_t.shape,
        f"logits must be {tuple(z_t.shape)} by the vocabulary, got {tuple(logits.shape)}",
    )
    check_tokens("z_t", z_t, logits.shape[-1])
    check_not_nan("logits", logits)
    is_mask = F.one_hot(torch.as_tensor(mask_id, device=logits.device), logits.shape[-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = F.log_softmax(logits + NO_MASS * is_mask, dim=-1)
    keep = torch.full_like(log_p, NO_MASS).scatter(-1, z_t.unsqueeze(-1), 0.0)
    return torch.where((z_t == mask_id).unsqueeze(-1), log_p, keep)

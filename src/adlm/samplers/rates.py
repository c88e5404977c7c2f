"""Formulas of the scheduled samplers: the probabilities of each step that a masked position is revealed and that a
revealed one is masked.

All times are float64 tensors; step i goes from t[i] to s[i] < t[i] and alpha(t) = 1 - t, as the release samples,
unless a function says otherwise. `reveal` is the first line of Eq. 6 for masked positions, `remask` is sigma_t for
visible ones. By default every sampler is made a proper distribution (sigma_t <= sigma_max, no overshoot); with
`release=True` the public release's numbers come out, including those that are not.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.diffusion.absorbing import reveal_probability, sigma_max
from adlm.diffusion.schedules import Schedule


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
    """sigma = (alpha_s - alpha_t) / alpha_t: undo forward what the step reveals. Beyond sigma_max in the last step
    only.
    """
    alpha_s, alpha_t = 1 - s, 1 - t
    sigma = torch.where(alpha_t > 0, (alpha_s - alpha_t) / alpha_t, 1.0)
    return remasking(t, s, sigma if release else torch.minimum(sigma, sigma_max(alpha_s, alpha_t)))


def remdm_loop(
    t: Tensor, s: Tensor, eta: float, t_on: float, t_off: float, alpha_on: float, release: bool = False
) -> Rates:
    """Three phases: MDLM up to alpha_on; alpha held there while sigma = eta; MDLM to the end.

    The release lets the last step of the first phase run past alpha_on; ours stops the phase at t_on. rules.py says
    which numbers make sense.
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


@functools.lru_cache(maxsize=64)  # takes most of a second at T = 4096, and every sequence of a request asks for it
def dfm_times(steps: int, last: float) -> Tensor:
    """The times that dfm visits: its own dt from t = 1 while t > last; then comes the filling step."""
    times = [torch.tensor(1.0, dtype=torch.float64)]
    while times[-1] > last:
        times.append(times[-1] - dfm(times[-1], steps)[0])
    return torch.stack(times)

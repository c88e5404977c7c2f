"""Which times a batch visits.

Stratified: the unit interval is cut into as many slices as the global batch has examples, and each example gets one
slice, so the average over times has far less variance than independent draws. The order of slices is a low-discrepancy
permutation: any run of consecutive examples (a micro-batch, a rank's share) is spread evenly over [0, 1] too, which
keeps the number of masked positions in each forward pass nearly constant.
"""

import math

import torch
from torch import Tensor

from adlm.diffusion.schedules import stratified_times
from adlm.diffusion.uniforms import Stream, uniforms

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def strata(total: int, device: torch.device | str) -> Tensor:
    """A permutation of 0..total-1: the ranks of frac(i * golden ratio), whose every stretch is evenly spread."""
    keys = torch.arange(total, dtype=torch.float64, device=device) * GOLDEN_RATIO % 1.0
    return keys.argsort().argsort()


def draw_times(seed: int, counter: int, example_B: Tensor, total: int) -> Tensor:
    """Stratified times in [0, 1), float64, one per example; `counter` separates steps or draws."""
    u_B = uniforms(seed, Stream.TIME, counter, example_B)
    slice_B = strata(total, example_B.device)[example_B]
    return stratified_times(u_B, slice_B, total, eps=0.0)


def beta_quantile(u: Tensor, a: float, b: float, resolution: int = 8192) -> Tensor:
    """Inverse distribution function of Beta(a, b), by trapezoids on a fine grid (error below 1e-3 for a, b >= 1)."""
    if a == 1.0 and b == 1.0:
        return u
    x = torch.linspace(0, 1, resolution + 1, dtype=torch.float64, device=u.device)
    log_density = torch.xlogy(a - 1, x) + torch.xlogy(b - 1, 1 - x)
    density = (log_density - log_density.max()).exp()  # a narrow one has no float64 for its own height
    mass = torch.cat((density.new_zeros(1), ((density[1:] + density[:-1]) / 2).cumsum(0)))
    mass = mass / mass[-1]
    right = torch.searchsorted(mass, u.double().clamp(0, 1)).clamp(1, resolution)
    left = right - 1
    share = (u - mass[left]) / (mass[right] - mass[left]).clamp_min(1e-300)
    return (left + share.clamp(0, 1)) / resolution


def annealed(start: float, progress: float, share: float) -> float:
    """A Beta parameter on its way to 1, reached after `share` of the run; share = 0 keeps it."""
    if share <= 0:
        return start
    return start + (1.0 - start) * min(1.0, progress / share)

"""Laws of the masking schedules: weight, noise level, ends, grids."""

import math

import numpy as np
import pytest
import torch

from adlm.diffusion.process import (
    LEAST_VISIBLE,
    Cosine,
    Geometric,
    Linear,
    LogLinear,
    draw_times,
    make_schedule,
    mask_fraction,
    noise_level,
    release_grid,
    uniform_grid,
)
from adlm.schema import NoiseConfig
from adlm.tables import SCHEDULES

ALL = [make_schedule(NoiseConfig(name=name)) for name in SCHEDULES.entries]
each = pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.cfg.name)
T = torch.linspace(1e-3, 0.999, 97, dtype=torch.float64)


@each
def test_weight_and_sigma_by_definition(schedule):
    t = T.clone().requires_grad_()
    alpha = schedule.alpha(t)
    (slope,) = torch.autograd.grad(alpha.sum(), t)
    torch.testing.assert_close(schedule.weight(T), -slope / (1 - alpha.detach()), rtol=1e-8, atol=0)
    torch.testing.assert_close(schedule.sigma(T), -alpha.detach().log(), rtol=1e-8, atol=1e-12)


@each
def test_noise_level_of_a_fraction_is_sigma_of_its_time(schedule):
    torch.testing.assert_close(
        noise_level(mask_fraction(T, schedule), schedule), schedule.sigma(T), rtol=1e-6, atol=1e-9
    )
    end = noise_level(torch.ones(1, dtype=torch.float64), schedule)
    torch.testing.assert_close(end, schedule.sigma(torch.ones(1).double()).clamp(max=-math.log(LEAST_VISIBLE)))
    assert noise_level(torch.zeros(1), schedule) == 0
    torch.testing.assert_close(torch.from_numpy(noise_level(T.numpy(), schedule)), noise_level(T, schedule))
    assert np.isfinite(noise_level(np.ones(1), schedule)).all()
    assert noise_level(torch.ones(1), schedule).isfinite().all()  # in float32, too


def test_fractions_of_a_loglinear_schedule_are_its_times():
    torch.testing.assert_close(mask_fraction(T, LogLinear()), T, rtol=1e-12, atol=0)


@each
def test_weight_survives_small_times_in_float32(schedule):
    t = torch.tensor([1e-6, 1e-4, 1e-2], dtype=torch.float64)
    torch.testing.assert_close(schedule.weight(t.float()).double(), schedule.weight(t), rtol=1e-5, atol=0)


@each
def test_falls_from_one_to_about_zero(schedule):
    alpha = schedule.alpha(torch.linspace(0, 1, 101, dtype=torch.float64))
    assert (alpha.diff() < 0).all()
    assert 1 - 2e-4 < alpha[0] <= 1
    assert 0 <= alpha[-1] <= 1.0001e-3


def test_loglinear_is_the_papers():
    s = LogLinear()
    t = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(s.sigma(t), -torch.log(1 - (1 - 1e-3) * t))
    assert torch.equal(s.weight(t), 1 / t)
    assert torch.equal(Linear().alpha(t), 1 - t)


def test_total_weight_from_the_weight():
    """w(t) is the hazard rate of revealing: the integral of w over [s, 1] is log((1 - alpha_1)/(1 - alpha_s))."""
    for s in (Cosine(), Geometric(), LogLinear()):
        t = torch.linspace(0.2, 0.8, 20001, dtype=torch.float64)
        integral = torch.trapezoid(s.weight(t), t)
        expected = torch.log((1 - s.alpha(0.8)) / (1 - s.alpha(0.2)))
        assert integral.item() == pytest.approx(expected.item(), rel=1e-6)


def test_grids():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    grid = release_grid(8)
    assert grid[0] == 1
    assert grid[-1] == 1e-5
    torch.testing.assert_close(grid.diff(), torch.full((8,), -(1 - 1e-5) / 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LogLinear().alpha(1.5), r"time t must lie in \[0.0, 1.0\], got"),
        (lambda: LogLinear().weight(torch.tensor([0.5, -0.1])), "time t must lie"),
        (lambda: Cosine().alpha(torch.tensor([math.nan])), "time t must lie"),
        (lambda: make_schedule(NoiseConfig(name="log-linear")), "did you mean 'loglinear'"),
        (lambda: draw_times(0, 0, torch.arange(2), 0), "total"),
    ],
)
def test_bad_input_is_answered(call, message):
    with pytest.raises(ValueError, match=message):
        call()

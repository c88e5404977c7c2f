"""Laws of the masking schedules: derivative, inverse, weight, ends; strata and grids."""

import math

import pytest
import torch

from adlm.diffusion.schedules import (
    SCHEDULES,
    Cosine,
    Geometric,
    Linear,
    LogLinear,
    make_schedule,
    release_grid,
    stratified_times,
    uniform_grid,
)
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.schema import NoiseConfig

ALL = [make_schedule(NoiseConfig(name=name)) for name in SCHEDULES] + [
    make_schedule(NoiseConfig(name="polynomial", power=0.7))
]
each = pytest.mark.parametrize("schedule", ALL, ids=repr)
T = torch.linspace(1e-3, 0.999, 97, dtype=torch.float64)


@each
def test_derivative_is_autograds(schedule):
    t = T.clone().requires_grad_()
    (expected,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.dalpha(T), expected, rtol=1e-9, atol=1e-12)


@each
def test_inverse_round_trip(schedule):
    torch.testing.assert_close(schedule.inverse(schedule.alpha(T)), T, rtol=1e-6, atol=1e-9)


@each
def test_weight_and_sigma_by_definition(schedule):
    alpha = schedule.alpha(T)
    torch.testing.assert_close(schedule.weight(T), -schedule.dalpha(T) / (1 - alpha), rtol=1e-8, atol=0)
    torch.testing.assert_close(schedule.sigma(T), -alpha.log(), rtol=1e-8, atol=1e-12)


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


def test_strata_cover_the_global_batch_however_it_is_split():
    total, eps = 64, 1e-3
    index = torch.arange(total)
    u = uniforms(0, Stream.TIME, 3, index)
    t = stratified_times(u, index, total, eps)
    stratum = ((t - eps) / (1 - eps) * total).floor().long()
    assert stratum.tolist() == list(range(total))
    parts = [stratified_times(u[i], index[i], total, eps) for i in index.view(8, 8).T]
    assert torch.equal(torch.stack(parts).T.reshape(-1), t)
    shared = stratified_times(u[:1], index, total, eps)
    torch.testing.assert_close(shared.diff(), torch.full((total - 1,), (1 - eps) / total, dtype=torch.float64))


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
        (lambda: Cosine().inverse(1.2), "alpha must lie"),
        (lambda: LogLinear(eps=1.0), "noise.eps"),
        (lambda: Geometric(sigma_min=3.0, sigma_max=1.0), "noise.sigma_min"),
        (lambda: make_schedule(NoiseConfig(name="log-linear")), "did you mean 'loglinear'"),
        (lambda: make_schedule(NoiseConfig(name="polynomial", power=0)), "noise.power"),
        (lambda: uniform_grid(0), "sampling.steps must be at least 1, got 0"),
        (lambda: release_grid(-3), "sampling.steps"),
        (lambda: stratified_times(torch.rand(2), torch.arange(2), 0, 0.1), "total"),
    ],
)
def test_bad_input_is_answered(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Laws of the masking schedules: derivative, inverse, weight, ends; strata and grids."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.diffusion.schedules import (
    LEAST_VISIBLE,
    SCHEDULES,
    Cosine,
    Geometric,
    Linear,
    LogLinear,
    make_schedule,
    mask_share,
    noise_level,
    parallel_cost,
    profile_grid,
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
def test_noise_level_of_a_share_is_sigma_of_its_time(schedule):
    torch.testing.assert_close(noise_level(mask_share(T, schedule), schedule), schedule.sigma(T), rtol=1e-6, atol=1e-9)
    end = noise_level(torch.ones(1, dtype=torch.float64), schedule)
    torch.testing.assert_close(end, schedule.sigma(torch.ones(1).double()).clamp(max=-math.log(LEAST_VISIBLE)))
    assert noise_level(torch.zeros(1), schedule) == 0
    torch.testing.assert_close(torch.from_numpy(noise_level(T.numpy(), schedule)), noise_level(T, schedule))
    assert np.isfinite(noise_level(np.ones(1), schedule)).all()
    assert noise_level(torch.ones(1), schedule).isfinite().all()  # in float32, too


def test_shares_of_a_loglinear_schedule_are_its_times():
    torch.testing.assert_close(mask_share(T, LogLinear()), T, rtol=1e-12, atol=0)


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


# Steps where they matter


def line_profile(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    share = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return share, 2 * share


def test_a_straight_profile_has_uniform_steps():
    torch.testing.assert_close(profile_grid(10, *line_profile()), uniform_grid(10))
    share = torch.tensor([0.1, 0.9])
    torch.testing.assert_close(profile_grid(7, share, torch.zeros(2)), uniform_grid(7))  # nothing to go by


@given(st.lists(st.floats(0, 5), min_size=2, max_size=20), st.integers(1, 50))
def test_profile_grids_run_from_one_to_zero(nats, T):
    share = (torch.arange(len(nats)) + 0.5) / len(nats)
    grid = profile_grid(T, share, torch.tensor(nats))
    assert grid[0] == 1 and grid[-1] == 0 and bool((grid.diff() < 0).all()) and len(grid) == T + 1


def test_the_density_is_the_root_of_the_slope():
    """Four times the slope on the upper half: twice the steps."""
    share = torch.linspace(0.001, 1, 1000, dtype=torch.float64)
    nats = torch.where(share < 0.5, share, 0.5 + 4 * (share - 0.5))
    grid = profile_grid(300, share, nats)
    assert int((grid[1:] > 0.5).sum()) == pytest.approx(200, abs=3)


def exact_cost(grid: torch.Tensor, m: list[float]) -> float:
    """Nats lost by drawing rows of L exchangeable tokens with these numbers of masks at the steps: at each, what the
    tokens drawn together know of each other. m[k]: entropy of a token when k are masked (itself one of them)."""
    L, total = len(m) - 1, 0.0
    counts = (grid * L).round().long().tolist()
    for before, after in itertools.pairwise(counts):
        total += sum(m[before] - m[k] for k in range(after + 1, before + 1))
    return total / L


def test_the_cost_of_parallel_steps_by_the_chain_rule():
    """Bits of a coin whose bias is drawn first: all entropies are known. The second-order cost is right, and the
    profile's steps lose less than uniform ones."""
    L = 400
    m = [0.0]
    for k in range(1, L + 1):
        seen = L - k  # Beta(1/2, 1/2): the predictive entropy averaged over how many of `seen` are ones
        ones = torch.arange(seen + 1, dtype=torch.float64)
        log_p = (
            torch.lgamma(torch.tensor(seen + 1.0)) - torch.lgamma(ones + 1) - torch.lgamma(seen - ones + 1)
            + torch.lgamma(ones + 0.5) + torch.lgamma(seen - ones + 0.5) - torch.lgamma(torch.tensor(seen + 1.0))
            - math.log(math.pi)
        )  # fmt: skip
        q = (ones + 0.5) / (seen + 1)
        m.append(float((log_p.exp() * (torch.special.entr(q) + torch.special.entr(1 - q))).sum()))
    share, nats = torch.arange(1, L + 1) / L, torch.tensor(m[1:])
    for T in (10, 20):
        uniform, ours = uniform_grid(T), profile_grid(T, share, nats)
        # the first step starts from m(1), where this profile is steepest: second order is rough there
        assert parallel_cost(uniform, share, nats) == pytest.approx(exact_cost(uniform, m), rel=0.6)
        assert parallel_cost(ours, share, nats) == pytest.approx(exact_cost(ours, m), rel=0.3)
        assert exact_cost(ours, m) < 0.6 * exact_cost(uniform, m)


@pytest.mark.parametrize(
    ("share", "nats"),
    [([0.5], [1.0]), ([0.5, 0.4], [1.0, 2.0]), ([0.0, 1.0], [1.0, 2.0]), ([0.1, 1.0], [1.0, math.nan])],
)
def test_bad_profiles_are_refused(share, nats):
    with pytest.raises(ValueError, match="profile"):
        profile_grid(4, torch.tensor(share), torch.tensor(nats))

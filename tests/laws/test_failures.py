"""Young's and Daly's formula against runs simulated failure by failure, every GPU with a clock of its own."""

import random

import pytest

from adlm.training.prediction import best_interval, expected_seconds, simulate

HOUR = 3600.0
# (hours until one GPU fails, seconds of a save, seconds of a restart, hours of work) of 1,024 GPUs: from a failure in
# two days to one in half an hour
CASES = [(50_000, 0.5, 240, 720), (50_000, 60, 240, 720), (5_000, 30, 240, 200), (512, 10, 120, 40)]


def mean_seconds(work: float, tau: float, delta: float, R: float, gpus: int, m: float, runs: int = 60) -> float:
    return sum(simulate(work, tau, delta, R, gpus, m, seed).seconds for seed in range(runs)) / runs


@pytest.mark.parametrize(("mtbf", "delta", "R", "work"), CASES)
def test_the_formula_is_the_mean_of_simulated_runs(mtbf, delta, R, work):
    M = mtbf * HOUR / 1024
    tau = best_interval(delta, M)
    for interval in (tau, tau / 3, 3 * tau):
        simulated = mean_seconds(work * HOUR, interval, delta, R, 1024, mtbf * HOUR)
        assert simulated == pytest.approx(expected_seconds(work * HOUR, interval, delta, R, M), rel=0.05)


@pytest.mark.parametrize(("mtbf", "delta", "R", "work"), CASES)
def test_no_other_interval_is_better(mtbf, delta, R, work):
    M = mtbf * HOUR / 1024
    tau = best_interval(delta, M)
    least = min(expected_seconds(work * HOUR, tau * 2 ** (k / 8), delta, R, M) for k in range(-32, 33))
    assert expected_seconds(work * HOUR, tau, delta, R, M) <= 1.001 * least
    assert best_interval(1e-6, M) == pytest.approx((2e-6 * M) ** 0.5, rel=1e-3), "Young's, where saving is cheap"


def test_without_failures_only_saving_costs():
    found = simulate(100.0, 10.0, 1.0, 5.0, 1, 1e12)
    assert found.seconds == pytest.approx(110) and found.failures == 0 and found.lost == 0


def test_one_failure_by_hand(monkeypatch):
    """At 18.6 s: the checkpoint of 10 s of work is kept, 7.6 s are lost, 5 s later 90 s begin, with 9 saves."""
    rings = iter([18.6, 1e12])
    monkeypatch.setattr(random.Random, "expovariate", lambda self, rate: next(rings))
    assert simulate(100.0, 10.0, 1.0, 5.0, 1, 10.0) == pytest.approx((18.6 + 5 + 99, 1, 7.6))


def test_a_failure_during_a_restart_begins_it_again(monkeypatch):
    rings = iter([18.6, 2.0, 1e12])
    monkeypatch.setattr(random.Random, "expovariate", lambda self, rate: next(rings))
    assert simulate(100.0, 10.0, 1.0, 5.0, 1, 10.0) == pytest.approx((20.6 + 5 + 99, 2, 7.6))

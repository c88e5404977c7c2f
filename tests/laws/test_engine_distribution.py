"""Every sampler of the engine has exactly the distribution of the dense loop: chi-square over enumerated outcomes."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from dense_loop import DEFAULTS, analytic_finals, trajectories
from toy import ToyModel

from adlm.engine import Engine, Request
from adlm.samplers import SAMPLERS, make_plan
from adlm.samplers.rates import Rates
from adlm.samplers.scheduled import Scheduled
from adlm.schema import SamplingConfig

ROWS = 1500


class Recording(Engine):
    """An engine that writes down what the network sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = defaultdict(tuple)

    def batch(self, group, rows, length):
        for i, row in zip(group, rows):
            self.seen[row.id] += ((row.event.step, tuple(self.canvas(i))),)
        return super().batch(group, rows, length)


def sample(model, start, sampler: str, T: int, engine=None, **settings) -> list[tuple]:
    """Final rows of many requests."""
    c = SamplingConfig(sampler=sampler, steps=T, **(DEFAULTS | settings))
    engine = engine or Engine(model, slots=500)
    results = list(engine.run(Request(list(start), c, seed=s) for s in range(ROWS)))
    if isinstance(engine, Recording):
        return [(*engine.seen[r.id], tuple(r.tokens)) for r in results]
    return [tuple(r.tokens) for r in results]


def sample_paths(model, start, sampler: str, T: int) -> list[tuple]:
    """What the network saw, followed by the final row."""
    return sample(model, start, sampler, T, engine=Recording(model, slots=500))


def compare(observed: list, expected: dict) -> float:
    counts = Counter(observed)
    assert set(counts) <= set(expected), "an outcome the dense loop never produces"
    keys = list(expected)
    return chi_square([counts[k] for k in keys], [expected[k] for k in keys])


NAIVE = sorted(set(SAMPLERS) - {"analytic", "score", "autoregressive"})


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("sampler", NAIVE)
def test_final_rows(sampler, T, record_property):
    start = (2, 2) if sampler == "dfm" else (2, 2, 2)  # dfm takes many more steps than T
    model = ToyModel(vocab_size=3, length=len(start))
    p = compare(sample(model, start, sampler, T), trajectories(model, start, sampler, T).finals())
    record_property("p_value", p)
    assert p > LEVEL, (sampler, T, p)


@pytest.mark.parametrize("sampler", NAIVE)
def test_whole_trajectories(sampler, record_property):
    """Which canvases the network sees at which steps, and the final row: the joint distribution."""
    model = ToyModel(vocab_size=3, length=2, seed=1)
    start, T = (2, 2), 2 if sampler == "dfm" else 3  # dfm takes many more steps than T
    p = compare(sample_paths(model, start, sampler, T), trajectories(model, start, sampler, T, record=True).paths())
    record_property("p_value", p)
    assert p > LEVEL, (sampler, p)


@pytest.mark.parametrize("sampler", ["mdlm", "remdm-cap", "remdm-conf", "forward-backward", "confidence"])
def test_fixed_positions_are_kept_and_conditioned_on(sampler):
    model = ToyModel(vocab_size=3, length=4, seed=2)
    start = (2, 1, 2, 0)
    finals = sample(model, start, sampler, 3)
    assert all(f[1] == 1 and f[3] == 0 for f in finals)
    assert compare(finals, trajectories(model, start, sampler, 3).finals()) > LEVEL


@pytest.mark.parametrize("T", [1, 4])
def test_analytic_equals_the_dense_score_form(T):
    model = ToyModel(vocab_size=3, length=3, seed=3)
    start = (2, 2, 2)
    assert compare(sample(model, start, "analytic", T), analytic_finals(model, start, T)) > LEVEL


@pytest.mark.parametrize("T", [1, 4])
def test_a_score_that_is_not_normalised_is_used_as_it_is(T):
    """Rates follow the sum of the ratios; a normalised score gives the analytic sampler, and only that one."""
    model = ToyModel(vocab_size=3, length=3, seed=3)
    start = (2, 2, 2)
    exact = analytic_finals(model, start, T, normalised=False)
    assert compare(sample(model, start, "score", T), exact) > LEVEL
    if T > 1:
        assert compare(sample(model, start, "analytic", T), exact) < LEVEL, "the toy's score is far from normalised"
    with torch.no_grad():
        others = torch.arange(model.vocab_size) != model.mask_id
        model.table -= model.table[..., others].logsumexp(-1, keepdim=True) - math.log(model.vocab_size - 1)
    assert compare(sample(model, start, "score", T), analytic_finals(model, start, T)) > LEVEL


@pytest.mark.parametrize("sampler", ["remdm-cap", "remdm-rescale", "remdm-loop"])
def test_no_remasking_is_mdlm(sampler):
    """eta = 0: the same rows, token for token, for cap and rescale (same numbers); loop keeps its own clock."""
    model = ToyModel(vocab_size=4, length=4, seed=4)
    start = (3,) * 4
    ours = sample(model, start, sampler, 6, eta=0.0)
    if sampler == "remdm-loop":
        expected = trajectories(model, start, "remdm-loop", 6, eta=0.0).finals()
        assert compare(ours, expected) > LEVEL
    else:
        assert Counter(ours) == Counter(sample(model, start, "mdlm", 6))


def test_first_hitting_is_mdlm_as_steps_grow():
    model = ToyModel(vocab_size=3, length=3, seed=5, scale=2.5)
    start = (2, 2, 2)
    limit = trajectories(model, start, "first-hitting", 1).finals()
    coarse, fine = (trajectories(model, start, "mdlm", T).finals() for T in (2, 200))
    distance = [sum(abs(d.get(k, 0) - limit[k]) for k in limit) for d in (coarse, fine)]
    assert distance[1] < 0.01 < 0.05 < distance[0]
    assert compare(sample(model, start, "mdlm", 2000), limit) > LEVEL
    assert compare(sample(model, start, "mdlm", 2), limit) < LEVEL


def test_a_broken_plan_is_caught(monkeypatch):
    """One probability off by two fifths in one step, and a remask forgotten: both show."""
    model = ToyModel(vocab_size=3, length=2, seed=1)
    start = (2, 2)
    exact = trajectories(model, start, "remdm-cap", 4, record=True)

    def broken(change):
        def make(c, schedule):
            plan = make_plan.__globals__["_true"](c, schedule)
            return Scheduled(plan.t, change(plan.rates))

        return make

    monkeypatch.setitem(make_plan.__globals__, "_true", SAMPLERS["remdm-cap"])

    def off(rates):
        reveal = rates.reveal.clone()
        reveal[1] *= 0.6
        return Rates(reveal, rates.remask)

    for change in (off, lambda rates: Rates(rates.reveal, rates.remask * 0)):
        monkeypatch.setitem(SAMPLERS, "remdm-cap", broken(change))
        paths = sample_paths(model, start, "remdm-cap", 4)
        counts = Counter(paths)
        expected = exact.paths()
        assert chi_square([counts[k] for k in expected], list(expected.values())) < 1e-6


def test_anchor_first_prefers_rare_tokens(monkeypatch):
    """With a bound low enough to matter in a toy row, the order follows the expected counts."""
    model, start = ToyModel(vocab_size=4, length=3, seed=6), (3, 3, 3)
    usual = trajectories(model, start, "anchor-first", 3).finals()
    monkeypatch.setattr("dense_loop.TAU", 0.9)
    exact = trajectories(model, start, "anchor-first", 3).finals()
    assert sum(abs(exact[k] - usual[k]) for k in exact) > 0.05
    engine = Engine(model, slots=500, tau=0.9)  # type: ignore[arg-type]
    assert compare(sample(model, start, "anchor-first", 3, engine=engine), exact) > LEVEL


def test_release_parity_ends_with_argmax():
    """parity=release: what is still masked at t = 1e-5 is filled with the most probable token, not drawn."""
    model = ToyModel(vocab_size=4, length=3)
    plan = make_plan(SamplingConfig(sampler="mdlm", steps=4, parity="release"), Engine(model).schedule)
    assert plan.greedy_fill
    monkey = Scheduled(plan.t, Rates(plan.rates.reveal * 0, plan.rates.remask), plan.last_t, greedy_fill=True)
    engine = Engine(model)
    import adlm.engine.engine as module

    original = module.make_plan
    module.make_plan = lambda c, s: monkey
    try:
        rows = {tuple(r.tokens) for r in engine.run(Request([3, 3, 3], seed=s) for s in range(20))}
    finally:
        module.make_plan = original
    assert rows == {tuple(int(np.argmax(p)) for p in model.p((3, 3, 3)))}

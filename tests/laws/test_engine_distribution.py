"""Every sampler of the engine has exactly the distribution of the dense loop: chi-square over enumerated outcomes."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from dense_loop import DEFAULTS, Walk, analytic_finals, trajectories
from references import REFERENCES
from toy import ToyModel

from adlm.engine import Engine, Request
from adlm.samplers.base import make_sampler
from adlm.samplers.scheduled import Mdlm, Rates, RemdmCap
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS

ROWS = 1500


# `score` has a dense form of its own (`analytic_finals`); a new sampler made of rates needs no line here.
SAMPLED = sorted(set(SAMPLERS.entries) - {"score"})


def settings_of(sampler: str, T: int, **settings) -> SamplingConfig:
    return SamplingConfig(sampler=sampler, steps=T, **(DEFAULTS | settings))


def exact(model, start, sampler: str, T: int, record: bool = False, **settings) -> Walk:
    return trajectories(model, start, settings_of(sampler, T, **settings), REFERENCES.get(sampler), record)


class Recording(Engine):
    """An engine that writes down what the network sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = defaultdict(tuple)

    def call(self, group, canvases, length):
        for i, canvas in zip(group, canvases):
            self.seen[canvas.id] += ((canvas.event.step, tuple(self.window_tokens(i))),)
        return super().call(group, canvases, length)


def sample(model, start, sampler: str, T: int, engine=None, **settings) -> list[tuple]:
    """Final rows of many requests."""
    c = settings_of(sampler, T, **settings)
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


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("sampler", SAMPLED)
def test_final_rows(sampler, T, record_property):
    start = (2, 2) if sampler == "dfm" else (2, 2, 2)  # dfm takes many more steps than T
    model = ToyModel(vocab_size=3, length=len(start))
    p = compare(sample(model, start, sampler, T), exact(model, start, sampler, T).finals())
    record_property("p_value", p)
    assert p > LEVEL, (sampler, T, p)


@pytest.mark.parametrize("sampler", SAMPLED)
def test_whole_exact(sampler, record_property):
    """Which canvases the network sees at which steps, and the final row: the joint distribution."""
    model = ToyModel(vocab_size=3, length=2, seed=1)
    start, T = (2, 2), 2 if sampler == "dfm" else 3  # dfm takes many more steps than T
    p = compare(sample_paths(model, start, sampler, T), exact(model, start, sampler, T, record=True).paths())
    record_property("p_value", p)
    assert p > LEVEL, (sampler, p)


@pytest.mark.parametrize("sampler", ["mdlm", "remdm-cap", "remdm-conf", "forward-backward", "confidence"])
def test_fixed_positions_are_kept_and_conditioned_on(sampler):
    model = ToyModel(vocab_size=3, length=4, seed=2)
    start = (2, 1, 2, 0)
    finals = sample(model, start, sampler, 3)
    assert all(f[1] == 1 and f[3] == 0 for f in finals)
    assert compare(finals, exact(model, start, sampler, 3).finals()) > LEVEL


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
    expected = analytic_finals(model, start, T, normalised=False)
    assert compare(sample(model, start, "score", T), expected) > LEVEL
    if T > 1:
        assert compare(sample(model, start, "analytic", T), expected) < LEVEL, "the toy's score is far from normalised"
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
        expected = exact(model, start, "remdm-loop", 6, eta=0.0).finals()
        assert compare(ours, expected) > LEVEL
    else:
        assert Counter(ours) == Counter(sample(model, start, "mdlm", 6))


def test_first_hitting_is_mdlm_as_steps_grow():
    model = ToyModel(vocab_size=3, length=3, seed=5, scale=2.5)
    start = (2, 2, 2)
    limit = exact(model, start, "first-hitting", 1).finals()
    coarse, fine = (exact(model, start, "mdlm", T).finals() for T in (2, 200))
    distance = [sum(abs(d.get(k, 0) - limit[k]) for k in limit) for d in (coarse, fine)]
    assert distance[1] < 0.01 < 0.05 < distance[0]
    assert compare(sample(model, start, "mdlm", 2000), limit) > LEVEL
    assert compare(sample(model, start, "mdlm", 2), limit) < LEVEL


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 0.05}])
@pytest.mark.parametrize("sampler", ["confidence", "entropy"])
def test_filters_do_not_make_the_model_surer(sampler, filters):
    """However sharply tokens are drawn, positions are chosen by the prediction itself: the canvases of a greedy
    trajectory are those of the dense loop, as many as there are steps where the model is never sure."""
    L, start = 6, (2,) * 6
    model = ToyModel(vocab_size=3, length=L, seed=7, scale=0.7)
    c = settings_of(sampler, L, threshold={"confidence": 0.8, "entropy": 0.2}[sampler])
    walk, z, expected = Walk(model, start, record=False), start, []
    for number, choose in enumerate(REFERENCES[sampler](walk, c)):
        if not walk.masked(z):
            break
        expected.append((number, z))
        ((_, revealed, _),) = choose(z, ())
        z = tuple(int(np.argmax(model.p(z)[l])) if l in revealed else t for l, t in enumerate(z))
    engine = Recording(model, slots=1)
    (result,) = engine.run([Request(list(start), replace(c, **filters))])
    assert (*engine.seen[result.id], tuple(result.tokens)) == (*expected, z)
    assert result.nfe == len(expected) >= 4


@pytest.mark.parametrize("sampler", ["mdlm", "remdm-cap", "confidence"])
def test_mass_on_the_mask_changes_nothing(sampler):
    """A D3PM may predict the mask. Samplers divide that mass among the tokens, so positions fall at the schedule's
    rate."""
    rows = []
    for mass in (-3.0, 3.0):
        model = ToyModel(vocab_size=3, length=4, seed=8, anchored=False)
        with torch.no_grad():
            model.table[..., model.mask_id] = mass
        c = settings_of(sampler, 3)
        results = Engine(model, slots=20).run(Request([2, 2, 1, 2], c, seed=s) for s in range(20))
        rows.append(sorted((r.seed, tuple(r.tokens), r.nfe) for r in results))
    assert rows[0] == rows[1]


class Broken(RemdmCap):
    """One probability is off by two fifths in one step."""

    def step_rates(self, t, s):
        reveal, remask = super().step_rates(t, s)
        reveal[1] *= 0.6
        return Rates(reveal, remask)


class Forgetful(RemdmCap):
    """Nothing is masked again."""

    def step_rates(self, t, s):
        reveal, remask = super().step_rates(t, s)
        return Rates(reveal, remask * 0)


@pytest.mark.parametrize("broken", [Broken, Forgetful])
def test_a_broken_sampler_is_caught(monkeypatch, broken):
    model = ToyModel(vocab_size=3, length=2, seed=1)
    start = (2, 2)
    expected = exact(model, start, "remdm-cap", 4, record=True).paths()
    monkeypatch.setitem(SAMPLERS.targets, "remdm-cap", f"{__name__}:{broken.__name__}")
    counts = Counter(sample_paths(model, start, "remdm-cap", 4))
    assert chi_square([counts[k] for k in expected], list(expected.values())) < 1e-6


def test_anchor_first_prefers_rare_tokens(monkeypatch):
    """With a bound low enough to matter in a toy sequence, the order follows the expected counts."""
    model, start = ToyModel(vocab_size=4, length=3, seed=6), (3, 3, 3)
    usual = exact(model, start, "anchor-first", 3).finals()
    monkeypatch.setattr("references.TAU", 0.9)
    expected = exact(model, start, "anchor-first", 3).finals()
    assert sum(abs(expected[k] - usual[k]) for k in expected) > 0.05
    engine = Engine(model, slots=500, tau=0.9)  # type: ignore[arg-type]
    assert compare(sample(model, start, "anchor-first", 3, engine=engine), expected) > LEVEL


class Waiting(Mdlm):
    """Reveals nothing before the filling step."""

    def step_rates(self, t, s):
        return Rates(t * 0, t * 0)


def test_release_parity_ends_with_argmax(monkeypatch):
    """parity=release: what is still masked at t = 1e-5 is filled with the most probable token, not drawn."""
    model = ToyModel(vocab_size=4, length=3)
    monkeypatch.setitem(SAMPLERS.targets, "mdlm", f"{__name__}:Waiting")
    c = SamplingConfig(sampler="mdlm", steps=4, parity="release")
    assert make_sampler(c, Engine(model).schedule).greedy_fill
    filled = {tuple(r.tokens) for r in Engine(model).run(Request([3, 3, 3], c, seed=s) for s in range(20))}
    assert filled == {tuple(int(np.argmax(p)) for p in model.p((3, 3, 3)))}

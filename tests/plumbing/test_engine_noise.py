"""The noise level that the engine tells its model, and what depends on it."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from engine_requests import request
from toy import ToyModel

from adlm.diffusion.process import make_schedule
from adlm.diffusion.random import Stream, uniforms
from adlm.engine import Engine, Frame
from adlm.samplers.base import make_sampler
from adlm.schema import NoiseConfig, SamplingConfig
from adlm.tables import SCHEDULES


def test_time_conditioned_models_are_told_the_noise_level():
    toy = ToyModel(3, 4)
    toy.config.conditioning = "sigma"
    engine = Engine(toy, slots=1)
    list(engine.run([request(1, [2] * 4, sampler="first-hitting")]))
    t = np.sort(uniforms(1, Stream.REVEAL, torch.arange(4)).numpy())[::-1]
    sigma = torch.cat(engine.evaluator.model.sigmas)
    torch.testing.assert_close(sigma.double(), torch.from_numpy(-np.log(1 - (1 - 1e-3) * t)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parity", ["", "release"])
def test_noise_levels_count_the_masks_of_the_whole_sequence(parity):
    """Three of four positions are holes: of those a fraction t is masked, of the sequence 3/4 t. The release
    takes t."""
    toy = ToyModel(3, 4)
    toy.config.conditioning = "sigma"
    engine = Engine(toy, slots=1)
    settings = {"parity": parity, "steps": 5}
    sampler = make_sampler(SamplingConfig(**settings), engine.schedule)
    t = np.array([event.t for event in sampler.trajectory(np.array([0, 2, 3]), 1)])
    list(engine.run([request(1, [2, 1, 2, 2], **settings)]))
    told = torch.cat(engine.evaluator.model.sigmas).double()
    expected = t if parity else 0.75 * t
    assert told.shape == (len(t),) and len(t) > 1
    torch.testing.assert_close(told, torch.from_numpy(-np.log(1 - (1 - 1e-3) * expected)), rtol=1e-5, atol=1e-6)


def test_left_to_right_hears_of_fewer_masks_from_token_to_token():
    toy = ToyModel(3, 4)
    toy.config.conditioning = "sigma"
    engine = Engine(toy, slots=1)
    list(engine.run([request(1, [2] * 4, sampler="autoregressive")]))
    told, masked = torch.cat(engine.evaluator.model.sigmas).double(), torch.tensor([4, 3, 2, 1]).double() / 4
    torch.testing.assert_close(told, -torch.log(1 - (1 - 1e-3) * masked), rtol=1e-5, atol=0)


def test_required_words_are_placed_at_the_noise_level_of_the_canvas():
    toy = ToyModel(3, 4)
    toy.config.conditioning = "sigma"
    engine = Engine(toy, slots=1)
    list(engine.run([request(1, [2, 1, 2, 2], required=[[0], [1]])]))
    placing = torch.cat(engine.evaluator.model.sigmas[:2]).double()
    torch.testing.assert_close(
        placing, -torch.log(1 - (1 - 1e-3) * torch.tensor([3 / 4, 2 / 4]).double()), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("sampler", ["ddpm", "analytic", "score"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_samplers_along_the_schedule_tell_its_noise_level(name, sampler):
    toy, schedule = ToyModel(3, 4), make_schedule(NoiseConfig(name=name))
    toy.config.conditioning = "sigma"
    engine = Engine(toy, schedule, slots=1)
    list(engine.run(request(seed, [2] * 4, sampler=sampler, steps=8) for seed in range(20)))
    told = torch.cat(engine.evaluator.model.sigmas).unique().double()
    assert told.isfinite().all()
    # at t = 1 an infinite sigma is told as that of LEAST_VISIBLE; at t = 0 the fill
    possible = schedule.sigma(torch.arange(9).double() / 8).clamp(max=-math.log(1e-9))
    assert len(told) > 2
    assert (told[:, None] - possible).abs().amin(1).max() < 1e-5


def test_a_token_expected_just_tau_times_is_rare():
    """As in training, where ties are anchors. The first position's token is expected exactly once."""
    toy = ToyModel(4, 2)
    with torch.no_grad():
        toy.anchor_table.fill_(-1e4)
        toy.anchor_table[:, 0, 0] = 0.0
        toy.anchor_table[:, 1, 1:3] = 0.0
    first = next(Engine(toy, tau=1).stream(request(1, [3, 3], sampler="anchor-first", steps=2, watch=True)))
    assert isinstance(first, Frame) and first.drawn == [0]


def test_rare_tokens_of_anchor_first_are_those_of_training():
    """tau=0: no token is rare, so all positions are alike and fall in their order."""
    toy = ToyModel(4, 6, seed=5)
    counts = Counter(
        tuple(u.drawn)
        for seed in range(10)
        for u in Engine(toy, tau=0).stream(request(seed, [3] * 6, sampler="anchor-first", steps=6, watch=True))
        if isinstance(u, Frame)
    )
    assert counts == {(l,): 10 for l in range(5)}

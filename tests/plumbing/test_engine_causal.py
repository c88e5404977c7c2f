"""Causal decoding with a cache equals re-reading the whole row; seeds, prompts and bans as in the other engine."""

import itertools

import numpy as np
import pytest
import torch
from tiny import tiny_model

from adlm.diffusion.random import Stream, filter_logits, gumbel_argmax, uniforms
from adlm.engine import Engine, Frame, Request, Result
from adlm.schema import SamplingConfig

V, M, L = 11, 10, 12


MODELS = {
    "ar": {"anchored": False},
    "a2r": {},
    "no bridge": {"bridge": "none"},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny_model(causal=True, conditioning="none", **MODELS[request.param]).requires_grad_(False)


def make(seed: int, prompt=(1,), length: int = L, **settings) -> Request:
    extra = {k: settings.pop(k) for k in ("banned", "stop_id", "watch", "required") if k in settings}
    c = SamplingConfig(sampler="autoregressive", **settings)
    return Request([*prompt, *[M] * (length - len(prompt))], c, seed=seed, **extra)


def naive(model, r: Request) -> list[int]:
    """Read the whole row again for every token."""
    row, c = [t for t in r.tokens if t != M], r.settings
    while len(row) < len(r.tokens):
        with torch.no_grad():
            log_p = model.log_probs(torch.tensor([row]))[:, -1]
        log_p = filter_logits(log_p, c.temperature, c.top_k, c.top_p, c.min_p)
        u = uniforms(r.seed, Stream.TOKEN, 0, len(row), torch.arange(V))[None]
        row.append(int(gumbel_argmax(log_p, u)))
        if row[-1] == r.stop_id:
            break
    return row


REQUESTS = [
    make(0),
    make(1, (1, 2, 3, 4, 5)),
    make(2, (3, 3), top_p=0.7),
    make(3, (4,), length=6, temperature=0.5),
    make(4, (5, 6, 7), stop_id=2),
    make(5, (1,) * 11, top_k=3),
    make(6, (2,), min_p=0.2),
]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_equals_the_loop_without_a_cache(model, slots):
    """Also shows: rows at different positions share a call, join and leave, and do not depend on each other."""
    engine = Engine(model, slots=slots)
    ids = [engine.submit(r) for r in REQUESTS]
    done = {}
    while engine.busy:
        done |= {u.id: u for u in engine.step() if isinstance(u, Result)}
    assert [done[i].tokens for i in ids] == [naive(model, r) for r in REQUESTS]
    assert done[ids[1]].nfe == L - 5


def test_a_row_that_is_paused_or_stands_still_continues_as_if_nothing_had_happened(model):
    engine, chance, done = Engine(model, slots=3), np.random.default_rng(0), {}
    ids = [engine.submit(r) for r in REQUESTS]
    while engine.busy:
        for id in [s.id for s in engine.slots if s is not None and chance.random() < 0.3]:
            engine.pause(id)
        for id in [id for id in engine.paused if chance.random() < 0.5][: engine.slots.count(None)]:
            engine.resume(id)
        only = [s.id for s in engine.slots if s is not None and chance.random() < 0.7]
        done |= {u.id: u for u in engine.step(only) if isinstance(u, Result)}
    assert [done[i].tokens for i in ids] == [naive(model, r) for r in REQUESTS]


def test_bans(model):
    free = [naive(model, make(s)) for s in range(10)]
    pair = next(p for row in free for p in itertools.pairwise(row[1:]))
    rows = [r.tokens for r in Engine(model).run(make(s, banned=[[7], list(pair)]) for s in range(10))]
    assert all(7 not in row and pair not in set(itertools.pairwise(row[1:])) for row in rows)


def test_frames_and_cancelling(model):
    engine = Engine(model)
    assert isinstance(engine, Engine)
    updates = list(engine.stream(make(1, watch=True)))
    assert [type(u) for u in updates] == [Frame] * (L - 2) + [Result]
    assert [f.drawn for f in updates[:-1]] == [[l] for l in range(1, L - 1)]
    id = engine.submit(make(2))
    engine.step()
    engine.cancel(id)
    (left,) = engine.step()
    assert isinstance(left, Result)
    assert not left.finished
    assert left.tokens[2:] == [M] * (L - 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([M, M]), "needs a first token"),
        (Request([1, M, 2]), "all holes must stand at the end"),
        (Request([1, 2]), "no holes"),
        (make(0, required=[[1]]), "required words need a diffusion model"),
        (make(0, length=13, stride=4), "stride"),
    ],
)
def test_bad_requests_are_answered(model, request_, message):
    with pytest.raises(ValueError, match=message):
        Engine(model).submit(request_)

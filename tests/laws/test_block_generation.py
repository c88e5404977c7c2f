"""Generation in blocks with a cache equals the loop that reads everything again, token by token; and every sampler has,
block by block, the distribution of the dense loop."""

import copy
import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from dense_blocks import DenseBlocks, generate
from dense_loop import DEFAULTS, Walk, rates_of
from references import REFERENCES
from tiny import MODERN, tiny_model

from adlm.engine import Engine, Frame, Request, Result, block_of
from adlm.engine import blocks as engine_blocks
from adlm.engine import evaluator as engine_evaluator
from adlm.engine.prepare import Graphs, unwrap
from adlm.models import Network
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS

V, M, L = 11, 10, 12
TRAINED = "4,1,3,5,12"
GROUPED = MODERN | {"n_heads": 4, "n_kv_heads": 2, "activation": "swiglu", "init": "normal"}
KINDS = {
    "plain": {"anchored": False},
    "shifted": {"anchored": False, "shift": True},
    "anchored": {},
    "anchored, shifted": {"shift": True, "bridge": "none"},
    "grouped keys, shifted": GROUPED | {"anchored": False, "shift": True},
}
SAMPLED = sorted(SAMPLERS.entries)


def blocks_model(kind: str = "shifted", **options) -> Network:
    own = {"block_length": TRAINED, "conditioning": "none", "dtype": torch.float64} | KINDS[kind] | options
    return tiny_model(**own).requires_grad_(False)


@pytest.fixture(scope="module", params=["plain", "anchored, shifted"])
def model(request) -> Network:
    return blocks_model(request.param)


def make(seed: int, prompt=(1,), length: int = L, K: int = 4, sampler: str = "mdlm", **settings) -> Request:
    extra = {k: settings.pop(k) for k in ("banned", "stop_id", "watch", "required") if k in settings}
    c = SamplingConfig(sampler=sampler, block_length=K, **({"steps": 3, "eta": 0.3, "alpha_on": 0.7} | settings))
    return Request([*prompt, *[M] * (length - len(prompt))], c, seed=seed, **extra)


def mixed(model: Network, K: int) -> list[Request]:
    """Every sampler, with prompts that end anywhere, other lengths, filters and an end of text."""
    names = [s for s in SAMPLED if not SAMPLERS.load(s).misfit(model.config)]
    more = itertools.cycle([{}, {"top_p": 0.8}, {"stop_id": 7}, {"temperature": 0.7, "top_k": 5}, {"stop_id": 3}])
    found = []
    for seed, (name, extra) in enumerate(zip(names, more)):
        prompt = [1 + l % 9 for l in range(1 + seed % 7)]
        found.append(make(seed, prompt, L - seed % 3, K, name, **extra))
    return found


def tokens(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """In the order of the requests."""
    ids, done = [engine.submit(r) for r in requests], {}
    while engine.busy:
        done |= {u.id: u.tokens for u in engine.step() if isinstance(u, Result)}
    return [done[i] for i in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "fused"), [(1, 512), (3, 0), (4, 512), (4, 0), (5, 512)])
def test_the_cache_is_exact(kind, K, fused, monkeypatch):
    """Token by token, in float64; a finished block is read by itself, or with the first reading of the next. 5 does not
    divide 12: the last block is short. Slots are few: sequences at different blocks share calls, join and leave."""
    monkeypatch.setattr(engine_blocks, "FUSED", fused)
    model = blocks_model(kind)
    requests, dense = mixed(model, K), DenseBlocks(model, K)
    expected = [generate(dense, r, tau=2) for r in requests]
    assert len({tuple(e) for e in expected}) > len(expected) // 2
    assert tokens(Engine(model, slots=4, tau=2), requests) == expected


def test_block_lengths_share_calls():
    model = blocks_model()
    requests = [r for K in (1, 3, 4, 5) for r in mixed(model, K)]
    np.random.default_rng(0).shuffle(requests)
    expected = [generate(DenseBlocks(model, r.settings.block_length), r) for r in requests]
    assert tokens(Engine(model, slots=5), requests) == expected


def test_a_wrong_cache_is_found(monkeypatch):
    """The law can fail: keys of a noisy block that are taken for those of the finished one are wrong by little."""
    plan = engine_blocks.BlockReader.plan

    def skipping(self, starts, sizes):
        for i, start in starts.items():
            self.held[i].filled = start
        return plan(self, starts, sizes)

    model = blocks_model("plain")
    requests = [make(s, length=12) for s in range(8)]
    expected = [generate(DenseBlocks(model, 4), r) for r in requests]
    monkeypatch.setattr(engine_blocks.BlockReader, "plan", skipping)
    assert tokens(Engine(model), requests) != expected


def test_a_sequence_does_not_depend_on_its_batch():
    model = blocks_model("anchored, shifted")
    requests = mixed(model, 4)
    alone = [tokens(Engine(model, slots=1), [r])[0] for r in requests]
    for slots in (2, 3, 16):
        assert tokens(Engine(model, slots=slots), requests) == alone
        assert tokens(Engine(model, slots=slots), requests[::-1])[::-1] == alone


def test_a_sequence_that_is_paused_or_stands_still_continues_as_if_nothing_had_happened(model):
    requests = [*mixed(model, 4), *mixed(model, 1), *(replace(r, tokens=[*r.tokens[:-1], 2]) for r in mixed(model, 0))]
    alone = [tokens(Engine(model, slots=1), [r])[0] for r in requests]
    engine, chance, done = Engine(model, slots=5), np.random.default_rng(0), {}
    ids = [engine.submit(r) for r in requests]
    while engine.busy:
        for id in [s.id for s in engine.slots if s is not None and chance.random() < 0.3]:
            engine.pause(id)
        for id in [id for id in engine.paused if chance.random() < 0.5][: engine.slots.count(None)]:
            engine.resume(id)
        only = [s.id for s in engine.slots if s is not None and chance.random() < 0.7]
        done |= {u.id: u.tokens for u in engine.step(only) if isinstance(u, Result)}
    assert [done[id] for id in ids] == alone


def test_a_prompt_is_read_once_and_shared(model, monkeypatch):
    """The sequences of a prompt, and later ones that begin alike, copy what is read; the texts are those of a prompt
    that each reads for itself."""
    prompt, other = (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 5, 5, 5, 5, 5)
    requests = [make(s, prompt) for s in range(4)] + [make(9, other)]
    alone = [tokens(Engine(model, slots=1), [r])[0] for r in requests]
    engine, read = Engine(model, slots=3), []
    look = engine.evaluator.blocks.look_in_blocks
    monkeypatch.setattr(
        engine.evaluator.blocks, "look_in_blocks", lambda *a: (read.append((int(a[1][0, 0]), a[3])), look(*a))[1]
    )
    assert tokens(engine, requests) == alone
    # Of two whole blocks the first; the second is read with the first draws. A prompt that begins alike has it, too.
    assert read == [(0, 4)]


def test_who_continues_a_text_finds_it_read(model, monkeypatch):
    engine = Engine(model, slots=2)
    (first,) = tokens(engine, [make(0, length=10)])
    read, look = [], engine.evaluator.blocks.look_in_blocks
    monkeypatch.setattr(engine.evaluator.blocks, "look_in_blocks", lambda *a: (read.append(1), look(*a))[1])
    more = make(1, first)
    assert tokens(engine, [more]) == tokens(Engine(model), [more])
    assert not read


class Padded(Graphs):
    """Static shapes without a GPU: the functions themselves, run twice as a capture does."""

    def __init__(self):
        super().__init__(on=False)
        self.on, self.shapes = True, set()

    def capture(self, function):
        def repeated(*args):
            self.shapes.add((function.__name__, *(tuple(a.shape) if torch.is_tensor(a) else a for a in args)))
            function(*map(unwrap, args))
            return function(*map(unwrap, args))

        return repeated


def test_static_shapes_change_nothing(model, monkeypatch):
    requests = [*mixed(model, 4), *mixed(model, 1)]
    expected, padded = tokens(Engine(model, slots=5), requests), Padded()
    monkeypatch.setattr(engine_evaluator, "Graphs", lambda on: padded)
    engine = Engine(model, slots=5)
    engine.evaluator.warm_up()
    warm = {s for s in padded.shapes if s[0] == "look_in_blocks"}
    assert tokens(engine, requests) == expected
    read = {s for s in padded.shapes if s[0] == "look_in_blocks"}
    assert {s[2][1] for s in read} <= {1, 2, 4, 8} and {s[4] for s in read} <= {1, 2, 4, 8}
    assert {s for s in read if s[4] in (4, 8) and s[1] == (2, 64)} <= warm


def test_a_causal_model_is_blocks_of_one():
    """The same weights read as K = 1 with shifted outputs write what they write as a causal model."""
    causal, blocks = blocks_model(causal=True, shift=False, block_length=""), blocks_model()
    blocks.load_state_dict(causal.state_dict())
    requests = [make(s, (1, 2)[: 1 + s % 2], K=1, sampler="autoregressive", steps=1) for s in range(8)]
    assert tokens(Engine(causal), requests) == tokens(Engine(blocks), requests)
    for request in requests[:2]:
        assert tokens(Engine(causal), [request]) == [generate(DenseBlocks(blocks, 1), request)]


def test_the_whole_canvas_of_the_same_weights():
    """K = L, and what needs text to the right, are filled as any canvas is."""
    model, plain = blocks_model(), blocks_model(block_length="")
    assert model.state_dict().keys() == plain.state_dict().keys()
    whole, template = make(3, K=L), replace(make(3, K=0), tokens=[1, M, M, M, M, M, 5, M, 2, 2, M, 3])
    expected = tokens(
        Engine(plain), [replace(r, settings=replace(r.settings, block_length=0)) for r in (whole, template)]
    )
    assert tokens(Engine(model), [whole, template]) == expected


def test_an_end_of_text_ends_the_sequence(model):
    """At the end of its block, whatever the sampler; nothing of later blocks is drawn."""
    for sampler in ("mdlm", "remdm-cap", "confidence"):
        engine = Engine(model)
        free = sorted(engine.run(make(s, K=4, sampler=sampler) for s in range(8)), key=lambda r: r.seed)
        stop = Counter(t for r in free for t in r.tokens[1:8]).most_common(1)[0][0]
        stopped = engine.run(make(s, K=4, sampler=sampler, stop_id=stop) for s in range(8))
        for whole, result in zip(free, sorted(stopped, key=lambda r: r.seed)):
            end = whole.tokens.index(stop, 1) if stop in whole.tokens[1:] else L - 1
            assert result.tokens == whole.tokens[: end + 1]
            assert (result.nfe < whole.nfe) == (end < 8)


def test_bans(model):
    free = tokens(Engine(model), [make(s, K=4) for s in range(10)])
    phrases = Counter(p for row in free for p in itertools.pairwise(row[1:]))
    banned = [[7], *map(list, list(phrases)[:3])]
    for row in tokens(Engine(model, slots=3), [make(s, K=4, banned=banned) for s in range(10)]):
        assert 7 not in row[1:] and len(row) == L and M not in row
        assert not set(itertools.pairwise(row)) & {tuple(b) for b in banned[1:]}


def test_frames_say_what_stays(model):
    """What a frame calls settled is in the final text; finished blocks are, even where a block may be masked again."""
    for sampler, extra in (
        ("mdlm", {}),
        ("remdm-cap", {"eta": 1.0}),
        ("confidence", {}),
        ("mdlm", {"banned": [[1, 2]]}),
    ):
        *frames, result = Engine(model).stream(make(5, (1, 2), K=4, sampler=sampler, watch=True, steps=6, **extra))
        assert isinstance(result, Result) and all(isinstance(f, Frame) and len(f.tokens) == L for f in frames)
        assert [f.nfe for f in frames] == [f.step for f in frames] == list(range(1, result.nfe))
        for frame in frames:
            kept = [(l, t) for l, t in enumerate(frame.tokens[: frame.settled]) if t != M]
            assert all(result.tokens[l] == t for l, t in kept)
            done = next(l for l, t in enumerate(frame.tokens) if t == M) if M in frame.tokens else L
            assert frame.settled >= min(done - done % 4, 8)


cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=cuda) for kind in KINDS])
def test_a_gpu_writes_what_the_cpu_writes(kind):
    """In float32 the same tokens; compiled in bf16 with graphs, whole sequences whatever joins and leaves."""
    model = blocks_model(kind, dtype=torch.float32)
    requests = [*mixed(model, 4), *mixed(model, 1), *mixed(model, 5)]
    expected = tokens(Engine(model, slots=5), requests)
    plain = Engine(copy.deepcopy(model), slots=5, device="cuda", precision="fp32", compile="false")
    assert tokens(plain, requests) == expected
    graphs = Engine(copy.deepcopy(model), slots=5, device="cuda", precision="fp32", compile="graphs")
    assert tokens(graphs, requests) == expected
    fast = Engine(copy.deepcopy(model), slots=5, device="cuda")
    assert all(M not in row for row in tokens(fast, requests))


@pytest.mark.parametrize("K", [pytest.param(K, marks=cuda) for K in (1, 4)])
def test_a_gpu_is_not_waited_for(K):
    """Once shapes are captured, a step that ends no sequence reads nothing back, at the end of a block neither."""
    engine = Engine(blocks_model(dtype=torch.float32), slots=4, device="cuda")
    requests = [make(s, K=K, sampler="autoregressive" if K == 1 else "mdlm") for s in range(4)]
    tokens(engine, requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):  # the first of them ends with its fifth evaluation
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(slot is not None for slot in engine.slots)


# Distributions


def walk_blocks(model: Network, start: tuple[int, ...], K: int, c: SamplingConfig) -> dict:
    """Probability of every path (what the network saw, at which step of which block) with its final sequence."""
    dense, states = DenseBlocks(model, K), {(start, ()): 1.0}
    reference = REFERENCES.get(c.sampler, rates_of)
    for first in range(0, len(start), K):
        new: dict = defaultdict(float)
        for (z, seen), p in states.items():
            walk = Walk(dense, z, record=True)  # type: ignore[arg-type]
            walk.holes = [l for l in walk.holes if first <= l < first + K]
            if walk.holes:
                for number, choose in enumerate(reference(walk, c)):
                    walk.step(number, choose)
            for (*more, final), q in walk.paths().items():
                new[final, (*seen, *more)] += p * q
        states = dict(new)
    return {(*seen, z): p for (z, seen), p in states.items()}


class Recording(Engine):
    """An engine that writes down what the network sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = defaultdict(tuple)

    def evaluate_blocks(self, group):
        now = [(self.active(i), self.active(i).nfe, self.active(i).event.step, tuple(self.tokens(i))) for i in group]
        super().evaluate_blocks(group)
        for canvas, nfe, step, z in now:
            if canvas.nfe > nfe:
                self.seen[canvas.id] += ((step, z),)


@pytest.mark.parametrize("sampler", [s for s in SAMPLED if s not in ("score", "analytic", "ddpm")])
def test_whole_trajectories(sampler, record_property):
    """Which canvases the network sees at which steps of which block, and the final sequence: the joint distribution."""
    shift = sampler in ("mdlm", "remdm-cap", "confidence")
    model = blocks_model("anchored", vocab_size=3, mask_id=2, length=4, block_length="2", shift=shift, scale=0.6)
    start, T = (1, 2, 2, 2) if shift or sampler == "dfm" else (2, 2, 2, 1)[::-1], 1 if sampler == "dfm" else 2
    c = SamplingConfig(sampler=sampler, steps=T, **(DEFAULTS | {"threshold": 0.55}))
    expected = walk_blocks(model, start, 2, c)
    engine = Recording(model, slots=200)
    results = list(engine.run(Request(list(start), c, seed=s) for s in range(1000)))
    counts = Counter((*engine.seen[r.id], tuple(r.tokens)) for r in results)
    assert set(counts) <= set(expected), "a path the dense loop never takes"
    p = chi_square([counts[k] for k in expected], list(expected.values()))
    record_property("p_value", p)
    assert p > LEVEL, (sampler, p)


# What a model cannot do


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make(0, K=8), r"sampling.block_length=8: the model was trained for blocks of 1, 3, 4, 5, 12"),
        (make(0, (), K=4), "needs a first token to start from, and position 0 is a hole"),
        (
            replace(make(0, K=4), tokens=[1, M, M, 2, M, 3]),
            "all holes must stand at the end.*or sampling.block_length=12",
        ),
        (make(0, K=4, required=[[1]]), "required words"),
        (make(0, K=4, length=14, stride=4), r"sampling\.stride"),
    ],
)
def test_bad_requests_are_answered(request_, message):
    with pytest.raises(ValueError, match=message):
        Engine(blocks_model()).submit(request_)


def test_models_without_blocks_say_so():
    with pytest.raises(ValueError, match=r"block_length=4: the model was trained for blocks of 12, the whole sequence"):
        Engine(blocks_model(block_length="")).submit(make(0, K=4))
    only = blocks_model(block_length="4")
    with pytest.raises(ValueError, match=r"continues text; take a diffusion model that reads the whole canvas$"):
        Engine(only).submit(replace(make(0, K=0), tokens=[1, M, M, M, M, 2]))
    inside = replace(make(0, K=0), tokens=[1, 2, 3, 3, 1, M, 2, 3])  # what follows stands in the same block
    assert block_of(inside, only) == 4
    assert tokens(Engine(only), [inside]) == [generate(DenseBlocks(only, 4), inside)]


def test_a_slot_whose_canvas_was_another_text_gives_nothing_away():
    """Blocks of one slot are read with what stands in the slots before it, here a canvas that is read as a whole: a
    prompt that this slot held before it is read anew."""
    model = tiny_model(dtype=torch.float64, **{**MODERN, "block_length": "4,12", "anchored": False})
    engine, prompt = Engine(model, slots=2), [1, 2, 3, 4, 5, 6, 7, 8]
    short = SamplingConfig(steps=2, block_length=4)

    def text(tokens, seed, settings=short):
        return Request([*tokens, *[model.mask_id] * (12 - len(tokens))], settings, seed=seed)

    list(engine.run([text(prompt, 1)]))
    list(engine.run([text([9], 2, SamplingConfig(sampler="first-hitting", block_length=12)), text([8, 8, 8, 8, 8], 3)]))
    (found,) = engine.run([text(prompt, 4)])
    assert found.tokens == generate(DenseBlocks(model, 4), text(prompt, 4))
    # the states, and not only the tokens they lead to
    clean, cache = (
        Engine(model, slots=2),
        [layer[0, :, :8] for layer in engine_blocks.tensors_of(engine.evaluator.blocks.cache)],
    )
    list(clean.run([text(prompt, 4)]))
    for ours, fresh in zip(cache, engine_blocks.tensors_of(clean.evaluator.blocks.cache)):
        torch.testing.assert_close(ours, fresh[0, :, :8])

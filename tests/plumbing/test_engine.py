"""The engine as its callers see it: seeds, batches, conditions, streams, and bad requests."""

import copy
import functools
import itertools
import math
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import torch._dynamo
from chance import LEVEL, chi_square
from tiny import tiny_model
from toy import ToyModel

from adlm.diffusion.process import make_schedule
from adlm.diffusion.random import Stream, uniforms
from adlm.engine import Engine, Frame, Request, Result
from adlm.engine.prepare import AHEAD, Graphs, Uploads, compile_blocks, fold, pad_heads, to_bfloat16, unwrap
from adlm.engine.request import Limit, parse_template
from adlm.models.bridge import LinearBridge
from adlm.samplers.base import make_sampler
from adlm.schema import NoiseConfig, SamplingConfig
from adlm.tables import SAMPLERS, SCHEDULES

V, M, L = 11, 10, 12
DIFFUSION = [s for s in SAMPLERS if s not in ("autoregressive", "speculative")]


@pytest.fixture(scope="module")
def model():
    return tiny_model().requires_grad_(False)


def request(seed: int = 0, tokens=None, sampler: str = "mdlm", **settings) -> Request:
    extra = {k: settings.pop(k) for k in ("banned", "required", "stop_id", "watch") if k in settings}
    return Request(tokens or [M] * L, SamplingConfig(sampler=sampler, **({"steps": 6} | settings)), seed=seed, **extra)


def rows(engine, requests) -> list[list[int]]:
    """Final rows in the order of the requests."""
    ids = [engine.submit(r) for r in requests]
    done = {}
    while engine.busy:
        done |= {u.id: u for u in engine.step() if isinstance(u, Result)}
    return [done[i].tokens for i in ids]


def mixed(n: int) -> list[Request]:
    """Requests of every sampler, with different settings and lengths."""
    out = []
    for seed, sampler in zip(range(n), itertools.cycle(DIFFUSION)):
        tokens = [M] * (L if seed % 3 else 7)
        tokens[2] = seed % V if seed % V != M else 0
        cut = [{}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 5}, {"min_p": 0.1}][seed % 4]
        out.append(request(seed, tokens, sampler, eta=0.05, t_on=0.6, t_off=0.2, **cut))
    return out


@pytest.mark.parametrize("slots", [3, 16])
def test_same_seed_same_row_at_any_batch_size_and_order(model, slots):
    """Rows join and leave all the time here: 26 requests through 3 or 16 slots, forwards and backwards."""
    requests = mixed(26)
    alone = [rows(Engine(model, slots=1), [r])[0] for r in requests]
    assert len({tuple(r) for r in alone}) > 15
    assert rows(Engine(model, slots=slots), requests) == alone
    assert rows(Engine(model, slots=slots), requests[::-1])[::-1] == alone


def test_rows_that_come_and_go_do_not_disturb_each_other(model):
    expected = rows(Engine(model, slots=1), [request(7, steps=12)])[0]
    engine = Engine(model, slots=4)
    wanted, done = engine.submit(request(7, steps=12)), {}
    for i in range(40):
        other = engine.submit(request(100 + i, sampler=DIFFUSION[i % len(DIFFUSION)], eta=0.05))
        if i % 3 == 0:
            engine.cancel(other)
        done |= {u.id: u for u in engine.step() if isinstance(u, Result)}
    assert done[wanted].tokens == expected


def test_a_row_that_is_paused_or_stands_still_continues_as_if_nothing_had_happened(model):
    """Any sampler: taken out of its slot between any two steps, put back into another one."""
    requests = mixed(26)
    alone = rows(Engine(model, slots=1), requests)
    engine, chance, done = Engine(model, slots=5), np.random.default_rng(0), {}
    ids = [engine.submit(r) for r in requests]
    while engine.busy:
        for id in [s.id for s in engine.slots if s is not None and chance.random() < 0.3]:
            engine.pause(id)
        for id in [id for id in engine.paused if chance.random() < 0.5][: engine.slots.count(None)]:
            engine.resume(id)
        only = [s.id for s in engine.slots if s is not None and chance.random() < 0.7]
        before = {s.id: s.nfe for s in engine.slots if s is not None}
        done |= {u.id: u for u in engine.step(only) if isinstance(u, Result)}
        assert all(s.nfe == before[s.id] for s in engine.slots if s is not None and s.id in before.keys() - set(only))
    assert [done[id].tokens for id in ids] == alone


def test_a_paused_row_can_be_cancelled(model):
    engine = Engine(model, slots=1)
    id = engine.submit(request(1, steps=12, watch=True))
    (frame,) = engine.step()
    engine.pause(id)
    assert engine.slots == [None] and engine.busy
    engine.cancel(id)
    (left,) = engine.step()
    assert (left.id, left.tokens, left.finished, engine.busy) == (id, frame.tokens, False, False)


def test_settings_change_the_row(model):
    base = request(3)
    others = [request(4), request(3, temperature=0.2), request(3, sampler="first-hitting"), request(3, top_k=1)]
    got = rows(Engine(model), [base, *others])
    assert all(g != got[0] for g in got[1:])


def test_the_last_block_may_be_finished_only_where_something_is_drawn(model, monkeypatch):
    requests = mixed(2 * len(DIFFUSION))
    few = rows(Engine(model, slots=5), requests)
    monkeypatch.setattr("adlm.engine.evaluator.FEW", (0,))
    seen, forward = [], type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: (seen.append(k.get("at_BQ")), forward(*a, **k))[1])
    assert rows(Engine(model, slots=5), requests) == few
    assert seen and all(at is None for at in seen)


def test_nfe_counts_evaluations(model):
    toy = ToyModel(4, 4)
    engine = Engine(toy, slots=1)
    (result,) = engine.run([request(1, [3] * 4, steps=50)])
    assert result.nfe == engine.evaluator.model.calls <= 4
    assert result.seconds > 0
    assert result.finished


def test_fixed_positions_stay(model):
    tokens = [M] * L
    tokens[0], tokens[5], tokens[11] = 4, 0, 9
    for sampler in DIFFUSION:
        (row,) = rows(Engine(model), [request(2, tokens, sampler, eta=0.05)])
        assert (row[0], row[5], row[11]) == (4, 0, 9)
        assert M not in row


def test_banned_tokens_and_phrases(model):
    free = rows(Engine(model), [request(s) for s in range(20)])
    often = Counter(itertools.chain(*free)).most_common(1)[0][0]
    pair = Counter(p for row in free for p in itertools.pairwise(row)).most_common(1)[0][0]
    banned = [[often], list(pair), [1, 2, 3]]
    for row in rows(Engine(model), [request(s, banned=banned) for s in range(20)]):
        assert often not in row
        assert pair not in set(itertools.pairwise(row))
        assert not any(row[i : i + 3] == [1, 2, 3] for i in range(L))
    only_pair = rows(Engine(model), [request(s, banned=[list(pair)]) for s in range(20)])
    assert any(p == pair for row in free for p in itertools.pairwise(row))
    assert all(p != pair for row in only_pair for p in itertools.pairwise(row))
    # rows that never held the phrase are the rows they would have been
    assert [a for a, b in zip(only_pair, free) if pair not in set(itertools.pairwise(b))] == [
        b for b in free if pair not in set(itertools.pairwise(b))
    ]


def test_a_banned_phrase_may_not_end_the_sequence():
    """Two positions: every phrase that comes out begins at the first and ends at the last."""
    toy, phrase = ToyModel(4, 2, seed=3), [0, 1]
    assert phrase in rows(Engine(toy), [request(s, [3, 3]) for s in range(60)])
    assert phrase not in rows(Engine(toy), [request(s, [3, 3], banned=[phrase]) for s in range(60)])


def test_a_required_word_is_judged_by_all_its_tokens(monkeypatch):
    """Its first token fits best at position 0, the whole word at position 1."""
    engine = Engine(ToyModel(4, 4), slots=1)
    log_p = np.full((4, 2), -50.0)
    log_p[0, 0], log_p[0, 1] = 0.0, 0.0
    log_p[1, 0], log_p[2, 1] = -1.0, 0.0
    monkeypatch.setattr(engine.evaluator, "word_log_probs", lambda tokens, words, t: log_p)
    for row in rows(engine, [request(s, [3] * 4, required=[[2, 1]], banned=[[2]]) for s in range(10)]):
        assert row[1:3] == [2, 1]


def test_required_words_appear(model):
    word = [7, 3, 7]
    tokens = [M, M, 5, M, M, M, M, M, 5, M, M, M]
    for row in rows(Engine(model), [request(s, tokens, required=[word, [1]]) for s in range(6)]):
        assert any(row[i : i + 3] == word for i in range(L))
        assert 1 in row
        assert row[2] == row[8] == 5


def holds(row: list[int], word: list[int]) -> bool:
    return any(row[i : i + len(word)] == word for i in range(len(row)))


def test_repairs_leave_required_words_alone(model):
    """Where a banned phrase ends in a required word, the token before it is drawn again."""
    banned, drawn_again = [[t, 7] for t in range(7)], 0
    for seed in range(20):
        (free,) = Engine(model).run([request(seed, required=[[7]])])
        (done,) = Engine(model).run([request(seed, required=[[7]], banned=banned)])
        assert done.finished and 7 in done.tokens
        assert not any(holds(done.tokens, phrase) for phrase in banned)
        drawn_again += free.tokens != done.tokens
    assert drawn_again > 0


@pytest.mark.parametrize("sampler", ["mdlm", "first-hitting", "remdm-cap", "confidence"])
def test_no_text_ends_before_its_required_words(model, sampler):
    stop, word = 9, [7, 3, 7]  # 9: what this model likes best
    options = {"sampler": sampler, "eta": 0.1, "required": [word, [1]], "stop_id": stop}
    done = list(Engine(model).run(request(s, **options) for s in range(30)))
    assert all(r.finished and M not in r.tokens and holds(r.tokens, word) and 1 in r.tokens for r in done)
    assert all(stop not in r.tokens[:-1] for r in done)
    assert sampler == "confidence" or any(len(r.tokens) < L for r in done), "but they end"


def test_a_required_end_of_text_ends_the_text(model):
    for done in Engine(model).run(request(s, required=[[7, 4], [1]], stop_id=4) for s in range(20)):
        assert done.finished and 1 in done.tokens and holds(done.tokens, [7, 4])


def test_required_words_stand_where_the_model_wants_them():
    """One required token in a row of two: placed by the model's probability of it at each position."""
    toy = ToyModel(4, 2, seed=3)
    p = [toy.p((3, 3))[l][1] for l in range(2)]
    n = 1500
    done = Engine(toy, slots=300).run(request(s, [3, 3], required=[[1]], banned=[]) for s in range(n))
    # the other position may come out as 1 too: then both places are possible
    other = [toy.p((1, 3))[1], toy.p((3, 1))[0]]
    expected = Counter()
    for place in range(2):
        for v in range(3):
            row = [v, v]
            row[place] = 1
            expected[tuple(row)] += p[place] / sum(p) * other[place][v]
    counts = Counter(tuple(r.tokens) for r in done)
    assert set(counts) <= set(expected)
    assert chi_square([counts[k] for k in expected], list(expected.values())) > LEVEL


def test_watched_rows_send_frames(model):
    engine = Engine(model, slots=2)
    updates = list(engine.stream(request(5, sampler="remdm-cap", steps=20, eta=0.2, watch=True)))
    frames, result = updates[:-1], updates[-1]
    assert isinstance(result, Result)
    assert all(isinstance(f, Frame) for f in frames)
    assert len(frames) == result.nfe - 1
    assert result.tokens == rows(Engine(model), [request(5, sampler="remdm-cap", steps=20, eta=0.2)])[0]
    visible = [sum(t != M for t in f.tokens) for f in frames]
    assert any(b < a for a, b in itertools.pairwise(visible)), "remasking is visible in the frames"
    for f in frames:
        assert all(f.tokens[l] != M for l in f.drawn)


def test_frames_say_what_was_drawn_in_strides_and_repairs(model):
    """The frame sent when a window closes is of that window, though it shows the next one's canvas."""
    engine, seen = Engine(model), [1] + [M] * 29
    for update in engine.stream(request(3, [1] + [M] * 29, steps=3, stride=5, banned=[[1, 2]], watch=True)):
        if isinstance(update, Frame):
            changed = {l for l, (a, b) in enumerate(zip(seen, update.tokens)) if a != b and b != M}
            assert changed <= set(update.drawn)
            seen = update.tokens + [M] * (30 - len(update.tokens))
            assert all(l < len(update.tokens) and seen[l] != M for l in update.drawn)


@pytest.mark.parametrize("sampler", ["confidence", "entropy", "anchor-first"])
def test_frames_do_not_show_rejected_guesses(model, sampler):
    frames = [u for u in Engine(model).stream(request(5, sampler=sampler, steps=4, threshold=0.9, watch=True))]
    shown = [{(l, t) for l, t in enumerate(f.tokens) if t != M} for f in frames]
    assert len(shown) > 1
    assert all(a < b for a, b in itertools.pairwise(shown)), "a shown token stays"


def test_cancel(model):
    engine = Engine(model, slots=1)
    first, second, third = (engine.submit(request(s, steps=40)) for s in range(3))
    engine.step()
    engine.cancel(first)
    engine.cancel(third)
    results = [u for u in engine.step() if isinstance(u, Result)]
    assert {r.id for r in results} == {first, third}
    assert not any(r.finished for r in results)
    assert M in results[0].tokens
    done = []
    while engine.busy:
        done += engine.step()
    assert [(u.id, u.finished) for u in done] == [(second, True)]
    engine.cancel(second)  # already gone
    assert engine.step() == []


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_iterators_that_are_read_in_turn_each_get_their_own(model, slots):
    """A run used to swallow the end of a stream that was begun before it, and who read on waited for ever."""
    alone = [list(Engine(model, slots=1).stream(request(seed, watch=True))) for seed in range(2)]
    ran = sorted(rows(Engine(model, slots=1), [request(seed) for seed in range(2, 5)]))
    engine = Engine(model, slots=slots)
    streams = [engine.stream(request(seed, watch=True)) for seed in range(2)]
    seen = [[next(stream)] for stream in streams]
    assert sorted(r.tokens for r in engine.run(request(seed) for seed in range(2, 5))) == ran
    given_up = engine.stream(request(9, watch=True))
    next(given_up)
    given_up.close()
    for _ in range(100):  # in turn, and not for ever
        for stream, updates in zip(streams, seen):
            updates += [u for u in [next(stream, None)] if u is not None]
    for updates, expected in zip(seen, alone):
        assert [(u.tokens, u.nfe) for u in updates] == [(u.tokens, u.nfe) for u in expected]
    assert not (engine.busy or engine.unread or engine.awaited)


def test_leaving_a_stream_cancels_the_row(model):
    engine = Engine(model, slots=1)
    stream = engine.stream(request(1, steps=40, watch=True))
    next(stream)
    stream.close()
    assert not engine.busy
    assert engine.step() == []


def test_leaving_a_run_drops_its_rows(model):
    """What is left of one caller's rows does not turn up among the next one's."""
    engine = Engine(model, slots=2)
    run = engine.run(request(s, steps=3 + 10 * s) for s in range(5))
    next(run)
    run.close()
    assert not engine.busy
    assert [r.seed for r in engine.run([request(9)])] == [9]


def test_end_of_text_cuts_and_stops_early(model):
    stop = 4
    for sampler in ("mdlm", "first-hitting", "remdm-cap", "confidence"):
        for seed in range(12):
            full = next(iter(Engine(model).run([request(seed, sampler=sampler, eta=0.1)])))
            cut = next(iter(Engine(model).run([request(seed, sampler=sampler, eta=0.1, stop_id=stop)])))
            end = full.tokens.index(stop) + 1 if stop in full.tokens else L
            assert cut.tokens == full.tokens[:end]
            assert cut.nfe <= full.nfe
    left_to_right = [Engine(model).run([request(s, sampler="autoregressive", stop_id=stop)]) for s in range(8)]
    results = [next(iter(r)) for r in left_to_right]
    assert any(r.nfe == len(r.tokens) < L for r in results), "stopped as soon as the text had ended"


def test_an_end_of_text_in_the_prompt_does_not_count(model):
    (row,) = rows(Engine(model), [request(1, [4, 4] + [M] * 10, stop_id=4)])
    assert len(row) > 2


def test_strides_go_beyond_the_models_length(model):
    (row,) = rows(Engine(model), [request(3, [1, 2] + [M] * 28, stride=5)])
    assert len(row) == 30
    assert M not in row
    assert row[:2] == [1, 2]
    # the first window is the row the model alone would give
    assert row[:L] == rows(Engine(model), [request(3, [1, 2] + [M] * 10)])[0]
    short = rows(Engine(model, slots=3), [request(s, [M] * n, stride=5) for s, n in ((1, 5), (2, 13), (3, 40))])
    assert [len(r) for r in short] == [5, 13, 40]


def test_stride_windows_condition_on_what_stands_before():
    """Toy of length 2, stride 1: a Markov chain whose transitions are the model's p(second | first)."""
    toy, n = ToyModel(3, 2, seed=2), 1500
    done = Engine(toy, slots=300).run(request(s, [0] + [2] * 3, steps=1, stride=1) for s in range(n))
    expected = {}
    for row in itertools.product(range(2), repeat=3):
        chain = (0, *row)
        expected[chain] = np.prod([toy.p((a, 2))[1][b] for a, b in itertools.pairwise(chain)])
    counts = Counter(tuple(r.tokens) for r in done)
    assert chi_square([counts[k] for k in expected], list(expected.values())) > LEVEL


def test_draws_in_pieces_are_the_same(model):
    requests = mixed(13)
    whole = rows(Engine(model), requests)
    engine = Engine(model)
    engine.evaluator.drawer.most = 2
    assert rows(engine, requests) == whole


class Padded(Graphs):
    """Static shapes without a GPU: the functions themselves, run twice as a capture does, and the shapes seen."""

    def __init__(self):
        super().__init__(on=False)
        self.on, self.shapes = True, {}

    def capture(self, function):
        seen = self.shapes.setdefault(function.__name__, set())

        def repeated(*args):
            seen.add(tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor)))
            function(*map(unwrap, args))
            return function(*map(unwrap, args))

        return repeated


def test_padding_to_static_shapes_changes_nothing(model, monkeypatch):
    requests = [request(s, sampler=n, eta=0.05) for s, n in enumerate(["mdlm", "remdm-cap", "remdm-conf"] * 6)]
    expected = rows(Engine(model, slots=5), requests)
    padded = Padded()
    monkeypatch.setattr("adlm.engine.evaluator.Graphs", lambda on: padded)
    engine = Engine(model, slots=5)
    assert rows(engine, requests) == expected
    masks, batches = ({shapes[i][-1] for shapes in padded.shapes["look"]} for i in (0, 1))
    assert batches <= {1, 2, 4, 8} and masks == {64}
    assert {shapes[0][-1] for shapes in padded.shapes["draw"]} <= {16, 64, 256}


def test_uploads_go_round_a_few_buffers(monkeypatch):
    """As on a GPU, with events that only say what was asked of them: no buffer is written before its last copy."""
    log: list[tuple[str, int]] = []

    class Copied:
        def __init__(self, i):
            self.synchronize = lambda: log.append(("waited for", i))
            self.record = lambda: log.append(("copied", i))

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    send, plain = Uploads(torch.device("cpu")), Uploads(torch.device("cpu"))
    send.copied = [Copied(i) for i in range(AHEAD)]
    for k in range(2 * AHEAD + 3):
        ints, floats = np.arange(2 * (k % 5 + 1)).reshape(2, -1) + k, np.linspace(0, k, 3)
        for ours, theirs, sent in zip(send(ints, floats), plain(ints, floats), (ints, floats)):
            assert torch.equal(ours, theirs) and np.array_equal(ours.numpy(), sent) and ours.dtype == theirs.dtype
        assert log[-2:] == [("waited for", k % AHEAD), ("copied", k % AHEAD)]
    assert len({b.data_ptr() for b in send.buffers}) == AHEAD


def test_the_kernel_draws_what_the_plain_draw_draws():
    """Interpreted on the CPU; tests/plumbing/test_gpu.py runs it for real."""
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    code = "from draw_cases import check_draws; [check_draws(V, 'cpu') for V in (7, 300, 1111)]"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_compilation_serves_all_blocks_and_numbers_of_rows(model, monkeypatch):
    """The second size makes the rows a variable: a third size is not compiled again."""
    network, compiled = Engine(model).evaluator, []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    plain = fold(model)
    network.model = fold(model)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compile_blocks(network.model)
    with torch.no_grad():
        for n in (8, 4, 3, 5):
            tokens = torch.randint(0, V, (n, L))
            torch.testing.assert_close(network.model(tokens).denoiser_BLD, plain(tokens).denoiser_BLD)
    assert len(compiled) == 6  # first block, other blocks and the end of a stack, each for one size and then for any


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


def test_bfloat16_is_a_copy_and_keeps_norms_and_times_in_float32():
    """Not run here: some CPUs lack the instructions. The GPU test below does."""
    timed = tiny_model(conditioning="sigma").requires_grad_(False)
    low = copy.deepcopy(timed)
    to_bfloat16(low)
    kinds = {name: p.dtype for name, p in low.named_parameters()}
    assert kinds["head.weight"] == kinds["denoiser.blocks.0.qkv.weight"] == torch.bfloat16
    assert {d for n, d in kinds.items() if "norm" in n or "time_embedding" in n or "modulation" in n} == {torch.float32}
    assert all(p.dtype == torch.float32 for p in timed.parameters())


@pytest.mark.parametrize("options", [{}, {"conditioning": "sigma"}, {"anchored": False}, {"bridge": "none"}])
def test_folding_constants_changes_nothing(options):
    """In float64, where rounding, which depends on the CPU in float32, is far below what a wrong fold would do."""
    model, g = tiny_model(dtype=torch.float64, **options).requires_grad_(False), torch.Generator().manual_seed(0)
    tokens, sigma = torch.randint(0, V, (3, L), generator=g), torch.rand(3, generator=g, dtype=torch.float64)
    before = model(tokens, sigma)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    folded = fold(model)
    pad_heads(folded)
    after = folded(tokens, sigma)
    torch.testing.assert_close(after.denoiser_BLD, before.denoiser_BLD)
    torch.testing.assert_close(folded.head(after.denoiser_BLD), model.head(before.denoiser_BLD))
    if model.anchor_head is not None:
        torch.testing.assert_close(folded.anchor_head(after.anchor_BLD), model.anchor_head(before.anchor_BLD))
    assert folded.head.weight.shape[0] % 128 == 0
    to_bfloat16(folded)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters()), "the original is left alone"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(model):
    """float32 eager on the GPU gives the rows of the CPU; compiled bf16 with graphs does not depend on the order."""
    requests = mixed(26)
    expected = rows(Engine(model, slots=16), requests)
    assert (
        rows(Engine(copy.deepcopy(model), slots=16, device="cuda", precision="fp32", compile="false"), requests)
        == expected
    )
    fast = Engine(copy.deepcopy(model), slots=16, device="cuda")
    assert all(M not in row for row in rows(fast, requests))
    assert rows(fast, requests) == rows(fast, requests[::-1])[::-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_the_gpu_do_not_wait_for_it(model):
    """Once shapes are captured, a step that ends no row reads nothing back."""
    engine = Engine(copy.deepcopy(model), slots=4, device="cuda")
    engine.evaluator.warm_up()
    for seed in range(4):
        engine.submit(request(seed, sampler="remdm-cap", steps=500, eta=0.05, top_p=0.9))
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(slot is not None for slot in engine.slots)


def test_a_model_in_training_is_not_frozen():
    trained = tiny_model()
    rows(Engine(trained), [request(1)])
    assert type(trained.bridge) is LinearBridge
    assert all(p.requires_grad for p in trained.parameters())


def test_templates():
    encode = lambda text: [ord(c) for c in text]  # noqa: E731
    a = [ord("a")]
    assert parse_template("a [MASK:2]a", encode, -1) == [*a, -1, -1, *a]
    assert parse_template("[MASK] a[MASK]", encode, -1) == [-1, ord(" "), *a, -1]
    assert parse_template("[masked] [MASK]", encode, -1, [7]) == [7, *map(ord, "[masked]"), -1]
    for bad in ("no hole", "[masked]", ""):
        with pytest.raises(ValueError, match="needs at least one hole"):
            parse_template(bad, encode, -1)
    for bad in ("[MASK:x]", "[MASK:-3]", "[MASK: 2]", "[MASK:2.5]", "[mask:2]", "[mask]", "[MASK2]", "[MASK:2"):
        with pytest.raises(ValueError, match=re.escape(f"{bad!r} is no hole")):
            parse_template("a [MASK] b " + bad, encode, -1)
    for bad in ("[MASK:999999999999999]", "[MASK]" * 13, "[MASK]" + "a" * 11):
        with pytest.raises(ValueError, match=r"the template has \d+ tokens, allowed are 12 \(the model's length\)"):
            parse_template(bad, encode, -1, [7], Limit(12))
    with pytest.raises(ValueError, match="hole of no tokens"):
        parse_template("a [MASK:0]", encode, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1, 2, 3]}, "no holes"),
        ({"tokens": [M] * 13}, r"13 positions is longer than 12 \(model.length\); set sampling.stride"),
        ({"tokens": [M, 11]}, r"token 11, outside the vocabulary 0\.\.10"),
        ({"seed": None}, "sampling.seed must be an integer"),
        ({"seed": -1}, "sampling.seed"),
        ({"stride": 12}, "sampling.stride"),
        ({"sampler": "mldm"}, "did you mean 'mdlm'"),
        ({"sampler": "remdm-loop", "t_on": 0.2, "t_off": 0.6}, "t_off=0.6 must lie below"),
        ({"banned": [[v] for v in range(10)]}, "banned words leave no token"),
        ({"banned": [[]]}, "a banned word has no tokens"),
        ({"required": [[1] * 13]}, "does not fit into 12 holes"),
        ({"required": [[M]]}, "required word holds the mask"),
    ],
)
def test_bad_requests_are_answered(model, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model).submit(request(**({"seed": 0} | changes)))


def test_what_a_model_cannot_do_is_answered(model):
    with pytest.raises(ValueError, match=r"sampling\.batch_size"):
        Engine(model, slots=0)
    with pytest.raises(ValueError, match="anchor network"):
        Engine(tiny_model(anchored=False)).submit(request(sampler="anchor-first"))
    with pytest.raises(ValueError, match="precision"):
        Engine(model, precision="fp8")


def test_required_words_that_do_not_fit_end_the_row_not_the_engine(model):
    engine = Engine(model)
    id = engine.submit(request(tokens=[M, 1, M, 1, M], required=[[2, 3]]))
    other = engine.submit(request(1))
    updates = []
    while engine.busy:
        updates += engine.step()
    results = {u.id: u for u in updates if isinstance(u, Result)}
    assert not results[id].finished
    assert "does not fit" in results[id].problem
    assert results[other].finished

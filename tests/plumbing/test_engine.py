"""The engine as its callers see it: seeds, batches, conditions, streams, and bad requests."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from chance import LEVEL, chi_square
from engine_requests import DIFFUSION, L, M, mixed, request, rows
from tiny import tiny_model
from toy import ToyModel

from adlm.engine import Engine, Frame, Result
from adlm.engine.request import Limit, parse_template
from adlm.models.bridge import LinearBridge


@pytest.fixture(scope="module")
def model():
    return tiny_model().requires_grad_(False)


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

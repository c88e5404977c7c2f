"""Words that a row may not or must hold: banned, required, repaired, and placed where the model wants them."""

import itertools
from collections import Counter

import numpy as np
import pytest
from chance import LEVEL, chi_square
from engine_requests import L, M, request, rows
from tiny import tiny_model
from toy import ToyModel

from adlm.engine import Engine, Result


@pytest.fixture(scope="module")
def model():
    return tiny_model().requires_grad_(False)


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

"""A text that is drafted and checked is the one that the same weights write left to right, whatever was drafted."""

import itertools

import pytest
import torch
from block_requests import KINDS, L, M, blocks_model, drafted, left_to_right, tokens

from adlm.engine import Engine, Result
from adlm.engine import blocks as engine_blocks


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if options.get("shift")])
@pytest.mark.parametrize("fused", [0, 512])
def test_drafts_change_nothing_but_the_number_of_evaluations(kind, fused, monkeypatch):
    """Whatever is drafted, the text is the one that the same weights write left to right, in no more evaluations; with
    filters, ends of text and banned words and phrases. Few slots: texts with and without a draft share calls."""
    monkeypatch.setattr(engine_blocks, "FUSED", fused)
    model, extras = blocks_model(kind, scale=0.3), [{}, {"top_p": 0.8}, {"temperature": 0}, {"stop_id": 7}]
    extras += [{"temperature": 1.5, "top_k": 4}, {"banned": [[7], [3, 4]]}, {"stop_id": 3, "temperature": 0.7}]
    requests = [
        drafted(seed, K, tuple(range(1, 2 + seed % 5)), **extra)
        for seed, (K, extra) in enumerate(itertools.product((3, 4, 5), extras))
    ]
    expected = tokens(Engine(model, slots=4), list(map(left_to_right, requests)))
    assert tokens(Engine(model, slots=4), requests) == expected
    assert tokens(Engine(model, slots=3), requests[::-1])[::-1] == expected
    for result in Engine(model, slots=4).run(requests):
        new = len(result.tokens) - (1 + result.seed % 5)
        assert result.nfe <= new


def test_drafts_that_hold_are_kept():
    """Predictions that depend on nothing are the same in draft and check, which draw with the same noise: the first
    evaluation gives one token and a draft, every other one K tokens."""
    model = blocks_model()
    torch.nn.init.zeros_(model.head.weight)
    for K, nfe in ((3, 5), (4, 4), (5, 3)):  # of 11 tokens
        (result,) = Engine(model).run([drafted(0, K)])
        assert result.nfe == nfe
        assert result.tokens == tokens(Engine(model), [left_to_right(drafted(0, K))])[0]


def test_a_draft_that_is_taken_for_read_is_found(monkeypatch):
    """The law can fail: keys of tokens that were not kept."""
    model = blocks_model()
    requests = [drafted(seed) for seed in range(8)]
    expected = tokens(Engine(model), list(map(left_to_right, requests)))
    unread = engine_blocks.Held.unread
    monkeypatch.setattr(engine_blocks.Held, "unread", lambda self, position: unread(self, position + 1))
    assert tokens(Engine(model), requests) != expected


def test_who_continues_a_drafted_text_finds_it_read_as_it_is():
    """Also a text that ended inside a draft, or was given up between draft and check."""
    model = blocks_model(scale=0.3)
    for seed, stop in itertools.product(range(6), (None, 3, 7)):
        engine = Engine(model, slots=1)
        id = engine.submit(drafted(seed, 5, stop_id=stop))
        text = None
        for _ in range(1 + seed):
            text = next((u.tokens for u in engine.step() if isinstance(u, Result)), text)
        if text is None:
            engine.cancel(id)
            (text,) = (u.tokens for u in engine.step() if isinstance(u, Result))
        known = text[: text.index(M)] if M in text else text
        if len(known) < L:
            more = drafted(9, 5, tuple(known))
            assert tokens(engine, [more]) == tokens(Engine(model), [left_to_right(more)])


def test_frames_of_drafts_say_what_stays():
    *frames, result = Engine(blocks_model(scale=0.3)).stream(drafted(3, watch=True))
    for before, frame in itertools.pairwise(frames):
        assert before.settled <= frame.settled and M not in frame.tokens[: frame.settled]
        assert frame.tokens[: frame.settled] == result.tokens[: frame.settled]
    assert any(t != M for frame in frames for t in frame.tokens[frame.settled :]), "a draft is shown"


@pytest.mark.parametrize("options", [{"shift": False}, {"block_length": "4,12"}, {"block_length": "1,12"}])
def test_models_that_cannot_check_drafts_say_so(options):
    with pytest.raises(ValueError, match=r"'speculative' needs a model with model\.shift=true that was trained"):
        Engine(blocks_model(**options)).submit(drafted(0, 0))

"""Layouts, label by label: every method at every stage, on hand-written examples and on the paper's two."""

import pytest

from adlm.data.tokenizers import load_tokenizer
from adlm.reasoning import logic
from adlm.reasoning.methods import (
    ALL,
    IGNORE,
    Encoded,
    Example,
    Markers,
    StagePlan,
    add_markers,
    encode,
    laid_out_length,
    lay_out,
    markers_of,
    plans_of,
    whole_text,
    written_length,
)
from adlm.reasoning.networks import word_tokenizer
from adlm.reasoning.tasks import PRONTOQA, PROSQA, generate, read_gsm8k
from adlm.schema import ReasonConfig
from adlm.tables import METHODS

_ = IGNORE
B, A, E = MARKERS = Markers(90, 91, 92)
# question 1 2; steps 10 11 | 20 | 30 31; answer 40 and the end 0; anchors 10, 11, (20 21), 30
TOY = Encoded([1, 2], [[10, 11], [20], [30, 31]], [40, 0], [[10], [11], [20, 21], [30]])


def config(method, **options):
    return ReasonConfig(**{"method": method, "slots": 2, "epochs_per_stage": 1, **options})


def layouts(method, **options):
    anchor_tokens = options.get("anchor_tokens", "first")
    return [lay_out(TOY, plan, MARKERS, anchor_tokens) for plan in plans_of(config(method, **options))]


def check(layout, tokens, targets, anchors, slots, prompt):
    assert layout.tokens == tokens
    assert layout.targets == targets
    assert layout.anchors == anchors
    assert list(layout.slots) == slots
    assert layout.prompt == prompt
    assert len(layout.tokens) == len(layout.targets) == len(layout.anchors)


def plain(tokens, prompt):
    """A layout without slots: targets are the next tokens from the last given position on."""
    return (tokens, [_] * (prompt - 1) + tokens[prompt:] + [_], [_] * len(tokens), [], prompt)


def test_cot():
    (layout,) = layouts("cot")
    check(layout, [1, 2, 10, 11, 20, 30, 31, 40, 0], [_, 10, 11, 20, 30, 31, 40, 0, _], [_] * 9, [], 2)


def test_no_cot():
    (layout,) = layouts("no-cot")
    check(layout, [1, 2, 40, 0], [_, 40, 0, _], [_] * 4, [], 2)


def test_pause():
    (layout,) = layouts("pause")
    check(layout, [1, 2, B, A, A, E, 40, 0], [_, _, _, _, _, 40, 0, _], [_] * 8, [3, 4], 6)
    assert plans_of(config("pause")) == [StagePlan(slots=2, removed=ALL)]


def test_acot_keeps_the_trace():
    zero, one, two = layouts("acot-kept")
    assert layouts("acot", task="gsm8k") == layouts("acot", task="prontoqa") == [zero, one, two]
    check(zero, *plain([1, 2, 10, 11, 20, 30, 31, 40, 0], 2))
    check(
        one,
        [1, 2, B, A, E, 10, 11, 20, 30, 31, 40, 0],
        [_, _, _, _, 10, 11, 20, 30, 31, 40, 0, _],
        [_, _, _, 10, _, _, _, _, _, _, _, _],
        [3],
        5,
    )
    check(
        two,
        [1, 2, B, A, A, E, 10, 11, 20, 30, 31, 40, 0],
        [_, _, _, _, _, 10, 11, 20, 30, 31, 40, 0, _],
        [_, _, _, 10, 11, _, _, _, _, _, _, _, _],
        [3, 4],
        6,
    )


def test_acot_removes_steps():
    zero, one, two, last = layouts("acot", task="prosqa-2hop")
    check(zero, *plain([1, 2, 10, 11, 20, 30, 31, 40, 0], 2))
    check(
        one,
        [1, 2, B, A, E, 20, 30, 31, 40, 0],
        [_, _, _, _, 20, 30, 31, 40, 0, _],
        [_, _, _, 10, _, _, _, _, _, _],
        [3],
        5,
    )
    check(
        two,
        [1, 2, B, A, A, E, 30, 31, 40, 0],
        [_, _, _, _, _, 30, 31, 40, 0, _],
        [_, _, _, 10, 11, _, _, _, _, _],
        [3, 4],
        6,
    )
    check(last, [1, 2, B, A, A, E, 40, 0], [_, _, _, _, _, 40, 0, _], [_, _, _, 10, 11, _, _, _], [3, 4], 6)


def test_extra_slots_have_no_label():
    *_rest, last = layouts("acot", slots=6)
    assert last.anchors[3:9] == [10, 11, 20, 30, _, _]
    assert set(last.anchors[:3] + last.anchors[9:]) == {_}


def test_anchor_of_several_tokens():
    assert layouts("acot", slots=4)[-1].anchors[3:7] == [10, 11, 20, 30]
    assert layouts("acot", slots=4, anchor_tokens="all")[-1].anchors[3:7] == [10, 11, 20, 21]
    assert layouts("acot", slots=6, anchor_tokens="all")[-1].anchors[3:9] == [10, 11, 20, 21, 30, _]


def test_icot():
    zero, one, two, last = layouts("icot")
    check(zero, *plain([1, 2, 10, 11, 20, 30, 31, 40, 0], 2))
    check(one, *plain([1, 2, 20, 30, 31, 40, 0], 2))
    check(two, *plain([1, 2, 30, 31, 40, 0], 2))
    check(last, *plain([1, 2, 40, 0], 2))


@pytest.mark.parametrize(("method", "fed_back"), [("coconut", True), ("coconut-pause", False)])
def test_coconut(method, fed_back):
    zero, one, two, last = layouts(method)
    check(zero, *plain([1, 2, 10, 11, 20, 30, 31, 40, 0], 2))
    check(one, [1, 2, B, A, E, 20, 30, 31, 40, 0], [_, _, _, _, 20, 30, 31, 40, 0, _], [_] * 10, [3], 5)
    check(two, [1, 2, B, A, A, E, 30, 31, 40, 0], [_, _, _, _, _, 30, 31, 40, 0, _], [_] * 10, [3, 4], 6)
    check(last, [1, 2, B, A, A, E, 40, 0], [_, _, _, _, _, 40, 0, _], [_] * 8, [3, 4], 6)
    plans = plans_of(config(method))
    assert [plan.fed_back for plan in plans] == [False, fed_back, fed_back, fed_back]


def test_several_slots_a_stage():
    """Coconut on GSM8K: two thoughts a stage, three stages, then nothing left of the trace."""
    plans = plans_of(config("coconut-double", slots=6))
    assert [(p.slots, p.removed) for p in plans] == [(0, 0), (2, 1), (4, 2), (6, 3), (6, ALL)]
    plans = plans_of(config("acot-triple", slots=6))
    assert [(p.slots, p.removed, p.anchored) for p in plans[1:]] == [(3, 1, True), (6, 2, True), (6, ALL, True)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_the_answer_and_nothing_given_is_learned(method):
    for layout in layouts(method, slots=6):
        written = [t for t in layout.targets if t != _]
        assert layout.tokens[layout.prompt :] == written
        assert written[-2:] == [40, 0]
        assert all(layout.tokens[i + 1] == t for i, t in enumerate(layout.targets) if t != _)
        assert [i for i, token in enumerate(layout.tokens) if token == A] == list(layout.slots)
    for plan, layout in zip(plans_of(config(method, slots=6)), layouts(method, slots=6)):
        assert laid_out_length(TOY, plan) == len(layout.tokens)
        assert written_length(TOY, plan) == len(layout.tokens) - layout.prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "acott"}, "did you mean 'acot'"),
        ({"method": "acot-triple", "slots": 5}, "multiple of 3, the slots that a stage of reason.method=acot-triple"),
        ({"method": "acot", "slots": 0}, r"reason\.slots=0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plans_of(ReasonConfig(**options))


# ---- the paper's examples, with GPT-2's tokens


@pytest.fixture(scope="module")
def gpt2(assets):
    return add_markers(load_tokenizer("gpt2", root=assets))


def shown(tokenizer, layout):
    """What the slots are trained to say."""
    return [tokenizer.token(layout.anchors[i]) if layout.anchors[i] != _ else None for i in layout.slots]


def test_janets_ducks(assets, gpt2):
    """GSM8K, question 1 of the test set: two [ANT], labelled 16 and 3; the trace is kept."""
    example = read_gsm8k(assets / "data/gsm8k/test.jsonl")[0]
    cfg = ReasonConfig(task="gsm8k", method="acot", slots=2)
    (encoded,) = encode([example], gpt2)
    layout = lay_out(encoded, plans_of(cfg)[-1], markers_of(gpt2))
    assert shown(gpt2, layout) == ["16", "3"]
    text = gpt2.decode(layout.tokens)
    assert text.endswith("market?\n[BOA][ANT][ANT][EOA]<<16-3-4=9>>\n<<9*2=18>>\n### 18<|endoftext|>")
    learned = [gpt2.token(t) for t in layout.targets if t != _]
    assert "".join(learned) == "<<16-3-4=9>>\n<<9*2=18>>\n### 18<|endoftext|>"


def test_tom_is_a_lempus(assets, gpt2):
    """ProsQA, question 1: six [ANT], labelled Tom, terpus, brimpus, lempus and two without label; no trace is left."""
    example = logic.read(assets / "data/prosqa/prosqa_valid.json")[0]
    cfg = ReasonConfig(task="prosqa", method="acot", slots=6)
    (encoded,) = encode([example], gpt2)
    layout = lay_out(encoded, plans_of(cfg)[-1], markers_of(gpt2))
    assert [gpt2.decode(a).strip() for a in encoded.anchors] == ["Tom", "terpus", "brimpus", "lempus"]
    assert shown(gpt2, layout) == ["Tom", *(gpt2.token(a[0]) for a in encoded.anchors[1:]), None, None]
    tail = "[BOA][ANT][ANT][ANT][ANT][ANT][ANT][EOA]### Tom is a lempus.<|endoftext|>"
    assert gpt2.decode(layout.tokens).endswith("scrompus?\n" + tail)
    every = lay_out(encoded, plans_of(cfg)[-1], markers_of(gpt2), "all")
    pieces = [token for anchor in encoded.anchors for token in anchor]
    assert [every.anchors[i] for i in every.slots] == pieces[:6]


def test_tokens_per_answer_are_the_papers(assets, gpt2):
    """No-CoT on ProsQA writes 8.2 tokens in the paper: the text format is the same."""
    examples = logic.read(assets / "data/prosqa/prosqa_test.json")
    lengths = [len(e.answer) - 1 for e in encode(examples, gpt2)]
    assert round(sum(lengths) / len(lengths), 1) == 8.2


def test_parts_are_tokenised_as_the_whole_is(assets, gpt2):
    examples = [
        *logic.read(assets / "data/prosqa/prosqa_test.json")[:50],
        *logic.read(assets / "data/prontoqa/prontoqa_test.json")[:50],
        *read_gsm8k(assets / "data/gsm8k/test.jsonl")[:200],
    ]
    own = add_markers(load_tokenizer("bpe-600", map(whole_text, examples)))
    for tokenizer in (gpt2, own):
        for example, encoded in zip(examples, encode(examples, tokenizer)):
            parts = [*encoded.question, *(t for step in encoded.steps for t in step), *encoded.answer]
            assert parts == [*tokenizer.encode(whole_text(example)), tokenizer.eos_id]


def test_anchor_labels_stand_in_the_trace(gpt2):
    """The label of a slot is a token the trace would have there: the same piece of text, cut the same way."""
    for example in (*generate(PROSQA, 20, 1), *generate(PRONTOQA, 20, 1)):
        (encoded,) = encode([example], gpt2)
        trace = [t for step in encoded.steps for t in step]
        for anchor in encoded.anchors:
            assert any(trace[i : i + len(anchor)] == anchor for i in range(len(trace)))


def test_a_word_is_one_token_wherever_it_stands():
    """The vocabulary of a network from scratch: a name at the start of a question, inside it, in a step, as anchor."""
    examples = generate(PROSQA, 200, 1)
    tokenizer = word_tokenizer(examples)
    for example, encoded in zip(examples, encode(examples, tokenizer)):
        words = {*map(str.strip, example.anchors)}
        parts = [encoded.question, *encoded.steps, encoded.answer]
        used = {tokenizer.token(t) for part in parts for t in part}
        assert {f" {word}" for word in words} <= used
        assert not words & used
        assert [len(anchor) for anchor in encoded.anchors] == [1] * len(example.anchors)
        texts = [tokenizer.decode(part, skip_special=True).strip() for part in parts]
        assert texts == [example.question, *example.steps, f"### {example.answer}"]


def test_markers_do_not_come_from_text(gpt2):
    markers = markers_of(gpt2)
    assert len({*markers, gpt2.mask_id, gpt2.eos_id}) == 5
    assert max(markers) == gpt2.vocab_size - 1
    example = Example("[ANT]", ("[BOA]",), "[EOA]", ())
    (encoded,) = encode([example], gpt2)
    assert not set(markers) & {*encoded.question, *encoded.steps[0], *encoded.answer}
    with pytest.raises(ValueError, match="reasoning run"):
        markers_of(load_tokenizer("bytes"))

"""Text as it settles: pieces add up to the whole, stops are cut at the right place, tokens begin where they begin."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import load_tiny

# Built once and not by a fixture: hypothesis calls its test many times.
with tempfile.TemporaryDirectory() as folder:
    TINY_LM = load_tiny(Path(folder) / "tiny")
# Bytes, often those of characters of several bytes, and ends of text
ANY_TOKEN = st.one_of(st.integers(0, 255), st.sampled_from("\u20ac\u00e9\U0001f642".encode()), st.just(257))


@pytest.mark.parametrize(
    ("drawn", "cut", "offsets"),
    [
        ("ab", None, [0, 1]),
        ("a\u20acb\U0001f642c", None, [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]),
        ("a\u20acb\U0001f642c", "a\u20ac", [0, 1, 1, 1]),
        (b"a\xe2b\xffc", None, [0, 1, 2, 3, 4]),  # bytes that are no character at all
        ("\U0001f642", "", []),
    ],
)
def test_tokens_of_one_character_begin_where_it_begins(drawn, cut, offsets):
    from adlm.serving.openai import CompletionText

    tokens = list(drawn if isinstance(drawn, bytes) else drawn.encode())
    row, mask = [256, 97, *tokens], TINY_LM.tokenizer.mask_id
    request = dataclasses.replace(TINY_LM.request(length=4, stop=False), tokens=[256, 97, *[mask] * len(tokens)])
    completion = CompletionText(TINY_LM, request, [])
    text = completion.grow(row, final=True).text if cut is None else cut
    assert completion.offsets(row, text) == offsets


@given(
    tokens=st.lists(ANY_TOKEN, min_size=1, max_size=24),
    stops=st.lists(st.text("ab\u20ac\ufffd", min_size=1, max_size=3), max_size=3),
    cut=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_text_that_settles_bit_by_bit_adds_up_to_the_whole(tokens, stops, cut, data):
    """Half characters, stops across pieces, ends of text: in whatever order positions are filled."""
    from adlm.serving.openai import CompletionText

    mask, row = TINY_LM.tokenizer.mask_id, [256, 97, *tokens]
    request = dataclasses.replace(TINY_LM.request(length=4, stop=cut), tokens=[256, 97, *[mask] * len(tokens)])
    whole = CompletionText(TINY_LM, request, stops).grow(row, final=True)
    assert whole.reason is not None
    growing, told, canvas = CompletionText(TINY_LM, request, stops), "", list(request.tokens)
    for position in data.draw(st.permutations(range(2, len(row)))):
        canvas[position] = row[position]
        part = growing.grow(canvas, final=False)
        told += part.text
        if part.reason is not None:
            break
    else:
        part = growing.grow(row, final=True)
        told += part.text
    assert (told, part.reason) == whole


@pytest.mark.parametrize(
    ("text", "stops"), [("xab\u20acy", ["ab\u20ac", "b"]), ("xaby", ["ab\u20ac", "b"]), ("\u00c2", ["\ufffd"])]
)
def test_a_stop_is_not_taken_before_an_earlier_one_is_ruled_out(text, stops):
    from adlm.serving.openai import CompletionText

    tokens = list(text.encode())
    row, mask = [256, 97, *tokens], TINY_LM.tokenizer.mask_id
    request = dataclasses.replace(TINY_LM.request(length=4, stop=False), tokens=[256, 97, *[mask] * len(tokens)])
    whole = CompletionText(TINY_LM, request, stops).grow(row, final=True)
    growing, told = CompletionText(TINY_LM, request, stops), ""
    for n in range(1, len(tokens) + 1):
        part = growing.grow([*row[: 2 + n], *[mask] * (len(tokens) - n)], final=n == len(tokens))
        told += part.text
        if part.reason is not None:
            break
    assert (told, part.reason) == whole

"""Texts of tokens: bytes become characters before anybody sees them."""

import itertools

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from adlm.constrain.automaton import token_bytes
from adlm.data.tokenizers import Tokenizer, raw_bytes, train_bpe
from adlm.serving.answers import characters

TEXT = "Zürich: 東京 is 日本, 😀 e\u0301 — naïve"


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_any_text_joins_to_the_text_and_shows_no_broken_character(seed):
    import random

    data, draw = TEXT.encode(), random.Random(seed)
    cuts = sorted(draw.sample(range(len(data) + 1), 12))
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    assert "".join(text or "" for text in characters(pieces)) == TEXT
    holes = [None if draw.random() < 0.4 else piece for piece in pieces]
    shown = characters([*holes, b"."])
    assert [text is None for text in shown[:-1]] == [piece is None for piece in holes]
    assert "\ufffd" not in "".join(text or "" for text in shown)


def test_what_can_never_be_a_character_is_said_so():
    assert characters([b"a", b"\xe6", b"b"]) == ["a", "", "\ufffdb"]
    assert characters([b"a\xe6"]) == ["a\ufffd"], "nothing follows"
    assert characters([b"a\xe6", None]) == ["a", None] and characters([None, b"\x9d\xb1", b"\xac!"]) == [None, "", "!"]
    assert characters([b"\x9d"]) == ["\ufffd"], "nothing was before"


@pytest.mark.parametrize("tokenizer", [raw_bytes(), train_bpe([TEXT] * 3, 300)], ids=["bytes", "bpe"])
def test_bytes_of_tokens_are_those_of_the_text(tokenizer):
    spelled = token_bytes(tokenizer)
    assert b"".join(spelled[i] for i in tokenizer.encode(TEXT)) == TEXT.encode()


def test_tokens_that_are_written_with_spaces_between_them_are_no_pieces_of_text():
    """A vocabulary without a decoder: its library joins words by spaces, which no token holds."""
    backend = Backend(models.WordLevel({"[EOS]": 0, "a": 1, "b": 2}, unk_token="[EOS]"))
    words = Tokenizer(backend, "words")
    assert words.decode([1, 2]) == "a b"
    with pytest.raises(ValueError, match="pieces of text; 'words' joins them by spaces"):
        token_bytes(words)

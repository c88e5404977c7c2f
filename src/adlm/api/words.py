"""Words as tokens: what must not appear, and what must."""

from collections.abc import Iterable, Sequence

from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.rules import accept


def banned_and_required(
    tokenizer: Tokenizer, banned: Sequence[str], required: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Banned and required words as token sequences; a required one must not hold a banned one."""
    for key, words in (("sampling.banned", banned), ("sampling.required", required)):
        listed = isinstance(words, Iterable) and not isinstance(words, (str, bytes))
        require(listed, f"{key} must be a list of texts, got {words!r:.60}")
    avoided = [
        (word, v) for word in banned for v in variants(tokenizer, accept("a word of sampling.banned", word, str))
    ]
    placed = [(word, variants(tokenizer, accept("a word of sampling.required", word, str))[-1]) for word in required]
    for word, tokens in placed:
        for bad, part in avoided:
            held = any(tokens[at : at + len(part)] == part for at in range(len(tokens)))
            inside = "" if bad == word else f" ({word!r} holds it)"
            require(not held, f"sampling.required and sampling.banned both name {bad!r}{inside}")
    return [v for _, v in avoided], [v for _, v in placed]


def variants(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """A word as tokens, at the start of a text and after a space (the same in some vocabularies)."""
    require(bool(word.strip()), "a banned or required word is empty")
    found = []
    for text in (word, " " + word):
        tokens = tokenizer.encode(text)
        require(bool(tokens), f"the word {word!r} has no tokens in this vocabulary")
        unknown = tokenizer.decode(tokens).strip().lower() != word.strip().lower()
        require(not unknown, f"the word {word!r} is unknown to this vocabulary: it reads {tokenizer.decode(tokens)!r}")
        if tokens not in found:
            found.append(tokens)
    return found

"""Texts that must match a JSON schema, a regular expression or a list of choices; words that must or must not appear.

json_schema.py  a schema as a regular expression
automaton.py    a regular expression, its pieces, and its automaton over tokens
matching.py     forward-backward: a step's draw, given that the finished text matches
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from adlm.constrain.automaton import TokenAutomaton, byte_automaton, lift, literal, token_bytes
from adlm.constrain.json_schema import schema_of, schema_regex
from adlm.constrain.matching import Constraint
from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.rules import accept

# ---- words -----------------------------------------------------------------------------------------------------------
# Words that must or must not appear, as tokens.


def listed(key: str, texts: Iterable[str]) -> list[str]:
    """Texts given in Python as a list; an iterator, which can be read only once, is accepted, too."""
    fits = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes))
    require(fits, f"{key} must be a list of texts, got {texts!r:.60}")
    return [accept(f"a text of {key}", text, str) for text in texts]


def banned_and_required(
    tokenizer: Tokenizer, banned: Sequence[str], required: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Banned and required words as token sequences; a required word must not contain a banned one."""
    avoided = [(word, v) for word in listed("sampling.banned", banned) for v in variants(tokenizer, word)]
    placed = [(word, variants(tokenizer, word)[-1]) for word in listed("sampling.required", required)]
    for word, tokens in placed:
        for bad, part in avoided:
            held = any(tokens[at : at + len(part)] == part for at in range(len(tokens)))
            inside = "" if bad == word else f" ({word!r} holds it)"
            require(not held, f"sampling.required and sampling.banned both name {bad!r}{inside}")
    return [v for _, v in avoided], [v for _, v in placed]


def variants(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """A word as tokens, at the start of a text and after a space (identical in some vocabularies)."""
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


# ---- constraints -----------------------------------------------------------------------------------------------------

__all__ = ["Constraint", "make_constraint"]


def make_constraint(
    tokenizer: Tokenizer, vocab_size: int, regex: str = "", choices: Sequence[str] = (), response_format: Any = ""
) -> Constraint | None:
    """The requested constraint, at most one of three; None if there is none. The first use of a constraint takes a
    moment to build its automaton; the last few automata are cached."""
    texts = [] if choices is None else listed("sampling.choices", choices)
    given = {"regex": regex, "choices": texts, "response_format": response_format}
    named = [name for name, value in given.items() if value not in ("", [], None)]
    require(len(named) <= 1, f"give only one of {' and '.join(f'sampling.{name}' for name in named)}")
    if not named:
        return None
    if regex:
        whole = accept("sampling.regex", regex, str).removeprefix("^")
        whole = whole.removesuffix("$") if not whole.endswith("\\$") else whole
    elif response_format not in ("", None):
        schema = schema_of(response_format)
        if schema is None:
            return None
        whole = schema_regex(schema)
    else:
        require(all(texts), "sampling.choices holds an empty text")
        whole = "|".join(map(literal, texts))
    return Constraint(token_automaton(tokenizer, vocab_size, whole), f"sampling.{named[0]}")


@functools.lru_cache(maxsize=32)
def token_automaton(tokenizer: Tokenizer, vocab_size: int, regex: str) -> TokenAutomaton:
    spelled = vocabulary(tokenizer)
    return lift(byte_automaton(regex), [*spelled, *[b""] * (vocab_size - len(spelled))], tokenizer.eos_id)


vocabulary = functools.lru_cache(maxsize=4)(token_bytes)

"""Texts that must match: a JSON schema, a regular expression or a list of choices.

json_schema.py  a schema as a regular expression
patterns.py     the pieces it is made of: numbers between bounds, patterns inside of quotes
automaton.py    a regular expression as an automaton over tokens
matching.py     forward-backward: a step's draw, given that the finished text matches
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from adlm.constrain.automaton import TokenAutomaton, byte_automaton, lift, token_bytes
from adlm.constrain.json_schema import schema_of, schema_regex
from adlm.constrain.matching import Constraint
from adlm.constrain.patterns import literal
from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.rules import accept

__all__ = ["Constraint", "make_constraint"]


def make_constraint(
    tokenizer: Tokenizer, vocab_size: int, regex: str = "", choices: Sequence[str] = (), response_format: Any = ""
) -> Constraint | None:
    """The constraint that is asked for, at most one of three; None if none is. The first use of one takes a moment, as
    its automaton is made; the last few are kept."""
    given = {"regex": regex, "choices": choices, "response_format": response_format}
    named = [name for name, value in given.items() if value not in ("", (), [], None)]
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
        listed = isinstance(choices, Iterable) and not isinstance(choices, (str, bytes))
        require(listed, f"sampling.choices must be a list of texts, got {choices!r:.60}")
        texts = [accept("a text of sampling.choices", text, str) for text in choices]
        require(all(texts), "sampling.choices holds an empty text")
        whole = "|".join(map(literal, texts))
    return Constraint(token_automaton(tokenizer, vocab_size, whole), f"sampling.{named[0]}")


@functools.lru_cache(maxsize=32)
def token_automaton(tokenizer: Tokenizer, vocab_size: int, regex: str) -> TokenAutomaton:
    spelled = vocabulary(tokenizer)
    return lift(byte_automaton(regex), [*spelled, *[b""] * (vocab_size - len(spelled))], tokenizer.eos_id)


vocabulary = functools.lru_cache(maxsize=4)(token_bytes)

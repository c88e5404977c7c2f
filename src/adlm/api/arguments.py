"""Arguments from Python, which no command line has read: each is held to the type that the schema gives it."""

import operator
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_type_hints

from adlm.errors import require
from adlm.io.paths import path_of
from adlm.schema import SamplingConfig

TYPES = get_type_hints(SamplingConfig)
# type of a setting -> what may stand for it (numbers of numpy too), and what to say
KINDS: dict[type, tuple[type, str]] = {
    str: (str, "a text"), int: (Integral, "an integer"), float: (Real, "a number"), bool: (bool, "True or False"),
}  # fmt: skip
# What else is taken for these settings elsewhere
MORE = {"stop": ": whether a text ends at its first end-of-text token (only HTTP's completions end at given texts)"}


def as_settings(**values: Any) -> dict[str, Any]:
    """Fields of SamplingConfig by name, each of its type."""
    return {name: typed(f"sampling.{name}", value, TYPES[name], MORE.get(name, "")) for name, value in values.items()}


def typed(what: str, value: Any, kind: type, more: str = "") -> Any:
    """The value, if it is of that kind; True is no number."""
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    allowed, said = KINDS[kind]
    fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    require(fits, f"{what} must be {said}, got {shown(value)}{more}")
    return readable(what, str(value)) if kind is str else kind(value)


def readable(what: str, text: str) -> str:
    """No tokenizer can read half of a character (a text cut inside an emoji, bytes that were no UTF-8)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half of a character (a lone surrogate): {shown(text)}") from None
    return text


def as_words(what: str, value: Any) -> list[str]:
    listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    require(listed, f"{what} must be a list of texts, got {shown(value)}")
    return [typed(f"a word of {what}", word, str) for word in value]


def as_tokens(what: str, value: Any, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of a text, or those given."""
    if isinstance(value, str):
        return encode(readable(what, value))
    wrong = f"{what} must be one text or a list of token ids, got {shown(value)}"
    require(not isinstance(value, bytes), wrong)  # whose elements are integers, too
    try:
        return [operator.index(token) for token in value]
    except TypeError:
        raise ValueError(wrong) from None


def as_path(what: str, value: Any) -> Path:
    require(isinstance(value, (str, os.PathLike)), f"{what} must be a path, got {shown(value)}")
    return path_of(value)


def shown(value: Any) -> str:
    return f"{value!r:.60}"

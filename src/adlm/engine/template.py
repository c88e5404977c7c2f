"""Text with holes: `[MASK]` is one token to be filled, `[MASK:3]` three."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from adlm.errors import require

# 18 digits: Python refuses to read thousands of them, and no row is that long
HOLE = re.compile(r"\[MASK(?::(\d{1,18}))?\]")
# What was meant as a hole. `[masked]` is text; a text that ends inside a hole is not.
LIKE_A_HOLE = re.compile(r"\[MASK(?![a-z])[^\]]*\]?", re.IGNORECASE)
HOLES = "[MASK] is one token, [MASK:3] are three"


class Limit(NamedTuple):
    """How long a row may be, and who says so."""

    tokens: int
    name: str = "the model's length"

    def check(self, tokens: int, what: str) -> None:
        require(tokens <= self.tokens, f"{what} has {tokens} tokens, allowed are {self.tokens} ({self.name})")


def check_canvas(length: int | None, **given: Any) -> None:
    """What is to be filled is said once, by a prompt, a template or tokens; only a prompt leaves the length open."""
    named = [name for name, value in given.items() if value]
    require(len(named) <= 1, f"give only one of {' and '.join(named)}")
    require(not length or named in ([], ["prompt"]), f"length has no meaning beside {''.join(named)}")


def parse_template(
    text: str,
    encode: Callable[[str], list[int]],
    mask_id: int,
    start: Sequence[int] = (),
    limit: Limit | None = None,
) -> list[int]:
    """Tokens of a template after those of `start`; pieces of text between holes are encoded by themselves.

    A space just before a hole belongs to the word that fills it (the tokenizers in use put a space at the start of a
    token), so it is left out: "The [MASK] sat" reads "The", hole, " sat".
    """
    limit = limit or Limit(sys.maxsize)
    holes = [(like.span(), hole_size(like[0])) for like in LIKE_A_HOLE.finditer(text)]
    require(bool(holes), f"a template needs at least one hole: {HOLES}")
    limit.check(sum(size for _, size in holes), "the template")  # before a hole of a billion tokens becomes a list
    tokens, at = list(start), 0
    for (begin, end), size in holes:
        tokens += encode(text[at:begin].removesuffix(" ")) + [mask_id] * size
        at = end
    tokens += encode(text[at:])
    limit.check(len(tokens), "the template")
    return tokens


def hole_size(text: str) -> int:
    hole = HOLE.fullmatch(text)
    if hole is None:
        raise ValueError(f"{text[:40]!r} is no hole: {HOLES}")
    size = int(hole[1] or 1)
    require(size > 0, f"{text} is a hole of no tokens; write [MASK:n] with n >= 1")
    return size

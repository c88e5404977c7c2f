"""Text with holes: `[MASK]` is one token to be filled, `[MASK:3]` three."""

import re
from collections.abc import Callable

from adlm.errors import require

HOLE = re.compile(r"\[MASK(?::(\d+))?\]")


def parse_template(text: str, encode: Callable[[str], list[int]], mask_id: int) -> list[int]:
    """Tokens of a template; pieces of text between holes are encoded by themselves.

    A space just before a hole belongs to the word that fills it (the tokenizers in use put a space at the start of a
    token), so it is left out: "The [MASK] sat" reads "The", hole, " sat".
    """
    require(bool(HOLE.search(text)), "a template needs at least one hole: [MASK] is one token, [MASK:3] are three")
    tokens: list[int] = []
    at = 0
    for hole in HOLE.finditer(text):
        count = int(hole[1]) if hole[1] is not None else 1
        require(count > 0, f"{hole[0]} is a hole of no tokens; write [MASK:n] with n >= 1")
        tokens += encode(text[at : hole.start()].removesuffix(" ")) + [mask_id] * count
        at = hole.end()
    return tokens + encode(text[at:])

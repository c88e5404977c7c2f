"""Bytes of tokens as characters: a byte-level token may be a part of a character, or end in one.

A character stands with the token that completes it. Bytes that wait for a token still masked show as nothing, and bytes
that no other token can complete as U+FFFD, so the texts of a finished sequence joined are its text.
"""

import codecs
from collections.abc import Sequence

UTF8 = codecs.getincrementaldecoder("utf-8")


def characters(pieces: Sequence[bytes | None]) -> list[str | None]:
    """The text that each token adds, where None is a hole."""
    found: list[str | None] = []
    decoder, after_hole = UTF8("replace"), False
    for i, piece in enumerate(pieces):
        if piece is None:
            decoder.reset()  # what was pending may become a character with the token that comes here
            found.append(None)
            after_hole = True
            continue
        if after_hole:
            # the end of a character that began in the hole
            rest = piece.lstrip(bytes(range(0x80, 0xC0)))
            after_hole, piece = not rest, rest
        found.append(decoder.decode(piece, final=i == len(pieces) - 1))
    return found

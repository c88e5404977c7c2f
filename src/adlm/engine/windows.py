"""What a request asks the engine to fill, one canvas after another: usually one, several with strides or repairs.

A request is a conversation: it yields a canvas with holes, is given the filled row, and yields the next canvas until it
returns its final row. Rows longer than the model, words that came out although they are banned, and the cut at the
end of text are then all the same mechanism.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from adlm.diffusion.uniforms import Stream, fold
from adlm.engine.request import Request

REPAIRS = 50  # then give up: bans that contradict the fixed text could go on for ever


class Window(NamedTuple):
    tokens: list[int]
    seed: int
    banned: list[int]
    """Single tokens that must not be drawn in this window."""
    before: list[int]
    """Tokens of the row that stand before the window."""


Windows = Generator[Window, list[int], list[int]]


def windows(request: Request, length: int, mask_id: int) -> Windows:
    """Canvases of a request for a model of `length` positions; returns the finished row."""
    row = list(request.tokens)
    single = [w[0] for w in request.banned if len(w) == 1]
    phrases = [list(w) for w in request.banned if len(w) > 1]
    first_hole = row.index(mask_id)
    start, number = 0, 0
    while True:
        stop = min(start + length, len(row))
        holes = {l for l in range(start, stop) if row[l] == mask_id}
        if holes:
            seed = request.seed if number == 0 else fold(request.seed, Stream.SPLIT, number)
            row[start:stop] = yield Window(row[start:stop], seed, single, row[:start])
            # A phrase may also end in this window and begin in the one before.
            yield from repair(row, start, stop, holes, phrases, single, seed, mask_id)
        end = end_of_text(row, request.stop_id, first_hole, stop)
        if end is not None:
            return row[: end + 1]
        if stop == len(row):
            return row
        start = min(start + request.settings.stride, len(row) - length)
        number += 1


def end_of_text(row: Sequence[int], stop_id: int | None, first: int, stop: int) -> int | None:
    """Position of the first end-of-text token at or after the first hole."""
    if stop_id is None:
        return None
    return next((l for l in range(first, stop) if row[l] == stop_id), None)


def repair(
    row: list[int],
    start: int,
    stop: int,
    holes: set[int],
    phrases: list[list[int]],
    single: list[int],
    seed: int,
    mask_id: int,
) -> Generator[Window, list[int], None]:
    """Draw again where a banned phrase came out: one of its own positions, without the token that stood there."""
    tried: set[int] = set()
    for attempt in range(REPAIRS):
        again = {}
        for phrase in phrases:
            for l in range(max(0, start - len(phrase) + 1), stop - len(phrase) + 1):
                if row[l : l + len(phrase)] == phrase:
                    inside = [p for p in range(l, l + len(phrase)) if p in holes]
                    if inside:
                        again[inside[-1]] = row[inside[-1]]
        if not again:
            return
        tried |= set(again.values())
        canvas = row[start:stop]
        for p in again:
            canvas[p - start] = mask_id
        banned = sorted({*single, *tried})
        row[start:stop] = yield Window(canvas, fold(seed, Stream.SPLIT, -1 - attempt), banned, row[:start])
    words = ", ".join(str(p) for p in phrases)
    raise ValueError(f"banned words could not be avoided after {REPAIRS} attempts; token sequences: {words}")

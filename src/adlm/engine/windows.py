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
    first: int = 0
    """Position of the row from which on an end-of-text token ends it."""


Windows = Generator[Window, list[int], list[int]]


def windows(request: Request, length: int, mask_id: int) -> Windows:
    """Canvases of a request for a model of `length` positions; returns the finished row.

    With required words the first canvas is asked for twice: once with those words placed, then filled.
    """
    row = list(request.tokens)
    single = [w[0] for w in request.banned if len(w) == 1]
    phrases = [list(w) for w in request.banned if len(w) > 1]
    first, placed = row.index(mask_id), not request.required
    start, number = 0, 0
    while True:
        stop = min(start + length, len(row))
        holes = {l for l in range(start, stop) if row[l] == mask_id}
        if holes:
            seed = request.seed if number == 0 else fold(request.seed, Stream.SPLIT, number)
            if not placed:
                row[start:stop] = yield Window(row[start:stop], seed, single, row[:start])
                words = {l for l in holes if row[l] != mask_id}
                holes, first, placed = holes - words, max(words), True
            row[start:stop] = yield Window(row[start:stop], seed, single, row[:start], first)
            # A phrase may also end in this window and begin in the one before.
            faults = Faults(phrases, request.stop_id, first)
            yield from repair(row, start, stop, holes, faults, single, seed, mask_id)
        end = end_of_text(row, request.stop_id, first, stop)
        if end is not None:
            return row[: end + 1]
        if stop == len(row):
            return row
        start = min(start + request.settings.stride, len(row) - length)
        number += 1


class Faults(NamedTuple):
    """What must not come out where holes were: banned phrases, and an end of text before the last required word."""

    phrases: list[list[int]]
    stop_id: int | None
    first: int

    def find(self, row: list[int], start: int, stop: int, holes: set[int]) -> set[int]:
        """Holes to draw again: one of each phrase, and every early end."""
        found = {l for l in holes if l < self.first and row[l] == self.stop_id}
        for phrase in self.phrases:
            for l in range(max(0, start - len(phrase) + 1), stop - len(phrase) + 1):
                if row[l : l + len(phrase)] == phrase:
                    found |= set([p for p in range(l, l + len(phrase)) if p in holes][-1:])
        return found


def end_of_text(row: Sequence[int], stop_id: int | None, first: int, stop: int) -> int | None:
    """Position of the first end-of-text token at or after `first`."""
    if stop_id is None:
        return None
    return next((l for l in range(first, stop) if row[l] == stop_id), None)


def repair(
    row: list[int],
    start: int,
    stop: int,
    holes: set[int],
    faults: Faults,
    single: list[int],
    seed: int,
    mask_id: int,
) -> Generator[Window, list[int], None]:
    """Draw again at the holes that are at fault, without the tokens that stood there."""
    tried: set[int] = set()
    for attempt in range(REPAIRS):
        again = faults.find(row, start, stop, holes)
        if not again:
            return
        tried |= {row[p] for p in again}
        canvas = row[start:stop]
        for p in again:
            canvas[p - start] = mask_id
        banned = sorted({*single, *tried})
        window = Window(canvas, fold(seed, Stream.SPLIT, -1 - attempt), banned, row[:start], faults.first)
        row[start:stop] = yield window
    words = ", ".join(str(p) for p in faults.phrases)
    raise ValueError(f"banned words could not be avoided after {REPAIRS} attempts; token sequences: {words}")

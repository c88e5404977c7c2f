"""The engine's input and output, one sequence each; text with holes; the canvases of a request."""

import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adlm.constrain.matching import Constraint
from adlm.diffusion.random import Stream, fold
from adlm.errors import require
from adlm.schema import SamplingConfig


@dataclass(frozen=True)
class Request:
    """One sequence to be completed. Positions that hold the mask are holes; every other position stays as it is."""

    tokens: Sequence[int]
    settings: SamplingConfig = field(default_factory=SamplingConfig)
    """sampler, steps, temperature, top_p, ... (the caller handles n, batch_size, seed, length and out)."""
    seed: int = 0
    """It alone decides every random choice of this sequence, whatever else is in its batch."""
    banned: Sequence[Sequence[int]] = ()
    """Token sequences that must not appear where holes were."""
    required: Sequence[Sequence[int]] = ()
    """Token sequences that must appear: each is placed by a draw from the model's probabilities."""
    stop_id: int | None = None
    """End-of-text token: the sequence ends after the first one drawn, and stops early if that changes nothing."""
    constraint: Constraint | None = None
    """The text between the first and the last hole must match it."""
    watch: bool = False
    """Send a Frame after every network evaluation of this sequence (reads the canvas back each time)."""


@dataclass(frozen=True)
class Frame:
    """A partly filled sequence."""

    id: int
    tokens: list[int]
    """The sequence so far, with masks in open holes; with a stride, earlier windows included."""
    step: int
    """The sampler's step; in blocks, where it restarts with each, the number of evaluations."""
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation and still visible."""
    settled: int = 0
    """Number of positions, from the left, whose tokens are final once drawn."""


@dataclass(frozen=True)
class Result:
    id: int
    tokens: list[int]
    seed: int
    nfe: int
    """Network evaluations this sequence took part in."""
    seconds: float
    """From the sequence's first evaluation to its end; other sequences shared that time."""
    finished: bool = True
    """False: cancelled or given up, and `tokens` may hold masks."""
    problem: str = ""
    """Why a sequence was given up."""


def check_request(r: Request, vocab_size: int, mask_id: int, length: int) -> None:
    """Refuse what a model cannot do, before the request takes a slot. Its settings have been checked on entry."""
    s = r.settings
    require(
        isinstance(r.seed, int) and not isinstance(r.seed, bool) and 0 <= r.seed < 2**63,
        f"sampling.seed must be an integer in [0, 2^63), got {r.seed!r}",
    )
    require(len(r.tokens) > 0, "a sequence must have at least one position, got none")
    check_length(len(r.tokens), length, s.stride)
    require(s.stride < length, f"sampling.stride={s.stride} must be below {length} (model.length)")
    for name, sequences in (("a sequence", [r.tokens]), ("a banned word", r.banned), ("a required word", r.required)):
        for tokens in sequences:
            require(len(tokens) > 0, f"{name} has no tokens")
            bad = [t for t in tokens if not 0 <= t < vocab_size]
            require(not bad, f"{name} holds token {bad[0] if bad else ''}, outside the vocabulary 0..{vocab_size - 1}")
    holes = sum(t == mask_id for t in r.tokens)
    require(holes > 0, "nothing to fill: the sequence has no holes")
    single = {w[0] for w in r.banned if len(w) == 1}
    require(len(single | {mask_id}) < vocab_size, "banned words leave no token to draw")
    for word in r.required:
        require(mask_id not in word, "a required word holds the mask")
        require(len(word) <= holes, f"a required word of {len(word)} tokens does not fit into {holes} holes")
    if r.constraint is not None:
        said = r.constraint.said
        require(not r.required, f"sampling.required has no place beside {said}, which says itself what must appear")
        phrases = [w for w in r.banned if len(w) > 1]
        require(not phrases, f"beside {said} only single tokens can be banned, not phrases such as {[*phrases[0]]}"
                if phrases else "")  # fmt: skip
        r.constraint.check(r.tokens, mask_id, sorted(single))


def check_length(positions: int, length: int, stride: int) -> None:
    """Refuse a sequence that is too long. Code that builds one calls this first, before it fills the memory."""
    require(
        positions <= length or stride > 0,
        f"a sequence of {positions} positions is longer than {length} (model.length); set sampling.stride to go beyond",
    )


# Text with holes: `[MASK]` is one token to be filled, `[MASK:3]` three.

# at most 18 digits: Python refuses to parse thousands of them, and no sequence is that long
HOLE = re.compile(r"\[MASK(?::(\d{1,18}))?\]")
# Anything meant as a hole. `[masked]` is text; a text that ends inside a hole is an error.
LIKE_A_HOLE = re.compile(r"\[MASK(?![a-z])[^\]]*\]?", re.IGNORECASE)
HOLES = "[MASK] is one token, [MASK:3] are three"


class Limit(NamedTuple):
    """How long a sequence may be, and the name of the limit."""

    tokens: int
    name: str = "the model's length"

    def check(self, tokens: int, what: str) -> None:
        require(tokens <= self.tokens, f"{what} has {tokens} tokens, allowed are {self.tokens} ({self.name})")


def check_canvas(length: int | None, **given: Any) -> None:
    """Check that one of prompt, template and tokens says what to fill. Only a prompt leaves the length open."""
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
    """Tokens of a template after those of `start`; each piece of text between holes is encoded on its own.

    A space just before a hole belongs to the word that fills it, since the tokenizers in use put a space at the start
    of a token. So it is dropped: "The [MASK] sat" becomes "The", hole, " sat".
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


# The canvases that a request asks the engine to fill: usually one, several with strides or repairs. They come from a
# generator: it yields a canvas with holes, is sent the filled one, and yields the next canvas until it returns the
# final sequence. This one mechanism handles sequences longer than the model, banned words that appeared anyway, and
# the end of the text.

REPAIRS = 50  # then give up: a ban that contradicts the fixed text could be repaired for ever


class Window(NamedTuple):
    """A canvas of a request, at most as long as the model's length."""

    tokens: list[int]
    seed: int
    banned: list[int]
    """Single tokens that must not be drawn in this window."""
    before: list[int]
    """Tokens of the sequence before the window."""
    first: int = 0
    """First position of the sequence at which an end-of-text token ends it."""
    at: int = 0
    """Its position on the slot's canvas: 0, or its position in the sequence for blocks, which share one canvas."""


Windows = Generator[Window, list[int], list[int]]


def windows(request: Request, length: int, mask_id: int, block: int = 0) -> Windows:
    """Yield the canvases of a request for a model of `length` positions; return the finished sequence. `block`: length
    of the blocks that the model writes, left to right (0: a canvas as a whole).

    With required words the first canvas is yielded twice: first to have those words placed, then to be filled.
    """
    sequence = list(request.tokens)
    single = [w[0] for w in request.banned if len(w) == 1]
    phrases = [list(w) for w in request.banned if len(w) > 1]
    first, placed = sequence.index(mask_id), not request.required
    for start, stop, seed in spans(request, length, block):
        holes = {l for l in range(start, stop) if sequence[l] == mask_id}
        if holes:
            # if tokens are drawn one at a time, a phrase is avoided instead of repaired
            banned = [*single, *completions(phrases, sequence[:start])] if block == 1 else single
            window = Window(sequence[start:stop], seed, banned, sequence[:start], at=start if block else 0)
            if not placed:
                sequence[start:stop] = yield window
                words = {l for l in holes if sequence[l] != mask_id}
                holes, first, placed = holes - words, max(words), True
            window = window._replace(tokens=sequence[start:stop], first=first)
            sequence[start:stop] = yield window
            # A phrase may also end in this window and begin in the one before.
            yield from repair(sequence, window, holes, Faults(phrases, request.stop_id, first), mask_id)
        end = end_of_text(sequence, request.stop_id, first, stop)
        if end is not None:
            return sequence[: end + 1]
    return sequence


def spans(request: Request, length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, seed) of the windows of a request."""
    n, number = len(request.tokens), 0
    if block:
        # A phrase is repaired before the next block reads it. Positions differ, so one seed serves all windows.
        size = block if any(len(w) > 1 for w in request.banned) else n
        yield from ((start, min(start + size, n), request.seed) for start in range(0, n, size))
        return
    start, stop = 0, min(length, n)
    yield start, stop, request.seed
    while stop < n:
        start, number = min(start + request.settings.stride, n - length), number + 1
        stop = start + length
        yield start, stop, fold(request.seed, Stream.SPLIT, number)


def completions(phrases: list[list[int]], before: list[int]) -> list[int]:
    """Tokens that would complete a phrase after `before`."""
    return [p[-1] for p in phrases if before[-len(p) + 1 :] == p[:-1]]


class Faults(NamedTuple):
    """What must not appear in the holes: banned phrases, and an end of text before the last required word."""

    phrases: list[list[int]]
    stop_id: int | None
    first: int

    def find(self, sequence: list[int], start: int, stop: int, holes: set[int]) -> set[int]:
        """Holes to draw again: one of each phrase, and every early end."""
        found = {l for l in holes if l < self.first and sequence[l] == self.stop_id}
        for phrase in self.phrases:
            for l in range(max(0, start - len(phrase) + 1), stop - len(phrase) + 1):
                if sequence[l : l + len(phrase)] == phrase:
                    found |= set([p for p in range(l, l + len(phrase)) if p in holes][-1:])
        return found


def end_of_text(tokens: Sequence[int], stop_id: int | None, first: int, stop: int) -> int | None:
    """Position of the first end-of-text token at or after `first`."""
    if stop_id is None:
        return None
    return next((l for l in range(first, stop) if tokens[l] == stop_id), None)


def repair(
    sequence: list[int], window: Window, holes: set[int], faults: Faults, mask_id: int
) -> Generator[Window, list[int], None]:
    """Draw the faulty holes again, with the tokens found there banned."""
    start, tried = len(window.before), set[int]()
    stop = start + len(window.tokens)
    for attempt in range(REPAIRS):
        again = faults.find(sequence, start, stop, holes)
        if not again:
            return
        tried |= {sequence[p] for p in again}
        canvas = sequence[start:stop]
        for p in again:
            canvas[p - start] = mask_id
        banned, seed = sorted({*window.banned, *tried}), fold(window.seed, Stream.SPLIT, -1 - attempt)
        sequence[start:stop] = yield window._replace(tokens=canvas, seed=seed, banned=banned)
    words = ", ".join(str(p) for p in faults.phrases)
    raise ValueError(f"banned words could not be avoided after {REPAIRS} attempts; token sequences: {words}")

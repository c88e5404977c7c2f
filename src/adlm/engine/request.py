"""What goes into the engine and what comes out, one sequence each; text with holes; the canvases of a request."""

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
    """sampler, steps, temperature, top_p, ... (n, batch_size, seed, length and out are the caller's business)."""
    seed: int = 0
    """Decides every random choice of this sequence, whatever else is in its batch."""
    banned: Sequence[Sequence[int]] = ()
    """Token sequences that must not appear where holes were."""
    required: Sequence[Sequence[int]] = ()
    """Token sequences that must appear: each is placed where the model finds it likeliest, by a draw."""
    stop_id: int | None = None
    """End-of-text token: the sequence ends after the first one drawn, and stops early where that changes nothing."""
    constraint: Constraint | None = None
    """What stands between the first and the last hole must match it."""
    watch: bool = False
    """Send a Frame after every network evaluation of this sequence (reads the canvas back each time)."""


@dataclass(frozen=True)
class Frame:
    """A partly filled sequence."""

    id: int
    tokens: list[int]
    """The sequence so far, holes still to be filled as masks; in a stride, earlier windows included."""
    step: int
    """Of the sampler; in blocks, where it begins anew with each, the number of evaluations."""
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation and still visible."""
    settled: int = 0
    """From the left, how many positions stay as they are, if they hold a token."""


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
    """Refuse what a model cannot do, before the request takes a slot. Its settings were checked where they came in."""
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
    """Refuse a sequence that is too long; also for who builds one, before a billion positions fill the memory."""
    require(
        positions <= length or stride > 0,
        f"a sequence of {positions} positions is longer than {length} (model.length); set sampling.stride to go beyond",
    )


# Text with holes: `[MASK]` is one token to be filled, `[MASK:3]` three.

# 18 digits: Python refuses to read thousands of them, and no sequence is that long
HOLE = re.compile(r"\[MASK(?::(\d{1,18}))?\]")
# What was meant as a hole. `[masked]` is text; a text that ends inside a hole is not.
LIKE_A_HOLE = re.compile(r"\[MASK(?![a-z])[^\]]*\]?", re.IGNORECASE)
HOLES = "[MASK] is one token, [MASK:3] are three"


class Limit(NamedTuple):
    """How long a sequence may be, and who says so."""

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


# What a request asks the engine to fill, one canvas after another: usually one, several with strides or repairs. A
# request is a conversation: it yields a canvas with holes, is given the filled one, and yields the next canvas until it
# returns its final sequence. Sequences longer than the model, words that came out although they are banned, and the end
# of the text are then all the same mechanism.

REPAIRS = 50  # then give up: bans that contradict the fixed text could be repaired for ever


class Window(NamedTuple):
    """A canvas of a request: at most the model's length of its positions."""

    tokens: list[int]
    seed: int
    banned: list[int]
    """Single tokens that must not be drawn in this window."""
    before: list[int]
    """Tokens of the sequence that stand before the window."""
    first: int = 0
    """Position of the sequence from which on an end-of-text token ends it."""
    at: int = 0
    """Where on the slot's canvas it stands: at 0, or, in blocks, which share a canvas, at its place in the sequence."""


Windows = Generator[Window, list[int], list[int]]


def windows(request: Request, length: int, mask_id: int, block: int = 0) -> Windows:
    """Canvases of a request for a model of `length` positions; returns the finished sequence. `block`: the model
    writes blocks of so many positions, left to right (0: a canvas as a whole).

    With required words the first canvas is asked for twice: once with those words placed, then filled.
    """
    sequence = list(request.tokens)
    single = [w[0] for w in request.banned if len(w) == 1]
    phrases = [list(w) for w in request.banned if len(w) > 1]
    first, placed = sequence.index(mask_id), not request.required
    for start, stop, seed in spans(request, length, block):
        holes = {l for l in range(start, stop) if sequence[l] == mask_id}
        if holes:
            # where one token is drawn at a time, a phrase is avoided and not repaired
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
        # A phrase is repaired before the next block reads it. Positions differ, so that one seed serves all.
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
    """What must not come out where holes were: banned phrases, and an end of text before the last required word."""

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
    """Draw again at the holes that are at fault, without the tokens that stood there."""
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

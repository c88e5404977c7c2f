"""What goes into the engine and what comes out: one row each, with its own seed and settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from adlm.errors import require
from adlm.rules import check_fields
from adlm.schema import SamplingConfig


@dataclass(frozen=True)
class Request:
    """One row to be completed. Positions that hold the mask are holes; every other position is kept as it is."""

    tokens: Sequence[int]
    settings: SamplingConfig = field(default_factory=SamplingConfig)
    """sampler, steps, temperature, top_p, ... (n, batch_size, seed, length and out are the caller's business)."""
    seed: int = 0
    """Decides every random choice of this row, whoever shares its batch."""
    banned: Sequence[Sequence[int]] = ()
    """Token sequences that must not appear where holes were."""
    required: Sequence[Sequence[int]] = ()
    """Token sequences that must appear: each is placed where the model finds it likeliest, by a draw."""
    stop_id: int | None = None
    """End-of-text token: the row is cut after the first one drawn, and stops early where that changes nothing."""
    watch: bool = False
    """Send a Frame after every network evaluation of this row (reads the canvas back each time)."""


@dataclass(frozen=True)
class Frame:
    """A partial row."""

    id: int
    tokens: list[int]
    """The row so far, holes still to be filled as masks; in a stride, earlier windows included."""
    step: int
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation and still visible."""


@dataclass(frozen=True)
class Result:
    id: int
    tokens: list[int]
    seed: int
    nfe: int
    """Network evaluations this row took part in (guidance counts two each)."""
    seconds: float
    """From the row's first evaluation to its end; other rows shared that time."""
    finished: bool = True
    """False: cancelled or given up, and `tokens` may hold masks."""
    problem: str = ""
    """Why a row was given up."""


def check_request(r: Request, vocab_size: int, mask_id: int, length: int) -> None:
    """Everything that can be wrong with a request, before it takes a slot."""
    s = r.settings
    check_fields(s, "sampling")
    require(
        isinstance(r.seed, int) and not isinstance(r.seed, bool) and 0 <= r.seed < 2**63,
        f"sampling.seed must be an integer in [0, 2^63), got {r.seed!r}",
    )
    require(len(r.tokens) > 0, "a row must have at least one position, got none")
    check_length(len(r.tokens), length, s.stride)
    require(0 <= s.stride < length, f"sampling.stride must lie in [0, {length - 1}], got {s.stride}")
    for name, sequences in (("a row", [r.tokens]), ("a banned word", r.banned), ("a required word", r.required)):
        for tokens in sequences:
            require(len(tokens) > 0, f"{name} has no tokens")
            bad = [t for t in tokens if not 0 <= t < vocab_size]
            require(not bad, f"{name} holds token {bad[0] if bad else ''}, outside the vocabulary 0..{vocab_size - 1}")
    holes = sum(t == mask_id for t in r.tokens)
    require(holes > 0, "nothing to fill: the row has no holes")
    single = {w[0] for w in r.banned if len(w) == 1}
    require(len(single | {mask_id}) < vocab_size, "banned words leave no token to draw")
    for word in r.required:
        require(mask_id not in word, "a required word holds the mask")
        require(len(word) <= holes, f"a required word of {len(word)} tokens does not fit into {holes} holes")


def check_length(positions: int, length: int, stride: int) -> None:
    """Also for who builds a row: one of a billion positions is refused before it fills the memory."""
    require(
        positions <= length or stride > 0,
        f"a row of {positions} positions is longer than {length} (model.length); set sampling.stride to go beyond",
    )

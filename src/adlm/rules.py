"""What a setting may be, beyond its type: a range of numbers, or a choice of names. Stated once, beside the field.

    eta: Fraction = 0.02
    norm: Annotated[str, Choices(("layernorm", "rmsnorm"))] = "layernorm"
    sampler: Annotated[str, Choices(tables.SAMPLERS)] = "mdlm"

The command line, the Python API and the server check values by these rules; `--help`, docs/configuration.md and the
server's request model are generated from them.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from adlm.errors import choose, require


@dataclass(frozen=True, kw_only=True)
class Range:
    """Finite numbers from `low` to `high`; `open_low` and `open_high` leave out the end. nan is never inside."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: float | None = None
    """One more value that is allowed, and means something else (-1: off)."""

    def __str__(self) -> str:
        """The range in words: `at least 1`, `in [0, 1)`."""
        low, high = _short(self.low), _short(self.high)
        if self.high == math.inf:
            said = f"above {low}" if self.open_low else f"at least {low}"
        else:
            said = f"in {'(' if self.open_low else '['}{low}, {high}{')' if self.open_high else ']'}"
        return said if self.also is None else f"{said}, or {_short(self.also)}"

    def check(self, key: str, value: Any) -> None:
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        if value != self.also and not (above and below and abs(value) < math.inf):
            finite = "finite and " if value == math.inf else ""
            raise ValueError(f"{key}={value} must be {finite}{self}")


def _short(number: float) -> str:
    power = 2**20 <= number < math.inf and int(number) & (int(number) - 1) == 0
    return f"2^{int(number).bit_length() - 1}" if power else f"{number:g}"


@dataclass(frozen=True)
class Choices:
    """One of the names of a table or tuple, which may grow until it is asked, or of those in `also`."""

    of: Iterable[str]
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.also, *self.of)

    def __str__(self) -> str:
        return ", ".join(name or "''" for name in self.names)

    def check(self, key: str, value: Any) -> None:
        choose(key, value, self.names)


@dataclass(frozen=True)
class Location:
    """A file or folder as a user names it. The command line reads ~ as home, which shells do not in `out=~/x`."""

    def __str__(self) -> str:
        return "a path"

    def check(self, key: str, value: Any) -> None:
        pass


@dataclass(frozen=True)
class Numbers:
    """Whole numbers of at least `low`, separated by commas: 1,4,16. An empty text is no number."""

    low: int = 0

    def __str__(self) -> str:
        return f"whole numbers of at least {self.low}, separated by commas"

    def check(self, key: str, value: Any) -> None:
        words = value.split(",") if value else []
        fits = all(word.strip().isascii() and word.strip().isdigit() and int(word) >= self.low for word in words)
        if not fits:
            raise ValueError(f"{key}={value!r} must be {self}")


def numbers(text: str) -> tuple[int, ...]:
    """The value of a setting with the rule `Numbers`."""
    return tuple(int(word) for word in text.split(",")) if text else ()


Rule = Range | Choices | Location | Numbers


def check_fields(section: Any, name: str) -> None:
    """Check every field of one section of the schema, called `name`, by its own rule."""
    for field, rule in rules_of(type(section)).items():
        rule.check(f"{name}.{field}" if name else field, getattr(section, field))


@functools.cache
def rules_of(section: type) -> dict[str, Rule]:
    """Field -> its rule, of a section of the schema."""
    hints = get_type_hints(section, include_extras=True)
    return {field: kind.__metadata__[-1] for field, kind in hints.items() if hasattr(kind, "__metadata__")}


Place = Annotated[str, Location()]
Count = Annotated[int, Range(low=1)]
WholeNumber = Annotated[int, Range(low=0)]
Seed = Annotated[int, Range(low=0, high=1 << 63, open_high=True)]
NotNegative = Annotated[float, Range(low=0)]
AtLeastOne = Annotated[float, Range(low=1)]
Positive = Annotated[float, Range(low=0, open_low=True)]
Fraction = Annotated[float, Range(low=0, high=1)]
FractionBelowOne = Annotated[float, Range(low=0, high=1, open_high=True)]
PositiveFraction = Annotated[float, Range(low=0, high=1, open_low=True)]
InnerFraction = Annotated[float, Range(low=0, high=1, open_low=True, open_high=True)]

# Type of a setting -> what may stand for it in Python (numbers of numpy too), and what to say.
KINDS: dict[type, tuple[type, str]] = {
    str: (str, "a text"), int: (Integral, "an integer"), float: (Real, "a number"), bool: (bool, "True or False"),
}  # fmt: skip


def accept(key: str, value: Any, hint: Any) -> Any:
    """Return a value that Python handed over, as the annotated type of its field; refuse another type (True is no
    number), half of a character, and what is against the rule of the field."""
    kind, *rules = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    allowed, said = KINDS[kind]
    fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    require(fits, f"{key} must be {said}, got {value!r:.60}")
    if kind is str and any("\ud800" <= character <= "\udfff" for character in str(value)):
        # a text cut inside an emoji, bytes that were no UTF-8: no tokenizer can read it
        raise ValueError(f"{key} holds half of a character (a lone surrogate): {value!r:.60}")
    for rule in rules:
        rule.check(key, kind(value))
    return kind(value)

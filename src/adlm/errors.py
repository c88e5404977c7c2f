"""How bad input is answered: one ValueError that says what, got, allowed, and which key to change."""

import difflib
from collections.abc import Iterable


def choose(what: str, got: str, allowed: Iterable[str]) -> str:
    """Return `got` if it is one of `allowed`; else raise, naming the nearest valid name."""
    names = sorted(allowed)
    if got in names:
        return got
    near = difflib.get_close_matches(str(got), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{what}={got!r} is unknown{hint}; choose one of {', '.join(names)}")


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`: checks at public borders, never inside a step."""
    if not condition:
        raise ValueError(message)

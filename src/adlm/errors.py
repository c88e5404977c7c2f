"""Errors for bad input: one ValueError that names the setting, the given value and the allowed ones."""

import difflib
from collections.abc import Iterable


def choose(what: str, got: str, allowed: Iterable[str]) -> str:
    """Return `got` if it is one of `allowed`; else raise, naming the nearest valid name."""
    names = sorted(allowed)
    if got in names:
        return got
    near = similar(str(got)[:100], names)
    hint = f" (did you mean {near!r}?)" if near else ""
    shown = ", ".join(name or "''" for name in names)
    raise ValueError(f"{what}={got!r:.100} is unknown{hint}; choose one of {shown}")


def similar(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; transposed letters count as closer than missing or extra ones."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return min(near, key=lambda n: sorted(n) != sorted(name), default=None)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`. For checks at public borders, never inside a step."""
    if not condition:
        raise ValueError(message)


EXTRAS = {
    "datasets": "data", "pyarrow": "data", "transformers": "eval", "sklearn": "eval", "gguf": "eval",
    "accelerate": "eval", "mauve": "mauve", "lm_eval": "harness", "matplotlib": "plot", "tensorboard": "track",
    "wandb": "track", "fastapi": "serve", "uvicorn": "serve", "outlines_core": "constrain", "ray": "ray",
}  # fmt: skip
"""Optional package -> the extra that installs it."""


def missing_extra(error: ModuleNotFoundError) -> str:
    """What to install for a missing package; empty if no extra brings it."""
    extra = EXTRAS.get((error.name or "").split(".")[0])
    return f"this needs the package {error.name}: pip install 'adlm[{extra}]'" if extra else ""

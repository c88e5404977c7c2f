"""How bad input is answered: one ValueError that says what, got, allowed, and which key to change."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def choose(what: str, got: str, allowed: Iterable[str]) -> str:
    """Return `got` if it is one of `allowed`; else raise, naming the nearest valid name."""
    names = sorted(allowed)
    if got in names:
        return got
    near = similar(str(got), names)
    hint = f" (did you mean {near!r}?)" if near else ""
    shown = ", ".join(name or "''" for name in names)
    raise ValueError(f"{what}={got!r} is unknown{hint}; choose one of {shown}")


def similar(name: str, names: Iterable[str]) -> str | None:
    """What was probably meant: letters in another order before letters left out or added."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return min(near, key=lambda n: sorted(n) != sorted(name), default=None)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`: checks at public borders, never inside a step."""
    if not condition:
        raise ValueError(message)


def expanded(text: str | os.PathLike[str]) -> str:
    """A place as a user names it: ~ is home."""
    place = os.path.expanduser(os.fspath(text))
    require(not place.startswith("~"), f"{place!r}: there is no such user; a folder of that name is ./{place}")
    return place


def path_of(text: str | os.PathLike[str]) -> Path:
    return Path(expanded(text))


def writable_folder(key: str, folder: Path) -> Path:
    """The folder, made if need be: that it cannot be written to is said before the work and not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{key}={str(folder)!r} is not a writable folder: {error.strerror}") from None
    return folder


def writable_file(key: str, file: Path) -> Path:
    """The file, to append to, its folder made: what is found out late loses what was to be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"{key}={str(file)!r} cannot be written: {error.strerror}") from None
    return file

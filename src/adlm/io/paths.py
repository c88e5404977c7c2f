"""Places as users name them, and whether they can be written to, asked before the work and not after it."""

import hashlib
import os
from pathlib import Path

from adlm.errors import require


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


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """A rename is only durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

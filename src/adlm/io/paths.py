"""Places as users name them: files, folders and devices. Checked before the work and not after it.

Importing this module loads no torch: the command line needs it before it knows whether there is anything to run.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from adlm.errors import require
from adlm.rules import Location, rules_of

if TYPE_CHECKING:
    import torch

DRAFT = re.compile(r"\.(?:.+\.|writable-)(?P<pid>\d+)")
"""How a file is called while it is being written."""


def expanded(text: str | os.PathLike[str]) -> str:
    """A path as a user writes it: ~ is home."""
    place = os.path.expanduser(os.fspath(text))
    require(not place.startswith("~"), f"{place!r}: there is no such user; a folder of that name is ./{place}")
    return place


def path_of(text: str | os.PathLike[str]) -> Path:
    return Path(expanded(text))


def absolute_paths(section: type, values: Mapping[str, Any]) -> dict[str, str]:
    """The paths among the values of a section of the schema, absolute: a run is read again from other folders."""
    places = [name for name, rule in rules_of(section).items() if isinstance(rule, Location)]
    return {name: os.path.abspath(expanded(values[name])) for name in places if values.get(name)}


def pick_device(name: str) -> "torch.device":
    """The device of train.device: auto, cpu, cuda (of this process: LOCAL_RANK) or cuda:N."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"train.device={name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        require(
            torch.cuda.is_available(), f"train.device={name!r}, but no CUDA device is available; use train.device=cpu"
        )
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return device


def writable_folder(key: str, folder: Path) -> Path:
    """Return the folder, made if need be; refuse one that cannot be written to before the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # without a name, where the system can: a kill leaves nothing
        sweep(folder)
    except OSError as error:
        raise ValueError(f"{key}={str(folder)!r} is not a writable folder: {error.strerror}") from None
    return folder


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left half written in a folder (`.NAME.PID` of `write_atomically`)."""
    for path in folder.iterdir():
        if (match := DRAFT.fullmatch(path.name)) and path.is_file() and not is_running(int(match["pid"])):
            with suppress(OSError):  # another process was faster, or another user's
                path.unlink()


def is_running(process: int) -> bool:
    """Whether a process of this number exists; yes where that cannot be asked (on Windows the question would kill)."""
    try:
        if os.name == "posix":
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def claimed(path: Path, refusal: Callable[[str], str]) -> Iterator[IO[str]]:
    """Hold a file, opened to append, for one process at a time; the system gives it back when the process dies.

    `refusal`: what to say, from the text of the file, where another process holds it. Windows and some file systems
    have no such locks; there nobody is refused.
    """
    with open(path, "a+", encoding="utf-8", errors="replace") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(refusal(file.read(100).strip())) from None
        except (ImportError, OSError):
            pass
        yield file


def writable_file(key: str, file: Path) -> Path:
    """Return the file, to append to, its folder made; refuse one that cannot be written before the work is done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"{key}={str(file)!r} cannot be written: {error.strerror}") from None
    return file


def write_atomically(path: Path, content: str | Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: a reader sees the old one or the new one, never half of it.

    `content` is the text, or a function that writes to a binary file. The folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # as DRAFT
    try:
        with open(draft, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder: a rename is only durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files, folders and devices that users name, checked before the work begins.

Importing this module does not load torch: the command line needs it before it knows whether there is anything to run.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from adlm.errors import require
from adlm.rules import Location, rules_of

if TYPE_CHECKING:
    import torch


BOX = Path(__file__).parents[1] / "box"
"""The exported folder that ships inside the package."""
BOX_NAME = "box"
"""Its name: `adlm ppl box`, `adlm.load("box")`."""
DRAFT = re.compile(r"\.(?:.+\.|writable-)(?P<pid>\d+)")
"""Name of a file while it is being written."""
KINDS = {
    str: "a text", int: "an integer", float: "a number", bool: "true or false", dict: "a table", list: "a list",
}  # fmt: skip
"""Names of JSON types, for messages."""
LARGEST_JSON = 4 * 2**20
"""Most bytes of a file of settings; real ones have a few thousand."""
MOST_VALUES = 2_500_000
"""Most values in any JSON that is read: each becomes a Python object of up to 200 bytes. The largest tokenizer in use
has two million."""


def expanded(text: str | os.PathLike[str]) -> str:
    """A path that a user wrote, with ~ replaced by the home folder."""
    place = os.path.expanduser(os.fspath(text))
    require(not place.startswith("~"), f"{place!r}: there is no such user; a folder of that name is ./{place}")
    return place


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a place is a URL of fsspec, not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", os.fspath(text)) is not None


def path_of(text: str | os.PathLike[str]) -> Path:
    return Path(expanded(text))


def absolute_paths(section: type, values: Mapping[str, Any]) -> dict[str, str]:
    """The paths among the values of a section of the schema, made absolute: a run may be read from another folder."""
    places = [name for name, rule in rules_of(section).items() if isinstance(rule, Location)]
    return {
        name: os.path.abspath(expanded(values[name]))
        for name in places
        if isinstance(values.get(name), str) and values[name] and not is_url(values[name])
    }


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first. A folder that cannot be read (such as a disk that is
    not mounted) is an error: if it counted as empty, the run would start again."""
    if not os.path.lexists(folder):
        return []
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}), so nobody knows which checkpoints it holds; make it readable,"
            " or use another out="
        ) from None
    return sorted(step for name in names if (step := step_of(name)) is not None)


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder; None for any other name."""
    return int(name[5:]) if name.startswith("step-") and name[5:].isdigit() else None


def pick_device(name: str) -> "torch.device":
    """The device for train.device: auto, cpu, cuda (the one of LOCAL_RANK), cuda:N or mps (Apple's GPUs)."""
    import torch

    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"train.device={name!r} is no device; use auto, cpu, cuda, cuda:N or mps") from None
    require(device.type != "mps" or mps, f"train.device={name!r}, but no MPS device is available; use train.device=cpu")
    if device.type == "cuda":
        require(
            torch.cuda.is_available(), f"train.device={name!r}, but no CUDA device is available; use train.device=cpu"
        )
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return device


def float64_device(device: "torch.device") -> "torch.device":
    """The device for float64 computations: the same one, or the CPU for Apple's GPUs, which have no float64."""
    import torch

    return torch.device("cpu") if device.type == "mps" else device


def writable_folder(key: str, folder: Path) -> Path:
    """Return the folder, created if necessary; refuse one that is not writable before the work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # nameless if the system can: a kill leaves nothing
        sweep(folder)
    except OSError as error:
        raise ValueError(f"{key}={str(folder)!r} is not a writable folder: {error.strerror}") from None
    return folder


def sweep(folder: Path) -> None:
    """Remove the unfinished files of killed processes from a folder (`.NAME.PID` of `write_atomically`)."""
    for path in folder.iterdir():
        if (match := DRAFT.fullmatch(path.name)) and path.is_file() and not is_running(int(match["pid"])):
            with suppress(OSError):  # another process was faster, or it is another user's file
                path.unlink()


def is_running(process: int) -> bool:
    """Whether a process with this id exists. Always true on Windows, where this check would kill the process."""
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
    """Lock a file, opened to append, for one process at a time; the system releases it when the process dies.

    `refusal`: makes the error message from the text of the file if another process holds the lock. Windows and some
    file systems have no such locks; there no process is refused.
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
    """Return a file to append to, with its folder created; refuse one that is not writable before the work begins."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise ValueError(f"{key}={str(file)!r} cannot be written: {error.strerror}") from None
    return file


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of an untrusted file: a regular one of at most `limit` bytes. A device or pipe might never end."""
    require(path.is_file(), f"{path} is missing" if not path.exists() else f"{path} is not a regular file")
    size = path.stat().st_size  # 0 for virtual files (as in /proc), of which no byte is read
    require(size <= limit, f"{path} has {size:,} bytes, at most {limit:,} are read")
    with path.open("rb") as file:
        return file.read(size)


def read_json(path: Path, limit: int = LARGEST_JSON) -> Any:
    """The JSON of an untrusted file; invalid, too large or too deep JSON is a ValueError that names the file."""
    return parse_json(read_regular(path, limit), str(path))


def parse_json(data: bytes, source: str) -> Any:
    """Parse untrusted JSON; `source` names it in messages."""
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    require(values <= MOST_VALUES, f"{source} holds about {values:,} values, at most {MOST_VALUES:,} are read")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{source} is not JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None


def check_object(found: Any, required: dict[str, type], optional: dict[str, type], source: str) -> dict[str, Any]:
    """Return untrusted JSON if it is an object whose fields have these types (float: any number). An optional field may
    be missing or null; other fields are ignored."""
    require(isinstance(found, dict), f"{source} is not a table of settings but {type(found).__name__}")
    missing = sorted(required.keys() - found.keys())
    require(not missing, f"{source} lacks {', '.join(missing)}")
    for key, kind in (required | optional).items():
        value = found.get(key)
        allowed = (int, float) if kind is float else kind
        fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        if not fits and not (key in optional and value is None):
            # large or deep values are not shown
            got = repr(value)[:60] if isinstance(value, str | int | float | None) else KINDS[type(value)]
            raise ValueError(f"{source}: {key} must be {KINDS[kind]}, got {got}")
    return found


def write_atomically(path: Path, content: str | Callable[[IO[bytes]], object]) -> None:
    """Write a file completely or not at all: a reader sees the old file or the new one, never half of it.

    `content` is the text, or a function that writes to a binary file. The folder is created if necessary.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # matches DRAFT
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
    if path.stat().st_size == 0:  # reading a virtual file may never end
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder: a rename is durable only after that. Windows cannot open folders, and needs no flush."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- processes that end together -------------------------------------------------------------------------------------
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that ends a process at once; Windows has no SIGKILL."""


def die_with_parent() -> None:
    """Let Linux kill this process when its parent is killed: otherwise it would keep its files and its GPU."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, KILL)

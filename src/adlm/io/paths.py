"""Places as users name them: files, folders and devices. Checked before the work and not after it.

Importing this module loads no torch: the command line needs it before it knows whether there is anything to run.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from adlm.errors import require

if TYPE_CHECKING:
    import torch

KINDS = {
    str: "a text", int: "an integer", float: "a number", bool: "true or false", dict: "a table", list: "a list",
}  # fmt: skip
"""Types of JSON in words."""
LARGEST_JSON = 4 * 2**20
"""Bytes of a file of settings; real ones have a few thousand."""
MOST_VALUES = 2_500_000
"""Values in any JSON that is read: Python makes an object of up to 200 bytes of each. The largest tokenizer in use has
two million."""


def expanded(text: str | os.PathLike[str]) -> str:
    """A path as a user writes it: ~ is home."""
    place = os.path.expanduser(os.fspath(text))
    require(not place.startswith("~"), f"{place!r}: there is no such user; a folder of that name is ./{place}")
    return place


def path_of(text: str | os.PathLike[str]) -> Path:
    return Path(expanded(text))


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
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{key}={str(folder)!r} is not a writable folder: {error.strerror}") from None
    return folder


def writable_file(key: str, file: Path) -> Path:
    """Return the file, to append to, its folder made; refuse one that cannot be written before the work is done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"{key}={str(file)!r} cannot be written: {error.strerror}") from None
    return file


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file from anywhere: a regular one of at most `limit` bytes. A device or pipe would never end."""
    require(path.is_file(), f"{path} is missing" if not path.exists() else f"{path} is not a regular file")
    size = path.stat().st_size  # 0 for what a system makes up while it is read, and no byte of that is
    require(size <= limit, f"{path} has {size:,} bytes, at most {limit:,} are read")
    with path.open("rb") as file:
        return file.read(size)


def read_json(path: Path, limit: int = LARGEST_JSON) -> Any:
    """The JSON in a file from anywhere; what is not JSON, too large or too deep is a ValueError that names the file."""
    return parse_json(read_regular(path, limit), str(path))


def parse_json(data: bytes, source: str) -> Any:
    """JSON from anywhere; `source`: for messages."""
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    require(values <= MOST_VALUES, f"{source} holds about {values:,} values, at most {MOST_VALUES:,} are read")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{source} is not JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None


def check_object(found: Any, required: dict[str, type], optional: dict[str, type], source: str) -> dict[str, Any]:
    """Return JSON from anywhere, if it is an object whose fields have these types (float: any number). An optional
    field may be missing or null; others are left alone."""
    require(isinstance(found, dict), f"{source} is not a table of settings but {type(found).__name__}")
    missing = sorted(required.keys() - found.keys())
    require(not missing, f"{source} lacks {', '.join(missing)}")
    for key, kind in (required | optional).items():
        value = found.get(key)
        allowed = (int, float) if kind is float else kind
        fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        if not fits and not (key in optional and value is None):
            # what is large or deep is not shown
            got = repr(value)[:60] if isinstance(value, str | int | float | None) else KINDS[type(value)]
            raise ValueError(f"{source}: {key} must be {KINDS[kind]}, got {got}")
    return found


def write_atomically(path: Path, content: str | Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: a reader sees the old one or the new one, never half of it.

    `content` is the text, or a function that writes to a binary file. The folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
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
    if path.stat().st_size == 0:  # reading what a system makes up as it is read may never end
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder: a rename is only durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Places as users name them: files, folders and devices. Checked before the work and not after it.

Importing this module loads no torch: the command line needs it before it knows whether there is anything to run.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from adlm.errors import require

if TYPE_CHECKING:
    import torch


def expanded(text: str | os.PathLike[str]) -> str:
    """A path as a user writes it: ~ is home."""
    place = os.path.expanduser(os.fspath(text))
    require(not place.startswith("~"), f"{place!r}: there is no such user; a folder of that name is ./{place}")
    return place


def path_of(text: str | os.PathLike[str]) -> Path:
    return Path(expanded(text))


def pick_device(name: str) -> "torch.device":
    """The device of train.device: auto, cpu, cuda (of this process: LOCAL_RANK), cuda:N or mps (Apple's GPUs)."""
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
    """Where the float64 numbers of a device are computed: there, or on the CPU beside Apple's GPUs, which have none."""
    import torch

    return torch.device("cpu") if device.type == "mps" else device


def writable_folder(key: str, folder: Path) -> Path:
    """Return the folder, made if need be; refuse one that cannot be written to before the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{key}={str(folder)!r} is not a writable folder: {error.strerror}") from None
    return folder


def writable_file(key: str, file: Path) -> Path:
    """Return the file, to append to, its folder made; refuse one that cannot be written before the work is done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise ValueError(f"{key}={str(file)!r} cannot be written: {error.strerror}") from None
    return file


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder: a rename is only durable once its folder is. Windows opens no folders, and needs no flush."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

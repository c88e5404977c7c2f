"""Storage of checkpoints: the manifest that makes a folder a complete checkpoint, and folders at a URL."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adlm.errors import require
from adlm.io.paths import check_object, digest, read_json, step_of, sync_folder

# ---- the manifest ----------------------------------------------------------------------------------------------------
# The manifest of a checkpoint: size and SHA-256 of every file. If it exists and agrees, the checkpoint is complete.

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
Entries = dict[str, dict[str, Any]]


def described(files: Iterable[Path]) -> Entries:
    """Flush files to the disk, and describe them: name -> size and digest."""
    found = {}
    for path in files:
        flush(path)
        found[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    return found


def flush(path: Path) -> None:
    with path.open("r+b") as file:  # Windows flushes only files opened for writing
        os.fsync(file.fileno())


def seal(folder: Path, entries: Entries | None = None) -> list[Path]:
    """Write the manifest of a folder. `entries` describe the files that hold tensors, which other ranks may have
    written. Returns the other files, the manifest last."""
    if entries is None:
        entries = described(sorted(folder.glob("__*")))
    own = [folder / METADATA, folder / STATE]
    named = dict(sorted((entries | described(own)).items()))
    (folder / MANIFEST).write_text(json.dumps(named, indent=1), encoding="utf-8")
    flush(folder / MANIFEST)
    sync_folder(folder)
    return [*own, folder / MANIFEST]


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Name of every file of a checkpoint -> its size and SHA-256."""
    entries = check_object(read_json(path), {STATE: dict, METADATA: dict}, {}, MANIFEST)
    for name, entry in entries.items():
        require("/" not in name and "\\" not in name, f"it names {name!r:.60}, which is in another folder")
        check_object(entry, {"bytes": int, "sha256": str}, {}, f"{MANIFEST}: {name:.60}")
    return entries


def problem_of(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if nothing."""
    try:
        entries = read_manifest(folder / MANIFEST)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is missing or unreadable: {error}"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if digest(path) != entry["sha256"]:
            return f"{name} has another checksum"
    return None


# ---- checkpoints at a URL --------------------------------------------------------------------------------------------
# Checkpoints at a URL of fsspec (s3://, gs://, file://, memory://), for nodes that share no disk.
#
# There, too, a checkpoint is a folder of files. An object store cannot rename, so its manifest makes it complete: it is
# written last and removed first. Every rank sends what it has written. To resume, one rank of each node fetches all
# files into a local folder, where they are checked and read like any other checkpoint.


class RemoteFolder:
    """The checkpoints below a URL."""

    def __init__(self, url: str):
        import fsspec

        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"checkpoint.url={url!r} cannot be used: {error}") from None
        self.url = url.rstrip("/")

    def path(self, step: int, *name: str) -> str:
        return "/".join((self.root.rstrip("/"), f"step-{step:08d}", *name))

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        self.files.invalidate_cache()  # other nodes write there
        try:
            names = [entry.rstrip("/").rpartition("/")[2] for entry in self.files.ls(self.root, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ValueError(f"checkpoint.url={self.url!r} cannot be read: {error}") from None
        found = [step for name in names if (step := step_of(name)) is not None]
        return sorted(step for step in found if self.files.exists(self.path(step, MANIFEST)))

    def put(self, step: int, files: Iterable[Path]) -> None:
        """Send files of a checkpoint, in this order."""
        self.files.makedirs(self.path(step), exist_ok=True)
        for file in files:
            self.files.put_file(str(file), self.path(step, file.name))

    def fetch(self, step: int, folder: Path) -> None:
        """Fetch all files of a checkpoint into a local folder, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for entry in self.files.ls(self.path(step), detail=False):
            name = entry.rstrip("/").rpartition("/")[2]
            require(name not in ("", ".", ".."), f"{self.url} holds a file without a name")
            self.files.get_file(entry, str(folder / name))

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first: without one, the rest is no checkpoint."""
        with contextlib.suppress(OSError):  # an extra checkpoint is harmless
            if self.files.exists(self.path(step, MANIFEST)):
                self.files.rm_file(self.path(step, MANIFEST))
            self.files.rm(self.path(step), recursive=True)


def remote(url: str) -> RemoteFolder | None:
    """The folder at a URL; None for an empty one."""
    return RemoteFolder(url) if url else None

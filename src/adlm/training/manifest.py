"""The manifest of a checkpoint: size and SHA-256 of every file. Where it is and agrees, the checkpoint is whole."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adlm.errors import require
from adlm.io.paths import check_object, digest, read_json, sync_folder

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
Entries = dict[str, dict[str, Any]]


def described(files: Iterable[Path]) -> Entries:
    """Push files to the disk, and say what they are: name -> size and digest."""
    found = {}
    for path in files:
        flush(path)
        found[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    return found


def flush(path: Path) -> None:
    with path.open("r+b") as file:  # Windows flushes only what may be written
        os.fsync(file.fileno())


def seal(folder: Path, entries: Entries | None = None) -> list[Path]:
    """Write the manifest of a folder. `entries`: of the files that hold tensors, where other ranks may have written
    them. Returns what is added to those, the manifest last."""
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

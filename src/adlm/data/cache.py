"""The cache folder: where it is, who may write to it, and which source files were already hashed."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from adlm.io.paths import path_of, write_atomically
from adlm.schema import DataConfig


def cache_folder(cfg: DataConfig) -> Path:
    """data.cache_dir, else $ADLM_CACHE, else ~/.cache/adlm."""
    return path_of(cfg.cache_dir or os.environ.get("ADLM_CACHE", "") or "~/.cache/adlm")


def sha256(path: Path, cache: Path) -> str:
    """Digest of a file, remembered by (path, size, time of change): hashing a large corpus takes minutes."""
    status = path.stat()
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    memory = cache / "sources.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(memory.read_text(encoding="utf-8"))
    if key not in known:
        try:
            with open(path, "rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # of the source, and no fault of the cache (`explained`)
            raise ValueError(f"cannot read {path} ({error.strerror or error})") from None
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(memory, json.dumps(known, indent=1))
    return known[key]


@contextlib.contextmanager
def locked(target: Path) -> Iterator[bool]:
    """One process at a time builds `target`; the others wait. Released by the system if the holder dies.

    False where the file system has no locks.
    """
    with open(target.with_name(target.name + ".lock"), "w") as file:
        try:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if sys.stderr.isatty():
                    print(f"waiting for another process that prepares {target.name}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone


@contextlib.contextmanager
def explained(cache: Path) -> Iterator[None]:
    """What the file system says no to, in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot write prepared data under {cache} ({reason}); choose data.cache_dir") from None

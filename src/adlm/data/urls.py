"""Corpora at URLs of fsspec (s3://, gs://, file://, memory://): fetched once into the cache, then read as files."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from adlm.errors import require
from adlm.io.paths import is_url, path_of, write_atomically

INDEX = ".index.json"
"""URL of every fetched file, by its path below the folder."""


def local_copy(text: str, cache: Path, key: str) -> Path:
    """The file or folder that a setting names: a path as it is, of a URL a copy in the cache. A file whose size has not
    changed is not fetched again."""
    if not is_url(text):
        return path_of(text)
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(text)
        found = {root: files.info(root)} if files.isfile(root) else files.find(root, detail=True)
        require(bool(found), f"{key}={text!r} holds no file")
        folder = cache / "fetched" / hashlib.sha256(text.encode()).hexdigest()[:16]
        index = {}
        for place, info in sorted(found.items()):
            name = os.path.relpath(place, root) if place != root else place.rstrip("/").rpartition("/")[2]
            target = folder / name
            require(folder in target.resolve().parents, f"{key}={text!r} names a file outside of it: {name!r}")
            index[name] = files.unstrip_protocol(place)
            if not target.is_file() or target.stat().st_size != info["size"]:
                target.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(index[name], target)
        write_atomically(folder / INDEX, json.dumps(index, indent=1))
    except (OSError, ImportError) as error:
        raise ValueError(f"{key}={text!r} cannot be fetched: {error}") from None
    return folder / next(iter(index)) if list(found) == [root] else folder


def url_of(path: Path, cache: Path) -> str:
    """Where a fetched file came from; empty for any other."""
    fetched = cache / "fetched"
    if fetched not in path.parents:
        return ""
    folder = fetched / path.relative_to(fetched).parts[0]
    return json.loads((folder / INDEX).read_text(encoding="utf-8")).get(path.relative_to(folder).as_posix(), "")


def fetch_file(url: str, target: Path) -> None:
    """Write what is at a URL to a file, whole or not at all."""
    import fsspec

    with fsspec.open(url, "rb") as source:
        write_atomically(target, lambda file: shutil.copyfileobj(source, file, 1 << 20))  # type: ignore[arg-type]

"""Checkpoints at a URL of fsspec (s3://, gs://, file://, memory://), for nodes that share no disk.

A checkpoint is a folder of files there, too. Nothing can be renamed in an object store, so what makes it complete is
its manifest, which is written last and removed first. Every rank sends what it has written; to resume, one rank of each
node fetches all files into a folder of its own, where they are checked and read like any other checkpoint.
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from adlm.errors import require
from adlm.io.paths import step_of
from adlm.training.manifest import MANIFEST


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
        """All files of a checkpoint into a local folder, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for entry in self.files.ls(self.path(step), detail=False):
            name = entry.rstrip("/").rpartition("/")[2]
            require(name not in ("", ".", ".."), f"{self.url} holds a file without a name")
            self.files.get_file(entry, str(folder / name))

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first: what is left of it is no checkpoint."""
        with contextlib.suppress(OSError):  # one too many is no failure
            if self.files.exists(self.path(step, MANIFEST)):
                self.files.rm_file(self.path(step, MANIFEST))
            self.files.rm(self.path(step), recursive=True)


def remote(url: str) -> RemoteFolder | None:
    """The folder at a URL; None for an empty one."""
    return RemoteFolder(url) if url else None

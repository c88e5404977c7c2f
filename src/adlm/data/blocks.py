"""Prepared sequences on disk: memory-mapped, checksummed, self-describing; and the cache folder that holds them.

A prepared folder holds
  rows.bin          the sequences, a matrix [n, length], uint16 where the vocabulary allows, else uint32
  lengths.npy       real tokens of each sequence, only where sequences are padded
  starts.npy        where the answer of each sequence begins, only where they are prompts with answers
  tokenizer.json    so that the folder can be copied to another machine and used alone
  manifest.json     what the sequences are, their sizes and checksums; written last
`BlockWriter` streams into a temporary folder; its caller renames the folder when it is complete.
"""

import contextlib
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.packing import PackedSequences, token_dtype
from adlm.io.paths import check_object, path_of, read_json, read_regular, write_atomically
from adlm.schema import DataConfig

FORMAT = 1
MANIFEST, LENGTHS, STARTS = "manifest.json", "lengths.npy", "starts.npy"
# rows.bin has one CRC-32 per piece of this many bytes.
PIECE_BYTES = 16 << 20
# Opening checks every piece of a file up to this size, and evenly spaced ones of a larger file: about a second.
CHECKED_BYTES = 1 << 30
# Bytes of the file of remembered digests (see `sha256`); one entry takes 150.
LARGEST_MEMORY = 64 << 20
# Fields that a manifest must have for its sequences to be read, with their types.
FIELDS = {
    "fingerprint": str, "rows": int, "length": int, "crop": int, "dtype": str, "padded": bool, "bytes": int,
    "crc32": list, "small_files": dict, "vocab_size": int, "bos_id": int, "tokenizer": dict,
    "corpus": str, "split": str, "documents": int, "tokens": int, "seconds": float,
}  # fmt: skip
# Bytes of a manifest. One checksum of at most 12 characters covers 16 MiB of sequences, so this is enough for 5 TB.
LARGEST_MANIFEST = 4 << 20


class Corrupt(Exception):
    """The folder does not agree with its manifest; the caller rebuilds it."""


class Blocks:
    """The sequences of a prepared folder, memory-mapped."""

    def __init__(self, folder: str | Path, check_all: bool = False) -> None:
        """Raise Corrupt unless sizes and checksums agree (with check_all, the checksums of every byte)."""
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = _read_manifest(self.folder)
        _check(self.folder, self.manifest, check_all)
        self.fingerprint: str = self.manifest["fingerprint"]
        self.bos_id: int = self.manifest["bos_id"]
        self.length: int = self.manifest["length"]
        """Tokens of a stored sequence."""
        self.crop: int = self.manifest["crop"]
        """Length of the random window that training takes of a sequence; 0: sequences are used whole."""
        shape = (self.manifest["rows"], self.length)
        self.tokens = np.memmap(self.folder / "rows.bin", dtype=self.manifest["dtype"], mode="r", shape=shape)
        small = {name: _read_numbers(self.folder, name, *shape) for name in self.manifest["small_files"]}
        self.lengths = small.get(LENGTHS)
        """Real tokens of each sequence; None: all are full."""
        self.starts = small.get(STARTS)
        """Where the answer of each sequence begins; None: there are no prompts."""

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __getitem__(self, index: int) -> np.ndarray:
        """Sequence `index`, as stored."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.tokens[index]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Sequences [n, length] as int64, ready to become a tensor."""
        found = np.asarray(self.tokens[indices], dtype=np.int64)
        if found.size and found.max() >= self.manifest["vocab_size"]:  # opening checks a large file only in part
            raise ValueError(f"{self.folder / 'rows.bin'} is corrupt: {_beyond(int(found.max()), self.manifest)}")
        return found

    def attention_masks(self, indices: np.ndarray) -> np.ndarray | None:
        """[n, length], True at real tokens; None when no sequence is padded."""
        if self.lengths is None:
            return None
        return np.arange(self.length)[None, :] < self.lengths[indices][:, None]

    def prompts(self, indices: np.ndarray) -> np.ndarray | None:
        """[n, length], True at the positions before an answer; None when sequences are learned as a whole."""
        if self.starts is None:
            return None
        return np.arange(self.length)[None, :] < self.starts[indices][:, None]

    def __repr__(self) -> str:
        return f"Blocks({self.folder.name}, sequences={len(self):,}, length={self.length})"


class BlockWriter:
    """Write sequences as they arrive, with their checksums and statistics."""

    def __init__(self, folder: Path, length: int, vocab_size: int, max_sequences: int = 0) -> None:
        self.folder, self.length, self.max_sequences = folder, length, max_sequences
        self.dtype = token_dtype(vocab_size)
        self.written = self.real_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._crcs: list[int] = []
        self._crc, self._in_piece, self.bytes = 0, 0, 0
        self._file = open(folder / "rows.bin", "wb")  # noqa: SIM115 (closed by finish)

    def write(self, packed: PackedSequences) -> None:
        """Append sequences, up to max_sequences in all."""
        room = self.max_sequences - self.written if self.max_sequences else len(packed.tokens)
        tokens = np.ascontiguousarray(packed.tokens[:room], dtype=self.dtype)
        if not tokens.size:
            return
        if packed.lengths is not None:
            self._lengths.append(packed.lengths[:room].astype(np.uint32))
        if packed.starts is not None:
            self._starts.append(packed.starts[:room].astype(np.uint32))
        self.real_tokens += tokens.size if packed.lengths is None else int(self._lengths[-1].sum())
        self.written += len(tokens)
        data = tokens.data.cast("B")
        self._file.write(data)
        self.bytes += len(data)
        while len(data):
            part, data = data[: PIECE_BYTES - self._in_piece], data[PIECE_BYTES - self._in_piece :]
            self._crc = zlib.crc32(part, self._crc)
            self._in_piece += len(part)
            if self._in_piece == PIECE_BYTES:
                self._crcs.append(self._crc)
                self._crc = self._in_piece = 0

    @property
    def full(self) -> bool:
        return bool(self.max_sequences) and self.written >= self.max_sequences

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write everything to disk, the manifest last."""
        if self._in_piece:
            self._crcs.append(self._crc)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        small = {name: parts for name, parts in ((LENGTHS, self._lengths), (STARTS, self._starts)) if parts}
        for name, parts in small.items():
            np.save(self.folder / name, np.concatenate(parts))
        manifest = {
            "format": FORMAT,
            **manifest,
            "rows": self.written,
            "length": self.length,
            "dtype": self.dtype.name,
            "padded": LENGTHS in small,
            "row_tokens": self.real_tokens,
            "bytes": self.bytes,
            "crc32": self._crcs,
            "small_files": {name: _crc_of(self.folder / name) for name in small},
        }
        write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")

    def close(self) -> None:
        self._file.close()


def is_prepared(folder: Path) -> bool:
    """Whether the folder claims to hold prepared sequences."""
    return (folder / MANIFEST).is_file()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if its fields have the right types and its numbers agree with each other."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path, LARGEST_MANIFEST)
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Corrupt(f"{path} is not of format {FORMAT}")
    try:
        check_object(manifest, FIELDS, {}, str(path))
        check_object(manifest["tokenizer"], {"name": str, "fingerprint": str}, {}, f"{path}: tokenizer")
    except ValueError as error:
        raise Corrupt(str(error)) from None
    m = manifest
    small = {LENGTHS} if m["padded"] else set()
    if not (
        m["rows"] >= 1
        and m["length"] >= 1
        and 0 <= m["crop"] <= m["length"]
        and m["vocab_size"] >= 1
        and 0 <= m["bos_id"] < m["vocab_size"]
        and m["dtype"] == token_dtype(m["vocab_size"]).name
        and m["bytes"] == m["rows"] * m["length"] * np.dtype(m["dtype"]).itemsize
        and len(m["crc32"]) == -(-m["bytes"] // PIECE_BYTES)
        and m["small_files"].keys() - {STARTS} == small
    ):
        raise Corrupt(f"{path} does not describe a matrix of sequences: its numbers do not agree")
    return manifest


def _read_numbers(folder: Path, name: str, rows: int, length: int) -> np.ndarray:
    """One number for each sequence: how many real tokens it has, or where its answer begins."""
    try:
        numbers = np.load(folder / name, mmap_mode="r")  # a header that claims more than the file is refused
    except (ValueError, OSError, EOFError) as error:
        raise Corrupt(f"{folder / name} cannot be read ({str(error)[:200]})") from None
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() > length:
        raise Corrupt(f"{folder / name} does not hold the {name.partition('.')[0]} of {rows} sequences of {length}")
    return np.array(numbers)


def _beyond(token: int, manifest: dict[str, Any]) -> str:
    return f"token {token} is beyond the vocabulary of {manifest['vocab_size']}"


def _check(folder: Path, manifest: dict[str, Any], check_all: bool) -> None:
    path = folder / "rows.bin"
    size = path.stat().st_size if path.is_file() else -1
    if size != manifest["bytes"]:
        raise Corrupt(f"{path} has {size} bytes, its manifest says {manifest['bytes']}")
    crcs = manifest["crc32"]
    step = 1 if check_all else max(1, -(-len(crcs) * PIECE_BYTES // CHECKED_BYTES))
    with open(path, "rb") as file:
        for piece in range(0, len(crcs), step):
            file.seek(piece * PIECE_BYTES)
            data = file.read(PIECE_BYTES)
            if zlib.crc32(data) != crcs[piece]:
                raise Corrupt(f"{path} is corrupt between bytes {piece * PIECE_BYTES} and {(piece + 1) * PIECE_BYTES}")
            highest = int(np.frombuffer(data, dtype=manifest["dtype"]).max())
            if highest >= manifest["vocab_size"]:
                raise Corrupt(f"{path}: {_beyond(highest, manifest)}")
    largest = 8 * manifest["rows"] + 4096
    for name, crc in manifest["small_files"].items():
        if not (folder / name).is_file() or _crc_of(folder / name, largest) != crc:
            raise Corrupt(f"{folder / name} is missing or corrupt")


def _crc_of(path: Path, largest: int = sys.maxsize) -> int | None:
    """The checksum of a small file; None if it is larger than `largest`."""
    return zlib.crc32(read_regular(path, largest)) if path.stat().st_size <= largest else None


# ---- the cache folder -----------------------------------------------------------------------------------------------


def cache_folder(cfg: DataConfig) -> Path:
    """data.cache_dir, else $ADLM_CACHE, else ~/.cache/adlm."""
    return path_of(cfg.cache_dir or os.environ.get("ADLM_CACHE", "") or "~/.cache/adlm")


def sha256(paths: Sequence[Path], cache: Path) -> list[str]:
    """Digests of files, remembered by (path, size, modification time): hashing a large corpus takes minutes. The file
    of digests is written once, also if hashing is interrupted, since a corpus may have many thousand files."""
    memory = cache / "sources.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        found = read_json(memory, LARGEST_MEMORY)
        known = {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    before, keys = len(known), []
    try:
        for path in paths:
            status = path.stat()
            key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
            if key not in known:
                known[key] = _digest(path)
            keys.append(key)
    finally:
        if len(known) > before:
            write_atomically(memory, json.dumps(known, indent=1))
    return [known[key] for key in keys]


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # an error of the source, not of the cache (`cache_errors`)
        raise ValueError(f"cannot read {path} ({error.strerror or error})") from None


@contextlib.contextmanager
def locked(target: Path) -> Iterator[bool]:
    """Let one process at a time build `target`; the others wait. The system releases the lock if its holder dies.

    Yields False where the file system has no locks.
    """
    with open(target.with_name(target.name + ".lock"), "w", encoding="utf-8") as file:
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
def cache_errors(cache: Path) -> Iterator[None]:
    """Turn an error of the file system under `cache` into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot write prepared data under {cache} ({reason}); choose data.cache_dir") from None

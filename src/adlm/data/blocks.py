"""Prepared rows on disk: memory-mapped, checksummed, self-describing.

A folder holds
  rows.bin          the rows [n, length], uint16 where the vocabulary allows, else uint32
  lengths.npy       real tokens of each row, only where rows are padded
  frequencies.npy   how often each id occurs in the rows (padding not counted), for the `rarity` anchor rule
  tokenizer.json    so that the folder can be copied to another machine and used alone
  manifest.json     what the rows are, their sizes and checksums; written last
`RowWriter` streams into a folder that nobody reads yet; whoever calls it renames the folder when it is complete.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.packing import Rows
from adlm.io.paths import write_atomically

FORMAT = 1
MANIFEST = "manifest.json"
# rows.bin has one CRC-32 per piece of this many bytes.
PIECE_BYTES = 16 << 20
# Opening checks every piece of a file up to this size, and evenly spaced ones of a larger file: about a second.
CHECKED_BYTES = 1 << 30


class Damaged(Exception):
    """The folder is not what its manifest says; the caller rebuilds it."""


def row_dtype(vocab_size: int) -> np.dtype:
    """The smallest storage for ids below vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Blocks:
    """Rows of a prepared folder, read where they lie."""

    def __init__(self, folder: str | Path, check_all: bool = False) -> None:
        """Raises Damaged unless sizes and checksums agree (of every byte, with check_all)."""
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = _read_manifest(self.folder)
        _check(self.folder, self.manifest, check_all)
        shape = (self.manifest["rows"], self.manifest["length"])
        self.tokens = np.memmap(self.folder / "rows.bin", dtype=self.manifest["dtype"], mode="r", shape=shape)
        self.lengths: np.ndarray | None = np.load(self.folder / "lengths.npy") if self.manifest["padded"] else None

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def length(self) -> int:
        """Tokens of a stored row."""
        return self.manifest["length"]

    @property
    def crop(self) -> int:
        """Length of the window that training cuts from a row at random; 0: rows are used whole."""
        return self.manifest["crop"]

    @property
    def bos_id(self) -> int:
        return self.manifest["bos_id"]

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`, as stored."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.tokens[index]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Rows [n, length] as int64, ready to become a tensor."""
        return np.asarray(self.tokens[indices], dtype=np.int64)

    def attention_masks(self, indices: np.ndarray) -> np.ndarray | None:
        """[n, length], True at real tokens; None when no row is padded."""
        if self.lengths is None:
            return None
        return np.arange(self.length)[None, :] < self.lengths[indices][:, None]

    def frequencies(self) -> np.ndarray:
        """Occurrences of each id in these rows [vocab_size], int64."""
        return np.load(self.folder / "frequencies.npy")

    def __repr__(self) -> str:
        return f"Blocks({self.folder.name}, rows={len(self):,}, length={self.length})"


class RowWriter:
    """Rows, their checksums and their statistics, written as they come."""

    def __init__(self, folder: Path, length: int, vocab_size: int, max_sequences: int = 0) -> None:
        self.folder, self.length, self.max_sequences = folder, length, max_sequences
        self.dtype = row_dtype(vocab_size)
        self.frequencies = np.zeros(vocab_size, dtype=np.int64)
        self.rows = 0
        self._lengths: list[np.ndarray] = []
        self._crcs: list[int] = []
        self._crc, self._in_piece, self.bytes = 0, 0, 0
        self._file = open(folder / "rows.bin", "wb")  # noqa: SIM115 (closed by finish)

    def write(self, rows: Rows) -> None:
        """Append rows, up to max_sequences in all."""
        room = self.max_sequences - self.rows if self.max_sequences else len(rows.tokens)
        tokens = np.ascontiguousarray(rows.tokens[:room], dtype=self.dtype)
        if not tokens.size:
            return
        real = tokens.ravel()
        if rows.lengths is not None:
            lengths = rows.lengths[:room].astype(np.uint32)
            self._lengths.append(lengths)
            real = tokens[np.arange(self.length)[None, :] < lengths[:, None]]
        self.frequencies += np.bincount(real, minlength=len(self.frequencies))
        self.rows += len(tokens)
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
        return bool(self.max_sequences) and self.rows >= self.max_sequences

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write everything to disk, the manifest last."""
        if self._in_piece:
            self._crcs.append(self._crc)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        small = {"frequencies.npy": self.frequencies}
        if self._lengths:
            small["lengths.npy"] = np.concatenate(self._lengths)
        for name, array in small.items():
            np.save(self.folder / name, array)
        padded = bool(self._lengths)
        manifest = {
            "format": FORMAT,
            **manifest,
            "rows": self.rows,
            "length": self.length,
            "dtype": self.dtype.name,
            "padded": padded,
            "row_tokens": int(self.frequencies.sum()),
            "bytes": self.bytes,
            "crc32": self._crcs,
            "small_files": {name: _crc_of(self.folder / name) for name in small},
        }
        write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")

    def close(self) -> None:
        self._file.close()


def is_prepared(folder: Path) -> bool:
    """Whether the folder claims to hold prepared rows."""
    return (folder / MANIFEST).is_file()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"{folder / MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged(f"{folder / MANIFEST} is not of format {FORMAT}")
    return manifest


def _check(folder: Path, manifest: dict[str, Any], check_all: bool) -> None:
    path = folder / "rows.bin"
    size = path.stat().st_size if path.is_file() else -1
    if size != manifest["bytes"]:
        raise Damaged(f"{path} has {size} bytes, its manifest says {manifest['bytes']}")
    crcs = manifest["crc32"]
    step = 1 if check_all else max(1, -(-len(crcs) * PIECE_BYTES // CHECKED_BYTES))
    with open(path, "rb") as file:
        for piece in range(0, len(crcs), step):
            file.seek(piece * PIECE_BYTES)
            if zlib.crc32(file.read(PIECE_BYTES)) != crcs[piece]:
                raise Damaged(f"{path} is damaged between bytes {piece * PIECE_BYTES} and {(piece + 1) * PIECE_BYTES}")
    for name, crc in manifest["small_files"].items():
        if not (folder / name).is_file() or _crc_of(folder / name) != crc:
            raise Damaged(f"{folder / name} is missing or damaged")


def _crc_of(path: Path) -> int:
    return zlib.crc32(path.read_bytes())

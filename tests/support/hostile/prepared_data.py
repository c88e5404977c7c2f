"""Prepared data whose manifest, rows, lengths or tokenizer are not what they should be."""

import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runs import overrides

from hostile.cases import Call, base, cases, touch
from hostile.tokenizer_files import TOKENIZERS, tokenizer_json


def prepared(folder: Path) -> tuple[Path, list[str]]:
    place = shutil.copytree(base().prepare(), folder / "prepared")
    data = {"data": "prepared", "data.path": place, "data.valid_path": place, "out": folder / "run"}
    line = [word for word in overrides(base().folder) if not word.startswith(("data", "out="))]
    return place, ["train", *line, *(f"{key}={value}" for key, value in data.items()), "train.device=cpu"]


def prepared_with(folder: Path, change: Callable[[dict[str, Any], Path], Any]) -> list[str]:
    place, line = prepared(folder)
    manifest = json.loads((place / "manifest.json").read_text())
    found = change(manifest, place)
    (place / "manifest.json").write_text(found if isinstance(found, str) else json.dumps(manifest))
    return line


def lengths(data: bytes) -> Callable[[dict[str, Any], Path], None]:
    def change(manifest: dict[str, Any], place: Path) -> None:
        (place / "lengths.npy").write_bytes(data)
        manifest["small_files"]["lengths.npy"] = zlib.crc32(data)

    return change


def beyond(manifest: dict[str, Any], place: Path) -> None:
    rows = np.fromfile(place / "rows.bin", dtype=np.uint16)
    rows[7] = 60_000
    rows.tofile(place / "rows.bin")
    manifest["crc32"] = [zlib.crc32(rows.tobytes())]


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def lying_npy(shape: str) -> bytes:
    text = f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({shape},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def update(**values: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda manifest, place: manifest.update(values)


def without(key: str) -> Callable[[dict[str, Any], Path], Any]:
    return lambda manifest, place: manifest.pop(key)


cases("prepared", {
    "a list": lambda manifest, place: "[1]",
    "deep": lambda manifest, place: "[" * 100_000,
    "not JSON": lambda manifest, place: "{",
    "5 MB": lambda manifest, place: " " * 5_000_000,
    **{f"no {key}": without(key) for key in ("rows", "dtype", "bytes", "crc32", "small_files", "tokenizer", "padded")},
    "rows -1": update(rows=-1),
    "rows 10^15": update(rows=10**15),
    "rows as a text": update(rows="8"),
    "length 0": update(length=0),
    "crop 10^9": update(crop=10**9),
    "dtype object": update(dtype="object"),
    "dtype O8 of a pickle": update(dtype="|O"),
    "bytes 0": update(bytes=0),
    "no checksums": update(crc32=[]),
    "checksums that are texts": update(crc32=["x"]),
    "a small file outside": update(small_files={"../../x": 1}),
    "small files as a list": update(small_files=[1]),
    "a vocabulary of 10": update(vocab_size=10),
    "a vocabulary of 10^12": update(vocab_size=10**12),
    "bos_id -1": update(bos_id=-1),
    "a tokenizer that is a text": update(tokenizer="bytes"),
    "another tokenizer": update(tokenizer={"name": "x", "fingerprint": "y"}),
    "ids beyond the vocabulary": beyond,
    "lengths with a pickle": lambda manifest, place: lengths(
        npy(np.array([Call(os.system, touch(place.parent))] * 8, dtype=object), allow_pickle=True))(manifest, place),
    "lengths that claim 4 TB": lengths(lying_npy("10**12".replace("10**12", str(10**12)))),
    "lengths of code": lengths(lying_npy("__import__('os').getcwd()")),
    "lengths beyond the sequence": lengths(npy(np.full(8, 10**6, dtype=np.uint32))),
    "lengths of one sequence": lengths(npy(np.zeros(1, dtype=np.uint32))),
    "lengths that are numbers with a point": lengths(npy(np.zeros(8))),
    "no lengths": lambda manifest, place: (place / "lengths.npy").unlink(),
    "a tokenizer.json of 40 doublings": lambda manifest, place: (place / "tokenizer.json").write_text(
        tokenizer_json(**TOKENIZERS["40 doublings"])) and None,
    "a tokenizer.json of 4 billion ids": lambda manifest, place: (place / "tokenizer.json").write_text(
        tokenizer_json(**TOKENIZERS["an id of 4 billion"])) and None,
}, prepared_with)  # fmt: skip

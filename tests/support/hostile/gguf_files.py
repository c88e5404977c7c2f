"""GGUF files without ends, with lists in lists, or with what they should not hold."""

import struct
from pathlib import Path

from hostile.cases import cases, sample

NUMBER, TEXT, LIST, WHOLE = 0, 8, 9, 4


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_value(name: bytes, kind: int, value: bytes) -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + value


def gguf_list(name: bytes, kind: int, number: int, items: bytes) -> bytes:
    return gguf_value(b"tokenizer.ggml." + name, LIST, struct.pack("<IQ", kind, number) + items)


def gguf_file(values: list[bytes], tensors: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    about = [
        gguf_value(b"general.architecture", TEXT, gguf_text(b"llama")),
        gguf_value(b"tokenizer.ggml.model", TEXT, gguf_text(b"gpt2")),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(about) + len(values))
    head += b"".join([*about, *values, *tensors])
    return head + bytes(-len(head) % 32) + data


def gguf_tensor(name: bytes, size: int, offset: int) -> bytes:
    return gguf_text(name) + struct.pack("<IQIQ", 1, size, 0, offset)


def gguf_with(folder: Path, data: bytes) -> list[str]:
    (folder / "model.gguf").write_bytes(data)
    return sample(folder / "model.gguf")


TOKENS = gguf_list(b"tokens", TEXT, 2, gguf_text(b"a") + gguf_text(b"b"))
cases("gguf", {
    "empty": b"",
    "another magic": b"GGML" + bytes(60),
    "values without an end": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "a list without an end": gguf_file([gguf_list(b"scores", NUMBER, 2**45, b"")]),
    "a list of texts without an end": gguf_file([gguf_list(b"tokens", TEXT, 2**45, gguf_text(b"a"))]),
    "a text of 2^63 bytes": gguf_file([gguf_value(b"a", TEXT, struct.pack("<Q", 2**63))]),
    "lists in lists": gguf_file([gguf_value(b"a", LIST, struct.pack("<IQ", LIST, 1) * 5000)]),
    "more types than tokens": gguf_file([TOKENS, gguf_list(b"token_type", WHOLE, 3, struct.pack("<3I", 1, 1, 3))]),
    "tokens that are numbers": gguf_file([gguf_list(b"tokens", WHOLE, 2, bytes(8))]),
    "tokens that are one number": gguf_file([gguf_value(b"tokenizer.ggml.tokens", WHOLE, bytes(4))]),
    "merges that are numbers": gguf_file([TOKENS, gguf_list(b"merges", WHOLE, 2, bytes(8))]),
    "one place for two": gguf_file(
        [TOKENS], [gguf_tensor(b"output.weight", 9000, 0), gguf_tensor(b"output_norm.weight", 9000, 0)], bytes(36_000)
    ),
}, gguf_with)  # fmt: skip
cases("gguf", {"ten million numbers": gguf_file([gguf_list(b"scores", NUMBER, 10**7, bytes(10**7))])}, gguf_with, True)

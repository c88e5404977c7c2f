"""Files of a tokenizer that grow, recurse or lie."""

import json
from pathlib import Path
from typing import Any

import torch

from adlm.data.tokenizers import raw_bytes
from hostile.cases import base, case, cases, sample
from hostile.exported_folders import exported


@case("ckpt: a tokenizer that explodes")
def _(folder: Path) -> list[str]:
    tree = torch.load(base().release, weights_only=True)
    path = folder / "bad.ckpt"
    torch.save(tree, path)
    return [*sample(path), f"data.tokenizer={tokenizer_file(folder, normalizer=replacing('a', 'a' * 1000))}"]


def tokenizer_json(**changes: Any) -> str:
    return json.dumps(json.loads(raw_bytes().backend.to_str()) | changes)


def tokenizer_file(folder: Path, **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer_json(**changes))
    return folder / "tokenizer.json"


def tokenizer_with(folder: Path, changes: dict[str, Any] | str) -> list[str]:
    model = exported(folder)
    (model / "tokenizer.json").write_text(changes if isinstance(changes, str) else tokenizer_json(**changes))
    return [*sample(model), "sampling.prompt=aaaa aaaa"]


def replacing(pattern: Any, content: Any) -> dict[str, Any]:
    pattern = {"String": pattern} if isinstance(pattern, str) else pattern
    return {"type": "Replace", "pattern": pattern, "content": content}


def split_at(regex: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}}


def all_of(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def deep_normalizer(levels: int) -> Any:
    found: Any = {"type": "NFC"}
    for _ in range(levels):
        found = all_of(found)
    return found


VOCAB = {chr(97 + i): i for i in range(26)}
A = {"Sequence": {"id": "A", "type_id": 0}}
TOKENIZERS: dict[str, Any] = {
    "a list": "[]",
    "{}": "{}",
    "empty": "",
    "deep": "[" * 100_000,
    "a normalizer that is a list": {"normalizer": [1]},
    "a replacement of 100 kB": {"normalizer": replacing("a", "a" * 100_000)},
    "40 doublings": {"normalizer": all_of(*[replacing("a", "aa")] * 40)},
    "a thousand replacements": {"normalizer": all_of(*[replacing("a", "b")] * 1000)},
    "a replacement of nothing": {"normalizer": replacing("", "x")},
    "a replacement by a number": {"normalizer": replacing("a", 5)},
    "a replacement of any place": {"normalizer": replacing({"Regex": ""}, "x" * 10)},
    "a prefix of 1 MB": {"normalizer": {"type": "Prepend", "prepend": "x" * 2**20}},
    "normalizers 90 deep": {"normalizer": deep_normalizer(90)},
    "a precompiled map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "a regex that does not end": split_at("(a+)+$"),
    "a regex of references": split_at(r"(a*)\1*b"),
    "a regex of many repetitions": split_at("a*a*a*a*a*a*b"),
    "a regex that is broken": split_at("(("),
    "a regex that is a list": split_at([1]),
    "a regex of 1 MB": split_at("a" * 2**20),
    "windows of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an unknown pre-tokenizer": {"pre_tokenizer": {"type": "os.system"}},
    "a text given a thousand times": {
        "post_processor": {"type": "TemplateProcessing", "single": [A] * 1000, "pair": [A, A], "special_tokens": {}}
    },
    "a text given never": {
        "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [A, A], "special_tokens": {}}
    },
    "a decoder that strips 10^9": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
    "a decoder that grows": {"decoder": replacing("a", "a" * 1000)},
    "a decoder for speech": {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
    "added tokens that are a number": {"added_tokens": 5},
    "added tokens that are numbers": {"added_tokens": [1, 2]},
    "an added token of 10 kB": {"added_tokens": [{"id": 256, "content": "x" * 10_000}]},
    "no model": {"model": None},
    "a second normalizer": tokenizer_json(normalizer=None)
    .replace('"normalizer": null', '"normalizer": {"type": "Prepend", "prepend": "' + "x" * 1000 + '"}')
    .replace("{", '{"normalizer": {"type": "NFC"}, ', 1),
    "a replacement under another name": {"normalizer": replacing("a", "a" * 1000) | {"type": "NFC"}},
    "words of any length": {"model": {"type": "WordPiece", "vocab": VOCAB, "max_input_chars_per_word": 10**9}},
    "an unknown model": {"model": {"type": "Pickle", "vocab": {}}},
    "a merge of nothing": {"model": {"type": "BPE", "vocab": VOCAB, "merges": [["q", "zz"]]}},
    "an id of 4 billion": {"model": {"type": "BPE", "vocab": VOCAB | {"zz": 2**32 - 5}, "merges": []}},
    "an id of -1": {"model": {"type": "BPE", "vocab": VOCAB | {"zz": -1}, "merges": []}},
    "an unknown token that is unknown": {"model": {"type": "WordLevel", "vocab": VOCAB, "unk_token": "[UNK]"}},
    "another vocabulary": {"model": {"type": "BPE", "vocab": VOCAB, "merges": []}},
}
cases("tokenizer", TOKENIZERS, tokenizer_with)


@case("tokenizer: three million values", heavy=True)
def _(folder: Path) -> list[str]:
    return tokenizer_with(folder, "[" + "[]," * 3_000_000 + "0]")


@case("tokenizer: 70 MB", heavy=True)
def _(folder: Path) -> list[str]:
    return tokenizer_with(folder, '{"a": "' + "x" * 70_000_000 + '"}')

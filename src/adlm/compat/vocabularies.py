"""Byte-level BPE of released models, where there is no tokenizer.json: from a GGUF file, or from vocab.json, merges.txt
and tokenizer_config.json (Dream). They differ in how a text is divided into words."""

import json
from pathlib import Path
from typing import Any

from adlm.data.tokenizers import LARGEST_FILE, Tokenizer, tokenizer_from
from adlm.errors import require
from adlm.io.paths import check_object, read_json, read_regular

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def words(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "default": [BYTES],
    "gpt-2": [BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "llama-bpe": words(LLAMA3_WORDS),
    "qwen2": words(QWEN2_WORDS),
}
"""How a text is divided into words, by llama.cpp's name of it."""


def byte_level_bpe(
    vocab: dict[str, int], merges: list[list[str]], special: dict[int, str], pre: str, name: str, source: str
) -> Tokenizer:
    """A tokenizer from its parts. `special`: tokens that text never becomes, by id; `pre`: one of PRE_TOKENIZERS."""
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    described = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **plain} for i, token in sorted(special.items())],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return tokenizer_from(json.dumps(described).encode(), name, source)


def tokenizer_of_files(folder: Path, pre: str) -> Tokenizer:
    """The tokenizer of vocab.json and merges.txt, with the special tokens of tokenizer_config.json."""
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        require((folder / file).is_file(), f"{folder} holds neither tokenizer.json nor {file}: put one of them there")
    vocab = check_object(read_json(folder / "vocab.json", LARGEST_FILE), {}, {}, str(folder / "vocab.json"))
    lines = read_regular(folder / "merges.txt", LARGEST_FILE).decode("utf-8", "replace").split("\n")
    merges = [line.split(" ", 1) for line in lines if line and not line.startswith("#version")]
    source = str(folder / "tokenizer_config.json")
    config = check_object(read_json(folder / "tokenizer_config.json"), {"added_tokens_decoder": dict}, {}, source)
    special = {
        int(i): str(token["content"])
        for i, token in config["added_tokens_decoder"].items()
        if str(i).isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    return byte_level_bpe(vocab, merges, special, pre, folder.name, f"the tokenizer in {folder}")

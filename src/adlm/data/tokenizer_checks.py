"""Checks of an untrusted tokenizer.json: its parts must not make a small text large or a short search long."""

import re
from collections.abc import Iterator
from typing import Any

from adlm.errors import choose, require

PARTS = {
    "normalizer": ("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "ByteLevel",
                   "BertNormalizer", "Prepend", "Replace"),
    "pre_tokenizer": ("Sequence", "ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace",
                      "Punctuation", "Digits", "CharDelimiterSplit", "UnicodeScripts", "Split"),
    "post_processor": ("Sequence", "ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing"),
    "decoder": ("Sequence", "ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "Fuse", "ByteFallback", "Replace",
                "Strip"),
}  # fmt: skip
"""Parts of a tokenizer.json that are accepted. The others can make a text arbitrarily longer, can panic, or are for
speech."""
LONGEST_GROWTH = 8
"""The factor by which all replacements of a normalizer or decoder together may lengthen a text."""


def check_part(found: Any, part: str, source: str) -> None:
    """Refuse a part of a tokenizer.json that can make a small text large or a short search long."""
    wrong, growth = f"{source}: {part} ", 1.0
    steps = list(_steps(found, wrong))
    require(len(steps) <= 100, f"{wrong}has {len(steps)} steps")
    for step in steps:
        texts = [step.get(key, "") for key in ("type", "prepend", "content")]
        require(all(isinstance(text, str) for text in texts), f"{wrong}has a type, prepend or content that is no text")
        choose(wrong.strip(), texts[0], PARTS[part])
        require("precompiled_charsmap" not in step, f"{wrong}has a map of its own")
        require(len(texts[1]) <= 16, f"{wrong}puts a long text before every text")
        # Checked by its fields: the library does not always look at the type.
        if "pattern" in step:
            shortest = _shortest_match(step["pattern"], wrong)
            growth *= max(1.0, len(texts[2]) / shortest if shortest else 1.0 + len(texts[2]))
        if "single" in step:
            pieces = step["single"] if isinstance(step["single"], list) else []
            given = [piece for piece in pieces if isinstance(piece, dict) and "Sequence" in piece]
            require(len(given) == 1 and len(pieces) <= 16, f"{wrong}does not give a text once")
        if "stop" in step or "start" in step:
            require(step.get("stop") == 0 and step.get("start") in range(17), f"{wrong}strips more than it can")
    require(growth <= LONGEST_GROWTH, f"{wrong}makes a text up to {growth:.3g} times longer, at most {LONGEST_GROWTH}")


def _shortest_match(pattern: Any, wrong: str) -> int:
    """The fewest characters that a pattern can match: the length of a string, 0 for a regular expression."""
    found = pattern if isinstance(pattern, dict) else {"String": pattern}
    if "Regex" in found:
        check_regex(found["Regex"], wrong)
        return 0
    text = found.get("String")
    if not isinstance(text, str) or not text:
        raise ValueError(f"{wrong}has a pattern that is empty")
    return len(text)


def _steps(found: Any, wrong: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer.json and, recursively, the steps of its sequences."""
    if found is None:
        return
    require(isinstance(found, dict) and depth < 8, f"{wrong}is not a step or sequence of steps")
    yield found
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = found.get(key, [])
        require(isinstance(inner, list), f"{wrong}is not a sequence of steps")
        for step in inner:
            yield from _steps(step, wrong, depth + 1)


def check_regex(pattern: Any, wrong: str) -> None:
    """Refuse a regular expression whose search may take very long: one with a repeated group, a backreference, or more
    than two open repetitions in a row. The patterns of GPT-2, GPT-4, Llama 3 and Qwen have none of these."""
    require(isinstance(pattern, str) and len(pattern) <= 4000, f"{wrong}has no usable regular expression")
    require(re.search(r"\\[1-9kgXR]|\(\?[R0-9&~(]|\(\?P[>=]", pattern) is None, f"{wrong}refers to what it found")
    bare = re.sub(r"\\[pP]\{[^}]*\}|\\.", "a", pattern)
    while (shorter := re.sub(r"\[[^\[\]]*\]", "a", bare)) != bare:
        bare = shorter
    require(re.search(r"\)\s*[*+{]", bare) is None, f"{wrong}repeats a group of a regular expression")
    most = max(len(re.findall(r"[*+]+|\{\d*,?\d{2,}\}|\{\d+,\}", part)) for part in bare.split("|"))
    require(most <= 2, f"{wrong}has {most} repetitions in a row in a regular expression, at most 2")

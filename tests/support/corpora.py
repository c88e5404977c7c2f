"""A small corpus in a file, and what is said when it cannot be prepared."""

import json
from pathlib import Path

import pytest

from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes
from adlm.schema import DataConfig

BYTES = raw_bytes()


def corpus(path: Path, n: int = 40) -> Path:
    lines = (json.dumps({"text": f"Document number {i}. " + "é" * (i % 7)}) for i in range(n))
    path.write_text("\n".join(lines) + "\n")
    return path


def texts(cfg: DataConfig) -> list[str]:
    return [json.loads(line)["text"] for line in Path(cfg.path).read_text().splitlines()]


def refusal(cfg, tokenizer=BYTES, length=32, split="train"):
    with pytest.raises(ValueError) as error:
        prepare(cfg, tokenizer, length, split)
    assert "\n" not in str(error.value)
    return str(error.value)

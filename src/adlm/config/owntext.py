"""Settings for a user's own text: a vocabulary, a model and a run that fit the size of the text and the machine.

    adlm train my.txt     # data=file data.path=my.txt, our recipe, and the choices of the functions below

The choices come in three steps, each based on the one before: the shape of the model (`shape`), the length of the run
(`run_length`), and settings that follow from the length (`schedule`). Typed settings override every choice, and later
choices take them into account. Rates are those of experiment/demo.yaml (128 wide) and of docs/training.md (wider).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.data import formats
from adlm.io.paths import path_of
from adlm.schema import Config, DataConfig

# Bytes of text per byte of the file, for compressed files and columns of parquet.
EXPANSION = {".gz": 3.0, ".xz": 4.0, ".bz2": 4.0, ".parquet": 2.0}
EPOCHS = 40
"""The most times that a run reads the text."""


@dataclass(frozen=True)
class TextSize:
    """A model and its learning rates, for texts up to some size."""

    text_bytes: float
    """Largest text for this model."""
    hidden_size: int
    n_heads: int
    n_blocks: int
    length: int
    batch: int
    """Sequences per optimizer step."""
    tokens: int
    """The most tokens that a run reads: minutes on a CPU, up to half an hour on a GPU."""
    lr: float
    muon_lr: float
    vocabulary: int
    """Largest vocabulary."""


ON_A_CPU = {
    # every masked token is an anchor: with a small vocabulary this costs little (experiment/demo.yaml)
    "objective.anchor_fraction": 1.0,
    # first next-token prediction (docs/results.md, a causal start), then anchors for as long as in recipe=quick
    "objective.causal_until": 0.2,
    "objective.gamma_until": 0.4,
}
"""Settings that were only measured for small models."""
SHAPES = {
    "cpu": (
        TextSize(4e6, 128, 4, 2, 128, 16, 1_600_000, 5e-3, 1e-2, 4096),
        TextSize(float("inf"), 256, 4, 4, 128, 16, 3_000_000, 2e-3, 6e-3, 8192),
    ),
    "cuda": (
        TextSize(1e6, 256, 4, 4, 256, 16, 16_000_000, 2e-3, 6e-3, 4096),
        TextSize(64e6, 512, 8, 8, 512, 32, 100_000_000, 1e-3, 4e-3, 16_384),
        TextSize(float("inf"), 768, 12, 12, 1024, 32, 400_000_000, 6e-4, 2e-3, 32_768),
    ),
}


def text_bytes(cfg: DataConfig) -> float:
    """Estimated bytes of text in the files of data.path."""
    sizes = ((path.stat().st_size, path.suffix) for path in formats.files_under(path_of(cfg.path)))
    return max(1.0, sum(size * EXPANSION.get(suffix, 1.0) for size, suffix in sizes))


def power_of_two(x: float, low: int, high: int) -> int:
    """The largest power of two up to x, clamped between `low` and `high`."""
    return min(high, max(low, 1 << max(0, int(x).bit_length() - 1)))


def vocabulary(size: float, most: int) -> int:
    """About 4 sqrt(bytes) entries: a token should occur often enough to be learned."""
    return power_of_two(4 * size**0.5 * 1.4, 512, most)


def estimated_tokens(size: float, entries: int) -> float:
    """Tokens of a text with a byte-level BPE trained on it: 3 bytes each with 512 entries, 4.3 with 8,192."""
    return size * 3 / (entries.bit_length() - 1)


def held_out_fraction(size: float) -> float:
    """The validation fraction: 100 KB of text, but at least 1% and at most 10% of it."""
    return round(min(0.1, max(0.01, 1e5 / size)), 4)


def run_folder(path: str) -> str:
    """runs/NAME, after the text's file or folder."""
    name = formats.plain_name(Path(os.path.abspath(path)))
    return f"runs/{Path(name).stem or 'text'}"


def shape(size: float, device: str, ranks: int) -> dict[str, Any]:
    """Vocabulary, model, batch size, learning rates and validation fraction."""
    chosen = next(s for s in SHAPES["cuda" if device == "cuda" else "cpu"] if size <= s.text_bytes)
    entries = vocabulary(size, chosen.vocabulary)
    tokens = estimated_tokens(size, entries)
    length = power_of_two(tokens / 16, 16, chosen.length)
    batch = power_of_two(tokens / length / 4, 4, chosen.batch)
    return {
        "recipe": "quick",
        "data.tokenizer": f"bpe-{entries}",
        "data.valid_fraction": held_out_fraction(size),
        "model.hidden_size": chosen.hidden_size,
        "model.n_heads": chosen.n_heads,
        "model.n_blocks": chosen.n_blocks,
        "model.n_denoiser_blocks": chosen.n_blocks // 2,
        "model.length": length,
        **({} if device == "cuda" else ON_A_CPU),
        "optim.lr": chosen.lr,
        "optim.muon_lr": chosen.muon_lr,
        "train.global_batch_size": -(-batch // ranks) * ranks,
        # 96 sequences are enough to see progress, and take a CPU seconds
        "train.valid_sequences": 1024 if device == "cuda" else 96,
        "train.steps": 1,  # until the settings above are known
    }


def run_length(cfg: Config, size: float, device: str) -> dict[str, Any]:
    """Optimizer steps: EPOCHS times the text, or as many tokens as the machine can read in reasonable time."""
    most = next(s for s in SHAPES["cuda" if device == "cuda" else "cpu"] if size <= s.text_bytes).tokens
    name = cfg.data.tokenizer
    entries = int(name[4:]) if name.startswith("bpe-") and name[4:].isdigit() else 32_768
    tokens = size if name == "bytes" else estimated_tokens(size, entries)
    per_step = cfg.train.global_batch_size * cfg.model.length
    return {"train.steps": max(50, round(min(EPOCHS * tokens, most) / per_step))}


def schedule(cfg: Config, size: float) -> dict[str, Any]:
    """Settings that follow from the length of the run."""
    steps, read = cfg.train.steps, cfg.train.steps * cfg.train.global_batch_size
    return {
        "optim.warmup": min(100, max(1, steps // 40)),
        "optim.ema": round(max(0.5, 1 - 10 / steps), 6),
        "train.log_every": max(1, steps // 40),
        "train.valid_every": max(1, steps // 8),
        "checkpoint.every": max(1, min(1000, steps // 2)),
        # tokenise no more of a large text than the run reads (a token has fewer than 8 bytes)
        "data.max_sequences": read if max(2e7, read * cfg.model.length * 8) < size else 0,
    }


def governed(key: str, groups: set[str]) -> bool:
    """Whether a typed group, not the size of the text, determines a key."""
    section, _, name = key.partition(".")
    if section == "model":
        return "model" in groups
    if key in ON_A_CPU:
        return bool(groups & {"recipe", "algo"})
    if name in ("lr", "muon_lr"):
        return bool(groups & {"recipe", "optim", "lr_scheduler"})
    return False

"""Stage 1 of `adlm evaluate`: samples of every setting, on disk as they are drawn.

Sample i of a setting is a function of (weights, settings, seed + i), so its file is its own progress, as for `adlm
sample`. Ranks take every size-th missing seed and write files of their own; the main rank merges them, sorted by seed,
before and after drawing. Whatever is killed, and however many ranks go on, the same samples come out.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adlm.api import LanguageModel
from adlm.api.command import draw, fingerprint, read_samples, record, request_of
from adlm.engine import Request
from adlm.evaluation.perplexity import progress
from adlm.evaluation.sweep import label
from adlm.io.paths import write_atomically
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS
from adlm.training.parallel import World


@dataclass(frozen=True)
class Setting:
    """One point of a sweep and where its samples lie."""

    label: str
    config: SamplingConfig
    request: Request
    identity: str
    """Fingerprint of weights, tokenizer and settings."""
    path: Path

    @property
    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.n)


def make_settings(lm: LanguageModel, configs: Sequence[SamplingConfig], folder: Path) -> list[Setting]:
    """Settings with their files; the name of a file holds the fingerprint, so that other weights never meet it."""
    found: list[Setting] = []
    for c in configs:
        request = request_of(lm, c)
        c = replace(c, sampler=request.settings.sampler)  # a causal model has one sampler
        identity = fingerprint(lm, c)
        if identity not in [s.identity for s in found]:
            found.append(Setting(label(c), c, request, identity, folder / f"{label(c)}-{identity[:8]}.jsonl"))
    return found


def draw_samples(lm: LanguageModel, setting: Setting, ranks: World) -> tuple[list[dict[str, Any]], int]:
    """The samples of a setting in the order of their seeds, and how many of them had to be drawn now."""
    if ranks.is_main:
        merge(setting)
    ranks.barrier()
    have = read_samples(setting.path, setting.identity)
    missing = [seed for seed in setting.seeds if seed not in have]
    mine = missing[ranks.rank :: ranks.size]
    size = setting.config.batch_size
    if mine and ranks.device.type == "cuda" and SAMPLERS.load(setting.config.sampler).steps_matter:
        # compile and capture first: what follows is timed
        few = replace(setting.request, settings=replace(setting.request.settings, steps=2))
        for _ in draw(lm, few, list(range(min(size, len(mine)))), size):
            pass
    part = part_path(setting, ranks.rank)
    with progress(f"samples {setting.label}", len(mine), ranks) as advance:
        before = time.perf_counter()
        for text in draw(lm, setting.request, mine, size):
            now = time.perf_counter()
            # summed over samples: the time this setting took, shared batches counted once
            record(part, text, setting.identity, spent=round(now - before, 4))
            before = now
            advance()
    ranks.barrier()
    if ranks.is_main and missing:
        merge(setting)
    ranks.barrier()
    have = read_samples(setting.path, setting.identity)
    return [have[seed] for seed in setting.seeds], len(missing)


def part_path(setting: Setting, rank: int) -> Path:
    return setting.path.with_suffix(f".part{rank}.jsonl")


def merge(setting: Setting) -> None:
    """Everything that ranks of this run or of one that was killed have drawn, in one file sorted by seed."""
    parts = sorted(setting.path.parent.glob(f"{setting.path.stem}.part*.jsonl"))
    if not parts:
        return
    found: dict[int, dict[str, Any]] = {}
    for path in (setting.path, *parts):
        found |= read_samples(path, setting.identity)
    lines = [json.dumps(found[seed], ensure_ascii=False) + "\n" for seed in sorted(found)]
    write_atomically(setting.path, "".join(lines))
    for path in parts:
        path.unlink()

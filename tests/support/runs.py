"""Small complete training runs for tests: a jsonl file, bytes as tokens, a tiny model, everything in one folder."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from adlm import config
from adlm.schema import Config
from adlm.training.metrics import read_metrics
from adlm.training.parallel import World

ON_A_CPU = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ALONE = World(0, 1, torch.device("cpu"), "fp32", "none")
WORDS = ("the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "mat", "tree", "red", "old", "slept")


def write_corpus(path: Path, documents: int = 120, seed: int = 0) -> Path:
    rng = random.Random(seed)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 60))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def overrides(folder: Path, **changes: object) -> list[str]:
    """The command line of a tiny run below `folder`; `changes` use __ for the dot of a key."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    keys = {
        "data": "file",
        "data.path": corpus,
        "data.tokenizer": "bytes",
        "data.valid_fraction": 0.1,
        "data.cache_dir": folder / "cache",
        "recipe": "published",
        "model": "nano",
        "model.hidden_size": 16,
        "model.n_heads": 2,
        "model.n_blocks": 2,
        "model.n_denoiser_blocks": 1,
        "model.length": 32,
        "model.cond_dim": 8,
        "train.steps": 12,
        "train.global_batch_size": 8,
        "train.valid_every": 6,
        "train.valid_sequences": 16,
        "train.log_every": 1,
        "checkpoint.every": 4,
        "optim.lr": 1e-2,
        "optim.warmup": 2,
        "optim.ema": 0.9999,
        "out": folder / "run",
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def run_config(folder: Path, **changes: object) -> Config:
    return config.load(overrides(folder, **changes), world_size=1)


def start(folder: Path, *more: str, command: str = "train", environment: dict[str, str] = ON_A_CPU) -> subprocess.Popen:
    """The run as a process, the first of a group of its own."""
    line = [sys.executable, "-m", "adlm", command, *overrides(folder), *more]
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(e["kind"] == "train" and e["step"] >= step for e in read_lines(run)):
            return
        time.sleep(0.02)


def read_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def losses(run: Path) -> list[tuple]:
    """(kind, step, value) of every event, in order, times left out."""
    return [(e["kind"], e["step"], e.get("nelbo", e.get("nll"))) for e in read_metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name

"""Every reasoning method from scratch on a CPU: does a nano model learn a 2-hop task, how accurately, and how fast?

    python benchmarks/reasoning.py [method ...] [key=value ...]      # OMP_NUM_THREADS cores, by default one

The questions are those of task=prosqa-2hop: two chains of two statements, shuffled, and two candidates of equal depth,
so that only the name in the question determines the right one. They are generated once for all methods. Every method
has the same settings and begins with the same steps on stories (reason.story_steps), which are part of its time.
Accuracies are on 500 test questions that are not in the training set; the goal is above 95 % for every method
(docs/reasoning.md has the results). Rules that do not look at the name are scored for comparison. The last line of
stdout is one JSON document.
"""

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from adlm import config
from adlm.reasoning.logic import blind_guesses
from adlm.reasoning.tasks import load_splits
from adlm.reasoning.training import train
from adlm.tables import METHODS

SETTINGS = ("algo=ar", "model=nano", "task=prosqa-2hop", "train.device=cpu")


def main(argv: list[str]) -> None:
    overrides = [word for word in argv if "=" in word]
    methods = [word for word in argv if "=" not in word] or list(METHODS)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guesses, files = questions(folder, overrides)
        for guess, fraction in guesses.items():
            print(f"guess: {guess:30} {100 * fraction:5.1f}%")
        for method in methods:
            cfg = config.load([*SETTINGS, f"method={method}", f"out={folder / method}", *overrides, *files])
            start, used = time.monotonic(), time.process_time()
            result = train(cfg)
            if not result.valid:
                raise SystemExit("interrupted")
            test = result.tests["test"]
            rows.append(
                {
                    "method": method,
                    **{key: test[key] for key in ("accuracy", "low", "high", "tokens")},
                    "steps": result.step,
                    "seconds": round(time.monotonic() - start, 1),
                    "cpu_seconds": round(time.process_time() - used, 1),
                    "stages": [round(stage["accuracy"], 3) for stage in result.stages],
                }
            )
            show(rows)
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
    settings = [*SETTINGS, *overrides]
    print(json.dumps({"benchmark": "reasoning", "settings": settings, **about, "guesses": guesses, "rows": rows}))


def questions(folder: Path, overrides: list[str]) -> tuple[dict[str, float], list[str]]:
    """Write training, validation and test questions to files; return the accuracies of blind rules on the test
    questions, and the overrides."""
    cfg = config.load([*SETTINGS, *overrides])
    splits = load_splits(cfg.reason, cfg.seed)
    sets = {"train": splits.train, "valid": splits.valid, "test": splits.tests["generated"]}
    for name, examples in sets.items():
        (folder / f"{name}.json").write_text(json.dumps([example._asdict() for example in examples]))
    keys = {"train": "data.path", "valid": "data.valid_path", "test": "reason.test_path"}
    return blind_guesses(sets["test"]), [f"{keys[name]}={folder / name}.json" for name in sets]


def show(rows: list[dict]) -> None:
    print(f"{'method':14} {'accuracy':>8} {'interval':>13} {'tokens':>7} {'steps':>6} {'CPU s':>6}  accuracy by stage")
    for row in rows:
        interval = f"{100 * row['low']:.1f}-{100 * row['high']:.1f}"
        print(
            f"{row['method']:14} {100 * row['accuracy']:7.1f}% {interval:>13} {row['tokens']:7.1f} {row['steps']:6}"
            f" {row['cpu_seconds']:6.0f}  {' '.join(f'{100 * a:.0f}' for a in row['stages'])}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every reasoning method from scratch on a CPU: does a nano model learn a 2-hop task, to which accuracy, in which time?

    python benchmarks/reasoning.py [method ...] [key=value ...]      # all seven: about ten minutes on one core

The last line of stdout is one JSON document. Accuracies are on 500 generated test questions that share nothing with the
training set; the goal is above 95 % for every method.
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
from adlm.reasoning.methods import METHODS
from adlm.reasoning.training import train

SETTINGS = ("algo=ar", "model=nano", "task=prosqa-2hop", "model.hidden_size=64", "model.n_blocks=3", "train.device=cpu")


def main(argv: list[str]) -> None:
    overrides = [word for word in argv if "=" in word]
    methods = [word for word in argv if "=" not in word] or list(METHODS)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            cfg = config.load([*SETTINGS, f"method={method}", f"out={Path(folder) / method}", *overrides])
            start, used = time.monotonic(), time.process_time()
            result = train(cfg)
            if not result.finished:
                raise SystemExit("interrupted")
            test = result.tests["generated"]
            rows.append(
                {
                    "method": method,
                    "accuracy": test["accuracy"],
                    "low": test["low"],
                    "high": test["high"],
                    "tokens": test["tokens"],
                    "steps": result.step,
                    "seconds": round(time.monotonic() - start, 1),
                    "cpu_seconds": round(time.process_time() - used, 1),
                    "stages": [round(stage["accuracy"], 3) for stage in result.stages],
                }
            )
            print(f"{'method':14} {'accuracy':>8} {'interval':>13} {'tokens':>7} {'CPU s':>7}  accuracy by stage")
            for row in rows:
                interval = f"{100 * row['low']:.1f}-{100 * row['high']:.1f}"
                print(
                    f"{row['method']:14} {100 * row['accuracy']:7.1f}% {interval:>13} {row['tokens']:7.1f}"
                    f" {row['cpu_seconds']:7.0f}  {' '.join(f'{100 * a:.0f}' for a in row['stages'])}",
                    flush=True,
                )
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "reasoning", "settings": [*SETTINGS, *overrides], **about, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Does a diffusion model reason better with anchors? ProsQA in terse words, answered by filling in path and answer.

    python benchmarks/reasoning_diffusion.py prepare folder=FOLDER [size=tiny] [key=value ...]
    python benchmarks/reasoning_diffusion.py run folder=FOLDER out=runs/infill report=REPORT [minutes=9] [reads=894000]
        [seeds=1,2,3] [runs=adlm,mdlm-matched,acot] [key=value ...]

Three ways to the same answers, from scratch, of the same width and number of blocks, with the same training FLOPs:
  adlm          two stages; the anchors are the nodes of the path (objective.anchor_rule=given)
  mdlm-matched  one stage with as many blocks
  acot          a causal model with as many blocks, staged as in the paper
`prepare` needs hydra and writes FOLDER/settings.json; `run` needs neither. `reads` are the sequences that adlm reads;
the others get as many as cost the same. The diffusion models are asked twice: with one step per position in random
order (mdlm), and most certain positions first (confidence), both greedy. A run that the time cuts short is continued by
the same command. REPORT receives diffusion.json and metrics.jsonl; the table is printed.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from adlm import config
from adlm.io.load import load_checkpoint
from adlm.models.network import count_flops
from adlm.reasoning.answers import Infilling, wilson
from adlm.reasoning.training import ReasoningSetup
from adlm.reasoning.training import train as train_causal
from adlm.schema import Config
from adlm.training.metrics import read_metrics
from adlm.training.parallel import world

COMMON = (
    "task=prosqa-terse", "recipe=fast", "optim.schedule=constant", "optim.warmup=100", "train.global_batch_size=128",
    "train.log_every=50", "checkpoint.every=1000000", "checkpoint.keep=1", "optim.ema=0", "model.dropout=0",
    "reason.test_path=prosqa-terse-balanced",
)  # fmt: skip
DIFFUSION = ("objective.gamma=1", "train.valid_every=0", "train.sample_every=0", "train.cuda_graphs=true")
RUNS = {
    "adlm": ("algo=adlm", "objective.anchor_rule=given", *DIFFUSION),
    "mdlm-matched": ("algo=mdlm-matched", *DIFFUSION),
    "acot": ("algo=ar", "method=acot", "reason.epochs_per_stage=3", "train.compile=block", "train.valid_every=700"),
}
STEPS_OF_ACOT = 8
"""Stages of acot, the last of which has as many epochs as two others."""
OPTIONS = {
    "folder": "", "out": "runs/infill", "report": "", "minutes": "9", "reads": "894000", "seeds": "1,2,3", "runs": "",
    "size": "tiny",
}  # fmt: skip


def main(argv: list[str]) -> None:
    action, words = argv[0], dict(word.split("=", 1) for word in argv[1:])
    options = {key: words.pop(key, default) for key, default in OPTIONS.items()}
    assert action in ("prepare", "run") and options["folder"], __doc__
    folder = Path(options["folder"])
    if action == "prepare":
        folder.mkdir(parents=True, exist_ok=True)
        line = [f"model={options['size']}", *COMMON]
        more = [f"{key}={value}" for key, value in words.items()]
        settings = {
            name: config.flatten(config.load([*line, *run, *more], run_folder=False)) for name, run in RUNS.items()
        }
        (folder / "settings.json").write_text(json.dumps(settings, indent=1))
    else:
        run(folder, options, words)


def run(folder: Path, options: dict[str, str], overrides: dict[str, str]) -> None:
    """Train and ask what is missing until the time is up; then the report."""
    out, report = Path(options["out"]), Path(options["report"] or options["out"])
    report.mkdir(parents=True, exist_ok=True)
    settings = json.loads((folder / "settings.json").read_text())
    names = [name for name in options["runs"].split(",") if name] or list(RUNS)
    timer = threading.Timer(60 * float(options["minutes"]), lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("time is up"))
    timer.start()
    try:
        for seed in map(int, options["seeds"].split(",")):
            base = config.from_tree(settings["adlm"] | overrides | {"seed": seed}, "settings")
            task = Infilling.of(base)
            budget = int(options["reads"]) * row_flops(with_length(base, task), task)
            for name in names:
                place = out / f"{name}-{seed}"
                if (place / "answers.json").is_file():
                    continue
                cfg = config.from_tree(settings[name] | overrides | {"seed": seed, "out": str(place)}, "settings")
                found = causal(cfg, budget) if name == "acot" else diffusion(cfg, task, budget)
                if found is None:
                    print(f"{place.name} was stopped; the same command continues it", flush=True)
                    return
                (place / "answers.json").write_text(json.dumps(found | {"training_flops": budget}))
    finally:
        timer.cancel()
        write_report(report, out)


def with_length(cfg: Config, task: Infilling) -> Config:
    return replace(cfg, model=replace(cfg.model, length=task.layout.length))


def row_flops(cfg: Config, task: Infilling) -> float:
    """Training FLOPs of a sequence: half of the predicted positions are masked on average, all of the path scored."""
    layout, V = task.layout, task.tokenizer.vocab_size
    anchors = layout.path / layout.length if cfg.model.anchored else 0.0
    scored = layout.filled / layout.length / 2
    return layout.length * count_flops(cfg.model, V, layout.length, scored, anchors).training_per_token


def diffusion(cfg: Config, task: Infilling, budget: float) -> dict[str, Any] | None:
    """Train through the loop of `adlm train`, then fill in the test questions."""
    cfg = with_length(cfg, task)
    steps = max(1, round(budget / (row_flops(cfg, task) * cfg.train.global_batch_size)))
    cfg = replace(cfg, train=replace(cfg.train, steps=steps))
    result = task.learn(cfg)
    if result.stopped_by:
        return None
    found = {}
    with world(cfg.train) as ranks:
        model = load_checkpoint(cfg.out, device=ranks.device).model
        for name, examples in task.tests.items():
            for sampler in ("mdlm", "confidence"):
                greedy = replace(cfg.sampling, sampler=sampler, steps=task.layout.filled, temperature=0.0)
                accuracy, _ = task.answer(model, cfg, examples, ranks, greedy)
                print(f"{cfg.out}  {name}, {sampler}: {accuracy}", flush=True)
                found[f"{name}, {sampler}"] = accuracy.facts()
    return {"tests": found, "steps": steps, "reads": steps * cfg.train.global_batch_size}


def causal(cfg: Config, budget: float) -> dict[str, Any] | None:
    """The same for the causal model, whose epochs are as many as cost the same."""
    with world(cfg.train) as ranks:
        setup = ReasoningSetup(replace(cfg, reason=replace(cfg.reason, epochs=10**6)), ranks)
        per_token = setup.flops_per_token()
        assert per_token is not None
        tokens = sum(batch.tokens for batch in setup.batches(0)) / len(setup.schedule.examples(0))
    epochs = max(STEPS_OF_ACOT, round(budget / (per_token * tokens * len(setup.train))))
    each = max(1, epochs // (STEPS_OF_ACOT + 1))
    cfg = replace(cfg, reason=replace(cfg.reason, epochs=epochs, epochs_per_stage=each))
    result = train_causal(cfg)
    return (
        None if result.stopped_by else {"tests": result.tests, "steps": result.step, "reads": epochs * len(setup.train)}
    )


def write_report(report: Path, out: Path) -> None:
    """Every run with its accuracies; and all metrics."""
    runs = sorted(path.parent for path in out.glob("*/answers.json"))
    results = {run.name: json.loads((run / "answers.json").read_text()) for run in runs}
    (report / "diffusion.json").write_text(json.dumps(results, indent=1))
    begun = sorted(path.parent for path in out.glob("*/metrics.jsonl"))
    lines = [json.dumps({"run": run.name} | event) for run in begun for event in read_metrics(run)]
    (report / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{'run':20} {'set':32} {'accuracy':>8} {'interval':>13} {'reads':>10}  path, node by node")
    for name, found in results.items():
        for test, facts in found["tests"].items():
            low, high = wilson(facts["correct"], facts["n"])
            slots = "/".join(f"{100 * facts[key]:.0f}" for key in sorted(facts) if key.startswith("slot_"))
            interval = f"{100 * low:.1f}-{100 * high:.1f}"
            print(f"{name:20} {test:32} {100 * facts['accuracy']:7.1f}% {interval:>13} {found['reads']:10,}  {slots}")


if __name__ == "__main__":
    main(sys.argv[1:])

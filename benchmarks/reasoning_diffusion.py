"""Does a diffusion model reason better with anchors? ProsQA in terse words, answered by filling in path and answer.

    python benchmarks/reasoning_diffusion.py prepare folder=FOLDER [task=prosqa-terse] [size=tiny] [key=value ...]
    python benchmarks/reasoning_diffusion.py run folder=FOLDER out=runs/infill report=REPORT [minutes=9] [reads=894000]
        [seeds=1,2,3] [runs=adlm,mdlm-matched,acot] [until=0] [key=value ...]

Three ways to the same answers, from scratch, of the same width and number of blocks, with the same training FLOPs:
  adlm          two stages; the anchors are the nodes of the path (objective.anchor_rule=given)
  mdlm-matched  one stage with as many blocks
  acot          a causal model with as many blocks, staged as in the paper
All three read the same questions and nothing else: there are no stories first (reason.story_steps), since they are
designed for the causal model. `prepare` needs hydra and writes FOLDER/settings.json; `run` does not need hydra. `reads`
is the number of sequences that adlm reads; the others get as many as cost the same. The diffusion models answer twice:
with one step per position in random order (mdlm), and most confident positions first (confidence), both greedy. The
same command resumes a run that ran out of time. With until=N a diffusion model that had 90% of the validation questions
right N times in a row is through: it is not trained further and not tested, and the report compares the times that the
two kinds of runs needed (log-rank test, p from all permutations of the runs). REPORT receives diffusion.json and
metrics.jsonl; the table is printed. Its column `90% at` is the fraction of the training FLOPs after which a run had 90%
of the validation questions right and never fell below again (train.sample_every=N tests a diffusion model every N
steps, train.valid_every=N a causal one).
"""

import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from adlm import config
from adlm.io.load import load_checkpoint
from adlm.models.network import count_flops
from adlm.reasoning.answers import Infilling, wilson
from adlm.reasoning.methods import encode, laid_out_length, plans_of, written_length
from adlm.reasoning.training import train as train_causal
from adlm.schema import Config
from adlm.training.metrics import read_metrics
from adlm.training.parallel import world

COMMON = (
    "recipe=fast", "optim.schedule=constant", "optim.warmup=100", "train.global_batch_size=128", "train.log_every=50",
    "checkpoint.every=1000000", "checkpoint.keep=1", "optim.ema=0", "model.dropout=0", "reason.story_steps=0",
)  # fmt: skip
DIFFUSION = (
    "objective.gamma=1", "objective.anchor_fraction=1", "train.valid_every=0", "train.sample_every=0",
    "train.cuda_graphs=true", "sampling.sampler=confidence", "sampling.temperature=0",
)  # fmt: skip
RUNS = {
    "adlm": ("algo=adlm", "objective.anchor_rule=given", *DIFFUSION),
    "mdlm-matched": ("algo=mdlm-matched", *DIFFUSION),
    "acot": ("algo=ar-matched", "method=acot", "train.compile=block", "train.valid_every=700"),
}
TESTS = {"prosqa-terse": "prosqa-terse-balanced"}
"""Further test sets of a task."""
THROUGH = 0.9
"""A run is through when it has this fraction of the validation questions right."""
MOST_RUNS = 20
"""The most runs that are compared by trying all permutations."""
ACCURACY = re.compile(r"accuracy ([\d.]+) %")
OPTIONS = {
    "folder": "", "out": "runs/infill", "report": "", "minutes": "9", "reads": "894000", "seeds": "1,2,3", "runs": "",
    "until": "0", "size": "tiny", "task": "prosqa-terse",
}  # fmt: skip


def main(argv: list[str]) -> None:
    action, words = argv[0], dict(word.split("=", 1) for word in argv[1:])
    options = {key: words.pop(key, default) for key, default in OPTIONS.items()}
    assert action in ("prepare", "run") and options["folder"], __doc__
    folder = Path(options["folder"])
    if action == "prepare":
        folder.mkdir(parents=True, exist_ok=True)
        task = options["task"]
        line = [f"model={options['size']}", f"task={task}", *COMMON, f"reason.test_path={TESTS.get(task, '')}"]
        more = [f"{key}={value}" for key, value in words.items()]
        settings = {
            name: config.flatten(config.load([*line, *run, *more], run_folder=False)) for name, run in RUNS.items()
        }
        (folder / "settings.json").write_text(json.dumps(settings, indent=1))
    else:
        run(folder, options, words)


def run(folder: Path, options: dict[str, str], overrides: dict[str, str]) -> None:
    """Train and test the missing runs until the time is up; then write the report."""
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
                if name == "acot":
                    found = causal(cfg, task, budget)
                else:
                    found = diffusion(cfg, task, budget, int(options["until"]))
                if found is None:
                    print(f"{place.name} was stopped; the same command continues it", flush=True)
                    return
                (place / "answers.json").write_text(json.dumps(found))
    finally:
        timer.cancel()
        write_report(report, out)


def with_length(cfg: Config, task: Infilling) -> Config:
    """The settings with the length of the task's sequences, and one sampler step for each position to fill in."""
    sampling = replace(cfg.sampling, steps=task.layout.filled)
    return replace(cfg, model=replace(cfg.model, length=task.layout.length), sampling=sampling)


def row_flops(cfg: Config, task: Infilling) -> float:
    """Training FLOPs of a sequence: half of the predicted positions are masked on average, and scored."""
    layout, objective = task.layout, cfg.objective
    anchors = objective.anchor_fraction * (0.5 if objective.anchor_positions == "masked" else 1.0)
    anchors *= layout.path / layout.length if cfg.model.anchored else 0.0
    scored = layout.filled / layout.length / 2
    flops = count_flops(cfg.model, task.tokenizer.vocab_size, layout.length, scored, anchors)
    return layout.length * flops.training_per_token


def diffusion(cfg: Config, task: Infilling, budget: float, until: int) -> dict[str, Any] | None:
    """Train with the loop of `adlm train`, then answer the test questions; none if the run is through before its
    end."""
    cfg = with_length(cfg, task)
    cost, size = row_flops(cfg, task), cfg.train.global_batch_size
    steps = max(1, round(budget / (cost * size)))
    cfg = replace(cfg, train=replace(cfg.train, steps=steps))
    with stopped_when_through(cfg, until):
        result = task.learn(cfg)
    curve = [(step / steps, accuracy) for step, accuracy in along(cfg)]
    facts = {"steps": steps, "reads": steps * size, "training_flops": steps * size * cost, "curve": curve}
    if until and is_through(curve, until):
        return {"tests": {}} | facts
    if result.stopped_by:
        return None
    found = {}
    with world(cfg.train) as ranks:
        model = load_checkpoint(cfg.out, device=ranks.device).model
    for name, examples in task.tests.items():
        for sampler in ("mdlm", "confidence"):
            accuracy, _ = task.answer(model, cfg, examples, replace(cfg.sampling, sampler=sampler))
            print(f"{cfg.out}  {name}, {sampler}: {accuracy}", flush=True)
            found[f"{name}, {sampler}"] = accuracy.facts()
    return {"tests": found} | facts


@contextmanager
def stopped_when_through(cfg: Config, until: int) -> Iterator[None]:
    """Stop training inside this context, as a user would, once the run is through; never if `until` is 0."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(2):
            if (Path(cfg.out) / "metrics.jsonl").is_file() and is_through(along(cfg), until) and not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if until:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if until:
            watcher.join()


def is_through(curve: list[tuple[float, float]], until: int) -> bool:
    return len(curve) >= until and all(right >= THROUGH for _, right in curve[-until:])


def causal(cfg: Config, task: Infilling, budget: float) -> dict[str, Any] | None:
    """The same for the causal model, with as many epochs as cost the same. Its last stage is twice as long as the
    others."""
    plans, encoded = plans_of(cfg.reason), encode(task.train[:256], task.tokenizer)
    costs = []
    for plan in plans:
        length = float(np.mean([laid_out_length(example, plan) for example in encoded]))
        scored = plan.slots * plan.anchored + float(np.mean([written_length(example, plan) for example in encoded]))
        flops = count_flops(cfg.model, task.tokenizer.vocab_size, round(length), scored / length)
        costs.append(len(task.train) * length * flops.training_per_token)

    def spent(epochs: int) -> np.ndarray:
        """FLOPs after each epoch of a run with `epochs` epochs."""
        each = max(1, epochs // (len(plans) + 1))
        return np.cumsum([costs[min(epoch // each, len(plans) - 1)] for epoch in range(epochs)])

    epochs = next(n for n in itertools.count(len(plans)) if spent(n + 1)[-1] > budget)
    each = max(1, epochs // (len(plans) + 1))
    result = train_causal(replace(cfg, reason=replace(cfg.reason, epochs=epochs, epochs_per_stage=each)))
    if result.stopped_by:
        return None
    total = spent(epochs)
    done = np.concatenate(([0], total / total[-1]))
    per_epoch = -(-len(task.train) // cfg.train.global_batch_size)
    curve = [(float(np.interp(step / per_epoch, range(epochs + 1), done)), right) for step, right in along(cfg)]
    reads = epochs * len(task.train)
    return {
        "tests": result.tests,
        "steps": result.step,
        "reads": reads,
        "training_flops": float(total[-1]),
        "curve": curve,
    }


def along(cfg: Config) -> list[tuple[int, float]]:
    """(steps, fraction of the validation questions that was right after them) during training."""
    found = []
    for event in read_metrics(Path(cfg.out)):
        said = ACCURACY.search(event.get("text", ""))
        if said or "accuracy" in event:
            found.append((event["step"], float(said[1]) / 100 if said else event["accuracy"]))
    return found


def reached(curve: list[tuple[float, float]]) -> float | None:
    """The fraction of the training FLOPs after which the run was through and stayed so."""
    late = list(itertools.takewhile(lambda point: point[1] >= THROUGH, reversed(curve)))
    return late[-1][0] if late else None


def log_rank(waits: list[float | None], of_first: int) -> float:
    """The log-rank statistic, in runs: how many more of the first `of_first` runs were through early than expected by
    chance, compared with the rest. None: never through."""
    times = sorted({wait for wait in waits if wait is not None})
    sooner = 0.0
    for time in times:
        waiting = [wait is None or wait >= time for wait in waits]
        ended = [wait == time for wait in waits]
        sooner += sum(ended[:of_first]) - sum(ended) * sum(waiting[:of_first]) / sum(waiting)
    return sooner


def log_rank_p(first: list[float | None], second: list[float | None]) -> float:
    """Two-sided p-value over all permutations of the runs."""
    waits, n = first + second, len(first)
    seen, as_far, ways = abs(log_rank(waits, n)), 0, 0
    for chosen in itertools.combinations(range(len(waits)), n):
        dealt = [waits[i] for i in chosen] + [wait for i, wait in enumerate(waits) if i not in chosen]
        as_far, ways = as_far + (abs(log_rank(dealt, n)) >= seen - 1e-9), ways + 1
    return as_far / ways


def write_report(report: Path, out: Path) -> None:
    """Write every run with its accuracies, and all metrics."""
    runs = sorted(path.parent for path in out.glob("*/answers.json"))
    results = {run.name: json.loads((run / "answers.json").read_text()) for run in runs}
    (report / "diffusion.json").write_text(json.dumps(results, indent=1))
    begun = sorted(path.parent for path in out.glob("*/metrics.jsonl"))
    lines = [json.dumps({"run": run.name} | event) for run in begun for event in read_metrics(run)]
    (report / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{'run':20} {'set':32} {'accuracy':>8} {'interval':>13} {'reads':>10} {'90% at':>6}  path, node by node")
    for name, found in results.items():
        wait = reached(found["curve"])
        cost = f"{found['reads']:10,} {'never' if wait is None else f'{100 * wait:.0f}%':>6}"
        if not found["tests"]:
            print(f"{name:20} {'stopped: through':32} {'':>8} {'':>13} {cost}")
        for test, facts in found["tests"].items():
            low, high = wilson(facts["correct"], facts["n"])
            slots = "/".join(f"{100 * facts[key]:.0f}" for key in sorted(facts) if key.startswith("slot_"))
            interval = f"{100 * low:.1f}-{100 * high:.1f}"
            print(f"{name:20} {test:32} {100 * facts['accuracy']:7.1f}% {interval:>13} {cost}  {slots}")
    kinds = {kind: [reached(f["curve"]) for n, f in results.items() if n.rpartition("-")[0] == kind] for kind in RUNS}
    for a, b in itertools.combinations((kind for kind, waits in kinds.items() if waits), 2):
        if len(kinds[a] + kinds[b]) > MOST_RUNS:
            continue
        through = [f"{kind} {sum(w is not None for w in kinds[kind])} of {len(kinds[kind])}" for kind in (a, b)]
        print(f"through: {', '.join(through)}; log-rank p = {log_rank_p(kinds[a], kinds[b]):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The reasoning experiments from a pretrained base on one GPU: are the paper's numbers reached, and due to anchors?

    python benchmarks/reasoning_gpu.py prepare data=DATA folder=FOLDER
    python benchmarks/reasoning_gpu.py run folder=FOLDER base=SmolLM2.gguf out=runs/reasoning report=REPORT [minutes=9]
        [runs=prosqa-icot-1,...] [gate=0.9] [tiny=true] [key=value ...]

`prepare` needs hydra and the published files (DATA/prosqa, prontoqa, gsm8k, gsm8k_icot); it writes the questions and
the settings of every run to FOLDER (10 MB). `run` needs only these, the package and the base, and not hydra.

`run` trains the runs without results, in the order of SCHEDULE, until `minutes` are over; then it saves and stops, and
the same command resumes bit for bit where it stopped, as long as `out` exists. The first run is the gate: if its
accuracy on the published test is below `gate`, the others are not started. Methods with the same first stage share it.
REPORT receives table.txt (accuracies with intervals, McNemar's tests), results.json (with the speed of every run),
answers.json (which questions each run answered correctly), speed.json and metrics.jsonl.
"""

import json
import lzma
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adlm import config
from adlm.reasoning.command import show_table
from adlm.reasoning.methods import Example
from adlm.reasoning.runs import read_answers, read_results
from adlm.reasoning.tasks import generate
from adlm.reasoning.training import train
from adlm.tables import TASKS
from adlm.training.metrics import read_metrics


class Planned(NamedTuple):
    """One run of the schedule."""

    task: str
    method: str
    seed: int
    label: str = ""
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method}{self.label}-{self.seed}"


# Batches of 128 in one micro-batch, one compiled block. A step takes 100 ms, long enough for the host to launch the
# kernels: CUDA graphs would gain nothing, and would take memory for each of six lengths.
FAST = (
    "algo=ar", "train.compile=block", "train.log_every=20", "eval.batch_size=500", "checkpoint.every=1000000",
    "checkpoint.keep=1",
)  # fmt: skip
# 26 epochs of 17,792 questions: 462,592 reads. Seven stages of three epochs, and five epochs without a trace.
COURSES: dict[str, tuple[str, ...]] = {
    "prosqa": (
        *FAST, "experiment=prosqa-protocol", "reason.epochs=26", "reason.epochs_per_stage=3", "train.valid_every=420",
    ),
    "prontoqa": (
        *FAST, "task=prontoqa", "optim.schedule=constant", "reason.epochs=26", "reason.epochs_per_stage=3",
        "train.valid_every=355",
    ),
    "gsm8k": (*FAST, "task=gsm8k", "optim.schedule=constant", "train.valid_every=295"),
}  # fmt: skip
SCHEDULE = [
    Planned("prosqa", "icot", 1),  # the gate
    *(Planned("prosqa", method, 1) for method in ("acot", "coconut-pause", "cot", "no-cot", "pause")),
    *(Planned("prosqa", method, seed) for seed in (2, 3) for method in ("icot", "acot", "coconut-pause")),
    Planned("prosqa", "coconut", 1),
    Planned("prontoqa", "cot", 1),
    Planned("prontoqa", "acot", 1),
    Planned("gsm8k", "cot", 1),
    Planned("gsm8k", "acot", 1),
    Planned("prosqa", "acot", 1, ",gamma=0.1", ("objective.gamma=0.1",)),
    Planned("prosqa", "acot", 1, ",gamma=0.3", ("objective.gamma=0.3",)),
    Planned("prosqa", "acot-triple", 1, ",all-tokens", ("reason.anchor_tokens=all", "reason.slots=18")),
    Planned("prosqa", "acot", 1, ",mixed", ("reason.mixing=0.1",)),
]
SIZES = {"prosqa": (17_920, 300, 500), "prontoqa": (9_088, 200, 800)}
"""Numbers of generated training, validation and test questions. Questions that are also in a test set are left out of
the training set, which is then cut to whole batches of 128, so that all batches have the same shape."""
SPARE = 128
EXTRA_TESTS = {"prosqa": ("prosqa-balanced", "prosqa-7hop", "prosqa-8hop"), "prontoqa": ()}
PUBLISHED = {"prosqa": "prosqa_test", "prontoqa": "prontoqa_test", "gsm8k": "test"}
"""The published test set of each task."""
TINY = {
    "model.hidden_size": 32, "model.n_heads": 2, "model.n_blocks": 1, "train.global_batch_size": 4,
    "train.batch_size": 4, "train.log_every": 2, "train.valid_every": 0,
    "train.compile": "false", "train.device": "cpu", "eval.batch_size": 250,
}  # fmt: skip
OPTIONS = {
    "data": "", "folder": "", "base": "", "out": "runs/reasoning", "report": "", "minutes": "9", "runs": "",
    "gate": "0.9", "tiny": "false",
}  # fmt: skip


def main(argv: list[str]) -> None:
    action, words = argv[0], dict(word.split("=", 1) for word in argv[1:])
    options = {key: words.pop(key, default) for key, default in OPTIONS.items()}
    assert action in ("prepare", "run") and options["folder"], __doc__
    if action == "prepare":
        prepare(Path(options["data"]), Path(options["folder"]), tiny=options["tiny"] == "true")
    else:
        run(options, words)


# ---- questions and settings


def prepare(data: Path, folder: Path, tiny: bool) -> None:
    """Write the questions of all tasks, and the settings of all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {}
    for task in COURSES:
        files = copy_gsm8k(data, folder) if task == "gsm8k" else make_questions(task, data, folder, tiny)
        for planned in SCHEDULE:
            if planned.task == task:
                line = [*COURSES[task], f"method={planned.method}", f"seed={planned.seed}", *planned.settings]
                settings[planned.name] = config.flatten(config.load(line, run_folder=False)) | files
    (folder / "settings.json").write_text(json.dumps(settings, indent=1))


def make_questions(task: str, data: Path, folder: Path, tiny: bool) -> dict[str, Any]:
    """Write the files of a task's questions, once; return the settings that name them, relative to the folder."""
    sizes = (16, 4, 4) if tiny else SIZES[task]
    made = questions(task, sum(sizes))
    sets = {"train": made[: sizes[0]], "valid": made[sizes[0] : sizes[0] + sizes[1]], "generated": made[-sizes[2] :]}
    sets |= {name: questions(name, sizes[2]) for name in EXTRA_TESTS[task]}
    names = {name: f"{task}-{name}.json.xz" if name in ("train", "valid") else f"{name}.json.xz" for name in sets}
    names["generated"] = f"{task}-generated.json.xz"
    for name, examples in sets.items():
        records = [example._asdict() for example in examples]
        (folder / names[name]).write_bytes(lzma.compress(json.dumps(records).encode()))
    published = data / task / f"{PUBLISHED[task]}.json"
    records = json.loads(published.read_text()) if published.is_file() else []
    tests = [names[name] for name in sets if name not in ("train", "valid")]
    if records:
        (folder / published.name).write_text(json.dumps(records[: sizes[2]] if tiny else records))
        tests = [published.name, *tests]
    return {
        "data.path": names["train"], "data.valid_path": names["valid"], "reason.n_valid": sizes[1],
        "reason.test_path": ",".join(tests), "reason.n_train": 0 if tiny else sizes[0] - SPARE,
    }  # fmt: skip


def copy_gsm8k(data: Path, folder: Path) -> dict[str, Any]:
    """Copy all problems of the published training file except those of the validation file."""
    for path in (data / "gsm8k/train.jsonl.xz", data / "gsm8k/test.jsonl", data / "gsm8k_icot/valid.txt"):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    return {
        "data.path": "train.jsonl.xz", "data.valid_path": "valid.txt", "reason.test_path": "test.jsonl",
        "reason.n_valid": 500,
    }  # fmt: skip


def questions(task: str, n: int) -> list[Example]:
    """n different questions, generated on all cores: each worker has its own seed, and duplicates are dropped."""
    cores = min(os.cpu_count() or 1, max(1, n // 50))
    each = -(-n // cores) + n // (20 * cores) + 1
    with ProcessPoolExecutor(cores) as pool:
        made = [example for part in pool.map(partial(some, task, each), range(cores)) for example in part]
    different = list({TASKS.load(task).canonical(example): example for example in made}.values())
    assert len(different) >= n, (len(different), n)
    return different[:n]


def some(task: str, n: int, worker: int) -> list[Example]:
    return generate(TASKS.load(task), n, seed=1000 + worker)


# ---- training


def run(options: dict[str, str], overrides: dict[str, str]) -> None:
    """Train the missing runs until the time is up."""
    began, folder, out = time.monotonic(), Path(options["folder"]), Path(options["out"])
    report, minutes = Path(options["report"] or out), float(options["minutes"])
    settings = json.loads((folder / "settings.json").read_text())
    names = [name for name in options["runs"].split(",") if name] or [planned.name for planned in SCHEDULE]
    unknown = [name for name in names if name not in settings]
    assert not unknown, f"unknown runs {unknown}; known are {list(settings)}"
    report.mkdir(parents=True, exist_ok=True)
    timer = threading.Timer(60 * minutes, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("time is up"))  # between two runs; a run saves and stops
    timer.start()
    try:
        for name in names:
            if (out / name / "results.json").is_file():
                continue
            say(began, f"{name} begins, or goes on")
            result = train(config_of(settings[name], folder, out / name, options, overrides))
            if result.stopped_by:
                say(began, f"{name}: stopped at step {result.step}; the same command continues there")
                break
            say(began, f"{name}: {result.step} steps, {result.tests}")
            shutil.rmtree(out / name / "checkpoints", ignore_errors=True)
            write_report(report, out, names)
            if not passes(out / names[0], float(options["gate"])):
                say(began, f"the gate {names[0]} is below {options['gate']}: find out why before anything else")
                break
    finally:
        timer.cancel()
        write_report(report, out, names)


def config_of(
    settings: dict[str, Any], folder: Path, out: Path, options: dict[str, str], overrides: dict[str, str]
) -> config.Config:
    """The settings of a run on this machine."""
    own = {"out": str(out), "reason.base": options["base"], "reason.stage0": str(out.parent / "stage0")}
    for key in ("data.path", "data.valid_path", "reason.test_path"):
        own[key] = ",".join(str((folder / name).absolute()) for name in settings[key].split(","))
    tiny = TINY if options["tiny"] == "true" else {}
    cfg = config.from_tree(settings | own | tiny | overrides, str(folder / "settings.json"))
    config.check(cfg)
    return cfg


def passes(gate: Path, least: float) -> bool:
    """Whether the gate has not been run yet, or is good enough on the published test (without one, on validation)."""
    if not (gate / "results.json").is_file():
        return True
    results = read_results(gate)
    test = results["tests"].get(PUBLISHED[gate.name.partition("-")[0]], results["valid"])
    return test["accuracy"] >= least


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- the report


def write_report(report: Path, out: Path, names: list[str]) -> None:
    """Write all results so far, and the metrics of the unfinished run."""
    done = [name for name in names if (out / name / "results.json").is_file()]
    begun = [name for name in names if (out / name / "metrics.jsonl").is_file()]
    lines = [json.dumps({"run": name} | event) for name in begun for event in read_metrics(out / name)]
    (report / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    speeds = {name: speed(out / name) for name in begun}
    (report / "speed.json").write_text(json.dumps(speeds, indent=1))
    if not done:
        return
    stdout, sys.stdout = sys.stdout, (report / "table.txt").open("w", encoding="utf-8")
    try:
        table = show_table([str(out / name) for name in done])
    finally:
        sys.stdout.close()
        sys.stdout = stdout
    print((report / "table.txt").read_text())
    results = {name: json.loads((out / name / "results.json").read_text()) | {"speed": speeds[name]} for name in done}
    (report / "results.json").write_text(json.dumps({"runs": results, "pairs": table["pairs"]}, indent=1))
    answers = {
        name: {
            test: "".join("01"[right] for right in found.values()) for test, found in read_answers(out / name).items()
        }
        for name in done
    }
    (report / "answers.json").write_text(json.dumps(answers))


def speed(run: Path) -> dict[str, float]:
    """Medians over the log lines, without the first ones, during which shapes are compiled."""
    events = [event for event in read_metrics(run) if event["kind"] == "train"]
    keys = ("examples_per_s", "tokens_per_s", "mfu", "memory_gib")
    return {key: median(e[key] for e in events[len(events) // 4 :]) for key in keys if events and key in events[-1]}


if __name__ == "__main__":
    main(sys.argv[1:])

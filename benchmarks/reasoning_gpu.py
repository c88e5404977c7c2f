"""The reasoning experiments of the paper in small, in one process: a model of the size of GPT-2 small, from scratch, on
questions like those of ProsQA and ProntoQA, and a pretrained one on GSM8K. The methods of a task share one budget of
examples and steps.

    python benchmarks/reasoning_gpu.py data=DATA out=runs/reasoning report=REPORT [minutes=8] [base=SmolLM2.gguf]
        [runs=prosqa:no-cot,prosqa:cot,...] [prosqa.epochs=8] [load=1.0] [tiny=true] [key=value of the settings ...]

DATA holds the published files: prosqa/prosqa_test.json, prontoqa/prontoqa_test.json, gsm8k/{train.jsonl.xz,test.jsonl}.
Training and test questions are generated once, by all cores, for all methods; the vocabulary is a BPE of the training
questions; stories (reason.recite) are told once for all methods. Some steps are timed, and then all runs train on that
share of the examples with which they end in `minutes`. A run that is late all the same is tested as it stands, and says
so; those of its task after it get as many examples as it had. REPORT receives table.txt, metrics.jsonl of all runs,
results.json (accuracies, intervals, tokens, times) and, with matplotlib, curves.png. What has results is not repeated:
the same command goes on after an interruption, and minutes=0 only writes the report. Two processes with different
`runs` may share a GPU and `out`, but not REPORT; `load` is how much longer a step then takes than when it was timed.
"""

import json
import os
import shutil
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm import config
from adlm.reasoning.command import run_reason
from adlm.reasoning.examples import Example, whole_text
from adlm.reasoning.networks import without_quantisation
from adlm.reasoning.recital import recite
from adlm.reasoning.runs import word_tokenizer
from adlm.reasoning.tasks import TASKS, generate
from adlm.reasoning.thoughts import batch_loss
from adlm.reasoning.training import Classroom, train
from adlm.schema import ReasonConfig
from adlm.training.metrics import read_metrics
from adlm.training.optim import Updater
from adlm.training.parallel import Step, world

RUNS = (
    "prosqa:cot", "prosqa:acot", "prosqa:icot", "prosqa:no-cot", "prontoqa:cot", "prontoqa:acot",
    "gsm8k:cot", "gsm8k:acot",
)  # fmt: skip
COST = {"coconut": 2.5}
"""Time of a method over that of plain chain of thought, where it is much more: thoughts are read one by one."""
WARM_UP, TIMED = 10, 30
"""Steps that measure the speed."""
AROUND = {"prosqa": 20.0, "prontoqa": 18.0, "gsm8k": 30.0}
"""Seconds of a run beside its training: reading, encoding, validating, testing, exporting."""
PLANNED = 0.9
"""Share of the time that is planned for; the rest is for steps slower than those timed."""
FROM_SCRATCH = (
    "algo=ar", "model=small", "recipe=fast", "model.length=512", "optim.lr=6e-4", "optim.muon_lr=2e-3",
    "optim.warmup=50", "optim.final=0.1", "reason.reset_optimizer=false", "train.batch_size=64",
    "train.attention=flash",
)  # fmt: skip
SETTINGS: dict[str, tuple[str, ...]] = {
    # in stories a network from scratch learns to look up what was said of a word, and of that in turn
    "prosqa": (*FROM_SCRATCH, "reason.epochs=10", "reason.epochs_per_stage=1", "reason.recite=1000",
               "reason.recite_rate=2.0"),
    "prontoqa": (*FROM_SCRATCH, "reason.epochs=12", "reason.epochs_per_stage=1"),
    # three epochs for each of acot's stages. No test answer has more than 144 tokens; all questions are asked at once.
    "gsm8k": ("algo=ar", "reason.epochs=9", "reason.epochs_per_stage=3", "reason.n_valid=200", "optim.schedule=linear",
              "optim.warmup=20", "reason.reset_optimizer=false", "train.batch_size=64", "reason.max_new_tokens=160"),
}  # fmt: skip
LONGEST = 370
"""Tokens of a training example. A few of ProsQA's are longer and, with slots, would need one more shape of rows."""
SIZES = {"prosqa": (17_886, 300, 500), "prontoqa": (9_000, 200, 800)}  # training, validation, test questions
ALWAYS = (
    "reason.eval_batch_size=1400", "reason.valid_every=2", "checkpoint.every=1000000", "checkpoint.keep=1",
    "train.log_every=20",
)  # fmt: skip
TINY = (
    "model.hidden_size=64", "model.n_heads=2", "model.n_blocks=2", "train.global_batch_size=16", "train.batch_size=8",
    "train.log_every=2", "reason.max_new_tokens=8",
)  # fmt: skip
SMALLEST = {"prosqa": (48, 8, 8), "prontoqa": (48, 8, 8), "gsm8k": (8, 4, 4)}
OPTIONS = {
    "data": "", "out": "runs/reasoning", "report": "", "minutes": "8", "base": "", "runs": "", "load": "1",
    "tiny": "false",
}  # fmt: skip


def main(argv: list[str]) -> None:
    words = dict(word.split("=", 1) for word in argv)
    options = {key: words.pop(key, default) for key, default in OPTIONS.items()}
    epochs = {task: words.pop(f"{task}.epochs", "") for task in SETTINGS}
    tiny, data, out = options["tiny"] == "true", Path(options["data"]), Path(options["out"])
    report = Path(options["report"] or out)
    runs = options["runs"].split(",") if options["runs"] else [r for r in RUNS if options["base"] or "gsm8k" not in r]
    began, minutes = time.monotonic(), float(options["minutes"])
    deadline = began + 60 * minutes
    report.mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if minutes and not (out / run.replace(":", "-") / "results.json").is_file()]
    settings, cost, starts = {}, {}, {}
    for task in dict.fromkeys(task_of(run) for run in left):
        try:
            settings[task] = [
                f"task={task}", *SETTINGS[task], *ALWAYS, *(TINY if tiny else ()),
                *(["reason.recite=3"] if tiny and task == "prosqa" else []),
                *prepare(task, data, out / "data", options["base"], tiny),
                *([f"reason.epochs={epochs[task]}"] if epochs[task] else []),
                *(f"{key}={value}" for key, value in words.items()),
            ]  # fmt: skip
            say(began, f"{task}: questions are there")
            seconds, speed, starts[task] = rehearse(settings[task])
        except Exception:  # the other tasks are worth having
            traceback.print_exc()
            left = [run for run in left if task_of(run) != task]
            continue
        cost[task] = seconds * float(options["load"])
        say(began, f"{task}: ready, {speed:.0f} examples/s, {cost[task]:.0f} s for all examples and epochs")
    needed = {run: cost[task_of(run)] * COST.get(run.split(":")[1], 1.0) for run in left}

    def time_to_train() -> float:
        """Seconds until the deadline that are left for training."""
        return deadline - time.monotonic() - sum(AROUND[task_of(run)] for run in left)

    share = min(1.0, max(0.01, PLANNED * time_to_train() / max(1.0, sum(needed[run] for run in left))))
    say(began, f"{share:.0%} of the training examples fit into the time")
    shares = dict.fromkeys(cost, share)
    while left:
        run = left[0]
        task, folder = task_of(run), out / run.replace(":", "-")
        cfg = config.load([*settings[task], f"method={run.split(':')[1]}", f"out={folder}"])
        batch = cfg.train.global_batch_size  # whole ones: a smaller one at the end of an epoch is compiled for itself
        cfg.reason.n_train = batch * max(1, int(shares[task] * examples_of(cfg.reason)) // batch)
        cfg.reason.minutes = max(3.0, time_to_train() * needed[run] / sum(needed[run] for run in left)) / 60
        start = time.monotonic()
        say(began, f"{run}: {cfg.reason.n_train} examples, {60 * cfg.reason.minutes:.0f} s of training at most")
        try:
            result = train(cfg, starts[task])
            (folder / "seconds.json").write_text(json.dumps({"seconds": round(time.monotonic() - start, 1)}))
            say(began, f"{run}: {result.step} steps, finished: {result.finished}, {result.tests}")
            shares[task] *= result.step / json.loads((folder / "results.json").read_text())["steps"]
            write_report(report, out, runs)
        except Exception:  # the other runs are worth having
            traceback.print_exc()
        for weights in ("checkpoints", "export"):
            shutil.rmtree(folder / weights, ignore_errors=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        left.pop(0)
    write_report(report, out, runs)


def task_of(run: str) -> str:
    return run.split(":")[0]


def examples_of(reason: ReasonConfig) -> int:
    return reason.n_train or len(TASKS[reason.task].read(Path(reason.train_path)))


def rehearse(settings: list[str]) -> tuple[float, float, dict[str, Tensor] | None]:
    """`timed` steps; without the compiler, for good, if it fails on this machine."""
    try:
        return timed(settings)
    except Exception:
        traceback.print_exc()
        settings.append("train.compile=false")
        return timed(settings)


def timed(overrides: list[str]) -> tuple[float, float, dict[str, Tensor] | None]:
    """Seconds of a plain chain of thought over all examples and epochs, examples a second, both from some steps; and
    the weights after the stories, which are a function of the seed and not of the method."""
    cfg = config.load([*overrides, "method=cot"])
    examples = examples_of(cfg.reason)
    cfg.reason.n_train = min(examples, cfg.train.global_batch_size * (WARM_UP + TIMED))
    with world(cfg.train) as ranks:
        room = Classroom(cfg, ranks)
        weights = None
        if cfg.reason.recite:
            loss = recite(room.network, room.tokenizer, cfg, ranks, room.row_multiple)
            print(f"stories, {cfg.reason.recite} steps: {loss:.3f} nats per token at the end", file=sys.stderr)
            weights = {name: x.detach().cpu().clone() for name, x in room.network.state_dict().items()}
        step_module = Step(room.network.train(), batch_loss)
        update = Updater(cfg.optim, step_module)
        start, seen = 0.0, 0
        for step in range(room.schedule.per_epoch):
            if step == min(WARM_UP, room.schedule.per_epoch - 1):
                synchronise()
                start, seen = time.monotonic(), 0
            for part in room.batches(step, cfg.train.batch_size or cfg.train.global_batch_size):
                with ranks.autocast():
                    step_module(part).total.backward()
            update(0.0)
            seen += len(room.schedule.examples(step))
        synchronise()
    speed = seen / (time.monotonic() - start)
    return cfg.reason.epochs * examples / speed, speed, weights


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- questions, vocabulary, pretrained base


def prepare(task: str, data: Path, folder: Path, base: str, tiny: bool) -> list[str]:
    """Overrides that name the files of a task; what has to be made is made once."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "gsm8k":
        files = {"train_path": data / "gsm8k/train.jsonl.xz", "test_path": data / "gsm8k/test.jsonl"}
        settings = [f"reason.base={as_folder(base, folder / 'base')}"]
        if tiny:
            n_train, n_valid, n_test = SMALLEST[task]
            short = folder / "gsm8k_test.jsonl"
            short.write_text("".join(files["test_path"].read_text().splitlines(keepends=True)[:n_test]))
            files["test_path"] = short
            settings += [f"reason.n_train={n_train}", f"reason.n_valid={n_valid}", "train.global_batch_size=4"]
            settings += ["train.batch_size=0"]
        return [*settings, *(f"reason.{key}={path}" for key, path in files.items())]
    sizes = SMALLEST[task] if tiny else SIZES[task]
    published = data / task / f"{task}_test.json"
    names = ("train", "valid", "generated")
    sets = dict(zip(names, split(questions(task, sum(sizes)), sizes)))
    for name, examples in sets.items():
        (folder / f"{task}-{name}.json").write_text(json.dumps([example._asdict() for example in examples]))
    tokenizer = word_tokenizer(sets["train"])
    tokenizer.save(folder / f"{task}-tokenizer.json")
    lengths = tokenizer.encode_batch([whole_text(example) for example in sets["train"]])
    short = [example for example, ids in zip(sets["train"], lengths) if len(ids) < LONGEST]
    (folder / f"{task}-train.json").write_text(json.dumps([example._asdict() for example in short]))
    tests = [folder / f"{task}-generated.json", *([published] if published.is_file() else [])]
    return [
        f"reason.train_path={folder / f'{task}-train.json'}", f"reason.valid_path={folder / f'{task}-valid.json'}",
        f"reason.n_valid={sizes[1]}", f"data.tokenizer={folder / f'{task}-tokenizer.json'}",
        "reason.test_path='" + ",".join(map(str, tests)) + "'",
    ]  # fmt: skip


def split(examples: list[Example], sizes: tuple[int, ...]) -> list[list[Example]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [examples[start : start + size] for start, size in zip(starts, sizes)]


def questions(task: str, n: int) -> list[Example]:
    """n different questions, made by all cores: each worker has its own seed, and doubles are dropped."""
    cores = os.cpu_count() or 1
    each = -(-n // cores) + n // (20 * cores) + 1
    with ProcessPoolExecutor(cores) as pool:
        made = [example for part in pool.map(partial(some, task, each), range(cores)) for example in part]
    different = list({TASKS[task].canonical(example): example for example in made}.values())
    assert len(different) >= n, (len(different), n)
    return different[:n]


def some(task: str, n: int, worker: int) -> list[Example]:
    return generate(TASKS[task], n, seed=1000 + worker)


def as_folder(base: str, folder: Path) -> str:
    """A GGUF file, written once as an ordinary folder: reading quantised weights takes longer than a short run."""
    if not base.endswith(".gguf"):
        return base
    if not (folder / "config.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = Path(base)
        options: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        AutoTokenizer.from_pretrained(**options).save_pretrained(folder)
        without_quantisation(AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)).save_pretrained(
            folder
        )
    return str(folder)


# ---- the report


def write_report(report: Path, out: Path, runs: list[str]) -> None:
    """All results so far; rewritten after every run, so that an interruption loses one run and not all."""
    folders = [f for f in (out / run.replace(":", "-") for run in runs) if (f / "results.json").is_file()]
    if not folders:
        return
    stdout, sys.stdout = sys.stdout, (report / "table.txt").open("w", encoding="utf-8")
    try:
        run_reason(config.load([]), ["table", *map(str, folders)])
    finally:
        sys.stdout.close()
        sys.stdout = stdout
    print((report / "table.txt").read_text())
    results, events = {}, {}
    for folder in folders:
        seconds = json.loads((folder / "seconds.json").read_text()) if (folder / "seconds.json").is_file() else {}
        results[folder.name] = json.loads((folder / "results.json").read_text()) | seconds
        events[folder.name] = read_metrics(folder)
    (report / "results.json").write_text(json.dumps(results, indent=1))
    lines = [json.dumps({"run": name} | event) for name, those in events.items() for event in those]
    (report / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    plot(report / "curves.png", events)


def plot(path: Path, events: dict[str, list[dict[str, Any]]]) -> None:
    """Loss and validation accuracy over steps, a row for each task and a line for each method."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    tasks = list(dict.fromkeys(name.partition("-")[0] for name in events))
    figure = Figure(figsize=(12, 4 * len(tasks)), layout="constrained")
    axes = dict(zip(tasks, figure.subplots(len(tasks), 2, squeeze=False)))
    for name, those in events.items():
        task, _, method = name.partition("-")
        for axis, kind, key in zip(axes[task], ("train", "valid"), ("nll", "accuracy")):
            points = [(event["step"], event[key]) for event in those if event["kind"] == kind]
            if points:
                axis.plot(*zip(*points), label=method, marker="." if kind == "valid" else "")
                axis.legend()
            axis.set(title=f"{task}: {key}, {kind}", xlabel="step")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(sys.argv[1:])

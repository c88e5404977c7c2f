"""The reasoning experiments of the paper in small, in one process: questions like those of ProsQA and ProntoQA, from a
pretrained base (`@base`, as the paper does) or from scratch, with a model of the size of GPT-2 small; and GSM8K, always
from the base. The methods of a task that start alike share one budget of examples and steps.

    python benchmarks/reasoning_gpu.py data=DATA out=runs/reasoning report=REPORT [minutes=8] [base=SmolLM2.gguf]
        [runs=prosqa:cot@base,prosqa:cot,...] [load=1.0] [tiny=true] [key=value of the settings ...]
        [prosqa.key=value of one task ...]

DATA holds the published files: prosqa/prosqa_test.json, prontoqa/prontoqa_test.json, gsm8k/{train.jsonl.xz,test.jsonl}.
The base is a GGUF file or the folder of a causal Hugging Face model. Questions are generated once, by all cores, for
all methods, as many as are read: none is repeated, and an epoch is only the unit in which stages share them. From
scratch the vocabulary is a BPE of the training questions, and stories (reason.story_steps) are learned once for all
methods. Some steps are timed, and then all runs train on that fraction of the examples with which they end in
`minutes`. A run that is late all the same is tested as it stands, and says so; those after it that share its budget get
as many examples as it had. REPORT receives table.txt, metrics.jsonl of all runs, results.json (accuracies, intervals,
tokens, times) and, with matplotlib, curves.png. What has results is not repeated: the same command resumes after an
interruption, and minutes=0 only writes the report. Two processes with different `runs` may share a GPU and `out`, but
not REPORT; `load` is how much longer a step then takes than when it was timed.
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
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm import config
from adlm.data.tokenizers import load_tokenizer
from adlm.reasoning.command import run_reason
from adlm.reasoning.examples import Example, read_records, whole_text
from adlm.reasoning.networks import batch_loss, without_quantisation, word_tokenizer
from adlm.reasoning.tasks import generate, task_of
from adlm.reasoning.training import ReasoningSetup, learn_stories, train
from adlm.schema import ReasonConfig
from adlm.tables import TASKS
from adlm.training.metrics import read_metrics
from adlm.training.optim import Updater
from adlm.training.parallel import Step, world


class Course(NamedTuple):
    """What the runs of a task that start alike have in common."""

    settings: tuple[str, ...]
    sizes: tuple[int, int, int]
    """Training, validation and test questions that are generated."""
    around: float
    """Seconds of a run beside its training: reading, encoding, validating, testing, exporting."""
    longest: int = 0
    """Most tokens of a generated training example, if that matters: a few long ones would need one more compiled
    shape."""


EVERY = (
    "algo=ar", "eval.batch_size=1400", "reason.valid_every=0", "checkpoint.every=1000000",
    "checkpoint.keep=1", "train.log_every=20",
)  # fmt: skip
SCRATCH = (
    *EVERY, "model=small", "recipe=fast", "model.length=512", "optim.lr=6e-4", "optim.muon_lr=2e-3", "optim.warmup=50",
    "optim.min_lr_ratio=0.1", "train.batch_size=64", "reason.fresh=true",
)  # fmt: skip
BASE = (*EVERY, "optim.lr=3e-4", "optim.schedule=linear", "optim.warmup=20", "train.global_batch_size=32")
# Stages share the examples as in the paper, where ProsQA and ProntoQA have five of fifty epochs each.
TENTHS = ("reason.epochs=10", "reason.epochs_per_stage=1")
COURSES: dict[tuple[str, str], Course] = {
    ("prosqa", "base"): Course((*BASE, *TENTHS, "reason.fresh=true"), (40_000, 200, 500), 20.0, 500),
    ("prontoqa", "base"): Course((*BASE, *TENTHS, "reason.fresh=true"), (40_000, 200, 400), 25.0),
    # of the test answers 0.5 % are longer than 112 tokens; the slowest of all answers decides how long a test takes
    ("gsm8k", "base"): Course((*BASE, "reason.epochs=6", "reason.epochs_per_stage=1", "optim.lr=2e-4",
                               "train.global_batch_size=64", "train.batch_size=32", "reason.max_new_tokens=112"),
                              (0, 200, 0), 40.0),
    # in stories a network from scratch learns to look up what was said of a word, and of that in turn
    ("prosqa", "scratch"): Course((*SCRATCH, *TENTHS, "reason.story_steps=1000"), (60_000, 300, 500), 20.0, 370),
    ("prontoqa", "scratch"): Course((*SCRATCH, *TENTHS), (45_000, 200, 400), 18.0),
}  # fmt: skip
COST = {"coconut": 2.5}
"""Time of a method over that of plain chain of thought, where it is much more: thoughts are read one by one."""
TIMED = 25
"""Steps that measure the speed."""
PLANNED = 0.9
"""Fraction of the time that is planned for; the rest is for steps slower than those timed."""
TINY = (
    "model.hidden_size=64", "model.n_heads=2", "model.n_blocks=2", "train.global_batch_size=2", "train.batch_size=1",
    "train.log_every=2", "reason.max_new_tokens=4",
)  # fmt: skip
SMALLEST = (10, 2, 2)
OPTIONS = {
    "data": "", "out": "runs/reasoning", "report": "", "minutes": "8", "base": "", "runs": "", "load": "1",
    "tiny": "false",
}  # fmt: skip


class Run(NamedTuple):
    task: str
    method: str
    start: str

    @property
    def course(self) -> tuple[str, str]:
        return self.task, self.start

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method}" + ("-base" if self.start == "base" else "")


def run_of(text: str) -> Run:
    """`task:method` or `task:method@base`."""
    words, _, start = text.partition("@")
    task, _, method = words.partition(":")
    run = Run(task, method, "base" if task == "gsm8k" else start or "scratch")
    assert run.course in COURSES, f"runs: no course for {text!r}"
    return run


def main(argv: list[str]) -> None:
    words = dict(word.split("=", 1) for word in argv)
    options = {key: words.pop(key, default) for key, default in OPTIONS.items()}
    tiny, data, out = options["tiny"] == "true", Path(options["data"]), Path(options["out"])
    report, base = Path(options["report"] or out), options["base"]
    logic = [f"{task}:{method}" for task in ("prosqa", "prontoqa") for method in ("no-cot", "cot", "acot", "icot")]
    everything = [f"{run}@base" for run in logic] + ["gsm8k:cot", "gsm8k:acot"] if base else logic
    runs = [run_of(text) for text in options["runs"].split(",") if text] or [run_of(text) for text in everything]
    began, minutes = time.monotonic(), float(options["minutes"])
    deadline = began + 60 * minutes
    report.mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if minutes and not (out / run.name / "results.json").is_file()]
    settings, cost, starts = {}, {}, {}
    for course in dict.fromkeys(run.course for run in left):
        task, start = course
        label = f"{task} from {start}"
        try:
            settings[course] = [
                f"task={task}", *COURSES[course].settings, *(TINY if tiny else ()),
                *(["reason.story_steps=3"] if tiny and course == ("prosqa", "scratch") else []),
                *prepare(course, data, out / "data", base, tiny), *overrides(words, task),
            ]  # fmt: skip
            say(began, f"{label}: questions are there")
            seconds, speed, starts[course] = rehearse(settings[course])
        except Exception:  # the other courses are worth having
            traceback.print_exc()
            left = [run for run in left if run.course != course]
            continue
        cost[course] = seconds * float(options["load"])
        say(began, f"{label}: ready, {speed:.0f} examples/s, {cost[course]:.0f} s for all examples")
    needed = {run: cost[run.course] * COST.get(run.method, 1.0) for run in left}

    def time_to_train() -> float:
        """Seconds until the deadline that are left for training."""
        return deadline - time.monotonic() - sum(COURSES[run.course].around for run in left)

    share = min(1.0, max(0.01, PLANNED * time_to_train() / max(1.0, sum(needed[run] for run in left))))
    say(began, f"{share:.0%} of the training examples fit into the time")
    shares = dict.fromkeys(cost, share)
    while left:
        run = left[0]
        folder = out / run.name
        cfg = config.load([*settings[run.course], f"method={run.method}", f"out={folder}"])
        # whole batches: a smaller one at the end of an epoch is compiled for itself
        batches = cfg.train.global_batch_size * (cfg.reason.epochs if cfg.reason.fresh else 1)
        cfg.reason.n_train = batches * max(1, int(shares[run.course] * examples_of(cfg.reason)) // batches)
        cfg.reason.minutes = max(3.0, time_to_train() * needed[run] / sum(needed[run] for run in left)) / 60
        start = time.monotonic()
        say(began, f"{run.name}: {cfg.reason.n_train} examples, {60 * cfg.reason.minutes:.0f} s of training at most")
        try:
            result = train(cfg, starts[run.course])
            (folder / "seconds.json").write_text(json.dumps({"seconds": round(time.monotonic() - start, 1)}))
            say(began, f"{run.name}: {result.step} steps, finished: {result.finished}, {result.tests}")
            shares[run.course] *= result.step / json.loads((folder / "results.json").read_text())["steps"]
            write_report(report, out, runs)
        except Exception:  # the other runs are worth having
            traceback.print_exc()
        for weights in ("checkpoints", "export"):
            shutil.rmtree(folder / weights, ignore_errors=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        left.pop(0)
    write_report(report, out, runs)


def overrides(words: dict[str, str], task: str) -> list[str]:
    """The settings of the command line: those of all tasks, and then those that begin with the name of this one."""
    tasks = {task for task, _ in COURSES}
    common = [f"{key}={value}" for key, value in words.items() if key.split(".")[0] not in tasks]
    own = [f"{key.partition('.')[2]}={value}" for key, value in words.items() if key.split(".")[0] == task]
    return common + own


def examples_of(reason: ReasonConfig) -> int:
    return reason.n_train or len(task_of(reason).read(Path(reason.train_path)))


def rehearse(settings: list[str]) -> tuple[float, float, dict[str, Tensor] | None]:
    """`timed` steps; without the compiler, for good, if it fails on this machine."""
    try:
        return timed(settings)
    except Exception:
        traceback.print_exc()
        settings.append("train.compile=false")
        return timed(settings)


def timed(settings: list[str]) -> tuple[float, float, dict[str, Tensor] | None]:
    """Seconds of a plain chain of thought over all that is read, examples a second, both from some steps; and the
    weights after the stories, which are a function of the seed and not of the method."""
    cfg = config.load([*settings, "method=cot"])
    examples = examples_of(cfg.reason)
    reads = examples * (1 if cfg.reason.fresh else cfg.reason.epochs)
    cfg.reason.n_train, cfg.reason.fresh = min(examples, cfg.train.global_batch_size * TIMED), False
    with world(cfg.train) as ranks:
        setup = ReasoningSetup(cfg, ranks)
        weights = None
        if cfg.reason.story_steps:
            loss = learn_stories(setup)
            print(f"stories, {cfg.reason.story_steps} steps: {loss:.3f} nats per token at the end", file=sys.stderr)
            weights = {name: x.detach().cpu().clone() for name, x in setup.network.state_dict().items()}
        step_module = Step(setup.network.train(), batch_loss)
        update = Updater(cfg.optim, step_module)
        seconds = []
        for step in range(setup.schedule.per_epoch):
            start = time.monotonic()
            for part in setup.batches(step):
                with ranks.autocast():
                    step_module(part).total.backward()
            update(0.0)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - start)
    speed = cfg.train.global_batch_size / median(seconds)  # a step in which a shape is compiled says nothing
    return reads / speed, speed, weights


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


# ---- questions, vocabulary, pretrained base


def prepare(course: tuple[str, str], data: Path, folder: Path, base: str, tiny: bool) -> list[str]:
    """Settings that name the files of a course; what has to be made is made once."""
    task, start = course
    files = folder / f"{task}-{start}"
    files.mkdir(parents=True, exist_ok=True)
    if start == "base":
        base = as_folder(base, folder / Path(base).stem)
    n_train, n_valid, n_test = sizes = SMALLEST if tiny else COURSES[course].sizes
    published = data / task / ("test.jsonl" if task == "gsm8k" else f"{task}_test.json")
    if tiny and published.is_file():
        short = files / f"{published.stem}.json"
        short.write_text(json.dumps(read_records(published)[:n_test]))
        published = short
    settings = [f"reason.n_valid={n_valid}", *([f"reason.base={base}"] if start == "base" else [])]
    if task == "gsm8k":
        settings += [f"reason.n_train={n_train}"] if tiny else []
        return [*settings, f"reason.train_path={data / task / 'train.jsonl.xz'}", f"reason.test_path={published}"]
    sets = dict(zip(("train", "valid", "generated"), split(questions(task, sum(sizes)), sizes)))
    if start == "base":
        tokenizer = load_tokenizer(str(Path(base) / "tokenizer.json"))
    else:
        tokenizer = word_tokenizer(sets["train"])
        tokenizer.save(files / "tokenizer.json")
        settings.append(f"data.tokenizer={files / 'tokenizer.json'}")
    if longest := COURSES[course].longest:
        lengths = map(len, tokenizer.encode_batch([whole_text(example) for example in sets["train"]]))
        sets["train"] = [example for example, length in zip(sets["train"], lengths) if length < longest]
    for name, examples in sets.items():
        (files / f"{task}-{name}.json").write_text(json.dumps([example._asdict() for example in examples]))
    tests = [files / f"{task}-generated.json", *([published] if published.is_file() else [])]
    return [
        *settings, f"reason.train_path={files / f'{task}-train.json'}",
        f"reason.valid_path={files / f'{task}-valid.json'}", "reason.test_path='" + ",".join(map(str, tests)) + "'",
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
    different = list({TASKS.load(task).canonical(example): example for example in made}.values())
    assert len(different) >= n, (len(different), n)
    return different[:n]


def some(task: str, n: int, worker: int) -> list[Example]:
    return generate(TASKS.load(task), n, seed=1000 + worker)


def as_folder(base: str, folder: Path) -> str:
    """A GGUF file, written once as an ordinary folder: reading quantised weights takes longer than a short run."""
    assert base, "runs from a base need base=FILE.gguf or the folder of a model"
    if not base.endswith(".gguf"):
        return base
    if not folder.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file, part = Path(base), folder.with_name(f"{folder.name}.{os.getpid()}")
        options: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
        without_quantisation(model).save_pretrained(part)
        AutoTokenizer.from_pretrained(**options).save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return str(folder)


# ---- the report


def write_report(report: Path, out: Path, runs: list[Run]) -> None:
    """All results so far; rewritten after every run, so that an interruption loses one run and not all."""
    folders = [out / run.name for run in runs if (out / run.name / "results.json").is_file()]
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

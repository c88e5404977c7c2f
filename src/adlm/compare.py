"""`adlm compare [algo[+key=value...] ...]`: train algorithms, and variants of them, on one corpus with one budget, and
compare them in a table (evaluation/comparison.py).

Each has its own run folder below `out`, composed from the same command line with another `algo=`, so any of them can be
inspected, sampled from or trained further. Finished runs are not repeated: a rerun trains what is missing, resumes what
was interrupted, and rebuilds the table, which is written after every run.

With `compare.jobs` several runs train at once, each in its own process: on a GPU that one small model does not fill
(under CUDA's MPS daemon), or on the cores of a CPU. Their output goes to log.txt in their folders.

The budget is a number of steps or, with `compare.equal_flops`, the training FLOPs of the first algorithm named: the
others then get the number of steps that costs the same.

The module also has `adlm speedrun`, one run against the clock.
"""

import contextlib
import json
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adlm import config
from adlm.config.keys import group_choices
from adlm.errors import choose, require
from adlm.evaluation import versions, write_result
from adlm.evaluation.comparison import REFERENCE, Comparison, Entry, report
from adlm.evaluation.perplexity import measure, scored_spans
from adlm.io.load import load_checkpoint
from adlm.io.paths import writable_folder, write_atomically
from adlm.models.network import parameter_count
from adlm.schema import Config
from adlm.training import setup
from adlm.training.loop import command_line, train
from adlm.training.metrics import read_metrics
from adlm.training.parallel import Interruption, World, world
from adlm.training.run import Fork

ENTRY, LOG = "compared.json", "log.txt"
BUDGET = ("optim.", "train.steps", "train.global_batch_size", "train.length_warmup")
"""Prefixes of the keys that define the budget and how it is spent."""


def run_compare(cfg: Config, line: Sequence[str], args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm compare`: print, write and return the table.

    `line`: the overrides of the command line, from which each algorithm's settings are composed.
    """
    asked = [name for arg in args for name in each_seed(arg)]
    names = list(dict.fromkeys(asked)) or list(group_choices("algo"))
    for name in names:
        if asked.count(name) > 1:
            say(f"{name} is named {asked.count(name)} times, and is one run; +seed=2 makes another")
    folder = Path(cfg.out)
    # check all settings before the first run: a mistake should not show after hours
    each = [*line, "compare.jobs=1"]  # the number of parallel runs does not change a run
    runs = {name: config.load([*each, *variant(name), f"out={folder / name.replace('/', '_')}"]) for name in names}
    require(
        cfg.eval.estimator in ("auto", "continuous"),
        "adlm compare sets one number beside another: eval.estimator=continuous",
    )
    require(cfg.compare.jobs == 1 or "RANK" not in os.environ, "compare.jobs > 1 does not go together with torchrun")
    writable_folder("out", folder)
    if cfg.compare.equal_flops:
        runs = with_equal_flops(runs, cfg)
    entries = {name: entry for name, run in runs.items() if (entry := read_entry(run)) is not None}
    missing = {name: run for name, run in runs.items() if name not in entries}
    for name, run in missing.items():
        check_budget(name, run)
    say(f"{len(entries)} of {len(runs)} are done")
    failed, stopped, jobs = list[str](), list[int](), cfg.compare.jobs
    for entry in one_by_one(missing, cfg, stopped) if jobs == 1 else side_by_side(missing, jobs, failed, stopped):
        entries[entry.name] = entry
        say(f"{entry.name}: {entry.estimate['nats_per_token']:.3f}; {len(entries)} of {len(runs)} are done")
        show(list(entries.values()), cfg, folder)
    document = show(list(entries.values()), cfg, folder, tell=True) if entries else {}
    require(not failed, "; ".join(failed))
    return document | {"stopped_by": stopped[0] if stopped else 0}


def check_budget(name: str, run: Config) -> None:
    """Refuse to resume a run that began with another budget or optimizer: its learning rate has decayed towards another
    end, so the result is not that of these settings."""
    begun, now = config.begun(run.out), config.flatten(run)
    for key in (key for key in now if key.startswith(BUDGET)):
        was = begun.get(key, now[key])
        require(was == now[key], f"{run.out} holds a run of {name} with {key}={was}, not {now[key]}: give another out=")


def with_equal_flops(runs: dict[str, Config], cfg: Config) -> dict[str, Config]:
    """Give every run the number of steps that costs the training FLOPs of the first one, counted by
    `setup.training_flops`. Steps before the checkpoint that a run starts from are not counted."""
    given = [name for name in runs if "train.steps=" in name]
    require(not given, f"compare.equal_flops=true counts the steps of every run: take train.steps out of {given}")
    for name, run in runs.items():
        alike = run.objective.causal_until == 0 and run.objective.gamma_until in (0, 1) and run.train.length_warmup == 1
        require(
            alike or not begin_of(run),
            f"{name} starts from a checkpoint, and compare.equal_flops=true cannot tell which of its kinds of steps are"
            " still to come: set objective.causal_until=0, objective.gamma_until=1 (or 0) and train.length_warmup=1",
        )
    first = next(iter(runs.values()))
    budget = (first.train.steps - begin_of(first)) * step_flops(first, cfg)
    matched = {}
    for name, run in runs.items():
        steps = begin_of(run) + max(1, round(budget / step_flops(run, cfg)))
        matched[name] = replace(run, train=replace(run.train, steps=steps))
        say(f"{name}: {steps:,} steps")
    return matched


def begin_of(run: Config) -> int:
    """The step at which a run begins: that of the checkpoint it starts from, else 0."""
    return Fork.of(run.checkpoint.init_from).step if Fork.named(run.checkpoint.init_from) else 0


def step_flops(run: Config, cfg: Config) -> float:
    """Training FLOPs of one step, with the seed of the comparison, so that all seeds of a variant get equal steps."""
    run = replace(run, seed=cfg.seed)
    with world(replace(run.train, device="cpu")) as ranks:
        data = setup.prepare_data(run, ranks)
        flops = setup.training_flops(run, setup.objective_for(run, data), data)
    return flops * run.train.global_batch_size * run.model.length


def one_by_one(runs: dict[str, Config], cfg: Config, stopped: list[int]) -> Iterator[Entry]:
    """Train and measure one run after another, until a signal stops one; that signal is added to `stopped`."""
    with world(cfg.train):  # ranks meet once for all runs
        for name, run in runs.items():
            entry = finish(name, run, stopped)
            if entry is None:
                return
            yield entry


def finish(name: str, run: Config, stopped: list[int]) -> Entry | None:
    """Train, measure and record one run; None if a signal stopped it, and the signal is added to `stopped`."""
    result = train(run)
    if not result.finished:
        stopped.append(result.stopped_by)
        return None
    with world(run.train) as ranks:
        entry = measure_run(name, run, ranks)
        if ranks.is_main:
            write_atomically(Path(run.out) / ENTRY, json.dumps(asdict(entry)) + "\n")
    return entry


def side_by_side(runs: dict[str, Config], jobs: int, failed: list[str], stopped: list[int]) -> Iterator[Entry]:
    """Train and measure `jobs` runs at a time, in the order in which they end.

    A run that fails does not stop the others: its last message is added to `failed`. A signal is passed on, so that all
    of them save and stop, and is added to `stopped`.
    """
    waiting, running, stopping = list(runs), dict[Any, tuple[str, Any]](), False
    spawn = multiprocessing.get_context("spawn")  # a fork would share the state of a GPU
    with Interruption() as interruption, shared_cores(jobs):
        while waiting or running:
            if interruption.requested and not stopping:
                stopping = True
                stopped.append(interruption.number)
                waiting.clear()
                for _, process in running.values():
                    process.terminate()
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                process = spawn.Process(target=finish_quietly, args=(name, runs[name]))
                process.start()
                running[process.sentinel] = (name, process)
                say(f"{name}: started")
            for sentinel in wait(list(running), timeout=0.2):
                name, process = running.pop(sentinel)
                process.join()
                if (entry := read_entry(runs[name])) is not None:
                    yield entry
                elif process.exitcode and not stopping:
                    killed = process.exitcode < 0  # for example, out of memory; then it left no message
                    why = f"killed by signal {-process.exitcode}" if killed else last_line(Path(runs[name].out) / LOG)
                    failed.append(f"{name} failed: {why}")
                    say(failed[-1])
                else:
                    say(f"{name}: stopped by a signal; the same command resumes it")


def finish_quietly(name: str, run: Config) -> None:
    """Finish a run as a process of `side_by_side`, with its output in a file."""
    folder = writable_folder("out", Path(run.out))
    with open(folder / LOG, "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        finish(name, run, [])
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


@contextlib.contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """Give processes started here an equal part of the cores, unless the user has set the number of threads."""
    ours = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def on_main_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    if on_main_rank():
        print(message, flush=True)


def each_seed(name: str) -> list[str]:
    """`adlm+seed=1,2` -> `adlm+seed=1` and `adlm+seed=2`."""
    parts = name.split("+")
    at = next((i for i, part in enumerate(parts) if part.startswith("seed=")), None)
    if at is None:
        return [name]
    seeds = parts[at].removeprefix("seed=").split(",")
    return ["+".join([*parts[:at], f"seed={seed}", *parts[at + 1 :]]) for seed in seeds]


def variant(name: str) -> list[str]:
    """`adlm+seed=2+recipe=fast` -> the overrides it means."""
    algo, *changes = name.split("+")
    choose("algo", algo, group_choices("algo"))
    require(all("=" in change for change in changes), f"{name!r}: after the algorithm, +key=value for each change")
    return [f"algo={algo}", *changes]


def show(entries: list[Entry], cfg: Config, folder: Path, tell: bool = False) -> dict[str, Any]:
    """Write table.md, table.json and report.html; `tell`: also print the table."""
    reference = REFERENCE if any(e.name == REFERENCE for e in entries) else entries[0].name
    comparison = Comparison(entries, reference, cfg)
    document = {"command": command_line(), **comparison.as_dict()}
    if on_main_rank():
        write_result(folder / "table.json", document)
        write_atomically(folder / "table.md", comparison.markdown())
        write_atomically(folder / "report.html", report(comparison))
        if tell:
            console = Console()
            console = console if console.is_terminal else Console(width=160)
            console.print(comparison.table())
            console.print("\n".join(comparison.seeds_markdown()), highlight=False)
            print(f"written to {folder / 'table.md'}, {folder / 'table.json'} and {folder / 'report.html'}")
    return document


def read_entry(cfg: Config) -> Entry | None:
    """Read the result of an earlier call with exactly these settings, if there is one."""
    try:
        entry = Entry(**json.loads((Path(cfg.out) / ENTRY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return entry if entry.config == json.loads(json.dumps(asdict(cfg))) else None


# The table


def measure_run(name: str, cfg: Config, ranks: World) -> Entry:
    """Measure a finished run: its EMA weights on the validation split of its own data."""
    run = Path(cfg.out)
    data = setup.prepare_data(cfg, ranks)
    loaded = load_checkpoint(run, cfg.eval.ema, ranks.device)
    ((kind, estimate),) = measure(loaded, data.valid, cfg.eval, ranks).items()
    assert estimate.row_nats is not None
    begin_N, end_N = scored_spans(data.valid, estimate.rows, int(kind == "exact"))
    flops = setup.training_flops(cfg, setup.objective_for(cfg, data), data)
    events = read_metrics(run)
    speeds = [event["tokens_per_s"] for event in events if event["kind"] == "train"]
    return Entry(
        name,
        kind,
        estimate.as_dict(),
        estimate.row_nats.tolist(),
        (end_N - begin_N).tolist(),
        parameter_count(loaded.model),
        flops,
        max(speeds, default=math.nan),
        cfg.train.steps * cfg.train.global_batch_size * cfg.model.length,
        asdict(cfg),
        [(event["step"], event["nll"]) for event in events if event["kind"] == "valid"],
    )


# ---- adlm speedrun ---------------------------------------------------------------------------------------------------
# `adlm speedrun`: how soon does a model reach the bound that the public release has after 36M tokens?
#
# The first validation of a run that is at or below the target counts. The clock starts with the first step. Compiling
# is reported separately: a log window in which something was compiled (the first one, and the first after sequences get
# their full length) counts at the speed of the next window. docs/speedrun.md has the rules and the records.

TARGET = 6.726
"""Nats per token on held-out Wikipedia: the release's recipe, 768 wide, after 36M tokens (docs/results.md)."""
RULES = {"data.name": "wikipedia", "data.tokenizer": "gpt2", "model.length": 1024, "model.causal": False}
LEAST_SEQUENCES = 512
"""Fewest held-out sequences of a validation."""
RECORD = "record.json"


def run_speedrun(cfg: Config) -> dict[str, Any]:
    """`adlm speedrun`: train by the rules, and print and write the record."""
    check_rules(cfg)
    result = train(cfg)
    if not result.finished:
        return result._asdict()
    folder = Path(result.run)
    record = read_record(read_metrics(folder), cfg)
    with world(cfg.train) as ranks:
        data = setup.prepare_data(cfg, ranks)
        record |= {"validation": data.fingerprints()["valid"], "versions": versions(ranks.device)}
    record |= {"parameters": parameters(cfg, data), "seed": cfg.seed, "command": command_line()}
    write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
    print(describe(record))
    print(f"written to {folder / RECORD}")
    return record


def check_rules(cfg: Config) -> None:
    """Refuse settings that cannot be compared with other records."""
    for key, value in RULES.items():
        section, _, name = key.partition(".")
        given = getattr(getattr(cfg, section), name)
        require(given == value, f"{key}={given} is against the rules of the speedrun, which has {key}={value}")
    given = cfg.train.valid_sequences
    require(
        given == 0 or given >= LEAST_SEQUENCES,
        f"train.valid_sequences={given} is against the rules of the speedrun: at least {LEAST_SEQUENCES}",
    )
    require(cfg.train.valid_every > 0, "train.valid_every=0 never looks whether the target is reached")


def parameters(cfg: Config, data: setup.Data) -> int:
    with torch.device("meta"):
        return parameter_count(setup.build_model(cfg.model, data.tokenizer.vocab_size, data.tokenizer.mask_id))


def read_record(events: list[dict[str, Any]], cfg: Config) -> dict[str, Any]:
    """When the target was reached: tokens, seconds of steps, seconds in all. Without these if it was not reached."""
    valid = [event for event in events if event["kind"] == "valid"]
    reached = next((event for event in valid if event["nll"] <= TARGET), None)
    best = min(event["nll"] for event in valid)
    if reached is None:
        return {"target": TARGET, "reached": False, "best": best}
    tokens_per_step = cfg.train.global_batch_size * cfg.model.length
    windows = [event for event in events if event["kind"] == "train" and event["step"] <= reached["step"]]
    seconds = step_seconds(windows, cfg)
    start = valid[0]["time"]  # the validation before the first step
    return {
        "target": TARGET,
        "reached": True,
        "bound": reached["nll"],
        "tokens": reached["step"] * tokens_per_step,
        "step_seconds": round(seconds, 2),
        "seconds": round(reached["time"] - start, 2),
        "best": best,
    }


def step_seconds(windows: list[dict[str, Any]], cfg: Config) -> float:
    """Seconds taken by the steps of these log windows, without compiling."""
    changes = {0}  # steps before which something is compiled
    if cfg.train.length_warmup > 1:
        changes.add(int(cfg.train.steps * cfg.train.length_warmup_fraction))
    total, begin = 0.0, 0
    for i, window in enumerate(windows):
        end = window["step"]
        compiles = any(begin <= change < end for change in changes)
        speed = windows[i + 1 if compiles and i + 1 < len(windows) else i]["tokens_per_s"]
        total += (end - begin) * cfg.train.global_batch_size * cfg.model.length / speed
        begin = end
    return total


def describe(record: dict[str, Any]) -> str:
    if not record["reached"]:
        return f"The target of {TARGET} nats was not reached; the best bound is {record['best']:.3f}"
    return (
        f"{record['bound']:.3f} nats after {record['tokens'] / 1e6:.2f}M tokens:"
        f" {record['step_seconds']:.1f} s of steps, {record['seconds']:.1f} s with compiling and validation"
    )

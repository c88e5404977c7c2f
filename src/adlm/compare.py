"""`adlm compare [algo[+key=value...] ...]`: train algorithms, and variants of them, on one corpus with one budget, and
set them side by side.

Each is a run folder of its own below `out`, composed from the same command line with another `algo=`, so
that any of them can be looked at, sampled from or trained further. What is finished is not done again: a rerun trains
what is missing, resumes what was interrupted, and rebuilds the table, which is written after every run.

With `compare.jobs` several runs train at once, each in a process of its own: on a GPU that one small model does not
fill (under CUDA's MPS daemon), or on the cores of a CPU. What they say goes to log.txt in their folders.

Every run is measured on the same sequences with the same noise, so the difference of two bounds is paired: its interval
is that of the differences of sequences, far narrower than the two intervals suggest. A bound is never set against an
exact likelihood that way: a causal model is given the first token of a sequence, and a bound may lie above the truth.
"""

import contextlib
import json
import math
import multiprocessing
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from adlm import config
from adlm.config.keys import group_choices
from adlm.errors import choose, require
from adlm.evaluation import write_result
from adlm.evaluation.intervals import Estimate, student, summarise
from adlm.evaluation.perplexity import measure, phases, token_counts
from adlm.io.load import load_checkpoint
from adlm.io.paths import writable_folder, write_atomically
from adlm.schema import Config
from adlm.training import setup
from adlm.training.loop import command_line, train
from adlm.training.metrics import read_metrics
from adlm.training.parallel import Interruption, World, world

ENTRY, LOG = "compared.json", "log.txt"
REFERENCE = "adlm"
COLUMNS = (
    "algorithm", "nats per token", "95% over sequences", "perplexity", "minus {reference}, paired 95%", "parameters",
    "MFLOP per token", "tokens/s",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    name: str
    """The algorithm, with what was changed in it."""
    kind: str
    """exact (a likelihood), or the estimator of the bound."""
    estimate: dict[str, Any]
    row_nats: list[float]
    """Nats of every sequence: what paired differences are made of."""
    row_tokens: list[int]
    """Scored tokens of every sequence."""
    parameters: int
    flops_per_token: float
    """Forward and backward in training."""
    tokens_per_s: float
    """The best stretch between two log lines: other work on the machine can only slow a run."""
    training_tokens: int
    config: dict[str, Any]


def run_compare(cfg: Config, line: Sequence[str], args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm compare`: the table is printed, written and returned.

    `line`: the overrides of the command line, from which each algorithm's settings are composed.
    """
    names = list(dict.fromkeys(name for arg in args for name in each_seed(arg))) or list(group_choices("algo"))
    folder = Path(cfg.out)
    # all of them before the first is trained: a mistake must not wait for hours
    each = [*line, "compare.jobs=1"]  # how many train at once changes no run
    runs = {name: config.load([*each, *variant(name), f"out={folder / name.replace('/', '_')}"]) for name in names}
    require(
        cfg.eval.estimator in ("auto", "continuous"),
        "adlm compare sets one number beside another: eval.estimator=continuous",
    )
    require(cfg.compare.jobs == 1 or "RANK" not in os.environ, "compare.jobs > 1 does not go together with torchrun")
    entries = {name: entry for name, run in runs.items() if (entry := read_entry(run)) is not None}
    missing = {name: run for name, run in runs.items() if name not in entries}
    say(f"{len(entries)} of {len(runs)} are done")
    failed, stopped, jobs = list[str](), list[int](), cfg.compare.jobs
    for entry in one_by_one(missing, cfg, stopped) if jobs == 1 else side_by_side(missing, jobs, failed, stopped):
        entries[entry.name] = entry
        say(f"{entry.name}: {entry.estimate['nats_per_token']:.3f}; {len(entries)} of {len(runs)} are done")
        show(list(entries.values()), cfg, folder)
    document = show(list(entries.values()), cfg, folder, tell=True) if entries else {}
    require(not failed, "; ".join(failed))
    return document | {"stopped_by": stopped[0] if stopped else 0}


def one_by_one(runs: dict[str, Config], cfg: Config, stopped: list[int]) -> Iterator[Entry]:
    """Train and measure, up to the first that a signal stops, which is added to `stopped`."""
    with world(cfg.train):  # ranks meet once for all runs
        for name, run in runs.items():
            entry = finish(name, run, stopped)
            if entry is None:
                return
            yield entry


def finish(name: str, run: Config, stopped: list[int]) -> Entry | None:
    """Train, measure and note one run; None if a signal stopped it, which is added to `stopped`."""
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

    A run that fails does not stop the others: what it said last is added to `failed`. A signal is passed on, so that
    all of them save and stop, and added to `stopped`.
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
                    killed = process.exitcode < 0  # by a full memory, say, and then it had no last word
                    why = f"killed by signal {-process.exitcode}" if killed else last_line(Path(runs[name].out) / LOG)
                    failed.append(f"{name} failed: {why}")
                    say(failed[-1])
                else:
                    say(f"{name}: stopped by a signal; the same command resumes it")


def finish_quietly(name: str, run: Config) -> None:
    """Finish a run as a process of `side_by_side`: whatever is said goes to a file."""
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
    """Processes started here get their part of the cores, unless the user has said how many threads one may use."""
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
    """`adlm+seed=2+recipe=fast` -> the overrides it stands for."""
    algo, *changes = name.split("+")
    choose("algo", algo, group_choices("algo"))
    require(all("=" in change for change in changes), f"{name!r}: after the algorithm, +key=value for each change")
    return [f"algo={algo}", *changes]


def show(entries: list[Entry], cfg: Config, folder: Path, tell: bool = False) -> dict[str, Any]:
    """Write table.md and table.json; print the table if it is the last."""
    reference = REFERENCE if any(e.name == REFERENCE for e in entries) else entries[0].name
    comparison = Comparison(entries, reference, cfg)
    document = {"command": command_line(), **comparison.as_dict()}
    if on_main_rank():
        write_result(folder / "table.json", document)
        write_atomically(folder / "table.md", comparison.markdown())
        if tell:
            console = Console()
            console = console if console.is_terminal else Console(width=160)
            console.print(comparison.table())
            console.print("\n".join(comparison.seeds_markdown()), highlight=False)
            print(f"written to {folder / 'table.md'} and {folder / 'table.json'}")
    return document


def read_entry(cfg: Config) -> Entry | None:
    """Read what an earlier call found for exactly these settings."""
    try:
        entry = Entry(**json.loads((Path(cfg.out) / ENTRY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return entry if entry.config == json.loads(json.dumps(asdict(cfg))) else None


# The table


def measure_run(name: str, cfg: Config, ranks: World) -> Entry:
    """Measure a finished run: its EMA weights on the validation split it was trained beside."""
    run = Path(cfg.out)
    data = setup.prepare_data(cfg, ranks)
    loaded = load_checkpoint(run, cfg.eval.ema, ranks.device)
    ((kind, estimate),) = measure(loaded, data.valid, cfg.eval, ranks).items()
    assert estimate.row_nats is not None
    counts_N = token_counts(data.valid, estimate.rows, kind == "exact")
    flops = setup.training_flops(cfg, setup.objective_for(cfg, data), data)
    speeds = [event["tokens_per_s"] for event in read_metrics(run) if event["kind"] == "train"]
    return Entry(
        name,
        kind,
        estimate.as_dict(),
        estimate.row_nats.tolist(),
        counts_N.tolist(),
        setup.parameter_count(loaded.model),
        flops,
        max(speeds, default=math.nan),
        cfg.train.steps * cfg.train.global_batch_size * cfg.model.length,
        asdict(cfg),
    )


def paired(entry: Entry, reference: Entry, seed: int) -> Estimate | None:
    """Nats per token of `entry` above `reference`, with the error of the paired difference; None if not alike."""
    if entry is reference or (entry.kind, entry.row_tokens) != (reference.kind, reference.row_tokens):
        return None
    difference_N1 = (np.array(entry.row_nats) - np.array(reference.row_nats))[:, None]
    phase_N = None if entry.kind == "exact" else phases(seed, len(difference_N1)).numpy()
    return summarise(difference_N1, np.array(entry.row_tokens), phase_N)


@dataclass(frozen=True)
class OverSeeds:
    """Runs that differ in nothing but their seed."""

    name: str
    kind: str
    nats: dict[int, float]
    """Nats per token by seed."""

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.nats.values())))

    @property
    def deviation(self) -> float:
        return float(np.std(list(self.nats.values()), ddof=1))

    def minus(self, other: "OverSeeds") -> tuple[float, float] | None:
        """Mean of the differences of runs with the same seed, and half of its 95% interval (Student); None where there
        are fewer than two such pairs, or where one is a bound and the other is not."""
        shared = self.nats.keys() & other.nats.keys()
        if self is other or self.kind != other.kind or len(shared) < 2:
            return None
        d = np.array([self.nats[seed] - other.nats[seed] for seed in shared])
        return float(d.mean()), student(len(d) - 1) * float(d.std(ddof=1)) / math.sqrt(len(d))


def over_seeds(entries: list[Entry]) -> list[OverSeeds]:
    """Group runs that differ in their seed alone, two or more; in the order of their first entries."""
    groups: dict[str, OverSeeds] = {}
    for entry in entries:
        name = without_seed(entry.name)
        group = groups.setdefault(name, OverSeeds(name, entry.kind, {}))
        group.nats[entry.config["seed"]] = entry.estimate["nats_per_token"]
    return [group for group in groups.values() if len(group.nats) > 1]


def without_seed(name: str) -> str:
    return "+".join(part for part in name.split("+") if not part.startswith("seed="))


class Comparison:
    """Entries in the order of the table: bounds, then exact likelihoods, each from the best down."""

    def __init__(self, entries: list[Entry], reference: str, cfg: Config):
        self.entries = sorted(entries, key=lambda e: (e.kind == "exact", e.estimate["nats_per_token"]))
        self.cfg, self.reference = cfg, reference
        by_name = {entry.name: entry for entry in entries}
        self.differences: dict[str, tuple[str, Estimate]] = {}
        for entry in self.entries:
            # causal runs are set against ar, where it is there
            to = by_name.get("ar" if entry.kind == "exact" else reference)
            if to and (found := paired(entry, to, cfg.eval.seed)) is not None:
                self.differences[entry.name] = (to.name, found)

    def rows(self) -> list[list[str]]:
        """The cells of the table."""
        lines = []
        for e in self.entries:
            ends = e.estimate["nats_interval"]
            difference = ""
            to, d = self.differences.get(e.name, ("", None))
            if d is not None and d.interval is not None:  # one sequence has none
                difference = f"{d.nats:+.3f} [{d.interval[0]:+.3f}, {d.interval[1]:+.3f}]"
                difference += f" to {to}" if e.kind == "exact" else ""
            lines.append(
                [
                    e.name,
                    f"{e.estimate['nats_per_token']:.3f}" + (" exact" if e.kind == "exact" else " bound"),
                    "" if ends is None else f"{ends[0]:.3f} - {ends[1]:.3f}",
                    f"{e.estimate['perplexity']:,.1f}",
                    difference,
                    f"{e.parameters:,}",
                    f"{e.flops_per_token / 1e6:.2f}",
                    f"{e.tokens_per_s:,.0f}",
                ]
            )
        return lines

    def seeds(self) -> list[dict[str, Any]]:
        """The scatter between seeds, where it is known: the more severe test of a difference."""
        groups = over_seeds(self.entries)
        by_name = {group.name: group for group in groups}
        found = []
        for g in groups:
            to = by_name.get("ar" if g.kind == "exact" else without_seed(self.reference))
            found.append(asdict(g) | {"mean": g.mean, "deviation": g.deviation})
            if to is not None and (difference := g.minus(to)) is not None:
                found[-1] |= {"to": to.name, "difference": difference[0], "half": difference[1]}
        return found

    def seeds_markdown(self) -> list[str]:
        """The table over seeds; empty where no run has another seed."""
        lines = []
        for g in self.seeds():
            difference = ""
            if "to" in g:
                difference = f"{g['difference']:+.3f} +- {g['half']:.3f} to {g['to']}"
            seeds = ", ".join(map(str, sorted(g["nats"])))
            lines.append(f"| {g['name']} | {seeds} | {g['mean']:.3f} | {g['deviation']:.3f} | {difference} |")
        head = ["| over seeds | seeds | mean nats per token | deviation | difference, paired by seed, 95% |"]
        return [*head, "|---|---|---:|---:|---:|", *lines, ""] if lines else []

    def columns(self) -> list[str]:
        return [name.format(reference=self.reference) for name in COLUMNS]

    def table(self) -> Table:
        """The table for the terminal."""
        table = Table(*self.columns(), box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for line in self.rows():
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """The table as Markdown, with everything that must be known to read it."""
        columns = self.columns()
        lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += [f"| {' | '.join(line)} |" for line in self.rows()]
        t, m = self.cfg.train, self.cfg.model
        tokens = t.steps * t.global_batch_size * m.length
        alike = all(e.training_tokens == tokens and "seed=" not in e.name for e in self.entries)
        budget = (
            f"Budget of each{'' if alike else ', unless its name says otherwise'}: {t.steps:,} steps of"
            f" {t.global_batch_size} sequences of {m.length} tokens ({tokens:,} tokens) of {self.cfg.data.name}, seed"
            f" {self.cfg.seed}. Evaluated on {self.entries[0].estimate['rows']} held-out"
            f" sequences, {self.cfg.eval.draws} draws of noise for bounds. {hardware()}."
        )
        return "\n".join([*lines, "", *self.seeds_markdown(), budget, ""])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for table.json."""
        return {
            "entries": [asdict(entry) for entry in self.entries],
            "differences": {name: {"to": to, **d.as_dict()} for name, (to, d) in self.differences.items()},
            "seeds": self.seeds(),
            "hardware": hardware(),
        }


def hardware() -> str:
    """The device, the threads and the version of torch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
        name = names[0] if names else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)} of {os.cpu_count()}, torch {torch.__version__}"

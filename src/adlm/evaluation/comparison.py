"""The results of `adlm compare`: the table, and the curves over training compute.

Every run is measured on the same sequences with the same noise, so the difference of two bounds is paired: its interval
is that of the per-sequence differences, far narrower than the two intervals suggest. A bound is never paired with an
exact likelihood: a causal model is given the first token of a sequence, and a bound may lie above the true value.
"""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from adlm import reporting
from adlm.evaluation.intervals import Estimate, student, summarise
from adlm.evaluation.perplexity import phases
from adlm.reporting import Series, line_chart
from adlm.schema import Config

REFERENCE = "adlm"
COLUMNS = (
    "algorithm", "nats per token", "95% over sequences", "perplexity", "minus {reference}, paired 95%", "parameters",
    "MFLOP per token", "tokens/s",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    name: str
    """The algorithm, with the settings that were changed."""
    kind: str
    """exact (a likelihood), or the name of the bound's estimator."""
    estimate: dict[str, Any]
    row_nats: list[float]
    """Nats of every sequence, for paired differences."""
    row_tokens: list[int]
    """Scored tokens of every sequence."""
    parameters: int
    flops_per_token: float
    """Forward and backward pass in training."""
    tokens_per_s: float
    """The fastest interval between two log lines: other work on the machine can only slow a run."""
    training_tokens: int
    config: dict[str, Any]
    validations: list[tuple[int, float]] = field(default_factory=list)
    """Step and bound of every validation during training."""


def paired(entry: Entry, reference: Entry) -> Estimate | None:
    """Nats per token of `entry` above `reference`, with the error of the paired difference; None if they cannot be
    paired."""
    if entry is reference or (entry.kind, entry.row_tokens) != (reference.kind, reference.row_tokens):
        return None
    difference_N1 = (np.array(entry.row_nats) - np.array(reference.row_nats))[:, None]
    phase_N = None if entry.kind == "exact" else phases(len(difference_N1)).numpy()
    return summarise(difference_N1, np.array(entry.row_tokens), phase_N)


@dataclass(frozen=True)
class OverSeeds:
    """Runs that differ only in their seed."""

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
        """Mean difference of runs with the same seed, and half of its 95% interval (Student); None for fewer than two
        such pairs, or if only one of the two is a bound."""
        shared = self.nats.keys() & other.nats.keys()
        if self is other or self.kind != other.kind or len(shared) < 2:
            return None
        d = np.array([self.nats[seed] - other.nats[seed] for seed in shared])
        return float(d.mean()), student(len(d) - 1) * float(d.std(ddof=1)) / math.sqrt(len(d))


def over_seeds(entries: list[Entry]) -> list[OverSeeds]:
    """Groups of two or more runs that differ only in their seed, in the order of their first entries."""
    groups: dict[str, OverSeeds] = {}
    for entry in entries:
        name = without_seed(entry.name)
        group = groups.setdefault(name, OverSeeds(name, entry.kind, {}))
        group.nats[entry.config["seed"]] = entry.estimate["nats_per_token"]
    return [group for group in groups.values() if len(group.nats) > 1]


def without_seed(name: str) -> str:
    return "+".join(part for part in name.split("+") if not part.startswith("seed="))


class Comparison:
    """Entries in the order of the table: bounds, then exact likelihoods, the best of each first."""

    def __init__(self, entries: list[Entry], reference: str, cfg: Config):
        self.entries = sorted(entries, key=lambda e: (e.kind == "exact", e.estimate["nats_per_token"]))
        self.cfg, self.reference = cfg, reference
        by_name = {entry.name: entry for entry in entries}
        self.differences: dict[str, tuple[str, Estimate]] = {}
        for entry in self.entries:
            # causal runs are compared with ar, if it is one of the entries
            to = by_name.get("ar" if entry.kind == "exact" else reference)
            if to and (found := paired(entry, to)) is not None:
                self.differences[entry.name] = (to.name, found)

    def rows(self) -> list[list[str]]:
        """The cells of the table."""
        lines = []
        for e in self.entries:
            ends = e.estimate["nats_interval"]
            difference = ""
            to, d = self.differences.get(e.name, ("", None))
            if d is not None and d.interval is not None:  # one sequence has no interval
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
        """The spread over seeds, for runs with several: a stricter test of a difference."""
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
        """The table over seeds; empty if no run has a second seed."""
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
        """The table as Markdown, with the budget and the hardware of the runs."""
        columns = self.columns()
        lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += [f"| {' | '.join(line)} |" for line in self.rows()]
        return "\n".join([*lines, "", *self.seeds_markdown(), self.budget(), ""])

    def budget(self) -> str:
        """The training budget, the evaluation data and the hardware."""
        t, m = self.cfg.train, self.cfg.model
        tokens = t.steps * t.global_batch_size * m.length
        alike = all(e.training_tokens == tokens and "seed=" not in e.name for e in self.entries)
        unless = "" if alike else ", unless its name says otherwise"
        budget = "the training FLOPs of the first algorithm in " if self.cfg.compare.equal_flops else ""
        return (
            f"Budget of each{unless}: {budget}{t.steps:,} steps of"
            f" {t.global_batch_size} sequences of {m.length} tokens ({tokens:,} tokens) of {self.cfg.data.name}, seed"
            f" {self.cfg.seed}. Evaluated on {self.entries[0].estimate['rows']} held-out"
            f" sequences, {self.cfg.eval.draws} draws of noise for bounds. {hardware()}."
        )

    def as_dict(self) -> dict[str, Any]:
        """All results, for table.json."""
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


# The curves


def curves(entries: Sequence[Entry]) -> reporting.Html | None:
    """Chart of validation bounds over training compute: a line for each algorithm, mean and range of its seeds. None
    if there was no validation during training."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(without_seed(entry.name), []).append(entry)
    lines = []
    for name, runs in groups.items():
        shared = set.intersection(*({step for step, _ in run.validations} for run in runs))
        steps = sorted(step for step in shared if step > 0)
        if not steps:
            continue
        per_step = sum(e.flops_per_token * e.training_tokens / e.config["train"]["steps"] for e in runs) / len(runs)
        nats = [[dict(run.validations)[step] for run in runs] for step in steps]
        points = [(step * per_step / 1e15, sum(of_step) / len(runs)) for step, of_step in zip(steps, nats)]
        lines.append(Series(name, points, [(min(n), max(n)) for n in nats] if len(runs) > 1 else None, marks=True))
    if not lines:
        return None
    return line_chart("Validation bound over training compute", lines, "training compute, PFLOP", "nats per token")


def report(comparison: Comparison) -> str:
    """The page: curves with the range of seeds, the table, the table over seeds."""
    chart = curves(comparison.entries)
    parts = [reporting.section("Curves", chart, lead="Bands are the range over seeds.")] if chart else []
    parts.append(reporting.section("Runs", reporting.table(comparison.columns(), comparison.rows())))
    if groups := comparison.seeds():
        rows = [
            (g["name"], len(g["nats"]), f"{g['mean']:.3f}", f"{g['deviation']:.3f}",
             f"{g['difference']:+.3f} +- {g['half']:.3f}" if "to" in g else "", g.get("to", ""))
            for g in groups
        ]  # fmt: skip
        head = ("over seeds", "seeds", "mean nats per token", "deviation", "difference, paired, 95%", "to")
        parts.append(reporting.section("Seeds", reporting.table(head, rows)))
    return reporting.page("adlm compare", *parts, subtitle=comparison.budget())

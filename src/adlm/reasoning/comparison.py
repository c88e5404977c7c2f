"""Runs beside each other: accuracies with the paper's, and whether two runs differ on the questions both answered."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.reasoning.runs import UNGUESSED, read_answers, read_results
from adlm.tables import METHODS, TASKS

# Accuracy in percent and, where given, tokens per answer: table 5 of the paper, GPT-2.
PAPER: dict[str, dict[str, str]] = {
    "no-cot": {"gsm8k": "16.5", "prontoqa": "93.8", "prosqa": "76.7 (8.2)"},
    "pause": {"gsm8k": "16.4", "prontoqa": "77.7", "prosqa": "75.9 (8.2)"},
    "cot": {"gsm8k": "42.9", "prontoqa": "98.8", "prosqa": "77.5 (49.4)"},
    "icot": {"gsm8k": "30.0", "prontoqa": "99.8", "prosqa": "98.2 (8.2)"},
    "coconut": {"gsm8k": "34.1", "prontoqa": "99.8", "prosqa": "97.0 (14.2)"},
    "coconut-double": {"gsm8k": "34.1"},
    "coconut-pause": {"gsm8k": "24.1", "prontoqa": "100", "prosqa": "96.6"},
    "acot": {"gsm8k": "45.2", "prontoqa": "100", "prosqa": "97.3 (8.2)"},
}


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test: if two runs were equally good, each question that one alone answers
    rightly would be a fair coin."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired(runs: list[str]) -> list[dict[str, Any]]:
    """McNemar's test of every two runs on every test set of which both answered the same questions."""
    answers = {run: read_answers(run) for run in runs}
    rows = []
    for first, second in combinations(runs, 2):
        for name in answers[first].keys() & answers[second].keys():
            one, two = answers[first][name], answers[second][name]
            if one.keys() != two.keys():
                continue
            only_first = sum(one[q] and not two[q] for q in one)
            only_second = sum(two[q] and not one[q] for q in one)
            found = {"only_first": only_first, "only_second": only_second, "p": mcnemar(only_first, only_second)}
            rows.append({"set": name, "first": first, "second": second, "n": len(one), **found})
    return sorted(rows, key=lambda row: (row["set"], runs.index(row["first"]), runs.index(row["second"])))


def show_table(runs: list[str]) -> dict[str, Any]:
    """Accuracy with its interval and tokens per answer of every run and test set, with the paper's number beside it."""
    rows = []
    for run in runs:
        results = read_results(run)
        for test, facts in [("(validation)", results["valid"]), *results["tests"].items()]:
            rows.append(
                {key: results[key] for key in ("task", "method", "network", "finished", "stage")}
                | {"set": test, "run": run}
                | facts
            )
    rows.sort(key=lambda row: (row["task"], row["set"], [*METHODS].index(row["method"])))
    table = Table(
        "task",
        "method",
        "network",
        "set",
        "n",
        "accuracy %",
        "95 % interval",
        "tokens",
        "anchors %",
        "paper % (tokens)",
        "run",
    )
    for row in rows:
        table.add_row(
            row["task"],
            row["method"] + ("" if row["finished"] else f" (cut short in stage {row['stage']})"),
            Path(row["network"]).name,
            row["set"],
            str(row["n"]),
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['low']:.1f}-{100 * row['high']:.1f}",
            f"{row['tokens']:.1f}",
            slots_of(row),
            "" if is_other(row["set"]) else PAPER.get(row["method"], {}).get(row["task"], ""),
            row["run"],
        )
    print_table(table)
    pairs = paired(runs)
    if pairs:
        table = Table("set", "first run", "second run", "n", "only first right", "only second right", "McNemar p")
        for row in pairs:
            counts = (str(row[key]) for key in ("n", "only_first", "only_second"))
            table.add_row(row["set"], row["first"], row["second"], *counts, f"{row['p']:.2g}")
        print_table(table)
    return {"rows": rows, "pairs": pairs}


def is_other(test: str) -> bool:
    """A test set whose questions are not like the published ones."""
    return test in TASKS or test.endswith(UNGUESSED)


def slots_of(facts: dict[str, Any]) -> str:
    """Accuracy of the anchor slots, in order."""
    slots = [facts[key] for key in sorted(facts) if key.startswith("slot_")]
    return "/".join(f"{100 * slot:.0f}" for slot in slots)


def print_table(table: Table) -> None:
    """A pipe has no width of its own: never break a line that a program reads."""
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)

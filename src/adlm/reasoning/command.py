"""`adlm reason train | eval RUN [RUN ..] | ask RUN QUESTION | table RUN [RUN ..] | data [FILE ..]`.

The first part of the module compares runs with each other and with the paper.
"""

import functools
import math
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.data.tokenizers import load_tokenizer
from adlm.errors import choose, require
from adlm.reasoning.logic import side_by_side
from adlm.reasoning.methods import Example, whole_text, written_answer
from adlm.reasoning.runs import UNGUESSED, read_answers, read_results
from adlm.reasoning.tasks import load_splits, load_tests, read_file, stem, task_of
from adlm.schema import Config
from adlm.tables import METHODS, TASKS

# ---- runs beside each other ------------------------------------------------------------------------------------------
# Tables of runs: accuracies beside the paper's, and whether two runs differ on the questions that both answered.

# Accuracy in percent and, if published, tokens per answer: table 5 of the paper, GPT-2.
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
    """Two-sided exact p-value of McNemar's test. Null hypothesis: the runs are equally good, so each question that only
    one of them answers correctly is a fair coin."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired(runs: list[str]) -> list[dict[str, Any]]:
    """McNemar's test of every pair of runs on every test set of which both answered the same questions."""
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
    """Accuracy with its interval, and tokens per answer, of every run and test set, beside the paper's numbers."""
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
    """Whether the questions of a test set differ in kind from the published ones."""
    return test in TASKS or test.endswith(UNGUESSED)


def slots_of(facts: dict[str, Any]) -> str:
    """The accuracies of the anchor slots, in order, as text."""
    slots = [facts[key] for key in sorted(facts) if key.startswith("slot_")]
    return "/".join(f"{100 * slot:.0f}" for slot in slots)


def print_table(table: Table) -> None:
    """Print a table. A pipe has no width: do not wrap lines that a program reads."""
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


# ---- the command -----------------------------------------------------------------------------------------------------

ACTIONS = ("train", "eval", "ask", "table", "data")


def run_reason(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """Run the command; return what it prints."""
    require(bool(args), f"adlm reason needs one of {', '.join(ACTIONS)}")
    action, words = choose("adlm reason", args[0], ACTIONS), list(args[1:])
    if action == "train":
        require(not words, f"adlm reason train takes key=value, got {words}")
        from adlm.reasoning.training import train

        return train(cfg)._asdict()
    if action == "data":
        return show_data(cfg, words)
    require(bool(words), f"adlm reason {action} needs a run folder")
    if action == "ask":
        require(
            len(words) == 2, f"adlm reason ask needs a run folder and one question in quotes, got {len(words)} words"
        )
        return ask(cfg, *words)
    return evaluate_runs(cfg, words) if action == "eval" else show_table(words)


def evaluate_runs(cfg: Config, runs: list[str]) -> dict[str, Any]:
    """Answer test questions with the exported network of each run. The command line determines the questions
    (reason.test_path, reason.n_test), and the run determines how they are asked."""
    from adlm.reasoning.runs import ask_tests, load_run, read_results, write_results
    from adlm.training.parallel import world

    found: dict[str, Any] = {}
    with world(cfg.train) as ranks:
        for path in runs:
            run = load_run(path, ranks.device)
            tests = load_tests(run.reason, run.data, cfg.reason.n_test, cfg.reason.test_path, run.seed)
            require(bool(tests), f"nothing to ask {path}: give reason.test_path=FILE")
            answerer = run.answerer(cfg.eval.batch_size)
            say = functools.partial(print, path, file=sys.stderr, flush=True)
            found[path] = ask_tests(Path(path), answerer, tests, ranks, say)
            if (Path(path) / "results.json").is_file():
                results = read_results(path)
                results["tests"] |= found[path]
                write_results(Path(path), results)
    return found


def ask(cfg: Config, path: str, question: str) -> dict[str, Any]:
    """Answer one question, and show the predictions of the anchor slots."""
    from adlm.reasoning.runs import load_run
    from adlm.training.parallel import world

    require(bool(question.strip()), "adlm reason ask: the question is empty")
    with world(cfg.train) as ranks:
        answerer = load_run(path, ranks.device).answerer()
        _, (reply,) = answerer.answer([Example(question.strip(), (), "", ())], ranks)
    anchors, answer = answerer.anchor_words(reply), written_answer(reply.text)
    if anchors:
        print("anchors: " + " -> ".join(anchors))
    trace = reply.text.rpartition("###")[0].strip()
    if trace:
        print(trace)
    print(f"answer: {answer}" if answer is not None else f"no answer after {reply.tokens} tokens: {reply.text.strip()}")
    return {"question": question, "answer": answer, "anchors": anchors, "written": reply.text, "tokens": reply.tokens}


def show_data(cfg: Config, files: list[str]) -> dict[str, Any]:
    """Print statistics of the training examples and of published files side by side; with data.tokenizer, in tokens,
    too."""

    task = task_of(cfg.reason)
    published = {stem(file): read_file(task, file, "adlm reason data") for file in files}
    sets = {}
    if task.generate is not None or cfg.data.path:
        sets["train"] = load_splits(cfg.reason, cfg.seed, cfg.data).train
    sets |= published
    require(bool(sets), f"reason.task={cfg.reason.task} has no generator: name a file, or give data.path")
    texts = map(whole_text, next(iter(sets.values())))  # training text of a bpe-N
    tokenizer = load_tokenizer(cfg.data.tokenizer, texts, cfg.data.root) if cfg.data.tokenizer else None
    header, rows = side_by_side(sets, task.is_logic, tokenizer)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    print_table(table)
    first = next(iter(sets.values()))[0]
    print(f"{first.question}\n" + "\n".join(first.steps) + f"\n### {first.answer}")
    return {"columns": header, "rows": rows}

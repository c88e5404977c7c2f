"""`adlm reason train | eval RUN [RUN ..] | table RUN [RUN ..] | data [FILE ..]`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.errors import choose, require
from adlm.reasoning import logic
from adlm.reasoning.examples import whole_text
from adlm.reasoning.tasks import load_splits, load_tests, read_file, stem, task_spec
from adlm.schema import Config

# Accuracy in percent and, where given, tokens per answer: table 5 of the paper, GPT-2.
PAPER: dict[str, dict[str, str]] = {
    "no-cot": {"gsm8k": "16.5", "prontoqa": "93.8", "prosqa": "76.7 (8.2)"},
    "pause": {"gsm8k": "16.4", "prontoqa": "77.7", "prosqa": "75.9 (8.2)"},
    "cot": {"gsm8k": "42.9", "prontoqa": "98.8", "prosqa": "77.5 (49.4)"},
    "icot": {"gsm8k": "30.0", "prontoqa": "99.8", "prosqa": "98.2 (8.2)"},
    "coconut": {"gsm8k": "34.1", "prontoqa": "99.8", "prosqa": "97.0 (14.2)"},
    "coconut-pause": {"gsm8k": "24.1", "prontoqa": "100", "prosqa": "96.6"},
    "acot": {"gsm8k": "45.2", "prontoqa": "100", "prosqa": "97.3 (8.2)"},
}
ACTIONS = ("train", "eval", "table", "data")


def run_reason(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """The command; what is printed is also returned."""
    require(bool(args), f"adlm reason needs one of {', '.join(ACTIONS)}")
    action, words = choose("adlm reason", args[0], ACTIONS), list(args[1:])
    if action == "train":
        require(not words, f"adlm reason train takes key=value, got {words}")
        from adlm.reasoning.training import train

        return train(cfg)._asdict()
    if action == "data":
        return show_data(cfg, words)
    require(bool(words), f"adlm reason {action} needs a run folder")
    return evaluate_runs(cfg, words) if action == "eval" else show_table(words)


def evaluate_runs(cfg: Config, runs: list[str]) -> dict[str, Any]:
    """Answer test questions with the exported network of each run, as its method asks them. What is asked comes from
    the command line (reason.test_path, reason.n_test), how from the run."""
    from adlm.reasoning.answers import evaluate
    from adlm.reasoning.methods import encode, plans_of
    from adlm.reasoning.runs import load_run, read_results, write_results
    from adlm.training.parallel import world

    found: dict[str, Any] = {}
    with world(cfg.train) as ranks:
        for path in runs:
            run = load_run(path, ranks.device)
            trained = run.reason
            tests = load_tests(trained, cfg.reason.n_test, cfg.reason.test_path, run.seed)
            require(bool(tests), f"nothing to ask {path}: give reason.test_path=FILE")
            scores = {}
            for name, examples in tests.items():
                encoded = encode(examples, run.tokenizer)
                limit = cfg.reason.max_new_tokens or run.max_new_tokens
                plan = plans_of(trained)[run.stage]
                score, texts = evaluate(
                    run.network, task_spec(trained.task), examples, encoded, plan, run.tokenizer, limit,
                    cfg.reason.eval_batch_size, ranks,
                )  # fmt: skip
                print(f"{path}  {name}: {score}", file=sys.stderr)
                scores[name] = score.facts()
                write_answers(Path(path), name, examples, texts)
            if (Path(path) / "results.json").is_file():
                results = read_results(path)
                results["tests"] |= scores
                write_results(Path(path), results)
            found[path] = scores
    return found


def write_answers(run: Path, name: str, examples: list[Any], texts: list[str]) -> None:
    """answers-<set>.jsonl: every question with what was written, for reading."""
    with (run / f"answers-{name}.jsonl").open("w", encoding="utf-8") as file:
        for example, text in zip(examples, texts):
            line = {"question": example.question, "answer": example.answer, "written": text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def show_table(runs: list[str]) -> dict[str, Any]:
    """Accuracy with its interval and tokens per answer of every run and test set, with the paper's number beside it."""
    from adlm.reasoning.runs import read_results

    rows = []
    for run in runs:
        results = read_results(run)
        for test, facts in [("(validation)", results["valid"]), *results["tests"].items()]:
            rows.append(
                {key: results[key] for key in ("task", "method", "network", "finished", "stage")}
                | {"set": test, "run": run}
                | facts
            )
    rows.sort(key=lambda row: (row["task"], row["set"], list(PAPER).index(row["method"])))
    table = Table(
        "task", "method", "network", "set", "n", "accuracy %", "95 % interval", "tokens", "paper % (tokens)", "run"
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
            PAPER[row["method"]][row["task"]],
            row["run"],
        )
    print_table(table)
    return {"rows": rows}


def show_data(cfg: Config, files: list[str]) -> dict[str, Any]:
    """Statistics of the training examples and of published files, side by side; in tokens too, with data.tokenizer."""
    from adlm.data.tokenizers import load_tokenizer
    from adlm.reasoning.statistics import side_by_side

    task = task_spec(cfg.reason.task)
    sets = {}
    if task.generate is not None or cfg.reason.train_path:
        sets["train"] = load_splits(cfg.reason, cfg.seed).train
    sets |= {stem(file): read_file(task, file, "test_path") for file in files}
    require(bool(sets), f"reason.task={cfg.reason.task} has no generator: name a file, or give reason.train_path")
    texts = map(whole_text, next(iter(sets.values())))  # what a bpe-N is trained on
    tokenizer = load_tokenizer(cfg.data.tokenizer, texts, cfg.data.root) if cfg.data.tokenizer else None
    header, rows = side_by_side(sets, task.read is logic.read, tokenizer)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    print_table(table)
    first = next(iter(sets.values()))[0]
    print(f"{first.question}\n" + "\n".join(first.steps) + f"\n### {first.answer}")
    return {"columns": header, "rows": rows}


def print_table(table: Table) -> None:
    """A pipe has no width of its own: never break a line that a program reads."""
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)

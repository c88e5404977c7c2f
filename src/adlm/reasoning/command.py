"""`adlm reason train | eval RUN [RUN ..] | table RUN [RUN ..] | data [FILE ..]`."""

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import choose, require
from adlm.reasoning.examples import Example, whole_text
from adlm.reasoning.logic import Fact, distances, read_either_or, read_fact, sentences
from adlm.reasoning.methods import encode
from adlm.reasoning.tasks import load_splits, load_tests, read_file, stem, task_of
from adlm.schema import Config
from adlm.tables import METHODS

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
WORD = re.compile(r"[A-Za-z]+")


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
    from adlm.reasoning.answers import Answerer, load_run, read_results, write_results
    from adlm.reasoning.methods import plans_of
    from adlm.training.parallel import world

    found: dict[str, Any] = {}
    with world(cfg.train) as ranks:
        for path in runs:
            run = load_run(path, ranks.device)
            trained = run.reason
            tests = load_tests(trained, cfg.reason.n_test, cfg.reason.test_path, run.seed)
            require(bool(tests), f"nothing to ask {path}: give reason.test_path=FILE")
            limit, plan = cfg.reason.max_new_tokens or run.max_new_tokens, plans_of(trained)[run.stage]
            answerer = Answerer(run.network, run.tokenizer, task_of(trained), plan, limit, cfg.eval.batch_size)
            scores = {}
            for name, examples in tests.items():
                accuracy, texts = answerer.answer(examples, ranks)
                print(f"{path}  {name}: {accuracy}", file=sys.stderr)
                scores[name] = accuracy.facts()
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
    from adlm.reasoning.answers import read_results

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
            PAPER.get(row["method"], {}).get(row["task"], ""),
            row["run"],
        )
    print_table(table)
    return {"rows": rows}


def show_data(cfg: Config, files: list[str]) -> dict[str, Any]:
    """Statistics of the training examples and of published files, side by side; in tokens too, with data.tokenizer."""

    task = task_of(cfg.reason)
    sets = {}
    if task.generate is not None or cfg.reason.train_path:
        sets["train"] = load_splits(cfg.reason, cfg.seed).train
    sets |= {stem(file): read_file(task, file, "test_path") for file in files}
    require(bool(sets), f"reason.task={cfg.reason.task} has no generator: name a file, or give reason.train_path")
    texts = map(whole_text, next(iter(sets.values())))  # what a bpe-N is trained on
    tokenizer = load_tokenizer(cfg.data.tokenizer, texts, cfg.data.root) if cfg.data.tokenizer else None
    header, rows = side_by_side(sets, task.is_logic, tokenizer)
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


# What the questions of a task are like, in numbers


def describe(examples: list[Example], is_logic: bool, tokenizer: Tokenizer | None = None) -> dict[str, str]:
    """Label -> value, in the order in which a table shows them; lengths in tokens if a tokenizer is given."""
    rows = {"examples": f"{len(examples):,}"}
    rows["question, words"] = spread([len(e.question.split()) for e in examples])
    rows["trace, words"] = spread([len(" ".join(e.steps).split()) for e in examples])
    if tokenizer is not None:
        encoded = encode(examples, tokenizer)
        rows["question, tokens"] = spread([len(e.question) for e in encoded])
        rows["trace, tokens"] = spread([sum(map(len, e.steps)) for e in encoded])
        rows["answer, tokens"] = spread([len(e.answer) - 1 for e in encoded])  # without the end of text
    rows["steps"] = spread([len(e.steps) for e in examples])
    steps = Counter(len(e.steps) for e in examples)
    for n in sorted(steps):
        rows[f"with {n} steps"] = percent(steps[n], len(examples))
    rows["anchors"] = spread([len(e.anchors) for e in examples])
    if is_logic:
        rows |= describe_facts(examples)
    words = {word for e in examples for word in WORD.findall(whole_text(e))}
    rows["different words"] = str(len(words))
    return rows


def describe_facts(examples: list[Example]) -> dict[str, str]:
    """Graphs: nodes are individuals, kinds and properties; edges are statements."""
    graphs = [statements(e) for e in examples]

    def over(measure: Callable[[list[Fact]], int]) -> str:
        return spread([measure(facts) for facts in graphs])

    parents = Counter(n for facts in graphs for n in Counter(f.what for f in facts).values())
    rows = {
        "nodes": over(lambda facts: len({name for f in facts for name in (f.who, f.what)})),
        "edges": over(len),
        "individuals": over(lambda facts: len({f.who for f in facts if f.who[0].isupper()})),
        "properties told": over(lambda facts: sum(not f.is_concept for f in facts)),
        "statements denied": percent(sum(f.denied for facts in graphs for f in facts), sum(map(len, graphs))),
    }
    total = parents.total()
    rows |= {f"nodes told of {n} times": percent(parents[n], total) for n in (1, 2, 3)}
    guesses = blind_guesses(examples) or {"True": sum(e.answer == "True" for e in examples) / len(examples)}
    return rows | {f"guess: {name}": f"{100 * value:.1f} %" for name, value in guesses.items()}


def statements(example: Example) -> list[Fact]:
    return [read_fact(s) for s in sentences(example.question)[:-1] if s.endswith(".")]


class Choice(NamedTuple):
    """Two kinds to choose from, in the order in which the question names them."""

    kinds: tuple[str, str]
    right: int
    facts: list[Fact]


def choice(example: Example) -> Choice | None:
    """None: a question of true or false."""
    match = read_either_or(example.question)
    if match is None:
        return None
    return Choice((match["one"], match["two"]), int(example.answer.endswith(f" {match['two']}.")), statements(example))


def depth(facts: list[Fact], kind: str) -> int:
    """Fewest statements from any individual to a kind."""
    roots = {f.who for f in facts if f.who[0].isupper()}
    return min(found[kind] for found in (distances(facts, root) for root in roots) if kind in found)


# Rules that never look at whom a question is about: each scores a candidate, and the higher score is the guess.
BLIND: dict[str, Callable[[Choice, int], int]] = {
    "the first named": lambda c, i: -i,
    "the deeper": lambda c, i: depth(c.facts, c.kinds[i]),
    "the one with more parents": lambda c, i: sum(f.what == c.kinds[i] for f in c.facts),
    "the one told of later": lambda c, i: max(at for at, f in enumerate(c.facts) if f.what == c.kinds[i]),
}


def blind_guesses(examples: list[Example]) -> dict[str, float]:
    """Fraction of either-or questions that each blind rule answers rightly; a tie is worth half."""
    choices = [c for c in map(choice, examples) if c is not None]
    if not choices:
        return {}
    found = {}
    for name, score in BLIND.items():
        leads = [score(c, c.right) - score(c, 1 - c.right) for c in choices]
        found[name] = sum(1.0 if lead > 0 else 0.5 if lead == 0 else 0.0 for lead in leads) / len(leads)
    return found


def spread(values: list[int]) -> str:
    """Mean, standard deviation and range."""
    deviation = statistics.pstdev(values)
    return f"{statistics.mean(values):.2f} ± {deviation:.2f} ({min(values)}-{max(values)})"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def side_by_side(
    sets: dict[str, list[Example]], is_logic: bool, tokenizer: Tokenizer | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table, one column per set."""
    columns = {name: describe(examples, is_logic, tokenizer) for name, examples in sets.items()}
    labels = list(dict.fromkeys(label for rows in columns.values() for label in rows))
    by_steps = sorted(label for label in labels if label.startswith("with "))
    ordered = []
    for label in labels:
        if label in by_steps:
            ordered += by_steps if label == min(by_steps, key=labels.index) else []
        else:
            ordered.append(label)
    return ["", *columns], [[label, *(rows.get(label, "0.0 %") for rows in columns.values())] for label in ordered]

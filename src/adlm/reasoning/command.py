"""`adlm reason train | eval RUN [RUN ..] | ask RUN QUESTION | table RUN [RUN ..] | data [FILE ..]`."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from adlm.data.tokenizers import load_tokenizer
from adlm.errors import choose, require
from adlm.reasoning.comparison import print_table, show_table
from adlm.reasoning.examples import Example, whole_text, written_answer
from adlm.reasoning.questions import side_by_side
from adlm.reasoning.tasks import load_splits, load_tests, read_file, stem, task_of
from adlm.schema import Config

ACTIONS = ("train", "eval", "ask", "table", "data")


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
    if action == "ask":
        require(
            len(words) == 2, f"adlm reason ask needs a run folder and one question in quotes, got {len(words)} words"
        )
        return ask(cfg, *words)
    return evaluate_runs(cfg, words) if action == "eval" else show_table(words)


def evaluate_runs(cfg: Config, runs: list[str]) -> dict[str, Any]:
    """Answer test questions with the exported network of each run, as its method asks them. What is asked comes from
    the command line (reason.test_path, reason.n_test), how from the run."""
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
    """Answer one question, and show what the anchor slots say on the way."""
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
    """Statistics of the training examples and of published files, side by side; in tokens too, with data.tokenizer."""

    task = task_of(cfg.reason)
    sets = {}
    if task.generate is not None or cfg.data.path:
        sets["train"] = load_splits(cfg.reason, cfg.seed, cfg.data).train
    sets |= {stem(file): read_file(task, file, "adlm reason data") for file in files}
    require(bool(sets), f"reason.task={cfg.reason.task} has no generator: name a file, or give data.path")
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

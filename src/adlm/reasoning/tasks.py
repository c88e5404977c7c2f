"""The tasks: where their examples come from and when an answer is right. `tables.TASKS` names them.

Splits never share a question: held-out questions, generated or read from a file, are left out of the training examples.
The held-out examples of a seed do not depend on the number of training examples.

ProsQA and ProntoQA are generated, or read from their published files (`logic`, `generators`). GSM8K, grade-school word
problems, is read from files: the trace is the equations, and the anchors are their numbers in order. Three published
forms have the same equations: the original jsonl, with <<16-3-4=9>> marks in sentences and the answer after ####; the
text of Internalize-CoT (question||<<16-3-4=9>> <<9*2=18>> #### 18); and JSON with `steps`.
"""

import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from adlm.diffusion.random import Stream, fold
from adlm.errors import require
from adlm.io.paths import path_of
from adlm.reasoning import generators, logic
from adlm.reasoning.generators import PUBLISHED, Shape
from adlm.reasoning.methods import Example, open_text, read_records
from adlm.schema import DataConfig, ReasonConfig
from adlm.tables import TASKS

GENERATED = DataConfig()
"""No files."""
EQUATION = re.compile(r"<<[^<>]*>>")
SILENCE = 4.0
"""Seconds between progress lines while questions are generated."""
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


@dataclass(frozen=True)
class ReasoningTask:
    """Where the examples of a task come from, and when an answer is right. A variant of a task is another instance with
    a different shape of questions; `tables.TASKS` names them."""

    read: Callable[[Path], list[Example]]
    """The examples of a published file."""
    same_answer: Callable[[str, str], bool]
    """(model's answer, right answer) -> whether they are the same."""
    canonical: Callable[[Example], str]
    """A key that is equal for equivalent questions."""
    published_size: int
    """Number of training examples in the published set."""
    generate: Callable[[random.Random, Shape], Example] | None = None
    """A new example from random numbers; None: the task needs files."""
    shape: Shape = PUBLISHED
    """The shape of generated questions."""
    easier: float = 0.0
    """Fraction of the generated training questions with one hop and two nodes fewer: a curriculum by mixing."""
    acot_removes: bool = False
    """Whether the paper's ACoT removes the steps of the trace in this task; in the others it keeps them."""
    is_logic: bool = True
    """Whether questions are statements of who is what (`logic`)."""
    has_stories: bool = False
    """Whether a network from scratch can be trained on stories first (reason.story_steps)."""
    story_lr_ratio: float = 1.0
    """Learning rate of stories over that of the stages: the circuit forms at rates that would later destroy it."""


def number_anchors(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The numbers of the equations in order, without operators and punctuation, which add no information."""
    return tuple(NUMBER.findall(" ".join(steps)))


def gsm8k_example(question: str, steps: tuple[str, ...], answer: str) -> Example:
    return Example(question.strip(), steps, answer.strip().replace(",", ""), number_anchors(steps))


def from_icot_line(line: str) -> Example:
    question, bar, rest = line.partition("||")
    trace, mark, answer = rest.rpartition("####")
    require(bool(bar and mark), f"not of the form question||<<...>> #### answer: {line[:80]!r}")
    return gsm8k_example(question, tuple(EQUATION.findall(trace)), answer)


def from_record(record: dict[str, Any]) -> Example:
    if "steps" in record:
        return gsm8k_example(record["question"], tuple(record["steps"]), str(record["answer"]))
    trace, mark, answer = str(record["answer"]).rpartition("####")
    require(bool(mark), f"no #### in the answer to {record['question'][:80]!r}")
    return gsm8k_example(record["question"], tuple(EQUATION.findall(trace)), answer)


def read_gsm8k(path: Path) -> list[Example]:
    if ".txt" in path.suffixes:
        return [from_icot_line(line) for line in open_text(path).split("\n") if line.strip()]
    return [from_record(record) for record in read_records(path)]


def same_number(written: str, answer: str) -> bool:
    """Whether two answers are equal as numbers: 1,000 is 1000; 18.00 and $18. are 18."""
    first, second = as_number(written), as_number(answer)
    return written.strip() == answer.strip() if first is None or second is None else first == second


def as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().rstrip(".").replace(",", "").lstrip("$"))
    except InvalidOperation:
        return None


PROSQA = ReasoningTask(
    logic.read_prosqa,
    logic.same_answer,
    logic.canonical,
    17_886,
    generators.prosqa,
    acot_removes=True,
    has_stories=True,
    story_lr_ratio=2.0,
)
PROSQA_BALANCED = replace(PROSQA, shape=Shape(balanced=True))
PROSQA_7HOP = replace(PROSQA, shape=Shape(hops=7, nodes=34))
PROSQA_8HOP = replace(PROSQA, shape=Shape(hops=8, nodes=38))
"""Derivations longer than in any published question."""
PROSQA_TERSE = replace(PROSQA, shape=Shape(terse=True))
PROSQA_TERSE_BALANCED = replace(PROSQA, shape=Shape(terse=True, balanced=True))
PROSQA_2HOP = replace(
    PROSQA, shape=Shape(hops=2, nodes=6, words=8, names=4, balanced=True, terse=True), story_lr_ratio=2.5
)
PRONTOQA = ReasoningTask(logic.read_prontoqa, logic.same_answer, logic.canonical, 9_000, generators.prontoqa)
GSM8K = ReasoningTask(read_gsm8k, same_number, lambda example: example.question, 7_473, is_logic=False)


def task_of(cfg: ReasonConfig) -> ReasoningTask:
    return TASKS.load(cfg.task, "reason.task")


class Splits(NamedTuple):
    """The examples of a run."""

    train: list[Example]
    valid: list[Example]
    tests: dict[str, list[Example]]
    """Test sets by name: `generated`, and the stem of each published file."""


def generate(task: ReasoningTask, n: int, seed: int, seen: set[str] | None = None) -> list[Example]:
    """n different examples that are not in `seen`, to which they are added."""
    require(task.generate is not None, "this task has no generator; give data.path=FILE")
    assert task.generate is not None
    seen = set() if seen is None else seen
    found: list[Example] = []
    said = time.monotonic()
    for i in range(100 * n + 1000):
        if len(found) == n:
            return found
        if time.monotonic() - said > SILENCE:
            said = time.monotonic()
            print(f"making questions: {len(found):,} of {n:,}", file=sys.stderr, flush=True)
        example = task.generate(random.Random(fold(seed, Stream.SPLIT, i)), task.shape)
        key = task.canonical(example)
        if key not in seen:
            seen.add(key)
            found.append(example)
    raise ValueError(
        f"only {len(found)} different questions of {task.shape} were found, not {n}; ask for fewer (reason.n_train,"
        " reason.n_valid, reason.n_test), or for a task with larger ones"
    )


def load_held_out(
    cfg: ReasonConfig, seed: int, data: DataConfig = GENERATED, seen: set[str] | None = None
) -> tuple[list[Example], dict[str, list[Example]]]:
    """Generated validation examples (none if training examples come from a file), and the non-empty test sets by name.
    No generated question is in `seen`, to which they are added."""
    task, seen = task_of(cfg), set() if seen is None else seen
    valid, tests = [], {}
    if task.generate is not None and not data.path:
        drawn = generate(task, cfg.n_valid + cfg.n_test, seed, seen)
        valid, tests["generated"] = drawn[: cfg.n_valid], drawn[cfg.n_valid :]
    for path in filter(None, cfg.test_path.split(",")):
        require(stem(path) not in tests, f"reason.test_path={cfg.test_path!r}: two test sets are called {stem(path)!r}")
        if path in TASKS:
            other = TASKS.load(path)
            require(
                other.generate is task.generate is not None,
                f"reason.test_path: {path} is no generated task of the same kind as reason.task={cfg.task}",
            )
            tests[path] = generate(other, cfg.n_test, fold(seed, Stream.TOKEN), seen)
        else:
            tests[stem(path)] = read_file(task, path, "reason.test_path")
    return valid, {name: examples for name, examples in tests.items() if examples}


def check_files(test_path: str) -> None:
    """Refuse a missing test file before minutes of generating questions."""
    for path in filter(None, test_path.split(",")):
        require(path in TASKS or path_of(path).is_file(), f"reason.test_path={path!r} is not a file")


def load_tests(
    trained: ReasonConfig, data: DataConfig, n_test: int, test_path: str, seed: int
) -> dict[str, list[Example]]:
    """Further test sets for a run, by name. The training set only excludes the questions that the run held out: if more
    questions are needed, or its own task is named again, training questions are skipped."""
    check_files(test_path)
    task, seen = task_of(trained), None
    others = n_test > trained.n_test or trained.task in test_path.split(",")
    if others and task.generate is not None and not data.path:
        seen = {task.canonical(example) for example in load_splits(trained, seed).train}
    return load_held_out(replace(trained, n_test=n_test, test_path=test_path), seed, data, seen)[1]


def load_splits(cfg: ReasonConfig, seed: int, data: DataConfig = GENERATED) -> Splits:
    """Training, validation and test examples, from files if paths are given, and generated otherwise."""
    check_files(cfg.test_path)
    task = task_of(cfg)
    valid, tests = load_held_out(cfg, seed, data)
    if data.valid_path:
        valid = read_file(task, data.valid_path, "data.valid_path", cfg.n_valid)
    train: list[Example] = []
    if data.path:
        train = read_file(task, data.path, "data.path")
        if not valid:
            require(
                0 < cfg.n_valid < len(train),
                f"reason.n_valid={cfg.n_valid} must leave some of the {len(train)} examples of data.path",
            )
            train, valid = train[: -cfg.n_valid], train[-cfg.n_valid :]
    held_out = {task.canonical(example) for part in (valid, *tests.values()) for example in part}
    if data.path:
        train = [example for example in train if task.canonical(example) not in held_out]
        require(bool(train), f"every example of data.path={data.path!r} is also held out")
        return Splits(train[: cfg.n_train or len(train)], valid, tests)
    require(
        task.generate is not None,
        f"reason.task={cfg.task} has no generator: give the published training file as data.path",
    )
    n_train = cfg.n_train or task.published_size
    n_easier = round(task.easier * n_train)
    seed = fold(seed, Stream.ORDER)
    train = generate(task, n_train - n_easier, seed, held_out)
    if n_easier:
        shape = task.shape._replace(hops=task.shape.hops - 1, nodes=task.shape.nodes - 2)
        train += generate(replace(task, shape=shape), n_easier, fold(seed, Stream.ORDER), held_out)
    return Splits(train, valid, tests)


def read_file(task: ReasoningTask, path: str, key: str, n: int = 0) -> list[Example]:
    file = path_of(path)
    require(file.is_file(), f"{key}={path!r} is not a file")
    examples = task.read(file)
    return examples[:n] if n else examples


def stem(path: str) -> str:
    return Path(path).name.split(".")[0]

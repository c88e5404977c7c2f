"""The tasks: where their examples come from and when an answer is right. One table; a new task is one line.

Splits never share a question: whatever is held out, generated or read from a file, is left out of the training
examples. The held-out examples of a seed do not depend on how many are trained on.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import choose, require
from adlm.io.paths import path_of
from adlm.reasoning import generators, gsm8k, logic
from adlm.reasoning.examples import Example
from adlm.reasoning.generators import PUBLISHED, Shape
from adlm.schema import ReasonConfig

Generator = Callable[[random.Random, Shape], Example]


class TaskSpec(NamedTuple):
    read: Callable[[Path], list[Example]]
    """A published file."""
    same_answer: Callable[[str, str], bool]
    """(what the model wrote, what is right)."""
    canonical: Callable[[Example], str]
    """Equal for questions that only look different."""
    generate: Generator | None
    """A new example from random numbers."""
    published_size: int
    """Training examples of the published set."""


TASKS: dict[str, TaskSpec] = {
    "prosqa": TaskSpec(logic.read, logic.same_answer, logic.canonical, generators.prosqa, 17_886),
    "prontoqa": TaskSpec(logic.read, logic.same_answer, logic.canonical, generators.prontoqa, 9_000),
    "gsm8k": TaskSpec(gsm8k.read, gsm8k.same_answer, lambda example: example.question, None, 7_473),
}


class Splits(NamedTuple):
    train: list[Example]
    valid: list[Example]
    tests: dict[str, list[Example]]
    """By name: `generated`, and the stem of each published file."""


def task_spec(name: str) -> TaskSpec:
    return TASKS[choose("reason.task", name, TASKS)]


def shape_of(cfg: ReasonConfig) -> Shape:
    return Shape(cfg.hops, cfg.nodes, cfg.words, cfg.names, cfg.balanced, cfg.terse)


def easier_shape(cfg: ReasonConfig) -> Shape:
    require(
        cfg.hops > 1 and cfg.nodes > 5,
        f"reason.easier={cfg.easier} takes away a hop and two nodes: give reason.hops above 1 and reason.nodes above 5",
    )
    return shape_of(cfg)._replace(hops=cfg.hops - 1, nodes=cfg.nodes - 2)


def generate(
    task: TaskSpec, n: int, seed: int, shape: Shape = PUBLISHED, seen: set[str] | None = None
) -> list[Example]:
    """n different examples, none of which is in `seen` (which is extended)."""
    require(task.generate is not None, "this task has no generator; give reason.train_path=FILE")
    assert task.generate is not None
    seen = set() if seen is None else seen
    found: list[Example] = []
    for i in range(100 * n + 1000):
        if len(found) == n:
            return found
        example = task.generate(random.Random(fold(seed, Stream.SPLIT, i)), shape)
        key = task.canonical(example)
        if key not in seen:
            seen.add(key)
            found.append(example)
    raise ValueError(
        f"only {len(found)} different questions of reason.hops={shape.hops} reason.nodes={shape.nodes}"
        f" reason.words={shape.words} reason.names={shape.names} were found, not {n};"
        " ask for fewer or larger ones"
    )


def load_held_out(
    cfg: ReasonConfig, seed: int, seen: set[str] | None = None
) -> tuple[list[Example], dict[str, list[Example]]]:
    """Generated validation examples (none if training examples come from a file), and the test sets by name, as far as
    they hold anything. No generated question is in `seen` (which is extended)."""
    task = task_spec(cfg.task)
    valid, tests = [], {}
    if task.generate is not None and not cfg.train_path:
        drawn = generate(task, cfg.n_valid + cfg.n_test, seed, shape_of(cfg), seen)
        valid, tests["generated"] = drawn[: cfg.n_valid], drawn[cfg.n_valid :]
    for path in filter(None, cfg.test_path.split(",")):
        require(stem(path) not in tests, f"reason.test_path={cfg.test_path!r}: two test sets are called {stem(path)!r}")
        tests[stem(path)] = read_file(task, path, "test_path")
    return valid, {name: examples for name, examples in tests.items() if examples}


def load_tests(trained: ReasonConfig, n_test: int, test_path: str, seed: int) -> dict[str, list[Example]]:
    """Other test sets for a run than its own, by name. Its training set leaves out the questions that it held out and
    no others: where more are asked for, those it was trained on are skipped."""
    task, seen = task_spec(trained.task), None
    if n_test > trained.n_test and task.generate is not None and not trained.train_path:
        seen = {task.canonical(example) for example in load_splits(trained, seed).train}
    return load_held_out(replace(trained, n_test=n_test, test_path=test_path), seed, seen)[1]


def load_splits(cfg: ReasonConfig, seed: int) -> Splits:
    """Training, validation and test examples, from files where paths are given and generated otherwise."""
    task = task_spec(cfg.task)
    valid, tests = load_held_out(cfg, seed)
    if cfg.valid_path:
        valid = read_file(task, cfg.valid_path, "valid_path", cfg.n_valid)
    train: list[Example] = []
    if cfg.train_path:
        train = read_file(task, cfg.train_path, "train_path")
        if not valid:
            require(
                0 < cfg.n_valid < len(train),
                f"reason.n_valid={cfg.n_valid} must leave some of the {len(train)} examples of reason.train_path",
            )
            train, valid = train[: -cfg.n_valid], train[-cfg.n_valid :]
    held_out = {task.canonical(example) for part in (valid, *tests.values()) for example in part}
    if cfg.train_path:
        train = [example for example in train if task.canonical(example) not in held_out]
        require(bool(train), f"every example of reason.train_path={cfg.train_path!r} is also held out")
        return Splits(train[: cfg.n_train or len(train)], valid, tests)
    require(
        task.generate is not None,
        f"reason.task={cfg.task} has no generator: give the published training file as reason.train_path",
    )
    n_train = cfg.n_train or task.published_size
    n_easier = round(cfg.easier * n_train)
    seed = fold(seed, Stream.ORDER)
    train = generate(task, n_train - n_easier, seed, shape_of(cfg), held_out)
    if n_easier:
        train += generate(task, n_easier, fold(seed, Stream.ORDER), easier_shape(cfg), held_out)
    return Splits(train, valid, tests)


def read_file(task: TaskSpec, path: str, key: str, n: int = 0) -> list[Example]:
    file = path_of(path)
    require(file.is_file(), f"reason.{key}={path!r} is not a file")
    examples = task.read(file)
    return examples[:n] if n else examples


def stem(path: str) -> str:
    return Path(path).name.split(".")[0]

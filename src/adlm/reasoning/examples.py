"""What a reasoning example is, how it reads as text, and how an answer is found in what a model wrote.

Every task uses one text format, the one published with ProsQA, so that token counts are comparable between papers:

    question <newline> step <newline> ... step <newline> ### answer <end of text>
"""

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

from adlm.errors import require

MARK = "###"


class Example(NamedTuple):
    question: str
    steps: tuple[str, ...]
    """The trace, one sentence group or equation each."""
    answer: str
    anchors: tuple[str, ...]
    """The words of the trace that carry it, in order, as they stand in the text: a leading space belongs to them."""


def question_text(example: Example) -> str:
    return example.question + "\n"


def step_text(step: str) -> str:
    return step + "\n"


def answer_text(example: Example) -> str:
    return f"{MARK} {example.answer}"


def parts(example: Example) -> list[str]:
    """The texts that are encoded one by one."""
    return [question_text(example), *map(step_text, example.steps), answer_text(example)]


def whole_text(example: Example) -> str:
    return "".join(parts(example))


def written_answer(text: str) -> str | None:
    """What follows the last mark of a generated text; None if the model never came to an answer."""
    _, mark, answer = text.rpartition(MARK)
    return answer.strip() if mark else None


def open_text(path: Path) -> str:
    """A UTF-8 file, compressed with xz or not."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .json file (one array) or a .jsonl file (one a line), each with question and answer."""
    text = open_text(path)
    try:
        if ".jsonl" in path.suffixes:
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            records = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    require(isinstance(records, list) and len(records) > 0, f"{path} holds no array of examples")
    for i, record in enumerate(records):
        whole = isinstance(record, dict) and {"question", "answer"} <= set(record)
        require(whole, f"{path}: example {i} has no question and answer")
        check_texts(record, f"{path}: example {i}")
    return records


def check_texts(record: dict[str, Any], what: str) -> None:
    """Refuse a record whose question is no text, whose answer is neither a text nor a number, or whose steps are no
    list of texts."""
    kinds = {"question": (str,), "answer": (str, int, float), "steps": (list,)}
    for key, allowed in kinds.items():
        value = record.get(key, "" if key != "steps" else [])
        fits = isinstance(value, allowed) and not isinstance(value, bool)
        wanted = "a list of texts" if key == "steps" else "a text"
        require(fits, f"{what}: its {key} is {json.dumps(value)[:40]}, not {wanted}")
    for step in record.get("steps", []):
        require(isinstance(step, str), f"{what}: one of its steps is {json.dumps(step)[:40]}, not a text")

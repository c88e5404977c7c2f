"""GSM8K: grade-school word problems. The trace is the equations; the anchors are its numbers in order.

Three published forms hold the same equations: the original jsonl, where sentences carry <<16-3-4=9>> marks and the
answer follows ####; the text of Internalize-CoT (question||<<16-3-4=9>> <<9*2=18>> #### 18); and JSON with `steps`.
"""

import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from adlm.errors import require
from adlm.reasoning.examples import Example, open_text, read_records

EQUATION = re.compile(r"<<[^<>]*>>")
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def number_anchors(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The numbers of the equations in order; operators and punctuation carry nothing that the numbers do not."""
    return tuple(NUMBER.findall(" ".join(steps)))


def make_example(question: str, steps: tuple[str, ...], answer: str) -> Example:
    return Example(question.strip(), steps, answer.strip().replace(",", ""), number_anchors(steps))


def from_icot_line(line: str) -> Example:
    question, bar, rest = line.partition("||")
    trace, mark, answer = rest.rpartition("####")
    require(bool(bar and mark), f"not of the form question||<<...>> #### answer: {line[:80]!r}")
    return make_example(question, tuple(EQUATION.findall(trace)), answer)


def from_record(record: dict[str, Any]) -> Example:
    if "steps" in record:
        return make_example(record["question"], tuple(record["steps"]), str(record["answer"]))
    trace, mark, answer = record["answer"].rpartition("####")
    require(bool(mark), f"no #### in the answer to {record['question'][:80]!r}")
    return make_example(record["question"], tuple(EQUATION.findall(trace)), answer)


def read(path: Path) -> list[Example]:
    if ".txt" in path.suffixes:
        return [from_icot_line(line) for line in open_text(path).split("\n") if line.strip()]
    return [from_record(record) for record in read_records(path)]


def same_answer(written: str, answer: str) -> bool:
    """Equal as numbers: 1,000 is 1000, 18.00 and $18. are 18."""
    first, second = as_number(written), as_number(answer)
    return written.strip() == answer.strip() if first is None or second is None else first == second


def as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().rstrip(".").replace(",", "").lstrip("$"))
    except InvalidOperation:
        return None

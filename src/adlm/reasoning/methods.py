"""The methods: each defines, stage by stage, how a training example is laid out. `tables.METHODS` names them.

All of them put some [ANT] positions ("slots") between the question and the text that the model must write, and remove
some steps from the front of the trace:

    question [BOA] [ANT] .. [ANT] [EOA] remaining steps ### answer <end>

They differ in the number of slots, in the number of removed steps, and in what happens at a slot: nothing (pause
tokens), its output is trained to be an anchor of the trace (ACoT), or its input is the output of the position before it
(Coconut). Without slots there is no [BOA] or [EOA]: the first stage of every staged method is plain chain of thought.

The module also defines examples and their text format.
"""

import json
import lzma
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.schema import ReasonConfig
from adlm.tables import METHODS, TASKS

# ---- examples --------------------------------------------------------------------------------------------------------
# Reasoning examples, their text format, and how an answer is found in a model's text.
#
# All tasks use one text format, the one published with ProsQA, so that token counts are comparable between papers:
#
#     question <newline> step <newline> ... step <newline> ### answer <end of text>

MARK = "###"


class Example(NamedTuple):
    question: str
    steps: tuple[str, ...]
    """The trace: a few sentences or an equation per step."""
    answer: str
    anchors: tuple[str, ...]
    """The key words of the trace, in order, as in the text, including a leading space."""


def question_text(example: Example) -> str:
    return example.question + "\n"


def step_text(step: str) -> str:
    return step + "\n"


def answer_text(example: Example) -> str:
    return f"{MARK} {example.answer}"


def parts(example: Example) -> list[str]:
    """The parts of an example's text, which are encoded separately."""
    return [question_text(example), *map(step_text, example.steps), answer_text(example)]


def whole_text(example: Example) -> str:
    return "".join(parts(example))


def written_answer(text: str) -> str | None:
    """The text after the last mark of a generated text; None if it has no answer."""
    _, mark, answer = text.rpartition(MARK)
    return answer.strip() if mark else None


def open_text(path: Path) -> str:
    """Read a UTF-8 file, which may be compressed with xz."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .json file (one array) or a .jsonl file (one per line), each with question and answer."""
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
    """Refuse a record unless its question is a text, its answer a text or a number, and its steps a list of texts."""
    kinds = {"question": (str,), "answer": (str, int, float), "steps": (list,)}
    for key, allowed in kinds.items():
        value = record.get(key, "" if key != "steps" else [])
        fits = isinstance(value, allowed) and not isinstance(value, bool)
        wanted = "a list of texts" if key == "steps" else "a text"
        require(fits, f"{what}: its {key} is {json.dumps(value)[:40]}, not {wanted}")
    for step in record.get("steps", []):
        require(isinstance(step, str), f"{what}: one of its steps is {json.dumps(step)[:40]}, not a text")


# ---- methods ---------------------------------------------------------------------------------------------------------

BOA, ANT, EOA = "[BOA]", "[ANT]", "[EOA]"
IGNORE = -1
"""A position without a label."""
ALL = 1_000_000
"""More steps than any trace has."""


class StagePlan(NamedTuple):
    """How a stage of a method changes every example."""

    slots: int = 0
    removed: int = 0
    """Steps removed from the front of the trace."""
    anchored: bool = False
    """Whether the output at a slot is trained to be an anchor."""
    fed_back: bool = False
    """Whether the input of a slot is the final hidden state of the position before it."""


@dataclass(frozen=True)
class Method:
    """How a method lays out examples. A staged method starts with plain chain of thought; stage s adds s times
    `slots_per_stage` slots and removes s steps. If steps are removed, there is a last stage without any steps."""

    staged: bool = False
    slots: bool = False
    """Whether it has slots."""
    slots_per_stage: int = 1
    """Slots that each stage adds."""
    removes: bool | None = False
    """Whether it removes steps of the trace; None: as in the paper for this task (`ReasoningTask.acot_removes`)."""
    anchored: bool = False
    fed_back: bool = False

    def plans(self, cfg: ReasonConfig) -> list[StagePlan]:
        """The plan of every stage."""
        if not self.staged:
            return [StagePlan(cfg.slots if self.slots else 0, ALL if self.removes else 0)]
        require(
            cfg.slots > 0 and cfg.slots % self.slots_per_stage == 0,
            f"reason.slots={cfg.slots} must be a positive multiple of {self.slots_per_stage}, the slots that a stage of"
            f" reason.method={cfg.method} adds",
        )
        removes, plans = TASKS.load(cfg.task).acot_removes if self.removes is None else self.removes, []
        for stage in range(cfg.slots // self.slots_per_stage + 1):
            n_slots = stage * self.slots_per_stage if self.slots else 0
            plans.append(StagePlan(n_slots, stage if removes else 0, self.anchored, self.fed_back and n_slots > 0))
        return [*plans, plans[-1]._replace(removed=ALL)] if removes else plans


COT = Method()
NO_COT = Method(removes=True)
PAUSE = Method(slots=True, removes=True)
ACOT = Method(staged=True, slots=True, removes=None, anchored=True)
ACOT_KEPT = replace(ACOT, removes=False)
ACOT_TRIPLE = replace(ACOT, slots_per_stage=3)
ICOT = Method(staged=True, removes=True)
COCONUT = Method(staged=True, slots=True, removes=True, fed_back=True)
COCONUT_DOUBLE = replace(COCONUT, slots_per_stage=2)
COCONUT_PAUSE = Method(staged=True, slots=True, removes=True)


def plans_of(cfg: ReasonConfig) -> list[StagePlan]:
    """The plan of every stage of the configured method."""
    return METHODS.load(cfg.method, "reason.method").plans(cfg)


class Encoded(NamedTuple):
    """An example in tokens, divided into the parts of a layout."""

    question: list[int]
    steps: list[list[int]]
    answer: list[int]
    """Includes the end-of-text token."""
    anchors: list[list[int]]


class Layout(NamedTuple):
    """One sequence of a batch; all but `slots` have an entry per position."""

    tokens: list[int]
    targets: list[int]
    """Target of the output at each position: the next token, or IGNORE (question and slots are given, not learned)."""
    anchors: list[int]
    """Target of the output AT an [ANT] position: an anchor, or IGNORE."""
    slots: range
    """Positions of [ANT], which are fed back if the plan says so."""
    prompt: int
    """Number of given tokens in generation: question and slots."""


class Markers(NamedTuple):
    """Ids of the three marker tokens."""

    boa: int
    ant: int
    eoa: int


def add_markers(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with [BOA], [ANT] and [EOA]; text never encodes to one of them."""
    backend = tokenizer.backend
    backend.add_special_tokens([BOA, ANT, EOA])
    return Tokenizer(backend, tokenizer.name)


def markers_of(tokenizer: Tokenizer) -> Markers:
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    require(ANT in known, f"this tokenizer has no {ANT}: it does not belong to a reasoning run")
    return Markers(known[BOA], known[ANT], known[EOA])


def encode(examples: list[Example], tokenizer: Tokenizer) -> list[Encoded]:
    """Examples in tokens, each part encoded separately: parts end in a newline, which no vocabulary in use merges with
    the next character."""
    questions = tokenizer.encode_batch([question_text(e) for e in examples])
    answers = tokenizer.encode_batch([answer_text(e) for e in examples])
    steps = iter(tokenizer.encode_batch([step_text(step) for e in examples for step in e.steps]))
    anchors = iter(tokenizer.encode_batch([anchor for e in examples for anchor in e.anchors]))
    return [
        Encoded(
            question,
            [next(steps) for _ in example.steps],
            [*answer, tokenizer.eos_id],
            [next(anchors) for _ in example.anchors],
        )
        for example, question, answer in zip(examples, questions, answers)
    ]


def lay_out(example: Encoded, plan: StagePlan, markers: Markers, anchor_tokens: str = "first") -> Layout:
    """The sequence of an example under a plan."""
    slots = [markers.boa, *[markers.ant] * plan.slots, markers.eoa] if plan.slots else []
    given = [*example.question, *slots]
    written = [token for step in example.steps[plan.removed :] for token in step] + example.answer
    first = len(example.question) + 1
    at = range(first, first + plan.slots)
    anchors = [IGNORE] * (len(given) + len(written))
    if plan.anchored:
        for position, label in zip(at, anchor_labels(example.anchors, anchor_tokens)):
            anchors[position] = label
    # the output at the last given position is the first written token; the last token has no target
    targets = [IGNORE] * (len(given) - 1) + written + [IGNORE]
    return Layout(given + written, targets, anchors, at, len(given))


def written_length(example: Encoded, plan: StagePlan) -> int:
    """Number of tokens that the model must write, computed without laying out the example."""
    return sum(map(len, example.steps[plan.removed :])) + len(example.answer)


def laid_out_length(example: Encoded, plan: StagePlan) -> int:
    """Number of tokens of the whole sequence."""
    markers = plan.slots + 2 if plan.slots else 0
    return len(example.question) + markers + written_length(example, plan)


def anchor_labels(anchors: list[list[int]], anchor_tokens: str) -> list[int]:
    """Labels of the slots, in order. Further slots have no label, and further labels are dropped."""
    if anchor_tokens == "first":
        return [tokens[0] for tokens in anchors]
    return [token for tokens in anchors for token in tokens]

"""The language of ProsQA and ProntoQA: sentences about who is what, read into facts, and what follows from them.

The graders and the generators need no parser (published files and generators say what the trace is); it exists to
check them: that the text of a question, and nothing else, decides its answer.
"""

import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from adlm.errors import require
from adlm.reasoning.examples import Example, read_records

SENTENCE_END = re.compile(r"(?<=[.?:]) ")
INDIVIDUAL = re.compile(r"(?P<who>[A-Z][a-z]+) is (?P<no>not )?(?P<a>an? )?(?P<what>[a-z]+)\.")
SINGULAR = re.compile(r"(?:Every|Each) (?P<who>[a-z]+) is (?P<no>not )?(?P<a>an? )?(?P<what>[a-z]+)\.")
PLURAL = re.compile(r"(?P<who>[A-Z][a-z]+)es are (?P<no>not )?(?P<what>[a-z]+)\.")
EITHER_OR = re.compile(r"Is (?P<who>[A-Z][a-z]+) an? (?P<one>[a-z]+) or (?P<two>[a-z]+)\?")
# Without the words that carry nothing: who, what, full stop; whoever is asked about comes last, where no kind follows
TERSE = re.compile(r"(?P<who>[A-Z][a-z]+|[a-z]+pus) (?P<what>[a-z]+pus)\.")
TERSE_EITHER_OR = re.compile(r"(?P<one>[a-z]+pus) or (?P<two>[a-z]+pus), (?P<who>[A-Z][a-z]+)\?")


class Fact(NamedTuple):
    """Everything that is `who` is `what` (or is not, if `denied`)."""

    who: str
    what: str
    is_concept: bool
    """`what` is a kind (lempus) and not a property (happy)."""
    denied: bool = False


def read_fact(sentence: str) -> Fact:
    """One statement. Plural kinds end in -uses, which no property does."""
    if match := INDIVIDUAL.fullmatch(sentence) or SINGULAR.fullmatch(sentence):
        return Fact(match["who"], match["what"], match["a"] is not None, match["no"] is not None)
    if match := PLURAL.fullmatch(sentence):
        what, is_concept = match["what"], match["what"].endswith("uses")
        return Fact(match["who"].lower(), what[:-2] if is_concept else what, is_concept, match["no"] is not None)
    if match := TERSE.fullmatch(sentence):
        return Fact(match["who"], match["what"], is_concept=True)
    raise ValueError(f"not a statement of ProsQA or ProntoQA: {sentence!r}")


def statement(who: str, what: str, terse: bool = False) -> str:
    """That an individual, or a kind, is of a kind; kinds are in small letters."""
    if terse:
        return f"{who} {what}."
    return f"{who if who[0].isupper() else f'Every {who}'} is a {what}."


def either_or(who: str, one: str, two: str, terse: bool = False) -> str:
    return f"{one} or {two}, {who}?" if terse else f"Is {who} a {one} or {two}?"


def read_either_or(question: str) -> re.Match[str] | None:
    """The groups who, one and two of the choice that a question ends in; None: a question of true or false."""
    return EITHER_OR.search(question) or TERSE_EITHER_OR.search(question)


def sentences(text: str) -> list[str]:
    return SENTENCE_END.split(text)


def distances(facts: list[Fact], root: str) -> dict[str, int]:
    """Every kind that `root` is, with the number of statements needed to say so."""
    kinds: dict[str, list[str]] = {}
    for fact in facts:
        if fact.is_concept and not fact.denied:
            kinds.setdefault(fact.who, []).append(fact.what)
    found, queue = {root: 0}, deque([root])
    while queue:
        at = queue.popleft()
        for kind in kinds.get(at, ()):
            if kind not in found:
                found[kind] = found[at] + 1
                queue.append(kind)
    return found


def derivable_answers(question: str) -> set[str]:
    """Every answer, of the two a question allows, that follows from its statements."""
    *statements, last = sentences(question)
    if match := read_either_or(last):
        who, terse = match["who"], match.re is TERSE_EITHER_OR
        reached = distances([read_fact(s) for s in statements], who)
        return {statement(who, kind, terse) for kind in (match["one"], match["two"]) if kind in reached}
    asked = read_fact(last)  # "True or false:" stands before it
    facts = [read_fact(s) for s in statements[:-1]]
    reached = distances(facts, asked.who)
    told = {f.denied for f in facts if not f.is_concept and f.what == asked.what and f.who in reached}
    return {str(denied == asked.denied) for denied in told}


def node_anchors(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The individual and then each kind of the trace, in order, without repetition: the nodes of its path."""
    nodes: list[str] = []
    for step in steps:
        for sentence in sentences(step):
            fact = read_fact(sentence)
            nodes += [name for name, is_node in ((fact.who, True), (fact.what, fact.is_concept)) if is_node]
    words = list(dict.fromkeys(nodes))
    return tuple([words[0], *(f" {word}" for word in words[1:])]) if words else ()


def read(path: Path) -> list[Example]:
    """The published JSON of ProsQA and ProntoQA: an array of objects with question, steps and answer."""
    examples = []
    for i, record in enumerate(read_records(path)):
        try:
            steps, answer = tuple(record["steps"]), record["answer"]
            require(isinstance(answer, str), f"its answer {answer!r} is not a text")
            examples.append(Example(record["question"], steps, answer, node_anchors(steps)))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: example {i} is not of ProsQA or ProntoQA ({error})") from None
    return examples


def read_prosqa(path: Path) -> list[Example]:
    """A file of questions that end in a choice of two kinds."""
    return read_all(path, "ProsQA", either_or=True)


def read_prontoqa(path: Path) -> list[Example]:
    """A file of questions of true or false."""
    return read_all(path, "ProntoQA", either_or=False)


def read_all(path: Path, task: str, either_or: bool) -> list[Example]:
    """`read`, refusing a question of the other task."""
    examples = read(path)
    for i, example in enumerate(examples):
        is_choice = read_either_or(example.question) is not None
        ending = f"it ends in {example.question[-40:]!r}"
        require(is_choice == either_or, f"{path}: example {i} is not a question of {task}: {ending}; check task=")
    return examples


def same_answer(written: str, answer: str) -> bool:
    return written.strip() == answer.strip()


def canonical(example: Example) -> str:
    """Equal for two questions that differ in the order of their sentences alone: what must not be in two splits."""
    *statements, last = sentences(example.question)
    return " ".join([*sorted(statements), last])

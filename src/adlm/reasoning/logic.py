"""The language of ProsQA and ProntoQA: sentences about who is what, parsed into facts, and what follows from them.

Grading and generation need no parser (published files and generators include the trace); it exists to check that the
text of a question alone determines its answer.

The second half of the module has statistics of questions, and blind rules that answer some of them.
"""

import re
import statistics
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.reasoning.methods import Example, encode, read_records, whole_text

SENTENCE_END = re.compile(r"(?<=[.?:]) ")
INDIVIDUAL = re.compile(r"(?P<who>[A-Z][a-z]+) is (?P<no>not )?(?P<a>an? )?(?P<what>[a-z]+)\.")
SINGULAR = re.compile(r"(?:Every|Each) (?P<who>[a-z]+) is (?P<no>not )?(?P<a>an? )?(?P<what>[a-z]+)\.")
PLURAL = re.compile(r"(?P<who>[A-Z][a-z]+)es are (?P<no>not )?(?P<what>[a-z]+)\.")
EITHER_OR = re.compile(r"Is (?P<who>[A-Z][a-z]+) an? (?P<one>[a-z]+) or (?P<two>[a-z]+)\?")
# Only words with information: who, what, full stop. The individual in question comes last, with no kind after it.
TERSE = re.compile(r"(?P<who>[A-Z][a-z]+|[a-z]+pus) (?P<what>[a-z]+pus)\.")
TERSE_EITHER_OR = re.compile(r"(?P<one>[a-z]+pus) or (?P<two>[a-z]+pus), (?P<who>[A-Z][a-z]+)\?")


class Fact(NamedTuple):
    """Everything that is `who` is also `what` (or is not, if `denied`)."""

    who: str
    what: str
    is_concept: bool
    """Whether `what` is a kind (lempus), not a property (happy)."""
    denied: bool = False


def read_fact(sentence: str) -> Fact:
    """Parse one statement. Plural kinds end in -uses, which no property does."""
    if match := INDIVIDUAL.fullmatch(sentence) or SINGULAR.fullmatch(sentence):
        return Fact(match["who"], match["what"], match["a"] is not None, match["no"] is not None)
    if match := PLURAL.fullmatch(sentence):
        what, is_concept = match["what"], match["what"].endswith("uses")
        return Fact(match["who"].lower(), what[:-2] if is_concept else what, is_concept, match["no"] is not None)
    if match := TERSE.fullmatch(sentence):
        return Fact(match["who"], match["what"], is_concept=True)
    raise ValueError(f"not a statement of ProsQA or ProntoQA: {sentence!r}")


def statement(who: str, what: str, terse: bool = False) -> str:
    """The sentence that an individual or a kind is of a kind. Kinds are in lower case."""
    if terse:
        return f"{who} {what}."
    return f"{who if who[0].isupper() else f'Every {who}'} is a {what}."


def either_or(who: str, one: str, two: str, terse: bool = False) -> str:
    return f"{one} or {two}, {who}?" if terse else f"Is {who} a {one} or {two}?"


def read_either_or(question: str) -> re.Match[str] | None:
    """A match with groups who, one and two for a question that ends in a choice; None for a true-or-false question."""
    return EITHER_OR.search(question) or TERSE_EITHER_OR.search(question)


def sentences(text: str) -> list[str]:
    return SENTENCE_END.split(text)


def distances(facts: list[Fact], root: str) -> dict[str, int]:
    """Every kind that `root` is, with the number of statements needed to derive it."""
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
    """The answers, of the two possible ones, that follow from the statements of a question."""
    *statements, last = sentences(question)
    if match := read_either_or(last):
        who, terse = match["who"], match.re is TERSE_EITHER_OR
        reached = distances([read_fact(s) for s in statements], who)
        return {statement(who, kind, terse) for kind in (match["one"], match["two"]) if kind in reached}
    asked = read_fact(last)  # after "True or false:"
    facts = [read_fact(s) for s in statements[:-1]]
    reached = distances(facts, asked.who)
    told = {f.denied for f in facts if not f.is_concept and f.what == asked.what and f.who in reached}
    return {str(denied == asked.denied) for denied in told}


def node_anchors(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The nodes of a trace's path: the individual and then each kind, in order, without repetition."""
    nodes: list[str] = []
    for step in steps:
        for sentence in sentences(step):
            fact = read_fact(sentence)
            nodes += [name for name, is_node in ((fact.who, True), (fact.what, fact.is_concept)) if is_node]
    words = list(dict.fromkeys(nodes))
    return tuple([words[0], *(f" {word}" for word in words[1:])]) if words else ()


def read(path: Path) -> list[Example]:
    """Read the published JSON of ProsQA and ProntoQA: an array of objects with question, steps and answer."""
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
    """Read a file of questions that end in a choice of two kinds."""
    return read_all(path, "ProsQA", either_or=True)


def read_prontoqa(path: Path) -> list[Example]:
    """Read a file of true-or-false questions."""
    return read_all(path, "ProntoQA", either_or=False)


def read_all(path: Path, task: str, either_or: bool) -> list[Example]:
    """As `read`, but refuse questions of the other task."""
    examples = read(path)
    for i, example in enumerate(examples):
        is_choice = read_either_or(example.question) is not None
        ending = f"it ends in {example.question[-40:]!r}"
        require(is_choice == either_or, f"{path}: example {i} is not a question of {task}: {ending}; check task=")
    return examples


def same_answer(written: str, answer: str) -> bool:
    return written.strip() == answer.strip()


def canonical(example: Example) -> str:
    """A key that is equal for questions that differ only in the order of sentences: no two splits may share one."""
    *statements, last = sentences(example.question)
    return " ".join([*sorted(statements), last])


# ---- what questions are like -----------------------------------------------------------------------------------------
# Statistics of the questions of a task, and which of them a rule answers without looking at the individual in question.

WORD = re.compile(r"[A-Za-z]+")


def describe(examples: list[Example], is_logic: bool, tokenizer: Tokenizer | None = None) -> dict[str, str]:
    """Label -> value, in the order of the table; lengths are in tokens if a tokenizer is given."""
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


# Graphs: nodes are individuals, kinds and properties; edges are statements.
GRAPH_MEASURES: dict[str, Callable[[list[Fact]], int]] = {
    "nodes": lambda facts: len({name for f in facts for name in (f.who, f.what)}),
    "edges": len,
    "individuals": lambda facts: len(individuals(facts)),
    "properties told": lambda facts: sum(not f.is_concept for f in facts),
}
# For either-or questions: names on the way to the right candidate and to the wrong one, see `reached`.
CHOICE_MEASURES: dict[str, Callable[["Choice"], int]] = {
    "reachable from both": lambda c: len(reached(c, 1) & reached(c, 0)),
    "reachable from the right one": lambda c: len(reached(c, 1)),
    "reachable from the wrong one": lambda c: len(reached(c, 0)),
}


def describe_facts(examples: list[Example]) -> dict[str, str]:
    """Statistics of graphs and of what can be reached in them, accuracies of blind rules, and how often anchors can be
    known."""
    graphs = [statements(e) for e in examples]
    choices = [c for c in map(choice, examples) if c is not None]
    parents = Counter(n for facts in graphs for n in Counter(f.what for f in facts).values())
    rows = {name: spread([measure(facts) for facts in graphs]) for name, measure in GRAPH_MEASURES.items()}
    rows["statements denied"] = percent(sum(f.denied for facts in graphs for f in facts), sum(map(len, graphs)))
    if choices:
        rows |= {name: spread([measure(c) for c in choices]) for name, measure in CHOICE_MEASURES.items()}
    total = parents.total()
    rows |= {f"nodes told of {n} times": percent(parents[n], total) for n in (1, 2, 3)}
    guesses = blind_guesses(examples) or {"True": sum(e.answer == "True" for e in examples) / len(examples)}
    rows |= {f"guess: {name}": f"{100 * value:.1f} %" for name, value in guesses.items()}
    return rows | {f"anchor {k}, right at best": f"{100 * best:.1f} %" for k, best in enumerate(knowable(examples), 1)}


def path_law(example: Example) -> list[dict[str, float]]:
    """For an either-or question, the probability of each node at each position of the path, from the individual to the
    answer, if the path is drawn as in the generator: backwards from the answer, each of the parents that are one
    statement nearer to the individual with equal probability."""
    match, asked = read_either_or(example.question), choice(example)
    assert match is not None and asked is not None
    answer, steps_to = asked.kinds[asked.right], distances(asked.facts, match["who"])
    require(answer in steps_to, f"it does not follow from the statements of the question: {example.answer!r}")
    law = [{answer: 1.0}]
    for left in reversed(range(steps_to[answer])):
        before: dict[str, float] = {}
        for node, probability in law[-1].items():
            nearer = [f.who for f in asked.facts if f.what == node and steps_to.get(f.who) == left]
            for parent in nearer:
                before[parent] = before.get(parent, 0.0) + probability / len(nearer)
        law.append(before)
    return law[::-1]


def knowable(examples: list[Example]) -> list[float]:
    """The expected accuracy of each anchor, over either-or questions, when always predicting the most probable node. No
    network can do better: if there are several shortest paths, the trace takes a random one."""
    laws = [path_law(e) for e in examples if read_either_or(e.question)]
    places = range(max(map(len, laws), default=0))
    return [statistics.mean(max(law[at].values()) for law in laws if at < len(law)) for at in places]


def statements(example: Example) -> list[Fact]:
    return [read_fact(s) for s in sentences(example.question)[:-1] if s.endswith(".")]


class Choice(NamedTuple):
    """Two kinds to choose from, in the order in which the question names them."""

    kinds: tuple[str, str]
    right: int
    facts: list[Fact]


def choice(example: Example) -> Choice | None:
    """The choice at the end of a question; None for a true-or-false question."""
    match = read_either_or(example.question)
    if match is None:
        return None
    return Choice((match["one"], match["two"]), int(example.answer.endswith(f" {match['two']}.")), statements(example))


def individuals(facts: list[Fact]) -> set[str]:
    return {f.who for f in facts if f.who[0].isupper()}


def reached(c: Choice, rightly: int) -> set[str]:
    """Everything reachable from the individuals that are the right candidate or, if not `rightly`, the wrong one."""
    kind = c.kinds[c.right if rightly else 1 - c.right]
    ways = (distances(c.facts, root) for root in individuals(c.facts))
    return {name for way in ways if kind in way for name in way}


def depth(facts: list[Fact], kind: str) -> int:
    """Smallest number of statements from any individual to a kind."""
    return min(found[kind] for found in (distances(facts, root) for root in individuals(facts)) if kind in found)


# Rules that never look at the individual in question: each scores a candidate, and the higher score is the guess.
BLIND: dict[str, Callable[[Choice, int], int]] = {
    "the first named": lambda c, i: -i,
    "the deeper": lambda c, i: depth(c.facts, c.kinds[i]),
    "the one with more parents": lambda c, i: sum(f.what == c.kinds[i] for f in c.facts),
    "the one told of later": lambda c, i: max(at for at, f in enumerate(c.facts) if f.what == c.kinds[i]),
}


def is_guessed(example: Example, rule: str = "the deeper") -> bool:
    """Whether a blind rule answers this question correctly; a tie does not count."""
    c = choice(example)
    return c is not None and BLIND[rule](c, c.right) > BLIND[rule](c, 1 - c.right)


def blind_guesses(examples: list[Example]) -> dict[str, float]:
    """Fraction of either-or questions that each blind rule answers correctly; a tie counts half."""
    choices = [c for c in map(choice, examples) if c is not None]
    if not choices:
        return {}
    found = {}
    for name, score in BLIND.items():
        leads = [score(c, c.right) - score(c, 1 - c.right) for c in choices]
        found[name] = sum(1.0 if lead > 0 else 0.5 if lead == 0 else 0.0 for lead in leads) / len(leads)
    return found


def spread(values: list[int]) -> str:
    """Mean, standard deviation and range, as text."""
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

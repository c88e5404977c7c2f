"""What the questions of a task are like, in numbers; and which of them a rule answers that never looks at whom they are
about."""

import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from adlm.data.tokenizers import Tokenizer
from adlm.reasoning.examples import Example, whole_text
from adlm.reasoning.logic import Fact, distances, read_either_or, read_fact, sentences
from adlm.reasoning.methods import encode

WORD = re.compile(r"[A-Za-z]+")


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


# Graphs: nodes are individuals, kinds and properties; edges are statements.
GRAPH_MEASURES: dict[str, Callable[[list[Fact]], int]] = {
    "nodes": lambda facts: len({name for f in facts for name in (f.who, f.what)}),
    "edges": len,
    "individuals": lambda facts: len(individuals(facts)),
    "properties told": lambda facts: sum(not f.is_concept for f in facts),
}
# Of either-or questions: what the individual asked about reaches, what those reach that lead to the wrong candidate.
CHOICE_MEASURES: dict[str, Callable[["Choice"], int]] = {
    "reachable from both": lambda c: len(reached(c, 1) & reached(c, 0)),
    "reachable from the right one": lambda c: len(reached(c, 1)),
    "reachable from the wrong one": lambda c: len(reached(c, 0)),
}


def describe_facts(examples: list[Example]) -> dict[str, str]:
    """Graphs, what can be reached in them, and how good blind rules are."""
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


def individuals(facts: list[Fact]) -> set[str]:
    return {f.who for f in facts if f.who[0].isupper()}


def reached(c: Choice, rightly: int) -> set[str]:
    """Individuals and kinds on the way from those who are the right candidate, and from those who are the wrong one."""
    kind = c.kinds[c.right if rightly else 1 - c.right]
    ways = (distances(c.facts, root) for root in individuals(c.facts))
    return {name for way in ways if kind in way for name in way}


def depth(facts: list[Fact], kind: str) -> int:
    """Fewest statements from any individual to a kind."""
    return min(found[kind] for found in (distances(facts, root) for root in individuals(facts)) if kind in found)


# Rules that never look at whom a question is about: each scores a candidate, and the higher score is the guess.
BLIND: dict[str, Callable[[Choice, int], int]] = {
    "the first named": lambda c, i: -i,
    "the deeper": lambda c, i: depth(c.facts, c.kinds[i]),
    "the one with more parents": lambda c, i: sum(f.what == c.kinds[i] for f in c.facts),
    "the one told of later": lambda c, i: max(at for at, f in enumerate(c.facts) if f.what == c.kinds[i]),
}


def is_guessed(example: Example, rule: str = "the deeper") -> bool:
    """A blind rule answers this question rightly; a tie is no answer."""
    c = choice(example)
    return c is not None and BLIND[rule](c, c.right) > BLIND[rule](c, 1 - c.right)


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

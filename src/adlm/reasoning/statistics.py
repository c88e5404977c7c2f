"""What the questions of a task are like, in numbers: generated sets beside published ones."""

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
        rows[f"share with {n} steps"] = share(steps[n], len(examples))
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
        "statements denied": share(sum(f.denied for facts in graphs for f in facts), sum(map(len, graphs))),
    }
    total = parents.total()
    rows |= {f"nodes told of {n} times": share(parents[n], total) for n in (1, 2, 3)}
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
    """Share of either-or questions that each blind rule answers rightly; a tie is worth half."""
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


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def side_by_side(
    sets: dict[str, list[Example]], is_logic: bool, tokenizer: Tokenizer | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table, one column per set."""
    columns = {name: describe(examples, is_logic, tokenizer) for name, examples in sets.items()}
    labels = list(dict.fromkeys(label for rows in columns.values() for label in rows))
    shares = sorted(label for label in labels if label.startswith("share with"))
    ordered = []
    for label in labels:
        if label in shares:
            ordered += shares if label == min(shares, key=labels.index) else []
        else:
            ordered.append(label)
    return ["", *columns], [[label, *(rows.get(label, "0.0 %") for rows in columns.values())] for label in ordered]

"""What the questions of a task are like, in numbers: generated sets beside published ones."""

import re
import statistics
from collections import Counter
from collections.abc import Callable

from adlm.data.tokenizers import Tokenizer
from adlm.reasoning.examples import Example, whole_text
from adlm.reasoning.logic import EITHER_OR, Fact, read_fact, sentences
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
    first = [first_is_right(e) for e in examples]
    rows["right answer named first, or True"] = share(sum(first), len(first))
    return rows


def statements(example: Example) -> list[Fact]:
    return [read_fact(s) for s in sentences(example.question)[:-1] if s.endswith(".")]


def first_is_right(example: Example) -> bool:
    match = EITHER_OR.search(example.question)
    return example.answer == "True" if match is None else example.answer.endswith(f" {match['one']}.")


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

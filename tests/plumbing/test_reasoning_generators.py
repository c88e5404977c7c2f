"""Generated questions that text alone decides: one answer each, laws of graphs, statistics of the published ones."""

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from adlm.data.tokenizers import load_tokenizer
from adlm.reasoning import generators, logic
from adlm.reasoning.generators import Shape
from adlm.reasoning.logic import (
    BLIND,
    CHOICE_MEASURES,
    GRAPH_MEASURES,
    blind_guesses,
    choice,
    describe,
    is_guessed,
    knowable,
    path_law,
    reached,
    side_by_side,
    statements,
)
from adlm.reasoning.methods import Example, whole_text
from adlm.reasoning.tasks import PRONTOQA, PROSQA, PROSQA_2HOP, PROSQA_BALANCED, generate
from adlm.tables import TASKS


@pytest.mark.parametrize("task", ["prosqa", "prontoqa"])
@pytest.mark.parametrize("hops", [0, 2, 3])
def test_generated_questions_have_one_answer_and_a_valid_derivation(task, hops):
    for example in generate(replace(TASKS.load(task), shape=Shape(hops)), 80, seed=3):
        assert logic.derivable_answers(example.question) == {example.answer}
        told = set(logic.sentences(example.question))
        known = set(told)
        for step in example.steps:  # every sentence of the trace was told, or follows from the step before it
            *_, last = logic.sentences(step)
            if task == "prosqa":
                assert step in told
            elif step != example.steps[-1]:
                assert last in told
        if task == "prosqa":
            facts = [logic.read_fact(s) for s in known if s.endswith(".")]
            goal = logic.read_fact(example.answer)
            assert logic.distances(facts, goal.who)[goal.what] == len(example.steps)  # none is shorter
            assert len(example.steps) == hops or not hops
        else:
            assert len(example.steps) == (hops or 5) + 1


def test_rare_graphs_are_found():
    """One graph in 430 has a derivation of 8 hops; with this seed more than 2,000 must be drawn."""
    shape = TASKS.load("prosqa-8hop").shape
    assert len(generators.prosqa(random.Random(92), shape).steps) == 8


def test_prontoqa_has_one_derivation():
    for example in generate(PRONTOQA, 50, seed=5):
        parents = Counter(f.what for f in statements(example) if f.is_concept)
        assert max(parents.values()) == 1


def test_the_wrong_candidate_is_right_for_someone_else():
    for example in generate(PROSQA, 50, seed=6):
        match = logic.EITHER_OR.search(example.question)
        assert match is not None
        wrong = next(k for k in (match["one"], match["two"]) if not example.answer.endswith(f" {k}."))
        facts = statements(example)
        others = {f.who for f in facts if f.who[0].isupper()} - {match["who"]}
        assert any(wrong in logic.distances(facts, other) for other in others)


def candidates(example):
    """Who is asked about, the right kind, the wrong kind, and the statements."""
    match = logic.read_either_or(example.question)
    assert match is not None
    right = next(k for k in (match["one"], match["two"]) if example.answer.endswith(f" {k}."))
    return match["who"], right, match["two"] if right == match["one"] else match["one"], statements(example)


@pytest.mark.parametrize(
    "task",
    [replace(PROSQA, shape=Shape(hops=2, nodes=7, words=10, balanced=True)), PROSQA_2HOP, PROSQA_BALANCED],
    ids=["ten words", "2hop", "balanced"],
)
def test_balanced_questions_cannot_be_answered_without_the_name(task):
    examples = generate(task, 300, seed=8)
    for example in examples:
        who, right, wrong, facts = candidates(example)
        others = {f.who for f in facts if f.who[0].isupper()} - {who}
        assert logic.distances(facts, who)[right] in {logic.distances(facts, other).get(wrong) for other in others}
    for name, right in blind_guesses(examples).items():  # four standard errors of a fair coin
        assert abs(right - 0.5) <= 4 * 0.5 / 300**0.5, name


def test_published_questions_can_be_guessed_by_depth(assets):
    """Why `balanced` exists; the generator, fitted to the published files, has the same flaw to the same degree."""
    published = blind_guesses(logic.read(assets / "data/prosqa/prosqa_test.json"))
    made = blind_guesses(generate(PROSQA, 500, seed=8))
    assert published["the deeper"] > 0.7
    assert all(abs(published[rule] - made[rule]) < 0.1 for rule in BLIND)


FORK = (
    "Tom is a lempus. Every rempus is a zumpus. Alex is a dumpus. Tom is a rempus. Every lempus is a zumpus."
    " Every zumpus is a wumpus. Every dumpus is a rompus. Is Tom a wumpus or rompus?"
)


def test_where_paths_fork_the_anchor_is_chance():
    example = Example(FORK, (), "Tom is a wumpus.", ())
    assert path_law(example) == [{"Tom": 1.0}, {"lempus": 0.5, "rempus": 0.5}, {"zumpus": 1.0}, {"wumpus": 1.0}]
    assert knowable([example]) == [1.0, 0.5, 1.0, 1.0]
    short = Example("Tom is a wumpus. Alex is a dumpus. Is Tom a wumpus or dumpus?", (), "Tom is a wumpus.", ())
    assert knowable([example, short]) == [1.0, 0.75, 1.0, 1.0]
    assert knowable(generate(PRONTOQA, 2, 1)) == []
    with pytest.raises(ValueError, match="does not follow from the statements of the question"):
        path_law(example._replace(answer="Tom is a rompus."))


def test_the_law_of_a_path_is_that_of_the_generator():
    draws, forks = 1000, 0
    for seed in range(16):
        rng = random.Random(seed)
        graph = generators.random_graph(rng, 24)
        called = [
            generators.PROSQA_CONCEPTS[i] if chosen else f"{chr(65 + i)}om" for i, chosen in enumerate(graph.parents)
        ]
        target = max(range(2, 24), key=lambda i: (graph.side[i] in (1, 2)) * graph.depth[i])
        paths = [generators.shortest_path(rng, graph, target) for _ in range(draws)]
        edges = [(p, i) for i, chosen in enumerate(graph.parents) for p in chosen]
        told = [logic.statement(called[p], called[i]) for p, i in edges]
        question = " ".join([*told, logic.either_or(called[paths[0][0]], called[target], "wrongpus")])
        law = path_law(Example(question, (), f"X is a {called[target]}.", ()))
        assert len(law) == len(paths[0])
        for at, found in enumerate(law):
            seen = Counter(called[path[at]] for path in paths)
            assert seen.keys() <= found.keys()
            forks += len(found) > 1
            for node, probability in found.items():
                noise = (probability * (1 - probability) / draws) ** 0.5
                assert abs(seen[node] / draws - probability) <= 5 * noise, (seed, at, node)
    assert forks > 5


def test_anchors_of_the_published_test_cannot_all_be_known(assets):
    examples = logic.read(assets / "data/prosqa/prosqa_test.json")
    for example in examples:
        assert all(found.get(word.strip()) for word, found in zip(example.anchors, path_law(example), strict=True))
    assert [round(100 * best, 1) for best in knowable(examples)] == [100, 86.6, 88.2, 95.3, 99.0, 100, 100]


def test_blind_guesses_by_hand():
    question = (
        "Tom is a terpus. Every terpus is a lempus. Bob is a rempus. Bob is a wumpus. {} is a rempus. Is Tom a {}?"
    )
    later = Example(question.format("Every wumpus", "lempus or rempus"), (), "Tom is a lempus.", ())
    assert blind_guesses([later]) == {
        "the first named": 1.0, "the deeper": 1.0, "the one with more parents": 0.0, "the one told of later": 0.0,
    }  # fmt: skip
    swapped = Example(question.format("Every wumpus", "rempus or lempus"), (), "Tom is a lempus.", ())
    assert blind_guesses([later, swapped])["the first named"] == 0.5
    assert blind_guesses(generate(PRONTOQA, 2, 1)) == {}


def test_terse_questions_are_the_same_questions_in_fewer_words():
    shape = Shape(hops=2, nodes=6, words=8, names=4, balanced=True)
    pairs = [
        [generators.prosqa(random.Random(i), shape._replace(terse=terse)) for terse in (False, True)] for i in range(80)
    ]
    for long, terse in pairs:
        assert statements(long) == statements(terse)
        assert logic.derivable_answers(terse.question) == {terse.answer}
        assert [logic.read_fact(step) for step in long.steps] == [logic.read_fact(step) for step in terse.steps]
        assert logic.read_fact(long.answer) == logic.read_fact(terse.answer)
        assert candidates(long) == candidates(terse) and long.anchors == terse.anchors


def test_terse_sentences_by_hand():
    assert logic.statement("Tom", "lempus") == "Tom is a lempus."
    assert logic.statement("lempus", "zumpus") == "Every lempus is a zumpus."
    assert logic.statement("Tom", "lempus", terse=True) == "Tom lempus."
    assert logic.read_fact("lempus zumpus.") == logic.Fact("lempus", "zumpus", is_concept=True)
    story = "lempus zumpus. Alex rempus. Tom lempus."
    assert logic.either_or("Tom", "zumpus", "rempus", terse=True) == "zumpus or rempus, Tom?"
    assert logic.derivable_answers(f"{story} zumpus or rempus, Tom?") == {"Tom zumpus."}
    assert logic.derivable_answers(f"{story} zumpus or rempus, Alex?") == {"Alex rempus."}
    assert logic.derivable_answers(f"{story} Is Tom a zumpus or rempus?") == {"Tom is a zumpus."}


def test_words_limit_the_vocabulary():
    examples = generate(replace(PROSQA, shape=Shape(hops=2, nodes=7, words=9)), 100, seed=8)
    used = {name for e in examples for f in statements(e) for name in (f.who, f.what)}
    assert used == {*generators.PROSQA_CONCEPTS[:9], *generators.PROSQA_NAMES[:9]}
    examples = generate(replace(PROSQA, shape=Shape(hops=2, nodes=7, words=9, names=4)), 100, seed=8)
    used = {name for e in examples for f in statements(e) for name in (f.who, f.what)}
    assert used == {*generators.PROSQA_CONCEPTS[:9], *generators.PROSQA_NAMES[:4]}


def test_examples_are_functions_of_seed_and_number():
    task = PROSQA
    first = generate(task, 30, seed=1)
    assert generate(task, 10, seed=1) == first[:10]
    assert generate(task, 10, seed=2) != first[:10]


@pytest.mark.parametrize("task", ["prosqa", "prontoqa"])
def test_statistics_match_the_published_files(assets, task):
    """Means within three standard errors of the difference of two samples of these sizes."""
    published = [e for part in ("valid", "test") for e in logic.read(assets / f"data/{task}/{task}_{part}.json")]
    made = generate(TASKS.load(task), 800, seed=11)
    measures = {
        "words": lambda e: len(e.question.split()),
        "steps": lambda e: len(e.steps),
        "edges": lambda e: len(statements(e)),
        "nodes": lambda e: len({n for f in statements(e) for n in (f.who, f.what)}),
        "individuals": lambda e: len({f.who for f in statements(e) if f.who[0].isupper()}),
        "denied": lambda e: sum(f.denied for f in statements(e)),
    }
    for name, measure in measures.items():
        ours, theirs = ([measure(e) for e in part] for part in (made, published))
        means = [sum(x) / len(x) for x in (ours, theirs)]
        errors = [sum((v - m) ** 2 for v in x) / len(x) ** 2 for x, m in zip((ours, theirs), means)]
        assert abs(means[0] - means[1]) <= 3 * sum(errors) ** 0.5 + 1e-9, (name, means)
    words = [{w.strip(".?:") for e in part for w in whole_text(e).split()} for part in (made, published)]
    assert words[0] == words[1]


PUBLISHED_PROSQA = {
    # mean and standard deviation over the 800 questions of the published validation and test files
    "nodes": (22.806, 1.985),
    "edges": (35.998, 5.754),
    "individuals": (2.556, 0.753),
    "reachable from both": (1.249, 1.181),
    "reachable from the right one": (13.486, 2.786),
    "reachable from the wrong one": (10.033, 2.806),
    "hops": (3.771, 0.763),
    "words": (179.15, 28.374),
}


def measured_prosqa(examples):
    choices, graphs = [choice(e) for e in examples], [statements(e) for e in examples]
    found = {name: [measure(g) for g in graphs] for name, measure in GRAPH_MEASURES.items()}
    found |= {name: [measure(c) for c in choices] for name, measure in CHOICE_MEASURES.items()}
    found |= {"hops": [len(e.steps) for e in examples], "words": [len(e.question.split()) for e in examples]}
    return {name: found[name] for name in PUBLISHED_PROSQA}


def test_generated_graphs_are_like_the_published_ones():
    """Means within four standard errors of the difference; before, 2.4 nodes were reachable from both."""
    n = 1200
    for name, values in measured_prosqa(generate(PROSQA, n, seed=17)).items():
        mean, deviation = PUBLISHED_PROSQA[name]
        assert abs(statistics.mean(values) - mean) < 4 * deviation * (1 / 800 + 1 / n) ** 0.5, name


def test_the_committed_statistics_are_those_of_the_published_files(assets):
    files = [assets / f"data/prosqa/prosqa_{part}.json" for part in ("valid", "test")]
    for name, values in measured_prosqa([e for file in files for e in logic.read(file)]).items():
        found = statistics.mean(values), statistics.pstdev(values)
        assert found == pytest.approx(PUBLISHED_PROSQA[name], abs=1e-3), name


def test_questions_the_blind_rule_does_not_answer(assets):
    """It is wrong in 2 % of the published questions and undecided in 12 %, of which half are right by chance."""
    examples = logic.read(assets / "data/prosqa/prosqa_test.json")
    hard = [e for e in examples if not is_guessed(e)]
    assert 0.1 < len(hard) / len(examples) < 0.2
    ties = 2 * (blind_guesses(examples)["the deeper"] - sum(map(is_guessed, examples)) / len(examples))
    assert len(hard) / len(examples) >= ties > 0.1
    assert not any(map(is_guessed, generate(PROSQA_BALANCED, 20, seed=1)))


def test_statistics_of_who_is_reached():
    story = "Tom is a terpus. Every terpus is a lempus. Bob is a rempus. Bob is a terpus. Is Bob a rempus or lempus?"
    c = choice(Example(story.replace("Bob a rempus or lempus", "Tom a lempus or rempus"), (), "Tom is a lempus.", ()))
    assert c is not None
    assert reached(c, rightly=0) == {"Bob", "rempus", "terpus", "lempus"}
    assert reached(c, rightly=1) == {"Tom", "Bob", "rempus", "terpus", "lempus"}  # Bob is a lempus, too


def test_statistics_table():
    header, rows = side_by_side({"a": generate(PROSQA, 20, 1), "b": generate(PROSQA, 20, 2)}, True)
    assert header == ["", "a", "b"]
    assert all(len(row) == 3 for row in rows)
    labels = [row[0] for row in rows]
    assert labels.index("with 3 steps") + 1 == labels.index("with 4 steps")
    example = Example("one two", ("three", "four five"), "six", ("three",))
    rows = describe([example, example], is_logic=False)
    assert rows["question, words"] == "2.00 ± 0.00 (2-2)"
    assert rows["trace, words"] == "3.00 ± 0.00 (3-3)"
    assert rows["with 2 steps"] == "100.0 %"
    rows = describe([example], is_logic=False, tokenizer=load_tokenizer("bytes"))
    assert [rows[f"{part}, tokens"].split()[0] for part in ("question", "trace", "answer")] == ["8.00", "16.00", "7.00"]


def test_long_derivations_can_be_asked_for():
    for hops in (7, 8):
        for example in generate(replace(PROSQA, shape=Shape(hops=hops, nodes=38)), 1, seed=1):
            assert len(example.steps) == hops and logic.derivable_answers(example.question) == {example.answer}


@pytest.mark.parametrize(
    ("generator", "shape", "message"),
    [
        (generators.prosqa, Shape(nodes=99), "nodes=99; they must be in 4..38"),
        (generators.prosqa, Shape(nodes=6, words=5), "words=5; they must be in nodes=6"),
        (generators.prosqa, Shape(hops=9), "hops=9; they must be in 0..8"),
        (generators.prosqa, Shape(names=1), "names=1 has fewer than two"),
        (generators.prosqa, Shape(hops=6, nodes=5), "more nodes"),
        (generators.prontoqa, Shape(words=9), "shaped by hops alone"),
        (generators.prontoqa, Shape(hops=7), "hops=7; they must be in 1..6"),
    ],
)
def test_bad_shapes_are_refused(generator, shape, message):
    with pytest.raises(ValueError, match=message):
        generator(random.Random(0), shape)


def test_too_few_different_questions_are_refused():
    with pytest.raises(ValueError, match="different questions"):
        generate(PROSQA, 10, 0, seen=Everything())


class Everything(set):
    def __contains__(self, item):
        return True

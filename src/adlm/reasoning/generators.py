"""Generators of questions like those of ProsQA and ProntoQA, and of stories in their language.

Example i of a seed is a pure function of (seed, i).

The published training files are too large to ship; the validation and test files are small and show how the questions
were made. Both generators were fitted to those files (`adlm reason data` prints the statistics side by side). By
construction, the right answer follows from the statements of a question, and the other one does not.
"""

import functools
import itertools
import math
import operator
import random
from typing import NamedTuple

from adlm.errors import require
from adlm.reasoning.logic import either_or, node_anchors, statement
from adlm.reasoning.methods import Example

PROSQA_NAMES = (
    "Alex", "Bob", "Carol", "Davis", "Eva", "Fae", "Gabriel", "Jack", "Max", "Oliver", "Polly", "Rex", "Sally", "Sam",
    "Stella", "Tom", "Wren",
)  # fmt: skip
PROSQA_CONCEPTS = (
    "bompus", "boompus", "brimpus", "chorpus", "dumpus", "felpus", "fompus", "gerpus", "gorpus", "grimpus", "gwompus",
    "hilpus", "impus", "jelpus", "jompus", "kerpus", "lempus", "lorpus", "numpus", "quimpus", "rempus", "rompus",
    "rorpus", "scrompus", "shumpus", "sterpus", "storpus", "terpus", "timpus", "tumpus", "vumpus", "worpus", "wumpus",
    "yerpus", "yimpus", "yumpus", "zhorpus", "zumpus",
)  # fmt: skip
PRONTOQA_NAMES = ("Alex", "Fae", "Max", "Polly", "Rex", "Sally", "Sam", "Stella", "Wren")
PRONTOQA_CONCEPTS = (
    "brimpus", "dumpus", "gorpus", "grimpus", "impus", "jompus", "lempus", "lorpus", "numpus", "rompus", "shumpus",
    "sterpus", "tumpus", "vumpus", "wumpus", "yumpus", "zumpus",
)  # fmt: skip
# Properties of one family exclude each other in the original data: a question uses at most one of each family.
PROPERTY_FAMILIES = (
    ("blue", "red", "brown", "orange"), ("small", "large"), ("metallic", "wooden", "luminous", "liquid"),
    ("transparent", "opaque"), ("nervous", "happy", "feisty", "shy"), ("bright", "dull"),
    ("sweet", "sour", "spicy", "bitter"), ("floral", "fruity", "earthy"), ("hot", "cold", "temperate"),
    ("kind", "mean", "angry", "amenable", "aggressive"), ("melodic", "muffled", "discordant", "loud"),
    ("slow", "moderate", "fast"), ("windy", "sunny", "rainy", "overcast", "snowy"),
)  # fmt: skip

PROSQA_NODES = 28
"""Nodes drawn per graph; nodes without edges are dropped, which leaves 23 on average."""
PUBLISHED_HOPS = range(3, 7)
MOST_HOPS = 8
"""The longest derivation that a task can require."""
ATTEMPTS = 50_000
"""The most graphs drawn for one question. One in 430 has a derivation of 8 hops."""
FIRST, SECOND, SHARED = 1, 2, 3
"""From which of the two individuals a node can be reached: the first, the second, both (a bit each); 0: neither."""
SHARED_WEIGHT = 0.2
"""Relative weight, as a parent, of a node that can be reached from both individuals, compared to one of them."""


class Shape(NamedTuple):
    """The shape of a task's questions, for its generator; zeros: as in the published files."""

    hops: int = 0
    """Statements in the derivation."""
    nodes: int = 0
    """ProsQA: nodes drawn per graph."""
    words: int = 0
    """ProsQA: number of kinds, and of names, that questions draw from."""
    names: int = 0
    """ProsQA: number of names, if it differs from `words`."""
    balanced: bool = False
    """ProsQA: the wrong answer is as deep as the right one."""
    terse: bool = False
    """ProsQA: only the words that carry information."""


PUBLISHED = Shape()


class Graph(NamedTuple):
    parents: list[list[int]]
    """Parents of each node, all with smaller indices. Nodes 0 and 1 are the two individuals of a question."""
    side: list[int]
    """FIRST, SECOND, SHARED or 0, by node."""
    depth: list[int]
    """Smallest number of statements from a root."""


def poisson(rng: random.Random, mean: float) -> int:
    """A Poisson variate, by Knuth's product of uniforms."""
    limit, k, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        k, product = k + 1, product * rng.random()
    return k


def weighted_sample(rng: random.Random, weights: dict[int, float], k: int) -> list[int]:
    """k different keys, drawn one after another with probabilities proportional to their weights."""
    left, drawn = dict(weights), []
    for _ in range(min(k, len(left))):
        drawn.append(rng.choices(list(left), list(left.values()))[0])
        del left[drawn[-1]]
    return drawn


def random_graph(rng: random.Random, nodes: int) -> Graph:
    """A DAG grown node by node. A new node has about 1.5 parents, drawn from the descendants of only the first root
    (35 %), of only the second (45 %), or from all nodes. Deep nodes are preferred, so that long derivations exist;
    descendants of both roots are chosen five times less often, and nodes below neither root as often as a root."""
    parents: list[list[int]] = [[], []]
    side, depth = [FIRST, SECOND], [0, 0]
    for _ in range(2, nodes):
        k, draw = poisson(rng, 1.5), rng.random()
        if k == 0:
            parents.append([])
            side.append(0)
            depth.append(0)
            continue
        wanted = FIRST if draw < 0.35 else SECOND if draw < 0.8 else None
        weights = {
            i: (1 + 1.5 * depth[i]) * (SHARED_WEIGHT if s == SHARED else 1)
            for i, s in enumerate(side)
            if wanted in (None, s)
        }
        chosen = weighted_sample(rng, weights, k)
        parents.append(chosen)
        side.append(functools.reduce(operator.or_, (side[i] for i in chosen), 0))
        depth.append(1 + min((depth[i] for i in chosen if side[i]), default=0) if side[-1] else 0)
    return Graph(parents, side, depth)


def prosqa(rng: random.Random, shape: Shape = PUBLISHED) -> Example:
    """A question about a graph of kinds below two individuals. The right answer is below only one of them, the wrong
    answer below only the other. `hops` 0: the answer is the deepest leaf, 3 to 6 statements deep, as published."""
    hops, nodes, most = shape.hops, shape.nodes or PROSQA_NODES, len(PROSQA_CONCEPTS)
    words = shape.words or most
    require(4 <= nodes <= most, f"a ProsQA task has nodes={nodes}; they must be in 4..{most}")
    require(nodes <= words <= most, f"a ProsQA task has words={words}; they must be in nodes={nodes}..{most}")
    require(0 <= hops <= MOST_HOPS, f"a ProsQA task has hops={hops}; they must be in 0..{MOST_HOPS}")
    names, _ = vocabulary(shape)
    require(len(names) > 1, f"a ProsQA task with names={shape.names} has fewer than two individuals")
    for _ in range(ATTEMPTS):
        graph = random_graph(rng, nodes)
        inner = {p for chosen in graph.parents for p in chosen}
        individuals = sum(i in inner and not chosen for i, chosen in enumerate(graph.parents))
        leaves = [i for i in range(2, nodes) if i not in inner and graph.side[i] in (FIRST, SECOND)]
        pair = (equally_deep_pair if shape.balanced else published_pair)(rng, graph, leaves, hops)
        if pair and individuals <= len(names):
            return write_prosqa(rng, graph, *pair, shape)
    raise ValueError(f"no graph of nodes={nodes} has a derivation of hops={hops}; give the task more nodes")


def vocabulary(shape: Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names and the kinds from which questions of a shape draw."""
    words = shape.words or len(PROSQA_CONCEPTS)
    return PROSQA_NAMES[: shape.names or words], PROSQA_CONCEPTS[:words]


def is_wanted(depth: int, hops: int) -> bool:
    return depth == hops if hops else depth in PUBLISHED_HOPS


def published_pair(rng: random.Random, graph: Graph, leaves: list[int], hops: int) -> tuple[int, int] | None:
    """Right and wrong answer as in the published files: the right one is the deepest leaf, the wrong one any leaf of
    the other individual. So the deeper candidate is the better guess, even without reading the name."""
    right = [
        i for i in leaves if is_wanted(graph.depth[i], hops) and any(graph.side[j] != graph.side[i] for j in leaves)
    ]
    if not right:
        return None
    deepest = max(graph.depth[i] for i in right)
    target = rng.choice([i for i in right if graph.depth[i] == deepest])
    return target, rng.choice([i for i in leaves if graph.side[i] != graph.side[target]])


def equally_deep_pair(rng: random.Random, graph: Graph, leaves: list[int], hops: int) -> tuple[int, int] | None:
    """Two leaves of equal depth, one below each individual; a fair coin decides who the question is about. So every
    rule that does not use the name in the question is right half of the time, given the graph and the candidates."""
    by_side = [
        {graph.depth[i] for i in leaves if graph.side[i] == s and is_wanted(graph.depth[i], hops)}
        for s in (FIRST, SECOND)
    ]
    shared = by_side[0] & by_side[1]
    if not shared:
        return None
    depth = max(shared)
    one, two = (
        rng.choice([i for i in leaves if graph.side[i] == s and graph.depth[i] == depth]) for s in (FIRST, SECOND)
    )
    return (one, two) if rng.random() < 0.5 else (two, one)


def write_prosqa(rng: random.Random, graph: Graph, target: int, other: int, shape: Shape) -> Example:
    """Name the nodes (those without parents are individuals), write a statement for every edge, shuffle, and ask."""
    edges = [(p, i) for i, chosen in enumerate(graph.parents) for p in chosen]
    used = sorted({i for edge in edges for i in edge})
    free_names, free_kinds = (iter(rng.sample(words, len(words))) for words in vocabulary(shape))
    called = {i: next(free_kinds if graph.parents[i] else free_names) for i in used}

    def say(parent: int, child: int) -> str:
        return statement(called[parent], called[child], shape.terse)

    path = shortest_path(rng, graph, target)
    steps = tuple(say(a, b) for a, b in itertools.pairwise(path))
    statements = [say(a, b) for a, b in edges]
    rng.shuffle(statements)
    one, two = rng.sample([called[target], called[other]], 2)
    question = " ".join([*statements, either_or(called[path[0]], one, two, shape.terse)])
    return Example(question, steps, say(path[0], target), node_anchors(steps))


def shortest_path(rng: random.Random, graph: Graph, target: int) -> list[int]:
    """A shortest path from a root to `target`; among several nearest parents of a node, a random one."""
    path = [target]
    while graph.depth[path[-1]]:
        here = [p for p in graph.parents[path[-1]] if graph.side[p] and graph.depth[p] == graph.depth[path[-1]] - 1]
        path.append(rng.choice(here))
    return path[::-1]


def prontoqa(rng: random.Random, shape: Shape = PUBLISHED) -> Example:
    """A true-or-false question: a chain of `hops` kinds whose last one has the property in question. Distractors: every
    kind of the chain has a second child and a property of its own, the individual is also of another kind, and a kind
    that it is not has the same property with the opposite sign."""
    hops = shape.hops or 5
    require(shape == Shape(hops=shape.hops), f"a ProntoQA task is shaped by hops alone, not by {shape}")
    most = (len(PRONTOQA_CONCEPTS) - 4) // 2
    require(1 <= hops <= most, f"a ProntoQA task has hops={hops}; they must be in 1..{most}")
    name = rng.choice(PRONTOQA_NAMES)
    concepts = rng.sample(PRONTOQA_CONCEPTS, 2 * hops + 4)
    chain, branches = concepts[:hops], concepts[hops : 2 * hops]
    last_branch, second, beyond, stranger = concepts[2 * hops :]
    families = iter(rng.sample(PROPERTY_FAMILIES, len(PROPERTY_FAMILIES)))

    def relate(kind: str, other: str) -> str:
        return universal(rng, kind, f"{article(other)} {other}", f"{other}es")

    def describe(kind: str, what: str, denied: bool) -> str:
        what = f"not {what}" if denied else what
        return universal(rng, kind, what, what)

    asked = rng.choice(next(families))
    denied = rng.random() < 0.5
    links = [relate(a, b) for a, b in itertools.pairwise(chain)]
    proof = [*links, describe(chain[-1], asked, denied)]
    distractors = [relate(kind, branch) for kind, branch in zip(chain, branches)]
    distractors += [relate(chain[-1], last_branch), relate(second, beyond), describe(stranger, asked, not denied)]
    for kind in (*chain[:-1], *branches, second):
        distractors.append(describe(kind, rng.choice(next(families)), rng.random() < 0.29))
    statements = proof + distractors
    rng.shuffle(statements)
    told = [f"{name} is {article(kind)} {kind}." for kind in rng.sample([chain[0], second], 2)]
    asks_denied = rng.random() < 0.5
    question = " ".join([*statements, *told, f"True or false: {name} is {'not ' if asks_denied else ''}{asked}."])
    steps = [f"{name} is {article(kind)} {kind}. {sentence}" for kind, sentence in zip(chain, proof)]
    steps.append(f"{name} is {'not ' if denied else ''}{asked}.")
    return Example(question, tuple(steps), str(asks_denied == denied), node_anchors(tuple(steps)))


def universal(rng: random.Random, kind: str, one: str, many: str) -> str:
    """`Each wumpus is <one>.` or `Every wumpus is <one>.` or, as often as both together, `Wumpuses are <many>.`"""
    if rng.random() < 0.5:
        return f"{kind.capitalize()}es are {many}."
    return f"{rng.choice(('Each', 'Every'))} {kind} is {one}."


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


# Stories, for a network from scratch, before the first stage.
#
# The methods of the paper start from pretrained GPT-2, which can already look up in its context what was said about a
# word. A network from scratch must first form that circuit, and a second one after it for two lookups in one pass. But
# a question needs only one or two lookups among many tokens that need none, and its answer is one of two: the network
# stays at chance for thousands of steps. In a story every statement needs a lookup. A story says what some individuals
# and kinds are, repeats some of it in another order (one lookup per statement), and then says what each of them is two
# statements away (two lookups each). A story answers no question: the stages teach that.

STORY_NAMES, STORY_KINDS = 2, 4
"""Number of individuals and of kinds in a story."""


def story(rng: random.Random, shape: Shape) -> dict[str, str]:
    """Individual or kind -> its kind. Each kind is the next one in a circle: so everyone has a kind two statements
    away, and no story has the same statements as a question."""
    names, kinds = vocabulary(shape)
    circle = rng.sample(kinds, STORY_KINDS)
    return dict(
        zip([*circle, *rng.sample(names, STORY_NAMES)], [*circle[1:], circle[0], *rng.sample(circle, STORY_NAMES)])
    )


def retold(rng: random.Random, shape: Shape, plain: bool) -> Example:
    """A story in the form of an example: the question is the story, the trace repeats it in another order, and the
    answer says, in a third order, what everyone is two statements away. If not `plain`, a question ends the story and
    only some of it is repeated, as in the sequences of the stages. That question is about random kinds and has no
    effect on what follows: the network learns that a question is not a statement."""
    is_a = story(rng, shape)
    first, second, third = (rng.sample(list(is_a), len(is_a)) for _ in range(3))
    told, again = ([statement(who, is_a[who], shape.terse) for who in order] for order in (first, second))
    follows = [statement(who, is_a[is_a[who]], shape.terse) for who in third]
    if not plain:
        who = rng.choice([name for name in first if name[0].isupper()])
        one, two = rng.sample([kind for kind in first if kind[0].islower()], 2)
        told.append(either_or(who, one, two, shape.terse))
        again = again[: rng.randint(0, len(again))]
    return Example(" ".join(told), (" ".join(again),) if again else (), " ".join(follows), ())

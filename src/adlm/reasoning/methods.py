"""The methods: each says, stage by stage, how a training example is laid out. One table; a new method is one line.

All of them put some [ANT] positions ("slots") between the question and what the model has to write, and take some steps
away from the front of the trace:

    question [BOA] [ANT] .. [ANT] [EOA] remaining steps ### answer <end>

They differ in how many of each, and in what happens at a slot: nothing (pause tokens), its output is trained to be an
anchor of the trace (ACoT), or its input is the output of the position before it (Coconut). Without slots there are no
[BOA] and [EOA] either, so that the first stage of every staged method is plain chain of thought.
"""

from collections.abc import Callable
from typing import NamedTuple

from adlm.data.tokenizers import Tokenizer
from adlm.errors import choose, require
from adlm.reasoning.examples import Example, answer_text, question_text, step_text
from adlm.schema import ReasonConfig

BOA, ANT, EOA = "[BOA]", "[ANT]", "[EOA]"
ANCHOR_TOKENS = ("first", "all")
IGNORE = -1
"""A position without a label."""
ALL = 1_000_000
"""More steps than any trace has."""


class Plan(NamedTuple):
    """What a stage of a method does to every example."""

    slots: int = 0
    removed: int = 0
    """Steps taken from the front of the trace."""
    anchored: bool = False
    """The output at a slot is trained to be an anchor."""
    fed_back: bool = False
    """The input of a slot is the final hidden state of the position before it."""


def stages_of(cfg: ReasonConfig) -> int:
    """Stages that add slots or remove steps, beyond stage 0."""
    require(
        cfg.slots > 0 and cfg.slots_per_stage > 0 and cfg.slots % cfg.slots_per_stage == 0,
        f"reason.slots={cfg.slots} must be a positive multiple of reason.slots_per_stage={cfg.slots_per_stage}",
    )
    return cfg.slots // cfg.slots_per_stage


def curriculum(cfg: ReasonConfig, slots: bool, remove: bool, anchored: bool = False, fed_back: bool = False):
    """Stage s: s times the slots of a stage, s steps removed. Where steps are removed, a last stage has none left."""
    plans = []
    for stage in range(stages_of(cfg) + 1):
        n_slots = stage * cfg.slots_per_stage if slots else 0
        plans.append(Plan(n_slots, stage if remove else 0, anchored, fed_back and n_slots > 0))
    return [*plans, plans[-1]._replace(removed=ALL)] if remove else plans


METHODS: dict[str, Callable[[ReasonConfig], list[Plan]]] = {
    "cot": lambda cfg: [Plan()],
    "no-cot": lambda cfg: [Plan(removed=ALL)],
    "pause": lambda cfg: [Plan(slots=cfg.slots, removed=ALL)],
    "acot": lambda cfg: curriculum(cfg, slots=True, remove=cfg.remove_steps, anchored=True),
    "icot": lambda cfg: curriculum(cfg, slots=False, remove=True),
    "coconut": lambda cfg: curriculum(cfg, slots=True, remove=True, fed_back=True),
    "coconut-pause": lambda cfg: curriculum(cfg, slots=True, remove=True),
}


def plans_of(cfg: ReasonConfig) -> list[Plan]:
    """The plan of every stage of the configured method."""
    choose("reason.anchor_tokens", cfg.anchor_tokens, ANCHOR_TOKENS)
    return METHODS[choose("reason.method", cfg.method, METHODS)](cfg)


class Encoded(NamedTuple):
    """An example in tokens, cut where layouts cut it."""

    question: list[int]
    steps: list[list[int]]
    answer: list[int]
    """With the end-of-text token."""
    anchors: list[list[int]]


class Layout(NamedTuple):
    """One row of a batch; all but `slots` have an entry per position."""

    tokens: list[int]
    targets: list[int]
    """What the output at a position must be: the next token, or IGNORE (question and slots are given, not learned)."""
    anchors: list[int]
    """The anchor that the output AT an [ANT] position must be, or IGNORE."""
    slots: range
    """Positions of [ANT]; the fed-back ones, if the plan feeds back."""
    prompt: int
    """Tokens that are given at generation: question and slots."""


class Markers(NamedTuple):
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
    """Each part on its own: parts end in a newline, which no vocabulary in use merges with what follows it."""

    def batch(texts: list[str]) -> list[list[int]]:
        return tokenizer.encode_batch(texts)

    questions = batch([question_text(e) for e in examples])
    answers = batch([answer_text(e) for e in examples])
    steps = iter(batch([step_text(step) for e in examples for step in e.steps]))
    anchors = iter(batch([anchor for e in examples for anchor in e.anchors]))
    return [
        Encoded(
            question,
            [next(steps) for _ in example.steps],
            [*answer, tokenizer.eos_id],
            [next(anchors) for _ in example.anchors],
        )
        for example, question, answer in zip(examples, questions, answers)
    ]


def lay_out(example: Encoded, plan: Plan, markers: Markers, anchor_tokens: str = "first") -> Layout:
    """The row of an example under a plan."""
    slots = [markers.boa, *[markers.ant] * plan.slots, markers.eoa] if plan.slots else []
    given = [*example.question, *slots]
    written = [token for step in example.steps[plan.removed :] for token in step] + example.answer
    first = len(example.question) + 1
    at = range(first, first + plan.slots)
    anchors = [IGNORE] * (len(given) + len(written))
    if plan.anchored:
        for position, label in zip(at, anchor_labels(example.anchors, anchor_tokens)):
            anchors[position] = label
    # the output at the last given position is the first written token, and nothing follows the last one
    targets = [IGNORE] * (len(given) - 1) + written + [IGNORE]
    return Layout(given + written, targets, anchors, at, len(given))


def written_length(example: Encoded, plan: Plan) -> int:
    """Tokens of an example that the model has to write, without laying it out."""
    return sum(map(len, example.steps[plan.removed :])) + len(example.answer)


def row_length(example: Encoded, plan: Plan) -> int:
    markers = plan.slots + 2 if plan.slots else 0
    return len(example.question) + markers + written_length(example, plan)


def anchor_labels(anchors: list[list[int]], anchor_tokens: str) -> list[int]:
    """Labels of the slots in order; slots beyond them have none, labels beyond the slots are dropped."""
    if anchor_tokens == "first":
        return [tokens[0] for tokens in anchors]
    return [token for tokens in anchors for token in tokens]

"""Answers of a trained network: generation, grading, and accuracies with intervals.

The second half of the module is for a diffusion model, which answers by infilling.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.data.blocks import Blocks
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import make_schedule
from adlm.diffusion.random import Stream, fold
from adlm.engine import Engine, Request
from adlm.errors import require
from adlm.models import Network, build_model
from adlm.objectives import Objective, Sequences
from adlm.objectives.anchors import AnchorRule
from adlm.objectives.nelbo import Anelbo, Nelbo, Noised
from adlm.reasoning.methods import (
    IGNORE,
    Encoded,
    Example,
    StagePlan,
    encode,
    laid_out_length,
    lay_out,
    markers_of,
    whole_text,
    written_answer,
)
from adlm.reasoning.networks import PaddedSequences, ReasoningNetwork, pad_sequences, read_sequences, word_tokenizer
from adlm.reasoning.tasks import ReasoningTask, load_splits, task_of
from adlm.samplers.base import with_sampler
from adlm.schema import Config, SamplingConfig
from adlm.training.loop import Course, TrainResult, train
from adlm.training.parallel import World
from adlm.training.setup import Data, objective_for

TOGETHER = 128
"""Questions answered together if eval.batch_size is not set."""


class Slot(NamedTuple):
    """The prediction of a network at one [ANT] position."""

    token: int
    """The most probable token."""
    label: int
    """The anchor; IGNORE if the example has no more anchors."""
    nats: float
    """-log of the anchor's probability; 0 without one."""


class Reply(NamedTuple):
    """The answer of a network to one question."""

    text: str
    correct: bool
    tokens: int
    """Sequential steps: tokens written (without end of text) and continuous thoughts."""
    ended: bool
    slots: tuple[Slot, ...] = ()
    """Only for a method whose slots are trained to be anchors."""


class Accuracy(NamedTuple):
    """The results of a network on a set of questions."""

    n: int
    correct: int
    tokens: float
    """Sequential steps per answer."""
    unfinished: int
    """Texts that had not ended at the maximum length."""
    slots: tuple[float, ...] = ()
    """Fraction of the anchors that each slot finds, in order, for slots with an anchor in some question."""
    anchor_nats: float = 0.0
    """Loss per anchor."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.n)
        anchors = f"; anchors {'/'.join(f'{100 * x:.0f}' for x in self.slots)} %"
        anchors += f", {self.anchor_nats:.2f} nats each" if self.anchor_nats else ""
        return (
            f"accuracy {100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}, {self.correct} of {self.n}),"
            f" {self.tokens:.1f} tokens per answer{anchors if self.slots else ''}"
        )

    def facts(self) -> dict[str, float | int]:
        low, high = wilson(self.correct, self.n)
        anchors: dict[str, float | int] = {f"slot_{i}": found for i, found in enumerate(self.slots, 1)}
        return {
            "n": self.n,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "tokens": self.tokens,
            "unfinished": self.unfinished,
        } | (anchors | {"anchor_nats": self.anchor_nats} if anchors else {})


def wilson(correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction: valid for 0 and n right answers, too, where the usual one has width 0."""
    p, zz = correct / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))


def score(replies: Sequence[Reply]) -> Accuracy:
    """The accuracy of answers and of the slots before them, and their cost."""
    n = len(replies)
    by_slot = [[s for s in slots if s.label != IGNORE] for slots in zip(*(reply.slots for reply in replies))]
    labelled = [slot for slots in by_slot for slot in slots]
    return Accuracy(
        n,
        sum(reply.correct for reply in replies),
        sum(reply.tokens for reply in replies) / n,
        sum(not reply.ended for reply in replies),
        tuple(sum(s.token == s.label for s in slots) / len(slots) for slots in by_slot if slots),
        sum(slot.nats for slot in labelled) / len(labelled) if labelled else 0.0,
    )


@torch.inference_mode()
def read_slots(
    network: ReasoningNetwork, prompts: PaddedSequences, labels: list[list[int]], mask_id: int
) -> list[tuple[Slot, ...]]:
    """The predictions at the slots of every prompt, with the given labels: anchors or IGNORE."""
    label_BS = torch.tensor(labels, device=prompts.tokens_BL.device)
    each_B = torch.arange(len(labels), device=label_BS.device)
    at_BS = prompts.first_slot_B[:, None] + torch.arange(label_BS.shape[1], device=label_BS.device)
    with torch.compiler.set_stance("force_eager"):  # prompts come in too many shapes
        hidden_BLD = read_sequences(network, prompts)
    logits_BSV = network.head(hidden_BLD[each_B[:, None], at_BS]).float()
    logits_BSV[..., mask_id] = -torch.inf
    found_BS = logits_BSV.argmax(-1)
    nats_BS = -logits_BSV.log_softmax(-1).gather(-1, label_BS.clamp(min=0)[..., None])[..., 0]
    nats_BS = nats_BS.where(label_BS != IGNORE, 0.0)
    rows = zip(found_BS.tolist(), labels, nats_BS.tolist())
    return [tuple(Slot(*slot) for slot in zip(*row)) for row in rows]


@torch.inference_mode()
def generate(
    network: ReasoningNetwork, prompts: PaddedSequences, max_new_tokens: int, eos_id: int, mask_id: int
) -> list[list[int]]:
    """The greedy continuation of every prompt, including the end-of-text token if it is reached."""
    B, device = len(prompts.tokens_BL), prompts.tokens_BL.device
    room = network.longest - int(prompts.length_B.max())
    steps = min(max_new_tokens, room)
    memory = network.remember(B, min(network.longest, prompts.tokens_BL.shape[1] + steps), gradients=False)
    each_B, one_B = torch.arange(B, device=device), torch.ones_like(prompts.length_B)
    hidden_BD = read_sequences(network, prompts, memory)[each_B, prompts.length_B - 1]
    ended_B = torch.zeros(B, dtype=torch.bool, device=device)
    written = []
    for step in range(steps):
        logits_BV = network.head(hidden_BD).float()
        logits_BV[:, mask_id] = -torch.inf
        token_B = logits_BV.argmax(-1).masked_fill(ended_B, eos_id)
        written.append(token_B)
        ended_B = ended_B | (token_B == eos_id)
        if step + 1 == steps or bool(ended_B.all()):
            break
        hidden_BD = network.read(network.embed(token_B[:, None]), memory, one_B)[:, 0]
    if not written:
        return [[] for _ in range(B)]
    texts = torch.stack(written, dim=1).tolist()
    return [text[: text.index(eos_id) + 1] if eos_id in text else text for text in texts]


@dataclass
class Answerer:
    """A network with the settings by which a stage of its method answers questions."""

    network: Any
    tokenizer: Tokenizer
    task: ReasoningTask
    plan: StagePlan
    max_new_tokens: int
    batch_size: int = 0
    """Questions answered together; 0: TOGETHER."""
    anchor_tokens: str = "first"
    """How anchors label the slots (reason.anchor_tokens)."""

    def check_room(self, encoded: list[Encoded], what: str = "questions") -> None:
        """Refuse questions that are too long for the network, instead of counting them as wrong."""
        lengths = [laid_out_length(example, self.plan) for example in encoded]
        longest = max(lengths, default=0)
        require(
            longest <= self.network.longest,
            f"{what}: example {lengths.index(longest) if lengths else 0} has {longest} tokens with its answer, and the"
            f" model reads {self.network.longest} (model.length, or what reason.base was made for); leave it out",
        )

    def answer(self, examples: list[Example], ranks: World) -> tuple[Accuracy, list[Reply]]:
        """Answer every question; return the accuracy and the replies, in the order of the examples."""
        encoded = encode(examples, self.tokenizer)
        self.check_room(encoded)
        was_training = self.network.training
        self.network.eval()
        markers, eos_id, mask_id = markers_of(self.tokenizer), self.tokenizer.eos_id, self.tokenizer.mask_id
        layouts = [lay_out(example, self.plan, markers, self.anchor_tokens) for example in encoded]
        order = sorted(range(len(layouts)), key=lambda i: layouts[i].prompt)  # similar lengths together: less padding
        written: list[list[int]] = [[] for _ in layouts]
        slots: list[tuple[Slot, ...]] = [() for _ in layouts]
        together = self.batch_size or TOGETHER
        for start in range(0, len(order), together):
            part = order[start : start + together]
            prompts = [layouts[i].tokens[: layouts[i].prompt] for i in part]
            padded = pad_sequences(prompts, [layouts[i].slots for i in part], self.plan.fed_back, ranks.device)
            with ranks.autocast():
                answers = generate(self.network, padded, self.max_new_tokens, eos_id, mask_id)
                said = [()] * len(part)
                if self.plan.anchored and self.plan.slots:
                    labels = [[layouts[i].anchors[at] for at in layouts[i].slots] for i in part]
                    said = read_slots(self.network, padded, labels, mask_id)
            for i, answer, anchors in zip(part, answers, said):
                written[i], slots[i] = answer, anchors
        self.network.train(was_training)
        replies = [self.reply(*each) for each in zip(written, examples, slots)]
        return score(replies), replies

    def reply(self, written: list[int], example: Example, slots: tuple[Slot, ...]) -> Reply:
        """Grade the tokens written for a question."""
        ended = written[-1:] == [self.tokenizer.eos_id]
        text = self.tokenizer.decode(written, skip_special=True)
        answer = written_answer(text)
        correct = answer is not None and self.task.same_answer(answer, example.answer)
        thoughts = self.plan.slots if self.plan.fed_back else 0
        return Reply(text, correct, len(written) - ended + thoughts, ended, slots)

    def anchor_words(self, reply: Reply) -> list[str]:
        """The slots' predictions as text."""
        return [self.tokenizer.decode([slot.token]).strip() for slot in reply.slots]


# ---- answers by infilling --------------------------------------------------------------------------------------------
# Reasoning inside the diffusion model: a question of ProsQA is answered by filling in the path and the answer.
#
#     path [slots] | answer | question | padding
#
# One sequence per example, for a bidirectional model. The path has one position per node, as many as the longest path
# of any question, so that its length reveals nothing; unused positions hold the end-of-text token. Path and answer come
# first, at the same positions in every sequence: they are noised and predicted, and the question after them is given.
# The anchors of ADLM are the path's positions (objective.anchor_rule=given). Training is that of `adlm train`.

MULTIPLE = 8
"""Sequences are padded to a multiple of this many positions."""


@dataclass(frozen=True)
class InfillLayout:
    """The layout of a sequence: how many positions each part has."""

    path: int
    """Positions of the path."""
    answer: int
    """Positions of the answer, after the path."""
    length: int

    @property
    def filled(self) -> int:
        """Positions that are predicted; they come first."""
        return self.path + self.answer

    @classmethod
    def of(cls, examples: list[Example], tokenizer: Tokenizer) -> "InfillLayout":
        """The smallest layout that fits all examples."""
        path = max(len(example.anchors) for example in examples)
        answers = {len(ids) for ids in tokenizer.encode_batch([example.answer for example in examples])}
        require(len(answers) == 1, f"answers have {sorted(answers)} tokens: infilling needs equally many")
        question = max(map(len, tokenizer.encode_batch([example.question for example in examples])))
        (answer,) = answers
        return cls(path, answer, -(-(path + answer + question) // MULTIPLE) * MULTIPLE)

    def rows(self, examples: list[Example], tokenizer: Tokenizer) -> np.ndarray:
        """The sequences of examples, [n, length]."""
        questions = tokenizer.encode_batch([example.question for example in examples])
        answers = tokenizer.encode_batch([example.answer for example in examples])
        nodes = iter(tokenizer.encode_batch([anchor for example in examples for anchor in example.anchors]))
        rows = np.full((len(examples), self.length), tokenizer.eos_id, dtype=np.int64)
        for row, example, question, answer in zip(rows, examples, questions, answers):
            path = [next(nodes) for _ in example.anchors]
            require(all(len(node) == 1 for node in path), f"a node of {example.anchors} is not one token")
            behind = self.filled + len(question)
            require(
                len(path) <= self.path and len(answer) == self.answer and behind <= self.length,
                f"no room for {len(path)} nodes and {len(question)} tokens of a question in {self}",
            )
            row[: len(path)] = [node[0] for node in path]
            row[self.path : self.filled] = answer
            row[self.filled : behind] = question
        return rows


class TaskRows(Blocks):
    """Sequences in memory, with the interface of prepared ones. Their `lengths` are the predicted positions."""

    def __init__(self, examples: list[Example], layout: InfillLayout, tokenizer: Tokenizer):
        self.folder, self.tokens = Path("task"), layout.rows(examples, tokenizer)
        self.lengths, self.starts = np.full(len(examples), layout.filled), None
        self.length, self.crop, self.bos_id = layout.length, 0, tokenizer.bos_id
        self.manifest: dict[str, Any] = {
            "rows": len(examples),
            "vocab_size": tokenizer.vocab_size,
            "origin": hashlib.sha256("\n".join(map(whole_text, examples)).encode()).hexdigest(),
        }


class Given(Nelbo):
    """A bound on the predicted positions, given all others, which are never masked. The attention mask of the
    sequences says which positions are predicted."""

    path = 0
    """Positions of the path, at the beginning of a sequence."""

    def noised(self, sequences: Sequences, seed: int, counter: int, density: float = 1.0) -> Noised:
        noised = super().noised(sequences, seed, counter, density)
        assert sequences.attention_mask_BL is not None
        predicted_BL = sequences.attention_mask_BL.bool()
        noised.z_BL = torch.where(predicted_BL, noised.z_BL, sequences.tokens_BL)
        noised.masked_BL = noised.masked_BL & predicted_BL
        return noised

    @cached_property
    def find_anchors(self) -> AnchorRule:
        """The anchor rule; for objective.anchor_rule=given, the positions of the path."""
        return self.on_path if self.cfg.anchor_rule == "given" else super().find_anchors

    def on_path(self, tokens_BL: Tensor, cfg: Any) -> Tensor:
        return (torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < self.path).expand_as(tokens_BL)


class GivenAnchored(Given, Anelbo):
    """`Given` for the ANELBO, whose anchor term acts on the path."""


@dataclass
class Infilling:
    """A task as sequences to fill in: training and evaluation of a diffusion model."""

    task: ReasoningTask
    tokenizer: Tokenizer
    layout: InfillLayout
    train: list[Example]
    valid: list[Example]
    tests: dict[str, list[Example]]

    @classmethod
    def of(cls, cfg: Config) -> "Infilling":
        """The questions of cfg.reason and cfg.data."""
        splits = load_splits(cfg.reason, cfg.seed, cfg.data)
        tokenizer = word_tokenizer(splits.train)
        everything = [*splits.train, *splits.valid, *(e for part in splits.tests.values() for e in part)]
        layout = InfillLayout.of(everything, tokenizer)
        return cls(task_of(cfg.reason), tokenizer, layout, splits.train, splits.valid, splits.tests)

    def data(self, cfg: Config, ranks: World) -> Data:
        """The training and validation sequences for the loop."""
        require(
            cfg.model.length == self.layout.length,
            f"model.length={cfg.model.length} must be that of the sequences, {self.layout.length}",
        )
        train, valid = (TaskRows(part, self.layout, self.tokenizer) for part in (self.train, self.valid))
        return Data(self.tokenizer, train, valid)

    def objective(self, cfg: Config, data: Data) -> Objective:
        """The objective of the settings, given the question."""
        plain = objective_for(cfg, data)
        require(
            type(plain) in (Nelbo, Anelbo), f"objective.name={cfg.objective.name} does not fill in: nelbo, anelbo do"
        )
        causal = cfg.objective.causal_until
        require(causal == 0, f"objective.causal_until={causal}: a sequence to be filled in is not read from its start")
        kind = GivenAnchored if isinstance(plain, Anelbo) else Given
        objective = kind(cfg.objective, make_schedule(cfg.noise), self.tokenizer.mask_id, cfg.seed)
        objective.path = self.layout.path
        return objective

    def learn(self, cfg: Config) -> TrainResult:
        """Train a diffusion model with the loop of `adlm train`, which answers the validation questions instead of
        drawing samples."""
        return train(cfg, self.sample, Course(self.data, self.objective))

    def sample(self, weights: dict[str, Tensor], tokenizer: Tokenizer, cfg: Config, step: int) -> str:
        """The accuracy of the current weights on the validation questions, sampled by cfg.sampling."""
        model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
        model.load_state_dict(weights)
        model.to(next(iter(weights.values())).device).eval()
        return str(self.answer(model, cfg, self.valid)[0])

    def answer(
        self, model: Network, cfg: Config, examples: list[Example], settings: SamplingConfig | None = None
    ) -> tuple[Accuracy, list[Reply]]:
        """Fill in path and answer of every question; the accuracy covers the answer and each node of the path."""
        settings = with_sampler(settings or cfg.sampling, cfg.objective, cfg.model)
        rows, device = self.layout.rows(examples, self.tokenizer), model.embedding.device
        slots = min(len(examples), 256)
        engine = Engine(model, make_schedule(cfg.noise), slots, device, compile="false", tau=cfg.objective.tau)
        requests = []
        for i, row in enumerate(rows):
            canvas = [self.tokenizer.mask_id] * self.layout.filled + row[self.layout.filled :].tolist()
            requests.append(Request(canvas, settings, seed=fold(settings.seed, Stream.TOKEN, i)))
        found = {result.id: result.tokens for result in engine.run(requests)}
        replies = [self.reply(tokens, row, e) for (_, tokens), row, e in zip(sorted(found.items()), rows, examples)]
        return score(replies), replies

    def reply(self, tokens: list[int], row: np.ndarray, example: Example) -> Reply:
        path, nodes = self.layout.path, len(example.anchors)
        text = self.tokenizer.decode(tokens[path : self.layout.filled], skip_special=True)
        labels = [int(label) if i < nodes else IGNORE for i, label in enumerate(row[:path])]
        slots = tuple(Slot(token, label, 0.0) for token, label in zip(tokens, labels))
        return Reply(text, self.task.same_answer(text, example.answer), self.layout.filled, True, slots)

"""Reasoning inside the diffusion model: a question of ProsQA is answered by filling in the path and the answer.

    path [slots] | answer | question | padding

One sequence per example, for a bidirectional model. The path has a position for each of its nodes, the most that any
question has, so that their number tells nothing; those left over hold the end-of-text token. Path and answer come
first, at the same positions in every sequence: these are noised and predicted, the question behind them is given. The
anchors of ADLM are the path's positions (objective.anchor_rule=given). Training is `adlm train`'s.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.data.blocks import Blocks
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule
from adlm.diffusion.uniforms import Stream, fold
from adlm.engine import Engine, Request
from adlm.errors import require
from adlm.objectives import Objective, Sequences
from adlm.objectives.anchors import AnchorRule
from adlm.objectives.anelbo import Anelbo
from adlm.objectives.nelbo import Nelbo, Noised
from adlm.reasoning.answers import Accuracy, Reply, Slot, score
from adlm.reasoning.examples import Example, whole_text
from adlm.reasoning.methods import IGNORE
from adlm.reasoning.networks import word_tokenizer
from adlm.reasoning.tasks import ReasoningTask, load_splits, task_of
from adlm.samplers.base import with_sampler
from adlm.schema import Config, SamplingConfig
from adlm.training.loop import Course, sample_text, train
from adlm.training.parallel import World
from adlm.training.setup import Data, objective_for

MULTIPLE = 8
"""Sequences are padded to a multiple of this many positions."""


@dataclass(frozen=True)
class InfillLayout:
    """Where things stand in a sequence."""

    path: int
    """Positions of the path."""
    answer: int
    """Positions of the answer, behind them."""
    length: int

    @property
    def filled(self) -> int:
        """Positions that are predicted; they come first."""
        return self.path + self.answer

    @classmethod
    def of(cls, examples: list[Example], tokenizer: Tokenizer) -> "InfillLayout":
        """The layout in which every one of the examples has room."""
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
    """Sequences in memory, as the loop reads prepared ones. Their `lengths` are the positions that are predicted."""

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
    """A bound of the positions to be predicted, given all others: these are never masked. Which they are is the
    attention mask of the sequences."""

    path = 0
    """Positions of the path, the first of a sequence."""

    def noised(self, sequences: Sequences, seed: int, counter: int, density: float = 1.0) -> Noised:
        noised = super().noised(sequences, seed, counter, density)
        assert sequences.attention_mask_BL is not None
        predicted_BL = sequences.attention_mask_BL.bool()
        noised.z_BL = torch.where(predicted_BL, noised.z_BL, sequences.tokens_BL)
        noised.masked_BL = noised.masked_BL & predicted_BL
        return noised

    @cached_property
    def find_anchors(self) -> AnchorRule:
        """objective.anchor_rule=given: the path."""
        return self.on_path if self.cfg.anchor_rule == "given" else super().find_anchors

    def on_path(self, tokens_BL: Tensor, cfg: Any) -> Tensor:
        return (torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < self.path).expand_as(tokens_BL)


class GivenAnchored(Given, Anelbo):
    """The same for the ANELBO, whose anchor term acts on the path."""


@dataclass
class Infilling:
    """A task as sequences to be filled in: what a diffusion model trains on, and how it is asked."""

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
        """Sequences for the loop."""
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
        kind = GivenAnchored if isinstance(plain, Anelbo) else Given
        objective = kind(cfg.objective, make_schedule(cfg.noise), self.tokenizer.mask_id, cfg.seed)
        objective.path = self.layout.path
        return objective

    def learn(self, cfg: Config) -> Any:
        """Train a diffusion model through the loop of `adlm train`."""
        return train(cfg, sample_text, Course(self.data, self.objective))

    def answer(
        self, model: Any, cfg: Config, examples: list[Example], ranks: World, settings: SamplingConfig | None = None
    ) -> tuple[Accuracy, list[Reply]]:
        """Fill in path and answer of every question; an answer counts, and so does each node of the path, in order."""
        settings = with_sampler(settings or cfg.sampling, cfg.objective)
        rows = self.layout.rows(examples, self.tokenizer)
        engine = Engine(model, make_schedule(cfg.noise), min(len(examples), 256), ranks.device, tau=cfg.objective.tau)
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

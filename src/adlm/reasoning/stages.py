"""Which examples, and which stage, belong to an optimizer step; and what a run remembers between steps."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adlm.data.loader import SequenceOrder
from adlm.errors import require
from adlm.reasoning.methods import Plan, plans_of
from adlm.schema import Config


@dataclass
class Progress:
    """What a checkpoint holds beside tensors."""

    step: int = 0
    best: float = -1.0
    """Highest accuracy on the validation questions, within the last stage."""
    best_step: int | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    """The last validation of every stage so far."""


class Schedule:
    """Epochs of all examples, each in a new order, or (fresh) of a part each; a stage is some epochs, and the last one
    takes what is left."""

    def __init__(self, cfg: Config, n_examples: int):
        self.cfg, self.size = cfg.reason, cfg.train.global_batch_size
        self.n = n_examples // cfg.reason.epochs if cfg.reason.fresh else n_examples  # of an epoch
        self.plans: list[Plan] = plans_of(cfg.reason)
        needed = (len(self.plans) - 1) * cfg.reason.epochs_per_stage + 1
        require(
            cfg.reason.epochs >= needed,
            f"reason.epochs={cfg.reason.epochs} never reaches the last of the {len(self.plans)} stages of"
            f" reason.method={cfg.reason.method}; give at least {needed}, or lower reason.epochs_per_stage",
        )
        require(self.n > 0, f"reason.fresh=true: {n_examples} examples are too few for {cfg.reason.epochs} epochs")
        self.per_epoch = math.ceil(self.n / self.size)
        self.steps = self.per_epoch * cfg.reason.epochs
        self.per_stage = self.per_epoch * cfg.reason.epochs_per_stage
        self.order = SequenceOrder(n_examples, cfg.seed)

    @property
    def last_stage(self) -> int:
        return len(self.plans) - 1

    def stage(self, step: int) -> int:
        return min(step // self.per_stage, self.last_stage)

    def epoch(self, step: int) -> int:
        return step // self.per_epoch

    def examples(self, step: int) -> np.ndarray:
        """The examples of a batch; the last batch of an epoch may be smaller."""
        first = (step % self.per_epoch) * self.size
        return self.order[self.epoch(step) * self.n + np.arange(first, min(first + self.size, self.n))]

    def starts_stage(self, step: int) -> bool:
        return step % self.per_stage == 0 and step // self.per_stage <= self.last_stage

    def within_stage(self, step: int) -> tuple[int, int]:
        """Steps done in the stage of `step`, and steps it has in all."""
        stage = self.stage(step)
        first = stage * self.per_stage
        return step - first, (self.steps if stage == self.last_stage else first + self.per_stage) - first

    def is_validated(self, step: int) -> bool:
        """After `step` steps: at the end of some epochs, of every stage and of the run; or of the run alone."""
        if step % self.per_epoch or not self.cfg.valid_every:
            return step == self.steps
        return step == self.steps or self.starts_stage(step) or self.epoch(step) % self.cfg.valid_every == 0

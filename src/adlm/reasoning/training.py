"""Staged fine-tuning: the `Run` of `adlm train`, driven by epochs and stages.

Everything random is a function of (seed, step), the order of examples of (seed, epoch): a run stopped anywhere, also in
the middle of a stage, resumes to the same weights bit for bit. The best checkpoint is the one with the highest accuracy
on generated answers to the validation questions, within the last stage: before it, a network is not yet what the method
promises (the first stage of all is plain chain of thought). One process; the models of these tasks are small.
"""

import hashlib
import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.data.loader import SequenceOrder
from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import require
from adlm.models.backends import choose_attention
from adlm.reasoning import generators
from adlm.reasoning.answers import Accuracy, Answerer, export_run, write_results
from adlm.reasoning.examples import whole_text
from adlm.reasoning.methods import (
    Encoded,
    StagePlan,
    encode,
    laid_out_length,
    lay_out,
    markers_of,
    plans_of,
    written_length,
)
from adlm.reasoning.networks import OwnNetwork, ReasoningBatch, batch_loss, build_network, make_batch
from adlm.reasoning.tasks import load_splits, task_of
from adlm.schema import Config
from adlm.training.metrics import plot_curves
from adlm.training.optim import Updater, learning_rate_factor
from adlm.training.parallel import Step, World, world
from adlm.training.run import Run, claimed_run_folder
from adlm.training.setup import show
from adlm.training.watch import note

# What may change when a run is continued: how long it is, and how answers are written. Not how many questions are held
# out, or from which file: the training questions are the others.
FREE = ("reason.epochs", "reason.minutes", "reason.max_new_tokens")
GPU_LENGTH_MULTIPLE = 128
"""Sequences of a batch are padded to a multiple of this many positions on a GPU. A shape takes seconds to compile,
twice (in the first block and in the others)."""


class ReasonResult(NamedTuple):
    run: str
    step: int
    finished: bool
    """Every step was taken: neither a signal nor reason.minutes cut the run short."""
    stage: int
    """What was tested answers as this stage does; the last one, unless the run was cut short."""
    valid: dict[str, float | int]
    """The best checkpoint on the validation questions."""
    tests: dict[str, dict[str, float | int]]
    stages: list[dict[str, Any]]
    """The last validation of every stage."""
    stopped_by: int = 0
    """The signal that stopped the run before its end; 0: none did."""


class StageSchedule:
    """Which examples, and which stage, belong to an optimizer step. An epoch is a pass over all examples, each in a new
    order, or (reason.fresh) over a part of its own; a stage is some epochs, and the last one takes what is left."""

    def __init__(self, cfg: Config, n_examples: int):
        self.cfg, self.size = cfg.reason, cfg.train.global_batch_size
        self.n = n_examples // cfg.reason.epochs if cfg.reason.fresh else n_examples  # of an epoch
        self.plans: list[StagePlan] = plans_of(cfg.reason)
        self.last_stage = len(self.plans) - 1
        needed = self.last_stage * cfg.reason.epochs_per_stage + 1
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


class ReasoningSetup:
    """What stands before the first step: examples, network, tokenizer, schedule; and the way from there to batches."""

    def __init__(self, cfg: Config, ranks: World):
        self.cfg, self.ranks, self.task = cfg, ranks, task_of(cfg.reason)
        self.splits = load_splits(cfg.reason, cfg.seed)
        network, self.tokenizer = build_network(cfg, self.splits.train)
        self.network = network.to(ranks.device)
        positions = network.longest + isinstance(network, OwnNetwork)  # its spare one included
        self.multiple = math.gcd(GPU_LENGTH_MULTIPLE if ranks.device.type == "cuda" else 1, positions)
        if isinstance(network, OwnNetwork) and ranks.device.type == "cuda":
            choose_attention(cfg.train.global_batch_size, cfg.model, ranks.device)
        if ranks.compile != "none":
            network.compile_blocks()
        self.schedule = StageSchedule(cfg, len(self.splits.train))
        self.markers = markers_of(self.tokenizer)
        self.train = encode(self.splits.train, self.tokenizer)
        self.max_new_tokens = cfg.reason.max_new_tokens or longest_answer(self.train, self.schedule.plans)
        longest = max(laid_out_length(e, plan) for e in self.train for plan in self.schedule.plans)
        key = "reason.base" if cfg.reason.base else "model.length"
        require(
            longest <= network.longest,
            f"the longest example has {longest} tokens and {key} leaves room for {network.longest}",
        )

    def batches(self, step: int) -> list[ReasoningBatch]:
        """The micro-batches of a step, like lengths together: less padding, and the gradient is a sum in any order."""
        plan, cfg = self.schedule.plans[self.schedule.stage(step)], self.cfg
        layouts = [
            lay_out(self.train[i], plan, self.markers, cfg.reason.anchor_tokens) for i in self.schedule.examples(step)
        ]
        size = -(-cfg.train.global_batch_size // cfg.train.micro_batches(self.ranks.size))
        if size < len(layouts):
            layouts.sort(key=lambda layout: len(layout.tokens))
        gamma, mask_id, device = cfg.objective.gamma, self.tokenizer.mask_id, self.ranks.device
        parts = [layouts[at : at + size] for at in range(0, len(layouts), size)]
        return [make_batch(part, plan.fed_back, gamma, mask_id, device, self.multiple) for part in parts]

    def answerer(self, stage: int) -> Answerer:
        """The network as this stage asks it."""
        plan, batch_size = self.schedule.plans[stage], self.cfg.eval.batch_size
        return Answerer(self.network, self.tokenizer, self.task, plan, self.max_new_tokens, batch_size)

    def fingerprints(self) -> dict[str, str]:
        """What the questions of each split are."""
        return {
            split: hashlib.sha256("\n".join(map(whole_text, examples)).encode()).hexdigest()
            for split, examples in (("train", self.splits.train), ("valid", self.splits.valid))
        }

    def facts(self) -> dict[str, float | int | str]:
        """What the run is going to be, for its first lines and its results."""
        reason, splits = self.cfg.reason, self.splits
        return {
            "task": reason.task,
            "method": reason.method,
            "network": reason.base or "own stack, from scratch",
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "vocabulary": self.tokenizer.vocab_size,
            "train_examples": len(splits.train),
            "valid_examples": len(splits.valid),
            "test_examples": sum(map(len, splits.tests.values())),
            "stages": len(self.schedule.plans),
            "steps": self.schedule.steps,
            "answer_tokens": self.max_new_tokens,
            "precision": self.ranks.precision,
            "device": str(self.ranks.device),
        }


def longest_answer(encoded: list[Encoded], plans: list[StagePlan]) -> int:
    """Room for everything a stage asks to be written, and half as much again for a model that strays."""
    return (3 * max(written_length(e, plan) for e in encoded for plan in plans) + 1) // 2


def learn_stories(setup: ReasoningSetup) -> float:
    """Train on new stories for reason.story_steps steps, with optimizers of its own; the loss of the last step per
    token.

    Everything is a function of the seed and nothing is saved: a run killed here begins again, and one that has a
    checkpoint has this behind it."""
    cfg, ranks, network, task = setup.cfg, setup.ranks, setup.network, setup.task
    steps, size = cfg.reason.story_steps, cfg.train.global_batch_size
    require(task.has_stories, f"reason.story_steps={steps}: there are no stories for reason.task={cfg.reason.task}")
    module = Step(network, batch_loss)
    update = Updater(cfg.optim, module, decay_all=True)
    network.train()
    loss, constant = float("nan"), replace(cfg.optim, schedule="constant")
    for step in range(steps):
        rng = random.Random(fold(cfg.seed, Stream.TOKEN, step))
        stories = [generators.retold(rng, task.shape, plain=step < steps // 2) for _ in range(size)]
        layouts = [lay_out(story, StagePlan(), setup.markers) for story in encode(stories, setup.tokenizer)]
        longest = max(len(layout.tokens) for layout in layouts)
        require(
            longest <= network.longest,
            f"a story of reason.story_steps={steps} has {longest} tokens and model.length leaves room for"
            f" {network.longest}",
        )
        batch = make_batch(layouts, False, 0.0, setup.tokenizer.mask_id, ranks.device, setup.multiple)
        with ranks.autocast():
            mean = module(batch).total / batch.scored.count
        mean.backward()
        update(task.story_lr_ratio * learning_rate_factor(constant, step, steps))
        if step + 1 == steps:
            loss = mean.item()
    return loss


def train(cfg: Config, start: dict[str, Tensor] | None = None) -> ReasonResult:
    """Train through all stages, or until a signal asks to stop; then test the best checkpoint and export it. `start`:
    weights to begin with in place of fresh ones and reason.story_steps, so that several methods can share its steps."""
    with world(cfg.train) as ranks, claimed_run_folder(cfg.out, ranks) as folder:
        require(ranks.size == 1, f"adlm reason train runs in one process, not in {ranks.size}")
        setup = ReasoningSetup(cfg, ranks)
        schedule = setup.schedule
        # what is tested in the end is the best checkpoint, so it is always kept
        cfg = replace(
            cfg, train=replace(cfg.train, steps=schedule.steps), checkpoint=replace(cfg.checkpoint, best=True)
        )
        with Run(cfg, folder, ranks, cfg.reason.minutes) as run:
            if run.resumed_step is None and start is not None:
                setup.network.load_state_dict(start)
            elif run.resumed_step is None and cfg.reason.story_steps:
                loss = learn_stories(setup)
                note(f"stories, {cfg.reason.story_steps} steps: {loss:.3f} nats per token at the end")
            step_module = Step(setup.network, batch_loss)
            free = FREE[1:] if cfg.reason.fresh else FREE  # an epoch of fresh examples is one part in reason.epochs
            run.decay_all = True  # the published recipe of these tasks has one weight decay for all parameters
            run.begin(
                step_module,
                setup.tokenizer,
                show(setup.facts()),
                data=setup.fingerprints(),
                fixed=("model", "objective", "reason"),
                free=free,
            )

            run.extra.setdefault("stages", [])
            accuracy: Accuracy | None = None
            setup.network.train()
            while not run.ends:
                stage = schedule.stage(run.step)
                if schedule.starts_stage(run.step):
                    run.reset_optimizer()
                batches = setup.batches(run.step)
                count = sum(batch.scored.count for batch in batches)
                torch.manual_seed(fold(cfg.seed, Stream.SPLIT, run.step))  # dropout
                for batch in batches:
                    with ranks.autocast():
                        output = step_module(batch)
                        (output.total / count).backward()
                    run.window.add(output.terms)
                run.update(learning_rate_factor(cfg.optim, *schedule.within_stage(run.step)), count)

                run.log_if_due(stage=stage)
                if schedule.is_validated(run.step) or run.out_of_time:
                    accuracy = validate(run, setup, stage)
                run.save_if_due()

            stage = schedule.stage(run.step - 1)
            if run.was_interrupted:
                run.say_interrupted()
                return ReasonResult(str(folder), run.step, False, stage, {}, {}, run.extra["stages"], run.stopped_by)
            return conclude(run, setup, stage, accuracy)


def validate(run: Run, setup: ReasoningSetup, stage: int) -> Accuracy:
    """Answer the validation questions as this stage does; only those of the last stage can be the best."""
    with run.ema:
        accuracy, _ = setup.answerer(stage).answer(setup.splits.valid, setup.ranks)
    values = {"stage": stage, "epoch": setup.schedule.epoch(run.step), **accuracy.facts()}
    others = [values for values in run.extra["stages"] if values["stage"] != stage]
    run.extra = {"stages": [*others, values]}
    message = f"epoch {values['epoch']}/{setup.cfg.reason.epochs}, stage {stage}: {accuracy}"
    run.record_validation(values, message, 1 - accuracy.accuracy if stage == setup.schedule.last_stage else None)
    return accuracy


def best_step(run: Run) -> int:
    """The step of the best checkpoint; the last one of the run where there is no best (before the last stage), or where
    its files are not what was written."""
    step = run.best_step
    if step is None or step == run.step or step not in run.checkpoints.steps():
        return run.step
    problem = run.checkpoints.problem(step)
    if problem is None:
        return step
    note(f"warning: the best checkpoint, of step {step}, is corrupt ({problem}); the last, {run.step}, is tested")
    return run.step


def conclude(run: Run, setup: ReasoningSetup, stage: int, accuracy: Accuracy | None) -> ReasonResult:
    """Ask the best network the test questions, and write it to the run folder. `accuracy`: of the last validation in
    this process."""
    assert run.log is not None
    finished = run.step == setup.schedule.steps
    if not finished:
        left = f"{run.step} of {setup.schedule.steps}, in stage {stage}"
        note(f"reason.minutes={setup.cfg.reason.minutes} are over at step {left}")
    tested = best_step(run)
    if tested != run.step:
        state = run.state()
        run.checkpoints.load(tested, {part: state[part] for part in ("model", "ema")})
    answerer, tests = setup.answerer(stage), {}
    with run.ema:
        if accuracy is None or tested != run.step:  # else these weights were the last to be validated
            accuracy, _ = answerer.answer(setup.splits.valid, setup.ranks)
        run.log.say(f"best of stage {stage}, validation: {accuracy}")
        for name, examples in setup.splits.tests.items():
            found, _ = answerer.answer(examples, setup.ranks)
            run.log.say(f"test {name}: {found}")
            tests[name] = found.facts()
        facts = {"step": tested, "stage": stage, "max_new_tokens": setup.max_new_tokens}
        export_run(run.folder, run.cfg, setup.network, setup.tokenizer, facts)
    run.log.close()
    stages = run.extra["stages"]
    result = ReasonResult(str(run.folder), run.step, finished, stage, accuracy.facts(), tests, stages)
    write_results(run.folder, setup.facts() | result._asdict())
    plot_curves(run.folder, "accuracy", "accuracy on validation questions")
    return result

"""Staged fine-tuning: the `Run` of `adlm train`, driven by epochs and stages.

Everything random is a function of (seed, step), and the order of examples of (seed, epoch): a run stopped anywhere,
also in the middle of a stage, resumes to the same weights bit for bit. The best checkpoint is the one with the highest
accuracy on generated answers to the validation questions, within the last stage: earlier stages are not yet the method
(the first stage of all methods is plain chain of thought). One process; the models of these tasks are small.
"""

import hashlib
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.data.loader import SequenceOrder, mix, read_ahead
from adlm.diffusion.random import Stream, fold
from adlm.errors import require
from adlm.objectives.base import rounded
from adlm.reasoning import generators
from adlm.reasoning.answers import Accuracy, Answerer
from adlm.reasoning.methods import (
    Encoded,
    Layout,
    StagePlan,
    encode,
    laid_out_length,
    lay_out,
    markers_of,
    plans_of,
    whole_text,
    written_length,
)
from adlm.reasoning.networks import OwnNetwork, ReasoningBatch, batch_loss, batch_on, build_network, make_batch
from adlm.reasoning.runs import SharedStage, ask_tests, export_run, write_results
from adlm.reasoning.tasks import load_splits, task_of
from adlm.schema import Config
from adlm.training.checkpoint import claimed_run_folder
from adlm.training.metrics import plot_curves
from adlm.training.optim import Updater, learning_rate_factor
from adlm.training.parallel import Step, World, parallelise, world
from adlm.training.run import Run
from adlm.training.setup import show
from adlm.training.watch import note

# Settings that may change when a run resumes: its length, and the folder of the shared first stage. Not the held-out
# questions or their file, since the training questions are all the others.
FREE = ("reason.epochs", "reason.stage0")
GPU_LENGTH_MULTIPLE = 64
"""On a GPU, sequences are padded to a multiple of this many positions, since each shape takes seconds to compile."""
SORTED_BATCHES = 8
"""Batches whose examples are sorted by length together, for less padding."""
COUNTED = 256
"""Examples used to estimate the average length of sequences."""
CPU = torch.device("cpu")
GRAPHS = "train.cuda_graphs=true"
STORY_SILENCE = 4.0
"""Seconds between progress lines while training on stories."""


class ReasonResult(NamedTuple):
    run: str
    step: int
    finished: bool
    """Whether every step was taken: no signal stopped the run."""
    stage: int
    """The stage of the last step, whose layout was used for tests."""
    valid: dict[str, float | int]
    """Results of the best checkpoint on the validation questions."""
    tests: dict[str, dict[str, float | int]]
    stages: list[dict[str, Any]]
    """The last validation of every stage."""
    stopped_by: int = 0
    """The signal that stopped the run before its end; 0: none."""


class StageSchedule:
    """The examples and the stage of each optimizer step. An epoch is a pass over all examples in a new order; a stage
    has several epochs, and the last stage takes all that are left."""

    def __init__(self, cfg: Config, n_examples: int, lengths: np.ndarray | None = None):
        """`lengths`: lengths of the examples, to sort them by; None: no sorting."""
        self.cfg, self.seed, self.size, self.lengths = cfg.reason, cfg.seed, cfg.train.global_batch_size, lengths
        self.valid_every = cfg.train.valid_every
        self.n = n_examples
        self.plans: list[StagePlan] = plans_of(cfg.reason)
        self.last_stage = len(self.plans) - 1
        needed = self.last_stage * cfg.reason.epochs_per_stage + 1
        require(
            cfg.reason.epochs >= needed,
            f"reason.epochs={cfg.reason.epochs} never reaches the last of the {len(self.plans)} stages of"
            f" reason.method={cfg.reason.method}; give at least {needed}, or lower reason.epochs_per_stage",
        )
        self.per_epoch = math.ceil(self.n / self.size)
        self.steps = self.per_epoch * cfg.reason.epochs
        self.per_stage = self.per_epoch * cfg.reason.epochs_per_stage
        self.order = SequenceOrder(n_examples, cfg.seed)

    def stage(self, step: int) -> int:
        return min(step // self.per_stage, self.last_stage)

    def epoch(self, step: int) -> int:
        return step // self.per_epoch

    def examples(self, step: int) -> np.ndarray:
        """The examples of a batch; the last batch of an epoch may be smaller. Batches that are sorted together have the
        same examples in total as without sorting, and come in a random order."""
        at = step % self.per_epoch
        if self.lengths is None:
            return self.in_order(step, at, at + 1)
        first = at - at % SORTED_BATCHES
        window = self.in_order(step, first, first + SORTED_BATCHES)
        window = window[np.argsort(self.lengths[window], kind="stable")]
        batches = [window[start : start + self.size] for start in range(0, len(window), self.size)]
        key = np.uint64(fold(self.seed, Stream.ORDER, step - at % SORTED_BATCHES))
        return batches[np.argsort(mix(key, np.arange(len(batches), dtype=np.uint64)))[at - first]]

    def in_order(self, step: int, first: int, end: int) -> np.ndarray:
        """The examples of batches `first` to `end` (excluded) in the epoch of `step`."""
        within = np.arange(first * self.size, min(end * self.size, self.n))
        return self.order[self.epoch(step) * self.n + within]

    def plans_at(self, step: int, n: int) -> list[StagePlan]:
        """The plan of each of the n examples of a batch: the stage's or, with reason.mixing, an earlier stage's."""
        stage = self.stage(step)
        if not (stage and self.cfg.mixing):
            return [self.plans[stage]] * n
        rng = random.Random(fold(self.seed, Stream.SPLIT, step))
        return [self.plans[rng.randrange(stage) if rng.random() < self.cfg.mixing else stage] for _ in range(n)]

    def starts_stage(self, step: int) -> bool:
        return step % self.per_stage == 0 and step // self.per_stage <= self.last_stage

    def within_stage(self, step: int) -> tuple[int, int]:
        """Steps done in the stage of `step`, and all steps of that stage."""
        stage = self.stage(step)
        first = stage * self.per_stage
        return step - first, (self.steps if stage == self.last_stage else first + self.per_stage) - first

    def is_validated(self, step: int) -> bool:
        """Whether to validate after `step` steps: at the end of every stage, and every train.valid_every steps."""
        is_time = self.valid_every > 0 and step % self.valid_every == 0
        return is_time or self.starts_stage(step) or step == self.steps


class ReasoningSetup:
    """Everything that exists before the first step (examples, network, tokenizer, schedule), and how it makes
    batches."""

    def __init__(self, cfg: Config, ranks: World):
        self.cfg, self.ranks, self.task = cfg, ranks, task_of(cfg.reason)
        self.splits = load_splits(cfg.reason, cfg.seed, cfg.data)
        network, self.tokenizer = build_network(cfg, self.splits.train)
        self.network = network.to(ranks.device)
        positions = network.longest + isinstance(network, OwnNetwork)  # including the spare one
        self.multiple = math.gcd(GPU_LENGTH_MULTIPLE if ranks.device.type == "cuda" else 1, positions)
        self.markers = markers_of(self.tokenizer)
        self.train = encode(self.splits.train, self.tokenizer)
        plain = np.array([laid_out_length(example, StagePlan()) for example in self.train])
        self.schedule = StageSchedule(cfg, len(self.train), plain)
        self.max_new_tokens = longest_answer(self.train, self.schedule.plans)
        longest = max(laid_out_length(e, plan) for e in self.train for plan in self.schedule.plans)
        key = "reason.base" if cfg.reason.base else "model.length"
        require(
            longest <= network.longest,
            f"the longest example has {longest} tokens and {key} leaves room for {network.longest}",
        )
        for name, examples in {"validation": self.splits.valid, **self.splits.tests}.items():
            encoded = encode(examples, self.tokenizer)
            for stage in range(len(self.schedule.plans)):
                self.answerer(stage).check_room(encoded, f"set {name}")

    def step_module(self) -> Step:
        """The network with its loss, compiled and replayed as CUDA graphs if the settings say so."""
        cfg, module = self.cfg.train, Step(self.network, batch_loss)
        if isinstance(self.network, OwnNetwork):
            thinks = any(plan.fed_back for plan in self.schedule.plans)
            require(not (cfg.cuda_graphs and thinks), f"{GRAPHS} cannot replay thoughts, which are read one by one")
            parallelise(module, cfg, self.ranks)
        else:
            require(not cfg.cuda_graphs, f"{GRAPHS} is for our own stack, which reason.base is not read into")
            if self.ranks.compile != "none":
                self.network.compile_blocks()
        return module

    def batches(self, step: int) -> list[ReasoningBatch]:
        """The micro-batches of a step, on the host. Similar lengths go together for less padding; the gradient is a sum
        and does not depend on the order. In a micro-batch all sequences have the same number of fed-back thoughts."""
        cfg, examples = self.cfg, self.schedule.examples(step)
        groups: dict[StagePlan | None, list[Layout]] = {}
        for i, plan in zip(examples, self.schedule.plans_at(step, len(examples))):
            layout = lay_out(self.train[i], plan, self.markers, cfg.reason.anchor_tokens)
            groups.setdefault(plan if plan.fed_back else None, []).append(layout)
        size = -(-cfg.train.global_batch_size // cfg.train.micro_batches(self.ranks.size))
        found = []
        for plan, layouts in groups.items():
            if size < len(layouts):
                layouts.sort(key=lambda layout: len(layout.tokens))
            parts = [layouts[at : at + size] for at in range(0, len(layouts), size)]
            found += [self.batch_of(part, plan is not None, cfg.objective.gamma) for part in parts]
        return found

    def batch_of(self, layouts: list[Layout], fed_back: bool, gamma: float) -> ReasoningBatch:
        """A micro-batch on the host, rounded to one of a few shapes if CUDA graphs will replay it."""
        batch = make_batch(layouts, fed_back, gamma, self.tokenizer.mask_id, CPU, self.multiple)
        return batch._replace(scored=rounded(batch.scored)) if self.cfg.train.cuda_graphs else batch

    def all_batches(self, first: int) -> Iterator[list[ReasoningBatch]]:
        """The batches of every step from `first` on; with a GPU, a thread makes them ahead of time."""
        steps = map(self.batches, range(first, self.schedule.steps))
        return read_ahead(steps) if self.ranks.device.type == "cuda" else steps

    def flops_per_token(self) -> float | None:
        """Training FLOPs of one token, on average over the stages."""
        some, plans = self.train[:COUNTED], self.schedule.plans
        tokens = sum(laid_out_length(example, plan) for example in some for plan in plans)
        scored = sum(written_length(example, plan) for example in some for plan in plans)
        return self.network.flops_per_token(tokens / (len(some) * len(plans)), scored / tokens)

    def answerer(self, stage: int) -> Answerer:
        """An answerer with the layout of this stage."""
        plan, batch_size, labels = self.schedule.plans[stage], self.cfg.eval.batch_size, self.cfg.reason.anchor_tokens
        return Answerer(self.network, self.tokenizer, self.task, plan, self.max_new_tokens, batch_size, labels)

    def fingerprints(self) -> dict[str, str]:
        """A digest of the questions of each split."""
        return {
            split: hashlib.sha256("\n".join(map(whole_text, examples)).encode()).hexdigest()
            for split, examples in (("train", self.splits.train), ("valid", self.splits.valid))
        }

    def facts(self) -> dict[str, float | int | str]:
        """Facts about the run, for its first lines and its results."""
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
    """Token limit of an answer: 1.5 times the longest text that any stage requires, for models that digress."""
    return (3 * max(written_length(e, plan) for e in encoded for plan in plans) + 1) // 2


def learn_stories(setup: ReasoningSetup, is_stopped: Callable[[], bool] = lambda: False) -> float:
    """Train on new stories for reason.story_steps steps, with separate optimizers; return the last step's loss per
    token.

    Everything is a function of the seed and nothing is saved: a run killed or stopped here (`is_stopped`) begins again,
    and a run with a checkpoint has already done this."""
    cfg, ranks, network, task = setup.cfg, setup.ranks, setup.network, setup.task
    steps, size = cfg.reason.story_steps, cfg.train.global_batch_size
    require(task.has_stories, f"reason.story_steps={steps}: there are no stories for reason.task={cfg.reason.task}")
    module = setup.step_module()
    update = Updater(cfg.optim, module, decay_all=True)
    network.train()
    loss, constant, said = float("nan"), replace(cfg.optim, schedule="constant"), time.monotonic()
    for step in range(steps):
        if is_stopped():
            return loss
        rng = random.Random(fold(cfg.seed, Stream.TOKEN, step))
        stories = [generators.retold(rng, task.shape, plain=step < steps // 2) for _ in range(size)]
        layouts = [lay_out(story, StagePlan(), setup.markers) for story in encode(stories, setup.tokenizer)]
        longest = max(len(layout.tokens) for layout in layouts)
        require(
            longest <= network.longest,
            f"a story of reason.story_steps={steps} has {longest} tokens and model.length leaves room for"
            f" {network.longest}",
        )
        batch = batch_on(setup.batch_of(layouts, False, 0.0), ranks.device)
        with ranks.autocast():
            mean = module(batch).total / batch.scored.count
        mean.backward()
        update(task.story_lr_ratio * learning_rate_factor(constant, step, steps))
        is_late = time.monotonic() - said > STORY_SILENCE
        if step + 1 == steps or is_late:
            loss = mean.item()
        if is_late:
            said = time.monotonic()
            note(f"stories: step {step + 1} of {steps}, {loss:.3f} nats per token")
    return loss


def train(cfg: Config, start: dict[str, Tensor] | None = None) -> ReasonResult:
    """Train through all stages, or until a signal asks to stop; then test the best checkpoint and export it. `start`:
    initial weights instead of new ones with reason.story_steps, so that several methods can share those steps."""
    with world(cfg.train) as ranks, claimed_run_folder(cfg.out, ranks) as folder:
        require(ranks.size == 1, f"adlm reason train runs in one process, not in {ranks.size}")
        if cfg.data.path or task_of(cfg.reason).generate is not None:
            note(f"{cfg.reason.task}: {'reading' if cfg.data.path else 'making'} the questions")
        setup = ReasoningSetup(cfg, ranks)
        schedule = setup.schedule
        for doubt in doubts(cfg, start is not None):
            note(f"warning: {doubt}")
        # the best checkpoint is tested at the end, so it is always kept
        cfg = replace(
            cfg, train=replace(cfg.train, steps=schedule.steps), checkpoint=replace(cfg.checkpoint, best=True)
        )
        with Run(cfg, folder, ranks) as run:
            shared = (
                SharedStage.of(cfg, setup, ranks, SORTED_BATCHES) if cfg.reason.stage0 and schedule.last_stage else None
            )
            kept = shared.read() if shared and run.resumed_step is None else None
            if kept is not None:
                setup.network.load_state_dict(kept.weights)
            elif run.resumed_step is None and start is not None:
                setup.network.load_state_dict(start)
            elif run.resumed_step is None and cfg.reason.story_steps:
                loss = learn_stories(setup, lambda: run.interruption.requested)
                if run.interruption.requested:
                    note("stopped by a signal before the first stage; the same command begins again")
                    number = run.interruption.number or signal.SIGTERM
                    return ReasonResult(str(folder), 0, False, 0, {}, {}, [], number)
                note(f"stories, {cfg.reason.story_steps} steps: {loss:.3f} nats per token at the end")
            step_module = setup.step_module()
            run.decay_all = True  # the published recipe of these tasks has one weight decay for all parameters
            run.begin(
                step_module,
                setup.tokenizer,
                show(setup.facts()),
                setup.flops_per_token(),
                data=setup.fingerprints(),
                fixed=("model", "objective", "reason"),
                free=FREE,
            )
            run.extra.setdefault("stages", [])
            if kept is not None:
                kept.resume(run)
            accuracy = train_stages(run, setup, step_module, shared)
            stage = schedule.stage(run.step - 1)
            if run.was_interrupted:
                run.say_interrupted()
                return ReasonResult(str(folder), run.step, False, stage, {}, {}, run.extra["stages"], run.stopped_by)
            return conclude(run, setup, stage, accuracy)


def train_stages(run: Run, setup: ReasoningSetup, module: Step, shared: SharedStage | None) -> Accuracy | None:
    """Take the remaining steps, or until the run ends; return the accuracy of the last validation."""
    schedule, ranks, cfg = setup.schedule, setup.ranks, setup.cfg
    accuracy: Accuracy | None = None
    setup.network.train()
    for made in setup.all_batches(run.step) if not run.ends else ():
        stage = schedule.stage(run.step)
        if schedule.starts_stage(run.step):
            run.reset_optimizer()
        count = sum(batch.scored.count for batch in made)
        torch.manual_seed(fold(cfg.seed, Stream.SPLIT, run.step))  # dropout
        for batch in (batch_on(part, ranks.device) for part in made):
            with ranks.autocast():
                output = module(batch)
                (output.total / count).backward()
            run.window.add(output.terms)
        tokens, examples = (sum(x) for x in zip(*((batch.tokens, len(batch.scored.tokens_BL)) for batch in made)))
        run.update(learning_rate_factor(cfg.optim, *schedule.within_stage(run.step)), count, tokens, examples)

        run.log_if_due(stage=stage)
        if schedule.is_validated(run.step):
            accuracy = validate(run, setup, stage)
        if shared is not None and run.step == schedule.per_stage:
            shared.write(run)
        run.save_if_due()
        if run.ends:
            break
    return accuracy


def doubts(cfg: Config, has_start: bool) -> list[str]:
    """Warnings about settings that were probably not intended, one line each."""
    reason = cfg.reason
    if reason.base or reason.story_steps or has_start or reason.task == "gsm8k":
        return []
    return [
        "a small model from scratch learns questions like these by heart and answers new ones by chance; give"
        " reason.base=MODEL, or begin with task=prosqa-2hop, which takes minutes on a CPU"
    ]


def validate(run: Run, setup: ReasoningSetup, stage: int) -> Accuracy:
    """Answer the validation questions with this stage's layout; only the last stage can give the best checkpoint."""
    with run.ema:
        accuracy, _ = setup.answerer(stage).answer(setup.splits.valid, setup.ranks)
    values = {"stage": stage, "epoch": setup.schedule.epoch(run.step), **accuracy.facts()}
    others = [values for values in run.extra["stages"] if values["stage"] != stage]
    run.extra = {"stages": [*others, values]}
    message = f"epoch {values['epoch']}/{setup.cfg.reason.epochs}, stage {stage}: {accuracy}"
    run.record_validation(values, message, 1 - accuracy.accuracy if stage == setup.schedule.last_stage else None)
    return accuracy


def best_step(run: Run) -> int:
    """The step of the best checkpoint; the run's last step if there is no best one (before the last stage) or if its
    files are corrupt."""
    step = run.best_step
    if step is None or step == run.step or step not in run.checkpoints.steps():
        return run.step
    problem = run.checkpoints.problem(step)
    if problem is None:
        return step
    note(f"warning: the best checkpoint, of step {step}, is corrupt ({problem}); the last, {run.step}, is tested")
    return run.step


def conclude(run: Run, setup: ReasoningSetup, stage: int, accuracy: Accuracy | None) -> ReasonResult:
    """Answer the test questions with the best network, and write it to the run folder. `accuracy`: of the last
    validation in this process."""
    assert run.log is not None
    tested = best_step(run)
    if tested != run.step:
        state = run.state()
        run.checkpoints.load(tested, {part: state[part] for part in ("model", "ema")})
    answerer = setup.answerer(stage)
    with run.ema:
        if accuracy is None or tested != run.step:  # otherwise these weights were validated last
            accuracy, _ = answerer.answer(setup.splits.valid, setup.ranks)
        run.log.say(f"best of stage {stage}, validation: {accuracy}")
        tests = ask_tests(run.folder, answerer, setup.splits.tests, setup.ranks, run.log.say)
        facts = {"step": tested, "stage": stage, "max_new_tokens": setup.max_new_tokens}
        export_run(run.folder, run.cfg, setup.network, setup.tokenizer, facts)
    run.log.close()
    stages = run.extra["stages"]
    result = ReasonResult(str(run.folder), run.step, True, stage, accuracy.facts(), tests, stages)
    write_results(run.folder, setup.facts() | result._asdict())
    plot_curves(run.folder, "accuracy", "accuracy on validation questions")
    return result

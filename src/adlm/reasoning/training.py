"""Staged fine-tuning: the same optimizers, checkpoints, metrics and guard as `adlm train`, driven by epochs and stages.

Everything random is a function of (seed, step), the order of examples of (seed, epoch): a run stopped anywhere, also in
the middle of a stage, goes on to the same weights bit for bit. The best checkpoint is the one with the highest accuracy
on generated answers to the validation questions, within the last stage: before it, a network is not yet what the method
promises (the first stage of all is plain chain of thought). One process; the models of these tasks are small.
"""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import require
from adlm.models.backends import choose_attention
from adlm.reasoning.answers import Score, evaluate
from adlm.reasoning.examples import Example
from adlm.reasoning.methods import Encoded, Plan, encode, lay_out, markers_of, row_length, written_length
from adlm.reasoning.networks import OwnNetwork
from adlm.reasoning.recital import recite
from adlm.reasoning.runs import build, export_run, parameter_count, write_results
from adlm.reasoning.stages import Progress, Schedule
from adlm.reasoning.tasks import Splits, load_splits, task_spec
from adlm.reasoning.thoughts import Batch, batch_loss, make_batch
from adlm.schema import Config, as_yaml
from adlm.training.checkpoint import Checkpoints, check_same_run, note, tensors
from adlm.training.metrics import Metrics, Window, plot_curves
from adlm.training.optim import Ema, Guard, Updater, learning_rate_factor
from adlm.training.parallel import Interruption, Step, World, world
from adlm.training.setup import claimed_run_folder, micro_batches, show

# What may change when a run is continued: how long it is, and how answers are written. Not how many questions are held
# out, or from which file: the training questions are the others.
FREE = ("reason.epochs", "reason.minutes", "reason.max_new_tokens", "reason.eval_batch_size")
GPU_ROW_MULTIPLE = 128
"""Rows of a batch are padded to a multiple of this many positions on a GPU. A shape takes seconds to compile, twice (in
the first block and in the others)."""


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


class Classroom:
    """What training and testing share: network, tokenizer, examples, and the way from them to batches and scores."""

    def __init__(self, cfg: Config, ranks: World):
        self.cfg, self.ranks, self.task = cfg, ranks, task_spec(cfg.reason.task)
        self.splits: Splits = load_splits(cfg.reason, cfg.seed)
        network, self.tokenizer = build(cfg, self.splits.train)
        self.network = network.to(ranks.device)
        positions = network.longest + isinstance(network, OwnNetwork)  # its spare one included
        multiple = cfg.reason.row_multiple or (GPU_ROW_MULTIPLE if ranks.device.type == "cuda" else 1)
        self.row_multiple = math.gcd(multiple, positions)
        if isinstance(network, OwnNetwork) and ranks.device.type == "cuda":
            choose_attention(cfg.train.global_batch_size, cfg.model, ranks.device)
        if ranks.compile != "none":
            network.compile_blocks()
        self.schedule = Schedule(cfg, len(self.splits.train))
        self.markers = markers_of(self.tokenizer)
        self.train, self.valid = (encode(part, self.tokenizer) for part in (self.splits.train, self.splits.valid))
        self.max_new_tokens = cfg.reason.max_new_tokens or longest_answer(self.train, self.schedule.plans)
        self.check_lengths()

    def check_lengths(self) -> None:
        longest = max(row_length(e, plan) for e in self.train for plan in self.schedule.plans)
        key = "reason.base" if self.cfg.reason.base else "model.length"
        require(
            longest <= self.network.longest,
            f"the longest example has {longest} tokens and {key} leaves room for {self.network.longest}",
        )

    def lay_out(self, example: Encoded, plan: Plan):
        return lay_out(example, plan, self.markers, self.cfg.reason.anchor_tokens)

    def batches(self, step: int, size: int) -> list[Batch]:
        """The micro-batches of a step, like lengths together: less padding, and the gradient is a sum in any order."""
        plan = self.schedule.plans[self.schedule.stage(step)]
        layouts = [self.lay_out(self.train[i], plan) for i in self.schedule.examples(step)]
        if size < len(layouts):
            layouts.sort(key=lambda layout: len(layout.tokens))
        gamma, mask_id = self.cfg.reason.gamma, self.tokenizer.mask_id
        parts = [layouts[at : at + size] for at in range(0, len(layouts), size)]
        return [make_batch(part, plan.fed_back, gamma, mask_id, self.ranks.device, self.row_multiple) for part in parts]

    def score(self, examples: list[Example], encoded: list[Encoded], stage: int) -> Score:
        return evaluate(
            self.network, self.task, examples, encoded, self.schedule.plans[stage], self.tokenizer,
            self.max_new_tokens, self.cfg.reason.eval_batch_size, self.ranks,
        )[0]  # fmt: skip

    def facts(self) -> dict[str, float | int | str]:
        reason, splits = self.cfg.reason, self.splits
        tests = sum(map(len, splits.tests.values()))
        return {
            "task": reason.task,
            "method": reason.method,
            "network": reason.base or "own stack, from scratch",
            "parameters": parameter_count(self.network),
            "vocabulary": self.tokenizer.vocab_size,
            "train_examples": len(splits.train),
            "valid_examples": len(splits.valid),
            "test_examples": tests,
            "stages": len(self.schedule.plans),
            "steps": self.schedule.steps,
            "answer_tokens": self.max_new_tokens,
            "precision": self.ranks.precision,
            "device": str(self.ranks.device),
        }


def longest_answer(encoded: list[Encoded], plans: list[Plan]) -> int:
    """Room for everything a stage asks to be written, and half as much again for a model that strays."""
    return (3 * max(written_length(e, plan) for e in encoded for plan in plans) + 1) // 2


def train(cfg: Config, start: dict[str, Tensor] | None = None) -> ReasonResult:
    """Train through all stages, or until a signal asks to stop; then test the best checkpoint and export it. `start`:
    weights to begin with in place of fresh ones and reason.story_steps, so that several methods can share its steps."""
    with world(cfg.train) as ranks, Interruption() as interruption, claimed_run_folder(cfg.out, ranks) as run:
        require(ranks.size == 1, f"adlm reason train runs in one process, not in {ranks.size}")
        room = Classroom(cfg, ranks)
        schedule, reason = room.schedule, cfg.reason
        cfg = replace(cfg, train=replace(cfg.train, steps=schedule.steps))
        micro_batch = cfg.train.global_batch_size // micro_batches(cfg, ranks)
        checkpoints = Checkpoints(run, cfg.checkpoint, ranks)
        found = checkpoints.newest_sound(mend=True) if cfg.checkpoint.resume else None
        if found is None and checkpoints.steps():
            raise ValueError(f"{run} holds checkpoints; use checkpoint.resume=true, or another out=")
        if found is None and start is not None:
            room.network.load_state_dict(start)
        elif found is None and reason.story_steps:
            loss = recite(room.network, room.tokenizer, cfg, ranks, room.row_multiple)
            note(f"stories, {reason.story_steps} steps: {loss:.3f} nats per token at the end")
        step_module = Step(room.network, batch_loss)
        ema, guard = Ema(step_module, cfg.optim.ema), Guard(cfg.train.spike_factor, ranks.device)
        update = Updater(cfg.optim, step_module, ema, guard)

        window, now = Window(None, ranks), Progress()
        if found is not None:
            info = checkpoints.read_info(found)
            free = [key for key in FREE if not (reason.fresh and key == "reason.epochs")]
            check_same_run(info, cfg, room.tokenizer, ("model", "reason"), free)
            state = tensors(step_module, update.optimizers, ema, guard)
            checkpoints.load(found, state)
            guard.restore(state["guard"]["state"])
            window.restore(info["window"])
            ema.n, now = info["ema_n"], Progress(**info["progress"])
        metrics = Metrics(run, cfg, found, active=True)
        (run / "config.yaml").write_text(as_yaml(cfg))
        metrics.say(show(room.facts()) if found is None else f"resuming {run} at step {found}")

        def save() -> None:
            info = {"step": now.step, "best_step": now.best_step, "ema_n": ema.n, "progress": asdict(now)}
            info |= {"window": window.state(), "tokenizer": room.tokenizer.fingerprint, "config": asdict(cfg)}
            checkpoints.save(tensors(step_module, update.optimizers, ema, guard), info)

        def validate(stage: int) -> Score:
            """Answer the validation questions as this stage does; note if that is the best of the last stage."""
            with ema:
                score = room.score(room.splits.valid, room.valid, stage)
            facts = {"stage": stage, "epoch": schedule.epoch(now.step), **score.facts()}
            metrics.write("valid", now.step, facts)
            metrics.say(f"epoch {facts['epoch']}/{reason.epochs}, stage {stage}: {score}")
            now.stages = [s for s in now.stages if s["stage"] != stage] + [facts]
            if stage == schedule.last_stage and score.accuracy > now.best:
                now.best, now.best_step = score.accuracy, now.step
            return score

        score: Score | None = None
        stopped, started = False, time.monotonic()
        late, saved_at = False, started
        room.network.train()
        while now.step < schedule.steps and not stopped and not late:
            stage = schedule.stage(now.step)
            if reason.reset_optimizer and schedule.starts_stage(now.step):
                update = Updater(cfg.optim, step_module, ema, guard)
            batches = room.batches(now.step, micro_batch)
            count = sum(batch.task.count for batch in batches)
            torch.manual_seed(fold(cfg.seed, Stream.SPLIT, now.step))  # dropout
            for batch in batches:
                with ranks.autocast():
                    output = step_module(batch)
                    (output.total / count).backward()
                window.add(output.terms)
            at, of = schedule.within_stage(now.step) if reason.reset_optimizer else (now.step, schedule.steps)
            factor = learning_rate_factor(cfg.optim, at, of)
            norm = update(factor)
            window.end_step(count)
            now.step += 1
            last = now.step == schedule.steps

            if now.step % cfg.train.log_every == 0 or last:
                values = window.read(norm, factor * cfg.optim.lr, guard) | {"stage": stage}
                metrics.write("train", now.step, values)
                metrics.line(now.step, schedule.steps, values)
                require(
                    guard.in_a_row.item() < cfg.train.max_bad_steps,
                    f"stopped at step {now.step}: {int(guard.in_a_row)} updates in a row had bad gradients",
                )
            metrics.advance(now.step)
            late = 0 < 60 * reason.minutes <= time.monotonic() - started
            if schedule.is_validated(now.step) or late:
                score = validate(stage)
                window.restart()
            due = bool(cfg.checkpoint.minutes) and time.monotonic() - saved_at > 60 * cfg.checkpoint.minutes
            stopped = interruption.requested
            improved = now.best_step == now.step
            if last or stopped or late or due or improved or now.step % cfg.checkpoint.every == 0:
                save()
                saved_at = time.monotonic()
                window.restart()

        stage = schedule.stage(now.step - 1)
        if stopped and now.step < schedule.steps:
            metrics.close()
            note(f"stopped by a signal at step {now.step}; the same command goes on from there")
            return ReasonResult(str(run), now.step, False, stage, {}, {}, now.stages)
        if now.step < schedule.steps:
            note(f"reason.minutes={reason.minutes} are over at step {now.step} of {schedule.steps}, in stage {stage}")
        tested = now.step if now.best_step is None else now.best_step  # before the last stage there is no best
        state = tensors(step_module, [], ema, guard)
        checkpoints.load(tested, {part: state[part] for part in ("model", "ema")})
        with ema:
            if score is None or tested != now.step:  # else these weights were the last to be validated
                score = room.score(room.splits.valid, room.valid, stage)
            metrics.say(f"best of stage {stage}, validation: {score}")
            tests = ask_and_export(room, cfg, run, tested, stage, metrics)
        metrics.close()
        result = ReasonResult(str(run), now.step, now.step == schedule.steps, stage, score.facts(), tests, now.stages)
        write_results(run, room.facts() | result._asdict())
        plot_curves(run, "accuracy", "accuracy on validation questions")
        return result


def ask_and_export(
    room: Classroom, cfg: Config, run: Path, step: int, stage: int, metrics: Metrics
) -> dict[str, dict[str, float | int]]:
    """Ask the network, as it stands after `step`, the test questions, and write it to the run; scores by test set."""
    tests = {}
    for name, examples in room.splits.tests.items():
        score = room.score(examples, encode(examples, room.tokenizer), stage)
        metrics.say(f"test {name}: {score}")
        tests[name] = score.facts()
    facts = {"step": step, "stage": stage, "max_new_tokens": room.max_new_tokens}
    export_run(run, cfg, room.network, room.tokenizer, facts)
    return tests

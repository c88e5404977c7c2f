"""The training loop: one for every objective, from one CPU core to many GPUs.

Read top to bottom: set up, resume, then per optimizer step: draw the tasks of the global batch, accumulate gradients
over micro-batches, clip, update, average; at intervals log, validate, sample, save. Everything random is a function of
(seed, step, example), so a resumed run repeats an uninterrupted one bit for bit, and the number of ranks changes
nothing but the order of sums. The host never waits for the device between log lines.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm.data.loader import Batches
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.uniforms import Stream, fold
from adlm.io import export
from adlm.schema import Config, as_yaml
from adlm.training import setup
from adlm.training.checkpoint import Checkpoints, changes, check_same_run, check_same_sizes, note, tensors
from adlm.training.draw import drawn, on_device
from adlm.training.metrics import Metrics, Window, perplexity, plot_curves
from adlm.training.optim import Ema, Guard, Updater, learning_rate_factor
from adlm.training.parallel import Interruption, Step, accumulating, parallelise, world
from adlm.training.samples import sample_text
from adlm.training.sizes import rows_before, rows_from
from adlm.training.validation import validate

SampleHook = Callable[[dict[str, Tensor], Tokenizer, Config, int], str]


class TrainResult(NamedTuple):
    run: str
    step: int
    valid_nll: float | None
    """Bound on the validation split, nats per token (exact for causal models)."""
    valid_ppl: float | None
    finished: bool


def run_train(cfg: Config, dry_run: bool = False) -> dict[str, Any]:
    """`adlm train`."""
    if dry_run:
        with world(cfg.train) as ranks:
            data = setup.prepare_data(cfg, ranks)
            flops = setup.training_flops(cfg, setup.objective_for(cfg, data), data)
            with torch.device("meta"):
                model = setup.build_model(cfg.model, data.tokenizer.vocab_size, data.tokenizer.mask_id)
            facts = setup.plan(cfg, model, data, flops, ranks)
            print(setup.show(facts), file=sys.stderr)
            return facts
    return train(cfg)._asdict()


def train(cfg: Config, sample: SampleHook = sample_text) -> TrainResult:
    """Train to cfg.train.steps, or until a signal asks to stop; go on where the run folder's checkpoint stopped."""
    with (
        world(cfg.train) as ranks,
        setup.claimed_run_folder(cfg.out, ranks) as run,
        # before signals wait for a step to end: preparing may take hours, and leaves nothing to save
        nullcontext(setup.prepare_data(cfg, ranks)) as data,
        Interruption() as interruption,
        Checkpoints(run, cfg.checkpoint, ranks) as checkpoints,
    ):
        objective = setup.objective_for(cfg, data)
        found = checkpoints.newest_sound(mend=True) if cfg.checkpoint.resume else None
        model = setup.make_model(cfg, data.tokenizer, fresh=found is None).to(ranks.device)
        flops = setup.training_flops(cfg, objective, data)
        facts = setup.plan(cfg, model, data, flops, ranks)
        step_module = Step(model)
        wrapped = parallelise(step_module, cfg.train, ranks)
        ema = Ema(step_module, cfg.optim.ema)
        guard = Guard(cfg.train.spike_factor, ranks.device)
        update = Updater(cfg.optim, step_module, ema, guard)

        window = Window(flops, ranks, cfg.train.cuda_graphs)

        step, best, best_step = 0, math.inf, None
        valid_nll: float | None = None
        changed = ""
        if found is not None:
            info = checkpoints.read_info(found)
            check_same_run(info, cfg, data.tokenizer)
            check_same_sizes(info, cfg)
            changed = "".join(f"; {change}" for change in changes(info, cfg))
            state = tensors(step_module, update.optimizers, ema, guard)
            checkpoints.load(found, state)
            guard.restore(state["guard"]["state"])
            window.restore(info["window"])
            step, ema.n, best, best_step = info["step"], info["ema_n"], info["best"] or math.inf, info["best_step"]
            valid_nll = info.get("bound")
        elif checkpoints.steps():
            raise ValueError(f"{run} holds checkpoints; use checkpoint.resume=true, or another out=")

        metrics = Metrics(run, cfg, found, active=ranks.is_main)
        finished = step >= cfg.train.steps
        if ranks.is_main and finished:
            metrics.say(f"{run} is finished: step {step} of train.steps={cfg.train.steps}")
        elif ranks.is_main:
            (run / "config.yaml").write_text(as_yaml(cfg))
            metrics.say(setup.show(facts) if found is None else f"resuming {run} at step {step}{changed}")
            if step_module.compiled:
                metrics.say("compiling the network, a minute or two (train.compile=block or false starts sooner)")
        batches = Batches(
            data.train,
            cfg.seed,
            lambda first: rows_from(cfg.train, first),
            ranks.rank,
            ranks.size,
            consumed=rows_before(cfg.train, step),
        )

        def save(wait: bool) -> None:
            info = {
                "step": step,
                "best": None if math.isinf(best) else best,
                "best_step": best_step,
                "bound": valid_nll,
                "ema_n": ema.n,
                "window": window.state(),
                "tokenizer": data.tokenizer.fingerprint,
                "config": asdict(cfg),
            }
            checkpoints.save(tensors(step_module, update.optimizers, ema, guard), info, wait)

        def check_bound() -> float:
            nonlocal best, best_step
            with ema:
                bound = validate(wrapped, objective, data.valid, cfg.train, ranks)
            metrics.write("valid", step, {"nll": bound, "ppl": perplexity(bound)})
            metrics.say(f"step {step}: validation {bound:.4f} nats per token, perplexity {perplexity(bound):.2f}")
            if bound < best:
                best, best_step = bound, step
            return bound

        if step == 0 and cfg.train.valid_every:
            valid_nll = check_bound()
        stopped, saved_at = False, time.monotonic()
        stream = iter(()) if finished else iter(batches)
        for batch, tasks in drawn(objective, stream, step, setup.micro_batches(cfg, ranks), cfg, ranks.device):
            tokens = torch.full((), float(sum(t.count for t in tasks)), dtype=torch.float64, device=ranks.device)
            count = ranks.sum(tokens).float()
            for i, task in enumerate(on_device(task, ranks.device) for task in tasks):
                if cfg.model.dropout:
                    first = int(batch.examples[i * len(batch.examples) // len(tasks)])
                    torch.manual_seed(fold(cfg.seed, Stream.SPLIT, step, first))
                with accumulating(wrapped, last=i == len(tasks) - 1), ranks.autocast():
                    output = wrapped(task)
                    (output.total * (ranks.size / count)).backward()
                window.add(output.terms)
            factor = learning_rate_factor(cfg.optim, step, cfg.train.steps)
            norm = update(factor)
            window.end_step(count)
            step += 1
            last = step == cfg.train.steps

            if step % cfg.train.log_every == 0 or last:
                values = window.read(norm, factor * cfg.optim.lr, guard)
                metrics.write("train", step, values)
                metrics.line(step, cfg.train.steps, values)
                if guard.in_a_row.item() >= cfg.train.max_bad_steps:
                    raise ValueError(
                        f"stopped at step {step}: the last {int(guard.in_a_row)} updates were skipped for bad gradients"
                        f" (train.max_bad_steps={cfg.train.max_bad_steps}); lower optim.lr or raise train.spike_factor"
                    )
            metrics.advance(step)
            improved = False
            if last or (cfg.train.valid_every and step % cfg.train.valid_every == 0):
                before = best
                valid_nll = check_bound()
                improved = cfg.checkpoint.best and best < before
                window.restart()
            if cfg.train.sample_every and step % cfg.train.sample_every == 0:
                averages = ema.whole()
                if ranks.is_main:
                    try:
                        text = sample(averages, data.tokenizer, cfg, step)
                    except (ValueError, torch.OutOfMemoryError) as error:  # a picture of the run, and not the run
                        metrics.say(f"step {step}: warning: no sample: {str(error).splitlines()[0]}; training goes on")
                    else:
                        metrics.write("sample", step, {"text": text})
                        metrics.say(f"step {step}: sample\n{text}")
                window.restart()
            due = bool(cfg.checkpoint.minutes) and time.monotonic() - saved_at > 60 * cfg.checkpoint.minutes
            # on a GPU asking the other ranks makes the host wait: not at every step, and no rank acts on its own clock
            asked = ranks.size == 1 or ranks.device.type == "cpu" or step % 10 == 0
            stopped, due = asked and ranks.any(interruption.requested), asked and ranks.any(due)
            if last or stopped or due or improved or step % cfg.checkpoint.every == 0:
                try:
                    save(wait=last or stopped)
                except OSError as error:
                    if last or stopped:
                        raise
                    if ranks.is_main:
                        note(f"warning: {error}; training goes on")
                saved_at = time.monotonic()
                window.restart()
            if last or stopped:
                break

        if stopped and step < cfg.train.steps:
            metrics.close()
            if ranks.is_main:
                note(f"stopped by a signal at step {step}; the same command goes on from there")
            return TrainResult(str(run), step, valid_nll, valid_nll and perplexity(valid_nll), finished=False)

        weights = ema.whole()
        if ranks.is_main and finished and (run / "export" / "config.json").exists():
            metrics.close()
        elif ranks.is_main:
            facts_of_run = {"step": step, "tokens": rows_before(cfg.train, step) * cfg.model.length}
            facts_of_run |= {"parameters": facts["parameters"], "valid_nll": valid_nll, "command": command_line()}
            info = export.describe(cfg, data.tokenizer, **facts_of_run)
            export.save_folder(run / "export", weights, data.tokenizer, info)
            metrics.close()
            plot_curves(run)
        ranks.barrier()
        return TrainResult(str(run), step, valid_nll, valid_nll and perplexity(valid_nll), finished=True)


def command_line() -> list[str]:
    """What was typed, without the path of this machine's `adlm` (or of the module, for `python -m adlm`)."""
    program = Path(sys.argv[0])
    ours = program.name == "adlm" or program.parts[-2:] == ("adlm", "__main__.py")
    return ["adlm", *sys.argv[1:]] if ours else ["python", program.name, *sys.argv[1:]]

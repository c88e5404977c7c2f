"""The training loop of `adlm train`: one for every objective, from one CPU core to many GPUs.

Read top to bottom: set up, resume, then per optimizer step: corrupt the global batch, accumulate gradients over
micro-batches, clip, update, EMA; at intervals log, validate, sample, save. Everything random is a function of (seed,
step, example), so a resumed run equals an uninterrupted one bit for bit, and the number of ranks changes nothing but
the order of sums. The host never waits for the device between log lines.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm.data.loader import Batches
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import make_schedule
from adlm.diffusion.random import Stream, fold
from adlm.engine import Engine, Request
from adlm.errors import require
from adlm.io import export
from adlm.models import build_model
from adlm.models.network import adapt, adapters, base_weights
from adlm.samplers.base import with_sampler
from adlm.schema import Config
from adlm.training import setup
from adlm.training.checkpoint import claimed_run_folder
from adlm.training.metrics import perplexity, plot_curves
from adlm.training.optim import learning_rate_factor
from adlm.training.parallel import Step, World, accumulating, parallelise, world
from adlm.training.prediction import run_prediction
from adlm.training.run import Run, SampleHook
from adlm.training.setup import corrupted_batches, on_device, validate


class TrainResult(NamedTuple):
    run: str
    step: int
    valid_nll: float | None
    """Bound on the validation split, nats per token (exact for causal models)."""
    valid_ppl: float | None
    finished: bool
    stopped_by: int = 0
    """The signal that stopped the run before its end; 0: none did."""


def run_train(cfg: Config, dry_run: bool = False) -> dict[str, Any]:
    """`adlm train`."""
    if cfg.cluster.gpus:
        require(dry_run, f"gpus={cfg.cluster.gpus} is for a prediction: add --dry-run; torchrun trains on many GPUs")
        return run_prediction(cfg)
    if not dry_run:
        result = train(cfg)
        if result.finished and int(os.environ.get("RANK", 0)) == 0:
            print(farewell(result, exact=cfg.model.causal))
        return result._asdict()
    with world(cfg.train) as ranks:
        data = setup.prepare_data(cfg, ranks)
        flops = setup.training_flops(cfg, setup.objective_for(cfg, data), data)
        with torch.device("meta"):
            model = build_model(cfg.model, data.tokenizer.vocab_size, data.tokenizer.mask_id)
            model = adapt(model, cfg.lora) if cfg.lora.rank else model
        facts = setup.plan(cfg, model, data, flops, ranks)
        print(setup.show(facts), file=sys.stderr)
        return facts


def farewell(result: TrainResult, exact: bool) -> str:
    """Say where the model is, how good it is, and what to do next. `exact`: its perplexity is not a bound."""
    at_most = "" if exact else " at most"
    ppl = "" if result.valid_ppl is None else f", validation perplexity{at_most} {result.valid_ppl:,.2f}"
    model = shlex.quote(result.run)
    return (
        f"\nModel: {result.run}/export (step {result.step}{ppl})\n\nTry next:\n"
        f"  adlm sample {model}\n      draw texts from it\n"
        f"  adlm serve {model}\n      a page that shows texts appear"
    )


def sample_text(weights: dict[str, Tensor], tokenizer: Tokenizer, cfg: Config, step: int) -> str:
    """Draw one text with the run's own sampling settings, from a separate model: the one in training may be wrapped,
    compiled or sharded, and the engine folds constants into the weights it is given."""
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    model.load_state_dict(weights)
    device = next(iter(weights.values())).device
    engine = Engine(
        model.to(device).eval(), make_schedule(cfg.noise), 1, device, compile="false", tau=cfg.objective.tau
    )
    tokens = [tokenizer.mask_id] * min(cfg.sampling.length or cfg.model.length, cfg.model.length)
    if cfg.model.causal or cfg.model.shift:
        tokens[0] = tokenizer.bos_id
    settings = with_sampler(cfg.sampling, cfg.objective, cfg.model)
    (result,) = engine.run([Request(tokens, settings, seed=settings.seed + step)])
    return tokenizer.decode(result.tokens, skip_special=True)


class Course(NamedTuple):
    """What a run learns: its data and its objective."""

    data: Callable[[Config, World], setup.Data] = setup.prepare_data
    objective: Callable[[Config, setup.Data], setup.Objective] = setup.objective_for


FROM_SETTINGS = Course()


def train(cfg: Config, sample: SampleHook = sample_text, course: Course = FROM_SETTINGS) -> TrainResult:
    """Train to cfg.train.steps, or until a signal asks to stop; resume from the run folder's checkpoint if there is
    one. `course`: other sequences than those of a corpus, or another objective than that of the settings."""
    with world(cfg.train) as ranks, claimed_run_folder(cfg.out, ranks) as folder:
        # In a separate function, so that the wrapped model is freed before the process group: torch's DDP, if it holds
        # the last reference, waits for threads of the group that may wait for Python's lock.
        return train_run(cfg, folder, ranks, sample, course)


def train_run(cfg: Config, folder: Path, ranks: World, sample: SampleHook, course: Course) -> TrainResult:
    """`train` in its folder and world."""
    # before signals wait for the end of a step: preparing may take hours, and has nothing to save
    data = course.data(cfg, ranks)
    with Run(cfg, folder, ranks) as run:
        objective = course.objective(cfg, data)
        flops = setup.training_flops(cfg, objective, data)
        model = setup.make_model(cfg, data.tokenizer, fresh=run.is_new and run.fork is None).to(ranks.device)
        facts = setup.plan(cfg, model, data, flops, ranks)
        setup.check_memory(facts["memory_gib_estimate"], ranks.device)
        adapter = setup.adapter_facts(cfg, model)
        step_module = Step(model)
        wrapped = parallelise(step_module, cfg.train, ranks)
        run.begin(step_module, data.tokenizer, setup.show(facts), flops, data.fingerprints())
        run.keep_adapter(adapter)

        if run.is_new and cfg.train.valid_every:
            validate_ema(run, wrapped, objective, data)
        consumed = run.step * cfg.train.global_batch_size
        stream = Batches(data.train, cfg.seed, cfg.train.global_batch_size, ranks.rank, ranks.size, consumed=consumed)
        batches = iter(()) if run.was_finished else iter(stream)
        ranks.at("reading sequences", run.step)
        for batch, corrupted in corrupted_batches(objective, batches, run.step, cfg, ranks):
            ranks.at("waiting for all ranks to count their tokens", run.step, waits=True)
            tokens = sum(micro_batch.count for micro_batch in corrupted)
            exact = torch.full((), float(tokens), dtype=torch.float64, device=ranks.float64_device)
            count = ranks.sum(exact).float()
            for i, micro_batch in enumerate(on_device(part, ranks.device) for part in corrupted):
                if cfg.model.dropout:
                    first = int(batch.examples[i * len(batch.examples) // len(corrupted)])
                    torch.manual_seed(fold(cfg.seed, Stream.SPLIT, run.step, first))
                last, first_time = i == len(corrupted) - 1, run.step == run.first_step
                with accumulating(wrapped, last), ranks.autocast():
                    # the first pass compiles; after the last one all ranks exchange gradients
                    ranks.at(f"computing micro-batch {i + 1} of {len(corrupted)}", run.step, long=first_time)
                    output = wrapped(micro_batch)
                    ranks.at(f"computing gradients of micro-batch {i + 1}", run.step, waits=last, long=first_time)
                    (output.total * (ranks.size / count)).backward()
                run.window.add(output.terms)
            ranks.at("updating the weights", run.step)
            run.update(learning_rate_factor(cfg.optim, run.step, cfg.train.steps), count)

            run.log_if_due()
            if run.is_time_to_validate:
                validate_ema(run, wrapped, objective, data)
            if run.is_time_to_sample:
                run.show_sample(sample)
            run.save_if_due()
            if run.ends:
                break
            ranks.at("reading sequences", run.step)

        if run.was_interrupted:
            run.say_interrupted()
        else:
            export_run(run)
        ppl = run.bound and perplexity(run.bound)
        return TrainResult(str(folder), run.step, run.bound, ppl, not run.was_interrupted, run.stopped_by)


def validate_ema(run: Run, wrapped: torch.nn.Module, objective: setup.Objective, data: setup.Data) -> None:
    """The bound of the EMA weights on the validation split."""
    run.ranks.at("validating", run.step, long=True)
    with run.ema:
        run.bound = bound = validate(wrapped, objective, data.valid, run.cfg.train, run.ranks)
    message = f"step {run.step}: validation {bound:.4f} nats per token, perplexity {perplexity(bound):.2f}"
    run.record_validation({"nll": bound, "ppl": perplexity(bound)}, message, score=bound)


def export_run(run: Run) -> None:
    """Write the curves and the exported folder of a run that has ended. An earlier export is kept if it is complete and
    holds these weights. The export comes last: if it exists, so does the rest."""
    assert run.log is not None
    cfg, weights, folder = run.cfg, run.ema.whole(), run.folder / "export"
    run.ranks.at("exporting", run.step, long=True)
    if run.ranks.is_main:
        tokens = run.step * cfg.train.global_batch_size * cfg.model.length
        about: dict[str, Any] = {"step": run.step, "tokens": tokens, "valid_nll": run.bound}
        about["parameters"] = sum(x.numel() for x in base_weights(weights).values())
        if cfg.lora.rank:
            about["adapter"], weights = run.extra["adapter"], adapters(weights)
        info = export.describe(cfg, run.tokenizer, **about, command=command_line())
        is_exported = export.is_export_of(folder, weights, run.tokenizer, info)
        run.log.close()
        if not is_exported or not (run.folder / "curves.png").is_file():
            plot_curves(run.folder)
        if not is_exported:
            export.save_folder(folder, weights, run.tokenizer, info)
    run.ranks.barrier()


def command_line() -> list[str]:
    """What was typed, without the path of this machine's `adlm` (or of the module, for `python -m adlm`)."""
    program = Path(sys.argv[0])
    ours = program.name == "adlm" or program.parts[-2:] == ("adlm", "__main__.py")
    return ["adlm", *sys.argv[1:]] if ours else ["python", program.name, *sys.argv[1:]]

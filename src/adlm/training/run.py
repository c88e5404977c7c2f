"""A run: everything around the gradient steps, shared by `adlm train` and `adlm reason train`.

A `Run` owns the run folder, its checkpoints, resuming, the optimizers with EMA and gradient guard, and the log. It
decides when to log, validate, sample, save and stop. The loop decides what a batch is and what a validation measures.
Between two steps, the host waits for the device only where a log line is written. The functions after the class decide
which checkpoint a run may continue from.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm.config import as_yaml
from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.io.paths import absolute_paths, path_of, step_of, write_atomically
from adlm.models.network import merged
from adlm.schema import Config, DataConfig, ReasonConfig
from adlm.tables import TOKENIZERS
from adlm.training.checkpoint import STATE, Checkpoints, check_state, of_run, tensors
from adlm.training.metrics import LogWindow, RunLog, read_metrics
from adlm.training.optim import Ema, GradientGuard, Updater
from adlm.training.parallel import Interruption, Step, World
from adlm.training.watch import note

MAX_BAD_STEPS = 20
"""A run stops when this many updates in a row were skipped for a gradient that is not finite."""
LAST_PATIENCE = 10.0
"""Seconds that a failing run of several ranks waits for its last checkpoint."""
SampleHook = Callable[[dict[str, Tensor], Tokenizer, Config, int], str]
"""(EMA weights, tokenizer, settings, step) -> a text."""


class Run:
    """One training run, from the moment its folder is claimed; leaving the context completes pending writes.

    `begin` receives the module to train, and creates the parts that depend on it.
    """

    def __init__(self, cfg: Config, folder: Path, ranks: World):
        self.cfg, self.folder, self.ranks = with_absolute_paths(cfg), folder, ranks
        self.interruption = Interruption()
        self.checkpoints = Checkpoints(folder, cfg.checkpoint, ranks)
        self.log: RunLog | None = None
        self.step = 0
        """Optimizer steps taken."""
        self.best, self.best_step = math.inf, None
        """The best value that a validation found, lower is better, and its step."""
        self.bound: float | None = None
        """The last validation bound."""
        self.extra: dict[str, Any] = {}
        """Further data (JSON) that checkpoints store for the loop that uses this run."""
        self.decay_all = False
        """Apply weight decay to norms, biases and modulations, too; kept when a run resumes."""
        self.stopped = False
        self.resumed_step = self.checkpoints.newest_valid(set_aside=True) if cfg.checkpoint.resume else None
        """The step of the checkpoint from which this run resumes; None: it is a new run."""
        require(
            self.resumed_step is not None or not self.checkpoints.steps(),
            f"{folder} holds checkpoints; use checkpoint.resume=true, or another out=",
        )
        self.fork = Fork.of(cfg.checkpoint.init_from) if self.is_new and Fork.named(cfg.checkpoint.init_from) else None
        """The checkpoint of another run from which a new run starts, if any."""

    @property
    def is_new(self) -> bool:
        """The run folder held no checkpoint to resume from."""
        return self.resumed_step is None

    def __enter__(self) -> "Run":
        self.interruption.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        # after an exception a rank may be gone, and the checkpoint may then never be completed
        self.checkpoints.finish_writing(patience=LAST_PATIENCE if exception[0] and self.ranks.size > 1 else None)
        self.interruption.__exit__(*exception)
        if self.log is not None:
            self.log.close()

    # Start

    def begin(
        self,
        module: Step,
        tokenizer: Tokenizer,
        plan: str,
        flops_per_token: float | None = None,
        data: Mapping[str, str] | None = None,
        fixed: tuple[str, ...] = ("model", "lora", "noise", "objective"),
        free: tuple[str, ...] = (),
    ) -> None:
        """Create everything that updates `module`, and continue from the checkpoint that was found, if any.

        `plan` is printed at the start of a new run. `data`: a fingerprint of each split, so that a run does not resume
        on other data. `fixed`: sections of the settings that must not change when a run resumes, except for the keys
        in `free`.
        """
        cfg, ranks = self.cfg, self.ranks
        self.module, self.tokenizer, self.data, changed = module, tokenizer, dict(data or {}), ""
        self.ema = Ema(module, cfg.optim.ema)
        self.guard = GradientGuard(ranks.device)
        self.window = LogWindow(flops_per_token, ranks, cfg.train.cuda_graphs)
        found = self.fork or (None if self.resumed_step is None else Fork(self.checkpoints, self.resumed_step))
        info = None if found is None else found.checkpoints.read_info(found.step, ("train", *fixed))
        if info is not None:
            self.decay_all = info.get("decay_all", True)  # earlier versions decayed all, without recording it
        self.reset_optimizer()
        if info is not None and self.fork is not None:
            self.fork.check(info, cfg, tokenizer)
            self.restore_tensors(self.fork.checkpoints, info)
            changed = "; ".join(changes(info, cfg, ("objective", "data", "optim", "train")))
            plan = f"starting at step {self.step} of {cfg.checkpoint.init_from}; {changed}\n{plan}"
        elif info is not None:
            check_same_run(info, cfg, tokenizer, data, fixed, free)
            self.restore(info)
            changed = "".join(f"; {change}" for change in [*changes(info, cfg), *ignored_start(info, cfg)])
            if info.get("data", self.data).get("valid") != self.data.get("valid"):
                changed += "; the validation data has changed: bounds before and after do not compare"
                self.best, self.best_step = math.inf, None
            plan = f"resuming {self.folder} at step {info['step']}{self.lost(info)}{changed}"
        self.log, self.first_step = RunLog(self.folder, cfg, self.resumed_step, active=ranks.is_main), self.step
        self.was_finished = self.step >= cfg.train.steps
        if self.was_finished:
            self.log.say(
                f"{self.folder} is finished: step {self.step} of train.steps={cfg.train.steps}; nothing is"
                f" trained{changed}; to train on, give more train.steps, or another out="
            )
        elif ranks.is_main:
            write_atomically(self.folder / "config.yaml", as_yaml(cfg))
            self.log.say(plan)
            if module.compiled:
                self.log.say("compiling the network, a minute or two (train.compile=block or false starts sooner)")

    def keep_adapter(self, facts: dict[str, Any]) -> None:
        """Record in checkpoints which model the adapters belong to; refuse to resume on another one."""
        if facts:
            before = self.extra.setdefault("adapter", facts)
            require(
                before["base_sha256"] == facts["base_sha256"],
                f"out={self.cfg.out!r} holds adapters of {before['base']!r}, whose weights are not those of"
                f" checkpoint.init_from={self.cfg.checkpoint.init_from!r}; use another out=",
            )

    def lost(self, info: dict[str, Any]) -> str:
        """Say what changed since the checkpoint: the number of ranks and, if torchrun has restarted them, the steps and
        time that the failure cost."""
        before, now, said = info.get("ranks") or self.ranks.size, self.ranks.size, ""
        if before != now:
            said = f" with {now} rank{'s' * (now > 1)} in place of {before}"
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and "saved" in info:
            done = max((event["step"] for event in read_metrics(self.folder)), default=self.step)
            said += (
                f"; lost {max(0, done - self.step)} steps, {time.time() - info['saved']:.1f} s since that checkpoint"
            )
        return said

    def restore(self, info: dict[str, Any]) -> None:
        """Restore the tensors and counters of a checkpoint."""
        self.restore_tensors(self.checkpoints, info)
        self.window.restore(info["window"])
        self.best, self.best_step = math.inf if info["best"] is None else info["best"], info["best_step"]
        self.bound, self.extra = info.get("bound"), info.get("extra", {})

    def restore_tensors(self, checkpoints: Checkpoints, info: dict[str, Any]) -> None:
        """Restore weights, EMA, optimizer, gradient guard and step of a checkpoint."""
        state = self.state()
        checkpoints.load(info["step"], state)
        self.guard.restore(state["guard"]["state"])
        self.step, self.ema.n = info["step"], info["ema_n"]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor of a checkpoint, by part and name: what to save, and where to load."""
        return tensors(self.module, self.updater.optimizers, self.ema, self.guard)

    # Per step

    def update(self, rate: float, count: Tensor | float, tokens: float | None = None, examples: int = 0) -> None:
        """Update the weights at this fraction of the peak learning rate, and decide what is due. `count`: tokens that
        losses are divided by, over all ranks; `tokens`: tokens read, if that number differs; `examples`: those of the
        step, if their speed is to be logged."""
        self.norm, self.learning_rate = self.updater(rate), rate * self.cfg.optim.lr
        self.window.end_step(count, count if tokens is None else tokens, examples)
        self.step += 1
        cfg, step = self.cfg.train, self.step
        self.is_last = step == cfg.steps
        self.is_time_to_log = self.is_last or step % cfg.log_every == 0
        self.is_time_to_validate = self.is_last or (cfg.valid_every > 0 and step % cfg.valid_every == 0)
        self.is_time_to_sample = cfg.sample_every > 0 and step % cfg.sample_every == 0

    def reset_optimizer(self) -> None:
        """Start with fresh moments."""
        self.updater = Updater(self.cfg.optim, self.module, self.ema, self.guard, decay_all=self.decay_all)

    @property
    def ends(self) -> bool:
        """Whether this was the last step."""
        return self.step >= self.cfg.train.steps or self.stopped

    def log_if_due(self, **more: float) -> None:
        """Write the means since the last log line, followed by `more`."""
        assert self.log is not None
        if self.is_time_to_log:
            values = self.window.read(self.norm, self.learning_rate, self.guard) | more
            self.log.write("train", self.step, values)
            self.log.line(self.step, self.cfg.train.steps, values)
            if self.guard.in_a_row.item() >= MAX_BAD_STEPS:
                raise ValueError(
                    f"stopped at step {self.step}: the last {int(self.guard.in_a_row)} updates were skipped for"
                    " gradients that are not finite; lower optim.lr or raise optim.warmup"
                )
        self.log.advance(self.step)

    def record_validation(self, values: Mapping[str, float | str], message: str, score: float | None) -> None:
        """Record and print a validation. `score` selects the best checkpoint, lower is better; None: no candidate."""
        assert self.log is not None
        self.log.write("valid", self.step, values)
        self.log.say(message)
        if score is not None and score < self.best:
            self.best, self.best_step = score, self.step
        self.window.restart()

    def show_sample(self, sample: SampleHook) -> None:
        """Record a text drawn with the EMA weights, to show what the numbers mean."""
        assert self.log is not None
        weights = merged(self.ema.whole(), self.cfg.lora)
        if self.ranks.is_main:
            self.ranks.at("drawing a sample", self.step, long=True)
            try:
                text = sample(weights, self.tokenizer, self.cfg, self.step)
            except (ValueError, torch.OutOfMemoryError) as error:  # a failed sample must not stop the run
                reason = str(error).splitlines()[0]
                self.log.say(f"step {self.step}: warning: no sample: {reason}; training continues")
            else:
                self.log.write("sample", self.step, {"text": text})
                self.log.say(f"step {self.step}: sample\n{text}")
        self.window.restart()

    def save_if_due(self) -> None:
        """Save at regular intervals, after a validation with the best result, and at the end. Afterwards `stopped` says
        whether a signal has asked to stop."""
        cfg, ranks = self.cfg.checkpoint, self.ranks
        # on a GPU, asking the other ranks makes the host wait: not at every step; no rank may act on its own
        asked = ranks.size == 1 or ranks.device.type == "cpu" or self.step % 10 == 0
        self.stopped = asked and ranks.any(self.interruption.requested)
        improved = cfg.best and self.best_step == self.step
        if self.ends or improved or self.step % cfg.every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, in the background unless the run ends: then a failure is raised, not only reported."""
        self.ranks.at("saving a checkpoint", self.step)
        info = {
            "step": self.step,
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "bound": self.bound,
            "ema_n": self.ema.n,
            "decay_all": self.decay_all,
            "ranks": self.ranks.size,
            "saved": time.time(),
            "window": self.window.state(),
            "tokenizer": self.tokenizer.fingerprint,
            "data": self.data,
            "config": asdict(self.cfg),
        }
        if self.extra:
            info["extra"] = self.extra
        try:
            self.checkpoints.save(self.state(), info, wait=self.ends)
        except OSError as error:
            if self.ends:
                raise
            if self.ranks.is_main:
                note(f"warning: {error}; training continues")
        self.window.restart()

    # End

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stopped and self.step < self.cfg.train.steps

    @property
    def stopped_by(self) -> int:
        """The signal that ended the run before its last step; 0: none did. SIGTERM on a rank that stopped because
        another one received a signal."""
        return (self.interruption.number or signal.SIGTERM) if self.was_interrupted else 0

    def say_interrupted(self) -> None:
        assert self.log is not None
        self.log.close()
        if self.ranks.is_main:
            note(f"stopped by a signal at step {self.step}; the same command resumes there")


def check_same_run(
    info: dict[str, Any],
    cfg: Config,
    tokenizer: Tokenizer,
    data: Mapping[str, str] | None = None,
    fixed: Iterable[str] = ("model", "lora", "noise", "objective"),
    free: Iterable[str] = (),
) -> None:
    """Refuse to continue a run with another model, tokenizer or other data. `data`: fingerprint of each split, compared
    with that of the checkpoint (those of earlier versions have none). `fixed`: sections that must not change, except
    for the keys in `free`."""
    check_state(info, f"the checkpoint in out={cfg.out!r}")
    then, now = info.get("data", {}).get("train"), (data or {}).get("train")
    if then and now and then != now:  # before the tokenizer, which may have been trained on it
        settings = "".join(f"; {change}" for change in changes(info, cfg, ("data",)))
        exported = info["tokenizer"] == tokenizer.fingerprint and (path_of(cfg.out) / "export").is_dir()
        weights = f" (with its weights: checkpoint.init_from={cfg.out}/export)" if exported else ""
        raise ValueError(
            f"out={cfg.out!r} was trained on other data: the content of the training data or how it is prepared has"
            f" changed{settings}; put the data back, or use another out={weights}"
        )
    if info["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            f"out={cfg.out!r} was trained with another tokenizer than data.tokenizer={cfg.data.tokenizer!r} gives;"
            " use another out="
        )
    # seed and size of the steps determine which sequences a run has read
    keys = ["seed", "train.global_batch_size", "train.length_warmup", "train.length_warmup_fraction"]
    if cfg.train.length_warmup > 1:
        check_steps(info, cfg)
    for key, was, value in differences(info, cfg, fixed, keys):
        if key not in free:
            raise ValueError(
                f"out={cfg.out!r} was started with {key}={was}, now it is {value}; set it back or use another out="
            )


def check_steps(info: dict[str, Any], cfg: Config) -> None:
    """Refuse another number of steps if that moves the end of sequence-length warmup, which is a fraction of all steps.
    The warmup must be over by both the old and the new number."""
    was, now, step = info["config"]["train"]["steps"], cfg.train.steps, info["step"]
    fraction = cfg.train.length_warmup_fraction
    most = int(step / fraction) if fraction else now
    over = step >= math.ceil(fraction * was)
    allowed = f"up to {most} would be possible, or " if over and most > was else ""
    require(
        was == now or (over and now <= most),
        f"out={cfg.out!r} was started with train.steps={was}, now it is {now}, and at step {step} its sequences would"
        f" become short again (train.length_warmup_fraction={fraction}): {allowed}use another out=",
    )


def differences(
    info: dict[str, Any], cfg: Config, sections: Iterable[str], keys: Iterable[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value then, value now) for settings that differ from a checkpoint's, in these sections and for these
    keys. Settings that decide which optimizer state a checkpoint holds are always compared."""
    before, now, default = info["config"], asdict(cfg), asdict(Config())
    inside = [f"{part}.{key}" for part in sections for key in default[part] | before.get(part, {})]
    no_ema = ["optim.ema"] if cfg.optim.ema and not before["optim"]["ema"] else []
    for key in (*inside, *keys, "optim.name", *no_ema):
        # an older version had fewer keys, and behaved like the default of a later one
        was, value = value_of(before, key, value_of(default, key)), value_of(now, key)
        if was != value:
            yield key, was, value


def value_of(settings: dict[str, Any], key: str, missing: Any = None) -> Any:
    """The value of a dotted key in settings of two levels."""
    section, dot, name = key.partition(".")
    return settings.get(section, {}).get(name, missing) if dot else settings.get(section, missing)


def changes(info: dict[str, Any], cfg: Config, parts: Iterable[str] = ("data", "optim", "train")) -> list[str]:
    """Say which other settings have changed since the checkpoint."""
    before, now = info["config"], asdict(cfg)
    return [
        f"{part}.{key} was {value}, is {now[part][key]}"
        for part in parts
        for key, value in before[part].items()
        if key in now[part] and now[part][key] != value
    ]


def ignored_start(info: dict[str, Any], cfg: Config) -> list[str]:
    """Say if checkpoint.init_from is not what the resuming run started from."""
    was, now = value_of(info["config"], "checkpoint.init_from", ""), cfg.checkpoint.init_from
    if not now or path_of(was).absolute() == path_of(now).absolute():
        return []
    return [f"checkpoint.init_from was {was!r}, is {now!r}, which is not read: the run has begun"]


class Fork(NamedTuple):
    """A checkpoint of another run, from which a new one starts: with its weights, EMA, optimizer and step, but other
    settings."""

    checkpoints: Checkpoints
    step: int

    @staticmethod
    def named(place: str) -> bool:
        """Whether checkpoint.init_from names a checkpoint, not an exported folder."""
        return step_of(path_of(place).name) is not None and (path_of(place) / STATE).is_file()

    @classmethod
    def of(cls, place: str) -> "Fork":
        path = path_of(place)
        fork = cls(of_run(path.parent.parent), step_of(path.name) or 0)
        problem = fork.checkpoints.problem(fork.step)
        require(not problem, f"checkpoint.init_from={place!r} is corrupt ({problem})")
        return fork

    def check(self, info: dict[str, Any], cfg: Config, tokenizer: Tokenizer) -> None:
        """Refuse a run that its tensors do not fit."""
        said = f"checkpoint.init_from={cfg.checkpoint.init_from!r}"
        check_state(info, said)
        require(info["tokenizer"] == tokenizer.fingerprint, f"{said} has another tokenizer than this run's data")
        require(
            self.step < cfg.train.steps,
            f"{said} is at step {self.step}, so train.steps must be above that, got {cfg.train.steps}",
        )
        for key, was, value in differences(info, cfg, ("model", "lora")):
            require(key == "model.dropout", f"{said} has {key}={was}, this run {value}: its tensors would not fit")


def with_absolute_paths(cfg: Config) -> Config:
    """The settings as a run stores them, with absolute paths, so that they work from any folder."""
    places = {
        "data": absolute_paths(DataConfig, vars(cfg.data)),
        "reason": absolute_paths(ReasonConfig, vars(cfg.reason)),
    }
    if (name := cfg.data.tokenizer) and name not in TOKENIZERS and path_of(name).exists():
        places["data"]["tokenizer"] = str(path_of(name).absolute())
    return replace(cfg, **{section: replace(getattr(cfg, section), **found) for section, found in places.items()})

"""What a run reports: one live line in the terminal, one JSON object per event in metrics.jsonl, curves at the end.

The file is the record; TensorBoard or Weights & Biases is a mirror. On a resume, lines of steps that will be computed
again are dropped, so the file of an interrupted run equals that of an uninterrupted one, except for times.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from adlm.io.paths import write_atomically
from adlm.models.layers import peak_flops
from adlm.schema import Config
from adlm.training.optim import GradientGuard
from adlm.training.parallel import World

METRICS = "metrics.jsonl"


class RunLog:
    """The records and messages of a run; only the main rank's is active."""

    def __init__(self, run: Path, cfg: Config, resumed_step: int | None, active: bool):
        """`resumed_step`: the step from which the run resumes; None: a new run."""
        self.active, self.run = active, run
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.warned = self.is_cut = False
        self.said_at: tuple[int, float] | None = None
        """Step and time of the previous line."""
        self.mirror: TensorBoard | WandB | None = None
        if not active:
            return
        self.path = run / METRICS
        truncate(self.path, -1 if resumed_step is None else resumed_step)
        if cfg.train.track == "tensorboard":
            self.mirror = TensorBoard(run / "tensorboard")
        elif cfg.train.track == "wandb":
            self.mirror = WandB(run)
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console, transient=False)
            self.task = self.progress.add_task("training", total=cfg.train.steps, completed=resumed_step or 0, line="")
            self.progress.start()

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        """Record an event. A full disk must not stop a training run."""
        if not self.active:
            return
        event = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self.is_cut + json.dumps(event) + "\n")
            self.is_cut = False
        except OSError as error:
            self.is_cut = True  # half a line may be on the disk, and the next one must not continue it
            if not self.warned:
                self.say(f"warning: {self.path} cannot be written ({error.strerror}); metrics are lost until it can")
            self.warned = True
        if self.mirror is not None:
            self.mirror.write(kind, step, values)

    def line(self, step: int, steps: int, values: dict[str, float]) -> None:
        """Show the live line."""
        if not self.active:
            return
        text = "  ".join(f"{key} {short(value)}" for key, value in values.items())
        if self.progress:
            self.progress.update(self.task, completed=step, line=text)
        else:
            self.say(f"step {step}/{steps}  {text}{self.time_left(step, steps)}")

    def time_left(self, step: int, steps: int) -> str:
        """The time left at the speed since the previous line; empty for the first line."""
        before, self.said_at = self.said_at, (step, time.monotonic())
        if before is None or not before[0] < step < steps:
            return ""
        seconds = (steps - step) * (self.said_at[1] - before[1]) / (step - before[0])
        return f"  {timedelta(seconds=round(seconds))} left"

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self.progress:
            self.progress.update(self.task, completed=step)

    def say(self, message: str) -> None:
        """Print a line above the live one. A terminal that is gone (SIGHUP) must not keep a run from saving."""
        if self.active:
            with suppress(OSError):
                self.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """End the live line and the mirror; later messages are plain text."""
        if self.progress:
            with suppress(OSError):
                self.progress.stop()
        if self.mirror is not None:
            self.mirror.close()
        self.progress = self.mirror = None


BESIDE = ("anchor", "next_token")
"""Terms of the loss that are not bounds: logged last, and without a perplexity."""


class LogWindow:
    """Sums since the last log line, on the device until they are read."""

    def __init__(self, flops_per_token: float | None, ranks: World, graphs: bool = False):
        self.ranks, self.graphs = ranks, graphs
        name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
        peak = peak_flops(name)
        self.mfu_per_speed = None if peak is None or flops_per_token is None else flops_per_token / (peak * ranks.size)
        """Model FLOPs utilisation at one token a second."""
        self.clear()

    def clear(self) -> None:
        self.terms: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | float] = {}
        """What each term is divided by: the tokens of the steps that had it."""
        self.added: set[str] = set()
        """Terms of the current step."""
        self.tokens: Tensor | float = 0.0
        """Tokens read, which give the speed."""
        self.examples = 0
        self.restart()

    def restart(self) -> None:
        """Restart the clock, to leave validation and saving out of the tokens per second."""
        self.seconds_from = time.monotonic()
        self.tokens_from, self.examples_from = self.tokens, self.examples

    def state(self) -> dict[str, Any]:
        """What a checkpoint between two log lines stores, so that the next line is the same after a resume."""
        names = sorted(self.terms)
        if not names:
            return {"terms": {}, "counts": {}}
        terms = torch.stack([self.terms[name] for name in names]).to(self.ranks.float64_device).double()
        sums = self.ranks.sum(terms).tolist()
        return {"terms": dict(zip(names, sums)), "counts": {name: float(self.counts[name]) for name in names}}

    def restore(self, state: dict[str, Any]) -> None:
        """Give the sums over all ranks to the main one: `read` sums again, and the number of ranks may have changed."""
        mine = 1.0 if self.ranks.is_main else 0.0
        for name, value in state["terms"].items():
            self.terms[name] = torch.tensor(mine * value, dtype=torch.float32, device=self.ranks.device)
        # an earlier version had one count for all
        counts: dict[str, Any] = state.get("counts") or {name: state["count"] for name in self.terms}
        self.counts = counts
        self.restart()

    def add(self, terms: dict[str, Tensor]) -> None:
        """Add the sums of a micro-batch."""
        self.added |= terms.keys()
        for name, value in terms.items():
            self.terms[name] = self.terms[name] + value if name in self.terms else value

    def end_step(self, count: Tensor | float, tokens: Tensor | float, examples: int) -> None:
        """Add an optimizer step: `count`, the tokens that its losses are divided by, and `tokens`, those read."""
        for name in self.added:  # not in place: `count` belongs to the caller
            self.counts[name] = self.counts.get(name, 0.0) + count
        self.added.clear()
        self.tokens = self.tokens + tokens
        self.examples += examples

    def read(self, norm: Tensor, learning_rate: float, guard: GradientGuard) -> dict[str, float]:
        """The values of a log line; the window is then cleared."""
        names = sorted(self.terms, key=lambda name: (name in BESIDE, name))
        sums = self.ranks.sum(torch.stack([self.terms[name].float() for name in names]))
        counts = torch.stack([torch.as_tensor(self.counts[name], device=sums.device).to(sums) for name in names])
        per_token = (sums / counts).tolist()  # the one place where the host waits for the device
        seconds = time.monotonic() - self.seconds_from
        tokens = float(self.tokens) - float(self.tokens_from)
        values = dict(zip(names, per_token))
        values |= {} if names[0] in BESIDE else {"ppl": perplexity(per_token[0])}
        values |= {"grad_norm": norm.item(), "lr": learning_rate}
        values["tokens_per_s"] = tokens / max(seconds, 1e-9)
        if self.mfu_per_speed is not None:
            values["mfu"] = values["tokens_per_s"] * self.mfu_per_speed
        if self.examples:
            values["examples_per_s"] = (self.examples - self.examples_from) / max(seconds, 1e-9)
        if memory := peak_memory_gib(self.ranks.device, self.graphs):
            values["memory_gib"] = memory
        if skipped := int(guard.skipped.item()):
            values["skipped"] = skipped
        self.clear()
        return values


def short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def truncate(path: Path, step: int) -> None:
    """Drop events after `step`, and lines that are no events, such as one that a kill or a full disk cut short."""
    if not path.is_file():
        return
    kept = b"".join(line + b"\n" for line, event in events_in(path) if event["step"] <= step)
    if kept != path.read_bytes():
        write_atomically(path, lambda file: file.write(kept))


def events_in(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The events of a metrics file, as raw lines and parsed. Other lines are skipped: the file is a record for people,
    and no reason to stop a run."""
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and type(event.get("step")) is int and isinstance(event.get("kind"), str):
            yield line, event


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / METRICS
    return [event for _, event in events_in(path)] if path.is_file() else []


def peak_memory_gib(device: torch.device, graphs: bool = False) -> float | None:
    """Peak memory of this process: on a CUDA device, otherwise resident on the host; None if the system does not report
    it (Windows). `graphs`: CUDA graphs hold some of it, which torch counts as reserved, not as allocated."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
        return used(device) / 2**30
    try:
        import resource
    except ImportError:
        return None
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**30


def plot_curves(run: Path, quantity: str = "nll", label: str = "nats per token") -> Path | None:
    """Draw curves.png: training terms and a validation quantity over steps; None without matplotlib or metrics. A
    failed drawing does not fail the run."""
    try:
        import matplotlib
    except ImportError:
        return None
    try:
        events = read_metrics(run)
        matplotlib.use("Agg")
        return draw_curves(run / "curves.png", events, quantity, label)
    except Exception as error:
        reason = str(error).splitlines() or [type(error).__name__]
        print(f"adlm: warning: {run / 'curves.png'} is not drawn: {reason[0]}", file=sys.stderr)
        return None


def draw_curves(path: Path, events: list[dict[str, Any]], quantity: str, label: str) -> Path | None:
    """Draw training terms on the left, validation on the right; None if there is neither."""
    train = [e for e in events if e["kind"] == "train"]
    valid = [e for e in events if e["kind"] == "valid" and quantity in e]
    if not train and not valid:
        return None
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = sorted({key for e in train for key in e} & {"nelbo", "nll", "score_entropy", "d3pm", *BESIDE})
    for name in names:
        points = [(e["step"], e[name]) for e in train if name in e]
        left.plot(*zip(*points), label=name, linewidth=1)
    left.set(xlabel="optimizer step", ylabel="nats per token", title="training")
    if names:
        left.legend()
    left.grid(alpha=0.3)
    if valid:
        right.plot([e["step"] for e in valid], [e[quantity] for e in valid], marker="o", markersize=3)
    right.set(xlabel="optimizer step", ylabel=label, title="validation")
    right.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    plt.close(figure)
    return path


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


class TensorBoard:
    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("train.track=tensorboard needs tensorboard: pip install 'adlm[track]'") from None
        self.writer = SummaryWriter(str(folder))

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        for key, value in values.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(f"{kind}/{key}", value, step)  # type: ignore[arg-type]

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, run: Path):
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError("train.track=wandb needs wandb: pip install 'adlm[track]'") from None
        mode = None if os.environ.get("WANDB_API_KEY") else "offline"
        self.wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "adlm"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run),
            mode=mode,
        )

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        self.wandb_run.log({f"{kind}/{key}": value for key, value in values.items()}, step=step)

    def close(self) -> None:
        self.wandb_run.finish()

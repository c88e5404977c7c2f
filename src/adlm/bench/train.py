"""One optimizer step - network, loss, gradients, clipping, update, average - ours and the dense twin's.

Ours is the step of `adlm train` with the same settings. The twin has the same weights and noise, forms the anchor
logits and projects them back, sends every position through both heads, and is neither compiled nor chunked. A time is
the median of `bench.steps` steps, since one hiccup of the host is worth several of them; the mean stands beside it.
"""

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.bench.dense import dense_loss
from adlm.data.loader import Batch
from adlm.models import Network, build_model
from adlm.models.flops import count_flops, peak_flops
from adlm.objectives import make_objective
from adlm.schema import Config
from adlm.training.draw import drawn, on_device
from adlm.training.metrics import peak_memory_gib
from adlm.training.optim import Ema, Guard, Updater
from adlm.training.parallel import Step, World, parallelise, world

BATCHES = 8  # different ones, in turn


def text_like(shape: tuple[int, ...], vocab_size: int) -> Tensor:
    """Tokens with frequencies like text's (1 / rank), so that the share of anchors is like text's."""
    frequency = 1 / (torch.arange(vocab_size - 1, dtype=torch.float64) + 10)
    n = torch.Size(shape).numel()
    return torch.multinomial(frequency, n, replacement=True, generator=torch.Generator().manual_seed(0)).view(shape)


def measure_train(cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """`which`: ours or dense. In a process of its own, since peak memory is a property of a process."""
    with world(cfg.train) as ranks:
        result = measure(cfg, batch, which, ranks, text_like((BATCHES, batch, cfg.model.length), cfg.bench.vocab_size))
    return result | {"losses": result["losses"][:3]}


def measure(cfg: Config, batch: int, which: str, ranks: World, data: Tensor, warmup: int = 0) -> dict[str, Any]:
    """`data`: batches of rows, taken in turn. `warmup`: steps over which the learning rate rises, for who looks at the
    losses."""
    torch.manual_seed(cfg.seed)
    device, V, L = ranks.device, cfg.bench.vocab_size, cfg.model.length
    cfg.train.global_batch_size = cfg.train.batch_size = batch
    model = build_model(cfg.model, V, V - 1).to(device).train()
    step_module = Step(model)
    if which == "ours":
        parallelise(step_module, cfg.train, ranks)
    objective = make_objective(cfg.objective, cfg.noise, V - 1, cfg.seed)
    ema, guard = Ema(step_module, cfg.optim.ema), Guard(cfg.train.spike_factor, device)
    update = Updater(cfg.optim, step_module, ema, guard)
    host = [Batch(rows.numpy(), None, np.arange(batch)) for rows in data]
    # the end of a run: gamma is no longer rising
    tasks = drawn(objective, itertools.cycle(host), cfg.train.steps, 1, cfg, device)

    def step(i: int) -> Tensor:
        task = on_device(next(tasks)[1][0], device)
        with ranks.autocast():
            total = step_module(task).total if which == "ours" else dense_loss(model, task)
        (total / task.count).backward()
        update(min(1.0, (i + 1) / (warmup + 1)))
        return total.detach() / task.count

    steps = cfg.bench.steps if which == "ours" else cfg.bench.dense_steps
    losses = [step(i) for i in range(cfg.bench.warmup)]
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    for _ in range(steps):
        losses.append(step(len(losses)))
        clock.lap()
    laps = clock.laps()
    seconds = statistics.median(laps)
    scored = {name: len(term.positions_N) for name, term in next(tasks)[1][0].terms.items()}
    flops = training_flops(cfg, model, scored, batch)
    result = {
        "ms": 1e3 * seconds,
        "mean_ms": 1e3 * statistics.mean(laps),
        "tokens_per_s": batch * L / seconds,
        "peak_gib": peak_memory_gib(device, cfg.train.cuda_graphs and which == "ours"),
        "losses": [round(x.item(), 4) for x in losses],
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return result | ({"mfu": flops / seconds / peak} if peak else {})


def training_flops(cfg: Config, model: Network, scored: dict[str, int], batch: int) -> float:
    """Of one step, counting only the positions whose heads are needed."""
    tokens = batch * cfg.model.length
    anchors = scored.pop("anchor", 0) / tokens
    share = sum(scored.values()) / tokens
    flops = count_flops(cfg.model, model.vocab_size, cfg.model.length, scored=share, anchors_scored=anchors)
    return flops.training_per_token * tokens


class Clock:
    """Seconds between laps. On a GPU the device notes the time when it gets there, and the host does not wait: a step
    is then timed as it runs in training, with the next one queued behind it."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.notes: list[Any] = []
        self.lap()

    def lap(self) -> None:
        if self.on_gpu:
            note = torch.cuda.Event(enable_timing=True)
            note.record()
            self.notes.append(note)
        else:
            self.notes.append(time.perf_counter())

    def laps(self) -> list[float]:
        if not self.on_gpu:
            return [b - a for a, b in itertools.pairwise(self.notes)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.notes)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()

"""`adlm bench train | sample`: one optimizer step and one step of a sampler, ours and the reference implementation's,
with random weights.

train   Network, loss, gradients, clipping, update and EMA. Ours is the step of `adlm train` with the same settings. The
        reference has the same weights and noise, forms the anchor logits and projects them back, sends every position
        through both heads, and is neither compiled nor chunked. A time is the median of `bench.steps` steps, since one
        delay of the host can take as long as several of them; the mean is reported, too.
sample  Ours is the engine: positions first, head and draw only there, steps that reveal nothing skipped. The reference
        does what a step-by-step loop does, at every position and every step. A step is one of the T steps of the
        sampler: ours has fewer network evaluations than steps (`nfe`), and its time per step is the time of a whole
        batch over T.
"""

import copy
import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm.data.loader import Batch
from adlm.data.tokenizers import vocabulary_size
from adlm.diffusion.process import make_schedule, noise_level, posterior
from adlm.engine import Engine, Request
from adlm.errors import choose, require
from adlm.io.paths import pick_device, writable_file
from adlm.models import Network, build_model
from adlm.models.layers import attention_kernel, peak_flops
from adlm.models.linear_cross_entropy import cross_entropy_chunk
from adlm.models.network import count_flops, parameter_count
from adlm.objectives import CorruptedBatch, make_objective
from adlm.samplers.base import make_sampler, with_sampler
from adlm.samplers.scheduled import Scheduled
from adlm.schema import Config
from adlm.training.loop import command_line
from adlm.training.metrics import peak_memory_gib
from adlm.training.optim import Ema, GradientGuard, Updater
from adlm.training.parallel import Step, World, parallelise, world
from adlm.training.setup import corrupted_batches, on_device, text_like

BATCHES = 8  # different batches, in turn
# Steps (train) or network evaluations (sample) before the clock starts, and timed steps of the reference.
WARM_UP, REFERENCE_STEPS = 5, 3


def measure_train(cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """Time training steps; `which`: ours or dense. Runs alone, since peak memory belongs to a process."""
    with world(cfg.train) as ranks:
        data = text_like((BATCHES, batch, cfg.model.length), vocabulary_size(cfg.data.tokenizer))
        steps = cfg.bench.steps if which == "ours" else REFERENCE_STEPS
        result = time_training(cfg, which, ranks, data, (WARM_UP, steps))
    return result | {"losses": result["losses"][:3]}


def time_training(
    cfg: Config, which: str, ranks: World, data: Tensor, steps: tuple[int, int], warmup: int = 0
) -> dict[str, Any]:
    """Time training steps. `data`: batches of sequences, taken in turn. `steps`: numbers of untimed and timed steps.
    `warmup`: steps over which the learning rate rises, for callers that use the losses."""
    torch.manual_seed(cfg.seed)
    device, V, (_, batch, L) = ranks.device, vocabulary_size(cfg.data.tokenizer), data.shape
    cfg.train.global_batch_size = cfg.train.batch_size = batch
    model = build_model(cfg.model, V, V - 1).to(device).train()
    step_module = Step(model)
    if which == "ours":
        parallelise(step_module, cfg.train, ranks)
    objective = make_objective(cfg.objective, cfg.noise, V - 1, cfg.seed, cfg.model)
    ema, guard = Ema(step_module, cfg.optim.ema), GradientGuard(device)
    update = Updater(cfg.optim, step_module, ema, guard)
    host = [Batch(rows.numpy(), None, np.arange(batch)) for rows in data]
    # as at the end of a run, where gamma no longer rises
    tasks = corrupted_batches(objective, itertools.cycle(host), cfg.train.steps, cfg, ranks)

    def step(i: int) -> Tensor:
        _, micro_batches = next(tasks)
        count, nats = sum(micro_batch.count for micro_batch in micro_batches), torch.zeros((), device=device)
        for micro_batch in (on_device(part, device) for part in micro_batches):
            with ranks.autocast():
                total = step_module(micro_batch).total if which == "ours" else dense_loss(model, micro_batch)
            (total / count).backward()
            nats += total.detach()
        update(min(1.0, (i + 1) / (warmup + 1)))
        return nats / count

    before, timed = steps
    losses = [step(i) for i in range(before)]
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    for _ in range(timed):
        losses.append(step(len(losses)))
        clock.lap()
    laps = clock.laps()
    seconds = statistics.median(laps)
    scored = Counter[str]()
    for micro_batch in next(tasks)[1]:
        scored.update({term.head: len(term.positions_N) for term in micro_batch.terms.values()})
    flops = training_flops(cfg, model, scored, batch)
    result = {
        "ms": 1e3 * seconds,
        "mean_ms": 1e3 * statistics.mean(laps),
        "tokens_per_s": batch * L / seconds,
        "flops": flops,
        "parameters": parameter_count(model),
        "peak_gib": peak_memory_gib(device, cfg.train.cuda_graphs and which == "ours"),
        "losses": [round(x.item(), 4) for x in losses],
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return result | ({"mfu": flops / seconds / peak, "attention": attention_kernel()} if peak else {})


def training_flops(cfg: Config, model: Network, scored: Counter[str], batch: int) -> float:
    """FLOPs of one step, counting only the positions that each head reads."""
    tokens = batch * cfg.model.length
    predicted, anchors = scored["denoiser"] / tokens, scored["anchor"] / tokens
    flops = count_flops(cfg.model, model.vocab_size, cfg.model.length, scored=predicted, anchors_scored=anchors)
    return flops.training_per_token * tokens


def measure_sample(cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """Time steps of a sampler; `which`: ours or dense."""
    require(not cfg.model.causal, f"adlm bench sample times samplers of diffusion models; algo={cfg.algo} is causal")
    torch.manual_seed(cfg.seed)
    device = pick_device(cfg.train.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    elif cfg.train.num_threads > 0:
        torch.set_num_threads(cfg.train.num_threads)
    V = vocabulary_size(cfg.data.tokenizer)
    model = build_model(cfg.model, V, V - 1)
    for weight in (p for n, p in model.named_parameters() if ".modulation." in n):
        torch.nn.init.normal_(weight, std=0.02)  # a fresh model is the identity, and some kernels treat zeros specially
    # logits with a standard deviation of 4, as peaked as a trained model's: a nucleus is a small part of the vocabulary
    torch.nn.init.normal_(model.head.weight, std=4 / cfg.model.hidden_size**0.5)
    model = model.to(device).eval().requires_grad_(False)
    return (engine_steps if which == "ours" else reference_steps)(cfg, model, batch, device)


def engine_steps(cfg: Config, model: Network, batch: int, device: torch.device) -> dict[str, Any]:
    """Time bench.steps network evaluations of a batch. If the sampler reads predictions, they decide the number of
    evaluations, so the batch is run to its end."""
    s, schedule = with_sampler(cfg.sampling, cfg.objective, cfg.model), make_schedule(cfg.noise)
    length, plan = s.length or cfg.model.length, make_sampler(s, schedule)
    compile = {"block": "true", "max": "true"}.get(cfg.train.compile, cfg.train.compile)
    engine = Engine(model, schedule, slots=batch, device=device, compile=compile, tau=cfg.objective.tau)
    began = time.perf_counter()
    engine.evaluator.warm_up(length, least=batch // 2)  # some sequences of an evaluation may have nothing to reveal
    synchronize(device)
    warm_up = time.perf_counter() - began
    for seed in range(batch):
        engine.submit(Request([model.mask_id] * length, s, seed=seed))
    for _ in range(WARM_UP):
        engine.step()
    synchronize(device)
    evaluations, began = 0, time.perf_counter()
    while engine.busy and (plan.reads or evaluations < cfg.bench.steps):
        engine.step()
        evaluations += 1
    synchronize(device)
    seconds = time.perf_counter() - began
    require(
        evaluations > 0,
        f"sampling.steps={s.steps} is over in {WARM_UP} evaluations of warm-up: give more, and a longer model.length",
    )
    nfe = WARM_UP + evaluations
    if not plan.reads:
        nfe = sum(1 for _ in plan.trajectory(np.arange(length), 0))
    whole = seconds / evaluations * nfe
    result = {
        "ms_per_evaluation": 1e3 * seconds / evaluations,
        "ms_per_step": 1e3 * whole / s.steps,
        "sequences_per_s": batch / whole,
        "nfe": nfe,
        "warm_up_s": warm_up,
    }
    return result | peak_gib(device)


@torch.inference_mode()
def reference_steps(cfg: Config, model: Network, batch: int, device: torch.device) -> dict[str, Any]:
    """Time steps of the reference implementation, from the middle of the process."""
    s, schedule = with_sampler(cfg.sampling, cfg.objective, cfg.model), make_schedule(cfg.noise)
    length, plan = s.length or cfg.model.length, make_sampler(s, schedule)
    require(
        isinstance(plan, Scheduled),
        f"sampling.sampler={s.sampler!r} has no reference implementation to compare with; use bench.dense=false",
    )
    assert isinstance(plan, Scheduled)
    generator = torch.Generator(device).manual_seed(0)
    half = torch.rand(batch, length, device=device, generator=generator) < 0.5
    z = torch.randint(0, model.mask_id, (batch, length), device=device, generator=generator)
    z = torch.where(half, model.mask_id, z)
    steps, alpha_t = len(plan.rates.reveal), 0.5
    sigma_B = noise_level(torch.full((batch,), 1 - alpha_t, device=device), schedule)

    def step(i: int) -> None:
        at = (steps // 2 + i) % steps
        remask, reveal = plan.rates.remask[at].item(), plan.rates.reveal[at].item()
        noise = torch.rand(batch, length, model.vocab_size, device=device, dtype=torch.float64, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            alpha_s = reveal * (1 - alpha_t) + (1 - remask) * alpha_t
            dense_step(model, z, alpha_s, alpha_t, remask, s.top_p, noise, sigma_B)

    step(0)
    synchronize(device)
    began = time.perf_counter()
    for i in range(REFERENCE_STEPS):
        step(i)
    synchronize(device)
    seconds = (time.perf_counter() - began) / REFERENCE_STEPS
    return {"ms_per_step": 1e3 * seconds, "sequences_per_s": batch / (seconds * s.steps)} | peak_gib(device)


def peak_gib(device: torch.device) -> dict[str, float]:
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}


class Clock:
    """Measures seconds between laps. On a GPU the device records the time when it gets there, and the host does not
    wait: a step is timed as it runs in training, with the next one already queued."""

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


# ---- the reference implementation: every position, every logit, the bridge as the paper draws it --------------------


def dense_logits(model: Network, tokens_BL: Tensor, sigma_B: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Denoiser logits and anchor logits (or None), the anchor logits formed and projected back to the width."""
    x = F.embedding(tokens_BL, model.embedding)
    anchor_logits = None
    if model.anchor is not None and model.anchor_head is not None and model.bridge is not None:
        stream, normed = model.anchor(x, sigma_B)
        anchor_logits = F.linear(normed, model.anchor_head.weight, model.anchor_head.bias)
        x = model.bridge.from_logits(stream, anchor_logits)
    hidden = model.denoiser(x, sigma_B).normed_BLD
    return F.linear(hidden, model.head.weight, model.head.bias), anchor_logits


def dense_loss(model: Network, task: CorruptedBatch) -> Tensor:
    """The loss of a corrupted batch, from all logits; weights are zero where nothing is scored."""
    z, V = task.tokens_BL, model.vocab_size
    logits, anchor_logits = dense_logits(model, z, task.sigma_B)
    total = torch.zeros((), device=z.device)
    for name, term in task.terms.items():
        require(
            term.chunk_loss is cross_entropy_chunk,
            f"the loss {name!r} has no reference implementation to compare with; use bench.dense=false",
        )
        values = logits if term.head == "denoiser" else anchor_logits
        assert values is not None
        values = values.float().view(-1, V)
        if term.exclude is not None:
            values = values.clone()
            values[:, term.exclude] -= 1e6
        at_N = (term.positions_N,)
        weight = torch.zeros(z.numel(), device=z.device).index_put(at_N, term.weights_N)
        target = torch.zeros(z.numel(), dtype=torch.long, device=z.device).index_put(at_N, term.targets_N)
        log_p = values.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
        total = total - term.scale * (log_p * weight).sum()
    return total


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Nucleus filter: the smallest set of most probable tokens with at least top_p, renormalised; by sorting."""
    ordered, token = p.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    kept = torch.zeros_like(p).scatter_(-1, token, ordered)
    return kept / kept.sum(-1, keepdim=True)


def dense_step(
    model: Network,
    z_BL: Tensor,
    alpha_s: float,
    alpha_t: float,
    sigma: float,
    top_p: float,
    noise: Tensor,
    sigma_B: Tensor | None = None,
) -> Tensor:
    """One step of Eq. 6 in a simple loop: distribution, nucleus filter and float64 noise at every position of every
    sequence. `sigma` is Eq. 6's probability of masking again, sigma_B the noise level for a time-conditioned model."""
    logits, _ = dense_logits(model, z_BL, sigma_B)
    logits = logits.float()
    logits[..., model.mask_id] = -1e6
    p = logits.softmax(-1) if top_p == 1 else nucleus(logits.softmax(-1), top_p)
    q = posterior(z_BL, p, alpha_s, alpha_t, model.mask_id, sigma)
    return (q.double() / (1e-10 - torch.log(noise + 1e-10))).argmax(-1)


# ---- the command -----------------------------------------------------------------------------------------------------
# `adlm bench train | sample`: how fast this machine trains and samples, compared with a reference implementation.
#
# A table for people, one JSON line for programs.

BENCHMARKS = {"train": measure_train, "sample": measure_sample}
SPEED = {"train": "ms", "sample": "ms_per_step"}


def run_bench(cfg: Config, args: list[str]) -> dict[str, Any]:
    """`adlm bench train | sample`: the table goes to stderr, one JSON line to stdout. The file `out` gets a line for
    each batch size as soon as it is measured, so that nothing is lost if the command ends early."""
    require(len(args) == 1, f"adlm bench wants one word, train or sample; got {' '.join(args) or 'none'}")
    name = choose("benchmark", args[0], tuple(BENCHMARKS))
    device = pick_device(cfg.train.device)
    require(device.type != "mps", "adlm bench measures CUDA devices and CPUs; use train.device=cpu")
    batches = [read_size(word) for word in cfg.bench.batches.split(",")]
    out = writable_file("out", Path(cfg.out)) if cfg.out else None
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    about = {"benchmark": name, "device": on, "torch": torch.__version__, "command": command_line()}
    results = {}
    for batch in batches:
        entry: dict[str, Any] = {}
        for which in ("dense", "ours") if cfg.bench.dense else ("ours",):
            print(f"{name}, {batch} sequences: {which}", file=sys.stderr, flush=True)
            entry[which] = alone(name, cfg, batch, which)
        if all(SPEED[name] in entry.get(which, ()) for which in ("dense", "ours")):
            entry["speedup"] = entry["dense"][SPEED[name]] / entry["ours"][SPEED[name]]
        results[str(batch)] = entry
        if out:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, "rows": {str(batch): entry}}) + "\n")
    Console(stderr=True).print(table(name, on, results))
    line = {**about, "rows": results}
    print(json.dumps(line))
    return line


def read_size(word: str) -> int:
    """Parse a number of sequences."""
    fits = word.strip().isdigit() and int(word) > 0
    require(fits, f"bench.batches wants numbers of sequences like 1,16,64; got {word!r}")
    return int(word)


def alone(name: str, cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """Measure with nothing of an earlier measurement in memory. Running out of memory is a result, not an error.

    On a GPU, memory is emptied and its peak reset. On a CPU the peak cannot be reset, so a fresh process measures.
    """
    if pick_device(cfg.train.device).type == "cuda":
        try:
            return BENCHMARKS[name](copy.deepcopy(cfg), batch, which)
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        finally:
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(BENCHMARKS[name], cfg, batch, which).result()
        except BrokenProcessPool:
            return {"failed": "the process died"}


def table(name: str, on: str, results: dict[str, Any]) -> Table:
    """The results as a table."""
    rate = "tokens_per_s" if name == "train" else "sequences_per_s"
    out = Table(title=f"{name}, {on}")
    figures = (SPEED[name].replace("_", " "), rate.replace("_per_", " / "), "peak GiB", "speedup")
    for heading in ("sequences", "", *figures):
        out.add_column(heading, justify="right")
    for batch, entry in results.items():
        for which in ("dense", "ours"):
            if which not in entry:
                continue
            r = entry[which]
            if "failed" in r:
                out.add_row(batch, which, r["failed"], "", "", "")
                continue
            memory = f"{r['peak_gib']:.2f}" if "peak_gib" in r else ""
            ratio = f"{entry['speedup']:.1f}x" if which == "ours" and "speedup" in entry else ""
            out.add_row(batch, which, f"{r[SPEED[name]]:,.2f}", f"{r[rate]:,.4g}", memory, ratio)
    return out

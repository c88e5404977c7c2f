"""One step of a sampler, ours and the dense twin's, with random weights.

Ours: the engine - positions first, head and draw only there, steps that reveal nothing skipped. The twin: what a
step-by-step loop does, at every position and every step. A step is one of the T steps of the sampler: ours has fewer
network evaluations than steps (`nfe`), and its time per step is the time of a whole row over T.
"""

import time
from typing import Any

import numpy as np
import torch

from adlm.bench.dense import dense_step
from adlm.bench.train import synchronize
from adlm.diffusion.schedules import make_schedule, noise_level
from adlm.engine import Engine, Request
from adlm.errors import require
from adlm.io.paths import pick_device
from adlm.models import Network, build_model
from adlm.samplers.base import make_sampler
from adlm.samplers.scheduled import Scheduled
from adlm.schema import Config


def measure_sample(cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """`which`: ours or dense."""
    require(not cfg.model.causal, f"adlm bench sample times samplers of diffusion models; algo={cfg.algo} is causal")
    torch.manual_seed(cfg.seed)
    device = pick_device(cfg.train.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    elif cfg.train.num_threads > 0:
        torch.set_num_threads(cfg.train.num_threads)
    model = build_model(cfg.model, cfg.bench.vocab_size, cfg.bench.vocab_size - 1)
    for weight in (p for n, p in model.named_parameters() if ".modulation." in n):
        torch.nn.init.normal_(weight, std=0.02)  # a model at its start is the identity, and some kernels know zeros
    # logits with a spread of 4: as peaked as a trained model's, so that a nucleus is a small part of the vocabulary
    torch.nn.init.normal_(model.head.weight, std=4 / cfg.model.hidden_size**0.5)
    model = model.to(device).eval().requires_grad_(False)
    return (engine_steps if which == "ours" else dense_steps)(cfg, model, batch, device)


def engine_steps(cfg: Config, model: Network, batch: int, device: torch.device) -> dict[str, Any]:
    """A batch of rows to the end, or for bench.evaluations network evaluations."""
    s, schedule = cfg.sampling, make_schedule(cfg.noise)
    length, plan = s.length or cfg.model.length, make_sampler(s, schedule)
    require(
        not plan.reads or not cfg.bench.evaluations,
        f"sampling.sampler={s.sampler} decides as it goes how often it looks: whole rows, bench.evaluations=0",
    )
    compile = {"block": "true", "max": "true"}.get(cfg.train.compile, cfg.train.compile)
    engine = Engine(model, schedule, slots=batch, device=device, compile=compile, tau=cfg.objective.tau)
    began = time.perf_counter()
    engine.evaluator.warm_up(length, least=batch // 2)  # some rows of an evaluation may have nothing to reveal
    synchronize(device)
    warm_up = time.perf_counter() - began
    for seed in range(batch):
        engine.submit(Request([model.mask_id] * length, s, seed=seed))
    for _ in range(cfg.bench.warmup):
        engine.step()
    synchronize(device)
    evaluations, began = 0, time.perf_counter()
    while engine.busy and (not cfg.bench.evaluations or evaluations < cfg.bench.evaluations):
        engine.step()
        evaluations += 1
    synchronize(device)
    seconds = time.perf_counter() - began
    require(evaluations > 0, f"bench.warmup={cfg.bench.warmup} leaves no evaluation of {s.steps} steps to time")
    nfe = cfg.bench.warmup + evaluations
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
def dense_steps(cfg: Config, model: Network, batch: int, device: torch.device) -> dict[str, Any]:
    """Steps from the middle of the process."""
    s, schedule = cfg.sampling, make_schedule(cfg.noise)
    length, plan = s.length or cfg.model.length, make_sampler(s, schedule)
    require(
        isinstance(plan, Scheduled),
        f"sampling.sampler={s.sampler!r} has no dense twin to compare with; use bench.dense=false",
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
    for i in range(cfg.bench.dense_steps):
        step(i)
    synchronize(device)
    seconds = (time.perf_counter() - began) / cfg.bench.dense_steps
    return {"ms_per_step": 1e3 * seconds, "sequences_per_s": batch / (seconds * s.steps)} | peak_gib(device)


def peak_gib(device: torch.device) -> dict[str, float]:
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}

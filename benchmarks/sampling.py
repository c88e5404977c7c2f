"""Sampling, ours against the dense loop, in one run: milliseconds per step and sequences per second, as one JSON line.

    python benchmarks/sampling.py                                             # CPU: nano, GPT-2 vocabulary
    python benchmarks/sampling.py --device cuda --model small --length 1024 --steps 1024 --batch 1 16 64

Ours: the engine (positions first, head and draw only there, steps that reveal nothing skipped). Dense: what a
step-by-step loop does - anchor logits formed and projected back, logits, cut and float64 noise at every position, at
every step. A step is one of the T steps of the sampler: ours has fewer network evaluations than steps (`nfe`), and its
time per step is the time of a whole row over T. Weights are random.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from dense import dense_logits  # noqa: E402

from adlm.diffusion.absorbing import remasking_posterior  # noqa: E402
from adlm.diffusion.categorical import filter_logits  # noqa: E402
from adlm.diffusion.schedules import LogLinear  # noqa: E402
from adlm.engine import Engine, Request  # noqa: E402
from adlm.engine.drawing import Cut  # noqa: E402
from adlm.models import build_model  # noqa: E402
from adlm.samplers import make_plan  # noqa: E402
from adlm.samplers.scheduled import Scheduled  # noqa: E402
from adlm.schema import ModelConfig, SamplingConfig  # noqa: E402

SIZES = {
    "nano": {"hidden_size": 128, "n_heads": 4, "n_blocks": 4, "n_denoiser_blocks": 2, "cond_dim": 32},
    "small": {},
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def ours(model, args, batch: int) -> dict:
    """A batch of rows through the engine, to the end or for `--evaluations` of them."""
    c = SamplingConfig(sampler=args.sampler, steps=args.steps, top_p=args.top_p, eta=args.eta)
    engine = Engine(model, slots=batch, device=args.device, compile=args.compile)
    mask = model.mask_id
    began = time.perf_counter()
    engine.network.warm_up(Cut(top_p=args.top_p < 1), args.length)
    warm_up = time.perf_counter() - began
    plan = make_plan(c, LogLinear())
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    done, evaluations = [], 0
    for seed in range(batch):
        engine.submit(Request([mask] * args.length, c, seed=seed))
    synchronize(args.device)
    began = time.perf_counter()
    while engine.busy and (not args.evaluations or evaluations < args.evaluations):
        done += engine.step()
        evaluations += 1
    synchronize(args.device)
    seconds = time.perf_counter() - began
    nfe = sum(1 for _ in plan.trajectory(np.arange(args.length), 0))
    per_evaluation = seconds / evaluations
    whole = seconds if not engine.busy else per_evaluation * nfe
    return {
        "ms_per_evaluation": per_evaluation * 1e3,
        "ms_per_step": whole / args.steps * 1e3,
        "sequences_per_s": batch / whole,
        "nfe": nfe,
        "evaluations_timed": evaluations,
        "warm_up_s": warm_up,
        "peak_gib": peak_gib(args.device),
    }


@torch.inference_mode()
def dense(model, args, batch: int) -> dict | None:
    """Eq. 6 at every position of every row, a few steps from the middle of the process."""
    c = SamplingConfig(sampler=args.sampler, steps=args.steps, top_p=args.top_p, eta=args.eta)
    plan = make_plan(c, LogLinear())
    assert isinstance(plan, Scheduled), "the dense loop knows the scheduled samplers"
    generator = torch.Generator(args.device).manual_seed(0)
    half = torch.rand(batch, args.length, device=args.device, generator=generator) < 0.5
    z = torch.randint(0, model.mask_id, (batch, args.length), device=args.device, generator=generator)
    z = torch.where(half, model.mask_id, z)
    middle = len(plan.t) // 2

    def step(i: int) -> None:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            logits, _ = dense_logits(model, z, None)
        logits = logits.float()
        logits[..., model.mask_id] = -1e6
        p = filter_logits(logits, top_p=args.top_p if args.top_p < 1 else None).exp()
        # any (alpha_s, alpha_t, sigma) with these rates costs the same
        a_t = 0.5
        sigma = plan.rates.remask[i].item()
        a_s = plan.rates.reveal[i].item() * (1 - a_t) + (1 - sigma) * a_t
        q = remasking_posterior(z, p, a_s, a_t, sigma, model.mask_id)
        u = torch.rand(q.shape, device=q.device, dtype=torch.float64, generator=generator)
        (q.double() / (1e-10 - torch.log(u + 1e-10))).argmax(-1)

    try:
        step(middle)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(args.device)
        began = time.perf_counter()
        for i in range(args.dense_steps):
            step(middle + i)
        synchronize(args.device)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    seconds = (time.perf_counter() - began) / args.dense_steps
    return {
        "ms_per_step": seconds * 1e3,
        "sequences_per_s": batch / (seconds * args.steps),
        "peak_gib": peak_gib(args.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="nano")
    parser.add_argument("--sampler", default="remdm-loop")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=128, help="T of the sampler")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--eta", type=float, default=0.02)
    parser.add_argument("--vocab", type=int, default=50258)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", default="auto", choices=("auto", "true", "graphs", "false"))
    parser.add_argument("--evaluations", type=int, default=0, help="time only this many network evaluations (0: all)")
    parser.add_argument("--dense-steps", type=int, default=3, help="dense steps to time (0: leave the dense loop out)")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
    cfg = ModelConfig(length=args.length, dropout=0.0, init="normal", **SIZES[args.model])
    model = build_model(cfg, args.vocab, args.vocab - 1)
    # logits with a spread of 4: as peaked as a trained model's, so that the nucleus is a small part of the vocabulary
    torch.nn.init.normal_(model.head.weight, std=4 / cfg.hidden_size**0.5)
    model = model.to(args.device).eval().requires_grad_(False)
    results = {}
    for batch in args.batch:
        result = {"ours": ours(model, args, batch)}
        if args.dense_steps:
            result["dense"] = dense(model, args, batch)
            if result["dense"]:
                result["speedup"] = result["dense"]["ms_per_step"] / result["ours"]["ms_per_step"]
        results[str(batch)] = result
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    settings = {k: v for k, v in vars(args).items() if k not in ("device", "batch")}
    line = {"benchmark": "sampling", "device": device, "torch": torch.__version__, **settings, "batch": results}
    print(json.dumps(line))


if __name__ == "__main__":
    main()

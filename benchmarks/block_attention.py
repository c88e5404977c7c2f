"""Attention of block diffusion on a GPU: flex_attention compared with a dense mask, forward and backward, and timed.

    python benchmarks/block_attention.py [--batch 32] [--length 1024]

Prints one JSON line: the largest differences in bf16 and float32, and milliseconds of both versions. Also compares one
compiled training step of a small network with the same step uncompiled and with a dense mask. Ends with status 1 if any
difference is larger than rounding.
"""

import argparse
import functools
import json
import sys

import torch
import torch._dynamo
from torch import Tensor

import adlm.models.network as network
from adlm.models.layers import allow_variants, milliseconds, training_options
from adlm.models.transformer import attend, training_mask
from adlm.objectives import Sequences, loss, make_objective
from adlm.objectives.base import on_device
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

LENGTHS = (1, 4, 16, 64, 1024)
HEADS, KV_HEADS, WIDTH = 9, 3, 64


def block_lengths(batch: int, length: int) -> Tensor:
    return torch.tensor([min(LENGTHS[i % len(LENGTHS)], length) for i in range(batch)], device="cuda")


def attention(batch: int, length: int, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    """Largest relative differences of output and gradients, and milliseconds of both versions."""
    torch.manual_seed(0)
    shapes = [(batch, heads, 2 * length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    qkv = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], device="cuda", dtype=dtype)
    found, times = {}, {}
    block_B = block_lengths(batch, length)

    def both_ways(tiled: bool) -> list[Tensor]:
        _, mask = training_mask(block_B, length, tiled)
        o = attend(qkv[0], qkv[1], qkv[2], mask)
        return [o, *torch.autograd.grad((o * weight).sum(), qkv)]

    results = {}
    for name, tiled in (("dense", False), ("flex", True)):
        results[name] = both_ways(tiled)
        times[name] = milliseconds(functools.partial(both_ways, tiled))
    for part, a, b in zip(("output", "grad_q", "grad_k", "grad_v"), results["dense"], results["flex"]):
        found[part] = ((a - b).float().norm() / a.float().norm()).item()
    return found, times


def step(anchored: bool, shift: bool, compiled: bool, tiled: bool) -> tuple[float, Tensor]:
    """Loss, and gradient of the embedding, of one training step of a small Llama-type network."""
    torch.manual_seed(0)
    cfg = ModelConfig(
        hidden_size=192, n_heads=3, n_kv_heads=1, n_blocks=4, n_denoiser_blocks=2, length=256, dropout=0.0,
        anchored=anchored, bridge="none", block_length="16,1,4,64,256", shift=shift, conditioning="none",
        norm="rmsnorm", activation="swiglu", bias=False, tied=True, init="normal", mlp_size=512,
    )  # fmt: skip
    model = network.build_model(cfg, 1000, 999).cuda()
    goal = ObjectiveConfig(name="anelbo" if anchored else "nelbo", gamma=0.1 * anchored, gamma_warmup=0.0)
    tokens_BL = torch.randint(0, 999, (10, cfg.length))
    objective = make_objective(goal, NoiseConfig(), 999, 0, cfg)
    batch = on_device(objective.corrupt(Sequences(tokens_BL, torch.arange(10), 10), 0, 0.5), torch.device("cuda"))
    network.training_mask = functools.partial(training_mask, tiled=tiled)
    if compiled:
        torch._dynamo.reset()
        allow_variants()
        model.compile(options=training_options(most=False), dynamic=False)
    total = loss(model, batch).total / batch.count
    total.backward()
    assert model.embedding.grad is not None
    return total.item(), model.embedding.grad.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    wrong = []
    small, _ = attention(5, 256, torch.float32)
    wrong += [f"attention {name}" for name, value in small.items() if value > 1e-4]
    large, times = attention(given.batch, given.length, torch.bfloat16)
    wrong += [f"attention in bf16 {name}" for name, value in large.items() if value > 2e-2]
    steps = {}
    for anchored, shift in ((False, True), (True, True), (False, False)):
        total, grad = step(anchored, shift, compiled=False, tiled=False)
        for compiled, tiled in ((False, True), (True, True)):
            other, other_grad = step(anchored, shift, compiled, tiled)
            off = max(abs(other / total - 1), ((other_grad - grad).norm() / grad.norm()).item())
            name = f"{'anchored' if anchored else 'plain'}{' shifted' * shift}{' compiled' * compiled}"
            steps[name] = off
            wrong += [f"step {name}"] if off > 1e-3 else []
    print(json.dumps({"float32": small, "bf16": large, "milliseconds": times, "steps": steps, "wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""One training step, ours against the dense twin, in one run: time, peak memory, loss. Prints one JSON line.

    python benchmarks/train_step.py                      # CPU: nano width, GPT-2 vocabulary
    python benchmarks/train_step.py --model small --batch 16 --device cuda

Ours: collapsed bridge, losses only at the positions that have one, chunked head. Dense: the same weights and the same
noise, anchor logits formed and projected back, every position through both heads, plain autograd. Each runs in a
process of its own (peak memory is a property of a process) with the same AdamW.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from dense import dense_logits  # noqa: E402

from adlm.models import build_model  # noqa: E402
from adlm.models.attention import choose_attention  # noqa: E402
from adlm.models.flops import count_flops, peak_flops  # noqa: E402
from adlm.objectives import Rows, loss, make_objective  # noqa: E402
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig, OptimConfig  # noqa: E402
from adlm.training.draw import ahead  # noqa: E402
from adlm.training.metrics import peak_memory_gib  # noqa: E402
from adlm.training.optim import Ema, apply_updates, build_optimizers, clip_gradients  # noqa: E402

SIZES = {
    "nano": {"hidden_size": 128, "n_heads": 4, "n_blocks": 4, "n_denoiser_blocks": 2, "cond_dim": 32},
    "small": {},
}
MODERN = {
    "bridge": "residual", "adaln": False, "norm": "rmsnorm", "qk_norm": True, "activation": "relu2", "bias": False,
    "zero_init": True, "init": "normal",
}  # fmt: skip


def dense_loss(model, task):
    """Every position through every head; weights are zero where there is no loss."""
    z, V = task.tokens_BL, model.vocab_size
    logits, anchor_logits = dense_logits(model, z, task.sigma_B)
    total = 0.0
    for name, values in (("nelbo", logits), ("anchor", anchor_logits)):
        if name not in task.terms:
            continue
        term = task.terms[name]
        values = values.float().view(-1, V)
        if term.exclude is not None:
            values = values.clone()
            values[:, term.exclude] -= 1e6
        log_p = values.log_softmax(-1)
        weight = torch.zeros(z.numel(), device=z.device).index_put((term.rows_N,), term.weights_N)
        target = torch.zeros(z.numel(), dtype=torch.long, device=z.device).index_put((term.rows_N,), term.targets_N)
        total = total - term.scale * (log_p.gather(1, target[:, None]).squeeze(1) * weight).sum()
    return total


def measure(args):
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    if cuda:
        torch.set_float32_matmul_precision("high")
    options = SIZES[args.model] | (MODERN if args.modern else {}) | ({} if args.anchored else {"anchored": False})
    cfg = ModelConfig(length=args.length, dropout=args.dropout, **options)
    model = build_model(cfg, args.vocab, args.vocab - 1).to(args.device).train()
    name = "anelbo" if args.anchored else "nelbo"
    positions = "masked" if args.masked_anchors else "all"
    goal = ObjectiveConfig(name=name, gamma_warmup=0.0, anchor_positions=positions)
    objective = make_objective(goal, NoiseConfig(), args.vocab - 1, seed=0)
    optim = OptimConfig(name="muon" if args.muon else "adamw")
    optimizers, ema = build_optimizers(optim, model), Ema(model, 0.9999)
    skip = torch.zeros((), device=args.device)
    rank = torch.arange(args.vocab - 1, dtype=torch.float64)
    zipf = 1 / (rank + 10)  # token frequencies like text's, so that the share of anchors is like text's
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(zipf, 8 * args.batch * args.length, replacement=True, generator=generator)
    data = draws.view(8, args.batch, args.length).to(args.device)
    example = torch.arange(args.batch, device=args.device)
    attention = choose_attention(args.attention, args.batch, cfg, torch.device("cuda")) if cuda else {}
    if args.residual == "bf16":
        model.residual_dtype = torch.bfloat16
    if args.compile and args.which == "ours":
        model.compile()

    def step(number):
        rows = Rows(data[number % 8], example, args.batch)
        (task,) = ahead(torch.device(args.device), lambda: [objective.draw(rows, number, 1.0)])
        with torch.autocast(args.device, torch.bfloat16, enabled=cuda):
            value = loss(model, task).total if args.which == "ours" else dense_loss(model, task)
        (value / task.count).backward()
        clip_gradients(list(model.parameters()), 1.0)
        apply_updates(optimizers, skip)
        ema.update()
        return value.detach() / task.count

    losses = [step(i) for i in range(args.warmup)]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses += [step(args.warmup + i) for i in range(args.steps)]
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / args.steps
    tokens = args.batch * args.length
    terms = objective.draw(Rows(data[0], example, args.batch), 0, 1.0).terms
    sizes = {name: len(term.rows_N) / tokens for name, term in terms.items()}
    flops = count_flops(cfg, args.vocab, args.length, scored=sizes["nelbo"], anchors_scored=sizes.get("anchor", 0.0))
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    result = {
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "peak_gib": peak_memory_gib(torch.device(args.device)),
        "loss": [round(x.item(), 5) for x in losses[:3]],
    }
    if attention:
        result["attention_ms"] = attention
    if peak:
        result["mfu"] = flops.training_per_token * tokens / seconds / peak
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="nano")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=50258)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile our model (the dense twin stays eager)")
    parser.add_argument("--modern", action="store_true", help="residual bridge, RMSNorm, QK-norm, squared ReLU")
    parser.add_argument("--residual", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--attention", choices=("auto", "flash", "cudnn", "any"), default="auto")
    parser.add_argument("--masked-anchors", action="store_true", help="anchor loss at masked positions only")
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--no-anchors", dest="anchored", action="store_false", help="one stack (MDLM)")
    parser.add_argument("--only", choices=("ours", "dense"), default=None)
    parser.add_argument("--which", choices=("ours", "dense"), default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.which:
        return measure(args)
    results = {}
    for which in [args.only] if args.only else ["dense", "ours"]:
        command = [sys.executable, __file__, *sys.argv[1:], "--which", which]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[which] = json.loads(output.splitlines()[-1])
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    line = {"benchmark": "train_step", "device": device, "torch": torch.__version__, **vars(args), **results}
    if len(results) == 2:
        line["time_ratio"] = results["dense"]["ms"] / results["ours"]["ms"]
        line["memory_ratio"] = results["ours"]["peak_gib"] / results["dense"]["peak_gib"]
    print(json.dumps(line))


if __name__ == "__main__":
    main()

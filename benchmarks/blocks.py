"""Generation in blocks compared with autoregressive decoding of the same weights: tokens per second, in one run.

    python benchmarks/blocks.py MODEL [--judge FOLDER]                # a run folder or export that writes in blocks
    python benchmarks/blocks.py --random                              # random weights of SmolLM2-135M's shape
    python benchmarks/blocks.py --random --shape tiny --tokens 64     # small enough for a CPU

Autoregressive decoding is block length 1 in the same engine: one clean token per evaluation, with the same cache, the
same CUDA graphs and the same way of drawing. Blocks of `--block` tokens are drawn with 16, 8 and 4 evaluations each
(`--evaluations`): by `mdlm`, which skips steps that draw nothing and so needs fewer, and by `confidence`, which draws
the most confident positions first and needs exactly that many. Batches of 1, 16 and 64 (`--batches`); every text has
`--tokens` new tokens after its prompt. The first texts of each kind are a warm-up and are not counted.

With `--judge` a causal model (a folder, a GGUF file, or a hub name) scores the texts of the largest batch: perplexity,
and entropy of tokens, at `--temperature` and `--top-p`. Texts of random weights are not judged.

Prints one line per setting, and one JSON document at the end (`--out` also writes it to a file).
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from adlm.api.language_model import load  # noqa: E402
from adlm.engine import Engine, Request, Result  # noqa: E402
from adlm.evaluation.judge import ReadingRule, open_judge, score_texts  # noqa: E402
from adlm.evaluation.measures import entropy  # noqa: E402
from adlm.io.paths import pick_device  # noqa: E402
from adlm.models import Network, build_model  # noqa: E402
from adlm.schema import ModelConfig, SamplingConfig  # noqa: E402

LLAMA: dict[str, Any] = {
    "anchored": False, "conditioning": "none", "norm": "rmsnorm", "norm_eps": 1e-5, "activation": "swiglu",
    "bias": False, "tied": True, "rope_base": 100_000.0, "dropout": 0.0, "shift": True, "init": "normal",
}  # fmt: skip
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "smollm2-135m": (49_153, {"hidden_size": 576, "n_heads": 9, "n_kv_heads": 3, "n_blocks": 30, "mlp_size": 1536}),
    "tiny": (2_001, {"hidden_size": 96, "n_heads": 6, "n_kv_heads": 2, "n_blocks": 4, "mlp_size": 256}),
}
FIELDS = ("method", "batch", "evaluations", "tokens_per_s", "ms_per_evaluation", "against_ar", "judge_ppl", "entropy")


def random_model(shape: str, block: int, length: int) -> Network:
    """A model with random weights, but with predictions as peaked as a trained model's, so that confidences differ."""
    vocab_size, sizes = SHAPES[shape]
    cfg = ModelConfig(**LLAMA, **sizes, length=length, block_length=f"{block},1")
    model = build_model(cfg, vocab_size, vocab_size - 1)
    with torch.no_grad():
        model.denoiser.norm.weight.mul_(4 / (0.02 * math.sqrt(cfg.hidden_size)))
    return model


def requests(
    given: list[int], mask_id: int, new: int, settings: SamplingConfig, first: int, n: int
) -> Iterator[Request]:
    return (Request([*given, *[mask_id] * new], settings, seed=first + i) for i in range(n))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(engine: Engine, asked: list[Request], device: torch.device) -> tuple[list[Result], float, int]:
    """Results, seconds and network calls of a batch of requests that start together."""
    for request in asked:
        engine.submit(request)
    synchronize(device)
    done, calls, began = [], 0, time.perf_counter()
    while engine.busy:
        done += [u for u in engine.step() if isinstance(u, Result)]
        calls += 1
    synchronize(device)
    return done, time.perf_counter() - began, calls


def measure(engine: Engine, case: dict[str, Any], args: argparse.Namespace, given: list[int]) -> dict[str, Any]:
    """One method at one batch size: the best of several repetitions."""
    device, batch = engine.evaluator.network_device, case["batch"]
    base = SamplingConfig(temperature=args.temperature, top_p=args.top_p, batch_size=batch)
    settings = replace(base, **case["settings"])
    make = lambda first: list(requests(given, engine.model.mask_id, args.tokens, settings, first, batch))  # noqa: E731
    timed(engine, make(10_000), device)  # compiles and captures; the shapes are those of the timed ones
    runs = [timed(engine, make(i * batch), device) for i in range(args.repeats)]
    seconds = min(seconds for _, seconds, _ in runs)
    results, _, calls = next(run for run in runs if run[1] == seconds)
    blocks = math.ceil((len(given) + args.tokens) / settings.block_length) - len(given) // settings.block_length
    return {
        "method": case["method"],
        "batch": batch,
        "evaluations": round(sum(r.nfe for r in results) / len(results) / blocks, 2),
        "tokens_per_s": round(batch * args.tokens / seconds, 1),
        "ms_per_evaluation": round(1e3 * seconds / calls, 4),
        "seconds": round(seconds, 4),
        "texts": [r.tokens for run in runs for r in run[0]],
    }


def cases(args: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    ar = {"sampler": "autoregressive", "block_length": 1}
    found = [{"method": "ar", "batch": batch, "settings": ar}]
    for T in args.evaluations:
        for sampler, more in (("mdlm", {}), ("confidence", {"threshold": 2.0})):  # one evaluation per step
            settings = {"sampler": sampler, "steps": T, "block_length": args.block, **more}
            found.append({"method": f"{sampler} K={args.block} T={T}", "batch": batch, "settings": settings})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="auto", help="auto, true, graphs or false, as the engine's")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="of random models")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--evaluations", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--judge", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.random == bool(args.model):
        raise SystemExit("give a model, or --random")
    torch.manual_seed(0)
    device = pick_device(args.device)
    lm = None if args.random else load(args.model, str(device))
    model = random_model(args.shape, args.block, args.length).to(device).eval() if lm is None else lm.model
    given = [1] if lm is None else [lm.tokenizer.bos_id, *lm.tokenizer.encode(args.prompt)]
    args.tokens += -(len(given) + args.tokens) % args.block  # whole blocks
    rows: list[dict[str, Any]] = []
    print("  ".join(f"{name:>18}" for name in FIELDS))
    for batch in args.batches:
        engine = Engine(
            model.requires_grad_(False), slots=batch, device=device, precision=args.precision, compile=args.compile
        )
        for case in cases(args, batch):
            row = measure(engine, case, args, given)
            ar = next((r for r in rows if r["method"] == "ar" and r["batch"] == batch), row)
            row["against_ar"] = round(row["tokens_per_s"] / ar["tokens_per_s"], 3)
            rows.append(row)
            if lm is None or batch < max(args.batches):
                print("  ".join(f"{row.get(name, ''):>18}" for name in FIELDS), flush=True)
        del engine
    if lm is not None:
        judge = open_judge(args.judge, device) if args.judge else None
        for row in [r for r in rows if r["batch"] == max(args.batches)]:
            row["entropy"] = round(sum(map(entropy, row["texts"])) / len(row["texts"]), 3)
            if judge is not None:
                rule = ReadingRule("text", lm.tokenizer, lm.length)
                scored = score_texts(judge, [rule.read(judge, tokens) for tokens in row["texts"]], 8)
                row["judge_ppl"] = round(math.exp(scored.nats_N.sum() / scored.tokens_N.sum()), 2)
            print("  ".join(f"{row.get(name, ''):>18}" for name in FIELDS), flush=True)
    for row in rows:
        del row["texts"]
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }
    found = {"benchmark": "blocks", **vars(args), "model": args.model or f"random {args.shape}", **about, "rows": rows}
    print(json.dumps(found))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""The tables of docs/scale.md: a run predicted for 8, 64 and 1,024 GPUs, and failures simulated.

python benchmarks/prediction.py                          # the tables
adlm bench train model=small bench.batches=8,16,32,64 bench.dense=false train.residual=bf16 out=h200.jsonl
python benchmarks/prediction.py --measured h200.jsonl    # on a GPU: each step, predicted by the constants of 16 and 64
"""

import argparse
from pathlib import Path

from adlm import config
from adlm.training.prediction import (
    HOST_BYTES_PER_SECOND,
    RESTART_SECONDS,
    best_interval,
    card,
    demands,
    expected_seconds,
    predict,
    read_bench,
    simulate,
)

EXPERIMENT = "experiment=adlm-owt-262b"
RUNS = {8: (), 64: (), 512: (), 1024: ("train.global_batch_size=1024", "train.steps=500000")}


def predictions() -> None:
    print(
        "| GPUs | strategy | ms per step | tokens/s | GiB per GPU | GiB sent | hours | GPU hours | checkpoint.every |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for gpus, more in RUNS.items():
        cfg = config.load([EXPERIMENT, f"cluster.gpus={gpus}", *more])
        for strategy in ("ddp", "fsdp", "hsdp"):
            r = predict(cfg, strategy, card("h200"))
            print(
                f"| {gpus:,} | {strategy} | {r.step_ms:.1f} | {r.tokens_per_s:,.0f} | {r.memory_gib:.1f} |"
                f" {r.sent_gib:.2f} | {r.hours:.2f} | {r.gpu_hours:,.0f} | {r.checkpoint_every:,} |"
            )


def simulations(runs: int) -> None:
    """1,024 GPUs, 30 days of work: the formula, and the mean of simulated runs."""
    parameters, _ = demands(config.load([EXPERIMENT]))
    work, R = 30 * 86400.0, RESTART_SECONDS
    print(
        "\n| hours until a GPU fails | a save, s | interval, s | failures | days, formula | days, simulated | apart |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for mtbf in (50_000, 10_000, 1_000):
        for delta in (16 * parameters / HOST_BYTES_PER_SECOND, 60.0):
            M = mtbf * 3600 / 1024
            tau = best_interval(delta, M)
            expected = expected_seconds(work, tau, delta, R, M)
            found = [simulate(work, tau, delta, R, 1024, mtbf * 3600, seed) for seed in range(runs)]
            mean = sum(f.seconds for f in found) / runs
            failures = sum(f.failures for f in found) / runs
            print(
                f"| {mtbf:,} | {delta:.2f} | {tau:,.0f} | {failures:,.1f} | {expected / 86400:.2f} |"
                f" {mean / 86400:.2f} | {mean / expected - 1:+.2%} |"
            )


def held_against(path: Path) -> None:
    on = card("h200")
    print("\n| parameters | FLOPs | measured, ms | predicted, ms | apart |\n|---:|---:|---:|---:|---:|")
    for m in read_bench(path)[0]:
        ms = 1e3 * on.step(m.flops, m.parameters)
        apart = ms / 1e3 / m.seconds - 1
        print(f"| {m.parameters:,.0f} | {m.flops:.4g} | {1e3 * m.seconds:.2f} | {ms:.2f} | {apart:+.1%} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="file of `adlm bench train ... out=FILE`")
    parser.add_argument("--runs", type=int, default=50, help="simulated for each row")
    arguments = parser.parse_args()
    if arguments.measured:
        held_against(arguments.measured)
    else:
        predictions()
        simulations(arguments.runs)

"""`adlm bench train | sample`: how fast this machine trains and samples, beside a reference implementation.

A table for people, one JSON line for programs; measure.py has the optimizer step and the step of a sampler.
"""

import copy
import gc
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from rich.console import Console
from rich.table import Table

from adlm.bench.measure import measure_sample, measure_train
from adlm.errors import choose, require
from adlm.io.paths import pick_device, writable_file
from adlm.schema import Config
from adlm.training.loop import command_line

BENCHMARKS = {"train": measure_train, "sample": measure_sample}
SPEED = {"train": "ms", "sample": "ms_per_step"}


def run_bench(cfg: Config, args: list[str]) -> dict[str, Any]:
    """`adlm bench train | sample`: the table goes to stderr, one JSON line to stdout. The file `out` gets a line for
    each batch size as soon as that is measured, so that what ends early loses nothing."""
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
    """A number of sequences."""
    fits = word.strip().isdigit() and int(word) > 0
    require(fits, f"bench.batches wants numbers of sequences like 1,16,64; got {word!r}")
    return int(word)


def alone(name: str, cfg: Config, batch: int, which: str) -> dict[str, Any]:
    """Measure with nothing of an earlier measurement left in memory. Out of memory is a result.

    On a GPU that takes emptying its memory, whose peak can be reset; on a CPU, where it cannot, a fresh process.
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
    """The results as people read them."""
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

"""`adlm train --dry-run gpus=64 gpu=h200`: predict a run on other GPUs.

A step has three parts.
  arithmetic   the method's FLOPs, divided by the FLOP/s that a GPU was measured to reach, plus a time per parameter
               (update, EMA, casts). Both constants are fitted to steps that `adlm bench train` measured on one card.
  traffic      bytes that every GPU sends, divided by the bandwidth of its links. Collectives are hierarchical, like
               NCCL's: first inside a node, then every GPU of a node sends its part to the other nodes.
  overlap      gradients are sent during the backward pass of the last micro-batch, gathered weights during any pass;
               traffic that does not fit into that time adds to the step.
Memory is `setup.memory_estimate`; the formula below gives the time lost by failures. Every assumption is printed with
the result.
"""

import heapq
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from adlm.errors import choose, require
from adlm.io.paths import path_of
from adlm.models import build_model
from adlm.models.layers import PEAK_FLOPS
from adlm.models.network import parameter_count
from adlm.objectives import Sequences, make_objective
from adlm.schema import ClusterConfig, Config, TrainConfig
from adlm.schema_commands import GPT2_VOCABULARY
from adlm.training.setup import average_flops, memory_estimate, text_like

# ---- failures --------------------------------------------------------------------------------------------------------
# How often to save when GPUs fail: the formula of Young and Daly, and a simulation to compare it with.
#
# A run of n GPUs fails when one of them does. With exponential failures of mean time m for one GPU that is a mean time
# M = m / n between failures of the run. Saving takes delta seconds of training, a restart R. An interval of tau seconds
# of work between two checkpoints makes a run with W seconds of work last, on average,
#
#     T = M exp(R / M) (exp((tau + delta) / M) - 1) W / tau                 J. T. Daly, 2006, equation 20
#
# which is smallest near tau = sqrt(2 delta M) (J. W. Young, 1974), or, for larger delta / M, Daly's longer series.


def best_interval(delta: float, M: float) -> float:
    """Seconds of work between two checkpoints (Daly's equation 37; Young's is its first term)."""
    if delta >= 2 * M:
        return M
    root = math.sqrt(delta / (2 * M))
    return math.sqrt(2 * delta * M) * (1 + root / 3 + root**2 / 9) - delta


def expected_seconds(work: float, tau: float, delta: float, R: float, M: float) -> float:
    """How long a run lasts on average, failures included."""
    return M * math.exp(R / M) * math.expm1((tau + delta) / M) * work / tau


class Outcome(NamedTuple):
    """A simulated run."""

    seconds: float
    failures: int
    lost: float
    """Seconds of work that were done again."""


def simulate(work: float, tau: float, delta: float, R: float, gpus: int, m: float, seed: int = 0) -> Outcome:
    """Simulate one run event by event. Every GPU has its own time of the next failure. After a failure the run takes R
    seconds to restart, again R if it fails meanwhile, and continues from its last complete checkpoint; a fresh GPU
    replaces the one that failed."""
    rng = random.Random(seed)
    clocks = [(rng.expovariate(1 / m), gpu) for gpu in range(gpus)]
    heapq.heapify(clocks)
    now = saved = lost = 0.0
    failures = 0
    while True:
        segments = math.ceil((work - saved) / tau)
        at, gpu = clocks[0]
        end = now + (work - saved) + segments * delta
        if end <= at:
            return Outcome(end, failures, lost)
        if at > now:  # else it failed during the restart
            whole = min(math.floor((at - now) / (tau + delta)), segments)
            lost += min(at - now - whole * (tau + delta), tau)
            saved += whole * tau
        failures += 1
        heapq.heapreplace(clocks, (at + rng.expovariate(1 / m), gpu))
        now = at + R


# ---- the prediction --------------------------------------------------------------------------------------------------

PER_NODE = 8
"""GPUs per node."""
HOST_BYTES_PER_SECOND = 10e9
"""From a GPU to its host's memory; training waits while a checkpoint is copied there."""
RESTART_SECONDS = 240.0
"""From a failure to the next step: detecting it, joining again, loading, compiling."""
LATENCY = 5e-6
"""Seconds per collective and doubling of the ranks, whatever the bandwidth."""
BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sends at once."""


class Measured(NamedTuple):
    """One optimizer step as measured by `adlm bench train`."""

    flops: float
    parameters: float
    seconds: float


# docs/results.md: model=small train.residual=bf16, 16 and 64 sequences of 1024 tokens
MEASURED = {
    "h200": (Measured(20.363e12, 293.189e6, 52.03e-3), Measured(81.378e12, 293.189e6, 187.4e-3)),
}


class Links(NamedTuple):
    """Bytes per second that one GPU sends to the others of its node, and to other nodes."""

    inside: float = 450e9
    """NVLink 4."""
    between: float = 50e9
    """400 Gbit/s per GPU."""


class Card(NamedTuple):
    """What a step costs on one GPU."""

    name: str
    seconds_per_flop: float
    seconds_per_parameter: float
    source: str
    links: Links = Links()
    hours_to_failure: float = 50_000.0
    """Mean time of one GPU."""

    def compute(self, flops: float) -> float:
        return self.seconds_per_flop * flops

    def step(self, flops: float, parameters: float) -> float:
        """Seconds of a step in one process."""
        return self.compute(flops) + self.seconds_per_parameter * parameters


def fit(steps: Sequence[Measured]) -> tuple[float, float]:
    """Seconds per FLOP and per parameter, by least squares of relative errors. Steps of one size determine only their
    sum, so then everything counts as arithmetic."""
    rows = [(s.flops / s.seconds, s.parameters / s.seconds) for s in steps]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-6 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x > 0 and y >= 0:
            return x, y
    return a / aa, 0.0


def card(gpu: str) -> Card:
    """A GPU by name, or by the file that `adlm bench train ... out=FILE` wrote on it."""
    if path_of(gpu).is_file():
        steps, figures = read_bench(path_of(gpu))
        return Card(Path(gpu).stem, *fit(steps), f"fitted to {len(steps)} steps of {gpu}", **figures)
    name = choose("cluster.gpu", gpu.lower(), [known.lower() for known in PEAK_FLOPS])
    per_flop, per_parameter = fit(MEASURED.get(name, MEASURED["h200"]))
    if name in MEASURED:
        return Card(name, per_flop, per_parameter, f"fitted to {len(MEASURED[name])} steps in docs/results.md")
    ratio = PEAK_FLOPS["H200"] / PEAK_FLOPS[name.upper()]
    source = "an H200's constants, scaled by the peak FLOP/s: never measured; gpu=FILE of `adlm bench train` is better"
    return Card(name, per_flop * ratio, per_parameter * ratio, source)


def read_bench(path: Path) -> tuple[list[Measured], dict[str, Any]]:
    """Read the steps in a file of `adlm bench train ... out=FILE`, and the GPU's other figures from a line added to it:
    {"links": [450, 50], "hours_to_failure": 50000}, links in GB/s."""
    found: list[Measured] = []
    figures: dict[str, Any] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            if "links" in told:
                inside, between = (1e9 * float(speed) for speed in told["links"])
                figures["links"] = Links(inside, between)
            if "hours_to_failure" in told:
                figures["hours_to_failure"] = float(told["hours_to_failure"])
            entries = [entry["ours"] for entry in told.get("rows", {}).values() if "ours" in entry]
            found += [Measured(e["flops"], e["parameters"], e["ms"] / 1e3) for e in entries if "flops" in e]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"cluster.gpu={str(path)!r} is not a file of `adlm bench train ... out=FILE`") from None
    require(bool(found), f"cluster.gpu={str(path)!r} holds no measured training step")
    positive = min(*figures.get("links", Links()), figures.get("hours_to_failure", 1.0)) > 0
    require(positive, f"cluster.gpu={str(path)!r}: links and hours_to_failure must be above 0")
    return found, figures


class Traffic(NamedTuple):
    """What one GPU sends in a step."""

    inside: float
    """Bytes to the others of its node."""
    between: float
    """Bytes to other nodes."""
    collectives: int

    def seconds(self, links: Links, ranks: int) -> float:
        latency = LATENCY * math.log2(ranks) * self.collectives if ranks > 1 else 0.0
        return self.inside / links.inside + self.between / links.between + latency

    def __add__(self, other: Any) -> "Traffic":
        return Traffic(*(a + b for a, b in zip(self, other)))


def gather(size: float, inside: int, nodes: int, collectives: int = 1) -> Traffic:
    """All-gather or reduce-scatter of `size` bytes over all ranks; an all-reduce is one of each. Every GPU receives
    what it lacks; data of other nodes enters a node once, an equal part through every GPU."""
    return Traffic(size * (inside - 1) / inside, size * (nodes - 1) / nodes / inside, collectives)


def traffic(strategy: str, size: float, ranks: int, blocks: int, micro_batches: int) -> tuple[Traffic, Traffic]:
    """(traffic that any pass can overlap, traffic that only the last backward pass can overlap) for weights of `size`
    bytes in float32."""
    inside = min(ranks, PER_NODE)
    nodes = ranks // inside
    none = Traffic(0, 0, 0)
    if strategy == "ddp":
        # one all-reduce per bucket
        return none, gather(size, inside, nodes, math.ceil(size / BUCKET)) + gather(size, inside, nodes, 0)
    over = (inside, nodes) if strategy == "fsdp" else (inside, 1)
    weights = gather(size, *over, blocks)
    gathered = none
    for _ in range(2 * micro_batches):  # before the forward and again before the backward pass
        gathered += weights
    gradients = gather(size, *over, blocks)
    if strategy == "hsdp":
        gradients += gather(size / inside, 1, nodes, blocks) + gather(size / inside, 1, nodes, 0)
    return gathered, gradients


class Predicted(NamedTuple):
    strategy: str
    step_ms: float
    waiting_ms: float
    """Part of a step spent waiting for traffic."""
    tokens_per_s: float
    mfu: float | None
    memory_gib: float
    sent_gib: float
    """Sent by one GPU per step."""
    sent_between_gib: float
    """The part of it that goes to other nodes."""
    checkpoint_every: int
    """Steps between checkpoints, by Young and Daly."""
    hours: float
    """The whole run, failures and saving included."""
    failures: float
    """Expected number in that time."""
    gpu_hours: float


def predict(cfg: Config, strategy: str, on: Card) -> Predicted:
    """Predict a run with one strategy."""
    t, n, links = cfg.train, cfg.cluster.gpus, on.links
    parameters, flops_per_token = demands(cfg)
    alone = TrainConfig(global_batch_size=t.global_batch_size, batch_size=per_pass(cfg))
    tokens = t.global_batch_size * cfg.model.length
    most = -(-t.global_batch_size // n) * cfg.model.length * flops_per_token  # for ranks with one sequence more
    micro_batches = alone.micro_batches(n)
    arithmetic = on.compute(most)
    size = 4.0 * parameters
    blocks = cfg.model.n_blocks + (cfg.model.n_denoiser_blocks if cfg.model.anchored else 0)
    anytime, late = traffic(strategy, size, n, blocks, micro_batches)
    wait_anytime = max(0.0, anytime.seconds(links, n) - arithmetic)
    wait_late = max(0.0, late.seconds(links, n) - arithmetic * 2 / 3 / micro_batches)
    waiting = wait_anytime + wait_late
    step = on.step(most, parameters) + waiting
    shards = {"ddp": 1, "fsdp": n, "hsdp": min(n, PER_NODE)}[strategy]
    memory = memory_estimate(cfg, parameters, parameters, 2 * alone.at_once(n), shards)
    saved = 4 * parameters * (4 if cfg.optim.ema else 3) / shards
    delta, M = saved / HOST_BYTES_PER_SECOND, on.hours_to_failure * 3600 / n
    tau = best_interval(delta, M)
    every = max(1, round(tau / step))
    work = step * t.steps
    seconds = expected_seconds(work, every * step, delta, RESTART_SECONDS, M)
    sent = anytime + late
    peak = PEAK_FLOPS.get(on.name.upper())
    return Predicted(
        strategy, 1e3 * step, 1e3 * waiting, tokens / step,
        flops_per_token * tokens / step / n / peak if peak else None, memory,
        (sent.inside + sent.between) / 2**30, sent.between / 2**30, every, seconds / 3600, seconds / M,
        seconds / 3600 * n,
    )  # fmt: skip


def per_pass(cfg: Config) -> int:
    """Sequences per forward pass if set, else 0: a value derived from the ranks of this machine does not count."""
    return cfg.train.batch_size if cfg.train.batch_size != cfg.train.global_batch_size else 0


def demands(cfg: Config) -> tuple[int, float]:
    """Parameters, and FLOPs per token, without the data: text-like tokens replace it."""
    vocabulary = GPT2_VOCABULARY
    with torch.device("meta"):
        model = build_model(cfg.model, vocabulary, vocabulary - 1)
    objective = make_objective(cfg.objective, cfg.noise, vocabulary - 1, cfg.seed, cfg.model)
    tokens_BL = text_like((16, cfg.model.length), vocabulary)
    clean = Sequences(tokens_BL, torch.arange(len(tokens_BL)), len(tokens_BL), None)
    return parameter_count(model), average_flops(cfg, objective, clean, vocabulary)


def run_prediction(cfg: Config) -> dict[str, Any]:
    """Print and return the predictions of all strategies, with what they assume."""
    c = cfg.cluster
    check(c, cfg.train)
    on = card(c.gpu)
    rows = [predict(cfg, strategy, on) for strategy in ("ddp", "fsdp", "hsdp")]
    said = assumptions(cfg, on)
    show(cfg, rows, said)
    return {"gpus": c.gpus, "gpu": on.name, "predicted": [row._asdict() for row in rows], "assumptions": said}


def check(c: ClusterConfig, t: TrainConfig) -> None:
    nodes = -(-c.gpus // PER_NODE)
    require(
        c.gpus <= PER_NODE or c.gpus % PER_NODE == 0,
        f"cluster.gpus={c.gpus} must be at most {PER_NODE}, or a multiple of it: nodes of {PER_NODE} are predicted"
        f" ({nodes * PER_NODE} would be)",
    )
    require(
        t.global_batch_size >= c.gpus,
        f"train.global_batch_size={t.global_batch_size} leaves nothing to do for some of cluster.gpus={c.gpus}; as many"
        f" tokens in larger batches: train.global_batch_size={c.gpus} train.steps="
        f"{max(1, t.steps * t.global_batch_size // c.gpus)}",
    )


def assumptions(cfg: Config, on: Card) -> list[str]:
    """The assumptions behind the numbers, one line each."""
    efficiency = PEAK_FLOPS.get(on.name.upper(), 0) * on.seconds_per_flop
    reached = f" ({1 / efficiency:.0%} of its peak)" if efficiency else ""
    said = [
        f"one {on.name}: {1e-12 / on.seconds_per_flop:,.0f} TFLOP/s{reached} and"
        f" {1e12 * on.seconds_per_parameter:.1f} ps per parameter, {on.source}",
        f"nodes of {PER_NODE}; a GPU sends {on.links.inside / 1e9:g} GB/s inside its node and"
        f" {on.links.between / 1e9:g} GB/s to others; a collective takes {LATENCY * 1e6:g} us more for each doubling of"
        " the ranks",
        "gradients overlap with the last backward pass, gathered weights with any; weights and gradients are float32",
        f"vocabulary of {GPT2_VOCABULARY:,}, text-like tokens; data is read as fast as it is needed",
        f"a GPU fails every {on.hours_to_failure:,.0f} hours on average, one failure stops the run; a restart takes"
        f" {RESTART_SECONDS:g} s, saving {HOST_BYTES_PER_SECOND / 1e9:g} GB/s of each GPU's part",
    ]
    if cfg.train.global_batch_size // cfg.cluster.gpus < 16:
        said.append("fewer than 16 sequences for a GPU: never measured, and the host may be slower than the GPU")
    return said


def show(cfg: Config, rows: list[Predicted], said: list[str]) -> None:
    c, t = cfg.cluster, cfg.train
    tokens = t.steps * t.global_batch_size * cfg.model.length
    title = f"predicted, not measured: {c.gpus:,} x {Path(c.gpu).stem}, {tokens / 1e9:,.1f}B tokens"
    table = Table("", *(row.strategy for row in rows), title=title, title_justify="left", box=None)
    lines: dict[str, list[str]] = {
        "ms per step": [f"{r.step_ms:,.1f}" for r in rows],
        "  of it waiting for others": [f"{r.waiting_ms:,.1f}" for r in rows],
        "tokens/s": [f"{r.tokens_per_s:,.0f}" for r in rows],
        "MFU": [f"{r.mfu:.2f}" if r.mfu else "" for r in rows],
        "memory per GPU, GiB": [f"{r.memory_gib:,.1f}" for r in rows],
        "sent by a GPU per step, GiB": [f"{r.sent_gib:,.2f}" for r in rows],
        "  of it to other nodes": [f"{r.sent_between_gib:,.2f}" for r in rows],
        "checkpoint.every (Young/Daly)": [f"{r.checkpoint_every:,}" for r in rows],
        "failures expected": [f"{r.failures:,.2f}" for r in rows],
        "hours": [f"{r.hours:,.2f}" for r in rows],
        "GPU hours": [f"{r.gpu_hours:,.0f}" for r in rows],
    }
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in lines.items():
        table.add_row(name, *values)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
    print("Assumed:\n" + "\n".join(f"- {line}" for line in said))

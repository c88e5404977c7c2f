"""`adlm ppl`: perplexity of a checkpoint, with errors, and everything needed to repeat it.

Diffusion models have a bound: the average over times (`continuous`) or over numbers of masks (`exact-count`) of a
weighted cross-entropy. Row r is seen at the D = eval.draws times (d + phase_r) / D, and the phases of all rows are
stratified over [0, 1): evenly spread over rows and draws together. With one draw and seed 0 the noise is that of the
validation during training. Causal models have an exact likelihood, and need no noise.

Batches do not depend on the number of ranks (whole batches are dealt out), so neither does any number.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from adlm.data import Blocks, Tokenizer, prepare
from adlm.diffusion.schedules import Schedule, draw_times, make_schedule, noise_level
from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import choose, require
from adlm.evaluation.intervals import Estimate, summarise
from adlm.evaluation.results import data_facts, model_facts, result_path, versions, write_result
from adlm.io.export import Loaded, section
from adlm.io.load import load_checkpoint
from adlm.models import Network
from adlm.objectives import CorruptedBatch, Sequences, Term, make_objective, sequence_bounds
from adlm.objectives.nelbo import VALIDATION_SEED
from adlm.schema import Config, DataConfig, EvalConfig
from adlm.training.draw import rows_on
from adlm.training.parallel import World, world

ESTIMATORS = ("continuous", "exact-count")
CHOICES_OF_ESTIMATORS = (*ESTIMATORS, "both")
# Tokens of one forward pass when train.valid_batch_size does not say how many rows.
BATCH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
# Keys of data=checkpoint that are not settings of the corpus: where things are, and how much of it is read.
BESIDE = ("name", "tokenizer", "cache_dir", "num_proc", "root", "max_sequences")
Score = Callable[[Sequences, int], Tensor]
"""Rows and the number of the draw -> nats of each row."""


def run_ppl(cfg: Config) -> dict[str, Any]:
    """`adlm ppl CHECKPOINT`: the result is printed, written as JSON and returned."""
    require(bool(cfg.eval.checkpoint), "which model? adlm ppl FOLDER (eval.checkpoint)")
    with world(cfg.train) as ranks:
        loaded = open_checkpoint(cfg, ranks)
        with ranks.main_first():
            data = own_data(loaded, cfg.data)
            blocks = prepare(data, loaded.tokenizer, loaded.model.config.length, "valid")
        estimates = measure(loaded, blocks, cfg.eval, ranks, cfg.train.valid_batch_size)
        per_byte = {name: bits_per_byte(e, blocks, loaded.tokenizer, name) for name, e in estimates.items()}
        result = {
            **model_facts(loaded, cfg.eval.checkpoint, cfg.eval.ema),
            **{name: e.as_dict() | {"bits_per_byte": per_byte[name]} for name, e in estimates.items()},
            "data": data_facts(blocks),
            "settings": settings(cfg.eval, ranks),
            "versions": versions(ranks.device),
        }
        if ranks.is_main:
            print(describe(estimates, per_byte, f"{blocks.manifest['corpus']} {blocks.manifest['split']}"))
            path = result_path(cfg.eval.out, cfg.eval.checkpoint, f"ppl-{blocks.manifest['corpus']}.json")
            write_result(path, result)
        return result


def open_checkpoint(cfg: Config, ranks: World) -> Loaded:
    """The model with its own tokenizer; data.tokenizer only helps a release checkpoint that does not carry one."""
    where = (cfg.eval.checkpoint, cfg.eval.ema, ranks.device)
    with ranks.main_first():  # a bpe-N tokenizer of an unfinished run may have to be trained
        try:
            return load_checkpoint(*where, root=cfg.data.root)
        except ValueError:
            if not cfg.data.tokenizer:
                raise
            return load_checkpoint(*where, tokenizer=cfg.data.tokenizer, root=cfg.data.root)


def own_data(loaded: Loaded, data: DataConfig) -> DataConfig:
    """The corpus to evaluate on: as asked for, or (data=checkpoint) the one the checkpoint was trained on."""
    if data.name != "checkpoint":
        return data
    recorded = loaded.info.get("data_settings")
    if not recorded:
        raise ValueError("the checkpoint does not say what it was trained on; name a corpus, e.g. data=wikitext103")
    ignored = [
        f"data.{f.name}" for f in fields(DataConfig) if f.name not in BESIDE and getattr(data, f.name) != f.default
    ]
    require(
        not ignored,
        f"{', '.join(ignored)}: not read with data=checkpoint, the corpus of the training; name one, e.g. data=file",
    )
    own = section(DataConfig, recorded)
    if own.valid_name:
        own = replace(own, name=own.valid_name, path="", valid_name="")
    rows = data.max_sequences or own.max_sequences
    return replace(
        own, cache_dir=data.cache_dir, num_proc=data.num_proc, root=data.root or own.root, max_sequences=rows
    )


def settings(cfg: EvalConfig, ranks: World) -> dict[str, Any]:
    """What the numbers depend on beside model and data."""
    return {
        "draws": cfg.draws,
        "estimator": cfg.estimator,
        "seed": cfg.seed,
        "sequences": cfg.sequences,
        "chain_sequences": cfg.chain_sequences,
        "precision": ranks.precision,
    }


def measure(loaded: Loaded, blocks: Blocks, cfg: EvalConfig, ranks: World, batch_size: int = 0) -> dict[str, Estimate]:
    """Estimates by name: `exact` for a causal model, else one per estimator asked for, and `left-to-right` if asked."""
    choose("eval.estimator", cfg.estimator, CHOICES_OF_ESTIMATORS)
    model = loaded.model
    n = min(len(blocks), cfg.sequences or len(blocks))
    budget = BATCH_TOKENS.get(ranks.device.type, BATCH_TOKENS["cpu"])
    size = batch_size or max(1, budget // blocks.length)
    schedule = make_schedule(loaded.noise)
    objective = make_objective(loaded.objective, loaded.noise, model.mask_id, cfg.seed)

    def bound(rows: Sequences, draw: int) -> Tensor:
        return sequence_bounds(model, objective.corrupt_for_bound(rows, draw))

    if model.config.causal:
        return {"exact": exact(bound, blocks, n, size, ranks)}
    scores: dict[str, Score] = {
        "continuous": bound,
        "exact-count": lambda rows, draw: sequence_bounds(model, objective.corrupt_exact_count(rows, draw)),
    }
    wanted = ESTIMATORS if cfg.estimator == "both" else (cfg.estimator,)
    require(
        objective.subs or (wanted == ("continuous",) and not cfg.chain_sequences),
        f"a model trained with objective.name={loaded.objective.name} has the continuous bound only:"
        " use eval.estimator=continuous eval.chain_sequences=0",
    )
    found = {name: stratified(scores[name], blocks, n, cfg.draws, cfg.seed, size, ranks, name) for name in wanted}
    if cfg.chain_sequences:
        found["left-to-right"] = left_to_right(model, schedule, blocks, min(n, cfg.chain_sequences), size, ranks)
    return found


def counter(seed: int, draw: int) -> int:
    """What separates the noise of draws and seeds; seed 0 is the noise of validation during training."""
    return draw if seed == 0 else fold(seed, Stream.SPLIT, draw)


def phases(seed: int, n: int) -> Tensor:
    """Where in its slice of time each of n rows is seen: stratified over [0, 1), float64."""
    return draw_times(VALIDATION_SEED, counter(seed, 0), torch.arange(n), n)


@torch.no_grad()
def stratified(
    score: Score, blocks: Blocks, n: int, draws: int, seed: int, size: int, ranks: World, label: str
) -> Estimate:
    """The bound over the first n rows, each at `draws` times."""
    phase_N = phases(seed, n)
    values_ND = np.zeros((n, draws))
    batches = list(my_batches(n, size, ranks))
    with progress(f"{label} bound", len(batches) * draws, ranks) as advance:
        for indices in batches:
            rows = read_rows(blocks, indices, n, ranks)
            phase_B = phase_N[torch.from_numpy(indices)].to(ranks.device)
            for d in range(draws):
                with ranks.autocast():
                    nats_B = score(rows._replace(times_B=(d + phase_B) / draws), counter(seed, d))
                values_ND[indices, d] = nats_B.cpu().numpy()
                advance()
    return summarise(over_ranks(values_ND, ranks), token_counts(blocks, n), phase_N.numpy())


@torch.no_grad()
def exact(score: Score, blocks: Blocks, n: int, size: int, ranks: World) -> Estimate:
    """The likelihood of a causal model: the first token of a row is given."""
    values_N1 = np.zeros((n, 1))
    batches = list(my_batches(n, size, ranks))
    with progress("exact likelihood", len(batches), ranks) as advance:
        for indices in batches:
            with ranks.autocast():
                values_N1[indices, 0] = score(read_rows(blocks, indices, n, ranks), 0).cpu().numpy()
            advance()
    return summarise(over_ranks(values_N1, ranks), token_counts(blocks, n) - 1, None)


@torch.no_grad()
def left_to_right(model: Network, schedule: Schedule, blocks: Blocks, n: int, size: int, ranks: World) -> Estimate:
    """-sum_l log p(x^l | x^1 .. x^(l-1), masks): the exact likelihood of revealing one token at a time in that order.

    Another model of the same weights, usually a better one: report it beside the bound, never instead.
    """
    counts_N = token_counts(blocks, n)
    values_N1 = np.zeros((n, 1))
    mine = np.arange(ranks.rank, n, ranks.size)
    with progress("left to right", len(mine), ranks) as advance:
        for index in mine:
            tokens_L = torch.from_numpy(blocks.rows(np.array([index]))[0]).to(ranks.device)
            # padding is never a target, but stands masked behind the text like everything that is yet to come
            for positions in torch.arange(int(counts_N[index]), device=ranks.device).split(size):
                with ranks.autocast():
                    nats_B = sequence_bounds(model, next_token_task(tokens_L, positions, model.mask_id, schedule))
                values_N1[index, 0] += nats_B.sum().item()
            advance()
    return summarise(over_ranks(values_N1, ranks), counts_N, None)


def next_token_task(tokens_L: Tensor, positions_B: Tensor, mask_id: int, schedule: Schedule) -> CorruptedBatch:
    """Predict each position from the tokens before it, everything from it on masked; one row per position."""
    L = len(tokens_L)
    later_BL = torch.arange(L, device=tokens_L.device) >= positions_B[:, None]
    z_BL = torch.where(later_BL, mask_id, tokens_L)
    sigma_B = noise_level(1 - positions_B / L, schedule)
    positions_N = torch.arange(len(positions_B), device=tokens_L.device) * L + positions_B
    weights_N = torch.ones(len(positions_B), device=tokens_L.device)
    term = Term("denoiser", positions_N, tokens_L[positions_B], weights_N, exclude=mask_id)
    return CorruptedBatch(z_BL, sigma_B, len(positions_B), {"chain": term})


def my_batches(n: int, size: int, ranks: World) -> Iterator[np.ndarray]:
    """Every ranks.size-th batch of `size` consecutive rows."""
    for start in range(ranks.rank * size, n, ranks.size * size):
        yield np.arange(start, min(start + size, n))


def read_rows(blocks: Blocks, indices: np.ndarray, n: int, ranks: World) -> Sequences:
    return rows_on(ranks.device, blocks.rows(indices), blocks.attention_masks(indices), indices, n)


def token_counts(blocks: Blocks, n: int) -> np.ndarray:
    if blocks.lengths is None:
        return np.full(n, blocks.length, dtype=np.int64)
    return blocks.lengths[:n].astype(np.int64)


def over_ranks(values: np.ndarray, ranks: World) -> np.ndarray:
    """Every rank holds its own rows and zeros: the sum is exact."""
    return ranks.sum(torch.from_numpy(values).to(ranks.device)).cpu().numpy()


class progress:
    """A bar on the terminal of the main rank; calling the result advances it by one."""

    def __init__(self, label: str, total: int, ranks: World):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = ranks.is_main and sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self.task = self.bar.add_task(label, total=total)

    def __enter__(self) -> Callable[[], None]:
        self.bar.start()
        return lambda: self.bar.update(self.task, advance=1)

    def __exit__(self, *exception: Any) -> None:
        self.bar.stop()


def bits_per_byte(e: Estimate, blocks: Blocks, tokenizer: Tokenizer, name: str) -> float:
    """Bits per byte of the scored text: comparable between tokenizers. Tokens such as the end of a text are no bytes,
    but what they cost counts."""
    first = int(name == "exact")  # which is given, not scored
    rows, counts = blocks.rows(np.arange(e.rows)), token_counts(blocks, e.rows)
    bytes_N = (tokenizer.count_bytes(row[first:count]) for row, count in zip(rows, counts))
    return e.nats * e.tokens / math.log(2) / max(1, sum(bytes_N))


def describe(estimates: dict[str, Estimate], per_byte: dict[str, float], data: str) -> str:
    """What people read."""
    lines = []
    for name, e in estimates.items():
        kind = {"exact": "exact", "left-to-right": "exact for that order, not the bound"}.get(name, "upper bound")
        ends = e.perplexity_interval
        spread = "" if ends is None else f"  (95% over rows: {ends[0]:.2f} - {ends[1]:.2f})"
        lines.append(f"{data}, {name}: perplexity {e.perplexity:.2f}{spread}, {kind}")
        noise = "" if not e.monte_carlo_error else f", Monte Carlo error {e.monte_carlo_error:.4f}"
        error = "" if e.row_error is None else f" +- {e.row_error:.4f}"
        lines.append(
            f"    {e.nats:.4f}{error} nats, {e.nats / math.log(2):.4f} bits per token, {per_byte[name]:.4f} per byte"
            f"{noise};"
            f" {e.tokens:,} tokens in {e.rows:,} rows"
        )
    return "\n".join(lines)

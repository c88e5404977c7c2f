"""`adlm ppl`: perplexity of a checkpoint, with errors, and everything needed to repeat the measurement.

Diffusion models have a bound: the average over times (`continuous`) or over numbers of masks (`exact-count`) of a
weighted cross-entropy. Sequence i is seen at the D = eval.draws times (d + phase_i) / D, and the phases of all
sequences are stratified over [0, 1), so that times are evenly spread over sequences and draws together. With one draw
the noise is that of the validation during training. Causal models have an exact likelihood and need no noise. A
block-diffusion model has a bound for every block length K (eval.block_length), named `K=16`; K = 1 is exact.

Ranks take whole batches, which do not depend on the number of ranks; so no result does.

This file also has `adlm zeroshot`, and published values to compare with.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm import tables
from adlm.data.blocks import Blocks
from adlm.data.corpora import defaults
from adlm.data.preparation import prepare
from adlm.data.sources import resolve
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import draw_times
from adlm.diffusion.random import Stream, fold
from adlm.errors import choose, require
from adlm.evaluation import data_facts, model_facts, result_path, versions, write_result
from adlm.evaluation.intervals import Estimate, summarise
from adlm.io import progress
from adlm.io.export import Loaded, section
from adlm.io.load import load_checkpoint, own_data
from adlm.models.network import parameter_count
from adlm.objectives import Sequences, make_objective, sequence_bounds
from adlm.objectives.nelbo import VALIDATION_SEED
from adlm.rules import numbers
from adlm.schema import Config, DataConfig, EvalConfig, ModelConfig
from adlm.training.parallel import World, world
from adlm.training.setup import batch_of, sequences_on

# ---- published values ------------------------------------------------------------------------------------------------
# Published perplexities, which `adlm ppl` and `adlm zeroshot` print beside their own.
#
# Only values with a source, and only for the model they belong to: released weights by their hub name, and models of
# the paper's size and kind. Both WikiTexts have the same validation text.

PAPER_PARAMETERS = 293e6


class Published(NamedTuple):
    """Perplexities of one model by corpus, and their source."""

    perplexities: dict[str, float]
    source: str


PAPER = {
    "adlm": Published(
        {"openwebtext": 20.14, "lambada": 44.32, "ptb": 95.37, "wikitext2": 31.94, "wikitext103": 31.94, "lm1b": 64.43,
         "ag_news": 55.72, "pubmed": 37.56, "arxiv": 33.69},
        "arXiv 2505.18456, ADLM after 524B tokens",
    ),
    "kuleshov-group/mdlm-owt": Published(
        {"openwebtext": 22.98, "lambada": 47.52, "ptb": 95.26, "wikitext2": 32.83, "wikitext103": 32.83, "lm1b": 67.01,
         "ag_news": 61.15, "pubmed": 41.89, "arxiv": 37.37},
        "arXiv 2505.18456, MDLM after 524B tokens",
    ),
    "kuleshov-group/bd3lm-owt-block_size4": Published(
        {"openwebtext": 20.73, "lambada": 50.03, "ptb": 96.81, "wikitext2": 31.31, "wikitext103": 31.31, "lm1b": 60.88,
         "ag_news": 61.67, "pubmed": 42.52, "arxiv": 39.20},
        "arXiv 2505.18456, BD3LM with blocks of 4 after 524B tokens",
    ),
}  # fmt: skip
"""Model -> its published perplexities."""


def comparable(loaded: Loaded) -> bool:
    """Whether the model is of the paper's kind: ADLM, GPT-2's vocabulary and the mask, 1024 tokens, 293M parameters."""
    model = loaded.model
    same_size = math.isclose(parameter_count(model), PAPER_PARAMETERS, rel_tol=0.01)
    gpt2 = (model.vocab_size, model.mask_id) == (50258, 50257)
    return gpt2 and same_size and model.config.length == 1024 and model.config.anchored and not model.config.causal


def published(checkpoint: str, loaded: Loaded) -> Published | None:
    """Published perplexities of a model: by the name that the user gave, a hub name or a folder named like one
    (owner/model, models--owner--model); else those of the paper, if the model is of the paper's kind."""
    name = checkpoint.partition("@")[0].rstrip("/").replace("--", "/")
    for model, found in PAPER.items():
        if "/" in model and (f"/{name}".endswith(f"/{model}") or Path(name).name == Path(model).name):
            return found
    return PAPER["adlm"] if comparable(loaded) else None


# ---- adlm ppl --------------------------------------------------------------------------------------------------------

EVALUATION_SEED = 0
"""Seed of the evaluation noise: the same for all models, so that their results are paired. With 0 the noise is that of
the validation during training; tests repeat measurements with other seeds."""
# Tokens of one forward pass if eval.batch_size is not set.
BATCH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
NatsOf = Callable[[Sequences, int], Tensor]
"""(sequences, index of the draw) -> nats of each sequence."""


def run_ppl(cfg: Config) -> dict[str, Any]:
    """`adlm ppl CHECKPOINT`: print the result, write it as JSON and return it."""
    with world(cfg.train) as ranks:
        loaded = open_checkpoint(cfg, ranks)
        with ranks.main_first():
            data = own_data(loaded, cfg.data)
            blocks = prepare(data, loaded.tokenizer, loaded.model.config.length, "valid")
        estimates = measure(loaded, blocks, cfg.eval, ranks)
        per_byte = {name: bits_per_byte(e, blocks, loaded.tokenizer) for name, e in estimates.items()}
        known = published(cfg.eval.checkpoint, loaded)
        value = known.perplexities.get(blocks.manifest["corpus"]) if known else None
        result = {
            **model_facts(loaded, cfg.eval.checkpoint, cfg.eval.ema),
            **{name: e.as_dict() | {"bits_per_byte": per_byte[name]} for name, e in estimates.items()},
            "data": data_facts(blocks),
            "settings": settings(cfg.eval, ranks),
            "versions": versions(ranks.device),
        }
        if known and value is not None:
            result["published"] = {"perplexity": value, "source": known.source}
        if ranks.is_main:
            print(describe(estimates, per_byte, f"{blocks.manifest['corpus']} {blocks.manifest['split']}"))
            if known and value is not None:
                print(f"    published: perplexity {value:.2f} ({known.source})")
            write_result(result_path(cfg.out, cfg.eval.checkpoint, f"ppl-{blocks.manifest['corpus']}.json"), result)
        return result


def open_checkpoint(cfg: Config, ranks: World) -> Loaded:
    """Load eval.checkpoint with its own tokenizer; data.tokenizer is only for a release checkpoint without one."""
    where = (cfg.eval.checkpoint, cfg.eval.ema, ranks.device)
    with ranks.main_first():  # a bpe-N tokenizer of an unfinished run may have to be trained
        try:
            return load_checkpoint(*where, root=cfg.data.root)
        except ValueError:
            if not cfg.data.tokenizer:
                raise
            return load_checkpoint(*where, tokenizer=cfg.data.tokenizer, root=cfg.data.root)


def settings(cfg: EvalConfig, ranks: World) -> dict[str, Any]:
    """What the results depend on besides model and data."""
    return {
        "draws": cfg.draws,
        "estimator": cfg.estimator,
        "seed": EVALUATION_SEED,
        "block_length": cfg.block_length,
        "sequences": cfg.sequences,
        "precision": ranks.precision,
    }


def measure(loaded: Loaded, blocks: Blocks, cfg: EvalConfig, ranks: World) -> dict[str, Estimate]:
    """Estimates by name: `exact` for a causal model, else one for each requested estimator and block length."""
    model = loaded.model.config
    lengths = [min(K or model.length, model.length) for K in numbers(cfg.block_length)] or list(model.block_lengths[:1])
    if not lengths:
        return bounds(loaded, model, blocks, cfg, ranks)
    require(
        not (model.causal or model.is_time_conditioned) and tables.OBJECTIVES.load(loaded.objective.name).subs,
        f"eval.block_length={cfg.block_length}: bounds by blocks are of masked diffusion without time conditioning",
    )
    found: dict[str, Estimate] = {}
    for K in lengths:
        of_one = bounds(loaded, replace(model, block_length=str(K)), blocks, cfg, ranks)
        found |= {f"K={K}" if len(of_one) == 1 else f"K={K}, {name}": e for name, e in of_one.items()}
    return found


def bounds(loaded: Loaded, settings: ModelConfig, blocks: Blocks, cfg: EvalConfig, ranks: World) -> dict[str, Estimate]:
    """The estimates for one block length, by estimator. `settings`: the model's, with that block length."""
    model = loaded.model
    objective = make_objective(loaded.objective, loaded.noise, model.mask_id, EVALUATION_SEED, settings)

    estimators: dict[str, NatsOf] = {
        "continuous": lambda sequences, draw: sequence_bounds(model, objective.corrupt_for_bound(sequences, draw)),
        "exact-count": lambda sequences, draw: sequence_bounds(model, objective.corrupt_exact_count(sequences, draw)),
    }
    if settings.causal:
        return {"exact": estimate(estimators["continuous"], blocks, cfg, ranks, "exact", given=1)}
    auto = "exact-count" if settings.block_lengths or settings.shift else "continuous"
    wanted = {"auto": (auto,), "both": ("continuous", "exact-count")}.get(cfg.estimator, (cfg.estimator,))
    require(
        objective.subs or wanted == ("continuous",),
        f"a model trained with objective.name={loaded.objective.name} has the continuous bound only:"
        " use eval.estimator=continuous",
    )
    found = {}
    for name in wanted:
        noiseless = settings.block_lengths == (1,) and name == "exact-count"
        kind = "exact" if noiseless else name
        found[name] = estimate(estimators[name], blocks, cfg, ranks, kind, given=int(settings.shift))
    return found


@torch.no_grad()
def estimate(nats_of: NatsOf, blocks: Blocks, cfg: EvalConfig, ranks: World, name: str, given: int = 0) -> Estimate:
    """The average over the first eval.sequences sequences, each at eval.draws times.

    `exact`, the likelihood of a causal model, has no noise. `given`: tokens at the beginning of a sequence that are not
    scored.
    """
    n, exact, device = min(len(blocks), cfg.sequences or len(blocks)), name == "exact", ranks.float64_device
    size = cfg.batch_size or max(1, BATCH_TOKENS.get(ranks.device.type, BATCH_TOKENS["cpu"]) // blocks.length)
    draws, phase_N = (1, None) if exact else (cfg.draws, phases(n))
    values_ND = np.zeros((n, draws))
    mine = range(ranks.rank * size, n, ranks.size * size)
    with progress("exact likelihood" if exact else f"{name} bound", len(mine) * draws, ranks.is_main) as advance:
        for start in mine:
            indices = np.arange(start, min(start + size, n))
            batch = sequences_on(device, batch_of(blocks, indices, indices), n)
            for d in range(draws):
                if phase_N is not None:
                    batch = batch._replace(times_B=(d + phase_N[torch.from_numpy(indices)].to(device)) / draws)
                with ranks.autocast():
                    values_ND[indices, d] = nats_of(batch, noise_counter(d)).cpu().numpy()
                advance()
    # Every rank has values for its own sequences and zeros elsewhere: the sum is exact.
    values_ND = ranks.sum(torch.from_numpy(values_ND).to(device)).cpu().numpy()
    begin_N, end_N = scored_spans(blocks, n, given)
    return summarise(values_ND, end_N - begin_N, None if phase_N is None else phase_N.numpy())


def noise_counter(draw: int) -> int:
    """The counter that gives every draw different noise."""
    return fold(EVALUATION_SEED, Stream.SPLIT, draw) if EVALUATION_SEED else draw


def phases(n: int) -> Tensor:
    """The phase of each of n sequences, its position in each slice of time: stratified over [0, 1), float64."""
    return draw_times(VALIDATION_SEED, noise_counter(0), torch.arange(n), n)


def scored_spans(blocks: Blocks, n: int, given: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Where the scored tokens of each of the first n sequences begin and end: after the prompt, before the padding.
    `given`: tokens at the beginning that are not scored if there is no prompt."""
    begin = np.full(n, given) if blocks.starts is None else blocks.starts[:n].astype(np.int64)
    end = np.full(n, blocks.length) if blocks.lengths is None else blocks.lengths[:n].astype(np.int64)
    return begin, end


def bits_per_byte(e: Estimate, blocks: Blocks, tokenizer: Tokenizer) -> float:
    """Bits per byte of the scored text: comparable between tokenizers. Special tokens such as the end of a text have no
    bytes, but their nats count."""
    begin_N, end_N = scored_spans(blocks, e.rows)
    if blocks.starts is None:  # tokens of a sequence that are given, not scored
        begin_N = begin_N + (int(end_N.sum()) - e.tokens) // e.rows
    spans = zip(blocks.rows(np.arange(e.rows)), begin_N, end_N)
    bytes_N = (tokenizer.count_bytes(tokens[begin:end]) for tokens, begin, end in spans)
    return e.nats * e.tokens / math.log(2) / max(1, sum(bytes_N))


def describe(estimates: dict[str, Estimate], per_byte: dict[str, float], data: str) -> str:
    """The result as text for the terminal."""
    lines = []
    for name, e in estimates.items():
        kind = "exact" if e.monte_carlo_error == 0 else "upper bound"
        ends = e.perplexity_interval
        spread = "" if ends is None else f"  (95% over sequences: {ends[0]:.2f} - {ends[1]:.2f})"
        lines.append(f"{data}, {name}: perplexity {e.perplexity:.2f}{spread}, {kind}")
        noise = "" if not e.monte_carlo_error else f", Monte Carlo error {e.monte_carlo_error:.4f}"
        error = "" if e.row_error is None else f" +- {e.row_error:.4f}"
        lines.append(
            f"    {e.nats:.4f}{error} nats, {e.nats / math.log(2):.4f} bits per token, {per_byte[name]:.4f} per byte"
            f"{noise};"
            f" {e.tokens:,} tokens in {e.rows:,} sequences"
        )
    return "\n".join(lines)


# ---- adlm zeroshot ---------------------------------------------------------------------------------------------------
# `adlm zeroshot`: perplexity on eight public data sets the model was not trained on, in one command.
#
# Each set is read from data.root if its published files are there, else from the hub; detokenizer, split and packing
# are those of the table of corpora, so that results are comparable with the literature. A set that cannot be read is
# reported and does not stop the others, and the result file is written after each set.

# The data sets for which the paper has a value, without the one that its models are trained on.
SETS = [name for name in PAPER["adlm"].perplexities if name != "openwebtext"]


def run_zeroshot(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm zeroshot CHECKPOINT [set ...]`: print a table, write a JSON file, and return its contents."""
    names = [choose("zero-shot set", name, SETS) for name in args] or SETS
    path = result_path(cfg.out, cfg.eval.checkpoint, "zeroshot.json")
    with world(cfg.train) as ranks:
        loaded = open_checkpoint(cfg, ranks)
        known = published(cfg.eval.checkpoint, loaded)
        paper = known.perplexities if known else {}
        result: dict[str, Any] = {
            **model_facts(loaded, cfg.eval.checkpoint, cfg.eval.ema),
            "comparable_with_the_paper": bool(paper),
            "published": known.source if known else None,
            "settings": settings(cfg.eval, ranks),
            "versions": versions(ranks.device),
            "sets": {},
        }
        found: dict[str, dict[str, Estimate]] = {}
        for name in names:
            try:
                with ranks.main_first():
                    blocks = sequences_of(name, loaded, cfg.data)
            except (ValueError, OSError, ModuleNotFoundError) as error:
                result["sets"][name] = {"error": " ".join(str(error).split())}
                if ranks.is_main:
                    print(f"{name}: {result['sets'][name]['error']}", file=sys.stderr)
            else:
                found[name] = measure(loaded, blocks, cfg.eval, ranks)
                result["sets"][name] = {
                    **{kind: estimate.as_dict() for kind, estimate in found[name].items()},
                    "paper_perplexity": paper.get(name),
                    "data": data_facts(blocks),
                }
            if ranks.is_main:
                write_result(path, result)
        require(bool(found), "no set could be read; give data.root=FOLDER with local copies")
        if ranks.is_main:
            show(found, result["sets"], paper)
            if known:
                print(f"published: {known.source}")
            print(f"written to {path}")
        return result


def sequences_of(name: str, loaded: Loaded, wishes: DataConfig) -> Blocks:
    """A set's validation sequences for this model: packed, unless it was trained on one document per sequence."""
    trained = section(DataConfig, loaded.info.get("data_settings") or {})
    data = defaults(
        name,
        packing="documents" if trained.packing == "documents" else wishes.packing,
        root=wishes.root,
        cache_dir=wishes.cache_dir,
        max_sequences=wishes.max_sequences,
    )
    return prepare_fitting(data, loaded.tokenizer, loaded.model.config.length)


def prepare_fitting(data: DataConfig, tokenizer: Tokenizer, length: int) -> Blocks:
    """Sequences of `length`; if a set does not fill one, a single shorter sequence of the whole set."""
    try:
        return prepare(data, tokenizer, length, "valid")
    except ValueError:
        have = 2  # the begin and end tokens
        for document in resolve(data, "valid").documents(length):
            have += len(tokenizer.encode(document)) + 1
            if have >= length:
                raise
        if have < 4:
            raise
        return prepare(replace(data, packing="stream"), tokenizer, have, "valid")


def show(found: dict[str, dict[str, Estimate]], sets: dict[str, Any], paper: dict[str, float]) -> None:
    """Print the table: one line per set and estimator."""
    table = Table("set", "tokens", "sequences", "length", "perplexity", "95% over sequences", "Monte Carlo", box=None)
    if paper:
        table.add_column("published")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, estimates in found.items():
        for kind, e in estimates.items():
            ends = e.perplexity_interval
            label = name if len(estimates) == 1 else f"{name} {kind}"
            line = [
                label,
                f"{e.tokens:,}",
                f"{e.rows:,}",
                f"{sets[name]['data']['row_length']}",
                f"{e.perplexity:,.2f}",
                "" if ends is None else f"{ends[0]:,.2f} - {ends[1]:,.2f}",
                "" if not e.monte_carlo_error else f"+-{e.perplexity * e.monte_carlo_error:,.2f}",
            ]
            table.add_row(*line, *([f"{paper[name]:.2f}" if name in paper else ""] if paper else []))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)

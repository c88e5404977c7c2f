"""Everything before the first step: data, model, objective, and the plan of the run with its cost.

The module starts with how batches of sequences become corrupted batches, ahead of the network.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from adlm.data.blocks import Blocks
from adlm.data.loader import Batch, read_ahead
from adlm.data.preparation import prepare, tokenizer_for
from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.io.export import load_folder
from adlm.io.paths import BOX, BOX_NAME
from adlm.models import Network, build_model
from adlm.models.network import ALPHA, adapt, base_weights, count_flops, parameter_count, weights_digest
from adlm.objectives import CorruptedBatch, Objective, Sequences, make_objective
from adlm.objectives.anchors import describe_anchors
from adlm.objectives.base import on_device, put, rounded
from adlm.schema import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainConfig
from adlm.training.parallel import World

# ---- batches ---------------------------------------------------------------------------------------------------------
# From batches of sequences to corrupted batches, on the host and ahead of the network; and the bound in validation.
#
# The host has to know how many positions are masked. If the device drew the noise, the host would wait for that number
# at every step. Drawing it on the host takes 2 ms for 16 sequences of 1024, while the previous step is still running.
# Noise is a hash of counters, so it does not matter where it is drawn.

FEWEST_VALIDATED = 8
"""A bound on fewer noised sequences is mostly chance: one of them may have no mask at all."""


def sequences_on(device: torch.device, batch: Batch, total: int) -> Sequences:
    """Clean sequences as tensors on a device."""
    found = (batch.tokens, batch.examples, batch.attention_mask, batch.prompts)
    tokens_BL, example_B, mask_BL, given_BL = (None if x is None else put(torch.from_numpy(x), device) for x in found)
    assert tokens_BL is not None and example_B is not None
    return Sequences(tokens_BL, example_B, total, mask_BL, given_BL=given_BL)


def batch_of(blocks: Blocks, indices: np.ndarray, examples: np.ndarray) -> Batch:
    """Stored sequences, numbered as examples."""
    return Batch(blocks.rows(indices), blocks.attention_masks(indices), examples, blocks.prompts(indices))


def shortened(batch: Batch, pieces: int) -> Batch:
    """The sequence-length warmup: cut every sequence into `pieces` shorter ones, and renumber them."""
    B, L = batch.tokens.shape
    examples = (batch.examples[:, None] * pieces + np.arange(pieces)).ravel()
    parts = (batch.tokens, batch.attention_mask, batch.prompts)
    tokens, mask, prompts = (None if x is None else x.reshape(B * pieces, L // pieces) for x in parts)
    assert tokens is not None
    return Batch(tokens, mask, examples, prompts)


def corrupt(objective: Objective, batch: Batch, step: int, parts: int, cfg: Config) -> list[CorruptedBatch]:
    """One rank's batch of optimizer step `step` as `parts` corrupted micro-batches, on the host."""
    total = cfg.train.global_batch_size
    if step < math.ceil(cfg.train.length_warmup_fraction * cfg.train.steps) and cfg.train.length_warmup > 1:
        batch, total = shortened(batch, cfg.train.length_warmup), total * cfg.train.length_warmup
    corrupted = []
    for part in np.array_split(np.arange(len(batch.tokens)), parts):
        own = Batch(*(None if x is None else x[part] for x in batch))  # type: ignore[arg-type]
        clean = sequences_on(torch.device("cpu"), own._replace(examples=own.examples % total), total)
        corrupted.append(objective.corrupt(clean, step, step / cfg.train.steps))
    return [rounded(micro_batch) for micro_batch in corrupted] if cfg.train.cuda_graphs else corrupted


def corrupted_batches(
    objective: Objective, batches: Iterator[Batch], first: int, cfg: Config, ranks: World
) -> Iterator[tuple[Batch, list[CorruptedBatch]]]:
    """Batches with their corrupted micro-batches, from optimizer step `first` on; with a GPU, a thread draws ahead."""
    parts = cfg.train.micro_batches(ranks.size)
    steps = ((batch, corrupt(objective, batch, i, parts, cfg)) for i, batch in enumerate(batches, first))
    return read_ahead(steps) if ranks.device.type == "cuda" else steps


def padded_indices(n: int, rank: int, size: int, batch: int) -> np.ndarray:
    """Sequence indices of one rank, [batches, batch], padded with -1; every rank has the same number of batches."""
    batches = math.ceil(n / (size * batch))
    indices = np.full(batches * size * batch, -1, dtype=np.int64)
    indices[:n] = np.arange(n)
    return indices.reshape(batches, size, batch)[:, rank]


@torch.no_grad()
def validate(wrapped: nn.Module, objective: Objective, valid: Blocks, cfg: TrainConfig, ranks: World) -> float:
    """The bound on the first valid_sequences of the validation split, nats per token. The noise is the same every time,
    so that curves are comparable. If there are very few sequences, each is read several times, with different noise."""
    found = min(len(valid), cfg.valid_sequences or len(valid))
    n = found if found >= FEWEST_VALIDATED else found * math.ceil(FEWEST_VALIDATED / found)
    batch = cfg.at_once(ranks.size)
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.float64_device)
    was_training = wrapped.training
    wrapped.eval()
    for indices in padded_indices(n, ranks.rank, ranks.size, batch):
        real, indices = indices >= 0, np.maximum(indices, 0)
        part = batch_of(valid, indices % found, indices)
        if not real.all():
            mask = np.ones_like(part.tokens, dtype=bool) if part.attention_mask is None else part.attention_mask
            part = part._replace(attention_mask=mask & real[:, None])
        corrupted = objective.corrupt_for_validation(sequences_on(sums.device, part, n))
        with ranks.autocast():
            output = wrapped(on_device(corrupted, ranks.device))
        (bound,) = output.terms.values()
        sums += torch.stack(
            [bound.to(sums.device).double(), torch.tensor(float(output.count), dtype=torch.float64, device=sums.device)]
        )
    wrapped.train(was_training)
    if hasattr(wrapped, "reshard"):
        wrapped.reshard()  # type: ignore[operator]  # drop the gathered EMA weights, which are about to be swapped out
    nats, count = ranks.sum(sums).tolist()
    return nats / count


# ---- the run ---------------------------------------------------------------------------------------------------------

IDENTITY = ("origin", "packing", "max_sequences")
"""Facts of prepared data by which a run recognises its data."""
COUNTED_SEQUENCES = 256
"""Sequences corrupted once to count the fraction of positions that goes through each head."""


MOST_EPOCHS = 100
"""A run that reads its text more often gets a warning."""
HOPELESS = 3
"""A run does not start if its estimated memory exceeds the available memory by this factor."""


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: Blocks
    valid: Blocks

    def fingerprints(self) -> dict[str, str]:
        """A hash of each split, independent of tokenizer and length: content, reader, held-out part, packing."""
        return {
            split: hashlib.sha256(
                json.dumps([blocks.manifest.get(key) for key in IDENTITY], sort_keys=True).encode()
            ).hexdigest()
            for split, blocks in (("train", self.train), ("valid", self.valid))
        }


def prepare_data(cfg: Config, world: World) -> Data:
    """Tokenizer and sequences of both splits; the main rank builds what is missing, the others find it cached."""
    with world.main_first():
        tokenizer = tokenizer_for(cfg.data)
        train = prepare(cfg.data, tokenizer, cfg.model.length, "train")
        valid = prepare(valid_data(cfg), tokenizer, cfg.model.length, "valid")
    return Data(tokenizer, train, valid)


def valid_data(cfg: Config) -> DataConfig:
    """Settings of the validation corpus: the training corpus's own split unless another corpus is named."""
    if not cfg.data.valid_name:
        return cfg.data
    return replace(cfg.data, name=cfg.data.valid_name, path=cfg.data.valid_path, valid_path=cfg.data.valid_path)


def make_model(cfg: Config, tokenizer: Tokenizer, fresh: bool = True) -> Network:
    """The model with its initial weights: random by the seed, or those of checkpoint.init_from, unless a checkpoint of
    the run itself will replace them (not `fresh`). With lora.rank the weights of checkpoint.init_from stay frozen, and
    adapters are added; a checkpoint then holds only the adapters."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    low_rank = cfg.lora.rank > 0
    require(
        not low_rank or cfg.checkpoint.init_from != "",
        f"lora.rank={cfg.lora.rank} adapts a trained model: name it by checkpoint.init_from",
    )
    if cfg.checkpoint.init_from and (fresh or low_rank):
        given = f"checkpoint.init_from={cfg.checkpoint.init_from!r}"
        try:
            loaded = load_folder(Path(cfg.checkpoint.init_from))
        except ValueError as error:
            raise ValueError(f"{given}: {error}") from None
        require(
            loaded.tokenizer.fingerprint == tokenizer.fingerprint, f"{given} has another tokenizer than this run's data"
        )
        try:
            model.load_state_dict(loaded.model.state_dict())
        except RuntimeError as error:
            raise ValueError(f"{given} is another model: {str(error).splitlines()[1].strip()}") from None
    if low_rank:
        adapt(model, cfg.lora).freeze_bridge()
    return model


def adapter_facts(cfg: Config, model: Network) -> dict[str, Any]:
    """The description stored with adapters: their settings, and path and digest of their base; empty if all weights
    train."""
    if not cfg.lora.rank:
        return {}
    base = Path(cfg.checkpoint.init_from).absolute()
    place = BOX_NAME if base.resolve() == BOX.resolve() else str(base)
    own = {"rank": cfg.lora.rank, "alpha": ALPHA}
    return own | {"base": place, "base_sha256": weights_digest(base_weights(model.state_dict()))}


def objective_for(cfg: Config, data: Data) -> Objective:
    """The objective of the run, checked against the model it trains."""
    objective = make_objective(cfg.objective, cfg.noise, data.tokenizer.mask_id, cfg.seed, cfg.model)
    objective.check(cfg.objective, cfg.model)
    return objective


def scored_fractions(objective: Objective, clean: Sequences) -> tuple[float, float]:
    """Fractions of the positions that training sends through the denoiser's and through the anchor network's head, on
    average over the steps that are not causal."""
    causal = causal_part(objective.cfg, objective.model)
    until = max(objective.cfg.gamma_until, causal)
    corrupted = objective.corrupt(clean, 0, (causal + until) / 2)  # at both ends gamma may be 0
    scored, anchors = fractions_of(corrupted, clean.tokens_BL.numel())
    return scored, anchors * (until - causal) / (1 - causal)


def causal_part(cfg: ObjectiveConfig, model: ModelConfig) -> float:
    """Fraction of a run in which a diffusion model reads causally."""
    return 0.0 if model.causal else cfg.causal_until


def fractions_of(corrupted: CorruptedBatch, positions: int) -> tuple[float, float]:
    """Fractions of the positions of a batch that go through the denoiser's and the anchor network's head. Prompts and
    padding are read, but go through neither."""
    through = {"denoiser": 0, "anchor": 0}
    for term in corrupted.terms.values():
        through[term.head] += len(term.positions_N)
    return through["denoiser"] / positions, through["anchor"] / positions


def text_like(shape: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """Random tokens with the frequencies of text (1 / rank), so that there are as many anchors as in text."""
    frequency = 1 / (torch.arange(vocab_size - 1, dtype=torch.float64) + 10)
    n = torch.Size(shape).numel()
    return torch.multinomial(frequency, n, replacement=True, generator=torch.Generator().manual_seed(0)).view(shape)


def training_flops(cfg: Config, objective: Objective, data: Data) -> float:
    """FLOPs of one token of this run, forward and backward, on average over its steps."""
    indices = np.arange(min(COUNTED_SEQUENCES, len(data.train)))
    clean = sequences_on(torch.device("cpu"), batch_of(data.train, indices, indices), len(indices))
    return average_flops(cfg, objective, clean, data.tokenizer.vocab_size)


def average_flops(cfg: Config, objective: Objective, clean: Sequences, vocab_size: int) -> float:
    """`training_flops`, estimated from some sequences. The first steps may be causal, or read shorter sequences."""
    length, causal = cfg.model.length, causal_part(cfg.objective, cfg.model)
    pieces, short = cfg.train.length_warmup, cfg.train.length_warmup_fraction if cfg.train.length_warmup > 1 else 0.0
    alike = replace(cfg.model, causal=True, block_length="")
    kinds = ((0.0, causal, alike, (1.0,)), (causal, 1.0, cfg.model, scored_fractions(objective, clean)))
    average = 0.0
    for begin, end, model, scored in kinds:
        early = max(0.0, min(short, end) - begin)
        for part, L in ((early, length // pieces), (end - begin - early, length)):
            flops = count_flops(model, vocab_size, L, *scored)
            # gradients of weights cost as much as the forward pass; frozen weights have none, adapters almost none
            average += part * (flops.training_per_token - bool(cfg.lora.rank) * flops.forward_per_token)
    return average


def plan(cfg: Config, model: Network, data: Data, flops: float, world: World) -> dict[str, Any]:
    """The facts of a run, with warnings about likely mistakes: printed by --dry-run and at the start. `flops`: per
    token."""
    parameters, trained = parameter_count(model), parameter_count(model, trained=True)
    sequences = cfg.train.steps * cfg.train.global_batch_size
    tokens = sequences * cfg.model.length
    shards = {"ddp": 1, "fsdp": world.size, "hsdp": world.local_size}[cfg.train.strategy]
    bytes_per_value = 2 if world.precision == "bf16" else 4
    memory = memory_estimate(cfg, parameters, trained, cfg.train.at_once(world.size) * bytes_per_value, shards)
    causal = causal_part(cfg.objective, cfg.model)
    facts: dict[str, Any] = {
        "algo": cfg.algo,
        "anchors": describe_anchors(cfg.objective) if cfg.model.anchored else "none",
        **({"causal_steps": math.ceil(causal * cfg.train.steps)} if causal else {}),
        "parameters": parameters,
        **({"trained_parameters": trained} if trained < parameters else {}),
        "vocabulary": data.tokenizer.vocab_size,
        "train_sequences": len(data.train),
        "valid_sequences": len(data.valid),
        "sequence_length": cfg.model.length,
        "steps": cfg.train.steps,
        "tokens": tokens,
        "epochs": round(sequences / len(data.train), 3),
        "processes": world.size,
        "micro_batches": cfg.train.micro_batches(world.size),
        "training_flops": flops * tokens,
        "memory_gib_estimate": round(memory, 2),
        "precision": world.precision,
        "device": str(world.device),
    }
    return facts | {"warnings": doubts(cfg, facts["epochs"], facts["memory_gib_estimate"], memory_gib(world.device))}


def memory_estimate(cfg: Config, parameters: int, trained: int, sequence_bytes: int, shards: int) -> float:
    """GiB of one device. Weights in float32 with gradients, two moments and EMA of those that train, divided into
    shards; and about 18 values per position, width and block kept for the backward pass (2 when recomputed).
    `sequence_bytes`: sequences at once times the bytes of a value."""
    blocks = cfg.model.n_blocks + (cfg.model.n_denoiser_blocks if cfg.model.anchored else 0)
    kept = 2 if cfg.train.checkpoint_activations else 18
    state = 4 * (parameters + trained * (4 if cfg.optim.ema else 3)) // shards
    activations = sequence_bytes * cfg.model.length * cfg.model.hidden_size * blocks * kept
    return (state + activations) / 2**30


def doubts(cfg: Config, epochs: float, memory: float, available: float) -> list[str]:
    """Warnings about settings that are likely mistakes, one line each. `memory` and `available` are GiB."""
    steps, warmup, ema = cfg.train.steps, cfg.optim.warmup, cfg.optim.ema
    found = []
    if warmup >= steps:
        fits = f"optim.warmup={max(1, steps // 40)} would fit"
        found.append(f"optim.warmup={warmup} lasts as long as train.steps={steps}: the rate stays low; {fits}")
    if ema and 1 / (1 - ema) > steps:
        fits = f"optim.ema={max(0.5, 1 - 10 / steps):.4g} would fit"
        found.append(f"optim.ema={ema:g} averages {1 / (1 - ema):,.0f} steps, more than train.steps={steps}; {fits}")
    if memory > available:
        found.append(too_large(memory, available))
    if epochs > MOST_EPOCHS:
        less = f"train.steps={max(1, round(steps * MOST_EPOCHS / epochs)):,} are {MOST_EPOCHS} times"
        found.append(f"train.steps={steps:,} read the text {epochs:,.0f} times; {less}")
    return found


def too_large(memory: float, available: float) -> str:
    less = "take a smaller model (adlm train my.txt finds one), or fewer sequences at once (train.batch_size)"
    return f"about {memory:,.0f} GiB are needed and the device has {available:,.0f}: {less}"


def check_memory(needed: float, device: torch.device) -> None:
    """Refuse a run that would fill the machine until it is killed; `needed` is an estimate, in GiB."""
    available = memory_gib(device)
    require(needed <= HOPELESS * available, too_large(needed, available))


def memory_gib(device: torch.device) -> float:
    """Memory of a GPU, or else of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    try:
        sizes = getattr(os, "sysconf")  # noqa: B009  # Windows has none
        return sizes("SC_PAGE_SIZE") * sizes("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):  # a system that does not report it
        return math.inf


def show(facts: dict[str, Any]) -> str:
    """The facts of a plan, one per line, then its warnings."""
    lines = []
    for key, value in facts.items():
        if key == "warnings":
            lines += [f"warning: {doubt}" for doubt in value]
            continue
        text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        lines.append(f"  {key.replace('_', ' '):20} {text}")
    return "\n".join(lines)

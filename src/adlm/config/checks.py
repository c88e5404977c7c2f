"""Names a setting may take, and the checks that need more than one setting; each message names the key to change.

The names repeat tables that live beside the code they select (`OBJECTIVES`, `SAMPLERS`, ...): those modules import
torch, and the command line must answer before torch is loaded. tests/test_config.py keeps the two in step.
"""

import math
from typing import Any

from adlm.config.keys import group_choices, keys
from adlm.errors import choose, require
from adlm.evaluation.sweep import settings_of
from adlm.schema import Config, ModelConfig, NoiseConfig, ObjectiveConfig, SamplingConfig, TrainConfig

CORPORA = (
    "pydocs", "file", "prepared", "checkpoint", "openwebtext", "openwebtext-train", "openwebtext-valid", "lm1b",
    "lm1b-gpt2", "wikitext2", "wikitext103", "ptb", "lambada", "ag_news", "pubmed", "arxiv", "text8", "text8-crop",
    "tinystories", "fineweb-edu", "wikipedia",
)  # fmt: skip
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("train", "ppl_eval", "sample_eval"),
    "model.bridge": ("collapsed", "residual", "none"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "relu2"),
    "model.init": ("torch", "normal"),
    "noise.name": ("loglinear", "linear", "geometric", "cosine", "cosine-squared", "polynomial"),
    "objective.name": ("anelbo", "nelbo", "d3pm", "score-entropy", "autoregressive"),
    "objective.anchor_rule": ("count", "common", "rarity", "all", "loss", "none"),
    "objective.anchor_positions": ("all", "masked"),
    "data.name": CORPORA,
    "data.valid_name": ("", *CORPORA),
    "data.packing": ("stream", "release"),
    "optim.name": ("adamw", "muon"),
    "optim.schedule": ("constant", "cosine", "linear"),
    "train.precision": ("auto", "fp32", "bf16"),
    "train.compile": ("auto", "true", "false", "block", "max"),
    "train.residual": ("fp32", "bf16"),
    "train.attention": ("auto", "flash", "cudnn", "any"),
    "train.strategy": ("ddp", "fsdp"),
    "sampling.sampler": (
        "mdlm", "remdm-cap", "remdm-rescale", "remdm-conf", "remdm-loop", "forward-backward", "dfm", "first-hitting",
        "confidence", "entropy", "anchor-first", "analytic", "score", "ddpm", "autoregressive",
    ),
    "sampling.parity": ("", "release"),
    "eval.estimator": ("continuous", "exact-count", "both"),
    "eval.judge_rule": ("text", "tokens", "release"),
    "eval.mauve": ("auto", "true", "false"),
    "reason.task": ("prosqa", "prontoqa", "gsm8k"),
    "reason.method": ("cot", "no-cot", "pause", "acot", "icot", "coconut", "coconut-pause"),
    "reason.anchor_tokens": ("first", "all"),
}  # fmt: skip

# What a single number may be, beyond its type: key -> (what to say, test). Written so that nan fails every test.
_COUNT = ("at least 1", lambda x: x >= 1)
_NOT_NEGATIVE = ("at least 0", lambda x: 0 <= x < math.inf)
_FROM_ONE = ("at least 1", lambda x: 1 <= x < math.inf)
_POSITIVE = ("above 0", lambda x: 0 < x < math.inf)
_SHARE = ("in [0, 1]", lambda x: 0 <= x <= 1)
_BELOW_ONE = ("in [0, 1)", lambda x: 0 <= x < 1)
_INSIDE = ("in (0, 1)", lambda x: 0 < x < 1)
_SEED = ("in [0, 2^63)", lambda x: 0 <= x < 1 << 63)
_UP_TO_ONE = ("in (0, 1]", lambda x: 0 < x <= 1)
RANGES = {
    "seed": _SEED,
    "model.hidden_size": _COUNT, "model.n_heads": _COUNT, "model.n_blocks": _COUNT, "model.cond_dim": _COUNT,
    "model.n_denoiser_blocks": _NOT_NEGATIVE, "model.mlp_ratio": _COUNT, "model.dropout": _BELOW_ONE,
    "model.length": ("at least 4", lambda x: x >= 4),
    "noise.eps": _BELOW_ONE, "noise.sigma_min": _POSITIVE, "noise.sigma_max": _POSITIVE, "noise.power": _POSITIVE,
    "objective.gamma": _NOT_NEGATIVE, "objective.gamma_warmup": _SHARE,
    "objective.gamma_end": ("at least 0, or -1: gamma stays", lambda x: x == -1 or 0 <= x < math.inf),
    "objective.tau": _COUNT, "objective.anchor_share": _UP_TO_ONE,
    "objective.rarity": _UP_TO_ONE, "objective.hard": _POSITIVE, "objective.T": _NOT_NEGATIVE,
    "objective.time_density_a": _FROM_ONE, "objective.time_density_b": _FROM_ONE,
    "objective.time_density_anneal": _SHARE, "objective.sampling_eps": _BELOW_ONE,
    "data.valid_share": _INSIDE, "data.num_proc": _NOT_NEGATIVE, "data.max_rows": _NOT_NEGATIVE,
    "optim.lr": _POSITIVE, "optim.muon_lr": _POSITIVE, "optim.muon_momentum": _BELOW_ONE, "optim.beta1": _BELOW_ONE,
    "optim.beta2": _BELOW_ONE, "optim.eps": _POSITIVE, "optim.weight_decay": _NOT_NEGATIVE, "optim.clip": _NOT_NEGATIVE,
    "optim.warmup": _NOT_NEGATIVE, "optim.final": _SHARE, "optim.ema": _BELOW_ONE,
    "train.steps": _COUNT, "train.global_batch_size": _COUNT, "train.batch_size": _NOT_NEGATIVE,
    "train.row_pieces": _COUNT, "train.row_pieces_share": _SHARE,
    "train.batch_parts": _COUNT, "train.batch_parts_share": _SHARE,
    "train.valid_every": _NOT_NEGATIVE, "train.valid_rows": _NOT_NEGATIVE, "train.valid_batch_size": _NOT_NEGATIVE,
    "train.log_every": _COUNT, "train.sample_every": _NOT_NEGATIVE, "train.max_bad_steps": _COUNT,
    "train.spike_factor": _NOT_NEGATIVE,
    "train.num_threads": ("in [0, 1024]", lambda x: 0 <= x <= 1024),  # with very many torch dies without a word
    "checkpoint.every": _COUNT, "checkpoint.minutes": _NOT_NEGATIVE, "checkpoint.keep": _COUNT,
    "checkpoint.milestone_every": _NOT_NEGATIVE,
    "eval.draws": _COUNT, "eval.seed": _SEED, "eval.chain_rows": _NOT_NEGATIVE,
    "eval.rows": _NOT_NEGATIVE, "eval.perplexity_batch_size": _COUNT,
    "sampling.steps": _COUNT, "sampling.n": _COUNT, "sampling.length": _NOT_NEGATIVE, "sampling.batch_size": _COUNT,
    "sampling.seed": _SEED, "sampling.temperature": _NOT_NEGATIVE, "sampling.top_p": _UP_TO_ONE,
    "sampling.top_k": _NOT_NEGATIVE, "sampling.min_p": _BELOW_ONE, "sampling.eta": _SHARE, "sampling.t_on": _SHARE,
    "sampling.t_off": _SHARE, "sampling.alpha_on": _SHARE, "sampling.threshold": _NOT_NEGATIVE,
    "sampling.guidance": _NOT_NEGATIVE, "sampling.stride": _NOT_NEGATIVE,
    "bench.steps": _COUNT, "bench.warmup": _NOT_NEGATIVE, "bench.evaluations": _NOT_NEGATIVE,
    "compare.jobs": _COUNT, "bench.dense_steps": _COUNT, "bench.vocab_size": ("at least 3", lambda x: x >= 3),
    "serve.port": ("in [0, 65535]", lambda x: 0 <= x <= 65535), "serve.slots": _COUNT, "serve.queue": _COUNT,
    "serve.max_length": _NOT_NEGATIVE, "serve.max_steps": _COUNT, "serve.max_n": _COUNT, "serve.max_body": _COUNT,
    "serve.timeout": _POSITIVE, "serve.read_timeout": _POSITIVE, "serve.grace": _NOT_NEGATIVE,
    "reason.n_train": _NOT_NEGATIVE, "reason.n_valid": _COUNT, "reason.n_test": _NOT_NEGATIVE,
    "reason.hops": _NOT_NEGATIVE, "reason.nodes": _NOT_NEGATIVE, "reason.words": _NOT_NEGATIVE,
    "reason.names": _NOT_NEGATIVE, "reason.recite": _NOT_NEGATIVE, "reason.recite_rate": _POSITIVE,
    "reason.easier": _SHARE, "reason.epochs": _COUNT, "reason.epochs_per_stage": _COUNT,
    "reason.slots": _NOT_NEGATIVE, "reason.slots_per_stage": _COUNT,
    "reason.gamma": _NOT_NEGATIVE, "reason.valid_every": _NOT_NEGATIVE, "reason.minutes": _NOT_NEGATIVE,
    "reason.max_new_tokens": _NOT_NEGATIVE, "reason.eval_batch_size": _COUNT, "reason.row_multiple": _NOT_NEGATIVE,
}  # fmt: skip


def choices(key: str) -> tuple[str, ...] | None:
    """Names a closed setting may take; None where any value of its type is meant."""
    if key == "algo":
        return group_choices("algo")
    return CHOICES.get(key)


def check(cfg: Config, world_size: int = 1) -> None:
    """Raise a one-line ValueError for the first setting that cannot work."""
    for key in keys():
        value = get(cfg, key)
        if (allowed := choices(key)) is not None:
            choose(key, value, allowed)
        if key in RANGES:
            check_range(f"{key}={value}", value, key)
    check_model(cfg.model)
    check_noise(cfg.noise)
    check_objective(cfg.objective, cfg.model)
    check_train(cfg.train, cfg.model, world_size)
    check_sampling(cfg.sampling)
    check_sweep(cfg)
    require(
        cfg.data.name not in ("file", "prepared") or cfg.data.path != "",
        f"data.name={cfg.data.name} needs data.path=FILE_OR_FOLDER",
    )


def check_range(what: str, value: Any, key: str) -> None:
    wanted, holds = RANGES[key]
    finite = "finite and " if value == math.inf else ""  # which is, as it stands, above everything
    require(holds(value), f"{what} must be {finite}{wanted}")


def get(cfg: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_model(m: ModelConfig) -> None:
    require(
        m.hidden_size % (2 * m.n_heads) == 0,
        f"model.n_heads={m.n_heads} must split model.hidden_size={m.hidden_size} into heads of even width",
    )
    require(
        not m.anchored or m.n_denoiser_blocks >= 1,
        "model.n_denoiser_blocks=0 leaves no denoiser: give at least 1, or model.anchored=false",
    )
    require(
        m.adaln or not m.time_conditioning,
        "model.time_conditioning=true needs model.adaln=true, through which the noise level enters",
    )
    require(
        not (m.causal and m.time_conditioning),
        "model.causal=true has no noise level: set model.time_conditioning=false",
    )
    stacks = (m.n_blocks, m.n_denoiser_blocks) if m.anchored else (m.n_blocks,)
    longest = max(stacks) if m.bridge == "collapsed" else sum(stacks)
    require(longest >= 3 or not m.skips, "model.skips=true needs 3 blocks or more in one residual stream to skip one")


def check_noise(n: NoiseConfig) -> None:
    require(
        n.sigma_min < n.sigma_max,
        f"noise.sigma_min={n.sigma_min} must be below noise.sigma_max={n.sigma_max}",
    )


def check_objective(o: ObjectiveConfig, m: ModelConfig) -> None:
    require(
        (o.name == "autoregressive") == m.causal,
        f"objective.name={o.name} does not fit model.causal={str(m.causal).lower()}: "
        + ("autoregressive needs a causal model (algo=ar or a2r)" if not m.causal
           else "a causal model needs objective.name=autoregressive"),
    )  # fmt: skip
    require(
        o.name != "anelbo" or m.anchored,
        "objective.name=anelbo needs model.anchored=true (algo=adlm); without anchors choose objective.name=nelbo",
    )
    require(
        o.name not in ("d3pm", "score-entropy") or not m.anchored,
        f"objective.name={o.name} is a baseline without anchors: set model.anchored=false (algo=d3pm or sedd)",
    )
    require(
        o.name != "autoregressive" or m.anchored or (o.gamma <= 0 and o.gamma_end <= 0),
        f"objective.gamma={o.gamma}, objective.gamma_end={o.gamma_end}: plain AR has no anchors (algo=a2r has)",
    )
    require(
        o.gamma_end < 0 or o.gamma_warmup < 1,
        "objective.gamma_warmup=1 leaves nothing of the run for objective.gamma_end",
    )
    require(o.name != "d3pm" or o.T >= 1, "objective.name=d3pm is a discrete-time bound: set objective.T, e.g. 1000")
    require(
        o.T == 0 or o.name in ("nelbo", "d3pm"),
        f"objective.T={o.T} (discrete time) exists for nelbo and d3pm; objective.name={o.name} needs objective.T=0",
    )


def check_train(t: TrainConfig, m: ModelConfig, world_size: int) -> None:
    require(
        t.global_batch_size % world_size == 0,
        f"train.global_batch_size={t.global_batch_size} must be a multiple of the number of ranks ({world_size})",
    )
    per_rank = t.global_batch_size // world_size
    require(
        t.batch_size == 0 or per_rank % t.batch_size == 0,
        f"train.batch_size={t.batch_size} must divide the {per_rank} rows per rank "
        f"(train.global_batch_size={t.global_batch_size} over {world_size} ranks)",
    )
    require(
        per_rank % t.batch_parts == 0,
        f"train.batch_parts={t.batch_parts} must divide the {per_rank} rows per rank "
        f"(train.global_batch_size={t.global_batch_size} over {world_size} ranks)",
    )
    require(m.length % t.row_pieces == 0, f"train.row_pieces={t.row_pieces} must divide model.length={m.length}")
    piece = m.length // t.row_pieces
    require(
        RANGES["model.length"][1](piece),  # a row of one token has nothing to predict it from, or to predict
        f"train.row_pieces={t.row_pieces} cuts model.length={m.length} into rows of {piece}; they must be"
        f" {RANGES['model.length'][0]} tokens long",
    )
    check_graphs(t, world_size)
    device, _, number = t.device.partition(":")
    require(
        device in ("auto", "cpu", "cuda") and (not number or (device == "cuda" and number.isdigit())),
        f"train.device={t.device!r} must be auto, cpu, cuda or cuda:N",
    )


def check_graphs(t: TrainConfig, world_size: int) -> None:
    on, rows = "train.cuda_graphs=true", t.global_batch_size // world_size
    if not t.cuda_graphs:
        return
    require(t.device != "cpu", f"{on} needs a GPU, not train.device=cpu")
    require(world_size == 1, f"{on} is for one process, not {world_size}")
    require(t.strategy != "fsdp", f"{on} needs whole weights in one place: train.strategy=ddp, not fsdp")
    require(not t.checkpoint_activations, f"{on} cannot record train.checkpoint_activations=true")
    require(
        t.batch_size in (0, rows),
        f"{on} needs all rows of a step at once: train.batch_size={rows}, not {t.batch_size}",
    )


def check_sweep(cfg: Config) -> None:
    """Every setting that `adlm evaluate` would draw from, held to the rules of sampling.*."""
    for s in settings_of(cfg.eval, cfg.sampling):
        choose("eval.samplers", s.sampler, CHOICES["sampling.sampler"])
        for name in ("steps", "temperature", "top_p"):
            value, key = getattr(s, name), f"eval.{name}" + "s" * (name != "steps")
            check_range(f"{key}: {value}", value, f"sampling.{name}")
        check_sampling(s)


def check_sampling(s: SamplingConfig) -> None:
    if s.sampler != "remdm-loop":
        return
    require(
        0 < s.t_off < s.t_on < 1,
        f"sampling.t_off={s.t_off} must lie below sampling.t_on={s.t_on}, both inside (0, 1), for remdm-loop",
    )
    require(0 < s.alpha_on < 1, f"sampling.alpha_on={s.alpha_on} must be in (0, 1) for remdm-loop")
    require(
        s.eta * s.alpha_on <= 1 - s.alpha_on + 1e-12,
        f"sampling.eta={s.eta} re-masks more than is revealed: remdm-loop needs eta * alpha_on <= 1 - alpha_on, "
        f"so sampling.eta <= {(1 - s.alpha_on) / s.alpha_on:.4g} at sampling.alpha_on={s.alpha_on}",
    )

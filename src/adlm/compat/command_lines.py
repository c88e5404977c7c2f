"""Translation of the release's command lines to ours, in argv before settings are composed; and of a model's settings
to the release's names.

One explicit table, `TRANSLATIONS`: every key of the public ADLM / MDLM / ReMDM command lines is either translated, or
accepted with a note why it has no effect here, or refused with the alternative. Keys that neither project has are left
alone and refused by `adlm.config`. docs/configuration.md shows the same table.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from adlm.data.corpora import ALIASES, get_corpus
from adlm.errors import choose, require
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig
from adlm.tables import CORPORA

Given = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Translation:
    """Keys of the release that are read together. `becomes` describes our overrides for them; `note` says why they are
    ignored on this line, if they are."""

    keys: tuple[str, ...]
    becomes: str
    apply: Callable[[Given], list[str]]
    note: Callable[[Given], str] = lambda given: ""


def _rename(old: str, new: str) -> Translation:
    return Translation((old,), f"`{new}`", lambda given: [f"{new}={given[old]}"])


def _corpus(old: str, new: str) -> Translation:
    return Translation((old,), f"`{new}`", lambda given: [f"{new}={ALIASES.get(given[old], given[old])}"])


def _ignore(old: str, why: str) -> Translation:
    return Translation((old,), f"ignored: {why}", lambda given: [], lambda given: why)


def _values(old: str, table: dict[str, list[str]], becomes: str) -> Translation:
    """A key with a few values, each of which becomes some overrides."""
    return Translation((old,), becomes, lambda given: table[choose(old, given[old].lower(), table)])


def _true(value: str) -> bool:
    return choose("value", value.lower(), ("true", "false")) == "true"


def anchor_weight(factor1: float, factor2: float) -> tuple[float, float]:
    """objective.gamma and gamma_warmup for the release's weight min(factor1, step / max_steps * factor2), which reaches
    factor1 after factor1 / factor2 of the run."""
    return (factor1, min(1.0, factor1 / factor2)) if factor1 > 0 and factor2 > 0 else (0.0, 0.0)


def _anchor_loss(given: Given) -> bool:
    """Whether the anchor loss is on: by the release's switch, which is off by default, or by our name of an algorithm
    that has one."""
    switch = given.get("enable_anchor_loss")
    return _true(switch) if switch is not None else given.get("algo") in ("adlm", "adlm-time", "a2r")


def _gamma(given: Given) -> list[str]:
    factors = _number(given, "base_scaling_factor1", 3e-3), _number(given, "base_scaling_factor2", 1.0)
    if not _anchor_loss(given):
        return [] if "enable_anchor_loss" in given or "algo" in given else ["algo=two-stage"]
    gamma, warmup = anchor_weight(*factors)
    return [f"objective.gamma={gamma}", f"objective.gamma_warmup={warmup}"]


def _number(given: Given, key: str, default: float) -> float:
    try:
        return float(given.get(key, default))
    except ValueError:
        raise ValueError(f"{key}={given[key]} is not a number") from None


def _sample_count(given: Given) -> list[str]:
    batches = _number(given, "sampling.num_sample_batches", 1)
    size = _number(given, "loader.eval_batch_size", 1)
    return [f"sampling.n={int(batches * size)}"] if "sampling.num_sample_batches" in given else []


def _sampler(given: Given) -> list[str]:
    # Order as in the release: dfm has its own loop; the predictors ddpm and analytic never read sampling.sampler.
    predictor = choose(
        "sampling.predictor", given.get("sampling.predictor", "ddpm_cache"), ("ddpm", "ddpm_cache", "analytic")
    )
    if _true(given.get("sampling.dfm", "false")):
        return ["sampling.sampler=dfm"]
    if predictor == "analytic" and "sedd" in (given.get("parameterization"), given.get("algo")):
        predictor = "score"  # its analytic predictor uses the network's ratios unchanged
    return [] if predictor == "ddpm_cache" else [f"sampling.sampler={predictor}"]


def _semi_ar(given: Given) -> list[str]:
    if not _true(given.get("sampling.semi_ar", "false")):
        return []
    stride = int(_number(given, "sampling.stride_length", 1))
    length = int(_number(given, "model.length", 1024))
    return [
        f"sampling.stride={stride}",
        f"sampling.length={length + stride * int(_number(given, 'sampling.num_strides', 1))}",
    ]


def _out(given: Given) -> list[str]:
    keys = ("checkpointing.save_dir", "sampling.generated_seqs_path", "hydra.run.dir")
    folder = next((given[key] for key in keys if key in given), "")
    return [f"out={folder.rstrip('/') or folder}"] if folder and "${" not in folder else []


def _time_conditioning(given: Given) -> list[str]:
    # The release's AR network takes no noise level, whatever this setting is.
    causal = "ar" in (given.get("parameterization"), given.get("backbone")) or given.get("algo") in ("ar", "a2r")
    if causal:
        return []
    if _true(given["time_conditioning"]):
        return ["model.conditioning=sigma"]
    timed = {"sedd", "d3pm", "adlm-time", "mdlm-time"} & {given.get("parameterization"), given.get("algo")}
    return ["model.conditioning=constant"] if timed else []  # other models have no noise level anyway


def _refuse(old: str, why: str, harmless: Sequence[str] = ()) -> Translation:
    def apply(given: Given) -> list[str]:
        if given[old].lower() not in harmless:
            raise ValueError(f"{old}={given[old]}: {why}")
        return []

    return Translation((old,), f"refused: {why}" + (f" ({', '.join(harmless)} is accepted)" if harmless else ""), apply)


TRANSLATIONS: tuple[Translation, ...] = (
    # objective
    _values(
        "enable_anchor_loss",
        {"true": ["algo=adlm"], "false": ["algo=two-stage"]},
        "`algo=adlm` (true), `algo=two-stage` (false)",
    ),
    Translation(
        ("base_scaling_factor1", "base_scaling_factor2"),
        "`objective.gamma` = factor1, `objective.gamma_warmup` = factor1 / factor2; without `enable_anchor_loss=true`"
        " ignored, as in the release",
        _gamma,
        lambda given: "" if _anchor_loss(given) else "without enable_anchor_loss=true there is no anchor loss",
    ),
    _rename("threshold", "objective.tau"),
    _values(
        "parameterization",
        {"subs": [], "sedd": ["algo=sedd"], "d3pm": ["algo=d3pm"], "ar": ["algo=ar"]},
        "`algo=sedd`, `d3pm` or `ar`; `subs` keeps the algorithm",
    ),
    _values("backbone", {"dit": [], "ar": ["algo=ar"]}, "`algo=ar`; `dit` keeps the algorithm"),
    _rename("T", "objective.T"),
    Translation(
        ("time_conditioning",),
        "`model.conditioning=sigma` (true) or `constant` (false); nothing for `ar`",
        _time_conditioning,
    ),
    _rename("training.ema", "optim.ema"),
    _rename("training.sampling_eps", "objective.sampling_eps"),
    _ignore("training.antithetic_sampling", "times are always stratified over the global batch"),
    _refuse("training.importance_sampling", "other densities of t are objective.time_density", ("false",)),
    _refuse("training.change_of_variables", "other densities of t are objective.time_density", ("false",)),
    _ignore("diffusion", "the process is always absorbing"),
    _ignore("subs_masking", "SUBS is always applied to diffusion models"),
    _ignore("replica_backbone", "the release does not read it"),
    # data and batches
    _corpus("data.train", "data.name"),
    _corpus("data.valid", "data.valid_name"),
    _rename("data.tokenizer_name_or_path", "data.tokenizer"),
    _ignore("data.streaming", "sequences are prepared once and memory-mapped"),
    _rename("loader.global_batch_size", "train.global_batch_size"),
    _rename("loader.batch_size", "train.batch_size"),
    Translation(
        ("sampling.num_sample_batches", "loader.eval_batch_size"),
        "`sampling.n` = batches x size (`sampling.batch_size` never changes a text)",
        _sample_count,
    ),
    _ignore("loader.eval_global_batch_size", "results do not depend on it"),
    _ignore("loader.num_workers", "sequences are memory-mapped"),
    _ignore("loader.pin_memory", "sequences are memory-mapped"),
    # model, noise, optimizer
    _rename("noise.type", "noise.name"),
    _ignore("model.name", "the group's name is enough"),
    _ignore("model.type", "there is one transformer family"),
    _ignore("model.scale_by_sigma", "the release does not read it"),
    _refuse("model.tie_word_embeddings", "embeddings and heads are never tied, as in the release", ("false",)),
    _rename("lr_scheduler.num_warmup_steps", "optim.warmup"),
    _rename("lr_scheduler.warmup_t", "optim.warmup"),
    _ignore("lr_scheduler.lr_min", "the last rate is optim.min_lr_ratio, a fraction of the peak"),
    _ignore("lr_scheduler.warmup_lr_init", "warm-up starts at 0"),
    # trainer
    _rename("trainer.max_steps", "train.steps"),
    _rename("trainer.val_check_interval", "train.valid_every"),
    _rename("trainer.log_every_n_steps", "train.log_every"),
    _rename("trainer.gradient_clip_val", "optim.clip"),
    _values(
        "trainer.precision",
        {"bf16": ["train.precision=bf16"], "bf16-mixed": ["train.precision=bf16"]}
        | {"32": ["train.precision=fp32"], "32-true": ["train.precision=fp32"]},
        "`train.precision` (bf16 or fp32)",
    ),
    _values(
        "trainer.accelerator",
        {"cuda": ["train.device=cuda"], "gpu": ["train.device=cuda"], "cpu": ["train.device=cpu"], "auto": []},
        "`train.device`",
    ),
    _values("strategy", {"ddp": ["train.strategy=ddp"], "fsdp": ["train.strategy=fsdp"]}, "`train.strategy`"),
    _ignore("trainer.num_nodes", "torchrun decides"),
    _ignore("trainer.devices", "torchrun decides"),
    _ignore("trainer.accumulate_grad_batches", "it follows from train.global_batch_size and train.batch_size"),
    _ignore("trainer.num_sanity_val_steps", "there is no sanity pass"),
    _ignore("trainer.limit_train_batches", "the length of a run is train.steps"),
    _ignore("trainer.limit_val_batches", "the size of a validation is train.valid_sequences"),
    # checkpoints and folders
    Translation(
        ("checkpointing.save_dir", "sampling.generated_seqs_path", "hydra.run.dir"),
        "`out` (the first of them that is given); relative to where you are, never to a run folder",
        _out,
    ),
    _rename("checkpointing.resume_from_ckpt", "checkpoint.resume"),
    _refuse(
        "checkpointing.resume_ckpt_path",
        "a run resumes from its own folder (out=FOLDER); to start from other weights use checkpoint.init_from=FOLDER",
    ),
    _rename("callbacks.checkpoint_every_n_steps.every_n_train_steps", "checkpoint.every"),
    # evaluation
    _rename("eval.checkpoint_path", "eval.checkpoint"),
    _values("eval.disable_ema", {"true": ["eval.ema=false"], "false": ["eval.ema=true"]}, "`eval.ema`, negated"),
    _ignore("eval.compute_generative_perplexity", "samples are scored by adlm evaluate (mode=sample_eval)"),
    _rename("eval.gen_ppl_eval_model_name_or_path", "eval.judge"),
    _ignore("eval.compute_perplexity_on_sanity", "there is no sanity pass"),
    _ignore("eval.generate_samples", "samples during training are train.sample_every"),
    # sampling
    _rename("sampling.nucleus_p", "sampling.top_p"),
    Translation(
        ("sampling.predictor", "sampling.dfm"),
        "`sampling.sampler=ddpm`, `analytic` (`score` for `sedd`) or `dfm`; `ddpm_cache` keeps the sampler",
        _sampler,
    ),
    Translation(
        ("sampling.semi_ar", "sampling.stride_length", "sampling.num_strides"),
        "`sampling.stride` and `sampling.length`",
        _semi_ar,
    ),
    _ignore("sampling.noise_removal", "no mask is ever left; sampling.parity=release fills the last ones greedily"),
    _ignore("sampling.num_sample_log", "samples during training are train.sample_every"),
    # tracking
    _ignore("wandb.project", "set the environment variable WANDB_PROJECT"),
    _ignore("wandb.name", "set the environment variable WANDB_NAME"),
    _ignore("wandb", "logging to wandb is off unless train.track=wandb"),
)  # fmt: skip

RELEASE_KEYS: dict[str, Translation] = {key: t for t in TRANSLATIONS for key in t.keys}

# Groups of keys that configure libraries we do not use.
IGNORED_PREFIXES = {
    "wandb.": "logging to wandb is off unless train.track=wandb",
    "hydra.": "there is no Hydra application: no change of directory, no run folders of its own",
    "callbacks.": "checkpoints are configured by checkpoint.*",
    "strategy.": "train.strategy=ddp or fsdp needs no further settings",
}

# Names of the release's group files: (group, name) -> ours.
GROUP_NAMES = {
    **{("data", theirs): ours for theirs, ours in ALIASES.items()},
    ("data", "openwebtext-streaming"): "openwebtext",
    ("data", "lm1b-streaming"): "lm1b",
    ("model", "small-ar"): "small",
    ("model", "tiny-ar"): "tiny",
    ("noise", "ar"): "loglinear",
    ("lr_scheduler", "constant_warmup"): "constant",
    ("lr_scheduler", "cosine_decay_warmup"): "cosine",
}

# Commands that the release's `mode=` stands for.
MODES = {"train": "train", "ppl_eval": "ppl", "sample_eval": "evaluate"}

# Defaults of adlm_main.py and main.py for keys that are not given; parity settings make their results comparable.
PROGRAM_ALGO = {"adlm_main": "two-stage", "main": "mdlm"}
RELEASE_DEFAULTS = (
    "model=small", "data=openwebtext", "recipe=published", "data.packing=release", "sampling.parity=release",
    "sampling.steps=128", "train.log_every=10", "eval.judge_rule=release",
)  # fmt: skip


def rewrite(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """argv with the release's names or ours -> (argv with ours, notes on ignored keys).

    The translation of several keys replaces the first of them, so that the later of two settings still wins.
    """
    split = [_split(text) for text in argv]
    given = {key: value for key, value in split if key}
    done: set[int] = set()
    ours: list[str] = []
    notes: list[str] = []
    for text, (key, value) in zip(argv, split):
        translation = RELEASE_KEYS.get(key)
        family = next((prefix for prefix in IGNORED_PREFIXES if key.startswith(prefix)), None)
        if translation is not None:
            if id(translation) not in done:
                done.add(id(translation))
                ours += translation.apply(given)
            if note := translation.note(given):
                notes.append(f"{key}={value} ignored: {note}")
        elif family is not None:
            notes.append(f"{key}={value} ignored: {IGNORED_PREFIXES[family]}")
        elif (key, value) in GROUP_NAMES:
            ours.append(f"{key}={GROUP_NAMES[key, value]}")
        else:
            ours.append(text)
    return ours, notes


def _split(text: str) -> tuple[str, str]:
    """(key without + or ++, value without quotes); ('', '') if it is not an override."""
    key, equals, value = text.partition("=")
    if not equals or key.startswith("~"):
        return "", ""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return key.lstrip("+"), value


def release_line(program: str, argv: Sequence[str]) -> list[str]:
    """Our equivalent of `python -m adlm_main mode=... ...` or `python -m main ...`: a command, the release's defaults,
    then the overrides."""
    given = dict(_split(text) for text in argv)
    command = MODES[choose("mode", given.get("mode", "train"), MODES)]
    extra = [f"algo={PROGRAM_ALGO[program]}", *RELEASE_DEFAULTS]
    if given.get("data", "openwebtext") == "openwebtext":
        extra.append("data.valid_name=wikitext103")  # the release trains on all of it and validates elsewhere
    corpus = GROUP_NAMES.get(("data", given.get("data", "")), given.get("data", ""))
    if corpus in CORPORA and get_corpus(corpus)[1].packing == "documents" and "data.wrap" not in given:
        extra.append("data.packing=documents")
    if given.get("noise") == "linear":
        raise ValueError("noise=linear: the release's linear sigma has no counterpart; choose loglinear or geometric")
    if "model.n_blocks" in given:
        extra.append(f"model.n_denoiser_blocks={int(_number(given, 'model.n_blocks', 0)) // 2}")
    if "seed" in given:
        extra.append(f"sampling.seed={given['seed']}")
    return [command, *extra, *(text for text in argv if _split(text)[0] != "mode")]


# Our models in the release's names

# The release's names of schedules -> ours. Its `linear` is linear in sigma, unlike ours.
NOISES = {"loglinear": "loglinear", "geometric": "geometric", "cosine": "cosine", "cosinesqr": "cosine-squared"}
OBJECTIVES = {"subs": "nelbo", "sedd": "score-entropy", "d3pm": "d3pm", "ar": "autoregressive"}


def check_expressible(m: ModelConfig, noise: NoiseConfig, objective: ObjectiveConfig) -> None:
    """Refuse models that the release's settings cannot describe: it has one block, two shapes and one anchor loss."""
    keys = ("n_kv_heads", "head_size", "mlp_size", "norm_eps", "qkv_bias", "rope_base", "tied", "shift")
    keys += ("norm", "activation", "qk_norm", "bias")
    published: dict[str, Any] = {key: getattr(ModelConfig, key) for key in keys}
    if m.anchored:
        published |= {"bridge": "linear", "causal": False, "n_denoiser_blocks": m.n_blocks // 2}
    published["conditioning"] = "none" if m.causal else "sigma" if m.is_time_conditioned else "constant"
    trained: dict[str, Any] = {} if m.causal else {"time_density": 1.0, "causal_until": 0.0}
    if m.anchored and objective.gamma > 0:
        trained |= {"anchor_rule": "count", "anchor_positions": "all", "anchor_fraction": 1.0, "gamma_until": 1.0}
        require(
            objective.gamma_warmup > 0,
            "the release has no anchor loss with objective.gamma_warmup=0: its weight rises from 0",
        )
    masked = {} if m.causal or noise.name == "geometric" else {"eps": 1e-3}
    for section, settings, expected in (
        ("model", m, published), ("objective", objective, trained), ("noise", noise, masked)
    ):  # fmt: skip
        for key, value in expected.items():
            given = getattr(settings, key)
            require(
                given == value,
                f"the release has no model with {section}.{key}={given}, only {value}: nothing to export to",
            )


def release_settings(m: ModelConfig, n: NoiseConfig, o: ObjectiveConfig) -> dict[str, Any]:
    """A model's settings in the form of the release's checkpoints."""
    kind = {ours: theirs for theirs, ours in OBJECTIVES.items()}.get(o.name, "subs")
    noises = {ours: theirs for theirs, ours in NOISES.items()}
    noise = noises[choose("noise.name", n.name, noises)]
    return {
        "mode": "train",
        "diffusion": "absorbing_state",
        "backbone": "ar" if m.causal else "dit",
        "parameterization": kind,
        "time_conditioning": m.is_time_conditioned,
        "T": o.T,
        "subs_masking": False,
        "enable_anchor_loss": m.anchored and o.gamma > 0,
        "threshold": o.tau,
        "base_scaling_factor1": o.gamma,
        "base_scaling_factor2": o.gamma / o.gamma_warmup if o.gamma_warmup > 0 else 1,
        "model": {
            "name": "small",
            "type": "ddit",
            "hidden_size": m.hidden_size,
            "cond_dim": m.cond_dim,
            "length": m.length,
            "n_blocks": m.n_blocks,
            "n_heads": m.n_heads,
            "scale_by_sigma": True,
            "dropout": m.dropout,
            "tie_word_embeddings": False,
            **({"causal": True} if m.causal else {}),
        },
        "noise": {"type": noise, "sigma_min": n.sigma_min, "sigma_max": n.sigma_max},
        "training": {"ema": 0.9999, "sampling_eps": o.sampling_eps},
    }

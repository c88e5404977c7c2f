"""The checks that need more than one setting; each message names the key to change."""

from typing import Any

from adlm.config.keys import group_choices, keys
from adlm.errors import choose, require
from adlm.rules import Choices
from adlm.samplers.rules import check_sampling
from adlm.schema import Config, ModelConfig, NoiseConfig, ObjectiveConfig, TrainConfig
from adlm.tables import OBJECTIVES


def choices(key: str) -> tuple[str, ...] | None:
    """Names a closed setting may take; None where any value of its type is meant."""
    if key == "algo":
        return group_choices("algo")
    rule = keys()[key].rule
    return tuple(rule.names) if isinstance(rule, Choices) else None


def check(cfg: Config, world_size: int = 1) -> None:
    """Raise a one-line ValueError for the first setting that cannot work."""
    for key in keys().values():
        value = get(cfg, key.name)
        if key.rule is not None:
            key.rule.check(key.name, value)
    choose("algo", cfg.algo, group_choices("algo"))
    cfg.model.check()
    check_noise(cfg.noise)
    check_objective(cfg.objective, cfg.model)
    check_train(cfg.train, cfg.model, world_size)
    check_sampling(cfg.sampling)
    require(
        cfg.data.name not in ("file", "prepared") or cfg.data.path != "",
        f"data.name={cfg.data.name} needs data.path=FILE_OR_FOLDER",
    )


def get(cfg: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_noise(n: NoiseConfig) -> None:
    require(
        n.sigma_min < n.sigma_max,
        f"noise.sigma_min={n.sigma_min} must be below noise.sigma_max={n.sigma_max}",
    )


def check_objective(o: ObjectiveConfig, m: ModelConfig) -> None:
    """The rules of our objectives. One of another package states its own: it is loaded, and asked."""
    require(
        o.gamma_end < 0 or o.gamma_warmup < 1,
        "objective.gamma_warmup=1 leaves nothing of the run for objective.gamma_end",
    )
    if o.name not in OBJECTIVES.entries:
        OBJECTIVES.load(o.name, "objective.name").check(o, m)
        return
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
        m.length % t.length_warmup == 0, f"train.length_warmup={t.length_warmup} must divide model.length={m.length}"
    )
    piece = m.length // t.length_warmup
    require(
        piece >= 4,  # a row of one token has nothing to predict it from, or to predict
        f"train.length_warmup={t.length_warmup} cuts model.length={m.length} into sequences of {piece}; they must be at"
        " least 4 tokens long",
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

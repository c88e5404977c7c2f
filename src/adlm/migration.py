"""Conversion of settings of earlier versions to today's: renamed keys, renamed values, removed keys.

Exported folders, run folders and command lines of every version still load. A removed key is dropped if its value had
no effect, and refused if a model or run really used it. `adlm.config` calls `migrate` wherever settings come in, and no
code below it knows old names.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from adlm.errors import require
from adlm.schema import DataConfig, ModelConfig, TrainConfig

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

RENAMED = {
    "data.max_rows": "data.max_sequences",
    "data.num_proc": "train.num_threads",
    "data.valid_share": "data.valid_fraction",
    "bench.out": "out",
    "eval.out": "out",
    "eval.perplexity_batch_size": "eval.batch_size",
    "eval.release_json": "out",
    "eval.rows": "eval.sequences",
    "eval.samplers": "sampling.sampler",
    "eval.steps": "sampling.steps",
    "eval.temperatures": "sampling.temperature",
    "eval.top_ps": "sampling.top_p",
    "model.mlp_ratio": "model.mlp_size",  # see `_with_mlp_size`
    "objective.anchor_share": "objective.anchor_fraction",
    "objective.time_density_a": "objective.time_density",
    "optim.final": "optim.min_lr_ratio",
    "reason.eval_batch_size": "eval.batch_size",
    "reason.gamma": "objective.gamma",
    "reason.recite": "reason.story_steps",
    "reason.remove_steps": "reason.method",
    "reason.slots_per_stage": "reason.method",
    "reason.train_path": "data.path",
    "reason.valid_path": "data.valid_path",
    "sampling.out": "out",
    "serve.slots": "sampling.batch_size",
    "train.row_pieces": "train.length_warmup",
    "train.row_pieces_share": "train.length_warmup_fraction",
    "train.valid_rows": "train.valid_sequences",
}
"""Old key -> today's. A key that is also in REMOVED is renamed on the command line, where the user typed it, and
dropped from saved settings, unless its value had an effect there: then it replaces today's key."""

VALUES = {("model.bridge", "collapsed"): "linear"}
"""(today's key, old value) -> today's value."""

REMOVED_VALUES = {("model.bridge", "residual"), ("noise.name", "polynomial")}
"""(today's key, old value) that this version cannot read."""

REMOVED: dict[str, tuple[Any, ...]] = {
    "bench.dense_steps": (),
    "bench.evaluations": (),
    "bench.out": (),
    "bench.vocab_size": (50258,),
    "bench.warmup": (),
    "checkpoint.milestone_every": (),
    "checkpoint.minutes": (),
    "cluster.links": ("450,50",),
    "cluster.mtbf": (50_000.0,),
    "cluster.price": (),
    "eval.chain_rows": (),
    "eval.chain_sequences": (),
    "eval.features": (),
    "eval.mauve": ("auto", "true"),
    "eval.out": (),
    "eval.reference": (),
    "eval.release_json": (),
    "eval.samplers": (),
    "eval.seed": (0,),
    "eval.steps": (),
    "eval.temperatures": (),
    "eval.top_ps": (),
    "lora.alpha": (16.0,),
    "mode": (),
    "model.skips": (False,),
    "model.value_residual": (False,),
    "noise.power": (),  # only for the schedule polynomial
    "objective.gamma_end": (-1.0,),
    "objective.hard": (),  # a threshold only for anchor_rule=loss
    "objective.rarity": (),  # a threshold only for anchor_rule=rarity
    "objective.time_density_anneal": (0.8,),  # any value, if times are uniform: see `migrate`
    "objective.time_density_b": (),  # see `migrate`
    "optim.muon_momentum": (),
    "reason.balanced": (False,),
    "reason.easier": (0.0,),
    "reason.eval_batch_size": (),
    "reason.fresh": (False,),
    "reason.gamma": (),
    "reason.hops": (0,),
    "reason.max_new_tokens": (0,),
    "reason.minutes": (0.0,),
    "reason.names": (0,),
    "reason.nodes": (0,),
    "reason.reset_optimizer": (),
    "reason.recite_rate": (),
    "reason.row_multiple": (),
    "reason.sorted_batches": (8,),
    "reason.story_lr_ratio": (),
    "reason.terse": (False,),
    "reason.train_path": ("",),
    "reason.valid_every": (None,),
    "reason.valid_path": ("",),
    "reason.words": (0,),
    "sampling.grid": ("",),
    "sampling.guidance": (0.0,),
    "sampling.out": (),
    "serve.max_body": (),
    "serve.read_timeout": (),
    "track.name": (),
    "track.project": (),
    "train.attention": (),
    "train.batch_parts": (1,),
    "train.batch_parts_share": (),
    "train.max_bad_steps": (),
    "train.spike_factor": (0.0,),
    "train.valid_batch_size": (),
}
"""Removed key -> the values without effect, so that dropping the key changes nothing. An empty tuple: any value may be
dropped (the key never affected what a model computes)."""

TRAINING_ONLY = {
    "lora.alpha", "objective.gamma_end", "objective.time_density_anneal", "reason.fresh", "reason.sorted_batches",
    "train.spike_factor",
}  # fmt: skip
"""Keys of REMOVED that affect how a run continues, not what its model computes (adapters store their own alpha): such a
model is loaded, but such a run is not resumed."""

REPORT_ONLY = {
    "bench.vocab_size", "cluster.links", "cluster.mtbf", "eval.mauve", "eval.seed", "reason.max_new_tokens",
    "reason.minutes", "reason.valid_every",
}  # fmt: skip
"""Keys of REMOVED that only affected how a run was measured or predicted: any saved value is dropped."""

ADVICE = {
    "eval.mauve": "MAUVE is computed where mauve-text is installed and there is data to compare with",
    "reason.valid_every": "train.valid_every says it, in optimizer steps",
}
"""Removed key -> what to do instead, if it takes more than another name."""


@dataclass(frozen=True)
class Joined:
    """Several old keys that became one key."""

    key: str
    default: Any
    """Default of today's key, equivalent to the defaults of the old keys."""
    join: Callable[[dict[str, Any]], Any]
    """Values of the old keys -> today's value."""
    split: Callable[[Any], dict[str, Any]]
    """Today's value -> equivalent values of the old keys, for those that are not given."""

    @property
    def old(self) -> set[str]:
        return self.split(self.default).keys() - {self.key}


def _join_conditioning(old: dict[str, Any]) -> str:
    adaln, timed = _is_true(old, "model.adaln"), _is_true(old, "model.time_conditioning")
    require(adaln or not timed, "model.time_conditioning=true needs model.adaln=true (today: model.conditioning=sigma)")
    return "none" if not adaln else old["model.time_input"] if timed else "constant"


def _split_conditioning(value: str) -> dict[str, Any]:
    return {
        "model.adaln": value != "none",
        "model.time_conditioning": value in ("sigma", "t"),
        "model.time_input": "t" if value == "t" else "sigma",
    }


def _join_init(old: dict[str, Any]) -> str:
    """Today's value. Loaded weights do not depend on it, so any two old values are accepted. Zeros together with torch
    were never run."""
    zero = _is_true(old, "model.zero_init") and old["model.init"] == "normal"
    return "normal-zero" if zero else old["model.init"]


def _split_init(value: str) -> dict[str, Any]:
    return {"model.init": value.removesuffix("-zero"), "model.zero_init": value == "normal-zero"}


def _join_packing(old: dict[str, Any]) -> str:
    return old["data.packing"] if _is_true(old, "data.wrap") else "documents"


def _split_packing(value: str) -> dict[str, Any]:
    """Old values for a packing. `documents` are not wrapped; if a setting wraps them after all, they are a stream."""
    one_each = value == "documents"
    return {"data.wrap": not one_each, "data.packing": DataConfig.packing if one_each else value}


def _join_track(old: dict[str, Any]) -> str:
    return next((name for name in ("tensorboard", "wandb") if _is_true(old, f"track.{name}")), "")


def _split_track(value: str) -> dict[str, Any]:
    return {f"track.{name}": value == name for name in ("tensorboard", "wandb")}


JOINED = (
    Joined("data.packing", DataConfig.packing, _join_packing, _split_packing),
    Joined("model.conditioning", ModelConfig.conditioning, _join_conditioning, _split_conditioning),
    Joined("train.track", TrainConfig.track, _join_track, _split_track),
    Joined("model.init", ModelConfig.init, _join_init, _split_init),
)

TASK_KEYS = ("reason.hops", "reason.nodes", "reason.words", "reason.names", "reason.balanced", "reason.terse")
TASK_OF_SHAPE: dict[tuple[Any, ...], str] = {
    (2, 6, 8, 4, True, True): "prosqa-2hop",
    (0, 0, 0, 0, True, False): "prosqa-balanced",
}
"""Values of the keys that shaped the questions of ProsQA -> today's task with this shape."""
METHOD_KEYS = ("reason.slots_per_stage", "reason.remove_steps")
METHOD_OF_SLOTS = {("acot", "3"): "acot-triple", ("coconut", "2"): "coconut-double"}
"""(method, slots per stage), if that number was not 1 -> today's method."""

OLD = {*RENAMED, *REMOVED, *METHOD_KEYS, "model.mlp_ratio"} | {key for joined in JOINED for key in joined.old}
"""All keys of earlier versions."""


def migrate(
    settings: dict[str, Any],
    source: str,
    groups: Callable[[], Mapping[str, Any]] | None = None,
    resumed: Collection[str] = (),
) -> dict[str, Any]:
    """Flat settings {"train.row_pieces": 4} of any version, with today's names. `source`: for messages.

    `groups`: given if the settings were typed on a command line, as texts; returns the values of that line's groups,
    which the settings override. `resumed`: the sections that a resuming run reads, if the settings are those of such a
    run. If an old name and today's are both given, today's counts.
    """
    # Earlier versions had lists of single values.
    items = {key: value if isinstance(value, list) else [value] for key, value in settings.items()}
    deep = [key for key, values in items.items() if any(isinstance(v, list | dict) for v in values)]
    require(not deep, f"{source}: {', '.join(deep)[:200]} must be single values")
    if settings.keys() & OLD:
        settings = _renamed(settings, source, groups, resumed)
    named = {key: value for key, value in settings.items() if isinstance(value, str)}
    gone = [f"{key}={value}" for key, value in named.items() if (key, value) in REMOVED_VALUES]
    require(not gone, f"{source}: {', '.join(gone)} is not supported any more (docs/LOG.md says why)")
    return settings | {key: VALUES.get((key, value), value) for key, value in named.items()}


def _renamed(
    settings: dict[str, Any], source: str, groups: Callable[[], Mapping[str, Any]] | None, resumed: Collection[str]
) -> dict[str, Any]:
    """Settings of an earlier version with today's keys; arguments as in `migrate`."""
    saved = groups is None
    a, b = (settings.get(f"objective.time_density_{end}", 1.0) for end in "ab")
    require(
        _same(a, b),
        f"{source}: objective.time_density_a={a} and time_density_b={b} differ: today times are drawn from"
        " Beta(a, a), objective.time_density=a",
    )
    density = settings.get("objective.time_density", settings.get("objective.time_density_a", 1.0 if saved else None))
    if _same(density, 1.0):
        settings = {key: value for key, value in settings.items() if key != "objective.time_density_anneal"}
    shape = tuple(settings.get(key) for key in TASK_KEYS)
    if settings.get("reason.task") == "prosqa" and shape in TASK_OF_SHAPE:
        settings = {key: value for key, value in settings.items() if key not in TASK_KEYS}
        settings["reason.task"] = TASK_OF_SHAPE[shape]
    for joined in JOINED:
        settings = _with_joined(settings, joined, source, groups)
    settings = _with_mlp_size(settings, source, groups)
    settings = _with_method(settings, source)

    def is_idle(old: str, value: Any) -> bool:
        dropped = saved and (old in REPORT_ONLY or (old in TRAINING_ONLY and old.partition(".")[0] not in resumed))
        return dropped or ((saved or old not in RENAMED) and _asks_for_nothing(value, REMOVED[old]))

    idle = {old for old, value in settings.items() if old in REMOVED and is_idle(old, value)}
    moved = {RENAMED[old] for old in settings.keys() & RENAMED.keys() & REMOVED.keys() - idle} if saved else set()
    settings = {key: value for key, value in settings.items() if key not in idle | moved}
    current: dict[str, Any] = {}
    for old, value in settings.items():
        key = RENAMED.get(old, old)
        why = ADVICE.get(old, "docs/LOG.md says why")
        require(key != old or old not in REMOVED, f"{source}: {old}={value} is not supported any more ({why})")
        if key == old or key not in settings:
            current[key] = value
    return current


def today_of(key: str) -> str:
    """Today's name of an old key; empty if it has none or was not renamed."""
    return RENAMED.get(key) or next((joined.key for joined in JOINED if key in joined.old), "")


def _with_joined(
    settings: dict[str, Any], joined: Joined, source: str, groups: Callable[[], Mapping[str, Any]] | None
) -> dict[str, Any]:
    """The settings with today's key in place of the old ones."""
    key = joined.key
    if not joined.old & settings.keys():
        return settings
    found = {name: value for name, value in settings.items() if name not in joined.old}
    old = joined.split(groups()[key] if groups else joined.default)
    if key not in found or key in old:
        try:
            found[key] = joined.join(old | {name: value for name, value in settings.items() if name in old})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return found


def _with_mlp_size(
    settings: dict[str, Any], source: str, groups: Callable[[], Mapping[str, Any]] | None
) -> dict[str, Any]:
    """The settings with the width of the MLP in place of its ratio to the width of the model. A command line without
    the model's width is refused, since that width may follow from a text."""
    if "model.mlp_ratio" not in settings:
        return settings
    found = {key: value for key, value in settings.items() if key != "model.mlp_ratio"}
    ratio, said = settings["model.mlp_ratio"], f"{source}: model.mlp_ratio={settings['model.mlp_ratio']!s:.60}"
    if not _same(found.get("model.mlp_size", 0), 0):
        return found
    if _same(ratio, 4):
        return found | {"model.mlp_size": 0}
    known = groups is None or settings.keys() & {"model.hidden_size", "model", "task", "experiment"}
    require(bool(known), f"{said} is now model.mlp_size={ratio} * model.hidden_size: give that number")
    width = settings.get("model.hidden_size", groups()["model.hidden_size"] if groups else ModelConfig.hidden_size)
    try:
        size = int(ratio) * int(width)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{said} is no whole number of model.hidden_size={width!s:.60}") from None
    require(size > 0, f"{said} must be at least 1")
    return found | {"model.mlp_size": size}


def _is_true(settings: Mapping[str, Any], key: str) -> bool:
    """Whether a boolean value, or its text on a command line, is true."""
    text = str(settings[key]).lower()
    require(text in TRUTH, f"{key}={settings[key]!s:.60} is not true or false")
    return TRUTH[text]


def _with_method(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings with a method's name in place of two old keys: slots of a stage, and whether acot removes steps."""
    per_stage, removes = (None if settings.get(key) is None else str(settings[key]).lower() for key in METHOD_KEYS)
    if per_stage is None and removes is None:
        return settings
    key = "method" if "method" in settings else "reason.method"
    method, task = str(settings.get(key, "acot")), str(settings.get("reason.task", settings.get("task", "prosqa")))
    today: str | None = method
    if per_stage not in (None, "1") and method.removeprefix("no-") not in ("cot", "pause"):  # those have no stages
        today = METHOD_OF_SLOTS.get((method, str(per_stage)))
    if method == "acot" and removes is not None:
        does, did = task.startswith("prosqa"), removes in ("true", "yes", "on", "1")
        if does != did:
            today = "acot-kept" if today == "acot" and does else None
    given = ", ".join(f"{key}={settings[key]}" for key in METHOD_KEYS if key in settings)
    require(today is not None, f"{source}: no method of today is reason.method={method} for {task} with {given}")
    return {key: value for key, value in settings.items() if key not in METHOD_KEYS} | {key: today}


def migrate_tree(config: dict[str, Any], source: str, resumed: Collection[str] = ()) -> dict[str, Any]:
    """Stored settings, by section and key, with the names of this version."""
    flat = {key: value for key, value in config.items() if not isinstance(value, dict)}
    for section, values in config.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
    tree: dict[str, Any] = {}
    for key, value in migrate(flat, source, resumed=resumed).items():
        section, dot, name = key.partition(".")
        if dot:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    return not harmless or any(_same(value, h) for h in harmless)


def _same(value: Any, other: Any) -> bool:
    """Whether a value, or its text on a command line, is `other`."""
    if value == other or str(value).lower() == str(other).lower():
        return True
    try:
        return not isinstance(other, bool) and float(value) == float(other)
    except (TypeError, ValueError):
        return False

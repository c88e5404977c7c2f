"""Settings of earlier versions, read as today's: renamed keys, renamed values, keys that are gone.

Exported folders, run folders and command lines of every version still load. A key that is gone is dropped where its
value asked for nothing, and refused where a model or run really used it. `adlm.config` calls `migrate` wherever
settings come in, and nothing below it knows old names.
"""

from typing import Any

from adlm.errors import require

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
"""Old key -> today's. One that is also in REMOVED is renamed on the command line, where the user asked for it, and
dropped from saved settings, unless it asks for something there: then it is in the place of today's."""

VALUES = {("model.bridge", "collapsed"): "linear"}
"""(today's key, old value) -> today's value."""

REMOVED_VALUES = {("model.bridge", "residual")}
"""(today's key, old value) that no version of today can read."""

REMOVED: dict[str, tuple[Any, ...]] = {
    "bench.dense_steps": (),
    "bench.evaluations": (),
    "bench.out": (),
    "bench.warmup": (),
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
    "mode": (),
    "model.skips": (False,),
    "model.value_residual": (False,),
    "objective.hard": (),  # a threshold of anchor_rule=loss alone
    "objective.rarity": (),  # a threshold of anchor_rule=rarity alone
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
    "train.valid_batch_size": (),
}
"""Key that is gone -> the values that ask for nothing, so that dropping the key changes nothing. An empty tuple: any
value may be dropped (it never touched what a model computes)."""

ORDER: dict[str, Any] = {"reason.fresh": False, "reason.sorted_batches": 8}
"""Keys of these that said in which order a run reads its examples -> the one value that is left. The weights of another
run load, and it is not continued (`not_continued`)."""

COURSE = (*ORDER, "eval.mauve", "eval.seed", "reason.max_new_tokens", "reason.minutes", "reason.valid_every")
"""Keys of these that only said how a run was made or measured: in its saved settings any value is dropped."""

ADVICE = {
    "eval.mauve": "MAUVE is computed where mauve-text is installed and there is data to compare with",
    "reason.valid_every": "train.valid_every says it, in optimizer steps",
}
"""Key that is gone -> what to do instead, where it is more than a name."""

TASK_KEYS = ("reason.hops", "reason.nodes", "reason.words", "reason.names", "reason.balanced", "reason.terse")
TASK_OF_SHAPE: dict[tuple[Any, ...], str] = {
    (2, 6, 8, 4, True, True): "prosqa-2hop",
    (0, 0, 0, 0, True, False): "prosqa-balanced",
}
"""Values of these keys, which shaped the questions of ProsQA -> the task that has this shape today."""
METHOD_OF_SLOTS = {("acot", "3"): "acot-triple", ("coconut", "2"): "coconut-double"}
"""Method and slots of a stage, where that was another number than 1 -> the method that has it today."""


def migrate(settings: dict[str, Any], source: str, saved: bool = True) -> dict[str, Any]:
    """Flat settings {"train.row_pieces": 4} of any version, as today's version names them. `source`: for messages.

    `saved=False`: they were typed on a command line, as texts. Where an old name and today's are both given, today's
    counts.
    """
    deep = [key for key, value in settings.items() if any(isinstance(v, list | dict) for v in _items(value))]
    require(not deep, f"{source}: {', '.join(deep)[:200]} must be single values")
    a, b = (settings.get(f"objective.time_density_{end}", 1.0) for end in "ab")
    require(
        _same(a, b),
        f"{source}: objective.time_density_a={a} and time_density_b={b} differ: today times are drawn from"
        " Beta(a, a), objective.time_density=a",
    )
    shape = tuple(settings.get(key) for key in TASK_KEYS)
    if settings.get("reason.task") == "prosqa" and shape in TASK_OF_SHAPE:
        settings = {key: value for key, value in settings.items() if key not in TASK_KEYS}
        settings["reason.task"] = TASK_OF_SHAPE[shape]
    settings = _with_method(settings, source)
    idle = {
        old
        for old, value in settings.items()
        if old in REMOVED
        and (saved or old not in RENAMED)
        and ((saved and old in COURSE) or _asks_for_nothing(value, REMOVED[old]))
    }
    moved = {RENAMED[old] for old in settings.keys() & RENAMED.keys() & REMOVED.keys() - idle} if saved else set()
    settings = {key: value for key, value in settings.items() if key not in idle | moved}
    current: dict[str, Any] = {}
    for old, value in settings.items():
        key = RENAMED.get(old, old)
        gone = (key == old and old in REMOVED) or (isinstance(value, str) and (key, value) in REMOVED_VALUES)
        why = ADVICE.get(old, "docs/LOG.md says why")
        require(not gone, f"{source}: {old}={value} is not supported any more ({why})")
        if key == old or key not in settings:
            current[key] = VALUES.get((key, value), value) if isinstance(value, str) else value
    return current


def _with_method(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The method by its name, where two keys said how many slots a stage adds, and whether acot removes steps."""
    keys = ("reason.slots_per_stage", "reason.remove_steps")
    per_stage, removes = (None if settings.get(key) is None else str(settings[key]).lower() for key in keys)
    if per_stage is None and removes is None:
        return settings
    key = "method" if "method" in settings else "reason.method"
    method, task = str(settings.get(key, "acot")), str(settings.get("reason.task", settings.get("task", "prosqa")))
    today: str | None = method
    if per_stage not in (None, "1") and method.removeprefix("no-") not in ("cot", "pause"):  # which have no stages
        today = METHOD_OF_SLOTS.get((method, str(per_stage)))
    if method == "acot" and removes is not None:
        does, did = task.startswith("prosqa"), removes in ("true", "yes", "on", "1")
        if does != did:
            today = "acot-kept" if today == "acot" and does else None
    given = ", ".join(f"{key}={settings[key]}" for key in keys if key in settings)
    require(today is not None, f"{source}: no method of today is reason.method={method} for {task} with {given}")
    return {key: value for key, value in settings.items() if key not in keys} | {key: today}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Stored settings, by section and key, as dotted keys."""
    flat = {key: value for key, value in config.items() if not isinstance(value, dict)}
    for section, values in config.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
    return flat


def migrate_tree(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Stored settings, by section and key, as this version names them."""
    tree: dict[str, Any] = {}
    for key, value in migrate(_flat(config), source).items():
        section, dot, name = key.partition(".")
        if dot:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree


def not_continued(config: dict[str, Any]) -> str:
    """The first of a run's stored settings with which no run can be continued today; empty: there is none."""
    flat = _flat(config)
    return next((f"{key}={flat[key]}" for key, left in ORDER.items() if key in flat and flat[key] != left), "")


def _items(value: Any) -> list[Any]:
    """What a setting consists of: earlier versions had lists of single values."""
    return value if isinstance(value, list) else [value]


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

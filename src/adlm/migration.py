"""Settings of earlier versions, read as today's: renamed keys, renamed values, keys that are gone.

Exported folders, run folders and command lines of every version still load. A key that is gone is dropped where its
value asked for nothing, and refused where a model or run really used it. `adlm.config` calls `migrate` wherever
settings come in, and nothing below it knows old names.
"""

from typing import Any

from adlm.errors import require

RENAMED = {
    "data.max_rows": "data.max_sequences",
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
    "sampling.out": "out",
    "train.row_pieces": "train.length_warmup",
    "train.row_pieces_share": "train.length_warmup_fraction",
    "train.valid_rows": "train.valid_sequences",
}
"""Old key -> today's. One that is also in REMOVED is renamed on the command line, where the user asked for it, and
dropped from saved settings: there it belonged to the command that wrote them."""

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
    "eval.out": (),
    "eval.reference": (),
    "eval.release_json": (),
    "eval.samplers": (),
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
    "reason.gamma": (),
    "reason.hops": (0,),
    "reason.names": (0,),
    "reason.nodes": (0,),
    "reason.reset_optimizer": (),
    "reason.recite_rate": (),
    "reason.row_multiple": (),
    "reason.story_lr_ratio": (),
    "reason.terse": (False,),
    "reason.words": (0,),
    "sampling.grid": ("",),
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

TASK_KEYS = ("reason.hops", "reason.nodes", "reason.words", "reason.names", "reason.balanced", "reason.terse")
TASK_OF_SHAPE: dict[tuple[Any, ...], str] = {
    (2, 6, 8, 4, True, True): "prosqa-2hop",
    (0, 0, 0, 0, True, False): "prosqa-balanced",
}
"""Values of these keys, which shaped the questions of ProsQA -> the task that has this shape today."""


def migrate(settings: dict[str, Any], source: str, saved: bool = True) -> dict[str, Any]:
    """Flat settings {"train.row_pieces": 4} of any version, as today's version names them. `source`: for messages.

    `saved=False`: they were typed on a command line, as texts. Where an old name and today's are both given, today's
    counts.
    """
    # Earlier versions had lists of single values.
    items = {key: value if isinstance(value, list) else [value] for key, value in settings.items()}
    deep = [key for key, values in items.items() if any(isinstance(v, list | dict) for v in values)]
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
    current: dict[str, Any] = {}
    for old, value in settings.items():
        if old in REMOVED and (saved or old not in RENAMED) and _asks_for_nothing(value, REMOVED[old]):
            continue
        key = RENAMED.get(old, old)
        gone = (key == old and old in REMOVED) or (isinstance(value, str) and (key, value) in REMOVED_VALUES)
        require(not gone, f"{source}: {old}={value} is not supported any more (docs/LOG.md says why)")
        if key == old or key not in settings:
            current[key] = VALUES.get((key, value), value) if isinstance(value, str) else value
    return current


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

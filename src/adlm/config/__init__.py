"""The command line and the YAML groups become one typed `Config`; nothing of Hydra leaks below this package.

Hydra's grammar outside (`model=small data=lm1b train.steps=1_000`), plain dataclasses inside. Groups are composed by
`hydra.compose`, not `@hydra.main`: the latter changes directory and makes run folders on every rank. Single values are
read here by the type of their key, so that a mistake is answered at once, in our words, with the nearest valid name.
"""

import copy
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adlm import compat
from adlm.config.checks import check, choices
from adlm.config.keys import CONFIG_DIR, GROUPS, group_choices, keys, nearest
from adlm.errors import choose, require
from adlm.io.paths import expanded, write_atomically
from adlm.migration import RENAMED, migrate
from adlm.schema import Config, as_yaml

__all__ = ["check", "choices", "flatten", "from_yaml", "load", "save"]

# These algorithms give one plain stack all the blocks of the anchored model: n_blocks + n_denoiser_blocks.
MATCHED = ("mdlm-matched", "ar-matched")
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s]+)=(?P<value>.*)", re.DOTALL)
# Where commands write, and what they start from: ~ is the user's home, which shells do not say of `out=~/x`
PLACES = ("out", "eval.checkpoint", "checkpoint.init_from")
TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def load(argv: Sequence[str], world_size: int | None = None, run_folder: bool = True) -> Config:
    """Overrides -> checked Config with derived settings filled in. Any mistake is a one-line ValueError.

    `world_size` is the number of ranks that share the global batch; by default what torchrun says. `run_folder`: an
    empty `out` becomes the folder of a run.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    ours, notes = compat.rewrite(argv)
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"adlm: note: {note}", file=sys.stderr)
    groups, values = _sort(ours)
    composed, chosen = _compose(tuple(groups.items()))
    cfg = copy.deepcopy(composed)
    _assign(cfg, values)
    _derive(cfg, chosen, ranks)
    if run_folder and not cfg.out:
        cfg.out = f"runs/{_label(cfg, chosen)}"
    check(cfg, ranks)
    return cfg


def _sort(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """argv -> (group -> choice, key -> value). The last of several wins and a leading + or ++ changes nothing, since
    every key exists."""
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in argv:
        match = OVERRIDE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form key=value")
        key, value = match["key"], match["value"]
        require(match["sign"] != "~", f"{text!r}: a setting cannot be removed; give {key} a value")
        key = RENAMED.get(key, key)
        if key in GROUPS:
            groups[key] = choose(key, _unquote(value), group_choices(key))
        elif key in keys():
            values[key] = _read_value(key, _unquote(value))
        else:
            known = [*keys(), *GROUPS, *compat.RELEASE_KEYS]
            raise ValueError(f"unknown key {key!r}{nearest(key, known)}; `adlm config` prints all keys")
    return groups, values


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _read_value(key: str, text: str) -> Any:
    """Read `text` by the type of its key. Strings are literal: Hydra would read a run named 2024_01 as the number
    202401 and stumble over a path with `=`. Whole numbers may be written 1e6 or 1_000_000."""
    kind = keys()[key].kind
    if kind is str:
        if key in PLACES:
            return expanded(text)
        allowed = choices(key)
        return text if allowed is None else choose(key, text if text in allowed else text.lower(), allowed)
    if kind is bool:
        require(text.lower() in TRUTH, f"{key}={text} is not true or false")
        return TRUTH[text.lower()]
    try:
        number = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
        if kind is int and number != int(number):
            raise ValueError
        return kind(number)
    except (ValueError, OverflowError):
        raise ValueError(f"{key}={text} is not a {'whole ' if kind is int else ''}number") from None


@functools.cache
def _compose(groups: tuple[tuple[str, str], ...]) -> tuple[Config, dict[str, str]]:
    """The schema's defaults overlaid with the chosen group files; also which file of each group was taken.

    Remembered, since it takes a tenth of a second and notebooks and tests ask for the same few again and again.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf, open_dict

    ConfigStore.instance().store(name="schema", node=Config)
    # A caller may be a Hydra application itself: its global state is put back.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            tree = compose("config", overrides=[f"{k}={v}" for k, v in groups], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = outer
    chosen = {group: str(tree.hydra.runtime.choices.get(group)) for group in GROUPS}
    with open_dict(tree):
        del tree["hydra"]
    cfg = OmegaConf.to_object(tree)
    assert isinstance(cfg, Config)
    return cfg, chosen


def _assign(cfg: Config, values: dict[str, Any]) -> None:
    for key, value in values.items():
        *sections, name = key.split(".")
        owner: Any = cfg
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, name, value)


def _derive(cfg: Config, chosen: dict[str, str], ranks: int) -> None:
    """Settings that follow from others, all in this one place."""
    if cfg.algo in MATCHED:
        cfg.model.n_blocks += cfg.model.n_denoiser_blocks
        cfg.model.n_denoiser_blocks = 0
    if not cfg.train.batch_size:
        cfg.train.batch_size = max(1, cfg.train.global_batch_size // ranks)


def _label(cfg: Config, chosen: dict[str, str]) -> str:
    """The name of a run that was given none."""
    if chosen["experiment"] != "None":
        return chosen["experiment"]
    if chosen["task"] != "None":
        base = cfg.reason.base.rstrip("/").rsplit("/", 1)[-1] or chosen["model"]
        return f"{cfg.reason.method}-{chosen['task']}-{base}"
    return f"{cfg.algo}-{cfg.data.name}-{chosen['model']}"


def save(cfg: Config, path: str | Path) -> None:
    """Write config.yaml whole or not at all: a run folder never holds half of one."""
    write_atomically(Path(path), as_yaml(cfg))


def from_yaml(path: str | Path) -> Config:
    """Read a saved config.yaml; unknown keys and wrong types are refused. Nothing is derived again."""
    import yaml
    from omegaconf import OmegaConf

    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings")
    cfg = Config()
    flat = migrate(_flatten(found), str(path))
    for key in flat:
        require(key in keys(), f"{path}: unknown key {key!r}{nearest(key, keys())}")
    _assign(
        cfg, {key: value if keys()[key].kind is str else _read_value(key, str(value)) for key, value in flat.items()}
    )
    check(cfg)
    return cfg


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def flatten(cfg: Config) -> dict[str, Any]:
    """{'model.n_heads': 12, ...}, in the schema's order."""
    return _flatten(dataclasses.asdict(cfg))

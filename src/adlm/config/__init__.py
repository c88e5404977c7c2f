"""The command line and the YAML groups become one typed `Config`; nothing of Hydra leaks below this package.

Users write Hydra's grammar (`model=small data=lm1b train.steps=1_000`); the program gets plain dataclasses. Groups are
composed by `hydra.compose`, not `@hydra.main`, which changes directory and makes run folders on every rank. Single
values are read here by the type of their key, so that a mistake is reported at once with the nearest valid name.
keys.py lists what can be set.

All settings pass the same two functions: `migrate` (names of earlier versions) and `check_values` (the rule of each
field of schema.py). `check` calls the rules that concern several settings: for one section, its method `check` in
schema.py.
"""

import copy
import dataclasses
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.compat.command_lines import RELEASE_KEYS, rewrite
from adlm.config import owntext
from adlm.config.keys import group_choices, keys, nearest
from adlm.data import corpora
from adlm.errors import choose, require
from adlm.io.paths import expanded, pick_device
from adlm.migration import TRUTH, migrate, today_of
from adlm.rules import Location, check_fields
from adlm.schema import Config, ModelConfig, SamplingConfig, TrainConfig
from adlm.tables import CORPORA, GROUPS, config_folders

# Algorithms whose single stack has all the blocks of the anchored model: n_blocks + n_denoiser_blocks.
MATCHED = ("mdlm-matched", "ar-matched")
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s]+)=(?P<value>.*)", re.DOTALL)


def load(
    argv: Sequence[str],
    world_size: int | None = None,
    run_folder: bool = True,
    check_key: Callable[[str], None] = lambda key: None,
    own_text: bool = False,
) -> Config:
    """Overrides -> checked Config with derived settings filled in. Any mistake is a one-line ValueError.

    `world_size` is the number of ranks that share the global batch; by default that of torchrun. `run_folder`: an
    empty `out` becomes a folder below runs/ (not for commands that write beside a checkpoint, or nothing). `check_key`
    is called with the current name of every given key and group, and may refuse it. `own_text`: data=file is trained
    with settings that fit its size and this machine (owntext.py), and data.path alone implies data=file.
    """
    given = _today(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    cfg = _build(_fitted(given, ranks) if own_text else given, ranks, run_folder)
    for key in given:
        check_key(key)
    return cfg


def preset(argv: Sequence[str]) -> dict[str, Any]:
    """Every key with its value after these overrides, before settings that depend on the text and the machine."""
    return flatten(_composed(_today(argv))[0])


def load_sweep(
    argv: Sequence[str], check_key: Callable[[str], None] = lambda key: None
) -> tuple[Config, list[SamplingConfig]]:
    """As `load`, but numbers and names of `sampling` may be lists (`sampling.steps=64,128`): returns every combination
    once, checked, in the order typed. The Config has the first."""
    given = _today(argv)
    columns = [[(key, word) for word in _words(key, text)] for key, text in given.items()]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    found = [_build(dict(line), ranks, run_folder=False) for line in itertools.product(*columns)]
    for key in given:
        check_key(key)
    settings: list[SamplingConfig] = []
    for cfg in found:
        if cfg.sampling not in settings:
            settings.append(cfg.sampling)
    return found[0], settings


def _words(key: str, text: str) -> list[str]:
    swept = key in ("sampling", "sampling.sampler") or (
        key.startswith("sampling.") and key in keys() and keys()[key].kind in (int, float)
    )
    return [word.strip() for word in text.split(",") if word.strip()] or [text] if swept else [text]


def _today(argv: Sequence[str]) -> dict[str, str]:
    """argv -> {group or key: text}, with current names. The last of several values counts, and a leading + or ++
    changes nothing, since every key exists. Renamed and ignored keys are reported on stderr."""
    ours, notes = rewrite(argv)
    given: dict[str, str] = {}
    for text in ours:
        match = OVERRIDE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form key=value; quote a value that has spaces")
        key, value = match["key"], match["value"]
        require(match["sign"] != "~", f"{text!r}: a setting cannot be removed; give {key} a value")
        given[key] = value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"" else value
    today = migrate(given, "command line", lambda: flatten(_compose(tuple(_groups(given).items()))[0]))
    for key, value in given.items():
        if now := today_of(key):
            notes.append(f"{key} is now {now}")
        elif key not in today:
            notes.append(f"{key}={value} ignored: the key is gone")
    today = {key: str(value) for key, value in today.items()}
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"adlm: note: {note}", file=sys.stderr)
    return today


def _build(given: dict[str, str], ranks: int, run_folder: bool) -> Config:
    """The checked Config: the groups, the given values on top, and the derived settings."""
    cfg, chosen = _composed(given)
    if cfg.algo in MATCHED:
        cfg.model.n_blocks += cfg.model.n_denoiser_blocks
        cfg.model.n_denoiser_blocks = 0
    if not cfg.train.batch_size:
        cfg.train.batch_size = cfg.train.at_once(ranks)
    if run_folder and not cfg.out:
        label = f"{cfg.algo}-{cfg.data.name}-{chosen['model']}"
        if chosen["task"] != "None":
            base = cfg.reason.base.rstrip("/").rsplit("/", 1)[-1] or chosen["model"]
            label = f"{cfg.reason.method}-{chosen['task']}-{base}"
        cfg.out = f"runs/{label if chosen['experiment'] == 'None' else chosen['experiment']}"
    check(cfg, ranks)
    return cfg


def _composed(given: dict[str, str]) -> tuple[Config, dict[str, str]]:
    """The groups with the given values on top, and the chosen name of each group. Only single values are checked."""
    groups, values = _groups(given), {}
    for key, text in given.items():
        if key in groups:
            continue
        if key in keys():
            values[key] = _read_value(key, text)
        else:
            known = [*keys(), *GROUPS, *RELEASE_KEYS]
            raise ValueError(f"unknown key {key!r}{nearest(key, known)}; `adlm config` prints all keys")
    composed, chosen = _compose(tuple(groups.items()))
    cfg = copy.deepcopy(composed)
    _assign(cfg, values)
    check_values(cfg)
    return cfg, chosen


def _groups(given: dict[str, str]) -> dict[str, str]:
    return {key: choose(key, text, group_choices(key)) for key, text in given.items() if key in GROUPS}


def _fitted(given: dict[str, str], ranks: int) -> dict[str, str]:
    """`given`, on top of settings that fit the user's own text; unchanged for another corpus or with an experiment,
    which has its own settings. A resumed run keeps its first choice: text and machine may have changed since."""
    if given.get("data.path") and not given.keys() & {"data", "data.name"}:
        given = {"data": "file"} | given
    if given.get("data", given.get("data.name")) != "file" or "experiment" in given:
        return given
    cfg, _ = _composed(given)  # report a mistake before reading the text
    corpora.check(cfg.data)
    size = owntext.text_bytes(cfg.data)
    device = pick_device(cfg.train.device).type
    given = {"out": owntext.run_folder(cfg.data.path)} | {k: v for k, v in given.items() if k != "out" or v}
    saved = begun(given["out"])
    chosen: dict[str, str] = {}

    def answer(more: dict[str, Any]) -> Config:
        for key, value in more.items():
            if not owntext.governed(key, given.keys() & GROUPS.keys()):
                chosen[key] = str(saved.get(key, value))
        return _composed(chosen | given)[0]

    cfg = answer(owntext.shape(size, device, ranks))
    cfg = answer(owntext.run_length(cfg, size, device))
    answer(owntext.schedule(cfg, size))
    return chosen | given


def _read_value(key: str, text: str) -> Any:
    """Read `text` by the type of its key. Strings are literal: Hydra would read a run named 2024_01 as the number
    202401 and fail on a path with `=`. Whole numbers may be written 1e6 or 1_000_000."""
    setting = keys()[key]
    if setting.kind is str:
        if isinstance(setting.rule, Location):
            return expanded(text)
        known = setting.choices
        return text.lower() if known is not None and text not in known and text.lower() in known else text
    if setting.kind is bool:
        require(text.lower() in TRUTH, f"{key}={text} is not true or false")
        return TRUTH[text.lower()]
    try:
        number = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
        if setting.kind is int and number != int(number):
            raise ValueError
        return setting.kind(number)
    except (ValueError, OverflowError):
        raise ValueError(f"{key}={text} is not a {'whole ' if setting.kind is int else ''}number") from None


@functools.cache
def _compose(groups: tuple[tuple[str, str], ...]) -> tuple[Config, dict[str, str]]:
    """The schema's defaults overlaid with the chosen groups, and the chosen name of each group.

    Cached, since it takes a tenth of a second and notebooks and tests use the same few again and again.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf, open_dict

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    # A corpus of another package is loaded only if it is named: a broken one must not stop everything else.
    for name in {*CORPORA.entries, dict(groups).get("data", "")} & {*CORPORA} - {*GROUPS["data"]}:
        store.store(group="data", name=name, node=corpora.group(name), package="_global_")
    ours, *foreign = config_folders()
    overrides = [f"{group}={name}" for group, name in groups]
    if foreign:
        overrides.append(f"hydra.searchpath=[{','.join(folder.as_uri() for folder in foreign)}]")
    # The caller may be a Hydra application itself: restore its global state.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(ours), version_base="1.3"):
            tree = compose("config", overrides=overrides, return_hydra_config=True)
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


# ---- saved settings -------------------------------------------------------------------------------------------------


def quoted(value: Any) -> str:
    """A value as YAML: JSON with other escapes, since JSON's pair of escapes for a character beyond U+FFFF would be two
    characters in YAML. ASCII, so that the encoding does not matter."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\x7f")
    return text.encode("ascii", "backslashreplace").decode()


def as_yaml(cfg: Config) -> str:
    """The whole tree as YAML text; `from_yaml` reads it back."""

    def lines(tree: dict[str, Any], indent: str) -> list[str]:
        out = []
        for name, value in tree.items():
            if isinstance(value, dict):
                out += [f"{indent}{name}:", *lines(value, indent + "  ")]
            else:
                out.append(f"{indent}{name}: {quoted(value)}")
        return out

    return "\n".join(lines(dataclasses.asdict(cfg), "")) + "\n"


def from_yaml(path: str | Path) -> Config:
    """Read the config.yaml of a run; unknown keys and wrong types are refused. Settings are not derived again."""
    import yaml
    from omegaconf import OmegaConf

    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings")
    cfg = from_tree(found, str(path))
    check(cfg)
    return cfg


def begun(out: str) -> dict[str, Any]:
    """Every key of a run in the folder `out` that can resume there; empty if there is none."""
    saved = Path(out) / "config.yaml"
    resumes = saved.is_file() and any(saved.parent.glob("checkpoints/step-*"))
    return flatten(from_yaml(saved)) if resumes else {}


def from_tree(tree: Mapping[Any, Any], source: str) -> Config:
    """Settings saved by any version (config.yaml, the config.json of an export, the state of a checkpoint), all
    sections or some; single values are checked. `source`: for messages."""
    flat = migrate(_flatten(tree), source)
    values = {}
    for key, value in flat.items():
        require(key in keys(), f"{source}: unknown key {key!r}{nearest(key, keys())}")
        values[key] = value if keys()[key].kind is str else _read_value(key, str(value))
    cfg = Config()
    _assign(cfg, values)
    check_values(cfg)
    return cfg


def flatten(cfg: Config) -> dict[str, Any]:
    """{'model.n_heads': 12, ...}, in the schema's order."""
    return _flatten(dataclasses.asdict(cfg))


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# ---- checks ---------------------------------------------------------------------------------------------------------


def check(cfg: Config, world_size: int = 1) -> None:
    """Raise a one-line ValueError for the first setting that cannot work, alone or with the others."""
    check_values(cfg)
    cfg.model.check()
    cfg.noise.check()
    cfg.objective.check(cfg.model)
    cfg.sampling.check()
    corpora.check(cfg.data)
    check_train(cfg.train, cfg.model, world_size)


def check_values(cfg: Config) -> None:
    """Check every value against the rule of its field."""
    check_fields(cfg, "")
    for section in dataclasses.fields(cfg):
        if dataclasses.is_dataclass(section.type):
            check_fields(getattr(cfg, section.name), section.name)


def check_train(t: TrainConfig, m: ModelConfig, world_size: int) -> None:
    """Check batches over ranks, sequence-length warmup and device."""
    require(
        t.global_batch_size >= world_size,
        f"train.global_batch_size={t.global_batch_size} leaves nothing to do for some of {world_size} ranks",
    )
    require(
        m.length % t.length_warmup == 0, f"train.length_warmup={t.length_warmup} must divide model.length={m.length}"
    )
    piece = m.length // t.length_warmup
    require(
        piece >= 4,  # in a sequence of one token there is nothing to predict
        f"train.length_warmup={t.length_warmup} cuts model.length={m.length} into sequences of {piece}; they must be at"
        " least 4 tokens long",
    )
    device, _, number = t.device.partition(":")
    require(
        device in ("auto", "cpu", "cuda", "mps") and (not number or (device == "cuda" and number.isdigit())),
        f"train.device={t.device!r} must be auto, cpu, cuda, cuda:N or mps",
    )
    if t.cuda_graphs:
        check_graphs(t, world_size)
        require(not m.block_lengths, f"train.cuda_graphs=true does not know model.block_length={m.block_length}")


def check_graphs(t: TrainConfig, world_size: int) -> None:
    on, needed = "train.cuda_graphs=true", t.global_batch_size // world_size
    require(t.device not in ("cpu", "mps"), f"{on} needs a GPU with CUDA, not train.device={t.device}")
    require(world_size == 1, f"{on} is for one process, not {world_size}")
    require(not t.is_sharded, f"{on} needs whole weights in one place: train.strategy=ddp, not {t.strategy}")
    require(not t.checkpoint_activations, f"{on} cannot record train.checkpoint_activations=true")
    require(
        t.batch_size in (0, needed),
        f"{on} needs all sequences of a step at once: train.batch_size={needed}, not {t.batch_size}",
    )

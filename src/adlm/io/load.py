"""A model from whatever a user points at: a run folder, an exported folder, or a checkpoint of the public release."""

import os
from pathlib import Path

import torch

from adlm.compat.checkpoints import load_release
from adlm.data.preparation import tokenizer_for
from adlm.errors import require
from adlm.io.export import CONFIG, Loaded, check_shapes, describe, load_folder, section
from adlm.io.paths import path_of
from adlm.models import build_model
from adlm.schema import Config, DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig
from adlm.training.checkpoint import read_weights
from adlm.training.setup import parameter_count

BOX = Path(__file__).parents[1] / "box"
"""The exported folder that ships inside the package."""
DEMO = Path("runs/demo")


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
    path: str | Path, ema: bool = True, device: torch.device | str = "cpu", tokenizer: str = "", root: str = ""
) -> Loaded:
    """Load a model for inference, in float32.

    A run folder gives its export if it has finished, else its newest valid checkpoint; `ema=False` always takes the
    checkpoint's raw weights. `tokenizer` and `root` (a folder with vocabulary files) help a release checkpoint that
    does not carry its own.
    """
    path = path_of(path)
    require(path.exists(), f"eval.checkpoint={str(path)!r} does not exist")
    if path.is_file():
        loaded = load_release(path, ema, tokenizer, root)
        loaded.model.to(device)
        return loaded
    if os.path.lexists(path / CONFIG):  # an exported folder, whatever else was put into it
        return load_folder(path, device)
    if (path / "checkpoints").is_dir() and not (ema and (path / "export" / CONFIG).is_file()):
        return load_newest(path, ema, device)
    exported = path / "export" if (path / "export" / CONFIG).is_file() else path
    require(
        (exported / CONFIG).is_file(),
        f"eval.checkpoint={str(path)!r} is neither a run folder nor an exported folder: it holds no {CONFIG},"
        " no export/ and no checkpoints/",
    )
    return load_folder(exported, device)


def load_newest(run: Path, ema: bool, device: torch.device | str) -> Loaded:
    """Load the newest valid checkpoint of a run, which may still be training."""
    weights, state = read_weights(run, ema)
    saved, source = state["config"], str(run)
    cfg = Config(
        algo=saved["algo"],
        model=section(ModelConfig, saved["model"], source),
        noise=section(NoiseConfig, saved["noise"], source),
        objective=section(ObjectiveConfig, saved["objective"], source),
        data=section(DataConfig, saved["data"], source),
    )
    tokenizer = tokenizer_for(cfg.data)
    require(
        tokenizer.fingerprint == state["tokenizer"],
        f"{run} was trained with another tokenizer than data.tokenizer={cfg.data.tokenizer!r} gives now",
    )
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    check_shapes(shapes, cfg.model, tokenizer.vocab_size, tokenizer.mask_id, f"{run}: its weights do not fit")
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    model.load_state_dict(weights)
    model = model.to(device).eval().requires_grad_(False)
    model.freeze_bridge()
    info = describe(cfg, tokenizer, step=state["step"], parameters=parameter_count(model))
    return Loaded(model, tokenizer, cfg.noise, cfg.objective, info)

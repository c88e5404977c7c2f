"""A model from whatever a user points at: a run folder, an exported folder, or a checkpoint of the public release."""

from pathlib import Path

import torch

from adlm.compat.checkpoints import load_release
from adlm.data.preparation import tokenizer_for
from adlm.errors import require
from adlm.io.export import CONFIG, Loaded, describe, load_folder, section
from adlm.io.paths import path_of
from adlm.models import build_model
from adlm.schema import Config, DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig

BOX = Path(__file__).parents[1] / "box"
"""The exported folder that ships inside the package."""
BOX_NAME = "box"
"""What it is called: `adlm ppl box`, `adlm.load("box")`."""
DEMO = Path("runs/demo")


def locate(checkpoint: str | Path) -> Path:
    """The place of a checkpoint as users name it; `box`, unless something here has that name, is the model that ships
    with the package, and so is no name at all."""
    path = path_of(checkpoint)
    unnamed = not str(checkpoint) or (str(checkpoint) == BOX_NAME and not path.exists())
    return default_checkpoint() if unnamed else path


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
    path = locate(path)
    require(path.exists(), f"eval.checkpoint={str(path)!r} does not exist")
    if path.is_file():
        loaded = load_release(path, ema, tokenizer, root)
        loaded.model.to(device)
        return loaded
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
    # Here and not above: torch.distributed.checkpoint takes a second to import, and an export does without.
    from adlm.training.checkpoint import read_weights
    from adlm.training.setup import parameter_count

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
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    model.load_state_dict(weights)
    model = model.to(device).eval().requires_grad_(False)
    model.freeze_bridge()
    info = describe(cfg, tokenizer, step=state["step"], parameters=parameter_count(model))
    return Loaded(model, tokenizer, cfg.noise, cfg.objective, info)

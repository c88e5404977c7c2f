"""`adlm adapt BASE data=...`: a causal model becomes a block-diffusion model, anchored or not.

The weights stay; attention opens inside blocks, and a mask embedding (the mean of all) is new. Predictions stay shifted
by one position, so that blocks of one token are the causal model itself, before any training. With `algo=adlm` the
last third of the blocks is the denoiser, the others are the anchor network, whose head is the model's own.

The start is written to `out`/start, an exported folder; from there on it is a run like any other.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm import config
from adlm.errors import require
from adlm.io.export import CONFIG, TOKENIZER, Loaded, describe, save_folder
from adlm.io.load import load_checkpoint, locate
from adlm.models import build_model
from adlm.models.network import parameter_count
from adlm.schema import Config, ModelConfig
from adlm.training.loop import farewell, train

BLOCK_LENGTH = "16,1,4,64,0"
"""One model for all block lengths, 16 its own."""
LONGEST = 1024
"""Tokens of a sequence, unless model.length says otherwise: much of what a causal model can read is not trained."""
ANCHORED = {
    "gamma": 0.1, "gamma_warmup": 0.0, "anchor_rule": "all", "anchor_fraction": 0.25, "anchor_positions": "masked",
}  # fmt: skip
"""The anchor loss of the recipe `fast`."""
QUIET = 0.1
"""The anchor network's first predictions are nearly uniform: its norm starts at this part of the base's last one."""
OPTIMIZER = {
    "optim.name": "adamw", "optim.lr": 5e-4, "optim.beta2": 0.95, "optim.schedule": "linear", "optim.warmup": 50,
    "optim.ema": 0.0, "train.global_batch_size": 32, "train.steps": 2000,
}  # fmt: skip


def run_adapt(cfg: Config, line: Sequence[str]) -> dict[str, Any]:
    """`adlm adapt BASE`."""
    base = locate(cfg.checkpoint.init_from)
    require(base.exists(), f"checkpoint.init_from={str(base)!r} does not exist: give the causal model to adapt")
    loaded = load_checkpoint(base, tokenizer=cfg.data.tokenizer, root=cfg.data.root)
    cfg = settings_for(loaded, base, line)
    result = train(cfg)
    if result.finished:
        print(farewell(result, exact=False))
    return result._asdict()


def settings_for(loaded: Loaded, base: Path, line: Sequence[str]) -> Config:
    """The settings of the run: network and tokenizer of the base, blocks and rates that fit. What was typed wins."""
    line = [word for word in line if not word.lstrip("+").startswith("checkpoint.init_from=")]
    given = {word.lstrip("+").partition("=")[0] for word in line}
    fixed = sorted(given & {"model", "recipe", "experiment", "model.causal"})
    require(not fixed, f"{', '.join(fixed)} cannot be set here: adlm adapt keeps the network of its base")
    typed = config.load(line, run_folder=False)
    anchored = typed.model.anchored if given & {"algo", "model.anchored"} else False
    model = adapted_config(loaded.model.config, anchored)
    chosen = {f"model.{key}": value for key, value in asdict(model).items()}
    objective = {"name": "anelbo", **ANCHORED} if anchored else {"name": "nelbo", "gamma": 0.0}
    chosen |= {f"objective.{key}": value for key, value in objective.items()} | OPTIMIZER
    out = typed.out or f"runs/{base.stem}-adapted"
    start = Path(out).absolute() / "start"
    words = [*([] if "algo" in given else ["algo=bd3lm"]), *(f"{key}={value}" for key, value in chosen.items())]
    places = [f"out={out}", f"data.tokenizer={start / TOKENIZER}", f"checkpoint.init_from={start}"]
    cfg = config.load([*words, *line, *places])
    if not (start / CONFIG).is_file():
        weights = adapted_weights(loaded, cfg.model)
        info = describe(cfg, loaded.tokenizer, step=0, parameters=parameter_count(loaded.model))
        save_folder(start, weights, loaded.tokenizer, info)
    return cfg


def adapted_config(base: ModelConfig, anchored: bool) -> ModelConfig:
    """The network of a causal one, for blocks."""
    require(base.causal, "adlm adapt makes a block-diffusion model of a causal one; this is a diffusion model already")
    require(not base.anchored, "adlm adapt needs a causal model of one stack; this one has anchors (a2r)")
    length = min(base.length, LONGEST)
    cfg = replace(base, causal=False, shift=True, block_length=BLOCK_LENGTH, length=length, dropout=0.0)
    if not anchored:
        return cfg
    last = max(1, round(base.n_blocks / 3))
    return replace(cfg, anchored=True, bridge="none", n_blocks=base.n_blocks - last, n_denoiser_blocks=last)


@torch.no_grad()
def adapted_weights(loaded: Loaded, cfg: ModelConfig) -> dict[str, Tensor]:
    """The base's weights by the names of the adapted network."""
    base = {name: value.detach().float() for name, value in loaded.model.state_dict().items()}
    mask = loaded.model.mask_id
    for name in [name for name in ("embedding", "head.weight", "head.bias") if name in base]:
        others = torch.arange(len(base[name]), device=base[name].device) != mask
        base[name] = base[name].clone()
        base[name][mask] = base[name][others].mean(0)
    if cfg.anchored:
        base = in_two_stacks(base, cfg)
    with torch.device("meta"):
        expected = build_model(cfg, loaded.model.vocab_size, mask).state_dict()
    wrong = sorted(base.keys() ^ expected.keys())
    wrong += [name for name in sorted(base.keys() & expected.keys()) if base[name].shape != expected[name].shape]
    require(not wrong, f"{', '.join(wrong[:3])}: these settings ask for another network than the base's")
    return base


def in_two_stacks(base: dict[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Weights of one stack as those of anchor network and denoiser. Both end in a norm and a head. The anchor network's
    are copies, the norm a small one: in the middle of a model they say nothing yet, and should not say it loudly."""
    found: dict[str, Tensor] = {}
    for name, value in base.items():
        stack, _, rest = name.partition(".blocks.")
        number, _, part = rest.partition(".")
        if stack != "denoiser" or not rest:
            found[name] = value
        elif int(number) < cfg.n_blocks:
            found[f"anchor.blocks.{number}.{part}"] = value
        else:
            found[f"denoiser.blocks.{int(number) - cfg.n_blocks}.{part}"] = value
        if name.startswith(("denoiser.norm.", "head.")):
            own = f"anchor_{name}" if name.startswith("head.") else name.replace("denoiser", "anchor")
            found[own] = value.clone() if name.startswith("head.") else QUIET * value
    return found

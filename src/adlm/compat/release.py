"""Checkpoints of the public release to our exported folders and back."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.compat.command_lines import CORPORA
from adlm.compat.names import from_release, release_names
from adlm.compat.reading import NOISES, OBJECTIVES, Release, read_release
from adlm.errors import choose, require
from adlm.io.paths import write_atomically
from adlm.schema import Config, DataConfig, ModelConfig

if TYPE_CHECKING:
    from adlm.data.tokenizers import Tokenizer
    from adlm.io.export import Loaded


def tokenizer_of(release: Release, name: str = "", root: str = "") -> "Tokenizer":
    """The tokenizer of a checkpoint: `name` if given, else the one in the file, else the one its settings name."""
    from tokenizers import Tokenizer as Backend

    from adlm.data.tokenizers import Tokenizer, load_tokenizer

    data = release.settings.get("data")
    stored = str(data.get("tokenizer_name_or_path") or "gpt2") if isinstance(data, dict) else "gpt2"
    if name or not release.tokenizer_json:
        found = load_tokenizer(name or stored, root=root)
    else:
        try:
            description = json.loads(release.tokenizer_json)
            # The release gives GPT-2 a [PAD] that has the id of the mask: the mask is what that row was trained as.
            added = description.get("added_tokens", [])
            description["added_tokens"] = [
                t for t in added if not (t.get("content") == "[PAD]" and t.get("id") == release.vocab_size - 1)
            ]
            found = Tokenizer(Backend.from_str(json.dumps(description)), stored)
        except Exception as error:
            raise ValueError(f"the tokenizer in the checkpoint is unusable ({error}); give data.tokenizer") from None
    require(
        found.vocab_size == release.vocab_size,
        f"the model has {release.vocab_size} entries and the tokenizer {found.name!r} {found.vocab_size}: "
        "give the right one as data.tokenizer",
    )
    return found


def import_release(
    path: str | Path, out: str | Path, ema: bool = True, tokenizer: str = "", root: str = ""
) -> dict[str, Any]:
    """Write a release checkpoint as an exported folder; returns its config.json."""
    from adlm.io.export import save_folder

    release = read_release(path, ema)
    used = tokenizer_of(release, tokenizer, root)
    info = _describe(release, used, Path(path), ema)
    save_folder(Path(out), release.weights, used, info)
    return info


def load_release(path: str | Path, ema: bool = True, tokenizer: str = "", root: str = "") -> "Loaded":
    """A release checkpoint as a model ready for inference, without writing anything."""
    from adlm.io.export import Loaded
    from adlm.models import build_model

    release = read_release(path, ema)
    used = tokenizer_of(release, tokenizer, root)
    model = build_model(release.model, release.vocab_size, used.mask_id)
    model.load_state_dict(release.weights)
    model = model.eval().requires_grad_(False)
    model.freeze_bridge()
    return Loaded(model, used, release.noise, release.objective, _describe(release, used, Path(path), ema))


def _describe(release: Release, tokenizer: "Tokenizer", path: Path, ema: bool) -> dict[str, Any]:
    from adlm.io.export import describe

    data = release.settings.get("data")
    corpus = str(data.get("train") or "") if isinstance(data, dict) else ""
    cfg = Config(
        algo=release.algo,
        model=release.model,
        noise=release.noise,
        objective=release.objective,
        data=DataConfig(name=CORPORA.get(corpus, corpus), tokenizer=tokenizer.name),
    )
    return describe(
        cfg,
        tokenizer,
        step=release.step,
        parameters=sum(w.numel() for w in release.weights.values()),
        command=["adlm", "import", path.name],
        imported={"file": path.name, "weights": "averaged" if ema else "raw"},
    )


def export_release(folder: str | Path, path: str | Path) -> Path:
    """Write an exported folder as a checkpoint that the release's code loads (config and tokenizer given by it)."""
    import torch

    from adlm.io.export import load_folder

    folder = Path(folder)
    loaded = load_folder(folder / "export" if (folder / "export").is_dir() else folder)  # a run folder holds one
    model, step = loaded.model.config, int(loaded.info.get("step") or 0)
    _check_exportable(model)
    weights = loaded.model.state_dict()
    head_width = model.hidden_size // model.n_heads
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    state = {}
    for name in release_names(model):
        ours = from_release(name, model.anchored)
        state[name] = inv_freq if ours is None else weights[ours]
    done = {"total": {"completed": step}, "current": {"completed": step}}
    checkpoint = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.2.1",
        "state_dict": state,
        # What the release's on_load_checkpoint looks up.
        "loops": {
            "fit_loop": {
                "epoch_progress": {"total": {"completed": 0}, "current": {"completed": 0}},
                "epoch_loop.batch_progress": done,
            }
        },
        "hparams_name": "kwargs",
        "hyper_parameters": {"config": _release_settings(loaded)},
        "ema": {
            "decay": 0.9999,
            "num_updates": step,
            "shadow_params": [value for name, value in state.items() if not name.endswith("inv_freq")],
        },
    }
    write_atomically(Path(path), lambda file: torch.save(checkpoint, file))
    return Path(path)


def _check_exportable(m: ModelConfig) -> None:
    """The release has one block and two shapes of model: anything else has no name there."""
    published = {"norm": "layernorm", "activation": "gelu", "qk_norm": False, "bias": True, "mlp_ratio": 4}
    if m.anchored:
        published |= {"bridge": "linear", "causal": False, "n_denoiser_blocks": m.n_blocks // 2}
    published["adaln"] = not m.causal
    for key, value in published.items():
        require(
            getattr(m, key) == value,
            f"the release has no model with model.{key}={getattr(m, key)}, only {value}: nothing to export to",
        )


def _release_settings(loaded: "Loaded") -> dict[str, Any]:
    m, o, n = loaded.model.config, loaded.objective, loaded.noise
    kind = {ours: theirs for theirs, ours in OBJECTIVES.items()}.get(o.name, "subs")
    noises = {ours: theirs for theirs, ours in NOISES.items()}
    noise = noises[choose("noise.name", n.name, noises)]
    return {
        "mode": "train",
        "diffusion": "absorbing_state",
        "backbone": "ar" if m.causal else "dit",
        "parameterization": kind,
        "time_conditioning": m.time_conditioning,
        "T": o.T,
        "subs_masking": False,
        "enable_anchor_loss": m.anchored and o.gamma > 0,
        "threshold": o.tau,
        "base_scaling_factor1": o.gamma,
        "base_scaling_factor2": o.gamma / o.gamma_warmup if o.gamma_warmup > 0 else 1,
        "model": {
            "name": "small",
            "type": "ddit",
            "hidden_size": m.hidden_size,
            "cond_dim": m.cond_dim,
            "length": m.length,
            "n_blocks": m.n_blocks,
            "n_heads": m.n_heads,
            "scale_by_sigma": True,
            "dropout": m.dropout,
            "tie_word_embeddings": False,
            **({"causal": True} if m.causal else {}),
        },
        "noise": {"type": noise, "sigma_min": n.sigma_min, "sigma_max": n.sigma_max},
        "data": {"tokenizer_name_or_path": loaded.tokenizer.name, "train": loaded.info.get("data", "")},
        "training": {"ema": 0.9999, "sampling_eps": o.sampling_eps},
    }


def run_import(cfg: Config) -> dict[str, Any]:
    """`adlm import release.ckpt folder`: eval.ema chooses the weights, data.tokenizer and data.root the tokenizer."""
    require(cfg.eval.checkpoint != "", "adlm import needs a checkpoint of the release: adlm import FILE.ckpt FOLDER")
    info = import_release(cfg.eval.checkpoint, cfg.out, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root)
    size, weights = f"{info['parameters']:,} parameters", info["imported"]["weights"]
    print(f"{cfg.out}: {info['algo']}, {size}, {weights} weights of step {info['step']:,}")
    return info


def run_export(cfg: Config) -> dict[str, Any]:
    """`adlm export folder release.ckpt`: our exported folder in the release's layout."""
    require(cfg.eval.checkpoint != "", "adlm export needs an exported folder: adlm export FOLDER FILE.ckpt")
    path = export_release(cfg.eval.checkpoint, cfg.out)
    print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")
    return {"file": str(path), "bytes": path.stat().st_size}

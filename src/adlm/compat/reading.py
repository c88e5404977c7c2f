"""A checkpoint of the public release (ADLM, MDLM, AR, SEDD, D3PM; Lightning's .ckpt) in our terms.

The shape of the model is read off its weights and compared with the settings stored beside them; every name, count and
shape must fit before anything is used. Nothing pickled is executed (`pickles.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.compat.names import from_release, release_names
from adlm.compat.pickles import Checkpoint, Inert, TensorRef, plain
from adlm.errors import choose, require
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor

# The release's names of schedules -> ours. Its `linear` is a linear sigma, which is not ours.
NOISES = {"loglinear": "loglinear", "geometric": "geometric", "cosine": "cosine", "cosinesqr": "cosine-squared"}
OBJECTIVES = {"subs": "nelbo", "sedd": "score-entropy", "d3pm": "d3pm", "ar": "autoregressive"}
ALGOS = {"subs": "mdlm", "sedd": "sedd", "d3pm": "d3pm", "ar": "ar"}


@dataclass
class Release:
    """What a release checkpoint holds, in our terms."""

    algo: str
    model: ModelConfig
    noise: NoiseConfig
    objective: ObjectiveConfig
    vocab_size: int
    step: int
    weights: "dict[str, Tensor]" = field(repr=False)
    """By our names, float32."""
    settings: dict[str, Any] = field(repr=False)
    """The release's own settings, as plain data."""
    tokenizer_json: str = field(default="", repr=False)
    """The tokenizer pickled into the file, if it is one of the `tokenizers` library."""


def read_release(path: str | Path, ema: bool = True) -> Release:
    """Read a checkpoint: averaged weights, or with ema=False those of the last step."""
    with Checkpoint(path) as file:
        refs = file.tree.get("state_dict")
        if not isinstance(refs, dict):
            raise ValueError(f"{path} is not a checkpoint of the release: it has no state_dict")
        refs = {_modern(name): ref for name, ref in refs.items()}
        hyper = file.tree.get("hyper_parameters")
        hyper = hyper if isinstance(hyper, dict) else {}
        settings = plain(hyper.get("config"))
        settings = settings if isinstance(settings, dict) else {}
        model = _shape_of(path, refs, settings)
        algo, objective = _objective_of(path, model, settings)
        names = [name for name in release_names(model) if not name.endswith("inv_freq")]
        _same_names(path, names, [name for name in refs if not name.endswith("inv_freq")])
        if ema:
            refs = dict(zip(names, _averaged(path, file.tree, names)))
        vocab_size = _size(path, refs, "backbone.vocab_embed.embedding")[0]
        expected = _expected_shapes(model, vocab_size)
        weights = {}
        for name in names:
            ours = from_release(name, model.anchored)
            assert ours is not None
            weights[ours] = file.tensor(refs[name], name).float()
            got, want = tuple(weights[ours].shape), expected[ours]
            require(got == want, f"{path}: {name} has shape {got}, a model of this shape needs {want}")
        require(set(weights) == set(expected), f"{path}: not every parameter of the model is in the file")
        step = file.tree.get("global_step")
        return Release(
            algo, model, _noise_of(path, settings), objective, vocab_size, step if type(step) is int else 0, weights,
            settings, _tokenizer_json(hyper.get("tokenizer")),
        )  # fmt: skip


def _modern(name: Any) -> str:
    """Names as the current release writes them: without torch.compile's prefix, `denoiser` for the older `replica`."""
    name = str(name).replace("_orig_mod.", "")
    return "denoiser." + name.removeprefix("replica.") if name.startswith("replica.") else name


def _size(path: str | Path, refs: dict[str, Any], name: str) -> tuple[int, ...]:
    ref = refs.get(name)
    sizes = ref.size if isinstance(ref, TensorRef) and isinstance(ref.size, tuple) else ()
    require(bool(sizes) and all(type(n) is int and 0 < n < 2**31 for n in sizes), f"{path} has no usable {name}")
    return sizes


def _shape_of(path: str | Path, refs: dict[str, Any], settings: dict[str, Any]) -> ModelConfig:
    """The model's shape from its weights; what the stored settings say must agree."""

    def blocks(network: str) -> int:
        return len({name.split(".")[2] for name in refs if name.startswith(f"{network}.blocks.")})

    anchored = any(name.startswith("denoiser.") for name in refs)
    adaln = "backbone.sigma_map.mlp.0.weight" in refs
    width = _size(path, refs, "backbone.vocab_embed.embedding")[-1]
    told = settings.get("model")
    told = told if isinstance(told, dict) else {}
    heads = told.get("n_heads", 0)
    if "backbone.rotary_emb.inv_freq" in refs:
        heads = width // (2 * _size(path, refs, "backbone.rotary_emb.inv_freq")[0])
    length = told.get("length", 1024)
    require(type(heads) is int and heads > 0, f"{path} does not say how many heads the model has")
    require(type(length) is int and length > 0, f"{path}: model.length={length!r} is not a length")
    require(not anchored or adaln, f"{path}: a two-stage model without adaLN is none of the release's")
    model = ModelConfig(
        hidden_size=width,
        n_heads=heads,
        n_blocks=blocks("backbone"),
        n_denoiser_blocks=blocks("denoiser"),
        length=length,
        dropout=told["dropout"] if isinstance(told.get("dropout"), float) else ModelConfig.dropout,
        anchored=anchored,
        causal=not adaln,
        adaln=adaln,
        time_conditioning=adaln and settings.get("time_conditioning") is True,
        cond_dim=_size(path, refs, "backbone.sigma_map.mlp.0.weight")[0] if adaln else ModelConfig.cond_dim,
        mlp_ratio=_size(path, refs, "backbone.blocks.0.mlp.0.weight")[0] // width,
    )
    for key in ("hidden_size", "n_heads", "n_blocks"):
        said = told.get(key, getattr(model, key))
        require(
            said == getattr(model, key),
            f"{path}: its settings say model.{key}={said}, its weights {getattr(model, key)}",
        )
    return model


def _objective_of(path: str | Path, model: ModelConfig, settings: dict[str, Any]) -> tuple[str, ObjectiveConfig]:
    kind = settings.get("parameterization", "ar" if model.causal else "subs")
    kind = choose(f"{path}: parameterization", str(kind), OBJECTIVES)
    require((kind == "ar") == model.causal, f"{path}: parameterization={kind} does not fit the weights")
    T = settings.get("T") if type(settings.get("T")) is int else 0
    if not model.anchored:
        return ALGOS[kind], ObjectiveConfig(name=OBJECTIVES[kind], gamma=0.0, gamma_warmup=0.0, T=T or 0)
    require(kind == "subs", f"{path}: a two-stage model with parameterization={kind} is none of the release's")
    if settings.get("enable_anchor_loss") is False:
        return "two-stage", ObjectiveConfig(gamma=0.0, gamma_warmup=0.0)
    gamma, slope = (settings.get(f"base_scaling_factor{i}") for i in (1, 2))
    gamma = gamma if isinstance(gamma, float) and gamma > 0 else ObjectiveConfig.gamma
    warmup = min(1.0, gamma / slope) if isinstance(slope, int | float) and slope > 0 else gamma
    tau = settings.get("threshold")
    tau = tau if type(tau) is int and tau > 0 else ObjectiveConfig.tau
    return "adlm", ObjectiveConfig(gamma=gamma, gamma_warmup=warmup, tau=tau)


def _noise_of(path: str | Path, settings: dict[str, Any]) -> NoiseConfig:
    told = settings.get("noise")
    told = told if isinstance(told, dict) else {}
    name = NOISES[choose(f"{path}: noise.type", str(told.get("type", "loglinear")), NOISES)]
    numbers = {k: float(told[k]) for k in ("sigma_min", "sigma_max") if isinstance(told.get(k), int | float)}
    return NoiseConfig(name=name, **numbers)


def _same_names(path: str | Path, wanted: list[str], found: list[str]) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    require(not missing, f"{path} lacks {len(missing)} parameters, such as {missing[:1]}")
    require(not extra, f"{path} has {len(extra)} parameters that are not the release's, such as {extra[:1]}")


def _averaged(path: str | Path, tree: dict[str, Any], names: list[str]) -> list[Any]:
    """The averaged weights: a list in the order of the parameters, backbone first."""
    ema = tree.get("ema")
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not isinstance(shadow, list):
        raise ValueError(f"{path} holds no averaged weights; import those of the last step with eval.ema=false")
    require(len(shadow) == len(names), f"{path} holds {len(shadow)} averaged weights for {len(names)} parameters")
    return shadow


def _expected_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    import torch

    from adlm.models import build_model

    with torch.device("meta"):
        blank = build_model(model, vocab_size, vocab_size - 1)
    return {name: tuple(value.shape) for name, value in blank.state_dict().items()}


def _tokenizer_json(pickled: Any) -> str:
    """A fast tokenizer carries its tokenizer.json as bytes in its state."""
    state = pickled.state if isinstance(pickled, Inert) else None
    backend = state.get("_tokenizer") if isinstance(state, dict) else None
    text = backend.state if isinstance(backend, Inert) else None
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else ""

"""Checkpoints of the public release (ADLM, MDLM, AR, SEDD, D3PM; Lightning's .ckpt) to our exported folders and back.

The shape of a model is inferred from its weights and compared with the settings stored beside them; every name, count
and shape must fit before anything is used. Nothing pickled is executed (`pickles.py`).

Parameter names: the release has `backbone` (anchor network, or the only network) and `denoiser`; the last layer of each
has its head. Ours are `anchor`, `denoiser`, `bridge`, `head` and `anchor_head`, so the mapping depends on whether the
model is anchored.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.compat.command_lines import NOISES, OBJECTIVES, anchor_weight, check_expressible, release_settings
from adlm.compat.pickles import Checkpoint, Inert, TensorRef, plain
from adlm.data.corpora import ALIASES
from adlm.errors import choose, require
from adlm.io.paths import write_atomically
from adlm.rules import check_fields
from adlm.schema import Config, DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor

    from adlm.data.tokenizers import Tokenizer
    from adlm.io.export import Loaded

ALGOS = {"subs": "mdlm", "sedd": "sedd", "d3pm": "d3pm", "ar": "ar"}

# ---- names of parameters --------------------------------------------------------------------------------------------

_WITHIN_STACK = [
    (r"sigma_map\.mlp\.", "time_embedding.mlp."),
    (r"\.attn_qkv\.", ".qkv."),
    (r"\.mlp\.0\.", ".mlp_in."),
    (r"\.mlp\.2\.", ".mlp_out."),
    (r"adaLN_modulation\.", "modulation."),
    (r"output_layer\.norm_final\.", "norm."),
    (r"output_layer\.modulation\.", "modulation."),
]


def from_release(name: str, anchored: bool) -> str | None:
    """Our name of a release parameter; None for rotary frequencies, which we recompute."""
    name = _modern(name)
    if name.endswith("rotary_emb.inv_freq"):
        return None
    network, _, rest = name.partition(".")
    first = "anchor" if anchored else "denoiser"
    stack = {"backbone": first, "denoiser": "denoiser"}.get(network)
    if stack is None or (network == "denoiser" and not anchored):
        raise ValueError(f"parameter {name!r} is not one of the release's (backbone.*, denoiser.*)")
    if rest == "vocab_embed.embedding":
        return "embedding"
    if rest.startswith("vocab_embed.0."):
        return "bridge." + rest.removeprefix("vocab_embed.0.")
    if rest.startswith("output_layer.linear."):
        head = "anchor_head" if stack == "anchor" else "head"
        return f"{head}." + rest.removeprefix("output_layer.linear.")
    if rest.startswith("sigma_map."):
        return f"{stack}." + re.sub(*_WITHIN_STACK[0], rest)
    for pattern, replacement in _WITHIN_STACK[1:]:
        rest = re.sub(pattern, replacement, rest)
    return f"{stack}.{rest}"


def release_names(cfg: ModelConfig) -> list[str]:
    """Every entry of the release's state_dict for a model of this shape, in its order.

    The order matters: the release stores EMA weights as a list without names.
    """
    names = [
        f"backbone.{name}" for name in _network("vocab_embed.embedding", n_blocks=cfg.n_blocks, adaln=cfg.has_adaln)
    ]
    if cfg.anchored:
        bridge = ("vocab_embed.0.weight", "vocab_embed.0.bias")
        names += [f"denoiser.{name}" for name in _network(*bridge, n_blocks=cfg.n_denoiser_blocks, adaln=cfg.has_adaln)]
    return names


def _network(*first: str, n_blocks: int, adaln: bool) -> list[str]:
    modulation = [f"adaLN_modulation.{part}" for part in ("weight", "bias")] if adaln else []
    block = ["norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight"]
    block += [f"mlp.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")] + modulation
    last = ["norm_final.weight", "linear.weight", "linear.bias", *modulation]
    return [
        *first,
        *(f"sigma_map.mlp.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias") if adaln),
        "rotary_emb.inv_freq",
        *(f"blocks.{i}.{name}" for i in range(n_blocks) for name in block),
        *(f"output_layer.{name}" for name in last),
    ]


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass
class Release:
    """The contents of a release checkpoint, with our names and settings."""

    algo: str
    model: ModelConfig
    noise: NoiseConfig
    objective: ObjectiveConfig
    vocab_size: int
    step: int
    weights: "dict[str, Tensor]" = field(repr=False)
    """Our names -> float32 weights."""
    settings: dict[str, Any] = field(repr=False)
    """The release's own settings, as plain data."""
    tokenizer_json: str = field(default="", repr=False)
    """The tokenizer pickled into the file, if it is one of the `tokenizers` library."""


def read_release(path: str | Path, ema: bool = True) -> Release:
    """Read a checkpoint: its EMA weights or, with ema=False, the raw weights of the last step."""
    from adlm.io.export import MOST_TENSORS, expected_shapes

    with Checkpoint(path) as file:
        require(isinstance(file.tree, dict), f"{path} is not a checkpoint: it holds no dictionary")
        refs = file.tree.get("state_dict")
        if not isinstance(refs, dict):
            raise ValueError(f"{path} is not a checkpoint of the release: it has no state_dict")
        require(len(refs) <= MOST_TENSORS, f"{path} holds {len(refs)} tensors, at most {MOST_TENSORS} are read")
        refs = {_modern(name): ref for name, ref in refs.items()}
        hyper = _mapping(file.tree, "hyper_parameters")
        settings = _mapping({"config": plain(hyper.get("config"))}, "config")
        sizes = {name: ref.size for name, ref in refs.items() if isinstance(ref, TensorRef)}
        model = shape_of(path, sizes, settings)
        algo, objective = _objective_of(path, model, settings)
        noise = _noise_of(path, settings)
        for name, values in (("model", model), ("objective", objective), ("noise", noise)):
            check_fields(values, f"{path}: {name}")
        names = [name for name in release_names(model) if not name.endswith("inv_freq")]
        missing = sorted(set(names) - set(refs))
        extra = sorted(name for name in set(refs) - set(names) if not name.endswith("inv_freq"))
        require(not missing, f"{path} lacks {len(missing)} parameters, such as {missing[:1]}")
        require(not extra, f"{path} has {len(extra)} parameters that are not the release's, such as {extra[:1]}")
        if ema:
            refs = dict(zip(names, _ema_weights(path, file.tree, names)))
        vocab_size = _size(path, sizes, "backbone.vocab_embed.embedding")[0]
        expected = expected_shapes(model, vocab_size, vocab_size - 1, len(names), f"{path}: its settings do not fit")
        weights = {}
        for name in names:
            ours = from_release(name, model.anchored)
            assert ours is not None
            tensor = file.tensor(refs[name], name)
            require(tensor.is_floating_point(), f"{path}: {name} does not hold floating-point numbers")
            weights[ours] = tensor.float()
            got, want = tuple(weights[ours].shape), expected[ours]
            require(got == want, f"{path}: {name} has shape {got}, a model of this shape needs {want}")
        require(set(weights) == set(expected), f"{path}: not every parameter of the model is in the file")
        step = file.tree.get("global_step")
        return Release(
            algo, model, noise, objective, vocab_size, step if type(step) is int else 0, weights,
            settings, _tokenizer_json(hyper.get("tokenizer")),
        )  # fmt: skip


def _mapping(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The dictionary under `key`; an empty one if the file has anything else."""
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _number(tree: dict[str, Any], key: str, default: float) -> float:
    """The number under `key`; the default if the file has anything else."""
    found = tree.get(key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else default


def _modern(name: Any) -> str:
    """A name as in the current release: without torch.compile's prefix, with `denoiser` for the older `replica`."""
    name = str(name).replace("_orig_mod.", "")
    return "denoiser." + name.removeprefix("replica.") if name.startswith("replica.") else name


def _size(path: str | Path, shapes: dict[str, Any], name: str) -> tuple[int, ...]:
    found = shapes.get(name)
    sizes = found if isinstance(found, tuple) else ()
    require(bool(sizes) and all(type(n) is int and 0 < n < 2**31 for n in sizes), f"{path} has no usable {name}")
    return sizes


def shape_of(path: str | Path, refs: dict[str, Any], settings: dict[str, Any]) -> ModelConfig:
    """The model's shape from the shapes of its weights; the stored settings must agree."""

    def blocks(network: str) -> int:
        return len({name.split(".")[2] for name in refs if name.startswith(f"{network}.blocks.")})

    anchored = any(name.startswith("denoiser.") for name in refs)
    adaln = "backbone.sigma_map.mlp.0.weight" in refs
    width = _size(path, refs, "backbone.vocab_embed.embedding")[-1]
    mlp = _size(path, refs, "backbone.blocks.0.mlp.0.weight")[0]
    told = _mapping(settings, "model")
    heads = told.get("n_heads", 0)
    if "backbone.rotary_emb.inv_freq" in refs:
        heads = width // (2 * _size(path, refs, "backbone.rotary_emb.inv_freq")[0])
    length = told.get("length", 1024)
    require(type(heads) is int and heads > 0, f"{path} does not say how many heads the model has")
    require(type(length) is int and length > 0, f"{path}: model.length={length!r:.60} is not a length")
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
        conditioning="none" if not adaln else "sigma" if settings.get("time_conditioning") is True else "constant",
        cond_dim=_size(path, refs, "backbone.sigma_map.mlp.0.weight")[0] if adaln else ModelConfig.cond_dim,
        mlp_size=0 if mlp == 4 * width else mlp,
    )
    for key in ("hidden_size", "n_heads", "n_blocks"):
        said = told.get(key, getattr(model, key))
        require(
            said == getattr(model, key),
            f"{path}: its settings say model.{key}={said!s:.60}, its weights {getattr(model, key)}",
        )
    return model


def _objective_of(path: str | Path, model: ModelConfig, settings: dict[str, Any]) -> tuple[str, ObjectiveConfig]:
    kind = settings.get("parameterization", "ar" if model.causal else "subs")
    kind = choose(f"{path}: parameterization", str(kind), OBJECTIVES)
    require((kind == "ar") == model.causal, f"{path}: parameterization={kind} does not fit the weights")
    T = settings.get("T") if type(settings.get("T")) is int else 0
    eps = _number(_mapping(settings, "training"), "sampling_eps", ObjectiveConfig.sampling_eps)
    require(0 <= eps < 1, f"{path}: training.sampling_eps={eps} must be in [0, 1)")
    if not model.anchored:
        return ALGOS[kind], ObjectiveConfig(OBJECTIVES[kind], gamma=0.0, gamma_warmup=0.0, T=T or 0, sampling_eps=eps)
    require(kind == "subs", f"{path}: a two-stage model with parameterization={kind} is none of the release's")
    if settings and settings.get("enable_anchor_loss") is not True:  # the release's switch is off by default
        return "two-stage", ObjectiveConfig(gamma=0.0, gamma_warmup=0.0, sampling_eps=eps)
    gamma, warmup = anchor_weight(
        _number(settings, "base_scaling_factor1", 3e-3), _number(settings, "base_scaling_factor2", 1.0)
    )
    tau = settings.get("threshold")
    tau = tau if type(tau) is int and tau > 0 else ObjectiveConfig.tau
    return "adlm", ObjectiveConfig(gamma=gamma, gamma_warmup=warmup, tau=tau, sampling_eps=eps)


def _noise_of(path: str | Path, settings: dict[str, Any]) -> NoiseConfig:
    told = _mapping(settings, "noise")
    name = NOISES[choose(f"{path}: noise.type", str(told.get("type", "loglinear")), NOISES)]
    sigma_min, sigma_max = (_number(told, k, getattr(NoiseConfig, k)) for k in ("sigma_min", "sigma_max"))
    return NoiseConfig(name=name, sigma_min=sigma_min, sigma_max=sigma_max)


def _ema_weights(path: str | Path, tree: dict[str, Any], names: list[str]) -> list[Any]:
    """The EMA weights: a list in the order of the parameters, backbone first."""
    ema = tree.get("ema")
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not isinstance(shadow, list):
        raise ValueError(f"{path} holds no EMA weights; import those of the last step with eval.ema=false")
    require(len(shadow) == len(names), f"{path} holds {len(shadow)} EMA weights for {len(names)} parameters")
    return shadow


def _tokenizer_json(pickled: Any) -> str:
    """The tokenizer.json of a pickled fast tokenizer, which has it as bytes in its state."""
    state = pickled.state if isinstance(pickled, Inert) else None
    backend = state.get("_tokenizer") if isinstance(state, dict) else None
    text = backend.state if isinstance(backend, Inert) else None
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else ""


# ---- adlm import, adlm convert --------------------------------------------------------------------------------------


def tokenizer_of(release: Release, name: str = "", root: str = "") -> "Tokenizer":
    """The tokenizer of a checkpoint: `name` if given, else the one in the file, else the one named in its settings."""
    from adlm.data.tokenizers import load_tokenizer, tokenizer_from

    stored = str(_mapping(release.settings, "data").get("tokenizer_name_or_path") or "gpt2")
    if name or not release.tokenizer_json:
        found = load_tokenizer(name or stored, root=root)
    else:
        # In the release GPT-2's [PAD] has the same id as the mask, and that entry was trained as the mask.
        pad = {"content": "[PAD]", "id": release.vocab_size - 1}
        try:
            found = tokenizer_from(release.tokenizer_json.encode(), stored, "the tokenizer in the checkpoint", pad)
        except ValueError as error:
            raise ValueError(f"{error}; give data.tokenizer") from None
    require(
        found.vocab_size == release.vocab_size,
        f"the model has {release.vocab_size} entries and the tokenizer {found.name!r} {found.vocab_size}: "
        "give the right one as data.tokenizer",
    )
    return found


def import_release(
    path: str | Path, out: str | Path, ema: bool = True, tokenizer: str = "", root: str = ""
) -> dict[str, Any]:
    """Write a release checkpoint as an exported folder; return its config.json."""
    from adlm.io.export import place_for_export, save_folder

    place = place_for_export(Path(out))
    release = read_release(path, ema)
    used = tokenizer_of(release, tokenizer, root)
    info = _describe(release, used, Path(path), ema)
    save_folder(place, release.weights, used, info)
    return info


def load_release(path: str | Path, ema: bool = True, tokenizer: str = "", root: str = "") -> "Loaded":
    """Load a release checkpoint as a model ready for inference, without writing anything."""
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

    corpus = str(_mapping(release.settings, "data").get("train") or "")
    cfg = Config(
        algo=release.algo,
        model=release.model,
        noise=release.noise,
        objective=release.objective,
        data=DataConfig(name=ALIASES.get(corpus, corpus), tokenizer=tokenizer.name),
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
    """Write an exported folder as a checkpoint that the release's code loads (with its own config and tokenizer)."""
    import torch

    from adlm.io.export import load_folder

    folder = Path(folder)
    loaded = load_folder(folder / "export" if (folder / "export").is_dir() else folder)  # inside a run folder
    model, step = loaded.model.config, int(loaded.info.get("step") or 0)
    check_expressible(model, loaded.noise, loaded.objective)
    settings = release_settings(model, loaded.noise, loaded.objective)
    settings["data"] = {"tokenizer_name_or_path": loaded.tokenizer.name, "train": loaded.info.get("data", "")}
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
        # The release's on_load_checkpoint reads these.
        "loops": {
            "fit_loop": {
                "epoch_progress": {"total": {"completed": 0}, "current": {"completed": 0}},
                "epoch_loop.batch_progress": done,
            }
        },
        "hparams_name": "kwargs",
        "hyper_parameters": {"config": settings},
        "ema": {
            "decay": 0.9999,
            "num_updates": step,
            "shadow_params": [value for name, value in state.items() if not name.endswith("inv_freq")],
        },
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(checkpoint, file))
    return path


def run_import(cfg: Config) -> dict[str, Any]:
    """`adlm import release.ckpt folder`: eval.ema selects the weights, data.tokenizer and data.root the tokenizer."""
    info = import_release(cfg.eval.checkpoint, cfg.out, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root)
    size, weights = f"{info['parameters']:,} parameters", info["imported"]["weights"]
    print(f"{cfg.out}: {info['algo']}, {size}, {weights} weights of step {info['step']:,}")
    return info


def run_convert(cfg: Config) -> dict[str, Any]:
    """`adlm convert folder release.ckpt`: write our exported folder in the release's layout."""
    path = export_release(cfg.eval.checkpoint, cfg.out)
    print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")
    return {"file": str(path), "bytes": path.stat().st_size}

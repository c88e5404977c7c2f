"""Layouts of released models: how each is recognised, its settings in our terms, and where its weights are.

A layout is a function from a config.json to a `Released`; the table LAYOUTS lists them. Each of our parameters is
mapped to the parameters whose rows it joins: `qkv` is q, k and v; `mlp_in` is gate and up.

The end of the module does the reverse: it writes a folder that transformers loads.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from adlm.compat.checkpoints import from_release, release_names, shape_of
from adlm.compat.foreign_files import Tensors
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import make_schedule
from adlm.errors import require
from adlm.io.export import CARD, CONFIG, TOKENIZER, WEIGHTS, Loaded, card, save_folder
from adlm.io.paths import check_object, write_atomically
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig
from adlm.tables import BRIDGES

Names = dict[str, tuple[str, ...]]
"""Our parameter -> the parameters of the file whose rows it joins."""


@dataclass
class Released:
    """A model of another project, in our terms."""

    algo: str
    model: ModelConfig
    objective: ObjectiveConfig
    names: Names
    vocab_size: int
    """Rows of its embedding."""
    mask_id: int | None = None
    """None: it has no mask; the tokenizer's mask is an extra token that it never reads. ANY_MASK: the tokenizer's."""
    tokenizer: str = ""
    """For a folder without tokenizer.json: gpt2, gpt2-pad, or the pre-tokenizer for its vocabulary files."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)


# ---- Llama and models with its block ---------------------------------------------------------------------------------

LLAMA_BLOCK: Names = {
    "norm1.weight": ("input_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm.weight": ("self_attn.q_norm.weight",),
    "k_norm.weight": ("self_attn.k_norm.weight",),
    "attn_out.weight": ("self_attn.o_proj.weight",),
    "norm2.weight": ("post_attention_layernorm.weight",),
    "mlp_in.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp_out.weight": ("mlp.down_proj.weight",),
}
LLAMA_ENDS: Names = {
    "embedding": ("model.embed_tokens.weight",),
    "denoiser.norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
LLAMA_SETTINGS: dict[str, type] = {
    "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "intermediate_size": int,
    "vocab_size": int,
}  # fmt: skip
LLAMA_OPTIONAL: dict[str, type] = {
    "num_key_value_heads": int, "head_dim": int, "rms_norm_eps": float, "rope_theta": float,
    "max_position_embeddings": int, "tie_word_embeddings": bool, "attention_bias": bool, "mlp_bias": bool,
    "rope_scaling": dict, "rope_parameters": dict, "use_sliding_window": bool, "mask_token_id": int,
}  # fmt: skip


def block_names(cfg: ModelConfig, block: Names, ends: Names, blocks: str) -> Names:
    """Names of all parameters of a model without anchors: those outside the blocks, and those of each block after the
    prefix `blocks` and the block's number."""
    has = {"qkv.bias": cfg.qkv_bias, "q_norm.weight": cfg.qk_norm, "k_norm.weight": cfg.qk_norm}
    names = {ours: theirs for ours, theirs in ends.items() if not (cfg.tied and ours == "head.weight")}
    for i in range(cfg.n_blocks):
        for ours, theirs in block.items():
            if has.get(ours, True):
                names[f"denoiser.blocks.{i}.{ours}"] = tuple(f"{blocks}{i}.{name}" for name in theirs)
    return names


def llama_model(config: dict[str, Any], source: str, longest: int, **settings: Any) -> ModelConfig:
    """The settings of a Llama-type model with at most `longest` positions; `settings`: differences between types."""
    check_object(config, LLAMA_SETTINGS, LLAMA_OPTIONAL, source)
    act = config.get("hidden_act", "silu")
    require(act == "silu", f"{source}: hidden_act={act!r:.40} is not read, only silu")
    rope = config.get("rope_parameters") or {}
    scaling = {**(config.get("rope_scaling") or {}), **rope}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    require(kind == "default", f"{source}: positions are stretched (rope {kind!r:.40}), which is not read")
    for key in ("mlp_bias", "use_sliding_window"):
        require(not config.get(key), f"{source}: {key}=true is not read")
    return ModelConfig(
        hidden_size=config["hidden_size"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or 0,
        head_size=config.get("head_dim") or 0,
        n_blocks=config["num_hidden_layers"],
        n_denoiser_blocks=0,
        length=min(longest, config.get("max_position_embeddings") or 2048),
        dropout=0.0,
        anchored=False,
        conditioning="none",
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps") or 1e-6,
        activation="swiglu",
        bias=False,
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        mlp_size=config["intermediate_size"],
        tied=config.get("tie_word_embeddings", False) is True,
        init="normal",
        **settings,
    )


def causal(**settings: Any) -> "Reader":
    """Layout of a causal Llama-type model."""

    def read(config: dict[str, Any], tensors: Tensors) -> Released:
        source = tensors.source
        require(not config.get("attention_bias"), f"{source}: attention_bias=true is not read")
        model = llama_model(config, source, LONGEST_CAUSAL, causal=True, **settings)
        names = block_names(model, LLAMA_BLOCK, LLAMA_ENDS, "model.layers.")
        objective = ObjectiveConfig("autoregressive", gamma=0.0, gamma_warmup=0.0)
        return Released("ar", model, objective, names, config["vocab_size"], tokenizer=QWEN2)

    return read


def bidirectional(**settings: Any) -> "Reader":
    """Layout of a masked diffusion model with the names of a causal one (Dream; Tiny-A2D)."""

    def read(config: dict[str, Any], tensors: Tensors) -> Released:
        # Tiny-A2D's two kinds have the same config.json; the name tells which one writes in blocks.
        blocks = "bd3lm" in Path(tensors.source).name or "bd3lm" in Path(tensors.source).parent.name
        own = {"block_length": A2D_BLOCK} if blocks else {}
        model = llama_model(config, tensors.source, LONGEST_MASKED, **settings, **own)
        names = block_names(model, LLAMA_BLOCK, LLAMA_ENDS, "model.layers.")
        mask_id = config.get("mask_token_id", ANY_MASK)
        return Released("mdlm", model, MASKED, names, config["vocab_size"], mask_id, QWEN2)

    return read


def llada(config: dict[str, Any], tensors: Tensors) -> Released:
    """LLaDA: Llama's block under other names."""
    source = tensors.source
    check_object(config, LLADA_SETTINGS, {"n_kv_heads": int, "mlp_hidden_size": int, "mask_token_id": int}, source)
    told = {"include_bias": False, "include_qkv_bias": False, "block_type": "llama", "activation_type": "silu"}
    for key, value in told.items():
        found = config.get(key, value)
        require(not found if value is False else found == value, f"{source}: {key}={found!r:.40} is not read")
    as_llama = {ours: config.get(theirs) for theirs, ours in LLADA_NAMES.items()}
    model = llama_model(as_llama, source, LONGEST_MASKED)
    names = block_names(model, LLADA_BLOCK, LLADA_ENDS, "model.transformer.blocks.")
    rows = config.get("embedding_size") or config["vocab_size"]
    return Released("mdlm", model, MASKED, names, rows, config.get("mask_token_id", 126336))


LLADA_NAMES = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers", "mlp_hidden_size": "intermediate_size", "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta", "max_sequence_length": "max_position_embeddings", "vocab_size": "vocab_size",
    "weight_tying": "tie_word_embeddings",
}  # fmt: skip
LLADA_SETTINGS: dict[str, type] = {
    "d_model": int, "n_heads": int, "n_layers": int, "vocab_size": int, "mlp_hidden_size": int,
}  # fmt: skip
LLADA_BLOCK: Names = {
    "norm1.weight": ("attn_norm.weight",),
    "qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "attn_out.weight": ("attn_out.weight",),
    "norm2.weight": ("ff_norm.weight",),
    "mlp_in.weight": ("ff_proj.weight", "up_proj.weight"),
    "mlp_out.weight": ("ff_out.weight",),
}
LLADA_ENDS: Names = {
    "embedding": ("model.transformer.wte.weight",),
    "denoiser.norm.weight": ("model.transformer.ln_f.weight",),
    "head.weight": ("model.transformer.ff_out.weight",),
}

# ---- the block of MDLM, SEDD and models derived from them ------------------------------------------------------------

EMBEDDING = "vocab_embed.embedding"
PREFIXES = ("backbone.", "", "backbone.backbone.")


def dit(tensors: Tensors, told: dict[str, Any], conditioning: str, algo: str = "mdlm") -> Released:
    """A model with the published block. Its shape is inferred from its weights; the settings `told` must agree."""
    source = tensors.source
    found = [p for p in PREFIXES if p + EMBEDDING in tensors.shapes]
    require(bool(found), f"{source} holds no {EMBEDDING}: it is not a model of MDLM's or SEDD's layout")
    inner = {"backbone." + n.removeprefix(found[0]): s for n, s in tensors.shapes.items() if n.startswith(found[0])}
    read = shape_of(source, inner, {"model": told})
    model = replace(read, causal=False, conditioning=conditioning if read.has_adaln else "none")
    names = {}
    for name in release_names(model):
        ours = from_release(name, anchored=False)
        if ours is not None:
            names[ours] = (found[0] + name.removeprefix("backbone."),)
    kinds = {"mdlm": MASKED, "sedd": ObjectiveConfig("score-entropy", gamma=0.0, gamma_warmup=0.0)}
    rows = tensors.shapes[found[0] + EMBEDDING][0]
    noise = NoiseConfig("linear") if conditioning == "t" else NoiseConfig()
    return Released(algo, model, kinds[algo], names, rows, rows - 1, "gpt2", noise)


def by_sigma(config: dict[str, Any]) -> str:
    """model.conditioning for MDLM's setting."""
    return "sigma" if config.get("time_conditioning") is True else "constant"


def mdlm(config: dict[str, Any], tensors: Tensors) -> Released:
    """MDLM on the hub; its config.json has its own names."""
    names = {"model_length": "length", "hidden_dim": "hidden_size", "n_blocks": "n_blocks", "n_heads": "n_heads"}
    told = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
    told["dropout"] = config.get("dropout")
    return dit(tensors, told, by_sigma(config))


def bd3lm(config: dict[str, Any], tensors: Tensors) -> Released:
    """BD3-LM on the hub: block diffusion or, with a single block, MDLM."""
    require(not config.get("causal"), f"{tensors.source}: the causal models of BD3-LM are not read (causal=true)")
    found, K = mdlm(config, tensors), config.get("block_size")
    if type(K) is not int or K < 1:
        raise ValueError(f"{tensors.source}: block_size={K!r:.40} is no number of tokens")
    if found.model.length > K:
        found.model = replace(found.model, block_length=str(K))
    return found


def hydra(config: dict[str, Any], tensors: Tensors) -> Released:
    """Models whose config.json is a tree of Hydra settings: SEDD (which has a graph), SDTT and DiDi-Instruct."""
    tree = config["config"] if isinstance(config.get("config"), dict) else config
    told = tree["model"] if isinstance(tree.get("model"), dict) else {}
    graph, algo = tree.get("graph"), tree.get("algo")
    if isinstance(graph, dict):
        kind = graph.get("type")
        require(kind == "absorb", f"{tensors.source}: graph.type={kind!r:.40} is not masked diffusion (absorb)")
        return dit(tensors, told, "sigma", "sedd")
    name = str(algo.get("name") if isinstance(algo, dict) else algo)
    require(not name.startswith(("duo", "udlm")), f"{tensors.source}: {REFUSED['duo']}")
    return dit(tensors, told, by_sigma(tree))


def gidd(config: dict[str, Any], tensors: Tensors) -> Released:
    """GIDD without uniform noise: masked diffusion conditioned on t."""
    unif = config.get("p_uniform", config.get("p_unif", 0.0))
    named = re.search(r"p_unif-(\d+\.\d+)", tensors.source)
    unif = float(named[1]) if named else unif
    require(
        unif == 0,
        f"{tensors.source}: p_unif={unif} mixes masks with uniform noise, and only masked diffusion is built (0.0)",
    )
    told = config["model"] if isinstance(config.get("model"), dict) else config
    found = dit(tensors, told, "t")
    return replace(found, tokenizer="gpt2-pad")


# ---- the table -------------------------------------------------------------------------------------------------------

MASKED = ObjectiveConfig("nelbo", gamma=0.0, gamma_warmup=0.0)
ANY_MASK = -1
"""The model has a mask; the tokenizer knows its id."""
A2D_BLOCK = "32"
QWEN2 = "qwen2"
"""The pre-tokenizer for vocabulary files of these models, if there is no tokenizer.json."""
LONGEST_CAUSAL, LONGEST_MASKED = 8192, 4096
"""The most positions: this is also the size of caches and canvases."""
REFUSED = {
    "duo": "Duo's noise is uniform, and only masked diffusion is built",
    "fmlm": "FMLM is a continuous flow, and only masked diffusion is built",
}
"""model_type -> why it is not supported."""
Reader = Callable[[dict[str, Any], Tensors], Released]
LAYOUTS: dict[str, Reader] = {
    "llama": causal(),
    "mistral": causal(),
    "qwen2": causal(qkv_bias=True),
    "qwen3": causal(qk_norm=True),
    "dream": bidirectional(qkv_bias=True, shift=True),
    "a2d-llama": bidirectional(),
    "a2d-qwen2": bidirectional(qkv_bias=True),
    "a2d-qwen3": bidirectional(qk_norm=True),
    "llada": llada,
    "mdlm": mdlm,
    "bd3lm": bd3lm,
    "gidd": gidd,
    "hydra": hydra,
}
"""model_type of a config.json, in lower case -> its layout; see `kind_of` for files without one."""
# Tensors that are not read: they are recomputed, never used, or the same as another one.
IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|sampling_eps_(min|max)|position_ids|lm_head\.weight|mask_index)$"
)


def kind_of(config: dict[str, Any]) -> str:
    """The layout of a config.json: its model_type, or inferred from other settings."""
    told = config.get("model_type")
    if isinstance(told, str) and told:
        return told.lower()
    if "p_uniform" in config or "p_unif" in config:
        return "gidd"
    tree = config["config"] if isinstance(config.get("config"), dict) else config
    return "hydra" if isinstance(tree.get("model"), dict) else "unknown"


def refuse(config: Any, source: str) -> None:
    """Refuse a config.json without a layout, before weights are opened."""
    kind = kind_of(check_object(config, {}, {}, f"{source}/config.json"))
    require(kind not in REFUSED, f"{source}: {REFUSED.get(kind)}")
    require(kind in LAYOUTS, f"{source} is of the kind {kind!r:.60}, which is not read; known are {', '.join(LAYOUTS)}")


def read_config(config: Any, tensors: Tensors) -> Released:
    """A config.json and its weights, in our terms."""
    settings = check_object(config, {}, {}, f"the config.json of {tensors.source}")
    kind = kind_of(settings)
    found = LAYOUTS[kind](settings, tensors)
    known = {name for parts in found.names.values() for name in parts}
    extra = sorted(name for name in tensors.shapes.keys() - known if not IGNORED.search(name))
    require(not extra, f"{tensors.source} has {len(extra)} parameters that {kind} has not, such as {extra[:1]}")
    return found


# ---- a folder that transformers loads --------------------------------------------------------------------------------
# `adlm export RUN FOLDER --transformers`.
#
# A causal model with Llama's block is written in the plain layout of Llama, Qwen2 or Qwen3, and needs no code. Any
# other model becomes one of our exported folders (`adlm.load` reads it, too) with modeling_adlm.py beside the weights,
# for `AutoModelForMaskedLM` or, if causal, `AutoModelForCausalLM` with trust_remote_code=True.

CODE = "modeling_adlm"
TOKENIZER_CONFIG = "tokenizer_config.json"


def save_for_transformers(folder: Path, loaded: Loaded) -> str:
    """Write the folder; return the name of the class that loads it."""
    cfg, weights = loaded.model.config, loaded.model.state_dict()
    kind = "AutoModelForCausalLM" if cfg.causal else "AutoModelForMaskedLM"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TOKENIZER_CONFIG, json.dumps(tokenizer_config(loaded.tokenizer, cfg.length), indent=1))
    if llama_type(cfg):
        config = llama_config(loaded)
        save_file(llama_weights(cfg, weights), folder / WEIGHTS, metadata={"format": "pt"})
        loaded.tokenizer.save(folder / TOKENIZER)
        write_atomically(folder / CARD, card(loaded.info))
        write_atomically(folder / CONFIG, json.dumps(config, indent=1))
        return kind
    require(
        not cfg.anchored or cfg.bridge in BRIDGES.entries,
        f"model.bridge={cfg.bridge} is one of another package: its code cannot be written into the folder",
    )
    require(
        not cfg.block_lengths,
        f"model.block_length={cfg.block_length}: transformers has no class for a model that writes block after block;"
        " adlm export without --transformers keeps it",
    )
    name = "AdlmForCausalLM" if cfg.causal else "AdlmForMaskedLM"
    shutil.copyfile(Path(__file__).with_name(f"{CODE}.py"), folder / f"{CODE}.py")
    about = {
        "model_type": "adlm",
        "architectures": [name],
        "auto_map": {"AutoConfig": f"{CODE}.AdlmConfig", kind: f"{CODE}.{name}"},
        "masked_at_1": make_schedule(loaded.noise).masked_at_1,
        "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
        "mask_token_id": loaded.model.mask_id,
        "bos_token_id": loaded.tokenizer.bos_id,
        "eos_token_id": loaded.tokenizer.eos_id,
        "pad_token_id": loaded.tokenizer.pad_id,
        "use_cache": False,
    }
    save_folder(folder, weights, loaded.tokenizer, loaded.info | about)
    return kind


def tokenizer_config(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """The tokenizer_config.json that AutoTokenizer reads besides tokenizer.json."""
    roles = {"mask": tokenizer.mask_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    names = {f"{role}_token": tokenizer.backend.id_to_token(i) for role, i in roles.items() if i is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **names}


# ---- Llama's layout --------------------------------------------------------------------------------------------------


def llama_type(cfg: ModelConfig) -> str:
    """The model_type whose code in transformers computes the same as this model; empty if there is none."""
    plain = cfg.causal and not (cfg.anchored or cfg.has_adaln or cfg.bias)
    if not (plain and cfg.norm == "rmsnorm" and cfg.activation == "swiglu") or (cfg.qk_norm and cfg.qkv_bias):
        return ""
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"


def llama_config(loaded: Loaded) -> dict[str, Any]:
    """The config.json, which this module reads back as the same settings."""
    cfg, tokenizer = loaded.model.config, loaded.tokenizer
    kind = llama_type(cfg)
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.n_blocks,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "intermediate_size": cfg.mlp_width,
        "vocab_size": loaded.model.vocab_size,
        "max_position_embeddings": cfg.length,
        "rms_norm_eps": cfg.norm_eps or 1e-6,
        "rope_theta": cfg.rope_base,
        "tie_word_embeddings": cfg.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": str(loaded.model.embedding.dtype).removeprefix("torch."),
    }


def llama_weights(cfg: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under Llama's names: the rows of our parameters, split into their parts."""
    H = cfg.head_width
    rows = {"qkv": (cfg.n_heads * H, cfg.kv_heads * H, cfg.kv_heads * H), "mlp_in": (cfg.mlp_width,) * 2}
    found: dict[str, Tensor] = {}
    for ours, theirs in block_names(cfg, LLAMA_BLOCK, LLAMA_ENDS, "model.layers.").items():
        sizes = rows.get(ours.split(".")[-2], (len(weights[ours]),)) if len(theirs) > 1 else (len(weights[ours]),)
        parts = weights[ours].detach().cpu().split(sizes)
        found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return found

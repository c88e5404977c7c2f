"""Layouts of released models: how each is recognised, what it is in our settings, and where its weights are.

A layout is a function from a config.json to a `Released`; LAYOUTS is the one table of them. Our parameters are named
with the names whose rows, one after another, they are: `qkv` is q, k and v; `mlp_in` is gate and up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adlm.errors import require
from adlm.io.paths import check_object
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

Names = dict[str, tuple[str, ...]]
"""Our parameter -> the parameters of the file whose rows it consists of."""


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
    """None: it has none, and the tokenizer's is one more token that it never reads."""
    tokenizer: str = ""
    """Name of its tokenizer where the folder holds none."""
    noise: NoiseConfig = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.noise = self.noise or NoiseConfig()


# ---- Llama and what has its block ------------------------------------------------------------------------------------

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
    """Names of all parameters of a model without anchors: of its ends and, `blocks` and a number before each, of its
    blocks."""
    has = {"qkv.bias": cfg.qkv_bias, "q_norm.weight": cfg.qk_norm, "k_norm.weight": cfg.qk_norm}
    names = {ours: theirs for ours, theirs in ends.items() if not (cfg.tied and ours == "head.weight")}
    for i in range(cfg.n_blocks):
        for ours, theirs in block.items():
            if has.get(ours, True):
                names[f"denoiser.blocks.{i}.{ours}"] = tuple(f"{blocks}{i}.{name}" for name in theirs)
    return names


def llama_model(config: dict[str, Any], source: str, **settings: Any) -> ModelConfig:
    """The settings of a model of Llama's kind; `settings` are those in which kinds differ."""
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
        length=config.get("max_position_embeddings") or 2048,
        dropout=0.0,
        anchored=False,
        adaln=False,
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
    """A causal model of Llama's kind."""

    def read(config: dict[str, Any], source: str) -> Released:
        require(not config.get("attention_bias"), f"{source}: attention_bias=true is not read")
        model = llama_model(config, source, causal=True, **settings)
        names = block_names(model, LLAMA_BLOCK, LLAMA_ENDS, "model.layers.")
        objective = ObjectiveConfig("autoregressive", gamma=0.0, gamma_warmup=0.0)
        return Released("ar", model, objective, names, config["vocab_size"])

    return read


Reader = Callable[[dict[str, Any], str], Released]
LAYOUTS: dict[str, Reader] = {
    "llama": causal(),
    "qwen2": causal(qkv_bias=True),
    "qwen3": causal(qk_norm=True),
}
"""model_type of a config.json -> how it is read."""


def read_config(config: Any, source: str) -> Released:
    """What a config.json describes."""
    settings = check_object(config, {}, {"model_type": str}, source)
    kind = settings.get("model_type")
    require(kind in LAYOUTS, f"{source}: model_type={kind!r:.60} is none of {', '.join(LAYOUTS)}")
    return LAYOUTS[str(kind)](settings, source)

"""A folder that transformers loads: `adlm export RUN FOLDER --transformers`.

A causal model with Llama's block is written in the plain layout of Llama, Qwen2 or Qwen3, and needs no code. Any other
is an exported folder of ours (`adlm.load` reads it, too) with modeling_adlm.py beside the weights, for
`AutoModelForMaskedLM` or, if causal, `AutoModelForCausalLM` with trust_remote_code=True.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from adlm.compat.layouts import LLAMA_BLOCK, LLAMA_ENDS, block_names
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule
from adlm.errors import require
from adlm.io.export import CARD, CONFIG, TOKENIZER, WEIGHTS, Loaded, card, save_folder
from adlm.io.paths import write_atomically
from adlm.schema import ModelConfig
from adlm.tables import BRIDGES

CODE = "modeling_adlm"
TOKENIZER_CONFIG = "tokenizer_config.json"


def save_for_transformers(folder: Path, loaded: Loaded) -> str:
    """Write the folder; returns the class that loads it."""
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
    """What AutoTokenizer reads beside tokenizer.json."""
    roles = {"mask": tokenizer.mask_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    names = {f"{role}_token": tokenizer.backend.id_to_token(i) for role, i in roles.items() if i is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **names}


# ---- Llama's layout --------------------------------------------------------------------------------------------------


def llama_type(cfg: ModelConfig) -> str:
    """The model_type whose code in transformers computes the same as this model; empty: none does."""
    plain = cfg.causal and not (cfg.anchored or cfg.has_adaln or cfg.bias)
    if not (plain and cfg.norm == "rmsnorm" and cfg.activation == "swiglu") or (cfg.qk_norm and cfg.qkv_bias):
        return ""
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"


def llama_config(loaded: Loaded) -> dict[str, Any]:
    """The config.json that `compat.layouts` reads back as the same settings."""
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
    """The weights under Llama's names: rows of ours cut into the parts that they are."""
    H = cfg.head_width
    rows = {"qkv": (cfg.n_heads * H, cfg.kv_heads * H, cfg.kv_heads * H), "mlp_in": (cfg.mlp_width,) * 2}
    found: dict[str, Tensor] = {}
    for ours, theirs in block_names(cfg, LLAMA_BLOCK, LLAMA_ENDS, "model.layers.").items():
        sizes = rows.get(ours.split(".")[-2], (len(weights[ours]),)) if len(theirs) > 1 else (len(weights[ours]),)
        parts = weights[ours].detach().cpu().split(sizes)
        found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return found

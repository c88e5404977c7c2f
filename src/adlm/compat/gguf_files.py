"""GGUF files of llama.cpp: settings, tokenizer and weights, in the names of a Hugging Face folder.

llama.cpp stores the rows of q and k of a Llama for interleaved rotary pairs: within a head, row 2i + j here is row
j H/2 + i there. Qwen's are stored as they are. Quantised weights become float32.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adlm.compat.tensors import Tensors
from adlm.compat.vocabularies import PRE_TOKENIZERS, byte_level_bpe
from adlm.data.tokenizers import Tokenizer
from adlm.errors import choose, require

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PERMUTED = ("llama",)
SETTINGS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""Type of a token that text never becomes."""


class GgufModel(NamedTuple):
    config: dict[str, Any]
    """As a config.json would have it."""
    tensors: Tensors
    tokenizer: Tokenizer


def open_gguf(path: Path) -> GgufModel:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{path.name} needs the gguf package (pip install 'adlm[eval]')") from None
    try:
        reader = GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        found = {t.name: t for t in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a complete GGUF file ({problem:.120}): download it again") from None
    kind = choose(f"{path}: general.architecture", str(facts.get("general.architecture")), ARCHITECTURES)
    config: dict[str, Any] = {"model_type": kind}
    for theirs, name in SETTINGS.items():
        value = facts.get(f"{kind}.{theirs}")
        if value is not None:
            config[name] = float(f"{value:.6g}") if isinstance(value, float) else value  # which was a float32
    scaling = facts.get(f"{kind}.rope.scaling.type", "none")
    config |= {"tie_word_embeddings": "output.weight" not in found, "hidden_act": "silu"}
    if scaling != "none" or "rope_freqs.weight" in found:
        config["rope_scaling"] = {"rope_type": scaling}
    theirs = {hugging_face_name(name, path): name for name in found if name != "rope_freqs.weight"}
    shapes = {ours: tuple(int(n) for n in reversed(found[name].shape)) for ours, name in theirs.items()}
    rows = shapes.get("model.embed_tokens.weight", (0,))[0]
    config["vocab_size"] = rows

    def read(name: str) -> "Tensor":
        import torch
        from gguf.quants import dequantize

        stored = found[theirs[name]]
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).view(shapes[name])
        part = re.search(r"self_attn\.([qk])_proj\.", name) if kind in PERMUTED else None
        if part is None:
            return values
        heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
        return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return GgufModel(config, Tensors(str(path), shapes, read), tokenizer_of_gguf(facts, path))


def hugging_face_name(name: str, path: Path) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise ValueError(f"{path}: its tensor {name!r:.60} belongs to no architecture that is read")
    return f"{'' if match[1] is None else f'model.layers.{match[1]}.'}{NAMES[match[2]]}.{match[3]}"


def tokenizer_of_gguf(facts: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer inside the file; byte-level BPE alone."""
    kind = str(facts.get("tokenizer.ggml.model"))
    require(
        kind == "gpt2",
        f"{path}: its tokenizer is of the kind {kind!r:.40}, and only byte-level BPE (gpt2) is read from GGUF files;"
        " use the model's Hugging Face folder",
    )
    pre = choose(f"{path}: tokenizer.ggml.pre", str(facts.get("tokenizer.ggml.pre", "default")), PRE_TOKENIZERS)
    tokens, types = facts.get("tokenizer.ggml.tokens", []), facts.get("tokenizer.ggml.token_type", [])
    special = [i for i, t in enumerate(types) if t == CONTROL]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ", 1) for merge in facts.get("tokenizer.ggml.merges", [])]
    name = str(facts.get("general.basename") or path.stem)
    return byte_level_bpe(vocab, merges, {i: tokens[i] for i in special}, pre, name, f"{path}: its tokenizer")

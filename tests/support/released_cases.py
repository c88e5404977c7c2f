"""Released models at toy size: the folder of each layout, and what it must compute."""

import torch
from released import (
    BLOCKS,
    HEAD,
    HEADS,
    KEYS,
    LLADA,
    MLP,
    QUERIES,
    QWEN,
    C,
    D,
    dense_dit,
    dense_llama,
    dit_weights,
    llama_weights,
    vocabulary,
)

L = 32
LENGTH = 12
MDLM = {
    "model_type": "mdlm", "model_length": L, "hidden_dim": D, "cond_dim": C, "n_blocks": BLOCKS, "n_heads": HEADS,
    "dropout": 0.1, "time_conditioning": False, "auto_map": {"AutoConfig": "configuration_mdlm.MDLMConfig"},
}  # fmt: skip
HYDRA = {"hidden_size": D, "cond_dim": C, "length": L, "n_blocks": BLOCKS, "n_heads": HEADS, "dropout": 0.1}
QWEN_CONFIG = {
    "hidden_size": D, "num_hidden_layers": BLOCKS, "num_attention_heads": QUERIES, "num_key_value_heads": KEYS,
    "head_dim": HEAD, "intermediate_size": MLP, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "max_position_embeddings": L, "hidden_act": "silu",
}  # fmt: skip
LLADA_CONFIG = {
    "model_type": "llada", "d_model": D, "n_heads": QUERIES, "n_kv_heads": KEYS, "n_layers": BLOCKS,
    "mlp_hidden_size": MLP, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_sequence_length": L, "block_type": "llama",
    "activation_type": "silu", "include_bias": False, "include_qkv_bias": False, "weight_tying": False,
}  # fmt: skip
TOK = vocabulary()
V = TOK.vocab_size


def with_pad():
    """[PAD] and [MASK] behind the vocabulary, as GIDD has them."""
    from adlm.io.load import with_padding

    return with_padding(TOK)


class Case:
    """A released model: its folder's content, its reference and what it is."""

    def __init__(self, config, weights, dense, algo="mdlm", tokenizer=TOK, conditioned=False, **folder):
        self.config, self.weights, self.dense, self.algo = config, weights, dense, algo
        self.tokenizer, self.conditioned, self.folder = tokenizer, conditioned, folder


def dit_case(config, prefix="", rotary="inv_freq", **options):
    tokenizer = options.get("tokenizer", TOK)
    weights = dit_weights(tokenizer.vocab_size, prefix, rotary)
    return Case(config, weights, lambda x, level: dense_dit(weights, x, level, prefix), **options)


def llama_case(config, names, shift=False, bias=False, qk_norm=False, tied=False, **options):
    H = HEAD if names is QWEN else D // QUERIES
    weights = llama_weights(V + 5, names, bias, qk_norm, tied, H)  # rows to spare, as the released models have

    def dense(x, level):
        logits = dense_llama(weights, x, names, 5000.0, 1e-5)
        return torch.cat((logits[:1], logits[:-1])) if shift else logits

    mask = {"vocab_size": V + 5, "mask_token_id": V - 1, "tie_word_embeddings": tied}
    return Case({**config, **mask}, weights, dense, **options)


CASES = {
    "mdlm": lambda: dit_case({**MDLM, "vocab_size": V}, "backbone."),
    "mdlm with time": lambda: dit_case(
        {**MDLM, "vocab_size": V, "time_conditioning": True}, "backbone.", conditioned="sigma"
    ),
    "bd3lm of one block": lambda: dit_case({**MDLM, "model_type": "bd3lm", "block_size": L}, "backbone."),
    "sedd": lambda: dit_case(
        {"tokens": V - 1, "graph": {"type": "absorb"}, "noise": {"type": "loglinear"}, "model": HYDRA},
        algo="sedd", conditioned="sigma", pickled=True,
    ),
    "sdtt, a student of the hub's model": lambda: dit_case({"config": {"model": HYDRA}}, "backbone.backbone."),
    "sdtt, its own": lambda: dit_case({"model": HYDRA, "parameterization": "subs"}, "backbone."),
    "didi-instruct": lambda: dit_case({"model": HYDRA, "algo": {"name": "mdlm"}}, pickled=True),
    "gidd": lambda: dit_case(
        {"p_uniform": 0.0, "model": {**HYDRA, "length": L}}, rotary="cached", conditioned="t", tokenizer=with_pad()
    ),
    "llada": lambda: llama_case(LLADA_CONFIG, LLADA, shards=3),
    "dream": lambda: llama_case({**QWEN_CONFIG, "model_type": "Dream"}, QWEN, shift=True, bias=True),
    "qwen3 diffusion": lambda: llama_case({**QWEN_CONFIG, "model_type": "a2d-qwen3"}, QWEN, qk_norm=True, tied=True),
}  # fmt: skip

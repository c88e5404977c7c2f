"""Parameter names of the public release <-> ours.

The release has `backbone` (anchor network, or the only network) and `denoiser`; its head sits inside the last layer of
each. Ours are `anchor`, `denoiser`, `bridge`, `head` and `anchor_head`, so the map depends on whether the model is
anchored.
"""

import re

from adlm.schema import ModelConfig

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
    """Our name of a release parameter; None for what we recompute (rotary frequencies)."""
    name = name.replace("_orig_mod.", "")
    name = re.sub(r"^replica\.", "denoiser.", name)  # older files
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

    The order matters: the release stores averaged weights as a list without names.
    """
    names = [f"backbone.{name}" for name in _network("vocab_embed.embedding", n_blocks=cfg.n_blocks, adaln=cfg.adaln)]
    if cfg.anchored:
        bridge = ("vocab_embed.0.weight", "vocab_embed.0.bias")
        names += [f"denoiser.{name}" for name in _network(*bridge, n_blocks=cfg.n_denoiser_blocks, adaln=cfg.adaln)]
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

"""Released models at toy size: weights under the names of each layout, and their networks written out with plain loops.

Nothing here imports a network of ours: a reference reads the file's own names."""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from adlm.data.tokenizers import Tokenizer, train_bpe

TEXT = "The quick brown fox jumps over the lazy dog. 12 boxes of five dozen jugs, and again the quick fox. " * 30


def vocabulary(mask: str = "[MASK]", size: int = 300) -> Tokenizer:
    """A small byte-level BPE whose mask is the last entry, as in the released models."""
    described = json.loads(train_bpe([TEXT], size).backend.to_str())
    n = len(described["model"]["vocab"])
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] != "[MASK]"]
    described["added_tokens"].append({**described["added_tokens"][0], "id": n, "content": mask})
    described["model"]["vocab"]["unused"] = described["model"]["vocab"].pop("[MASK]")
    from tokenizers import Tokenizer as Backend

    return Tokenizer(Backend.from_str(json.dumps(described)), "toy")


def numbers(shapes: dict[str, tuple[int, ...]], seed: int = 0, scale: float = 0.3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) * scale for name, shape in shapes.items()}


# ---- MDLM's and SEDD's block -----------------------------------------------------------------------------------------

D, C, BLOCKS, HEADS = 16, 8, 2, 2


def dit_weights(V: int, prefix: str = "", rotary: str = "inv_freq") -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "vocab_embed.embedding": (V, D),
        "sigma_map.mlp.0.weight": (C, 256), "sigma_map.mlp.0.bias": (C,),
        "sigma_map.mlp.2.weight": (C, C), "sigma_map.mlp.2.bias": (C,),
        "output_layer.norm_final.weight": (D,),
        "output_layer.linear.weight": (V, D), "output_layer.linear.bias": (V,),
        "output_layer.adaLN_modulation.weight": (2 * D, C), "output_layer.adaLN_modulation.bias": (2 * D,),
    }  # fmt: skip
    for i in range(BLOCKS):
        b = f"blocks.{i}."
        shapes |= {
            b + "norm1.weight": (D,), b + "attn_qkv.weight": (3 * D, D), b + "attn_out.weight": (D, D),
            b + "norm2.weight": (D,), b + "mlp.0.weight": (4 * D, D), b + "mlp.0.bias": (4 * D,),
            b + "mlp.2.weight": (D, 4 * D), b + "mlp.2.bias": (D,),
            b + "adaLN_modulation.weight": (6 * D, C), b + "adaLN_modulation.bias": (6 * D,),
        }  # fmt: skip
    weights = numbers(shapes)
    H = D // HEADS
    inverse = 1 / 10000 ** (torch.arange(0, H, 2).float() / H)
    if rotary == "inv_freq":
        weights["rotary_emb.inv_freq"] = inverse
    else:
        angle = torch.outer(torch.arange(32.0), torch.cat((inverse, inverse)))
        weights |= {"rotary_emb.cos_cached": angle.cos(), "rotary_emb.sin_cached": angle.sin()}
    return {prefix + name: value for name, value in weights.items()}


def layer_norm(x, weight):
    return F.layer_norm(x, x.shape[-1:], eps=1e-5) * weight


def turn(x_lh, base=10000.0):
    """Rotary positions of one head, number by number: the first half of a head is paired with the second."""
    out, half = x_lh.clone(), x_lh.shape[1] // 2
    for l in range(x_lh.shape[0]):
        for i in range(half):
            angle = l * base ** (-2 * i / x_lh.shape[1])
            a, b = x_lh[l, i].item(), x_lh[l, i + half].item()
            out[l, i] = a * math.cos(angle) - b * math.sin(angle)
            out[l, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def dense_dit(weights, tokens, level: float, prefix: str = "", see=None):
    """Logits [L, V] of one sequence, head by head; `level`: what it is conditioned on, `see`: who sees whom."""
    w = {name.removeprefix(prefix): value.double() for name, value in weights.items() if name.startswith(prefix)}
    angle = level * torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    c = torch.cat((angle.cos(), angle.sin()))
    c = F.silu(w["sigma_map.mlp.0.weight"] @ c + w["sigma_map.mlp.0.bias"])
    c = F.silu(w["sigma_map.mlp.2.weight"] @ c + w["sigma_map.mlp.2.bias"])
    x = w["vocab_embed.embedding"][tokens]
    for i in range(BLOCKS):
        b = f"blocks.{i}."
        m = (w[b + "adaLN_modulation.weight"] @ c + w[b + "adaLN_modulation.bias"]).chunk(6)
        q, k, v = ((layer_norm(x, w[b + "norm1.weight"]) * (1 + m[1]) + m[0]) @ w[b + "attn_qkv.weight"].T).chunk(3, -1)
        heads = []
        for qh, kh, vh in zip(*(t.split(D // HEADS, -1) for t in (q, k, v))):
            scores = turn(qh) @ turn(kh).T / math.sqrt(D // HEADS)
            scores = scores if see is None else scores.masked_fill(~see, -torch.inf)
            heads.append(scores.softmax(-1) @ vh)
        x = x + m[2] * (torch.cat(heads, -1) @ w[b + "attn_out.weight"].T)
        h = (layer_norm(x, w[b + "norm2.weight"]) * (1 + m[4]) + m[3]) @ w[b + "mlp.0.weight"].T + w[b + "mlp.0.bias"]
        x = x + m[5] * (F.gelu(h, approximate="tanh") @ w[b + "mlp.2.weight"].T + w[b + "mlp.2.bias"])
    shift, scale = (w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"]).chunk(2)
    h = layer_norm(x, w["output_layer.norm_final.weight"]) * (1 + scale) + shift
    return h @ w["output_layer.linear.weight"].T + w["output_layer.linear.bias"]


# ---- Llama's block, read in both directions --------------------------------------------------------------------------

LLADA = {
    "embed": "model.transformer.wte.weight", "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight", "block": "model.transformer.blocks.{}.", "norm1": "attn_norm",
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out", "norm2": "ff_norm", "gate": "ff_proj",
    "up": "up_proj", "down": "ff_out",
}  # fmt: skip
QWEN = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "block": "model.layers.{}.", "norm1": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "norm2": "post_attention_layernorm", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
QUERIES, KEYS, HEAD, MLP = 4, 2, 6, 20


def llama_weights(V: int, n: dict[str, str], bias=False, qk_norm=False, tied=False, H=HEAD) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {n["embed"]: (V, D), n["norm"]: (D,)}
    if not tied:
        shapes[n["head"]] = (V, D)
    for i in range(BLOCKS):
        b = n["block"].format(i)
        shapes |= {
            b + n["norm1"] + ".weight": (D,), b + n["norm2"] + ".weight": (D,),
            b + n["q"] + ".weight": (QUERIES * H, D), b + n["k"] + ".weight": (KEYS * H, D),
            b + n["v"] + ".weight": (KEYS * H, D), b + n["o"] + ".weight": (D, QUERIES * H),
            b + n["gate"] + ".weight": (MLP, D), b + n["up"] + ".weight": (MLP, D), b + n["down"] + ".weight": (D, MLP),
        }  # fmt: skip
        if bias:
            shapes |= {b + n[p] + ".bias": (r * H,) for p, r in (("q", QUERIES), ("k", KEYS), ("v", KEYS))}
        if qk_norm:
            shapes |= {b + f"self_attn.{p}_norm.weight": (H,) for p in "qk"}
    return numbers(shapes)


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_llama(weights, tokens, n: dict[str, str], base: float, eps: float, see=None):
    """Logits [L, V] of one sequence, head by head, where each is computed."""
    w = {name: value.double() for name, value in weights.items()}
    x = w[n["embed"]][tokens]
    zero = torch.zeros(1, dtype=torch.float64)
    for i in range(BLOCKS):
        b = n["block"].format(i)
        h = rms_norm(x, w[b + n["norm1"] + ".weight"], eps)
        q, k, v = (h @ w[b + n[p] + ".weight"].T + w.get(b + n[p] + ".bias", zero) for p in "qkv")
        H, heads = q.shape[1] // QUERIES, []
        for j in range(QUERIES):
            g = j // (QUERIES // KEYS)
            qh, kh, vh = q[:, j * H : (j + 1) * H], *(t[:, g * H : (g + 1) * H] for t in (k, v))
            if b + "self_attn.q_norm.weight" in w:
                qh = rms_norm(qh, w[b + "self_attn.q_norm.weight"], eps)
                kh = rms_norm(kh, w[b + "self_attn.k_norm.weight"], eps)
            scores = turn(qh, base) @ turn(kh, base).T / math.sqrt(H)
            scores = scores if see is None else scores.masked_fill(~see, -torch.inf)
            heads.append(scores.softmax(-1) @ vh)
        x = x + torch.cat(heads, -1) @ w[b + n["o"] + ".weight"].T
        h = rms_norm(x, w[b + n["norm2"] + ".weight"], eps)
        gate, up = h @ w[b + n["gate"] + ".weight"].T, h @ w[b + n["up"] + ".weight"].T
        x = x + (F.silu(gate) * up) @ w[b + n["down"] + ".weight"].T
    return rms_norm(x, w[n["norm"]], eps) @ w.get(n["head"], w[n["embed"]]).T


# ---- folders ---------------------------------------------------------------------------------------------------------


def write_folder(folder, config, weights, tokenizer=None, shards: int = 1, pickled: bool = False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        names, places = sorted(weights), {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file({name: weights[name] for name in names[i::shards]}, folder / file)
            places |= dict.fromkeys(names[i::shards], file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder

"""An adlm model for transformers. This file is in the model's folder and only needs torch and transformers.

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
    logits = model(**tokenizer(f"The {tokenizer.mask_token} sat.", return_tensors="pt")).logits

A diffusion model predicts every masked token; a causal one (AutoModelForCausalLM) the next token. An anchored model has
two stacks: the anchor network's prediction reaches the denoiser through a bridge, as one linear map of its logits.
Letters: B sequences, L positions, D width, N heads, H head width, V vocabulary, C width of the conditioning vector.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput


class AdlmConfig(PretrainedConfig):
    """`model` has the settings of the network, named as in `adlm config`; the rest are facts that adlm stores."""

    model_type = "adlm"

    def __init__(self, model=None, vocab_size=2, mask_id=0, masked_at_1=1.0, **more):
        self.model = {**DEFAULTS, **(model or {})}
        self.vocab_size, self.mask_id, self.masked_at_1 = vocab_size, mask_id, masked_at_1
        super().__init__(**more)


DEFAULTS = {
    "hidden_size": 16, "n_heads": 2, "n_kv_heads": 0, "head_size": 0, "n_blocks": 1, "n_denoiser_blocks": 1,
    "length": 1024, "dropout": 0.0, "anchored": False, "bridge": "linear", "causal": False,
    "conditioning": "none", "cond_dim": 128, "norm": "layernorm", "qk_norm": False,
    "norm_eps": 0.0, "activation": "gelu", "bias": True, "qkv_bias": False, "rope_base": 10000.0, "tied": False,
    "shift": False, "mlp_size": 0,
}  # fmt: skip


class AdlmNorm(nn.Module):
    """LayerNorm or RMSNorm without a bias, in at least float32."""

    def __init__(self, width, m, kind=None):
        super().__init__()
        self.center = (kind or m["norm"]) == "layernorm"
        self.eps = m["norm_eps"] or (1e-5 if self.center else 1e-6)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.center:
            wide = wide - wide.mean(-1, keepdim=True)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class AdlmTimeEmbedding(nn.Module):
    """Noise level sigma -> conditioning vector [B, C]: sinusoids, a two-layer MLP, SiLU."""

    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma):
        exponent = torch.arange(128, dtype=torch.float64, device=sigma.device) / 128
        frequencies = torch.exp(-math.log(10000.0) * exponent).to(torch.float32)
        angle = sigma.float()[:, None] * frequencies
        return F.silu(self.mlp(torch.cat((angle.cos(), angle.sin()), -1).to(self.mlp[0].weight.dtype)))


def modulations(linear, c, n):
    """n vectors [B, 1, D] for shift, scale and gate, from the conditioning vector."""
    return linear(c)[:, None].chunk(n, -1)


class AdlmBlock(nn.Module):
    """Attention and MLP, each after a norm; with adaLN shifted, scaled and gated by the conditioning vector."""

    def __init__(self, m):
        super().__init__()
        D, N = m["hidden_size"], m["n_heads"]
        self.K, self.H = m["n_kv_heads"] or N, m["head_size"] or D // N
        self.N, self.m = N, m
        F_ = m["mlp_size"] or 4 * D
        self.norm1, self.norm2 = AdlmNorm(D, m), AdlmNorm(D, m)
        self.qkv = nn.Linear(D, (N + 2 * self.K) * self.H, bias=m["qkv_bias"])
        self.attn_out = nn.Linear(N * self.H, D, bias=False)
        self.mlp_in = nn.Linear(D, F_ * (2 if m["activation"] == "swiglu" else 1), bias=m["bias"])
        self.mlp_out = nn.Linear(F_, D, bias=m["bias"])
        if m["qk_norm"]:
            self.q_norm, self.k_norm = AdlmNorm(self.H, m, "rmsnorm"), AdlmNorm(self.H, m, "rmsnorm")
        self.modulation = nn.Linear(m["cond_dim"], 6 * D) if m["conditioning"] != "none" else None

    def forward(self, x, cos, sin, c, mask):
        m, drop = self.m, lambda y: F.dropout(y, self.m["dropout"], self.training)
        h1 = h2 = None
        if self.modulation is not None:
            *h1, gate1, shift2, scale2, gate2 = modulations(self.modulation, c, 6)
            h2 = (shift2, scale2)
        y = self.attn_out(self.attention(self.qkv(modulated(self.norm1(x), h1)), cos, sin, mask))
        x = x + drop(y if h1 is None else gate1 * y)
        h = self.mlp_in(modulated(self.norm2(x), h2))
        if m["activation"] == "swiglu":
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.relu(h).square() if m["activation"] == "relu2" else F.gelu(h, approximate="tanh")
        y = self.mlp_out(h)
        return x + drop(y if h2 is None else gate2 * y)

    def attention(self, qkv, cos, sin, mask):
        q, k, v = qkv.unflatten(-1, (-1, self.H)).split((self.N, self.K, self.K), 2)
        if self.m["qk_norm"]:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        causal = self.m["causal"] and mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.K != self.N)
        return out.transpose(1, 2).flatten(2)


def modulated(x, vectors):
    return x if vectors is None else x * (1 + vectors[1]) + vectors[0]


def rotate(x, cos, sin):
    """Rotary position embedding: the first half of a head is paired with the second."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class AdlmStack(nn.Module):
    """Blocks with a final norm. Returns the residual stream, and its normed version for a head."""

    def __init__(self, m, n_blocks):
        super().__init__()
        self.m = m
        self.time_embedding = AdlmTimeEmbedding(m["cond_dim"]) if m["conditioning"] != "none" else None
        self.blocks = nn.ModuleList(AdlmBlock(m) for _ in range(n_blocks))
        self.norm = AdlmNorm(m["hidden_size"], m)
        self.modulation = nn.Linear(m["cond_dim"], 2 * m["hidden_size"]) if m["conditioning"] != "none" else None

    def forward(self, x, sigma, mask):
        H = self.blocks[0].H
        inverse = self.m["rope_base"] ** (-torch.arange(0, H, 2, dtype=torch.float64, device=x.device) / H)
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64, device=x.device), inverse)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        c = None
        if self.time_embedding is not None:  # without time conditioning, a constant vector
            level = torch.zeros(1, device=x.device) if self.m["conditioning"] == "constant" else sigma
            c = self.time_embedding(-torch.expm1(-level) if self.m["conditioning"] == "t" else level)
        for block in self.blocks:
            x = block(x, cos, sin, c, mask)
        final = None if self.modulation is None else modulations(self.modulation, c, 2)
        return x, modulated(self.norm(x), final)


class AdlmBridge(nn.Module):
    """The paper's bridge: a linear map of the anchor logits; together with the anchor head it is one matrix [D, D]."""

    def __init__(self, m, vocab_size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(m["hidden_size"], vocab_size))
        self.bias = nn.Parameter(torch.empty(m["hidden_size"])) if m["bias"] else None

    def forward(self, anchor, head):
        offset = self.bias if head.bias is None else self.weight @ head.bias + (0 if self.bias is None else self.bias)
        return F.linear(anchor, self.weight @ head.weight, offset)


class AdlmPreTrainedModel(PreTrainedModel):
    """The network: embedding, [anchor stack, bridge,] denoiser stack, heads."""

    config_class = AdlmConfig
    base_model_prefix = "adlm"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        m, V = config.model, config.vocab_size
        self.embedding = nn.Parameter(torch.empty(V, m["hidden_size"]))
        if m["anchored"]:
            self.anchor = AdlmStack(m, m["n_blocks"])
            self.anchor_head = nn.Linear(m["hidden_size"], V, bias=m["bias"])
            if m["bridge"] == "linear":
                self.bridge = AdlmBridge(m, V)
        self.denoiser = AdlmStack(m, m["n_denoiser_blocks"] if m["anchored"] else m["n_blocks"])
        if not m["tied"]:
            self.head = nn.Linear(m["hidden_size"], V, bias=m["bias"])
        self.post_init()

    def _init_weights(self, module):
        """Only for a model that is trained from scratch; from_pretrained fills every weight."""
        for name, p in module.named_parameters(recurse=False):
            if not getattr(p, "_is_hf_initialized", False):
                value = torch.ones_like(p) if isinstance(module, AdlmNorm) else torch.randn_like(p) * 0.02
                p.data.copy_(torch.zeros_like(p) if name == "bias" else value)

    def noise_level(self, input_ids):
        """sigma of each sequence from its fraction of masks, for a network that is conditioned on it."""
        masked = self.config.masked_at_1 * (input_ids == self.config.mask_id).double().mean(-1)
        return -torch.log1p(-masked.clamp(max=1 - 1e-9)).float()

    def all_logits(self, input_ids, attention_mask=None, sigma=None):
        """Raw logits [B, L, V] in at least float32. `attention_mask`: 0 at padding, to which no position attends."""
        m, x, mask = self.config.model, F.embedding(input_ids, self.embedding), None
        if attention_mask is not None and not bool(attention_mask.all()):
            mask = attention_mask.bool()[:, None, None]
            if m["causal"]:
                L = input_ids.shape[1]
                mask = mask & torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
            mask = mask | torch.eye(input_ids.shape[1], dtype=torch.bool, device=x.device)  # padding attends to itself
        if m["conditioning"] in ("sigma", "t") and sigma is None:
            sigma = self.noise_level(input_ids)
        if m["anchored"]:
            stream, anchor = self.anchor(x, sigma, mask)
            x = self.bridge(anchor, self.anchor_head) if m["bridge"] == "linear" else stream
        _, h = self.denoiser(x, sigma, mask)
        if m["shift"]:  # the prediction for a position is read at the one before it
            h = torch.cat((h[:, :1], h[:, :-1]), 1)
        logits = F.linear(h, self.embedding) if m["tied"] else self.head(h)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class AdlmForMaskedLM(AdlmPreTrainedModel):
    """Predicts the token at every position; only the predictions at masks are meaningful."""

    def forward(self, input_ids=None, attention_mask=None, sigma=None, labels=None, **ignored):
        logits = self.all_logits(input_ids, attention_mask, sigma)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return MaskedLMOutput(loss=loss, logits=logits)


class AdlmForCausalLM(AdlmPreTrainedModel, GenerationMixin):
    """Predicts the next token. Reads the whole text again for every token; adlm itself has a cache."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **ignored):
        logits, loss = self.all_logits(input_ids, attention_mask), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

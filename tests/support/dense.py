"""Reference implementations of the fast paths: every position, every logit, the bridge as the paper draws it."""

from collections import Counter

import torch
import torch.nn.functional as F

from adlm.bench import dense_logits
from adlm.models import Network
from adlm.models.layers import activate
from adlm.objectives import CorruptedBatch


def dense_log_probs(logits, z_BL, mask_id):
    """SUBS on dense logits, as the release writes it."""
    logits = logits.clone()
    logits[..., mask_id] += -1e6
    log_p = logits.log_softmax(-1)
    visible = z_BL != mask_id
    log_p = torch.where(visible[..., None], torch.full_like(log_p, -1e6), log_p)
    return torch.where(visible[..., None] & (F.one_hot(z_BL, log_p.shape[-1]) > 0), torch.zeros_like(log_p), log_p)


def plain_norm(h, norm):
    h = h - h.mean(-1, keepdim=True) if norm.kind == "layernorm" else h
    h = h / (h.square().mean(-1, keepdim=True) + (1e-5 if norm.kind == "layernorm" else 1e-6)).sqrt()
    return h * norm.weight


def plain_attention(block, qkv, cos, sin, causal=False):
    q, k, v = (part.unflatten(-1, (block.heads[0], -1)) for part in qkv.chunk(3, dim=-1))
    if block.q_norm is not None:
        q, k = plain_norm(q, block.q_norm), plain_norm(k, block.k_norm)

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    scores = torch.einsum("blnh,bmnh->bnlm", turn(q), turn(k)) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
    return torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v).flatten(2)


def plain_block(block, x, c, cos, sin, causal=False):
    """A block as published: vectors act on activations, nothing is folded."""
    vectors = block.modulation(c).unsqueeze(1).chunk(6, dim=-1) if block.modulation is not None else [0.0, 0.0, 1.0] * 2
    shift, scale, gate = vectors[:3]
    h = plain_attention(block, block.qkv(plain_norm(x, block.norm1) * (1 + scale) + shift), cos, sin, causal)
    x = x + gate * block.attn_out(h)
    shift, scale, gate = vectors[3:]
    h = activate(block.mlp_in(plain_norm(x, block.norm2) * (1 + scale) + shift), block.activation)
    return x + gate * block.mlp_out(h)


def plain_logits(model: Network, tokens_BL, sigma_B=None, causal=None):
    """(denoiser logits, anchor logits or None), block after block: who reads what of whom is written out. `causal`:
    who sees only the past; None: as the model says."""
    causal = model.config.causal if causal is None else causal
    x, anchor_logits = model.embedding[tokens_BL], None
    for stack in [s for s in (model.anchor, model.denoiser) if s is not None]:
        if anchor_logits is not None and model.config.bridge == "linear":
            x = F.linear(anchor_logits, model.bridge.weight, model.bridge.bias)
        c, (cos, sin) = stack.conditioning(x, sigma_B), stack.rotary.tables(x.shape[1], None)
        for block in stack.blocks:
            x = plain_block(block, x, c, cos, sin, causal)
        shift, scale = (0.0, 0.0) if stack.modulation is None else stack.modulation(c).unsqueeze(1).chunk(2, dim=-1)
        h = plain_norm(x, stack.norm) * (1 + scale) + shift
        if stack is model.anchor:
            anchor_logits = model.anchor_head(h)
    return model.head(h), anchor_logits


def naive_anchor_mask(x_BL, tau):
    """A Python counter per row."""
    return torch.tensor([[Counter(row)[token] <= tau for token in row] for row in x_BL.tolist()])


def dense_anelbo(model: Network, task: CorruptedBatch, x0_BL, weight_B, gamma, tau, positions="all"):
    """Per-token loss -w(t) [log p_theta(x0) + gamma A log p_phi(x0)], at every position of the sequence."""
    z_BL = task.tokens_BL
    logits, anchor_logits = dense_logits(model, z_BL, task.sigma_B)
    log_p = dense_log_probs(logits, z_BL, model.mask_id).gather(-1, x0_BL[..., None]).squeeze(-1)
    if gamma > 0:
        log_phi = anchor_logits.log_softmax(-1).gather(-1, x0_BL[..., None]).squeeze(-1)
        anchors = naive_anchor_mask(x0_BL, tau)
        if positions == "masked":
            anchors = anchors & (z_BL == model.mask_id)
        log_p = log_p + gamma * anchors.to(log_p.dtype) * log_phi
    return -log_p * weight_B.to(log_p.dtype)[:, None]

"""The slow, obvious twins of the fast paths: every position, every logit, the bridge as the paper draws it."""

from collections import Counter

import torch
import torch.nn.functional as F

from adlm.bench.dense import dense_logits
from adlm.models import LanguageModel
from adlm.objectives import Task


def dense_log_probs(logits, z_BL, mask_id):
    """SUBS on dense logits, as the release writes it."""
    logits = logits.clone()
    logits[..., mask_id] += -1e6
    log_p = logits.log_softmax(-1)
    visible = z_BL != mask_id
    log_p = torch.where(visible[..., None], torch.full_like(log_p, -1e6), log_p)
    return torch.where(visible[..., None] & (F.one_hot(z_BL, log_p.shape[-1]) > 0), torch.zeros_like(log_p), log_p)


def naive_anchor_mask(x_BL, tau):
    """A Python counter per row."""
    return torch.tensor([[Counter(row)[token] <= tau for token in row] for row in x_BL.tolist()])


def naive_hard_mask(log_phi_BL, hard):
    """One position after the other: is the anchor network's cross-entropy at least `hard` nats?"""
    return torch.tensor([[-log_phi >= hard for log_phi in row] for row in log_phi_BL.tolist()])


def dense_anelbo(model: LanguageModel, task: Task, x0_BL, weight_B, gamma, tau, positions="all", hard=None):
    """Per-token loss -w(t) [log p_theta(x0) + gamma A log p_phi(x0)], at every position of the row; A counts, or, with
    `hard` nats, looks at -log p_phi(x0) itself."""
    z_BL = task.tokens_BL
    logits, anchor_logits = dense_logits(model, z_BL, task.sigma_B)
    log_p = dense_log_probs(logits, z_BL, model.mask_id).gather(-1, x0_BL[..., None]).squeeze(-1)
    if gamma > 0:
        log_phi = anchor_logits.log_softmax(-1).gather(-1, x0_BL[..., None]).squeeze(-1)
        anchors = naive_anchor_mask(x0_BL, tau) if hard is None else naive_hard_mask(log_phi, hard)
        if positions == "masked":
            anchors = anchors & (z_BL == model.mask_id)
        log_p = log_p + gamma * anchors.to(log_p.dtype) * log_phi
    return -log_p * weight_B.to(log_p.dtype)[:, None]

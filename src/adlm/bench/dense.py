"""The reference implementation, slow and obvious: every position, every logit, the bridge as the paper draws it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.absorbing import posterior
from adlm.errors import require
from adlm.models import Network
from adlm.models.linear_cross_entropy import cross_entropy_chunk
from adlm.objectives import CorruptedBatch


def dense_logits(model: Network, tokens_BL: Tensor, sigma_B: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Denoiser logits and anchor logits (or None), the anchor logits formed and projected back to the width."""
    x = F.embedding(tokens_BL, model.embedding)
    anchor_logits = None
    if model.anchor is not None and model.anchor_head is not None and model.bridge is not None:
        stream, normed = model.anchor(x, sigma_B)
        anchor_logits = F.linear(normed, model.anchor_head.weight, model.anchor_head.bias)
        x = model.bridge.from_logits(stream, anchor_logits)
    hidden = model.denoiser(x, sigma_B).normed_BLD
    return F.linear(hidden, model.head.weight, model.head.bias), anchor_logits


def dense_loss(model: Network, task: CorruptedBatch) -> Tensor:
    """The loss of a corrupted batch from all logits; weights are zero where there is no loss."""
    z, V = task.tokens_BL, model.vocab_size
    logits, anchor_logits = dense_logits(model, z, task.sigma_B)
    total = torch.zeros((), device=z.device)
    for name, term in task.terms.items():
        require(
            term.chunk_loss is cross_entropy_chunk,
            f"the loss {name!r} has no reference implementation to compare with; use bench.dense=false",
        )
        values = logits if term.head == "denoiser" else anchor_logits
        assert values is not None
        values = values.float().view(-1, V)
        if term.exclude is not None:
            values = values.clone()
            values[:, term.exclude] -= 1e6
        at_N = (term.positions_N,)
        weight = torch.zeros(z.numel(), device=z.device).index_put(at_N, term.weights_N)
        target = torch.zeros(z.numel(), dtype=torch.long, device=z.device).index_put(at_N, term.targets_N)
        log_p = values.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
        total = total - term.scale * (log_p * weight).sum()
    return total


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Nucleus filter: the smallest set of most probable tokens with at least top_p, renormalised; by sorting."""
    ordered, token = p.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    kept = torch.zeros_like(p).scatter_(-1, token, ordered)
    return kept / kept.sum(-1, keepdim=True)


def dense_step(
    model: Network,
    z_BL: Tensor,
    alpha_s: float,
    alpha_t: float,
    sigma: float,
    top_p: float,
    noise: Tensor,
    sigma_B: Tensor | None = None,
) -> Tensor:
    """One step of Eq. 6 as a loop takes it: distribution, nucleus filter and float64 noise at every position of every
    sequence. `sigma` is Eq. 6's probability of masking again, sigma_B the noise level that a time-conditioned model is
    conditioned on."""
    logits, _ = dense_logits(model, z_BL, sigma_B)
    logits = logits.float()
    logits[..., model.mask_id] = -1e6
    p = logits.softmax(-1) if top_p == 1 else nucleus(logits.softmax(-1), top_p)
    q = posterior(z_BL, p, alpha_s, alpha_t, model.mask_id, sigma)
    return (q.double() / (1e-10 - torch.log(noise + 1e-10))).argmax(-1)

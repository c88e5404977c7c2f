"""Reference implementation of the concrete-score form of the absorbing process (SEDD): ratios of marginals instead of
a denoising distribution. The package samples by rates that follow from it (`rates.analytic`).

The score at z_t says how much likelier the sequence would be with one position replaced:
s(z)_v = q_t(z with v) / q_t(z). For the absorbing process it is the denoiser times a number that depends on time alone,
s(mask)_v = p(x0 = v | z_t) / (e^sigma - 1), so the two forms describe the same model; the analytic step below then
equals Eq. 3 (a law test shows it). sigma = sigma(t) is the noise level, [B] or a float.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.process import Number


def _per_position(x: Number, z_t: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.as_tensor(x, dtype=dtype, device=z_t.device)
    return x.reshape(x.shape + (1,) * (z_t.dim() - x.dim() + 1))


def _one_hot(token: Tensor | int, like: Tensor) -> Tensor:
    return F.one_hot(torch.as_tensor(token, device=like.device), like.shape[-1]).to(like)


def score_from_probs(p_x0: Tensor, z_t: Tensor, sigma: Number, mask_id: int) -> Tensor:
    """Concrete score [..., V] of a SUBS prediction; entry z_t itself is 1.

    At a visible position only the mask can be reached backwards in the reverse graph; its ratio is e^sigma - 1.
    """
    odds = torch.expm1(_per_position(sigma, z_t, p_x0.dtype))
    is_mask = _one_hot(mask_id, p_x0)
    masked = p_x0 * (1 - is_mask) / odds + is_mask
    visible = _one_hot(z_t, p_x0) + odds * is_mask
    return torch.where((z_t == mask_id).unsqueeze(-1), masked, visible)


def probs_from_score(score: Tensor, z_t: Tensor, sigma: Number, mask_id: int) -> Tensor:
    """p(x0 | z_t) at masked positions, (e^sigma - 1) times the score; a visible position predicts itself.

    Not normalised: a trained score need not sum to one, and by how much it misses is information.
    """
    odds = torch.expm1(_per_position(sigma, z_t, score.dtype))
    masked = score * odds * (1 - _one_hot(mask_id, score))
    return torch.where((z_t == mask_id).unsqueeze(-1), masked, _one_hot(z_t, score))


def analytic_step(score: Tensor, z_t: Tensor, dsigma: Number, mask_id: int) -> Tensor:
    """Distribution of z_s (unnormalised when the score is) after lowering the noise level by dsigma.

    The score is moved to level sigma - dsigma ("staggered") and multiplied by the forward probability of reaching z_t.
    """
    d = _per_position(dsigma, z_t, score.dtype)
    is_mask = _one_hot(mask_id, score)
    staggered = torch.exp(d) * score + (1 - torch.exp(d)) * score.sum(-1, keepdim=True) * is_mask
    came_from = torch.exp(-d) * _one_hot(z_t, score) + (1 - torch.exp(-d)) * (z_t == mask_id).unsqueeze(-1)
    return staggered * came_from


def analytic_last_step(score: Tensor, z_t: Tensor, sigma: Number, mask_id: int) -> Tensor:
    """The step to level 0: as `analytic_step` over the whole remaining sigma, with the mask excluded."""
    return analytic_step(score, z_t, sigma, mask_id) * (1 - _one_hot(mask_id, score))

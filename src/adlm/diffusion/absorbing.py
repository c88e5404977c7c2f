"""The absorbing (masking) process and its posteriors: Eq. 1, 2, 3, 6 of the paper and the SUBS parameterisation.

Pure functions of tensors. alpha_s, alpha_t, sigma_t are tensors or floats that broadcast against the token tensor. A
posterior is dense ([..., V]) here because it is the definition; samplers use only the two probabilities
`reveal_probability` and sigma_t, which say everything about *positions*, and never build it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion import check_not_nan, check_range, check_tokens, visible
from adlm.errors import require

# Finite, so that 0 * log p stays 0; exp(-1e6) is 0 in every float format.
NO_MASS = -1e6

Number = Tensor | float


def _column(x: Number, like: Tensor) -> Number:
    """Numbers [B] of sequences, with trailing axes so that they broadcast against tokens [B, L]."""
    if isinstance(x, Tensor) and 0 < x.dim() < like.dim():
        return x.reshape(x.shape + (1,) * (like.dim() - x.dim()))
    return x


def _number(x: Number) -> Tensor:
    """A number as a tensor. A float becomes float64: as float32 a probability would lose half its digits."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def mask_tokens(x0: Tensor, u: Tensor, alpha_t: Number, mask_id: int) -> Tensor:
    """Eq. 1: z_t keeps the token of x0 with probability alpha_t, else becomes the mask; `u` holds uniforms like x0."""
    if u.shape != x0.shape:
        raise ValueError(f"u must have the shape of x0, {tuple(x0.shape)}, got {tuple(u.shape)}")
    if isinstance(alpha_t, Tensor):
        check_range("alpha_t", alpha_t, 0.0, 1.0)
    return torch.where(u < alpha_t, x0, mask_id)


def sigma_max(alpha_s: Number, alpha_t: Number) -> Tensor:
    """Largest sigma_t that leaves Eq. 6 a distribution: min(1, (1 - alpha_s) / alpha_t); 1 at alpha_t = 0."""
    alpha_s, alpha_t = _number(alpha_s), _number(alpha_t)
    return torch.where(1 - alpha_s < alpha_t, (1 - alpha_s) / alpha_t, torch.ones_like(alpha_t))


def reveal_probability(alpha_s: Number, alpha_t: Number, sigma_t: Number = 0.0) -> Tensor:
    """Eq. 6: probability that a masked position takes a token, (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t)."""
    alpha_s, alpha_t = _number(alpha_s), _number(alpha_t)
    return (alpha_s - (1 - sigma_t) * alpha_t) / (1 - alpha_t)


def posterior(
    z_t: Tensor, p_x0: Tensor, alpha_s: Number, alpha_t: Number, mask_id: int, sigma_t: Number = 0.0
) -> Tensor:
    """Eq. 6: distribution of z_s at every position, [..., V]; `p_x0` is the SUBS prediction (no mass on the mask).

    Without remasking (sigma_t = 0) it is Eq. 3, and Eq. 2 where p_x0 is one-hot.
    """
    require(p_x0.shape[:-1] == z_t.shape, f"p_x0 must be {tuple(z_t.shape)} by the vocabulary, got {tuple(p_x0.shape)}")
    check_tokens("z_t", z_t, p_x0.shape[-1])
    check_not_nan("p_x0", p_x0)
    alpha_s, alpha_t, sigma_t = (_number(_column(a, z_t)) for a in (alpha_s, alpha_t, sigma_t))
    _check_posterior(alpha_s, alpha_t, sigma_t)
    is_mask = F.one_hot(torch.as_tensor(mask_id, device=z_t.device), p_x0.shape[-1]).to(p_x0)
    reveal = reveal_probability(alpha_s, alpha_t, sigma_t).expand(z_t.shape).unsqueeze(-1).to(p_x0)
    remask = sigma_t.expand(z_t.shape).unsqueeze(-1).to(p_x0)
    from_mask = reveal * p_x0 + (1 - reveal) * is_mask
    from_token = (1 - remask) * F.one_hot(z_t, p_x0.shape[-1]).to(p_x0) + remask * is_mask
    return torch.where((z_t == mask_id).unsqueeze(-1), from_mask, from_token)


def _check_posterior(alpha_s: Tensor, alpha_t: Tensor, sigma_t: Tensor) -> None:
    if not (visible(alpha_s) and visible(alpha_t) and visible(sigma_t)):
        return
    check_range("alpha_t", alpha_t, 0.0, 1.0)
    check_range("alpha_s", alpha_s, 0.0, 1.0)
    require(bool((alpha_s >= alpha_t).all()), "alpha_s must not be below alpha_t: time s comes before t")
    require(bool((alpha_t < 1).all()), "alpha_t must be below 1: at t=0 nothing is masked and there is no step to take")
    top = sigma_max(alpha_s, alpha_t)
    require(
        bool(((sigma_t >= 0) & (sigma_t <= top * (1 + 1e-9))).all()),
        f"sigma_t must lie in [0, min(1, (1 - alpha_s) / alpha_t)], got up to {sigma_t.max().item()}"
        f" where at most {top.min().item()} is allowed",
    )


def subs(logits: Tensor, z_t: Tensor, mask_id: int) -> Tensor:
    """SUBS log p(x0 | z_t) in float32 (float64 for float64 logits).

    Zero-masking: the mask gets no mass. Carry-over: a visible token predicts itself.
    """
    require(
        logits.shape[:-1] == z_t.shape,
        f"logits must be {tuple(z_t.shape)} by the vocabulary, got {tuple(logits.shape)}",
    )
    check_tokens("z_t", z_t, logits.shape[-1])
    check_not_nan("logits", logits)
    is_mask = F.one_hot(torch.as_tensor(mask_id, device=logits.device), logits.shape[-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = F.log_softmax(logits + NO_MASS * is_mask, dim=-1)
    keep = torch.full_like(log_p, NO_MASS).scatter(-1, z_t.unsqueeze(-1), 0.0)
    return torch.where((z_t == mask_id).unsqueeze(-1), log_p, keep)

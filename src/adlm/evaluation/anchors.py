"""What the two networks of an anchored model say where anchors are hidden."""

from typing import NamedTuple

import torch
from torch import Tensor

from adlm.diffusion.schedules import Schedule, noise_level
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.models import Network


class Guess(NamedTuple):
    """The likeliest tokens at a position with their probabilities, and where the true one stands (1: first)."""

    tokens: list[int]
    probabilities: list[float]
    rank: int
    probability: float
    """Of the true token."""


class Reading(NamedTuple):
    position: int
    truth: int
    anchor: Guess
    denoiser: Guess


def hide(anchors_L: Tensor, share: float, seed: int) -> Tensor:
    """A share of the anchors, chosen by seed and position, as a boolean [L]; at least one."""
    positions = anchors_L.nonzero().squeeze(1)
    require(len(positions) > 0, "the row holds no anchor to hide")
    u = uniforms(seed, Stream.MASK, positions)
    chosen = positions[u.argsort()[: max(1, round(share * len(positions)))]]
    hidden_L = torch.zeros_like(anchors_L)
    hidden_L[chosen] = True
    return hidden_L


@torch.no_grad()
def read_hidden(model: Network, schedule: Schedule, tokens_L: Tensor, hidden_L: Tensor, top: int = 3) -> list[Reading]:
    """Mask the hidden positions of a clean row, run the model once, and read both heads there."""
    require(model.anchor_head is not None, "this model has no anchor network (model.anchored=false)")
    z_BL = torch.where(hidden_L, model.mask_id, tokens_L)[None]
    sigma_B = noise_level(hidden_L.float().mean()[None], schedule) if model.config.time_conditioning else None
    hidden = model(z_BL, sigma_B)
    positions = hidden_L.nonzero().squeeze(1)
    truth_N = tokens_L[positions]
    assert hidden.anchor_BLD is not None and model.anchor_head is not None
    denoiser_NV = model.head(hidden.denoiser_BLD[0, positions]).float()
    denoiser_NV[:, model.mask_id] = -torch.inf  # SUBS: a prediction is never the mask
    anchor = guesses(model.anchor_head(hidden.anchor_BLD[0, positions]).float(), truth_N, top)
    denoiser = guesses(denoiser_NV, truth_N, top)
    return [Reading(*row) for row in zip(positions.tolist(), truth_N.tolist(), anchor, denoiser)]


def guesses(logits_NV: Tensor, truth_N: Tensor, top: int) -> list[Guess]:
    p_NV = logits_NV.softmax(-1)
    p_N = p_NV.gather(1, truth_N[:, None])
    rank_N = 1 + (p_NV > p_N).sum(-1)
    best = p_NV.topk(min(top, p_NV.shape[1]))
    columns = (best.indices.tolist(), best.values.tolist(), rank_N.tolist(), p_N.squeeze(1).tolist())
    return [Guess(*row) for row in zip(*columns)]

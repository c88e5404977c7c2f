"""Score entropy of the absorbing process (SEDD), in the form a head can be trained on.

SEDD learns the concrete score s_y at a masked position, the ratio of marginals with y in place of the mask; given x0
it is r = alpha_t / (1 - alpha_t) at y = x0 and 0 elsewhere. The network's outputs z are read as log s_y = z_y + log r
- log K with K = V - 1 tokens, and the denoising score entropy with weight sigma'(t) becomes

    sigma' [ sum_y s_y - r log s_{x0} + r (log r - 1) ] = w(t) [ sum_y e^{z_y} / K - z_{x0} + log K - 1 ],

the NELBO's own weight w(t) = sigma' r. Since u - 1 >= log u, it is never below the NELBO of softmax(z), with equality
where sum_y e^{z_y} = K: score entropy is cross-entropy plus a penalty on the normalisation.
"""

import math

import torch
from torch import Tensor

from adlm.errors import require
from adlm.objectives.base import Term
from adlm.objectives.nelbo import Nelbo, Noised
from adlm.schema import ModelConfig


def score_entropy_chunk(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """Score entropies of a chunk and their gradient; the mask and padding columns are those at -inf."""
    z = logits_nV.to(weight_n.dtype)
    K = (z[0] > -torch.inf).sum().to(z.dtype)
    gold_n = z.gather(1, target_n[:, None]).squeeze(1)
    share = z.exp_().div_(K)
    loss_n = weight_n * (share.sum(-1) - gold_n + K.log() - 1)
    gradient = share.mul_(weight_n[:, None]).to(logits_nV.dtype)
    gradient.scatter_add_(1, target_n[:, None], -weight_n[:, None].to(gradient.dtype))
    return loss_n, gradient


class ScoreEntropy(Nelbo):
    bound_name = "score_entropy"

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        require(not model.anchored, "objective.name=score-entropy is a baseline without anchors: model.anchored=false")
        require(self.cfg.T == 0, f"objective.T={self.cfg.T}: score entropy is a continuous-time bound, objective.T=0")

    def bound_term(self, noised: Noised) -> Term:
        rows = noised.where(noised.masked_BL)
        return Term("denoiser", *rows, exclude=self.mask_id, chunk_loss=score_entropy_chunk)


def normaliser(logits_NV: Tensor) -> Tensor:
    """log of sum_y e^{z_y} / K: 0 for a normalised score (the mask's column must already be -inf)."""
    K = int((logits_NV[0] > -torch.inf).sum())
    return logits_NV.logsumexp(-1) - math.log(K)

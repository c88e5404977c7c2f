"""Score entropy of the absorbing process (SEDD), in the form a head can be trained on.

SEDD learns the concrete score s_y at a masked position, the ratio of marginals with y in place of the mask; given x0
it is r = alpha_t / (1 - alpha_t) at y = x0 and 0 elsewhere. The network's outputs z are read as log s_y = z_y + log r
- log K with K = V - 1 tokens, and the denoising score entropy with weight sigma'(t) becomes

    sigma' [ sum_y s_y - r log s_{x0} + r (log r - 1) ] = w(t) [ sum_y e^{z_y} / K - z_{x0} + log K - 1 ],

the NELBO's own weight w(t) = sigma' r. Since u - 1 >= log u, it is never below the NELBO of softmax(z), with equality
where sum_y e^{z_y} = K: score entropy is cross-entropy plus a penalty on the normalisation.
"""

import torch
from torch import Tensor

from adlm.objectives.base import Term
from adlm.objectives.nelbo import Nelbo, Noised


def score_entropy_chunk(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """Score entropies of a chunk and their gradient; the mask and padding columns are those at -inf."""
    z = logits_nV.to(weight_n.dtype)
    K = (z[0] > -torch.inf).sum().to(z.dtype)
    gold_n = z.gather(1, target_n[:, None]).squeeze(1)
    ratio = z.exp_().div_(K)
    loss_n = weight_n * (ratio.sum(-1) - gold_n + K.log() - 1)
    gradient = ratio.mul_(weight_n[:, None]).to(logits_nV.dtype)
    gradient.scatter_add_(1, target_n[:, None], -weight_n[:, None].to(gradient.dtype))
    return loss_n, gradient


class ScoreEntropy(Nelbo):
    bound_name = "score_entropy"
    subs = False
    learns_score = True
    sampler = "score"

    def bound_term(self, noised: Noised) -> Term:
        scored = noised.where(noised.masked_BL)
        return Term("denoiser", *scored, exclude=self.mask_id, chunk_loss=score_entropy_chunk)

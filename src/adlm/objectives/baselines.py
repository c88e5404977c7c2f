"""The objectives besides NELBO and ANELBO: autoregression (AR and A2R), D3PM and SEDD's score entropy."""

import functools

import torch
from torch import Tensor

from adlm.errors import require
from adlm.models.linear_cross_entropy import ChunkLoss
from adlm.objectives.base import CorruptedBatch, Objective, Sequences, Term, real_targets, select
from adlm.objectives.nelbo import Nelbo, Noised, anchor_term, draw_anchors, gamma_at
from adlm.schema import ModelConfig, ObjectiveConfig

# ---- autoregression --------------------------------------------------------------------------------------------------
# Next-token cross-entropy: AR, and A2R when the model is anchored (section 4 of the paper).
#
# The network reads all tokens but the last, and all tokens but the first are targets; the likelihood is exact, not a
# bound. A2R adds gamma * the anchor network's next-token cross-entropy where the *target* is an anchor.


class Autoregressive(Objective):
    """Next-token cross-entropy. Nothing is corrupted: the network reads the clean sequence."""

    sampler = "autoregressive"

    @classmethod
    def check(cls, cfg: ObjectiveConfig, model: ModelConfig) -> None:
        # not checked by the command line: `adlm reason` chooses its own anchors, and has models without them
        require(
            model.anchored or cfg.gamma <= 0,
            f"objective.gamma={cfg.gamma}: plain AR has no anchors (algo=a2r has)",
        )

    def corrupt(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        batch = self.corrupt_for_bound(sequences, 0)
        gamma = gamma_at(self.cfg, progress)
        if gamma > 0:
            anchors_BL = self.find_anchors(sequences.tokens_BL, self.cfg)[:, 1:] & real_targets(sequences)
            scored_BL = draw_anchors(self.cfg, anchors_BL, sequences.example_B, self.seed, step)
            batch.terms["anchor"] = anchor_term(self.cfg, gamma, *next_tokens(sequences, scored_BL))
        return batch

    def corrupt_for_bound(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        scored_BL = real_targets(sequences)
        term = Term("denoiser", *next_tokens(sequences, scored_BL), exclude=self.mask_id)
        count = scored_BL.numel() if sequences.scored_BL is None else int(scored_BL.sum())
        return CorruptedBatch(sequences.tokens_BL[:, :-1], None, count, {"nll": term})


def next_tokens(sequences: Sequences, scored_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, targets and weights (1) of the scored predictions of the next token."""
    ones_B = torch.ones(len(sequences.tokens_BL), device=sequences.tokens_BL.device)
    return select(scored_BL, sequences.tokens_BL[:, 1:], ones_B)


# ---- D3PM ------------------------------------------------------------------------------------------------------------
# D3PM with an absorbing state: the T-step bound of a prediction that may put mass on the mask.
#
# Without zero-masking, the normaliser of the predicted posterior depends on the mass m = x_theta(mask). The KL of a
# step at a masked position, with c = (alpha_s - alpha_t) / (1 - alpha_t), A = alpha_t / (1 - alpha_t) and
# B = alpha_s / (1 - alpha_s), is
#
#     log(1 + A m) - c log x_theta(x0) - (1 - c) log(1 + B m),
#
# times T when one of T steps is drawn. With m = 0 it is the discrete NELBO. The last step (s = 0) has c = 1.


@functools.cache
def d3pm_chunk(mask_id: int) -> ChunkLoss:
    """The chunk loss of D3PM; the numbers of a position are (T, c, A, B)."""

    def chunk(logits_nV: Tensor, target_n: Tensor, numbers_n4: Tensor) -> tuple[Tensor, Tensor]:
        T_n, c_n, A_n, B_n = numbers_n4.unbind(-1)
        log_p = logits_nV.to(numbers_n4.dtype).log_softmax(-1)
        p = log_p.exp()
        m_n = p[:, mask_id]
        gold_n = log_p.gather(1, target_n[:, None]).squeeze(1)
        loss_n = torch.log1p(A_n * m_n) - c_n * gold_n - (1 - c_n) * torch.log1p(B_n * m_n)
        # d loss / d z_y = k ([y = mask] - p_y) - c ([y = x0] - p_y),  k = m d loss / d m
        k_n = A_n * m_n / (1 + A_n * m_n) - (1 - c_n) * B_n * m_n / (1 + B_n * m_n)
        gradient = p.mul_((T_n * (c_n - k_n))[:, None])
        gradient[:, mask_id] += T_n * k_n
        gradient.scatter_add_(1, target_n[:, None], -(T_n * c_n)[:, None])
        return T_n * loss_n, gradient.to(logits_nV.dtype)

    return chunk


class D3pm(Nelbo):
    bound_name = "d3pm"
    subs = False
    sampler = "ddpm"

    def bound_term(self, noised: Noised) -> Term:
        alpha_s_B, alpha_t_B = noised.alpha_s_B, noised.alpha_t_B
        c_B = (alpha_s_B - alpha_t_B) / (1 - alpha_t_B)
        A_B = alpha_t_B / (1 - alpha_t_B)
        B_B = torch.where(alpha_s_B < 1, alpha_s_B / (1 - alpha_s_B), torch.zeros_like(alpha_s_B))  # s = 0: unused
        numbers_B4 = torch.stack([torch.full_like(c_B, float(self.cfg.T)), c_B, A_B, B_B], dim=-1).float()
        chunk = d3pm_chunk(self.mask_id)
        return Term("denoiser", *noised.where(noised.masked_BL, numbers_B4), chunk_loss=chunk)


# ---- score entropy ---------------------------------------------------------------------------------------------------
# Score entropy of the absorbing process (SEDD), in the form a head can be trained on.
#
# SEDD learns the concrete score s_y at a masked position, the ratio of marginals with y in place of the mask; given x0
# it is r = alpha_t / (1 - alpha_t) at y = x0 and 0 elsewhere. The network's outputs z mean log s_y = z_y + log r
# - log K with K = V - 1 tokens, and the denoising score entropy with weight sigma'(t) becomes
#
#     sigma' [ sum_y s_y - r log s_{x0} + r (log r - 1) ] = w(t) [ sum_y e^{z_y} / K - z_{x0} + log K - 1 ],
#
# the NELBO's own weight w(t) = sigma' r. Since u - 1 >= log u, it is never below the NELBO of softmax(z), with equality
# where sum_y e^{z_y} = K: score entropy is cross-entropy plus a penalty on the normalisation.


def score_entropy_chunk(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """Score entropies of a chunk and their gradient; columns at -inf are the mask and padding."""
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

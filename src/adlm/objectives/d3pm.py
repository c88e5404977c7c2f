"""D3PM with an absorbing state: the T-step bound of a prediction that may put mass on the mask.

Without zero-masking the predicted posterior normalises by the mass m = x_theta(mask) too. The KL of a step at a masked
position, with c = (alpha_s - alpha_t) / (1 - alpha_t), A = alpha_t / (1 - alpha_t) and B = alpha_s / (1 - alpha_s), is

    log(1 + A m) - c log x_theta(x0) - (1 - c) log(1 + B m),

times T when one of T steps is drawn. m = 0 gives back the discrete NELBO. The last step (s = 0) has c = 1.
"""

import functools

import torch
from torch import Tensor

from adlm.models.linear_cross_entropy import ChunkLoss
from adlm.objectives.base import Term
from adlm.objectives.nelbo import Nelbo, Noised


@functools.cache
def d3pm_chunk(mask_id: int) -> ChunkLoss:
    """The chunk loss; the numbers of a position are (T, c, A, B)."""

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

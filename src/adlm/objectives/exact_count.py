"""The bound by numbers of masks instead of times:  NELBO = sum_k S_k / k = L * E_{k ~ U{1..L}}[S_k / k],

where S_k is the expected cross-entropy sum with exactly k of L positions masked. Proof: integrating the continuous-time
weight over t, with alpha = 1 - t, gives each mask pattern of size k the weight B(k, L-k+1) = 1 / (k C(L, k)).
The same number as the continuous-time bound for any schedule, without the noise of how many positions get masked, and
without a smallest time.

One set of uniforms per row decides everything: the positions with the k smallest are masked, and the k-th smallest is
the time, since it is Beta(k, L-k+1) distributed and independent of which positions these are - exactly the law of t
given k masks. Padding (masked like any position, but not scored) and time conditioning follow from it.
"""

import torch
from torch import Tensor

from adlm.diffusion.schedules import Schedule, noise_level
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.objectives.base import Rows, Task, Term, count_tokens, select
from adlm.objectives.nelbo import VALIDATION_SEED
from adlm.objectives.times import draw_times


def draw_exact_count(rows: Rows, draw: int, mask_id: int, schedule: Schedule) -> Task:
    """The validation task with an exact number of masks in each row, stratified; noise fixed by example and `draw`.
    `schedule` only says which noise level a time-conditioned network is told."""
    x_BL = rows.tokens_BL
    real_BL = torch.ones_like(x_BL, dtype=torch.bool)
    if rows.attention_mask_BL is not None:
        real_BL = rows.attention_mask_BL.bool()
    t_B = draw_times(VALIDATION_SEED, draw, rows.example_B, rows.total) if rows.times_B is None else rows.times_B
    length_B = real_BL.sum(-1)
    k_B = ((t_B * length_B).floor().long() + 1).clamp(max=length_B.clamp(min=1))
    position_L = torch.arange(x_BL.shape[1], device=x_BL.device)
    u_BL = uniforms(VALIDATION_SEED, Stream.ORDER, draw, rows.example_B[:, None], position_L)
    time_B = kth_smallest(u_BL.masked_fill(~real_BL, torch.inf), k_B)
    masked_BL = u_BL <= time_B[:, None]
    z_BL = torch.where(masked_BL, mask_id, x_BL)
    sigma_B = noise_level(time_B, schedule).float()
    term = Term("denoiser", *select(masked_BL & real_BL, x_BL, length_B / k_B), exclude=mask_id)
    return Task(z_BL, sigma_B, count_tokens(rows), {"nelbo": term})


def kth_smallest(u_BL: Tensor, k_B: Tensor) -> Tensor:
    return u_BL.sort(dim=-1).values.gather(1, k_B[:, None] - 1).squeeze(1)

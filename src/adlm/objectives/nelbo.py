"""NELBO of masked diffusion (Eq. 4), in continuous and in discrete time.

With SUBS only masked positions contribute, each w(t) * -log <x_theta^l(z_t), x^l>:

    continuous   w(t) = -alpha'_t / (1 - alpha_t)
    T steps      w(t) = T (alpha_s - alpha_t) / (1 - alpha_t),   t in {1/T, ..., 1}, s = t - 1/T

so the bound is one weighted cross-entropy over masked rows. The prior and reconstruction terms vanish (alpha_0 = 1,
alpha_1 = 0 up to the schedule's eps; times below sampling_eps are not visited, as in the release).
"""

import torch
from torch import Tensor

from adlm.diffusion.absorbing import mask_tokens
from adlm.diffusion.schedules import MOST_NOISE, Schedule
from adlm.diffusion.uniforms import Stream, uniforms32
from adlm.errors import require
from adlm.objectives.base import Rows, Task, Term, count_tokens, select
from adlm.objectives.times import annealed, beta_quantile, draw_times
from adlm.schema import ModelConfig, ObjectiveConfig

# Validation noise is the same for every run, so that curves of different seeds and models are paired.
VALIDATION_SEED = 20251018


class Noised:
    """Noisy rows: z_t with its time, its loss weight w(t) and which positions are masked."""

    def __init__(self, rows: Rows, t_B: Tensor, u_BL: Tensor, schedule: Schedule, T: int, mask_id: int):
        self.rows, self.t_B = rows, t_B
        alpha_t_B = self.alpha_t_B = schedule.alpha(t_B)
        self.z_BL = mask_tokens(rows.tokens_BL, u_BL, alpha_t_B, mask_id)
        # not z == mask: a clean row may hold the mask's id only by mistake, and mask_tokens decides by u
        self.masked_BL = u_BL >= alpha_t_B[:, None]
        self.sigma_B = schedule.sigma(t_B).clamp(max=MOST_NOISE).float()  # what the network is told: finite
        if T > 0:
            alpha_s_B = self.alpha_s_B = schedule.alpha((t_B - 1 / T).clamp(min=0))
            weight_B = T * (alpha_s_B - alpha_t_B) / (1 - alpha_t_B)
        else:
            weight_B = schedule.weight(t_B)
        self.weight_B = weight_B.float()

    def where(self, positions_BL: Tensor, weight_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, targets and weights (w(t) unless given) of the given positions, padding left out."""
        if self.rows.attention_mask_BL is not None:
            positions_BL = positions_BL & self.rows.attention_mask_BL.bool()
        return select(positions_BL, self.rows.tokens_BL, self.weight_B if weight_B is None else weight_B)


class Nelbo:
    bound_name = "nelbo"
    """Of the bound's term in logs."""

    def __init__(self, cfg: ObjectiveConfig, schedule: Schedule, mask_id: int, seed: int):
        require(cfg.T >= 0, f"objective.T={cfg.T} must be 0 (continuous time) or a number of steps")
        require(0 <= cfg.sampling_eps < 1, f"objective.sampling_eps={cfg.sampling_eps} is outside [0, 1)")
        for key in ("time_density_a", "time_density_b"):
            require(getattr(cfg, key) >= 1, f"objective.{key}={getattr(cfg, key)} must be at least 1")
        self.cfg, self.schedule, self.mask_id, self.seed = cfg, schedule, mask_id, seed

    def check(self, model: ModelConfig) -> None:
        require(not model.causal, "a diffusion objective needs model.causal=false")

    def noised(self, rows: Rows, seed: int, counter: int, a: float = 1.0, b: float = 1.0) -> Noised:
        """z_t of every row; times from Beta(a, b), uniform for the bound."""
        cfg = self.cfg
        t_B = draw_times(seed, counter, rows.example_B, rows.total) if rows.times_B is None else rows.times_B
        t_B = beta_quantile(t_B, a, b)
        if cfg.T > 0:
            t_B = ((t_B * cfg.T).floor().clamp(max=cfg.T - 1) + 1) / cfg.T
        else:
            t_B = cfg.sampling_eps + (1 - cfg.sampling_eps) * t_B
        position_L = torch.arange(rows.tokens_BL.shape[1], device=rows.tokens_BL.device)
        u_BL = uniforms32(seed, Stream.MASK, counter, rows.example_B[:, None], position_L)
        return Noised(rows, t_B, u_BL, self.schedule, cfg.T, self.mask_id)

    def bound_term(self, noised: Noised) -> Term:
        return Term("denoiser", *noised.where(noised.masked_BL), exclude=self.mask_id)

    def draw_training(self, rows: Rows, step: int, progress: float) -> Noised:
        anneal = self.cfg.time_density_anneal
        a = annealed(self.cfg.time_density_a, progress, anneal)
        b = annealed(self.cfg.time_density_b, progress, anneal)
        return self.noised(rows, self.seed, step, a, b)

    def draw(self, rows: Rows, step: int, progress: float) -> Task:
        noised = self.draw_training(rows, step, progress)
        return Task(noised.z_BL, noised.sigma_B, count_tokens(rows), {self.bound_name: self.bound_term(noised)})

    def draw_bound(self, rows: Rows, draw: int) -> Task:
        noised = self.noised(rows, VALIDATION_SEED, draw)
        return Task(noised.z_BL, noised.sigma_B, count_tokens(rows), {self.bound_name: self.bound_term(noised)})

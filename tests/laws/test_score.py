"""The score form says the same as the denoiser form: same posterior, and back again."""

import pytest
import torch
from score_form import analytic_last_step, analytic_step, probs_from_score, score_from_probs

from adlm.diffusion.process import LogLinear, posterior

V, MASK = 5, 4
Z = torch.tensor([[0, MASK, 2], [MASK, MASK, 1]])


def prediction() -> torch.Tensor:
    p = torch.rand(2, 3, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[..., MASK] = 0
    p = p / p.sum(-1, keepdim=True)
    return torch.where((Z == MASK).unsqueeze(-1), p, torch.nn.functional.one_hot(Z, V))


@pytest.mark.parametrize(("s", "t"), [(0.2, 0.5), (0.9, 1.0), (1e-5, 0.01)])
def test_analytic_step_equals_the_posterior(s, t):
    schedule, p = LogLinear(), prediction()
    sigma_t, sigma_s = schedule.sigma(t), schedule.sigma(s)
    q = analytic_step(score_from_probs(p, Z, sigma_t, MASK), Z, sigma_t - sigma_s, MASK)
    torch.testing.assert_close(q, posterior(Z, p, schedule.alpha(s), schedule.alpha(t), MASK), rtol=1e-9, atol=1e-12)


def test_last_step_draws_from_the_prediction():
    p, sigma = prediction(), torch.tensor([0.3, 0.7], dtype=torch.float64)
    q = analytic_last_step(score_from_probs(p, Z, sigma, MASK), Z, sigma, MASK)
    torch.testing.assert_close(q / q.sum(-1, keepdim=True), p)


def test_round_trip():
    p, sigma = prediction(), 0.4
    torch.testing.assert_close(probs_from_score(score_from_probs(p, Z, sigma, MASK), Z, sigma, MASK), p)


def test_score_is_a_ratio_of_marginals():
    """On a one-position toy: data distribution p, q_t(v) = alpha p_v, q_t(mask) = 1 - alpha."""
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]], dtype=torch.float64)
    sigma = 0.8
    alpha = torch.exp(torch.tensor(-sigma, dtype=torch.float64))
    q = alpha * p + (1 - alpha) * torch.nn.functional.one_hot(torch.tensor(MASK), V)
    torch.testing.assert_close(score_from_probs(p, torch.tensor([MASK]), sigma, MASK), q / q[:, MASK:])

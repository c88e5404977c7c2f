"""Laws of the absorbing process: posteriors sum to one and compose with the forward process; SUBS; the paper's toy."""

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square

from adlm.diffusion.process import mask_tokens, posterior, reveal_probability, sigma_max, subs
from adlm.diffusion.random import Stream, gumbel_argmax, uniforms

V, MASK = 5, 4


def random_prediction(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(*shape, V, generator=g, dtype=torch.float64)
    p[..., MASK] = 0
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.0, 0.3), (0.2, 0.5), (0.5, 1.0), (0.9, 0.95)])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_posteriors_are_distributions(alpha_t, alpha_s, fraction):
    z = torch.tensor([[0, 1, MASK], [MASK, MASK, 3]])
    sigma = fraction * sigma_max(alpha_s, alpha_t)
    q = posterior(z, random_prediction(2, 3), alpha_s, alpha_t, MASK, sigma)
    assert (q >= 0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_no_remasking_is_eq_2():
    z = torch.tensor([[0, MASK, MASK]])
    p = random_prediction(1, 3)
    q = posterior(z, p, 0.7, 0.2, MASK)
    expected = p[0, 1] * (0.7 - 0.2) / (1 - 0.2)
    expected[MASK] = (1 - 0.7) / (1 - 0.2)
    torch.testing.assert_close(q[0, 1], expected)
    assert q[0, 0].tolist() == [1, 0, 0, 0, 0]


def test_sigma_max_is_the_largest_that_works():
    assert sigma_max(0.5, 0.0).item() == 1
    assert sigma_max(0.3, 0.2).item() == 1
    assert sigma_max(0.9, 0.5).item() == pytest.approx(0.2)
    assert reveal_probability(0.9, 0.5, sigma_max(0.9, 0.5)).item() == pytest.approx(1.0)
    z, p = torch.tensor([MASK]), random_prediction(1)
    with pytest.raises(ValueError, match="sigma_t must lie"):
        posterior(z, p, 0.9, 0.5, MASK, 0.21)


@pytest.mark.parametrize(("s", "t"), [(0.1, 0.4), (0.5, 0.6), (0.0, 1.0), (0.3, 1.0)])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_posterior_composed_with_marginal_is_the_earlier_marginal(s, t, fraction):
    """q(z_t|x) then Eq. 6 with the true x gives q(z_s|x) for every sigma_t: the law that makes remasking valid."""
    n, alpha_s, alpha_t = 200_000, 1 - s, 1 - t
    x0 = (torch.arange(n) % (V - 1)).view(n, 1)
    z_t = mask_tokens(x0, uniforms(1, Stream.MASK, torch.arange(n)).view(n, 1), alpha_t, MASK)
    x_onehot = torch.nn.functional.one_hot(x0, V).double()
    q = posterior(z_t, x_onehot, alpha_s, alpha_t, MASK, fraction * sigma_max(alpha_s, alpha_t))
    z_s = gumbel_argmax(q.log(), uniforms(1, Stream.TOKEN, torch.arange(n)[:, None, None], torch.arange(V)))
    counts = np.histogram2d(x0.numpy().ravel(), z_s.numpy().ravel(), bins=[V - 1, V], range=[[0, V - 1], [0, V]])[0]
    expected = np.zeros((V - 1, V))
    expected[:, MASK] = (1 - alpha_s) / (V - 1)
    expected[np.arange(V - 1), np.arange(V - 1)] = alpha_s / (V - 1)
    assert chi_square(counts, expected) > LEVEL


def test_forward_marginals_of_the_papers_toy():
    """A.3.4: with alpha = 1 - t each position keeps its token with probability 2/3, 1/3, 0 at t = 1/3, 2/3, 1."""
    n = 300_000
    x0 = torch.tensor([1, 0, 0]).expand(n, 3)
    u = uniforms(3, Stream.MASK, torch.arange(n)[:, None], torch.arange(3))
    for t, keep in ((1 / 3, 2 / 3), (2 / 3, 1 / 3)):
        for kept in (mask_tokens(x0, u, 1 - t, 2) == x0).sum(0).tolist():
            assert chi_square([kept, n - kept], [keep, 1 - keep]) > LEVEL
    assert (mask_tokens(x0, u, 0.0, 2) == 2).all()


def test_the_papers_toy_step():
    """A.3.4: (m,m,m) at t=2/3 reaches (m,0,m) at t=1/3 with 0.1125, and with a perfect anchor at position 2, 0.125."""
    m = 2
    z = torch.full((1, 3), m)
    data = torch.tensor([[0.1, 0.9, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0]], dtype=torch.float64)[None]
    anchored = data.clone()
    anchored[0, 1] = torch.tensor([1.0, 0.0, 0.0])
    for p, expected in ((data, 0.1125), (anchored, 0.125)):
        q = posterior(z, p, 2 / 3, 1 / 3, m)[0]
        assert (q[0, m] * q[1, 0] * q[2, m]).item() == pytest.approx(expected, abs=1e-12)


def test_subs():
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0)) * 5
    z = torch.tensor([[0, MASK, 2], [MASK, MASK, 1]])
    p = subs(logits, z, MASK).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3))
    assert (p[..., MASK] == 0).all()
    for b, l in (z != MASK).nonzero().tolist():
        assert p[b, l].tolist() == [float(v == z[b, l]) for v in range(V)]
    torch.testing.assert_close(p[0, 1, :MASK], logits[0, 1, :MASK].softmax(-1))
    assert torch.isfinite(0 * subs(logits, z, MASK)).all()
    assert subs(logits.double(), z, MASK).dtype == torch.float64
    assert subs(logits.bfloat16(), z, MASK).dtype == torch.float32


def test_subs_passes_gradients_to_masked_positions_only():
    logits = torch.randn(1, 2, V, requires_grad=True)
    subs(logits, torch.tensor([[1, MASK]]), MASK)[..., 0].sum().backward()
    assert logits.grad is not None
    assert (logits.grad[0, 0] == 0).all()
    assert (logits.grad[0, 1, :MASK] != 0).all()


def test_sequences_may_have_their_own_times():
    z, p = torch.tensor([[MASK, 0], [MASK, 1]]), random_prediction(2, 2)
    alpha_s, alpha_t = torch.tensor([0.5, 0.9]).double(), torch.tensor([0.2, 0.4]).double()
    q = posterior(z, p, alpha_s, alpha_t, MASK)
    for b in range(2):
        torch.testing.assert_close(q[b], posterior(z[b], p[b], alpha_s[b].item(), alpha_t[b].item(), MASK))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mask_tokens(torch.zeros(2, 3).long(), torch.rand(2, 4), 0.5, MASK), r"shape of x0, \(2, 3\), got"),
        (lambda: mask_tokens(torch.zeros(1).long(), torch.rand(1), torch.tensor(1.5), MASK), "alpha_t must lie"),
        (lambda: posterior(torch.tensor([7]), random_prediction(1), 0.5, 0.2, MASK), r"token ids in \[0, 4\], got"),
        (lambda: posterior(torch.tensor([0.5]), random_prediction(1), 0.5, 0.2, MASK), "integer token ids"),
        (lambda: posterior(torch.tensor([1, 2]), random_prediction(1), 0.5, 0.2, MASK), "by the vocabulary"),
        (lambda: posterior(torch.tensor([1]), random_prediction(1), 0.2, 0.5, MASK), "alpha_s must not be below"),
        (lambda: posterior(torch.tensor([1]), random_prediction(1), 1.0, 1.0, MASK), "alpha_t must be below 1"),
        (lambda: subs(torch.full((1, V), torch.nan), torch.tensor([MASK]), MASK), "logits holds NaN"),
        (lambda: subs(torch.zeros(1, V), torch.tensor([-1]), MASK), "token ids"),
    ],
)
def test_bad_input_is_answered(call, message):
    with pytest.raises(ValueError, match=message):
        call()

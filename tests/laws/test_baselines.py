"""Laws of the baselines: score entropy and D3PM against autograd, against the NELBO, and in their limits."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny import random_tokens, tiny_model

from adlm.models import linear_cross_entropy
from adlm.models.linear_cross_entropy import cross_entropy_chunk
from adlm.objectives import Sequences, loss, make_objective, sequence_bounds
from adlm.objectives.baselines import d3pm_chunk, score_entropy_chunk
from adlm.schema import NoiseConfig, ObjectiveConfig

V, MASK = 11, 10
LINEAR = NoiseConfig(name="linear")


def chunk_problem(columns, seed=0, N=9):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64)
    weights = torch.rand(N, columns, generator=g, dtype=torch.float64).squeeze(-1)
    return logits, bias, torch.randint(0, MASK, (N,), generator=g), weights


def plain_score_entropy(logits, bias, target, weight):
    """sigma' [ sum s - r log s_x0 + r (log r - 1) ] with r = 1, K = V - 1: the definition."""
    log_s = (logits + bias)[:, :MASK] - math.log(V - 1)
    gold = log_s.gather(1, target[:, None]).squeeze(1)
    return weight * (log_s.exp().sum(-1) - gold - 1)


def plain_d3pm(logits, bias, target, numbers):
    T, c, A, B = numbers.unbind(-1)
    p = (logits + bias).softmax(-1)
    m, gold = p[:, MASK], p.gather(1, target[:, None]).squeeze(1).log()
    return T * (torch.log(1 + A * m) - c * gold - (1 - c) * torch.log(1 + B * m))


@pytest.mark.parametrize(
    ("chunk", "plain", "columns", "exclude"),
    [(score_entropy_chunk, plain_score_entropy, 1, True), (d3pm_chunk(MASK), plain_d3pm, 4, False)],
    ids=["score-entropy", "d3pm"],
)
def test_chunk_losses_and_their_gradients_equal_autograd(chunk, plain, columns, exclude):
    logits, bias, target, weights = chunk_problem(columns)
    expected = plain(logits, bias, target, weights)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    shown = logits.detach() + bias
    if exclude:
        shown[:, MASK] = -torch.inf
    value, ours = chunk(shown, target, weights)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-12)


def test_chunk_losses_train_through_the_chunked_head():
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 4, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, 4, generator=g, dtype=torch.float64, requires_grad=True)
    _, bias, target, numbers = chunk_problem(4)
    head = SimpleNamespace(weight=weight, bias=bias)
    value = linear_cross_entropy(hidden, head, target, numbers, chunk_loss=d3pm_chunk(MASK), chunk_size=2)
    expected = plain_d3pm(hidden @ weight.T, bias, target, numbers).sum()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    for a, b in zip(torch.autograd.grad(value, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_score_entropy_of_the_exact_score_is_zero():
    """Given x0 the score is r at x0 and 0 elsewhere: z = log K at x0, -inf elsewhere."""
    target = torch.tensor([3, 7])
    z = torch.full((2, V), -1e4, dtype=torch.float64)
    z[torch.arange(2), target] = math.log(V - 1)
    z[:, MASK] = -torch.inf
    value, gradient = score_entropy_chunk(z, target, torch.tensor([2.0, 5.0], dtype=torch.float64))
    assert value.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


def test_score_entropy_is_cross_entropy_plus_a_penalty_on_the_normalisation():
    logits, bias, target, weights = chunk_problem(1)
    bias[MASK] = -torch.inf
    z = logits.detach() + bias
    score, _ = score_entropy_chunk(z.clone(), target, weights)
    cross, _ = cross_entropy_chunk(z.clone(), target, weights)
    n = z.logsumexp(-1) - math.log(V - 1)  # 0 for a normalised score
    assert n.abs().min() > 1e-3
    torch.testing.assert_close(score, cross + weights * (n.exp() - 1 - n), rtol=1e-10, atol=1e-12)
    assert (score > cross).all()
    normalised, _ = score_entropy_chunk(z - n[:, None], target, weights)
    torch.testing.assert_close(normalised, cross, rtol=1e-10, atol=1e-12)


def sequences_of(tokens):
    return Sequences(tokens, torch.arange(len(tokens)), len(tokens))


def test_d3pm_without_mass_on_the_mask_is_the_discrete_nelbo():
    model = tiny_model(dtype=torch.float64, anchored=False)
    with torch.no_grad():
        model.head.bias[MASK] = -60.0
    rows = sequences_of(random_tokens(16, 12, 10))
    values = []
    for name in ("d3pm", "nelbo"):
        objective = make_objective(ObjectiveConfig(name=name, T=7), LINEAR, MASK, seed=0)
        values.append(loss(model, objective.corrupt(rows, 0, 1.0)).total)
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)


def test_d3pm_approaches_the_continuous_bound_of_its_renormalised_prediction_from_above():
    """As T grows the step's KL becomes w(t) times cross-entropy plus what the mass on the mask costs."""
    model = tiny_model(dtype=torch.float64, anchored=False, scale=0.2)
    with torch.no_grad():
        model.head.bias[MASK] = -60.0
    rows = sequences_of(random_tokens(1, 12, 10).repeat(20_000, 1))

    def bound(name, T):
        objective = make_objective(ObjectiveConfig(name=name, T=T, sampling_eps=1e-5), LINEAR, MASK, seed=0)
        values = sequence_bounds(model, objective.corrupt_for_bound(rows, 0))
        return values.mean().item(), values.std().item() / math.sqrt(len(values))

    continuous, error = bound("nelbo", 0)
    gaps = [bound("d3pm", T)[0] - continuous for T in (2, 16, 1000)]
    assert gaps[0] > gaps[1] > -4 * error
    assert abs(gaps[2]) < 6 * error


@pytest.mark.parametrize(("name", "T"), [("nelbo", 0), ("score-entropy", 0), ("d3pm", 1000)])
def test_rows_without_a_mask_have_no_loss(name, T):
    """Short rows at small times: nothing is masked in the whole batch."""
    rows = Sequences(random_tokens(2, 4, MASK), torch.arange(2), 2, times_B=torch.full((2,), 1e-7, dtype=torch.float64))
    objective = make_objective(ObjectiveConfig(name=name, T=T, sampling_eps=0), NoiseConfig(), MASK, 0)
    task = objective.corrupt_for_bound(rows, 1)
    assert [len(term.positions_N) for term in task.terms.values()] == [0]
    assert sequence_bounds(tiny_model(anchored=False), task).tolist() == [0, 0]


def test_d3pm_with_mass_on_the_mask_approaches_its_continuous_bound():
    """As T grows the step's KL is w [sum_y l_y - 1 - log l_x0] with l = x / (1 + A m): the bound of a process that
    reveals y at the schedule's rate times l_y, and never below the NELBO of the prediction without the mask."""
    logits, bias, target, _ = chunk_problem(1)
    t = torch.linspace(0.05, 0.95, len(target), dtype=torch.float64)
    log_p = (logits.detach() + bias).log_softmax(-1)
    p, gold = log_p.exp(), log_p.gather(1, target[:, None]).squeeze(1)
    m, A, w = p[:, MASK], (1 - t) / t, 1 / t
    assert m.min() > 1e-3
    total = (1 - m) / (1 + A * m)
    limit = w * (total - 1 - gold + torch.log1p(A * m))
    gaps = []
    for T in (10, 100, 10_000, 1_000_000):
        s = (t - 1 / T).clamp(min=0)
        numbers = torch.stack([torch.full_like(t, T), (t - s) / t, A, torch.where(s > 0, (1 - s) / s, 0.0)], dim=-1)
        value, _ = d3pm_chunk(MASK)(logits.detach() + bias, target, numbers)
        gaps.append((value - limit).abs().max().item())
    assert gaps[3] < 1e-3 and gaps[3] < gaps[2] / 20 < gaps[1] / 20**2 < gaps[0]
    nelbo = w * (torch.log(1 - m) - gold)
    assert (limit >= nelbo).all()

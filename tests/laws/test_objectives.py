"""Laws of the objectives: the bound is a bound, the fast loss is the dense loss, noise belongs to the example."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import dense_anelbo, dense_log_probs, dense_logits, naive_anchor_mask
from exact import ExactDenoiser, sequences_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny import MODERN, random_tokens, tiny_model

from adlm.diffusion.process import beta_quantile, draw_times, make_schedule, strata
from adlm.objectives import Sequences, loss, make_objective, sequence_bounds
from adlm.objectives.anchors import counts_in_sequence
from adlm.objectives.nelbo import time_density
from adlm.rules import check_fields
from adlm.schema import NoiseConfig, ObjectiveConfig
from adlm.tables import SCHEDULES

LINEAR = NoiseConfig(name="linear")


def noised_for_training(objective, sequences, step, progress):
    return objective.noised(sequences, objective.seed, step, time_density(objective.cfg, progress))


# The bound


def bounds_of(model, objective, sequences, draw=0):
    return sequence_bounds(model, objective.corrupt_for_bound(sequences, draw))


@pytest.mark.parametrize("noise", ["loglinear", "linear", "cosine", "cosine-squared"])
def test_nelbo_of_the_exact_denoiser_is_the_entropy(noise):
    g = torch.Generator().manual_seed(3)
    p = torch.rand(3, 3, 3, generator=g) ** 3
    p = p / p.sum()
    entropy = -(p * p.log()).sum().item()
    model = ExactDenoiser(p)
    draws = torch.multinomial(p.reshape(-1), 60_000, replacement=True, generator=g)
    cfg = ObjectiveConfig(name="nelbo", sampling_eps=1e-4)
    objective = make_objective(cfg, NoiseConfig(name=noise, eps=1e-4), model.mask_id, seed=0)
    with torch.no_grad():
        values = bounds_of(model, objective, sequences_of(model.sequences[draws]))
    se = values.std().item() / math.sqrt(len(values))
    assert abs(values.mean().item() - entropy) < 4 * se + 2e-3, (values.mean().item(), entropy, se)
    assert se < 0.03


def exact_path_probability(model, x, T):
    """p_theta(z_0 = x) of T locked-in steps from all masks, by summing over every path (alpha = 1 - t)."""
    states = list(itertools.product(range(model.vocab_size), repeat=len(x)))
    index = {state: i for i, state in enumerate(states)}
    z = torch.tensor(states)
    with torch.no_grad():
        log_p = dense_log_probs(dense_logits(model, z)[0], z, model.mask_id).double()
    p = log_p.exp()
    mass = torch.zeros(len(states), dtype=torch.float64)
    mass[index[(model.mask_id,) * len(x)]] = 1
    for i in range(T, 0, -1):
        reveal = 1 / i  # (alpha_s - alpha_t) / (1 - alpha_t)
        q = torch.where((z == model.mask_id)[..., None], reveal * p, p)
        q[..., model.mask_id] = (z == model.mask_id).double() * (1 - reveal)
        to = torch.ones(len(states), len(states), dtype=torch.float64)
        for l in range(len(x)):
            to *= q[:, l][:, z[:, l]]
        mass = mass @ to
    return mass[index[tuple(x)]].item()


def exact_nelbo(model, x, T):
    """The T-step bound of one sequence, summed over times and mask patterns (alpha = 1 - t)."""
    L, total = len(x), 0.0
    x = torch.tensor(x)
    for pattern in itertools.product([False, True], repeat=L):
        masked = torch.tensor(pattern)
        k = int(masked.sum())
        if not k:
            continue
        z = torch.where(masked, model.mask_id, x)[None]
        with torch.no_grad():
            log_p = dense_log_probs(dense_logits(model, z)[0], z, model.mask_id)[0, torch.arange(L), x]
        for i in range(1, T + 1):
            t = i / T
            total += (1 / i) * t**k * (1 - t) ** (L - k) * -log_p[masked].sum().item()
    return total


@pytest.mark.parametrize("T", [1, 2, 5])
def test_nelbo_is_above_the_negative_log_likelihood_and_ours_is_that_nelbo(T):
    model = tiny_model(vocab_size=3, mask_id=2, length=3, dtype=torch.float64, scale=0.4, seed=T)
    objective = make_objective(ObjectiveConfig(name="nelbo", T=T), LINEAR, 2, seed=0)
    sequences = list(itertools.product(range(2), repeat=3))
    assert sum(exact_path_probability(model, x, T) for x in sequences) == pytest.approx(1, abs=1e-9)
    for x in sequences:
        bound, nll = exact_nelbo(model, x, T), -math.log(exact_path_probability(model, x, T))
        assert bound >= nll - 1e-9
        values = bounds_of(model, objective, sequences_of(torch.tensor(x).repeat(4000, 1)))
        se = values.std().item() / math.sqrt(len(values))
        assert abs(values.mean().item() - bound) < 4.5 * se + 1e-5 * bound
    if T == 1:
        assert bound == pytest.approx(nll), "one step reveals everything at once: the bound is tight"
    else:
        assert bound > nll + 1e-4


def test_many_discrete_steps_approach_continuous_time_from_above():
    model = tiny_model(vocab_size=3, mask_id=2, length=3, dtype=torch.float64, scale=0.4)
    bounds = [exact_nelbo(model, (0, 1, 0), T) for T in (1, 2, 8, 64, 512)]
    objective = make_objective(ObjectiveConfig(name="nelbo", sampling_eps=1e-5), LINEAR, 2, seed=0)
    values = bounds_of(model, objective, sequences_of(torch.tensor([[0, 1, 0]]).repeat(40_000, 1)))
    assert abs(values.mean().item() - bounds[-1]) < 4 * values.std().item() / 200 + 5e-3


# The fast loss


FAST_VARIANTS = {
    "published": {},
    "modern": MODERN,
    "time": {"conditioning": "sigma"},
    "none": {"bridge": "none"},
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("positions", ["all", "masked"])
@pytest.mark.parametrize("variant", FAST_VARIANTS)
def test_anelbo_equals_the_dense_loss_in_value_and_every_gradient(variant, positions, dtype, tolerance):
    model = tiny_model(dtype=dtype, **FAST_VARIANTS[variant])
    cfg = ObjectiveConfig(gamma=0.3, gamma_warmup=0.0, tau=2, anchor_positions=positions)
    objective = make_objective(cfg, NoiseConfig(), 10, seed=5)
    x0 = random_tokens(6, 12, 10)
    batch = objective.corrupt(sequences_of(x0), step=3, progress=1.0)
    weight = noised_for_training(objective, sequences_of(x0), 3, 1.0).weight_B
    named = dict(model.named_parameters())
    fast = loss(model, batch)
    slow = dense_anelbo(model, batch, x0, weight, 0.3, 2, positions).sum()
    torch.testing.assert_close(fast.total.to(dtype), slow, rtol=tolerance, atol=0)
    fast_grads = torch.autograd.grad(fast.total, list(named.values()), allow_unused=True)
    slow_grads = torch.autograd.grad(slow, list(named.values()), allow_unused=True)
    for name, a, b in zip(named, fast_grads, slow_grads):
        assert (a is None) == (b is None), name
        if b is not None:
            assert b.norm() > 0 or "q_norm" in name, f"{name} gets no gradient: the comparison would be empty"
            assert (a - b).norm() <= tolerance * max(1.0, b.norm().item()) * (1 if dtype == torch.float64 else 3), name


def test_gamma_zero_is_the_nelbo():
    model = tiny_model(dtype=torch.float64)
    sequences = sequences_of(random_tokens(4, 12, 10))
    plain = make_objective(ObjectiveConfig(name="nelbo"), NoiseConfig(), 10, seed=1).corrupt(sequences, 7, 0.5)
    anchored = make_objective(ObjectiveConfig(gamma=0.0), NoiseConfig(), 10, seed=1).corrupt(sequences, 7, 0.5)
    with_gamma = make_objective(ObjectiveConfig(gamma=0.1), NoiseConfig(), 10, seed=1).corrupt(sequences, 7, 0.5)
    assert torch.equal(loss(model, plain).total, loss(model, anchored).total)
    assert set(anchored.terms) == {"nelbo"}
    output = loss(model, with_gamma)
    assert output.terms["nelbo"] == loss(model, plain).terms["nelbo"], "the bound is reported without the anchor term"
    assert output.total > output.terms["nelbo"]


def test_gamma_rises_linearly_then_stays():
    objective = make_objective(ObjectiveConfig(gamma=0.2, gamma_warmup=0.5), NoiseConfig(), 10, seed=1)
    sequences = sequences_of(random_tokens(4, 12, 10))
    scales = [objective.corrupt(sequences, 0, p).terms["anchor"].scale for p in (0.125, 0.25, 0.5, 1.0)]
    assert scales == pytest.approx([0.05, 0.1, 0.2, 0.2])
    assert "anchor" not in objective.corrupt(sequences, 0, 0.0).terms
    assert "anchor" not in objective.corrupt_for_bound(sequences, 0).terms


def test_anchors_end_where_they_are_told_to():
    cfg = ObjectiveConfig(gamma=0.2, gamma_warmup=0.0, gamma_until=0.25)
    objective, sequences = make_objective(cfg, NoiseConfig(), 10, seed=1), sequences_of(random_tokens(4, 12, 10))
    anchored = [p for p in np.linspace(0, 1, 21).tolist() if "anchor" in objective.corrupt(sequences, 0, p).terms]
    assert anchored == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


def test_padding_carries_no_loss():
    model = tiny_model(dtype=torch.float64)
    x0 = random_tokens(4, 12, 10)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[:, 8:] = False
    objective = make_objective(ObjectiveConfig(gamma=0.1, gamma_warmup=0), NoiseConfig(), 10, seed=1)
    batch = objective.corrupt(sequences_of(x0, attention_mask_BL=mask), 0, 1.0)
    assert batch.count == 32
    for term in batch.terms.values():
        assert (term.positions_N % 12 < 8).all() and len(term.positions_N)
    assert loss(model, batch).count == 32


# Anchors


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 7), min_size=9, max_size=9), min_size=n, max_size=n)
    ),
    st.integers(0, 6),
)
def test_anchor_mask_equals_a_naive_counter(rows, tau):
    x = torch.tensor(rows)
    assert torch.equal(counts_in_sequence(x) <= tau, naive_anchor_mask(x, tau))


def anchor_positions(cfg, sequences):
    objective = make_objective(replace(cfg, gamma=1.0, gamma_warmup=0.0), NoiseConfig(), 10, 1)
    batch = objective.corrupt(sequences, 0, 1.0)
    found = torch.zeros_like(sequences.tokens_BL, dtype=torch.bool).flatten()
    found[batch.terms["anchor"].positions_N] = True
    return found.view_as(sequences.tokens_BL), batch.tokens_BL == 10


def test_anchor_rules():
    x0 = random_tokens(4, 12, 10)
    sequences = sequences_of(x0)
    found, masked = anchor_positions(ObjectiveConfig(tau=2), sequences)
    assert torch.equal(found, naive_anchor_mask(x0, 2)) and (found & ~masked).any()
    found, masked = anchor_positions(ObjectiveConfig(tau=2, anchor_positions="masked"), sequences)
    assert torch.equal(found, naive_anchor_mask(x0, 2) & masked) and found.any()
    found, _ = anchor_positions(ObjectiveConfig(anchor_rule="none"), sequences)
    assert not found.any()
    found, _ = anchor_positions(ObjectiveConfig(anchor_rule="common", tau=2), sequences)
    assert torch.equal(found, ~naive_anchor_mask(x0, 2)) and found.any()
    found, masked = anchor_positions(ObjectiveConfig(anchor_rule="all", anchor_positions="masked"), sequences)
    assert torch.equal(found, masked) and found.any()


@pytest.mark.parametrize("name", ["anelbo", "autoregressive"])
def test_a_fraction_of_the_anchors_stands_for_all_of_them(name):
    """With weights divided by the fraction, each anchor's weight is right on average over steps."""
    share, steps, x0 = 0.25, 600, random_tokens(4, 12, 10)
    cfg = ObjectiveConfig(name=name, gamma=1.0, gamma_warmup=0.0, tau=2, anchor_positions="all")
    whole = make_objective(cfg, NoiseConfig(), 10, seed=1)
    part = make_objective(replace(cfg, anchor_fraction=share), NoiseConfig(), 10, seed=1)
    scored = torch.zeros(4 * 12)
    for step in range(steps):
        all_of_them, some = (o.corrupt(sequences_of(x0), step, 1.0) for o in (whole, part))
        assert torch.equal(all_of_them.tokens_BL, some.tokens_BL), "the noise does not depend on the fraction"
        anchors, chosen = all_of_them.terms["anchor"], some.terms["anchor"]
        place = torch.isin(anchors.positions_N, chosen.positions_N)
        assert place.sum() == len(chosen.positions_N)
        torch.testing.assert_close(chosen.weights_N, anchors.weights_N[place] / share, rtol=1e-6, atol=0)
        assert torch.equal(chosen.targets_N, anchors.targets_N[place])
        scored[chosen.positions_N] += 1
    anchors_N = torch.zeros(4 * 12, dtype=torch.bool).index_fill_(0, anchors.positions_N, True)
    assert not scored[~anchors_N].any() and anchors_N.sum() > 10
    off = (scored[anchors_N] / steps - share) / math.sqrt(share * (1 - share) / steps)
    assert off.abs().max() < 4 and 0.5 < off.std() < 1.6, "each by a coin of its own"


def test_the_anchors_drawn_belong_to_the_example():
    x0 = random_tokens(8, 12, 10)
    cfg = ObjectiveConfig(gamma=1.0, gamma_warmup=0.0, anchor_rule="all", anchor_fraction=0.5)
    objective = make_objective(cfg, NoiseConfig(), 10, seed=1)
    whole = objective.corrupt(Sequences(x0, torch.arange(8), 8), 3, 1.0).terms["anchor"]
    half = objective.corrupt(Sequences(x0[4:], torch.arange(4, 8), 8), 3, 1.0).terms["anchor"]
    late = whole.positions_N >= 4 * 12
    assert torch.equal(whole.positions_N[late] - 4 * 12, half.positions_N) and 10 < len(half.positions_N) < 38
    assert torch.equal(whole.weights_N[late], half.weights_N)


# Noise


def test_noise_belongs_to_the_example_not_to_the_batch():
    x0 = random_tokens(8, 12, 10)
    objective = make_objective(ObjectiveConfig(), NoiseConfig(), 10, seed=9)
    whole = objective.corrupt(sequences_of(x0), 4, 1.0)
    halves = [objective.corrupt(sequences_of(x0[i : i + 4], start=i, total=8), 4, 1.0) for i in (0, 4)]
    assert torch.equal(torch.cat([h.tokens_BL for h in halves]), whole.tokens_BL)
    assert torch.equal(torch.cat([h.terms["nelbo"].weights_N for h in halves]), whole.terms["nelbo"].weights_N)
    assert not torch.equal(objective.corrupt(sequences_of(x0), 5, 1.0).tokens_BL, whole.tokens_BL), "steps differ"
    other = make_objective(ObjectiveConfig(), NoiseConfig(), 10, seed=10)
    assert not torch.equal(other.corrupt(sequences_of(x0), 4, 1.0).tokens_BL, whole.tokens_BL), "seeds differ"
    assert torch.equal(
        other.corrupt_for_bound(sequences_of(x0), 0).tokens_BL,
        objective.corrupt_for_bound(sequences_of(x0), 0).tokens_BL,
    )
    assert not torch.equal(
        objective.corrupt_for_bound(sequences_of(x0), 1).tokens_BL,
        objective.corrupt_for_bound(sequences_of(x0), 0).tokens_BL,
    )


def test_steps_have_times_of_their_own():
    """Examples have the same numbers at every step: only the step makes their noise new."""
    example = torch.arange(256)
    first, second = (draw_times(0, step, example, 256) * 256 % 1 for step in (3, 4))  # within each slice
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.3
    objective = make_objective(ObjectiveConfig(), NoiseConfig(), 10, seed=9)
    x0 = random_tokens(8, 12, 10)
    levels = [objective.corrupt(sequences_of(x0), step, 1.0).sigma_B for step in (3, 4)]
    assert (levels[0] != levels[1]).all()


def test_anchors_are_drawn_independently_of_the_masks():
    """Of the masked and of the visible positions the same fraction is scored."""
    cfg = ObjectiveConfig(gamma=1.0, gamma_warmup=0.0, anchor_rule="all", anchor_fraction=0.5)
    objective, x0 = make_objective(cfg, NoiseConfig(), 10, seed=1), random_tokens(200, 12, 10)
    batch = objective.corrupt(sequences_of(x0), 3, 1.0)
    scored = torch.zeros(x0.numel()).index_fill_(0, batch.terms["anchor"].positions_N, 1.0)
    masked = torch.zeros(x0.numel(), dtype=torch.bool).index_fill_(0, batch.terms["nelbo"].positions_N, True)
    for kind in (masked, ~masked):
        assert kind.sum() > 500
        assert scored[kind].mean().item() == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(kind.sum()))


def test_slices_follow_the_golden_ratio():
    """Example i has the slice that is the rank of frac(i * golden ratio), so more examples never change the order."""
    fraction = np.arange(64) * (math.sqrt(5) - 1) / 2 % 1
    assert strata(64, "cpu").tolist() == (stats.rankdata(fraction) - 1).astype(int).tolist()
    for total in (5, 40):
        few, many = strata(total, "cpu"), strata(64, "cpu")[:total]
        assert torch.equal(few.argsort(), many.argsort())


def test_times_are_stratified_globally_and_nearly_so_in_every_stretch():
    total = 512
    order = strata(total, "cpu")
    assert torch.equal(order.sort().values, torch.arange(total))
    t = draw_times(0, 3, torch.arange(total), total)
    assert torch.equal((t * total).floor().sort().values.long(), torch.arange(total)), "one time in every slice"
    for start in range(0, total - 16, 7):
        stretch = t[start : start + 16].sort().values
        assert (stretch - (torch.arange(16) + 0.5) / 16).abs().max() < 0.13
        assert abs(stretch.mean().item() - 0.5) < 0.06


@pytest.mark.parametrize("a", [1, 1.5, 2, 5, 1e4])
def test_beta_quantile(a):
    u = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    np.testing.assert_allclose(beta_quantile(u, a), stats.beta.ppf(u, a, a), atol=1e-3)


def test_density_of_times_is_an_option_of_training_and_never_of_the_bound():
    x0 = random_tokens(256, 12, 10)
    plain = make_objective(ObjectiveConfig(), NoiseConfig(), 10, seed=9)
    tilted = make_objective(ObjectiveConfig(time_density=3.0), NoiseConfig(), 10, seed=9)
    times = [noised_for_training(tilted, sequences_of(x0), 0, progress).t_B for progress in (0.0, 0.4, 0.8, 1.0)]
    for t, a in zip(times, (3.0, 2.0, 1.0, 1.0)):
        assert t.var().item() == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.02), "the variance of Beta(a, a)"
    assert torch.equal(
        tilted.corrupt_for_bound(sequences_of(x0), 0).tokens_BL, plain.corrupt_for_bound(sequences_of(x0), 0).tokens_BL
    )
    assert time_density(ObjectiveConfig(), 0.3) == time_density(ObjectiveConfig(time_density=3.0), 0.9) == 1.0


# Autoregression


def test_autoregressive_loss_is_the_sum_of_log_probabilities():
    model = tiny_model(dtype=torch.float64, causal=True, conditioning="none", anchored=False)
    x0 = random_tokens(3, 12, 10)
    objective = make_objective(ObjectiveConfig(name="autoregressive", gamma=0.0), NoiseConfig(), 10, seed=0)
    output = loss(model, objective.corrupt(sequences_of(x0), 0, 1.0))
    expected = model.log_probs(x0[:, :-1]).gather(-1, x0[:, 1:, None]).sum()
    torch.testing.assert_close(output.total.double(), -expected, rtol=1e-9, atol=0)
    assert output.count == 33


def test_a2r_scores_anchors_where_the_target_is_one():
    model = tiny_model(dtype=torch.float64, causal=True, conditioning="none")
    x0 = random_tokens(3, 12, 10)
    cfg = ObjectiveConfig(name="autoregressive", gamma=0.5, gamma_warmup=0, tau=2)
    objective = make_objective(cfg, NoiseConfig(), 10, seed=0)
    output = loss(model, objective.corrupt(sequences_of(x0), 0, 1.0))
    log_phi = model.anchor_logits(x0[:, :-1]).log_softmax(-1).gather(-1, x0[:, 1:, None]).squeeze(-1)
    expected = -(log_phi * naive_anchor_mask(x0, 2)[:, 1:]).sum()
    torch.testing.assert_close(output.terms["anchor"], expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(output.total, output.terms["nll"] + 0.5 * expected, rtol=1e-9, atol=0)


# Bad input


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (ObjectiveConfig(name="nelb"), "did you mean 'nelbo'"),
        (ObjectiveConfig(anchor_rule="counts"), "did you mean 'count'"),
        (ObjectiveConfig(anchor_positions="some"), "objective.anchor_positions='some'"),
        (ObjectiveConfig(anchor_fraction=0.0), "objective.anchor_fraction=0.0 must be in (0, 1]"),
        (ObjectiveConfig(gamma=-1.0), "objective.gamma=-1.0"),
        (ObjectiveConfig(gamma_warmup=2.0), "objective.gamma_warmup=2.0"),
        (ObjectiveConfig(T=-1), "objective.T=-1"),
        (ObjectiveConfig(sampling_eps=1.0), "objective.sampling_eps=1.0"),
        (ObjectiveConfig(time_density=0.5), "must be at least 1"),
        (ObjectiveConfig(tau=-1), "objective.tau=-1"),
    ],
)
def test_bad_options(cfg, message):
    with pytest.raises(ValueError) as error:
        check_fields(cfg, "objective")
    assert message in str(error.value)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES.entries))
@pytest.mark.parametrize("T", [0, 50])
def test_the_weight_is_that_of_the_bound(schedule, T):
    """w(t) (1 - alpha(t)), the weight expected at a position, adds up over time to all that is revealed: alpha at the
    first time minus alpha at the last. A bound that is off by a factor differs here, and nowhere else as plainly."""
    n, eps = 20_000, 0.0 if T else 1e-3
    cfg = ObjectiveConfig(name="nelbo", T=T, sampling_eps=eps)
    objective = make_objective(cfg, NoiseConfig(name=schedule), 10, seed=0)
    noised = noised_for_training(objective, sequences_of(torch.zeros(n, 1, dtype=torch.long)), 0, 1.0)
    alpha = make_schedule(NoiseConfig(name=schedule)).alpha
    first, last = (float(alpha(torch.tensor(t, dtype=torch.float64))) for t in (eps, 1.0))
    expected = (first - last) / (1 - eps)
    assert (noised.weight_B.double() * (1 - noised.alpha_t_B)).mean().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["nelbo", "d3pm"])
def test_a_time_conditioned_model_gets_a_finite_noise_level(name):
    """Discrete times visit t = 1, where the linear schedule leaves nothing visible."""
    objective = make_objective(ObjectiveConfig(name=name, T=2), NoiseConfig(name="linear"), 10, seed=1)
    batch = objective.corrupt(Sequences(random_tokens(8, 12, 10), torch.arange(8), 8), 0, 0.5)
    assert batch.sigma_B is not None and batch.sigma_B.isfinite().all()
    model = tiny_model(conditioning="sigma", anchored=False)
    assert loss(model, batch).total.isfinite()

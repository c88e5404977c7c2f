"""The loss after prompts: prompts are never masked and never scored, padding neither is scored nor tells anything, and
the bound of an answer is the one that enumerating all masks gives."""

import itertools
import math

import pytest
import torch
from tiny import MODERN, random_tokens, tiny_model

from adlm.diffusion.process import noise_level
from adlm.objectives import Sequences, loss, make_objective, sequence_bounds
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

MASK, V = 10, 11
START, END, L = 3, 7, 9
"""Of the only sequence: four tokens of an answer, after three that are given, before padding."""


def objective(name="nelbo", **settings):
    plain = {"gamma": 0.0} if name != "anelbo" else {}
    return make_objective(ObjectiveConfig(name=name, **plain | settings), NoiseConfig(), MASK, 1)


def pairs(n: int, seed=0, **more) -> Sequences:
    position = torch.arange(L).expand(n, -1)
    tokens = random_tokens(1, L, MASK, seed=seed).expand(n, -1)
    return Sequences(tokens, torch.arange(n), n, position < END, given_BL=position < START, **more)


def enumerated(model, tokens_L, schedule) -> float:
    """The bound on -log p(answer | prompt): sum over masked sets S of the answer of B(k, n-k+1) times the cross-entropy
    of S, by a dense loop. Prompts are visible and padding is masked in every one of them."""
    n, total = END - START, 0.0
    for k in range(1, n + 1):
        for masked in itertools.combinations(range(START, END), k):
            z = tokens_L.clone()
            z[list(masked)] = z[END:] = MASK
            sigma = noise_level(torch.tensor([0.0], dtype=torch.float64), schedule)
            log_p = model.log_probs(z[None], sigma)[0]
            total += -sum(log_p[i, tokens_L[i]].item() for i in masked) / (k * math.comb(n, k))
    return total


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, MODERN])
def test_the_bound_of_an_answer_is_the_enumerated_one(options):
    model, bound, n = tiny_model(V, MASK, dtype=torch.float64, scale=0.2, **options), objective("anelbo"), 20_000
    sequences = pairs(n)
    expected = enumerated(model, sequences.tokens_BL[0], bound.schedule)
    for batch in (bound.corrupt_for_bound(sequences, 0), bound.corrupt_exact_count(sequences, 0)):
        assert batch.count == n * (END - START)
        nats = torch.cat([sequence_bounds(model, part) for part in split(batch)])
        error = nats.std().item() / math.sqrt(n)
        # times below sampling_eps are not visited: about that fraction of the bound is missing
        assert abs(nats.mean().item() - expected) < 4 * error + 2e-3 * expected


def split(batch, size: int = 2000):
    """The same batch in parts that fit into memory."""
    ((name, term),) = batch.terms.items()
    for start in range(0, len(batch.tokens_BL), size):
        mine = (term.positions_N >= start * L) & (term.positions_N < (start + size) * L)
        own = term._replace(
            positions_N=term.positions_N[mine] - start * L,
            targets_N=term.targets_N[mine],
            weights_N=term.weights_N[mine],
        )
        sigma = None if batch.sigma_B is None else batch.sigma_B[start : start + size]
        yield batch._replace(tokens_BL=batch.tokens_BL[start : start + size], sigma_B=sigma, terms={name: own})


@pytest.mark.parametrize("name", ["nelbo", "anelbo", "score-entropy", "d3pm"])
def test_prompts_stay_visible_and_padding_hidden(name):
    bound = objective(name, **({"T": 8} if name == "d3pm" else {}), anchor_rule="all")
    sequences = pairs(64)
    batches = [bound.corrupt(sequences, 3, 0.5), bound.corrupt_for_bound(sequences, 0)]
    batches += [bound.corrupt_exact_count(sequences, 0)] if bound.subs else []
    for batch in batches:
        assert torch.equal(batch.tokens_BL[:, :START], sequences.tokens_BL[:, :START])
        assert (batch.tokens_BL[:, END:] == MASK).all()
        for term in batch.terms.values():
            at = term.positions_N % L
            assert len(at) and ((at >= START) & (at < END)).all()
        assert batch.count == 64 * (END - START)


def test_targets_of_prompts_have_no_gradient():
    """Changing what padding holds changes nothing; the logits at prompts and padding carry no gradient."""
    for bound, options in (
        (objective("anelbo"), {}),
        (objective("autoregressive"), {"causal": True, "anchored": False}),
    ):
        model = tiny_model(V, MASK, **options).train()
        sequences = pairs(16)
        other = sequences.tokens_BL.clone()
        other[:, END:] = 1
        losses = [loss(model, bound.corrupt(s, 3, 0.5)).total for s in (sequences, sequences._replace(tokens_BL=other))]
        assert torch.equal(*losses)
        losses[0].backward()
        seen = {int(t) for t in sequences.tokens_BL[0, START:END]}
        prompt_only = {int(t) for t in sequences.tokens_BL[0, :START]} - seen
        # a token that is a target nowhere: its logit is only pushed down, in the head's bias
        assert prompt_only and all(model.head.bias.grad[t] > 0 for t in prompt_only)


def test_causal_answers_are_scored_exactly():
    model = tiny_model(V, MASK, dtype=torch.float64, causal=True, anchored=False)
    sequences = pairs(2)
    batch = objective("autoregressive").corrupt_for_bound(sequences, 0)
    x = sequences.tokens_BL[0]
    log_p = model.log_probs(x[None])[0]
    expected = -sum(log_p[i - 1, x[i]].item() for i in range(START, END))
    assert batch.count == 2 * (END - START)
    torch.testing.assert_close(sequence_bounds(model, batch), torch.full((2,), expected, dtype=torch.float64))


def test_the_noise_level_is_that_of_the_whole_sequence():
    """A time-conditioned network is told how much of the sequence is masked: all padding, nothing of the prompt."""
    bound = objective("nelbo")
    sequences = pairs(4, times_B=torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64))
    batch = bound.corrupt_for_bound(sequences, 0)
    t = 1e-3 + (1 - 1e-3) * sequences.times_B
    overall = (t * (END - START) + L - END) / L
    torch.testing.assert_close(batch.sigma_B, noise_level(overall, bound.schedule).float())


def test_blocks_after_prompts():
    """Block diffusion: the same rule in every block, by counts and by times."""
    model = ModelConfig(anchored=False, block_length="2", length=12, hidden_size=16, n_heads=2)
    bound = make_objective(ObjectiveConfig(name="nelbo", gamma=0.0), NoiseConfig(), MASK, 1, model)
    sequences = pairs(64)
    for batch in (bound.corrupt(sequences, 3, 0.5), bound.corrupt_for_bound(sequences, 0)):
        noisy, clean = batch.tokens_BL[:, :L], batch.tokens_BL[:, L:]
        assert torch.equal(noisy[:, :START], sequences.tokens_BL[:, :START]) and (noisy[:, END:] == MASK).all()
        assert torch.equal(clean, sequences.tokens_BL) and batch.count == 64 * (END - START)
        (term,) = batch.terms.values()
        at = term.positions_N % L
        assert len(at) and ((at >= START) & (at < END)).all()

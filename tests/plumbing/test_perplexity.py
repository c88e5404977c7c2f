"""Numbers people can trust: estimators of perplexity against enumeration, with intervals that cover, for any seed."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import dense_log_probs, dense_logits
from tiny import random_tokens, tiny_model
from torch import nn

from adlm.data.tokenizers import raw_bytes, train_bpe
from adlm.evaluation.intervals import Estimate
from adlm.evaluation.perplexity import bits_per_byte, estimate, measure
from adlm.io.export import Loaded
from adlm.models import Hidden
from adlm.models.layers import pick_flat
from adlm.objectives import Sequences, make_objective, sequence_bounds
from adlm.schema import EvalConfig, NoiseConfig, ObjectiveConfig
from adlm.training.parallel import World

ALONE = World(0, 1, torch.device("cpu"), "fp32", "none")
LINEAR = NoiseConfig(name="linear")


class Table:
    """Sequences in memory, behind the interface of prepared blocks."""

    def __init__(self, tokens: torch.Tensor, lengths: np.ndarray | None = None):
        self.tokens, self.lengths, self.length = tokens.numpy(), lengths, tokens.shape[1]
        self.starts = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices):
        return self.tokens[indices]

    def attention_masks(self, indices):
        return None if self.lengths is None else np.arange(self.length) < self.lengths[indices][:, None]

    def prompts(self, indices: np.ndarray) -> None:
        return None


def loaded_of(model, objective: ObjectiveConfig, noise: NoiseConfig = LINEAR) -> Loaded:
    return Loaded(model, None, noise, objective, {})  # type: ignore[arg-type]


def weights_of_patterns(L: int, eps: float) -> np.ndarray:
    """Weight of a pattern with k masks, k = 0..L: the mean over t in [eps, 1] of t^(k-1) (1-t)^(L-k)."""
    t = np.linspace(eps, 1, 200_001)
    t = (t[1:] + t[:-1]) / 2
    return np.array([0.0] + [(t ** (k - 1) * (1 - t) ** (L - k)).mean() for k in range(1, L + 1)])


def exact_count(sequences, mask_id):
    objective = make_objective(ObjectiveConfig(name="nelbo"), NoiseConfig(), mask_id, seed=0)
    return objective.corrupt_exact_count(sequences, 0)


def exact_nelbo(model, x: tuple[int, ...], eps: float = 0.0) -> float:
    """The continuous-time bound of one sequence by enumeration of all mask patterns (alpha = 1 - t)."""
    L, tokens, total = len(x), torch.tensor(x), 0.0
    weights = weights_of_patterns(L, eps)
    if eps == 0:
        weights = np.array([0.0] + [1 / (k * math.comb(L, k)) for k in range(1, L + 1)])
    for pattern in itertools.product([False, True], repeat=L):
        masked = torch.tensor(pattern)
        if masked.any():
            z = torch.where(masked, model.mask_id, tokens)[None]
            log_p = dense_log_probs(dense_logits(model, z)[0], z, model.mask_id)[0, torch.arange(L), tokens]
            total -= float(weights[int(masked.sum())] * log_p[masked].sum())
    return total


class Tabulated(nn.Module):
    """A model of three tokens and length 3 that has seen its 27 inputs already: hundreds of repeats in seconds."""

    def __init__(self, model):
        super().__init__()
        self.mask_id, self.vocab_size, self.head, self.config = model.mask_id, 3, model.head, model.config
        self.whole = model
        self.hidden = model(torch.tensor(list(itertools.product(range(3), repeat=3)))).denoiser_BLD

    def forward(self, z_BL, sigma_B=None, at_N=None):
        hidden_BLD = self.hidden[z_BL @ torch.tensor([9, 3, 1])]
        return Hidden(hidden_BLD if at_N is None else pick_flat(hidden_BLD, at_N), None)


@pytest.fixture(scope="module")
def toy():
    """A model of three tokens (one is the mask), and the exact bound of each of the eight sequences of length 3."""
    model = Tabulated(tiny_model(vocab_size=3, mask_id=2, length=3, scale=0.6, seed=5).requires_grad_(False))
    with torch.no_grad():
        sequences = list(itertools.product(range(2), repeat=3))
        bounds = {eps: np.array([exact_nelbo(model.whole, x, eps) for x in sequences]) for eps in (0.0, 1e-3)}
    return model, torch.tensor(sequences), bounds


# Estimators


@pytest.mark.parametrize("n_real", [3, 2])
def test_exact_count_is_the_bound_by_enumeration(toy, n_real):
    """Averaged over all k and many orders; also where the third position is padding."""
    model, sequences, bounds = toy
    n = 40_000
    x = sequences[3].repeat(n, 1)
    mask = None if n_real == 3 else torch.tensor([True, True, False]).repeat(n, 1)
    rows = Sequences(x, torch.arange(n), n, mask)
    values = sequence_bounds(model, exact_count(rows, model.mask_id))
    if n_real == 3:
        expected = bounds[0.0][3]
    else:
        expected = padded_nelbo(model.whole, sequences[3])
    se = values.std().item() / math.sqrt(n)
    assert abs(values.mean().item() - expected) < 4 * se, (values.mean().item(), expected, se)


def padded_nelbo(model, x: torch.Tensor) -> float:
    """Two real tokens and one of padding, which is masked at rate t too: the mean over its two states, by hand."""
    total = 0.0
    t = (np.arange(200_000) + 0.5) / 200_000
    for pattern in itertools.product([False, True], repeat=3):
        masked = torch.tensor(pattern)
        k, pad = int(masked[:2].sum()), bool(masked[2])
        if k:
            z = torch.where(masked, model.mask_id, x)[None]
            log_p = dense_log_probs(dense_logits(model, z)[0], z, model.mask_id)[0, torch.arange(3), x]
            weight = (t ** (k - 1) * (1 - t) ** (2 - k) * (t if pad else 1 - t)).mean()
            total -= float(weight * log_p[:2][masked[:2]].sum())
    return total


def test_exact_count_masks_exactly_k_and_weighs_them():
    x = random_tokens(64, 12, 10)
    task = exact_count(Sequences(x, torch.arange(64), 64), 10)
    masked = task.tokens_BL == 10
    k = masked.sum(1)
    assert torch.equal(task.tokens_BL[~masked], x[~masked])
    assert set(k.tolist()) == set(range(1, 13)) and k.bincount(minlength=13)[1:].max() <= 7
    assert torch.allclose(task.terms["nelbo"].weights_N, (12 / k).repeat_interleave(k))


def measure_toy(model, tokens, cfg: EvalConfig, seed: int = 0) -> dict[str, Estimate]:
    objective = ObjectiveConfig(name="nelbo", sampling_eps=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adlm.evaluation.perplexity.EVALUATION_SEED", seed)
        return measure(loaded_of(model, objective), Table(tokens), replace(cfg, batch_size=4096), ALONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize(("estimator", "eps"), [("continuous", 1e-3), ("exact-count", 0.0)])
def test_the_interval_covers_the_exact_bound(toy, estimator, eps, draws):
    """200 repeats with new rows and new noise: over-rows interval around the population's bound, Monte Carlo interval
    around the bound of the very rows."""
    model, sequences, bounds = toy
    p = torch.tensor([0.3, 0.05, 0.05, 0.1, 0.1, 0.05, 0.05, 0.3], dtype=torch.float64)
    population = float(p.numpy() @ bounds[eps]) / 3
    generator = torch.Generator().manual_seed(1)
    n, repeats, covered, covered_rows = 600, 200, 0, 0
    for repeat in range(repeats):
        drawn = torch.multinomial(p, n, replacement=True, generator=generator)
        cfg = EvalConfig(draws=draws, estimator=estimator)
        (e,) = measure_toy(model, sequences[drawn], cfg, repeat).values()
        assert e.interval is not None
        covered += e.interval[0] <= population <= e.interval[1]
        if draws > 1:
            assert e.monte_carlo_error is not None and e.row_error is not None and e.monte_carlo_error < e.row_error
            own = bounds[eps][drawn.numpy()].mean() / 3
            covered_rows += abs(e.nats - own) <= 1.96 * e.monte_carlo_error
    # 95% of 200: between 180 and 199 with probability 0.999
    assert 180 <= covered <= 199, covered
    assert draws == 1 or covered_rows >= 180, covered_rows


def test_stratification_pays(toy):
    """The spread over seeds is what the errors say, and far below that of independent times."""
    model, sequences, _ = toy
    tokens = sequences[torch.arange(800) % 8]
    found = [measure_toy(model, tokens, EvalConfig(draws=2, estimator="both"), s) for s in range(60)]
    for name in ("continuous", "exact-count"):
        spread = np.std([f[name].nats for f in found], ddof=1)
        said = np.mean([f[name].monte_carlo_error for f in found])  # type: ignore[arg-type]
        assert 0.6 < spread / said < 1.3, (name, spread, said)
    exact, continuous = (np.std([f[name].nats for f in found]) for name in ("exact-count", "continuous"))
    assert exact < 0.7 * continuous


def test_two_seeds_agree_within_the_interval(toy):
    model, sequences, _ = toy
    tokens = sequences[torch.arange(800) % 8]
    a, b = (measure_toy(model, tokens, EvalConfig(draws=4), s)["continuous"] for s in (0, 1))
    assert a.nats != b.nats
    assert abs(a.nats - b.nats) < 3 * math.hypot(a.monte_carlo_error or 0, b.monte_carlo_error or 0)


def test_seed_0_and_one_draw_is_the_validation_of_training(toy):
    model, sequences, _ = toy
    objective = ObjectiveConfig(name="nelbo")
    rows = Sequences(sequences, torch.arange(8), 8)
    same = sequence_bounds(model, make_objective(objective, LINEAR, 2, 0).corrupt_for_bound(rows, 0)).sum().item() / 24
    assert measure_toy(model, sequences, EvalConfig(draws=1))["continuous"].nats == pytest.approx(same, rel=1e-12)


@pytest.mark.parametrize("anchored", [False, True], ids=["ar", "a2r"])
@pytest.mark.parametrize("padded", [False, True])
def test_perplexity_of_a_causal_model_is_its_log_probabilities(anchored, padded):
    model = tiny_model(causal=True, anchored=anchored)
    x = random_tokens(9, 12, 10)
    lengths = np.arange(4, 13) if padded else None
    objective = ObjectiveConfig(name="autoregressive", gamma=0.0)
    found = measure(loaded_of(model, objective), Table(x, lengths), EvalConfig(draws=3, batch_size=4), ALONE)  # type: ignore[arg-type]
    assert list(found) == ["exact"]
    log_p = model.log_probs(x[:, :-1]).gather(2, x[:, 1:, None]).squeeze(2).double()
    keep = torch.arange(1, 12) < torch.from_numpy(np.full(9, 12) if lengths is None else lengths)[:, None]
    expected = -(log_p * keep).sum().item() / keep.sum().item()
    assert found["exact"].nats == pytest.approx(expected, rel=1e-6)
    assert found["exact"].tokens == int(keep.sum()) and found["exact"].monte_carlo_error == 0.0
    assert found["exact"].perplexity == pytest.approx(math.exp(expected), rel=1e-6)


def test_models_of_another_kind_have_the_continuous_bound_only(toy):
    model, sequences, _ = toy
    other = loaded_of(model, ObjectiveConfig(name="score-entropy"))
    for cfg in (EvalConfig(estimator="exact-count"), EvalConfig(estimator="both")):
        with pytest.raises(ValueError, match="continuous bound only"):
            measure(other, Table(sequences), cfg, ALONE)  # type: ignore[arg-type]


def test_batch_size_does_not_matter(toy):
    model, sequences, _ = toy
    results = []
    for size in (1, 3, 8):
        objective = make_objective(ObjectiveConfig(name="nelbo"), LINEAR, 2, 0)
        score = lambda rows, draw: sequence_bounds(model, objective.corrupt_for_bound(rows, draw))  # noqa: E731, B023
        cfg = EvalConfig(draws=2, batch_size=size)
        results.append(estimate(score, Table(sequences), cfg, ALONE, "").nats)  # type: ignore[arg-type]
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


def test_ranks_get_whole_batches_once():
    tokens = random_tokens(23, 4, 10)

    def batches(rank: int, size: int) -> list[list[int]]:
        seen = []

        def nats_of(sequences, draw):
            seen.append(sequences.example_B.tolist())
            return torch.ones(len(sequences.example_B))

        ranks = World(rank, size, torch.device("cpu"), "fp32", "none")
        ranks.sum = lambda values: values  # type: ignore[method-assign]
        estimate(nats_of, Table(tokens), EvalConfig(draws=1, batch_size=5), ranks, "")  # type: ignore[arg-type]
        return seen

    alone = batches(0, 1)
    assert list(itertools.chain(*alone)) == list(range(23))
    for size in (2, 4):
        assert sorted(itertools.chain(*(batches(rank, size) for rank in range(size)))) == alone


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    """The same text and the same nats, in bytes and in larger pieces; the end of a text is no byte."""
    text = "naïve text, and naïve again. " * 8
    found = []
    for tokenizer in (raw_bytes(), train_bpe([text], 300)):
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        one = Estimate(nats=100 / len(ids), tokens=len(ids), rows=1, draws=1, row_error=None, monte_carlo_error=None)
        found.append(bits_per_byte(one, Table(torch.tensor([ids])), tokenizer))
    assert found == pytest.approx([100 / math.log(2) / len(text.encode())] * 2)


def test_half_characters_at_the_edges_of_a_row_are_single_bytes():
    """Sequences are cut anywhere: both halves of a character count what they are, though neither is text."""
    text, tokenizer = "né à là où Ω" * 4, raw_bytes()
    ids = tokenizer.encode(text)
    row = torch.tensor(ids[2:-1])  # begins with the second byte of é, ends after the first of Ω
    one = Estimate(1.0, len(row), rows=1, draws=1, row_error=None, monte_carlo_error=None)
    assert bits_per_byte(one, Table(row[None]), tokenizer) == pytest.approx(1 / math.log(2))
    after_the_first = Estimate(1.0, len(row) - 1, rows=1, draws=1, row_error=None, monte_carlo_error=None)
    assert bits_per_byte(after_the_first, Table(row[None]), tokenizer) == pytest.approx(1 / math.log(2))

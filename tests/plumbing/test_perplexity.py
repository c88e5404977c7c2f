"""Numbers people can trust: estimators against enumeration, intervals that cover, any number of ranks, any seed."""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import dense_log_probs, dense_logits
from runs import overrides, run_config, write_corpus
from scipy import stats
from tiny import random_tokens, tiny_model
from torch import nn

from adlm import cli, config
from adlm.compat.checkpoints import export_release
from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes, train_bpe
from adlm.evaluation import perplexity
from adlm.evaluation.intervals import Estimate, neighbour_variance, student, summarise
from adlm.evaluation.perplexity import bits_per_byte, estimate, measure, run_ppl
from adlm.io.export import Loaded
from adlm.io.load import load_checkpoint
from adlm.models import Hidden
from adlm.models.layers import pick_flat
from adlm.objectives import Sequences, make_objective, sequence_bounds
from adlm.schema import EvalConfig, NoiseConfig, ObjectiveConfig
from adlm.training.loop import train
from adlm.training.metrics import read_metrics
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


# Intervals


def test_student_quantiles():
    for freedom in (1, 2, 3, 4, 9, 30, 1000):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_neighbour_variance_ignores_a_trend():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=4000)
    assert neighbour_variance(noise) == pytest.approx(1, rel=0.1)
    assert neighbour_variance(noise + np.linspace(0, 50, 4000)) == pytest.approx(1, rel=0.1)


def test_neighbour_variance_by_hand():
    """Each difference of two has twice the variance; three values have two differences."""
    assert neighbour_variance(np.array([1.0, 3.0, 2.0])) == (4 + 1) / 2 / 2
    assert neighbour_variance(np.array([0.0, 2.0])) == 2


def test_summary_of_rows_of_unequal_length():
    """A ratio of sums; and an exact likelihood has only the error over rows."""
    values, tokens = np.array([[2.0], [9.0], [4.0]]), np.array([1, 3, 2])
    e = summarise(values, tokens, None)
    assert e.nats == 15 / 6 and e.tokens == 6 and e.monte_carlo_error == 0
    rest = values[:, 0] - 2.5 * tokens
    assert e.row_error == pytest.approx(math.sqrt(3 * rest.var(ddof=1)) / 6)


def test_one_row_or_one_draw_has_no_error_to_tell():
    one = summarise(np.array([[3.0, 4.0]]), np.array([2]), np.array([0.5]))
    assert one.row_error is None and one.monte_carlo_error is None and one.interval is None
    assert one.as_dict()["perplexity_interval"] is None
    few = summarise(np.array([[3.0], [4.0]]), np.array([2, 2]), np.array([0.5, 0.1]))
    assert few.row_error is not None and few.monte_carlo_error is None


def test_units():
    e = Estimate(math.log(8), 100, 10, 1, 0.0, None).as_dict()
    assert e["perplexity"] == pytest.approx(8) and e["bits_per_token"] == pytest.approx(3)


# The command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppl")
    train(run_config(folder, train__valid_sequences=0))
    return folder


def ppl_line(folder, *more: str) -> list[str]:
    return ["ppl", str(folder / "run"), f"data.cache_dir={folder / 'cache'}", *more]


def test_the_command_repeats_the_validation_of_training(trained, capsys):
    assert cli.main([*ppl_line(trained), "eval.draws=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = [e["nll"] for e in read_metrics(trained / "run") if e["kind"] == "valid"][-1]
    assert result["continuous"]["nats_per_token"] == pytest.approx(last, rel=1e-6)
    assert json.loads((trained / "run" / "ppl-file.json").read_text()) == result
    assert result["data"]["fingerprint"] and result["data"]["detokenizer_version"] is not None
    assert result["versions"]["torch"] and result["settings"]["draws"] == 1 and result["weights"] == "averaged"
    low, high = result["continuous"]["perplexity_interval"]
    assert low < result["continuous"]["perplexity"] < high


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


def test_raw_weights_and_another_corpus(trained, tmp_path, capsys):
    text = write_corpus(tmp_path / "other.jsonl", documents=20, seed=9)
    out = tmp_path / "result.json"
    more = [
        "data=file",
        f"data.path={text}",
        "data.valid_fraction=0.5",
        "eval.ema=false",
        "eval.sequences=5",
        f"out={out}",
    ]
    assert cli.main(ppl_line(trained, *more, "eval.draws=2", "eval.estimator=both")) == 0
    result = json.loads(out.read_text())
    assert result["weights"] == "raw" and result["continuous"]["rows"] == 5
    assert result["exact-count"]["monte_carlo_error_nats"] > 0
    assert "upper bound" in capsys.readouterr().out


def test_a_file_is_scored_whole(trained, tmp_path):
    """Not the part of it that training on it would hold out."""
    text = write_corpus(tmp_path / "other.jsonl", documents=20, seed=9)
    loaded = load_checkpoint(trained / "run")
    cfg = config.load(["data=file", f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}"])
    blocks = prepare(perplexity.own_data(loaded, cfg.data), loaded.tokenizer, 32, "valid")
    assert blocks.manifest["documents"] == 20


def test_the_releases_line_on_its_own_kind_of_checkpoint(trained, tmp_path, monkeypatch, capsys):
    """mode=ppl_eval of the public release, typed as in its README apart from sizes, files and the tokenizer."""
    export_release(trained / "run", tmp_path / "tiny.ckpt")
    text = write_corpus(tmp_path / "openwebtext.jsonl", documents=60, seed=3)
    monkeypatch.setenv("ADLM_CACHE", str(tmp_path / "cache"))
    line = (
        "mode=ppl_eval loader.global_batch_size=16 loader.batch_size=4 loader.eval_batch_size=4 data=openwebtext-split"
        " model=small parameterization=subs backbone=dit model.length=32 T=0 +wandb.offline=true"
        f" eval.checkpoint_path={tmp_path / 'tiny.ckpt'} data.path={text} data.tokenizer=bytes"
    )
    assert cli.release_main("adlm_main", line.split()) == 0
    result = json.loads((tmp_path / "ppl-openwebtext.json").read_text())
    assert result["data"]["packing"] == "release" and result["length"] == 32
    capsys.readouterr()
    more = ["data=openwebtext", "data.packing=release", f"data.path={text}"]
    assert cli.main([*ppl_line(trained, *more), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["continuous"] == ours["continuous"]


def test_loading_refuses_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a run folder nor an exported folder"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"does not say what it was trained on; name a corpus, e\.g\. data=pydocs"):
        run_ppl(config.load(["data=checkpoint"]))  # of the model in the package


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_gives_the_same_number(trained, tmp_path, ranks):
    more = [
        "eval.draws=2",
        "eval.estimator=both",
        "eval.batch_size=2",
        "train.device=cpu",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for n in (1, ranks):
        out = tmp_path / f"{n}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m", "adlm"]
        line = [*command, *ppl_line(trained, *more, f"out={out}")]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(out.read_text()))
    for name in ("continuous", "exact-count"):
        assert found[0][name] == found[1][name]


@pytest.mark.parametrize(
    "key", ["data.path=other.txt", "data.valid_path=x", "data.packing=release", "data.packing=documents"]
)
def test_data_keys_that_the_checkpoints_own_corpus_ignores_are_refused(trained, key):
    loaded = load_checkpoint(trained / "run")
    with pytest.raises(ValueError, match=f"{key.partition('=')[0]}: not read with data=checkpoint"):
        perplexity.own_data(loaded, config.load(["data=checkpoint", key]).data)


def test_fewer_rows_of_the_checkpoints_own_corpus(trained):
    loaded = load_checkpoint(trained / "run")
    assert perplexity.own_data(loaded, config.load(["data=checkpoint", "data.max_sequences=3"]).data).max_sequences == 3


def test_overrides_of_the_tiny_run_are_what_the_checkpoint_says(trained):
    """data=checkpoint reads the training data settings back from the export."""
    loaded = load_checkpoint(trained / "run")
    line = dict(text.split("=", 1) for text in overrides(trained))
    assert loaded.info["data_settings"]["path"] == line["data.path"]
    assert perplexity.own_data(loaded, config.load(["data=checkpoint"]).data).valid_fraction == 0.1

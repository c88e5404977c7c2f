"""Stage 2 of `adlm evaluate`: every measure of every setting, and of the data itself.

Generative perplexity alone is easily fooled: by low temperature, by loops inside a text, or by the same good text again
and again. Entropy and distinct-n detect the first two, `shared` the third; MAUVE compares with the data.

Cheap measures are computed each time; the judge's scores and MAUVE are stored on disk. A failure does not stop the
other measures: it is noted in the results.
"""

import functools
import importlib
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.api import LanguageModel
from adlm.data.preparation import prepare
from adlm.errors import require
from adlm.evaluation import data_facts, write_result
from adlm.evaluation.intervals import RESAMPLES, Interval, bootstrap_mean, bootstrap_ratio, student
from adlm.evaluation.judge import Judge, ReadingRule, Scored, digest, judge_key, judge_samples, open_judge
from adlm.evaluation.perplexity import EVALUATION_SEED, own_data
from adlm.io.paths import write_atomically
from adlm.schema import Config, EvalConfig
from adlm.training.parallel import World

if TYPE_CHECKING:
    from adlm.evaluation.evaluate import Setting

NGRAMS = (1, 2, 3)
SHARED = 4
DEFINITIONS = {
    "entropy": "entropy in nats of a sample's own histogram of tokens (the whole sequence, ends included), mean over"
    " samples; as in the public release",
    **{f"distinct_{n}": f"distinct {n}-grams of tokens / all {n}-grams of a sample, mean over samples" for n in NGRAMS},
    f"shared_{SHARED}": f"fraction of a sample's {SHARED}-grams of tokens that another sample also holds, mean",
}  # fmt: skip
GEN_PPL = "exp(nats per token) of the samples under the judge; all scored tokens of all samples count alike"
# Settings of mauve-text; with fewer than ENOUGH texts per side, histograms have few cells and the score says little.
SCALE, POINTS, SEED, ENOUGH = 5.0, 25, 25, 500
MAUVE = (
    "MAUVE of mauve-text: k-means with n/10 cells on l2-normalised features kept to 90% of their variance,"
    f" scale {SCALE:g}, seed {SEED}; features: last hidden state at the last token; interval: 1.96 standard deviations"
    " of a bootstrap given the cells"
)


@dataclass(frozen=True)
class Evaluation:
    """The state that all stages share: the command's settings, the model, the folder, and the results so far."""

    cfg: Config
    lm: LanguageModel
    ranks: World
    folder: Path
    results: dict[str, Any]

    def say(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, flush=True)

    def note(self, text: str) -> None:
        self.results["notes"].append(text)

    def save(self) -> None:
        if self.ranks.is_main:
            write_result(self.folder / "results.json", self.results)


@dataclass(frozen=True)
class SequenceSet:
    """Samples of a setting, or sequences of the data, for stage 2."""

    label: str
    key: str
    """Fingerprint that identifies the sequences."""
    sequences: list[tuple[int, list[int]]]
    """(seed or index, tokens)."""


def judge_name(e: EvalConfig) -> str:
    """Name of the judge; empty for none."""
    return "" if e.judge == "none" else e.judge


def measure_all(ev: Evaluation, settings: list["Setting"], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Fill in the metrics of every setting and of the data, and save after each."""
    results, judge = ev.results, judge_name(ev.cfg.eval)
    sets = [SequenceSet(s.label, s.identity, [(x["seed"], x["tokens"]) for x in samples[s.label]]) for s in settings]
    data = reference_sequences(ev, len(settings[0].request.tokens))
    everything = [*([data] if data else []), *sets]
    entries = [*([results["reference"]] if data else []), *results["settings"]]
    for found, entry in zip(everything, entries):
        measured = measure_tokens(tokens for _, tokens in found.sequences)
        entry["metrics"] = {name: list(interval) for name, interval in measured.items()}
    ev.save()
    if not judge:
        return
    results["definitions"] = {"gen_ppl": GEN_PPL, **results["definitions"]}
    scored = score_all(ev, everything, entries)
    if data is not None and not results["failed"] and mauve_possible(ev, everything):
        results["definitions"]["mauve"] = f"{MAUVE}; features of {judge}"
        n = ev.cfg.sampling.n
        if len(data.sequences) < ENOUGH or n < ENOUGH:
            ev.note(f"MAUVE of {n} samples and {len(data.sequences)} of the data says little: thousands are usual")
        compare(ev, scored, data, sets)
    ev.save()


def score_all(ev: Evaluation, sets: list[SequenceSet], entries: list[dict[str, Any]]) -> dict[str, Scored]:
    """The judge's scores of every set, by label; fills in gen_ppl, and notes a judge that fails."""
    e, results, name = ev.cfg.eval, ev.results, judge_name(ev.cfg.eval)
    opened = functools.cache(functools.partial(open_judge, name, ev.ranks.device))
    rule = ReadingRule(e.judge_rule, ev.lm.tokenizer, ev.lm.length)
    folder = ev.folder / "scores" / judge_key(name, rule)
    scored: dict[str, Scored] = {}
    try:
        for found, entry in zip(sets, entries):
            arguments = (opened, rule, found.sequences, folder / found.key, e, ev.ranks)
            of = scored[found.label] = judge_samples(*arguments, found.label)
            if of.tokens_N.sum() > 0:
                perplexity = bootstrap_ratio(of.nats_N, of.tokens_N).through(lambda nats: math.exp(min(nats, 700.0)))
                entry["metrics"]["gen_ppl"] = list(perplexity)
                entry["judged_tokens"] = int(of.tokens_N.sum())
            ev.save()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        results["failed"] = " ".join(str(error).split())
        ev.note(results["failed"])
    results["judge"] |= judge_facts(folder / "judge.json", opened, ev)
    return scored


def judge_facts(path: Path, opened: Callable[[], Judge], ev: Evaluation) -> dict[str, Any]:
    """Facts about the judge, stored beside its scores, since a rerun may not need to open it."""
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if ev.results["failed"] or not ev.ranks.is_main:
        return {}
    facts = {"kind": "", **opened().facts, "context": opened().context, "precision": "fp32"}
    write_atomically(path, json.dumps(facts))
    return facts


def reference_sequences(ev: Evaluation, length: int) -> SequenceSet | None:
    """As many sequences of the data as there are samples, of the samples' length and the same for all models; None if
    there is no data."""
    cfg, lm, results = ev.cfg, ev.lm, ev.results
    try:
        with ev.ranks.main_first():
            blocks = prepare(own_data(lm.loaded, cfg.data), lm.tokenizer, lm.length, "valid")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        ev.note(f"nothing to compare with: {reason}")
        ev.say(f"note: {results['notes'][-1]}")
        return None
    n = min(len(blocks), cfg.sampling.n)
    indices = np.sort(np.random.default_rng(EVALUATION_SEED).permutation(len(blocks))[:n])
    ends = np.full(n, blocks.length) if blocks.lengths is None else blocks.lengths[indices]
    kept = [
        (int(i), tokens[: min(int(end), length)].tolist())
        for i, tokens, end in zip(indices, blocks.rows(indices), ends)
    ]
    results["reference"] = {"label": "the data itself", "data": data_facts(blocks), "rows": n, "metrics": {}}
    return SequenceSet("data", digest([blocks.fingerprint, lm.tokenizer.fingerprint, length]), kept)


# Measures without a judge: one number per sample, so that the same bootstrap works for all


def entropy(tokens: Sequence[int]) -> float:
    """The entropy H = -sum_v f_v ln f_v, with f the frequencies of tokens in this sequence."""
    counts = np.unique(np.asarray(tokens), return_counts=True)[1]
    f_V = counts / counts.sum()
    return float(-(f_V * np.log(f_V)).sum())


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(n))))


def distinct(tokens: Sequence[int], n: int) -> float:
    """The ratio of distinct n-grams to all n-grams; 1 for a sequence without n-grams."""
    found = ngrams(tokens, n)
    return len(set(found)) / len(found) if found else 1.0


def shared(samples: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """For each sample, the fraction of its n-grams that also occur in another sample."""
    per_sample = [ngrams(tokens, n) for tokens in samples]
    holders = Counter(gram for grams in per_sample for gram in set(grams))
    return np.array([np.mean([holders[g] > 1 for g in grams]) if grams else 0.0 for grams in per_sample])


def measure_tokens(samples: Iterable[Sequence[int]]) -> dict[str, Interval]:
    """Measure all of DEFINITIONS, each with its bootstrap interval over samples."""
    texts = list(samples)
    values = {"entropy": np.array([entropy(tokens) for tokens in texts])}
    values |= {f"distinct_{n}": np.array([distinct(tokens, n) for tokens in texts]) for n in NGRAMS}
    values[f"shared_{SHARED}"] = shared(texts, SHARED)
    return {name: bootstrap_mean(per_sample) for name, per_sample in values.items()}


# MAUVE (Pillutla et al., 2021): how much two sets of texts overlap, as areas under a divergence curve of histograms.
#
# The score is computed by mauve-text, for comparable numbers; we compute the features, in batches (judge.py). Both sets
# are quantised together with k-means; given those cells, resampling texts means drawing from the two histograms, so the
# bootstrap needs no new clustering. A resample contains the sampling noise twice and is lower on average, so we use its
# spread and not its quantiles. Only compare scores with the same features, number of texts and script.


def mauve_available() -> bool:
    return importlib.util.find_spec("mauve") is not None


def mauve_possible(ev: Evaluation, sets: list[SequenceSet]) -> bool:
    """Whether MAUVE can be computed; the reason is noted if not."""
    if not mauve_available():
        ev.note("no MAUVE: pip install 'adlm[mauve]'")
        return False
    enough = min(len(found.sequences) for found in sets) >= 2
    if not enough:
        ev.note("no MAUVE: it needs at least 2 samples, and better thousands")
    return enough


def compare(ev: Evaluation, scored: dict[str, Scored], data: SequenceSet, sets: list[SequenceSet]) -> None:
    """Add the MAUVE of every setting against the data; ranks divide the settings, and results are stored on disk."""
    e, ranks = ev.cfg.eval, ev.ranks
    judge = judge_key(judge_name(e), ReadingRule(e.judge_rule, ev.lm.tokenizer, ev.lm.length))
    try:
        package = version("mauve-text")
    except PackageNotFoundError:
        package = ""

    def path(of: SequenceSet) -> Path:
        what = [judge, data.key, [i for i, _ in data.sequences], of.key, [i for i, _ in of.sequences], package]
        return ev.folder / "mauve" / f"{of.label}-{digest(what)}.json"

    for of in sets[ranks.rank :: ranks.size]:
        if not path(of).is_file():
            score, cells = mauve(scored[data.label].features_ND, scored[of.label].features_ND)
            write_atomically(path(of), json.dumps({"score": list(score), "cells": cells}))
    ranks.barrier()
    for of, entry in zip(sets, ev.results["settings"]):
        found = json.loads(path(of).read_text(encoding="utf-8"))
        entry["metrics"]["mauve"] = found["score"]
        entry["mauve_cells"] = found["cells"]


def mauve(reference_ND: np.ndarray, samples_ND: np.ndarray) -> tuple[Interval, int]:
    """The score of two sets of features, human texts first, and the number of cells."""
    for name, features in (("reference", reference_ND), ("samples", samples_ND)):
        require(len(features) >= 2, f"MAUVE needs at least 2 texts a side, got {len(features)} as {name}")
    package = importlib.import_module("mauve")
    found = package.compute_mauve(
        p_features=reference_ND,
        q_features=samples_ND,
        seed=SEED,
        mauve_scaling_factor=SCALE,
        divergence_curve_discretization_size=POINTS,
        verbose=False,
    )
    rng = np.random.default_rng(0)
    p_RK = rng.multinomial(len(reference_ND), found.p_hist, size=RESAMPLES) / len(reference_ND)
    q_RK = rng.multinomial(len(samples_ND), found.q_hist, size=RESAMPLES) / len(samples_ND)
    half = student(math.inf) * float(area(p_RK, q_RK).std(ddof=1))
    score = float(found.mauve)
    return Interval(score, max(0.0, score - half), min(1.0, score + half)), int(found.num_buckets)


def area(p_RK: np.ndarray, q_RK: np.ndarray) -> np.ndarray:
    """The MAUVE of pairs of histograms: with r = w p + (1-w) q, the area under (exp(-c KL(q|r)), exp(-c KL(p|r)))."""
    x, y = [np.ones(len(p_RK))], [np.zeros(len(p_RK))]
    for w in np.linspace(1e-6, 1 - 1e-6, POINTS):
        r_RK = w * p_RK + (1 - w) * q_RK
        x.append(np.exp(-SCALE * divergence(q_RK, r_RK)))
        y.append(np.exp(-SCALE * divergence(p_RK, r_RK)))
    x.append(np.zeros(len(p_RK)))
    y.append(np.ones(len(p_RK)))
    # from w = 0 to 1, x falls and y rises: the area is the same along either axis
    return np.asarray(-np.trapezoid(np.stack(y), np.stack(x), axis=0))


def divergence(p_RK: np.ndarray, r_RK: np.ndarray) -> np.ndarray:
    """The divergence KL(p | r); cells with p = 0 contribute 0."""
    ratio = np.divide(p_RK, r_RK, out=np.ones_like(p_RK), where=p_RK > 0)
    return (p_RK * np.log(ratio)).sum(-1)

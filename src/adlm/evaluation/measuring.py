"""Stage 2 of `adlm evaluate`: every measure of every setting, and of the data itself.

What costs little is computed each time; scores of the judge and MAUVE are kept on disk. Nothing that fails here stops
the rest: it is noted in the results.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from adlm.api import LanguageModel
from adlm.data import prepare
from adlm.evaluation import mauve, quality
from adlm.evaluation.bootstrap import Interval, bootstrap_ratio
from adlm.evaluation.generation import Setting
from adlm.evaluation.judge import Judge, Scored, open_judge
from adlm.evaluation.perplexity import own_data
from adlm.evaluation.results import data_facts, write_result
from adlm.evaluation.scores import digest, judge_key, judge_samples
from adlm.io.paths import write_atomically
from adlm.schema import Config, EvalConfig
from adlm.training.parallel import World

GEN_PPL = "exp(nats per token) of the samples under the judge; all scored tokens of all samples count alike"


@dataclass(frozen=True)
class Rows:
    """Samples of a setting, or rows of the data, as stage 2 reads them."""

    label: str
    key: str
    """Fingerprint: what these rows are."""
    rows: list[tuple[int, list[int]]]
    """(seed or index, tokens)."""


def judge_name(e: EvalConfig) -> str:
    return "" if e.judge == "none" else e.judge


def say(ranks: World, text: str) -> None:
    if ranks.is_main:
        print(text, flush=True)


def save(ranks: World, folder: Path, results: dict[str, Any]) -> None:
    if ranks.is_main:
        write_result(folder / "results.json", results)


def measure_all(
    cfg: Config,
    lm: LanguageModel,
    ranks: World,
    folder: Path,
    settings: list[Setting],
    samples: dict[str, list[dict[str, Any]]],
    results: dict[str, Any],
) -> None:
    """Fill in the metrics of every setting and of the data; saved after each."""
    e = cfg.eval
    sets = [Rows(s.label, s.identity, [(x["seed"], x["tokens"]) for x in samples[s.label]]) for s in settings]
    data = reference_rows(cfg, lm, ranks, len(settings[0].request.tokens), results) if e.reference else None
    everything = [*([data] if data else []), *sets]
    entries = [*([results["reference"]] if data else []), *results["settings"]]
    for rows, entry in zip(everything, entries):
        entry["metrics"] = plain(quality.measure_tokens(tokens for _, tokens in rows.rows))
    features = e.features or judge_name(e)
    wanted = e.mauve != "false" and data is not None and bool(features)
    if wanted and not mauve.available():
        results["notes"].append("no MAUVE: pip install 'adlm[mauve]'")
        wanted = False
    if wanted and min(len(rows.rows) for rows in everything) < 2:
        results["notes"].append("no MAUVE: it needs at least 2 samples, and better thousands")
        wanted = False
    save(ranks, folder, results)
    if judge_name(e):
        results["definitions"] = {"gen_ppl": GEN_PPL, **results["definitions"]}
    scored: dict[str, dict[str, Scored]] = {}
    for name in dict.fromkeys(filter(None, (judge_name(e), features if wanted else ""))):
        opened = functools.cache(functools.partial(open_judge, name, ranks.device))
        key = judge_key(name, e.judge_rule, lm.length)
        scored[name] = {}
        try:
            for rows, entry in zip(everything, entries):
                at = folder / "scores" / key / rows.key
                arguments = (e.judge_rule, lm.tokenizer, rows.rows, lm.length, at, e.batch_size, ranks)
                found = scored[name][rows.label] = judge_samples(opened, *arguments, rows.label)
                if name == judge_name(e) and found.tokens_N.sum() > 0:
                    entry["metrics"]["gen_ppl"] = list(bootstrap_ratio(found.nats_N, found.tokens_N).through(exp))
                    entry["judged_tokens"] = int(found.tokens_N.sum())
                save(ranks, folder, results)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            results["failed"] = " ".join(str(error).split())
            results["notes"].append(results["failed"])
        if name == judge_name(e):
            results["judge"] |= judge_facts(folder / "scores" / key / "judge.json", opened, ranks, results["failed"])
    if wanted and not results["failed"] and data is not None:
        results["definitions"]["mauve"] = f"{mauve.DEFINITION}; features of {features}"
        if len(data.rows) < mauve.ENOUGH or cfg.sampling.n < mauve.ENOUGH:
            results["notes"].append(
                f"MAUVE of {cfg.sampling.n} samples and {len(data.rows)} rows of data says little: thousands are usual"
            )
        compare(scored[features], data, sets, folder, judge_key(features, e.judge_rule, lm.length), ranks, results)
    save(ranks, folder, results)


def exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def plain(metrics: dict[str, Interval]) -> dict[str, list[float | None]]:
    return {name: list(interval) for name, interval in metrics.items()}


def judge_facts(path: Path, opened: Callable[[], Judge], ranks: World, failed: str) -> dict[str, Any]:
    """What is known of the judge; kept beside its scores, since a rerun may not need to open it."""
    if path.is_file():
        return json.loads(path.read_text())
    if failed or not ranks.is_main:
        return {}
    facts = {"kind": "", **opened().facts, "context": opened().context, "precision": "fp32"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(facts))
    return facts


def reference_rows(cfg: Config, lm: LanguageModel, ranks: World, length: int, results: dict[str, Any]) -> Rows | None:
    """As many rows of the data as there are samples, chosen by eval.seed, cut to the samples' length."""
    try:
        with ranks.main_first():
            data = own_data(lm.loaded, cfg.data)
            blocks = prepare(data, lm.tokenizer, lm.length, "valid")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        results["notes"].append(f"nothing to compare with: {reason}")
        if cfg.eval.mauve == "true":
            results["failed"] = f"eval.mauve=true needs data to compare with: {reason}"
        say(ranks, f"note: {results['notes'][-1]}")
        return None
    n = min(len(blocks), cfg.sampling.n)
    indices = np.sort(np.random.default_rng(cfg.eval.seed).permutation(len(blocks))[:n])
    ends = np.full(n, blocks.length) if blocks.lengths is None else blocks.lengths[indices]
    rows = [(int(i), row[: min(int(end), length)].tolist()) for i, row, end in zip(indices, blocks.rows(indices), ends)]
    results["reference"] = {"label": "the data itself", "data": data_facts(blocks), "rows": n, "metrics": {}}
    return Rows("data", digest([blocks.fingerprint, lm.tokenizer.fingerprint, length]), rows)


def compare(
    scored: dict[str, Scored],
    data: Rows,
    sets: list[Rows],
    folder: Path,
    judge: str,
    ranks: World,
    results: dict[str, Any],
) -> None:
    """MAUVE of every setting against the data; ranks share the settings, results are kept on disk."""

    def path(rows: Rows) -> Path:
        what = [judge, data.key, [i for i, _ in data.rows], rows.key, [i for i, _ in rows.rows], mauve_version()]
        return folder / "mauve" / f"{rows.label}-{digest(what)}.json"

    for rows in sets[ranks.rank :: ranks.size]:
        if not path(rows).is_file():
            found = mauve.mauve(scored[data.label].features_ND, scored[rows.label].features_ND)
            path(rows).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path(rows), json.dumps({"score": list(found.score), "cells": found.cells}))
    ranks.barrier()
    for rows, entry in zip(sets, results["settings"]):
        found = json.loads(path(rows).read_text())
        entry["metrics"]["mauve"] = found["score"]
        entry["mauve_cells"] = found["cells"]


def mauve_version() -> str:
    try:
        return version("mauve-text")
    except PackageNotFoundError:
        return ""

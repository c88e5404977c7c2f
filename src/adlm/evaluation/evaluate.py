"""`adlm evaluate`: samples, their quality with intervals, and a report of frontiers.

Stage 1 draws samples to disk (generation.py), stage 2 measures them (measuring.py), stage 3 writes
results.json and report.html. Every stage keeps what it has done under a fingerprint of weights, settings and judge, so
that a rerun does only what is missing; what fails in stage 2 is noted, and the rest is still reported.
"""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from adlm.api import LanguageModel
from adlm.errors import require
from adlm.evaluation import mauve, quality
from adlm.evaluation.frontier import MEASURES, build_report, figure
from adlm.evaluation.generation import Setting, draw_samples, make_settings
from adlm.evaluation.judge import RULES, is_ours, locate
from adlm.evaluation.measuring import judge_name, measure_all, save, say
from adlm.evaluation.perplexity import open_checkpoint
from adlm.evaluation.results import model_facts, versions
from adlm.evaluation.sweep import settings_of
from adlm.io.paths import writable_folder, write_atomically
from adlm.reporting.html import write
from adlm.reporting.reveal import watch
from adlm.schema import Config, EvalConfig
from adlm.training.parallel import World, world

# Texts of each setting in the report, and reveals in all.
SHOWN, REVEALS = 3, 3


def run_evaluate(cfg: Config) -> dict[str, Any]:
    """`adlm evaluate CHECKPOINT`: the results are printed, written as JSON and as a report, and returned."""
    e = cfg.eval
    require(bool(e.checkpoint), "which model? adlm evaluate FOLDER (eval.checkpoint)")
    check_packages(e)
    folder = writable_folder("eval.out", result_folder(e))
    with world(cfg.train) as ranks:
        lm = LanguageModel(open_checkpoint(cfg, ranks))
        lm.weights_digest  # noqa: B018 (before an engine touches the model)
        settings = make_settings(lm, settings_of(e, cfg.sampling), folder / "samples")
        samples: dict[str, list[dict[str, Any]]] = {}
        results = describe(cfg, lm, ranks)
        for s in settings:
            samples[s.label], drawn = draw_samples(lm, s, ranks)
            results["settings"].append(sample_facts(s, samples[s.label]))
            say(ranks, f"{s.label}: {s.config.n} samples, {drawn} drawn now, {s.config.n - drawn} found in {s.path}")
        save(ranks, folder, results)
        measure_all(cfg, lm, ranks, folder, settings, samples, results)
        if ranks.is_main:
            report(lm, folder, settings, samples, results)
            if e.release_json:
                write_release(Path(e.release_json), lm, results["settings"][0], samples[settings[0].label])
            show(results)
            print(f"written to {folder / 'results.json'} and {(folder / 'report.html').resolve().as_uri()}")
        require(not results["failed"], f"{results['failed']}; the samples and all other numbers are kept in {folder}")
        return results


def check_packages(e: EvalConfig) -> None:
    """Everything that can be known to fail before samples are drawn."""
    for name in {judge_name(e), e.features or judge_name(e)} - {""}:
        place = locate(name)
        if not is_ours(place) and importlib.util.find_spec("transformers") is None:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    if e.mauve == "true" and not mauve.available():
        raise ModuleNotFoundError("No module named 'mauve'", name="mauve")
    require(e.mauve != "true" or bool(e.features or judge_name(e)), "eval.mauve=true needs eval.features or eval.judge")
    require(e.mauve != "true" or e.reference, "eval.mauve=true compares with the data: it needs eval.reference=true")


def result_folder(e: EvalConfig) -> Path:
    """eval.out; else beside the release's JSON, if that is asked for; else in the checkpoint's folder."""
    if e.out:
        return Path(e.out)
    if e.release_json:
        return Path(e.release_json).with_suffix("")
    place = Path(e.checkpoint)
    return place / "evaluate" if place.is_dir() else place.with_name(f"{place.stem}-evaluate")


def describe(cfg: Config, lm: LanguageModel, ranks: World) -> dict[str, Any]:
    """What the numbers depend on, before there are any."""
    e, judge = cfg.eval, judge_name(cfg.eval)
    return {
        **model_facts(lm.loaded, e.checkpoint, e.ema),
        "weights_sha256": lm.weights_digest,
        "samples": cfg.sampling.n,
        "seed": cfg.sampling.seed,
        "judge": {"name": judge, "rule": f"{e.judge_rule}: {RULES[e.judge_rule]}"} if judge else None,
        "definitions": dict(quality.DEFINITIONS),
        "settings": [],
        "reference": None,
        "notes": [],
        "failed": "",
        "versions": versions(ranks.device),
    }


def sample_facts(s: Setting, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Entry of results["settings"]; metrics are added by stage 2."""
    c = s.config
    return {
        "label": s.label,
        "sampler": c.sampler,
        "steps": c.steps,
        "temperature": c.temperature,
        "top_p": c.top_p,
        "fingerprint": s.identity,
        "file": s.path.name,
        "nfe": float(np.mean([x["nfe"] for x in samples])),
        "seconds": float(np.mean([x["spent"] for x in samples])),
        "sampling": asdict(c),
        "metrics": {},
    }


# Stage 3


def report(
    lm: LanguageModel,
    folder: Path,
    settings: list[Setting],
    samples: dict[str, list[dict[str, Any]]],
    results: dict[str, Any],
) -> None:
    texts = {s.label: [x["text"] for x in samples[s.label][:SHOWN]] for s in settings}
    first_of = {s.config.sampler: s for s in reversed(settings)}
    reveals = {}
    for s in [s for s in settings if first_of[s.config.sampler] is s][:REVEALS]:
        reveals[f"{s.label}, seed {s.config.seed}"] = watch(lm, s.request)[0]
    write(folder / "report.html", build_report(results, texts, reveals))


def write_release(path: Path, lm: LanguageModel, entry: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """The JSON of the public release's sample_eval; null stands for what could not be measured."""
    metrics = entry["metrics"]
    document = {
        "gen_ppl": metrics.get("gen_ppl", [None])[0],
        "entropy": metrics["entropy"][0],
        "MAUVE": metrics.get("mauve", [None])[0],
        "entropies": [quality.entropy(x["tokens"]) for x in samples],
        "text_samples": [lm.tokenizer.decode(x["tokens"]) for x in samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=4))


def show(results: dict[str, Any]) -> None:
    """The table on the terminal, notes on stderr."""
    names = [m for m in MEASURES if any(m in p["metrics"] for p in results["settings"])]
    table = Table("setting", *(MEASURES[m][0] for m in names), "evaluations", "seconds", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for p in [*filter(None, [results["reference"]]), *results["settings"]]:
        cells = [cell(p, m) if m in p["metrics"] else "" for m in names]
        cost = (f"{p['nfe']:.1f}", f"{p['seconds']:.3f}") if "nfe" in p else ("", "")
        table.add_row(p["label"], *cells, *cost)
    console = Console()
    (console if console.is_terminal else Console(width=190)).print(table)
    for note in results["notes"]:
        print(f"note: {note}", file=sys.stderr)


def cell(p: dict[str, Any], measure: str) -> str:
    """A value with half the length of its interval."""
    _, low, high = p["metrics"][measure]
    return figure(p, measure) + ("" if low is None else f" +-{(high - low) / 2:.2g}")

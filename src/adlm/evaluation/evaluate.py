"""`adlm evaluate`: samples over a sweep of settings, their quality with intervals, and a report of frontiers.

One value of generative perplexity says little, since a lower temperature improves it and reduces entropy; a sweep shows
the frontier: `adlm evaluate RUN sampling.steps=64,128 sampling.temperature=0.8,1`.

Stage 1 draws samples to disk (here), stage 2 measures them (measures.py), stage 3 writes results.json, release.json and
report.html (evaluate_report.py). Every stage stores its results under a fingerprint of weights, settings and judge, so
that a rerun does only what is missing. Failures in stage 2 are noted, and the rest is still reported.

Sample i of a setting is a function of (weights, settings, seed + i), so the file of samples records the progress, and
ranks divide the work, as in `adlm sample` (api/command.py).
"""

import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from adlm.api import LanguageModel
from adlm.api.command import collect, draw, fingerprint, part_of, record, request_of
from adlm.engine import Request
from adlm.errors import require
from adlm.evaluation import beside, model_facts, versions
from adlm.evaluation.evaluate_report import build_report, show
from adlm.evaluation.judge import is_ours, locate
from adlm.evaluation.measures import DEFINITIONS, Evaluation, entropy, judge_name, measure_all
from adlm.evaluation.perplexity import open_checkpoint
from adlm.io import progress
from adlm.io.load import locate as locate_checkpoint
from adlm.io.paths import writable_folder, write_atomically
from adlm.reporting import watch
from adlm.schema import Config, EvalConfig, SamplingConfig
from adlm.schema_commands import JUDGE_RULES
from adlm.tables import SAMPLERS
from adlm.training.parallel import World, world

# In the report: texts of each setting, and step-by-step views ("reveals") in all.
SHOWN, REVEALS = 3, 3
Sample = dict[str, Any]
"""A line of a file of samples: a Generation, the fingerprint of its setting and its seconds."""


@dataclass(frozen=True)
class Setting:
    """One point of a sweep and the file of its samples."""

    label: str
    config: SamplingConfig
    request: Request
    identity: str
    """Fingerprint of weights, tokenizer and settings."""
    path: Path

    @property
    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.n)


def run_evaluate(cfg: Config, sweep: Sequence[SamplingConfig] = ()) -> dict[str, Any]:
    """`adlm evaluate CHECKPOINT`: print the results, write them as JSON and as a report, and return them.

    `sweep`: the settings to compare; by default only those of cfg.sampling.
    """
    e = cfg.eval
    require(locate_checkpoint(e.checkpoint).exists(), f"eval.checkpoint={e.checkpoint!r} does not exist")
    check_packages(e)
    folder = writable_folder("out", result_folder(cfg))
    with world(cfg.train) as ranks:
        lm = LanguageModel(open_checkpoint(cfg, ranks))
        lm.weights_digest  # noqa: B018 (before an engine touches the model)
        settings = make_settings(lm, sweep or [cfg.sampling], folder / "samples")
        samples: dict[str, list[Sample]] = {}
        evaluation = Evaluation(cfg, lm, ranks, folder, describe(cfg, lm, ranks))
        results = evaluation.results
        for s in settings:
            samples[s.label], drawn = draw_samples(lm, s, ranks)
            results["settings"].append(sample_facts(s, samples[s.label]))
            n = s.config.n
            evaluation.say(f"{s.label}: {n} samples, {drawn} drawn now, {n - drawn} found in {s.path}")
        evaluation.save()
        measure_all(evaluation, settings, samples)
        if ranks.is_main:
            report(evaluation, settings, samples)
            document = release_document(lm, results["settings"][0], samples[settings[0].label])
            for path in (folder / "release.json", *([Path(cfg.out)] if cfg.out.endswith(".json") else [])):
                write_atomically(path, document)
            show(results)
            print(f"written to {folder / 'results.json'} and {(folder / 'report.html').resolve().as_uri()}")
        require(not results["failed"], f"{results['failed']}; the samples and all other numbers are kept in {folder}")
        return results


def check_packages(e: EvalConfig) -> None:
    """Refuse settings that are known to fail, before samples are drawn."""
    place = locate(name) if (name := judge_name(e)) else ""
    if place and not (is_ours(place) or place.endswith(".gguf")) and importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")


def result_folder(cfg: Config) -> Path:
    """The folder `out`; beside the file, if `out` is one (FILE.json, the release's document); else in the checkpoint's
    folder."""
    if cfg.out:
        return Path(cfg.out.removesuffix(".json"))
    place = beside(cfg.eval.checkpoint)
    return place / "evaluate" if not place.is_file() else place.with_name(f"{place.stem}-evaluate")


def describe(cfg: Config, lm: LanguageModel, ranks: World) -> dict[str, Any]:
    """The results before any measurement: everything that the numbers depend on."""
    e, judge = cfg.eval, judge_name(cfg.eval)
    return {
        **model_facts(lm.loaded, e.checkpoint, e.ema),
        "weights_sha256": lm.weights_digest,
        "samples": cfg.sampling.n,
        "seed": cfg.sampling.seed,
        "judge": {"name": judge, "rule": f"{e.judge_rule}: {JUDGE_RULES[e.judge_rule]}"} if judge else None,
        "definitions": dict(DEFINITIONS),
        "settings": [],
        "reference": None,
        "notes": [],
        "failed": "",
        "versions": versions(ranks.device),
    }


def sample_facts(s: Setting, samples: list[Sample]) -> dict[str, Any]:
    """An entry of results["settings"]; metrics are added by stage 2."""
    c = s.config
    return {
        "label": s.label,
        "sampler": c.sampler,
        "steps": c.steps,
        "steps_matter": SAMPLERS.load(c.sampler).steps_matter,
        "temperature": c.temperature,
        "top_p": c.top_p,
        "fingerprint": s.identity,
        "file": s.path.name,
        "nfe": float(np.mean([x["nfe"] for x in samples])),
        "seconds": float(np.mean([x["spent"] for x in samples])),
        "sampling": asdict(c),
        "metrics": {},
    }


# Stage 1


def make_settings(lm: LanguageModel, sweep: Sequence[SamplingConfig], folder: Path) -> list[Setting]:
    """Settings with their files, without duplicates. The file name contains the fingerprint, so that other weights
    never read it."""
    found: list[Setting] = []
    others = [f.name for f in fields(SamplingConfig) if f.name not in ("sampler", "steps", "temperature", "top_p")]
    varied = [name for name in others if len({getattr(c, name) for c in sweep}) > 1]
    for c in sweep:
        request = request_of(lm, c)
        sampler = request.settings.sampler  # a causal model has its own
        c = replace(c, sampler=sampler, steps=c.steps if SAMPLERS.load(sampler).steps_matter else sweep[0].steps)
        name, identity = label(c, varied), fingerprint(lm, c)
        if identity not in [s.identity for s in found]:
            found.append(Setting(name, c, request, identity, folder / f"{name}-{identity[:8]}.jsonl"))
    return found


def label(c: SamplingConfig, varied: Sequence[str] = ()) -> str:
    """Name of a setting in files and tables. `varied`: further settings that the sweep varies."""
    steps = f"-T{c.steps}" if SAMPLERS.load(c.sampler).steps_matter else ""
    more = "".join(f"-{name}{exact(getattr(c, name))}" for name in varied)
    return f"{c.sampler}{steps}-temp{exact(c.temperature)}-p{exact(c.top_p)}{more}"


def exact(number: float) -> str:
    """The shortest text of a number that is still exact: samples are stored by label."""
    return short if float(short := f"{number:g}") == number else repr(number)


def draw_samples(lm: LanguageModel, setting: Setting, ranks: World) -> tuple[list[Sample], int]:
    """The samples of a setting in the order of their seeds, and how many of them were drawn now."""
    have = collect(setting.path, setting.identity, ranks)
    missing = [seed for seed in setting.seeds if seed not in have]
    mine = missing[ranks.rank :: ranks.size]
    size = setting.config.batch_size
    if mine and ranks.device.type == "cuda" and SAMPLERS.load(setting.config.sampler).steps_matter:
        # compile and capture graphs first: the drawing is timed
        few = replace(setting.request, settings=replace(setting.request.settings, steps=2))
        for _ in draw(lm, few, list(range(min(size, len(mine)))), size):
            pass
    part = part_of(setting.path, ranks)
    with progress(f"samples {setting.label}", len(mine), ranks.is_main) as advance:
        before = time.perf_counter()
        for text in draw(lm, setting.request, mine, size):
            now = time.perf_counter()
            # the sum over samples is the time of this setting: shared batches count once
            record(part, text, setting.identity, spent=round(now - before, 4))
            before = now
            advance()
    have = collect(setting.path, setting.identity, ranks)
    return [have[seed] for seed in setting.seeds], len(missing)


# Stage 3


def report(evaluation: Evaluation, settings: list[Setting], samples: dict[str, list[Sample]]) -> None:
    """Write report.html, which also shows one text of each sampler step by step."""
    texts = {s.label: [x["text"] for x in samples[s.label][:SHOWN]] for s in settings}
    first_of = {s.config.sampler: s for s in reversed(settings)}
    reveals = {}
    for s in [s for s in settings if first_of[s.config.sampler] is s][:REVEALS]:
        reveals[f"{s.label}, seed {s.config.seed}"] = watch(evaluation.lm, s.request)[0]
    write_atomically(evaluation.folder / "report.html", build_report(evaluation.results, texts, reveals))


def release_document(lm: LanguageModel, entry: dict[str, Any], samples: list[Sample]) -> str:
    """The JSON of the public release's sample_eval; null for metrics that could not be measured."""
    metrics = entry["metrics"]
    document = {
        "gen_ppl": metrics.get("gen_ppl", [None])[0],
        "entropy": metrics["entropy"][0],
        "MAUVE": metrics.get("mauve", [None])[0],
        "entropies": [entropy(x["tokens"]) for x in samples],
        "text_samples": [lm.tokenizer.decode(x["tokens"]) for x in samples],
    }
    return json.dumps(document, indent=4)

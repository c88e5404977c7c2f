"""`adlm demo`: the whole package in a few minutes on a CPU, with nothing downloaded.

Trains a nano ADLM on Python's own documentation (experiment/demo.yaml) or on the user's own text
(`adlm demo my.txt`), validates it, and writes a report that opens in a browser. A second call finds the run folder and
rebuilds the report. finetuning.py builds its report from the same parts.
"""

import math
import re
import shlex
from pathlib import Path
from typing import Any

from adlm.api import LanguageModel, load
from adlm.config import as_yaml
from adlm.data.blocks import Blocks
from adlm.data.preparation import prepare
from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.evaluation.anchors import anchors_section
from adlm.io.paths import write_atomically
from adlm.reporting import (
    Html,
    Series,
    code,
    columns,
    details,
    line_chart,
    page,
    paragraph,
    reveal,
    reveal_script,
    section,
    table,
    tag,
    tiles,
    watch,
)
from adlm.schema import Config
from adlm.training.loop import train
from adlm.training.metrics import METRICS, read_metrics

HOW = "Every position starts as a mask; the sampler {sampler} reveals a few at each step, in any order."
AT_MOST = ": variational bounds, the true values are at most this high"
"""Added to the perplexities of a model that is not causal."""
# Held-out sequences that prompts are taken from.
HELD_OUT_READ = 8
Wishes = dict[str, dict[str, str]]
"""The texts that a report shows being written: label -> prompt or template. [MASK:3] is three holes."""


def run_demo(cfg: Config) -> dict[str, Any]:
    """Train (or find the trained run), write report.html, and print what to try next."""
    run = Path(cfg.out)
    trained = any(e["kind"] == "train" and e["step"] >= cfg.train.steps for e in read_metrics(run))
    if trained:
        print(f"{run} is trained already: rebuilding its report (remove the folder to start again)")
    else:
        print(f"Training {cfg.algo} on {text_name(cfg)}: {cfg.train.steps} steps on this machine, a few minutes")
    result = train(cfg)
    if not result.finished:
        return result._asdict()
    lm = load(run)
    facts = summary(cfg, read_metrics(run))
    valid = prepare(cfg.data, lm.tokenizer, cfg.model.length, "valid")
    path = run / "report.html"
    write_atomically(path, build_report(cfg, lm, valid, facts))
    kind = "" if cfg.model.causal else " (an upper bound)"
    print(f"\nValidation perplexity {facts['first_ppl']:,.0f} -> {facts['last_ppl']:,.1f}{kind}")
    print(f"Report: {path.resolve().as_uri()}\n\nTry next:")
    for command, what in next_commands(run):
        print(f"  {command}\n      {what}")
    return {**facts, "run": str(run), "report": str(path)}


def next_commands(run: Path) -> list[tuple[str, str]]:
    """What to try after the demo: commands with what they do."""
    model = shlex.quote(str(run))
    return [
        (f"adlm sample {model}", "draw texts from the model you just trained"),
        (f"adlm ppl {model} eval.draws=8", "its perplexity with a confidence interval"),
        ("adlm serve", "a page that shows texts appear; with the model that comes with the package"),
        ("adlm finetune YOUR.txt", "the model that comes with the package, taught your own text, with a report"),
    ]


def summary(cfg: Config, events: list[dict[str, Any]]) -> dict[str, float | int]:
    """The run in numbers, from its metrics file; seconds count optimizer steps only."""
    valid = [e for e in events if e["kind"] == "valid"]
    steps = [e for e in events if e["kind"] == "train"]
    require(bool(valid and steps), f"{Path(cfg.out) / METRICS} holds no record of the training, of which the report is")
    seconds, before = 0.0, 0
    for event in steps:
        seconds += (event["step"] - before) * cfg.train.global_batch_size * cfg.model.length / event["tokens_per_s"]
        before = event["step"]
    tokens = before * cfg.train.global_batch_size * cfg.model.length
    return {
        "first_ppl": valid[0]["ppl"],
        "last_ppl": valid[-1]["ppl"],
        "valid_nll": valid[-1]["nll"],
        "steps": before,
        "tokens": tokens,
        "training_seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds),
    }


def build_report(cfg: Config, lm: LanguageModel, valid: Blocks, facts: dict[str, Any]) -> str:
    """The page of the demo."""
    head = {
        "Validation perplexity": Html(f"{facts['last_ppl']:,.1f}<br><small>from {facts['first_ppl']:,.0f}</small>"),
        "Bits per token": Html(
            f"{facts['valid_nll'] / math.log(2):.2f}<br><small>{facts['valid_nll']:.3f} nats</small>"
        ),
    }
    samples = section(
        "Samples",
        *(part for label, wish in wishes(lm.tokenizer, valid).items() for part in player(cfg, lm, label, wish)),
        lead=f"{HOW.format(sampler=cfg.sampling.sampler)} After minutes of training expect the sound of the text rather"
        " than its sense.",
    )
    return report_page(
        "An anchored diffusion language model, trained here",
        f"{cfg.algo.upper()} on {text_name(cfg)}: text appears from masks in any order; the tokens that matter most,"
        " the anchors, are predicted by a network of their own.",
        tiles(head | run_tiles(facts, lm)),
        samples,
        cfg,
        lm,
        valid,
        next_commands(Path(cfg.out)),
    )


def report_page(
    title: str,
    subtitle: str,
    head: Html,
    samples: Html,
    cfg: Config,
    lm: LanguageModel,
    valid: Blocks,
    commands: list[tuple[str, str]],
) -> str:
    """A page about a training run: numbers, samples, curves, anchors, settings, what to try next."""
    return page(
        title,
        head,
        samples,
        section(
            "Learning",
            columns(*curves(read_metrics(Path(cfg.out)))),
            lead="Loss of the training batches, and perplexity on text held out of"
            f" training{AT_MOST * (not cfg.model.causal)}.",
        ),
        anchors_section(lm.loaded, valid) if lm.model.config.anchored and not lm.model.config.causal else "",
        configuration(cfg),
        section("Try next", table((), [(tag("code", command), what) for command, what in commands])),
        reveal_script(),
        subtitle=subtitle,
    )


def text_name(cfg: Config) -> str:
    """The name of the text for a reader: that of the file, or of the corpus."""
    return Path(cfg.data.path).name if cfg.data.name == "file" else cfg.data.name


def run_tiles(facts: dict[str, Any], lm: LanguageModel) -> dict[str, Html]:
    """The tiles of every report: time, speed and size."""
    minutes, seconds = divmod(round(facts["training_seconds"]), 60)
    return {
        "Training time": Html(f"{minutes} min {seconds:02d} s<br><small>{facts['steps']:,} steps</small>"),
        "Tokens per second": Html(f"{facts['tokens_per_s']:,}<br><small>{facts['tokens']:,} in all</small>"),
        "Parameters": Html(f"{lm.info['parameters']:,}<br><small>vocabulary {lm.info['vocab_size']:,}</small>"),
    }


def wishes(tokenizer: Tokenizer, valid: Blocks) -> Wishes:
    """The texts to write: one from nothing, one from the beginning of a held-out sentence, and one that fills a hole in
    another; for prompts with answers, the answers to held-out prompts."""
    if valid.starts is not None:
        asked = [valid[i][1:start] for i, start in enumerate(valid.starts[:HELD_OUT_READ].tolist())]
        prompts = [tokenizer.decode(tokens, skip_special=True) for tokens in sorted(asked, key=len)[:3]]
        return {f"Answering: {prompt[:60]}": {"prompt": prompt} for prompt in prompts if prompt}
    texts = (tokenizer.decode(valid[i], skip_special=True) for i in range(min(HELD_OUT_READ, len(valid))))
    pieces = re.split(r"(?<=[.!?])\s+|\n+", " ".join(texts))
    found = [words for piece in pieces[1:] if 8 <= len(words := piece.split()) <= 24] or [pieces[0].split()[:24]]
    begun, holed = found[0], found[min(1, len(found) - 1)]
    wanted: Wishes = {"Written from nothing": {}}
    if len(begun) >= 2:
        wanted["Continuing a prompt"] = {"prompt": " ".join(begun[: max(1, min(5, len(begun) // 2))])}
    if len(holed) >= 3:
        third = len(holed) // 3
        hidden = len(tokenizer.encode(" " + " ".join(holed[third:-third])))
        wanted["Filling a hole"] = {"template": f"{' '.join(holed[:third])}[MASK:{hidden}] {' '.join(holed[-third:])}"}
    return wanted


def player(cfg: Config, lm: LanguageModel, label: str, wish: dict[str, str]) -> list[Html]:
    """Show one text being written, step by step, under its label."""
    s = cfg.sampling
    chosen: dict[str, Any] = {
        "sampler": lm.sampler_of(s.sampler), "steps": s.steps, "temperature": s.temperature, "top_p": s.top_p,
        "eta": s.eta, "seed": s.seed, "length": 0 if "template" in wish else s.length,
    }  # fmt: skip
    try:
        snapshots, text = watch(lm, lm.request(**wish, **chosen))
    except ValueError as problem:  # the user's settings do not fit, such as sequences too short for the template
        return [tag("h3", label), paragraph(f"Left out: {problem}")]
    facts = f"{text.nfe} network evaluations, {text.seconds:.1f} s, seed {text.seed}"
    return [tag("h3", label), reveal(snapshots, label), paragraph(tag("small", facts))]


def curves(events: list[dict[str, Any]]) -> list[Html]:
    """Training loss and validation perplexity over steps."""
    train = [e for e in events if e["kind"] == "train"]
    valid = [e for e in events if e["kind"] == "valid"]
    names = {key for e in train for key in e} & {"nelbo", "nll", "score_entropy", "d3pm"}
    losses = [Series("bound", [(e["step"], e[name]) for e in train if name in e]) for name in sorted(names)]
    if any("anchor" in e for e in train):
        losses.append(Series("anchor term", [(e["step"], e["anchor"]) for e in train if "anchor" in e]))
    ppl = Series("validation", [(e["step"], e["ppl"]) for e in valid], marks=True)
    return [
        line_chart("Training loss", losses, "optimizer step", "nats per token"),
        line_chart("Validation perplexity", [ppl], "optimizer step", "perplexity", log_y=True),
    ]


def configuration(cfg: Config) -> Html:
    """The settings in four lines, and a full list that unfolds."""
    m, o, t = cfg.model, cfg.objective, cfg.train
    blocks = f"{m.n_blocks} + {m.n_denoiser_blocks}" if m.anchored else f"{m.n_blocks}"
    rows = [
        ("model", f"width {m.hidden_size}, {blocks} blocks, {m.n_heads} heads, sequences of {m.length} tokens"),
        ("objective", f"{o.name}, gamma {o.gamma:g}, anchors by {o.anchor_rule}, at {o.anchor_positions} positions"),
        ("optimizer", f"{cfg.optim.name}, rate {cfg.optim.lr:g}, {cfg.optim.schedule} after {cfg.optim.warmup} steps"),
        ("batch", f"{t.global_batch_size} sequences, {t.steps:,} steps, seed {cfg.seed}"),
    ]
    return section("Configuration", table((), rows), details("Every setting", code(as_yaml(cfg))))

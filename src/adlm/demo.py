"""`adlm demo`: the whole package in a few minutes on a CPU, with nothing downloaded.

Trains a nano ADLM on the documentation inside Python (experiment/demo.yaml), validates it, and writes a report that
opens in a browser. A second call finds the run folder and rebuilds the report.
"""

import math
from pathlib import Path
from typing import Any

from adlm.api import LanguageModel, load
from adlm.data.blocks import Blocks
from adlm.data.preparation import prepare
from adlm.evaluation.anchor_report import anchors_section
from adlm.io.paths import write_atomically
from adlm.reporting.chart import Series, line_chart
from adlm.reporting.html import (
    Html,
    code,
    columns,
    details,
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
from adlm.schema import Config, SamplingConfig, as_yaml
from adlm.training.loop import train
from adlm.training.metrics import read_metrics

# What the report shows being written: label -> template or prompt. Masks are holes, [MASK:3] is three of them.
SAMPLES: dict[str, dict[str, str]] = {
    "Written from nothing": {},
    "Continuing a prompt": {"prompt": "Return a new "},
    "Filling holes": {"template": "If the[MASK:6] is not[MASK:6], an[MASK:4] exception is raised."},
}


def run_demo(cfg: Config) -> dict[str, Any]:
    """Train (or find the trained run), write report.html, say what to try next."""
    run = Path(cfg.out)
    trained = any(e["kind"] == "train" and e["step"] >= cfg.train.steps for e in read_metrics(run))
    if trained:
        print(f"{run} is trained already: rebuilding its report (remove the folder to start again)")
    else:
        print(f"Training {cfg.algo} on {cfg.data.name}: {cfg.train.steps} steps on this machine, a few minutes")
    result = train(cfg)
    if not result.finished:
        return result._asdict()
    lm = load(run)
    facts = summary(cfg, read_metrics(run))
    valid = prepare(cfg.data, lm.tokenizer, cfg.model.length, "valid")
    path = run / "report.html"
    write_atomically(path, build_report(cfg, lm, valid, facts, read_metrics(run)))
    print(f"\nValidation perplexity {facts['first_ppl']:,.0f} -> {facts['last_ppl']:,.1f} (an upper bound)")
    print(f"Report: {path.resolve().as_uri()}\n\nTry next:")
    for command, what in next_commands(run):
        print(f"  {command}\n      {what}")
    return {**facts, "run": str(run), "report": str(path)}


def next_commands(run: Path) -> list[tuple[str, str]]:
    """What to try after the demo: commands with what they do."""
    return [
        (f"adlm sample {run}", "draw texts from the model you just trained"),
        (f"adlm ppl {run} eval.draws=8", "its perplexity with a confidence interval"),
        ("adlm serve", "a page that shows texts appear; with the model that comes with the package"),
        (
            "adlm train experiment=demo data=file data.path=YOUR.txt out=runs/mine",
            "the same model on your own text",
        ),
    ]


def summary(cfg: Config, events: list[dict[str, Any]]) -> dict[str, float | int]:
    """The run in numbers, from its metrics file; seconds are those of optimizer steps."""
    valid = [e for e in events if e["kind"] == "valid"]
    steps = [e for e in events if e["kind"] == "train"]
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


def build_report(
    cfg: Config, lm: LanguageModel, valid: Blocks, facts: dict[str, Any], events: list[dict[str, Any]]
) -> str:
    """The page: numbers, samples, curves, anchors, settings."""
    info = lm.info
    minutes, seconds = divmod(round(facts["training_seconds"]), 60)
    head = tiles(
        {
            "Validation perplexity": Html(f"{facts['last_ppl']:,.1f}<br><small>from {facts['first_ppl']:,.0f}</small>"),
            "Bits per token": Html(
                f"{facts['valid_nll'] / math.log(2):.2f}<br><small>{facts['valid_nll']:.3f} nats</small>"
            ),
            "Training time": Html(f"{minutes} min {seconds:02d} s<br><small>{facts['steps']:,} steps</small>"),
            "Tokens per second": Html(f"{facts['tokens_per_s']:,}<br><small>{facts['tokens']:,} in all</small>"),
            "Parameters": Html(f"{info['parameters']:,}<br><small>vocabulary {info['vocab_size']:,}</small>"),
        }
    )
    return page(
        "An anchored diffusion language model, trained here",
        head,
        samples_section(cfg.sampling, lm),
        section(
            "Learning",
            columns(*curves(events)),
            lead="Loss of the training batches, and perplexity on text held out of training. Both come from the"
            " variational bound: the true values are at most this high.",
        ),
        anchors_section(lm.loaded, valid) if lm.model.config.anchored else "",
        configuration(cfg),
        section(
            "Try next", table((), [(tag("code", command), what) for command, what in next_commands(Path(cfg.out))])
        ),
        reveal_script(),
        subtitle=f"{cfg.algo.upper()} on {cfg.data.name}: text appears from masks in any order; the tokens"
        " that matter most, the anchors, are predicted by a network of their own.",
    )


def samples_section(cfg: SamplingConfig, lm: LanguageModel) -> Html:
    """Texts being written, step by step."""
    chosen: dict[str, Any] = {
        "sampler": cfg.sampler, "steps": cfg.steps, "temperature": cfg.temperature, "top_p": cfg.top_p, "eta": cfg.eta,
    }  # fmt: skip
    players = []
    for number, (label, wish) in enumerate(SAMPLES.items()):
        try:
            snapshots, text = watch(lm, lm.request(**wish, seed=cfg.seed + number, **chosen))
        except ValueError as problem:  # settings of the reader's own, such as sequences too short for the template
            players += [tag("h3", label), paragraph(f"Left out: {problem}")]
            continue
        facts = f"{text.nfe} network evaluations, {text.seconds:.1f} s, seed {text.seed}"
        players += [tag("h3", label), reveal(snapshots, label), paragraph(tag("small", facts))]
    return section(
        "Samples",
        *players,
        lead=f"Every position starts as a mask; the sampler {lm.sampler_of(cfg.sampler)} reveals a few at each step, in"
        " any order. After minutes of training expect the sound of documentation rather than its sense.",
    )


def curves(events: list[dict[str, Any]]) -> list[Html]:
    """Training loss and validation perplexity over steps."""
    train = [e for e in events if e["kind"] == "train"]
    valid = [e for e in events if e["kind"] == "valid"]
    losses = [Series("bound", [(e["step"], e["nelbo"]) for e in train if "nelbo" in e])]
    if any("anchor" in e for e in train):
        losses.append(Series("anchor term", [(e["step"], e["anchor"]) for e in train if "anchor" in e]))
    ppl = Series("validation", [(e["step"], e["ppl"]) for e in valid], marks=True)
    return [
        line_chart("Training loss", losses, "optimizer step", "nats per token"),
        line_chart("Validation perplexity", [ppl], "optimizer step", "perplexity", log_y=True),
    ]


def configuration(cfg: Config) -> Html:
    """The settings in four lines, and all of them to unfold."""
    m, o, t = cfg.model, cfg.objective, cfg.train
    blocks = f"{m.n_blocks} + {m.n_denoiser_blocks}" if m.anchored else f"{m.n_blocks}"
    gamma = f"{o.gamma:g}" if o.gamma_end < 0 else f"{o.gamma:g} to {o.gamma_end:g}"
    rows = [
        ("model", f"width {m.hidden_size}, {blocks} blocks, {m.n_heads} heads, sequences of {m.length} tokens"),
        ("objective", f"{o.name}, gamma {gamma}, anchors by {o.anchor_rule}, at {o.anchor_positions} positions"),
        ("optimizer", f"{cfg.optim.name}, rate {cfg.optim.lr:g}, {cfg.optim.schedule} after {cfg.optim.warmup} steps"),
        ("batch", f"{t.global_batch_size} sequences, {t.steps:,} steps, seed {cfg.seed}"),
    ]
    return section("Configuration", table((), rows), details("Every setting", code(as_yaml(cfg))))

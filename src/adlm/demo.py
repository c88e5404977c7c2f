"""`adlm demo`: the whole package in a few minutes on a CPU, with nothing downloaded.

Trains a nano ADLM on the documentation inside Python (experiment/demo.yaml), validates it, and writes a report that
opens in a browser. A second call finds the run folder and rebuilds the report.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.data import Blocks, Tokenizer, prepare
from adlm.evaluation.anchors import Reading, hide, read_hidden
from adlm.evaluation.chart import Series, line_chart
from adlm.evaluation.report import (
    Html,
    Piece,
    code,
    columns,
    details,
    join,
    legend,
    page,
    passage,
    section,
    table,
    tag,
    tiles,
    write,
)
from adlm.objectives import Rows
from adlm.objectives.anchors import make_anchor_rule
from adlm.schema import Config, as_yaml
from adlm.training.export import Loaded, load_folder
from adlm.training.loop import train
from adlm.training.metrics import read_metrics

# Held-out rows shown with their anchors, and the share of those anchors that is hidden from the model.
EXAMPLES = 3
HIDDEN_SHARE = 0.2
# Hidden anchors listed below each example.
LISTED = 6


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
    loaded = load_folder(run / "export")
    facts = summary(cfg, read_metrics(run))
    valid = prepare(cfg.data, loaded.tokenizer, cfg.model.length, "valid")
    path = run / "report.html"
    write(path, build_report(cfg, loaded, valid, facts, read_metrics(run)))
    print(f"\nValidation perplexity {facts['first_ppl']:,.0f} -> {facts['last_ppl']:,.1f} (an upper bound)")
    print(f"Report: {path.resolve().as_uri()}\n\nTry next:")
    for command, what in next_commands(run):
        print(f"  {command}\n      {what}")
    return {**facts, "run": str(run), "report": str(path)}


def next_commands(run: Path) -> list[tuple[str, str]]:
    return [
        (f"adlm sample {run}", "draw texts from the model you just trained"),
        (f"adlm ppl {run} eval.draws=8", "its perplexity with a confidence interval"),
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
    cfg: Config, loaded: Loaded, valid: Blocks, facts: dict[str, Any], events: list[dict[str, Any]]
) -> str:
    info = loaded.info
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
        section(
            "Learning",
            columns(*curves(events)),
            lead="Loss of the training batches, and perplexity on text held out of training. Both come from the"
            " variational bound: the true values are at most this high.",
        ),
        anchors_section(loaded, valid) if loaded.model.config.anchored else "",
        configuration(cfg),
        section(
            "Try next", table((), [(tag("code", command), what) for command, what in next_commands(Path(cfg.out))])
        ),
        subtitle=f"{cfg.algo.upper()} on {cfg.data.name}: text appears from masks, important tokens first."
        " Written by adlm demo.",
    )


def curves(events: list[dict[str, Any]]) -> list[Html]:
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


def anchors_section(loaded: Loaded, valid: Blocks) -> Html:
    """Held-out rows with their anchors, some of them hidden, and what both networks read there."""
    share_V = torch.from_numpy(valid.frequencies() / valid.frequencies().sum())
    rule = make_anchor_rule(loaded.objective, share_V)
    blocks, found, total = [], 0, 0
    for number, index in enumerate(readable_rows(valid, loaded.tokenizer, EXAMPLES), start=1):
        tokens_L = torch.from_numpy(valid.rows(np.array([index]))[0])
        anchors_L = rule(Rows(tokens_L[None], torch.tensor([index]), len(valid)))[0]
        # special tokens (the ends of a row) count like others for the loss, but there is nothing to see in them
        anchors_L &= torch.tensor([t not in loaded.tokenizer.special_ids for t in tokens_L.tolist()])
        hidden_L = hide(anchors_L, HIDDEN_SHARE, seed=index)
        readings = read_hidden(loaded.model, tokens_L, hidden_L)
        found += int(anchors_L.sum())
        total += len(tokens_L)
        blocks += [
            tag("h3", f"Held-out text {number}"),
            passage(pieces(loaded.tokenizer, tokens_L.tolist(), anchors_L.tolist(), hidden_L.tolist())),
            reading_table(loaded.tokenizer, readings),
        ]
    cfg = loaded.objective
    what = {
        "count": f"tokens that occur at most {cfg.tau} time{'s' * (cfg.tau != 1)} in their row",
        "rarity": f"tokens with at most {cfg.rarity:g} of the corpus",
    }.get(cfg.anchor_rule, cfg.anchor_rule)
    return section(
        "Anchors",
        legend({"anchor": "anchor", "masked": "anchor that was hidden from the model"}),
        *blocks,
        lead=f"Anchors are the tokens that make the rest easy: here {what} ({found / total:.0%} of these texts)."
        f" {HIDDEN_SHARE:.0%} of them are replaced by masks; the anchor network predicts them, the denoiser decides.",
    )


def readable_rows(valid: Blocks, tokenizer: Tokenizer, n: int, among: int = 200) -> list[int]:
    """Rows that read most like prose: those with the largest share of letters and single spaces."""

    def prose(index: int) -> float:
        text = tokenizer.decode(valid[index].tolist(), skip_special=True)
        plain = sum(c.isalpha() or c == " " for c in text) - 2 * text.count("  ") - 5 * text.count("_")
        return plain / max(1, len(text))

    best = sorted(range(min(len(valid), among)), key=prose, reverse=True)
    return sorted(best[:n])


def pieces(tokenizer: Tokenizer, tokens: list[int], anchors: list[bool], hidden: list[bool]) -> list[Piece]:
    """A row as marked text; the special tokens at its ends are left out."""
    marked = []
    for token, anchor, masked in zip(tokens, anchors, hidden):
        if token not in tokenizer.special_ids:
            role = "masked" if masked else "anchor" if anchor else ""
            marked.append(Piece(tokenizer.token(token), role))
    return marked


def reading_table(tokenizer: Tokenizer, readings: list[Reading]) -> Html:
    def word(token: int) -> Html:
        return tag("code", visible(tokenizer.token(token)))

    def best(tokens: list[int], probabilities: list[float], truth: int) -> Html:
        said = [
            tag("mark", word(t), f" {p:.0%}", class_="right" if t == truth else None)
            for t, p in zip(tokens, probabilities)
        ]
        return join(said, ", ")

    rows = []
    for r in readings[:LISTED]:
        guesses = [best(g.tokens, g.probabilities, r.truth) for g in (r.anchor, r.denoiser)]
        rows.append((word(r.truth), guesses[0], r.anchor.rank, guesses[1], r.denoiser.rank))
    head = ("hidden", "anchor network", "rank of the truth", "denoiser", "rank of the truth")
    return table(head, rows)


def visible(text: str) -> str:
    """Spaces and line breaks of a single token, made visible."""
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5") or "\u2205"


def configuration(cfg: Config) -> Html:
    m, o, t = cfg.model, cfg.objective, cfg.train
    blocks = f"{m.n_blocks} + {m.n_denoiser_blocks}" if m.anchored else f"{m.n_blocks}"
    rows = [
        ("model", f"width {m.hidden_size}, {blocks} blocks, {m.n_heads} heads, rows of {m.length} tokens"),
        ("objective", f"{o.name}, gamma {o.gamma:g}, anchors by {o.anchor_rule}, at {o.anchor_positions} positions"),
        ("optimizer", f"{cfg.optim.name}, rate {cfg.optim.lr:g}, {cfg.optim.schedule} after {cfg.optim.warmup} steps"),
        ("batch", f"{t.global_batch_size} rows, {t.steps:,} steps, seed {cfg.seed}"),
    ]
    return section("Configuration", table((), rows), details("Every setting", code(as_yaml(cfg))))

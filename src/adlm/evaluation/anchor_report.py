"""`adlm anchors CHECKPOINT TEXT`: which tokens of a text are anchors, and how both networks predict them when hidden.

The text is an argument, a file (its path, or @path) or standard input. Written: a table on the terminal, a page with
the marked text and the curves, and the same as JSON. The page of the demo shows anchors of held-out text
(`anchors_section`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm.api import LanguageModel
from adlm.api.command import open_model, read_text
from adlm.data.blocks import Blocks
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.evaluation import model_facts, result_path, versions, write_result
from adlm.evaluation.anchors import NETWORKS, Guesses, Level, Reading, anchors_of, read_hidden, read_levels
from adlm.evaluation.perplexity import EVALUATION_SEED
from adlm.io.export import Loaded
from adlm.io.paths import write_atomically
from adlm.objectives.anchors import describe_rule, for_texts
from adlm.reporting.chart import Series, line_chart
from adlm.reporting.html import Html, Span, columns, join, legend, page, passage, section, table, tag
from adlm.schema import Config

# Anchors listed on the terminal; the page and the JSON file hold all.
LISTED = 20
# The demo's page: held-out texts shown, fraction of their anchors that is hidden, hidden anchors listed of each text.
EXAMPLES, HIDDEN, LISTED_OF_EACH = 3, 0.2, 6


def run_anchors(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm anchors CHECKPOINT TEXT`: the result is printed, written as a page and as JSON, and returned."""
    lm = open_model(cfg)
    require(lm.model.anchor_head is not None, f"{cfg.eval.checkpoint} has no anchor network (model.anchored=false)")
    require(not lm.model.config.causal, f"{cfg.eval.checkpoint} is causal: it has no masks to hide anchors behind")
    tokens = lm.tokenizer.encode(read_text(args, "adlm anchors CHECKPOINT 'some words'"))
    require(bool(tokens), "the text has no tokens")
    rule = for_texts(lm.loaded.objective)
    room = lm.length - 1  # beside the begin token
    sequences = [torch.tensor([lm.tokenizer.bos_id, *tokens[a : a + room]]) for a in range(0, len(tokens), room)]
    levels = read_levels(lm, rule, sequences, cfg.eval.draws, EVALUATION_SEED)
    anchors = [
        flag for x_L in sequences for flag in (anchors_of(rule, x_L) & (x_L != lm.tokenizer.bos_id)).tolist()[1:]
    ]
    result = {
        **model_facts(lm.loaded, cfg.eval.checkpoint, cfg.eval.ema),
        "rule": describe_rule(rule),
        "tokens": len(tokens),
        "anchors": sum(anchors),
        "levels": [level.as_dict() for level in levels],
        "readings": token_readings(lm, tokens, anchors, levels),
        "settings": {"draws": cfg.eval.draws, "seed": EVALUATION_SEED},
        "versions": versions(lm.device),
    }
    show(result)
    path = result_path(cfg.out, cfg.eval.checkpoint, "anchors.json")
    write_result(path, result)
    write_atomically(path.with_suffix(".html"), report(lm, tokens, anchors, result))
    print(f"written to {path.with_suffix('.html')} and {path}")
    return result


def token_readings(
    lm: LanguageModel, tokens: list[int], anchors: list[bool], levels: list[Level]
) -> list[dict[str, Any]]:
    """Every anchor of the text with what both networks say at each fraction of masks."""
    found = []
    for position, (token, anchor) in enumerate(zip(tokens, anchors)):
        if not anchor:
            continue
        said = []
        for level in levels:
            if (reading := level.first.get(position)) is not None:
                said.append({"share": level.fraction} | {n: guess_facts(lm, getattr(reading, n)) for n in NETWORKS})
        found.append({"position": position, "token": lm.tokenizer.token(token), "said": said})
    return found


def guess_facts(lm: LanguageModel, guess: Guesses) -> dict[str, Any]:
    """The guesses of one network, as JSON."""
    best = [{"token": lm.tokenizer.token(t), "p": round(p, 4)} for t, p in zip(guess.tokens, guess.probabilities)]
    return {"rank": guess.rank, "p": round(guess.probability, 4), "best": best}


def summary(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: one line per fraction of masks; a cell of two numbers is "anchor network / denoiser"."""
    forms = {"precision": "{:.0%}", "recall": "{:.0%}", "median_rank": "{:g}", "nats": "{:.2f}"}
    lines = []
    for level in result["levels"]:
        line = [f"{level['share']:.0%}", f"{level['anchor']['hidden_anchors']:,}"]
        for what, form in forms.items():
            values = [level[name][what] for name in NETWORKS]
            line.append(" / ".join("-" if v is None else form.format(v) for v in values))
        line.append("-" if level["agreement"] is None else f"{level['agreement']:.0%}")
        lines.append(line)
    return ["masked", "hidden anchors", *(what.replace("_", " ") for what in forms), "same first guess"], lines


def show(result: dict[str, Any]) -> None:
    """Print the table, and the first anchors."""
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    print(f"{result['anchors']} of {result['tokens']} tokens are anchors: {result['rule']}")
    head, lines = summary(result)
    overview = Table(*head, box=None)
    for column in overview.columns:
        column.justify = "right"
    for line in lines:
        overview.add_row(*line)
    console.print("Hidden in turn (anchor network / denoiser):")
    console.print(overview)
    shares = [level["share"] for level in result["levels"]]
    listing = Table("anchor", *(f"{share:.0%} masked" for share in shares), box=None)
    for reading in result["readings"][:LISTED]:
        said = {entry["share"]: entry["anchor"] for entry in reading["said"]}
        cells = [
            f"{visible(said[s]['best'][0]['token'])} (rank {said[s]['rank']})" if s in said else "" for s in shares
        ]
        listing.add_row(*(plain(cell) for cell in (visible(reading["token"]), *cells)))
    console.print("\nThe anchor network's first guess, and where it ranks the truth:")
    console.print(listing)
    if len(result["readings"]) > LISTED:
        console.print(f"... and {len(result['readings']) - LISTED} more in the files")


def plain(text: str) -> str:
    """Escape text of a model: it is not markup."""
    return text.replace("[", r"\[")


def report(lm: LanguageModel, tokens: list[int], anchors: list[bool], result: dict[str, Any]) -> str:
    """The page of `adlm anchors`."""
    notes = {}
    for reading in result["readings"]:
        ranks = ", ".join(f"{e['anchor']['rank']} at {e['share']:.0%}" for e in reading["said"])
        notes[reading["position"]] = f"rank by the anchor network: {ranks}"
    off = [False] * len(anchors)  # nothing is hidden in the text that is shown
    marked = [span._replace(note=notes.get(i, "")) for i, span in enumerate(spans(lm.tokenizer, tokens, anchors, off))]
    return page(
        "Anchors",
        section("The text", legend({"anchor": "anchor"}), passage(marked), lead=f"Anchors are {result['rule']}."),
        section(
            "Prediction",
            columns(*curves(result)),
            table(*summary(result)),
            lead="Every token is hidden in turn together with a fraction of the others. Recall: hidden anchors whose"
            " truth is the first guess. Precision: first guesses that would be anchors, and are right."
            " Two numbers: anchor network / denoiser.",
        ),
        section("Every anchor", anchor_table(result)),
        subtitle=f"{result['anchors']} of {result['tokens']} tokens are anchors; {result['checkpoint']}",
    )


def curves(result: dict[str, Any]) -> list[Html]:
    """Recall and rank over the fraction of masks."""

    def series(what: str) -> list[Series]:
        levels = [(100 * level["share"], {n: level[n][what] for n in NETWORKS}) for level in result["levels"]]
        names = {"anchor": "anchor network", "denoiser": "denoiser"}
        return [
            Series(names[n], [(x, float(v[n])) for x, v in levels if v[n] is not None], marks=True) for n in NETWORKS
        ]

    recall, rank, across = series("recall"), series("median_rank"), "masked, %"
    return [
        line_chart("Recall of hidden anchors", recall, across, "fraction found"),
        line_chart("Rank of the truth at hidden anchors", rank, across, "median rank", log_y=True),
    ]


def anchor_table(result: dict[str, Any]) -> Html:
    """Every anchor of the text, and the guesses of both networks."""
    rows = []
    for reading in result["readings"]:
        for entry in reading["said"]:
            cells: list[Any] = [tag("code", visible(reading["token"])), f"{entry['share']:.0%}"]
            for name in NETWORKS:
                best = ", ".join(f"{visible(b['token'])} {b['p']:.0%}" for b in entry[name]["best"])
                cells += [best, entry[name]["rank"]]
            rows.append(cells)
    return table(("anchor", "masked", "anchor network", "rank of the truth", "denoiser", "rank of the truth"), rows)


# Held-out text, for the demo's page


def anchors_section(loaded: Loaded, valid: Blocks) -> Html:
    """Held-out sequences with their anchors, some of them hidden, and what both networks predict there."""
    cfg = for_texts(loaded.objective)
    blocks, found, total = [], 0, 0
    for number, index in enumerate(readable_sequences(valid, loaded.tokenizer, EXAMPLES), start=1):
        tokens_L = torch.from_numpy(valid.rows(np.array([index]))[0])
        anchors_L = anchors_of(cfg, tokens_L)
        # special tokens (the ends of a text) count like others for the loss, but there is nothing to see in them
        anchors_L &= torch.tensor([t not in loaded.tokenizer.special_ids for t in tokens_L.tolist()])
        hidden_L = hide(anchors_L, HIDDEN, seed=index)
        readings = read_hidden(loaded.model, make_schedule(loaded.noise), tokens_L, hidden_L)
        found += int(anchors_L.sum())
        total += len(tokens_L)
        blocks += [
            tag("h3", f"Held-out text {number}"),
            passage(spans(loaded.tokenizer, tokens_L.tolist(), anchors_L.tolist(), hidden_L.tolist())),
            reading_table(loaded.tokenizer, readings),
        ]
    return section(
        "Anchors",
        legend({"anchor": "anchor", "masked": "anchor that was hidden from the model"}),
        *blocks,
        lead=f"Anchors are the tokens that make the rest easy: here {describe_rule(cfg)}"
        f" ({found / total:.0%} of these texts)."
        f" {HIDDEN:.0%} of them are replaced by masks; the anchor network predicts them, the denoiser decides.",
    )


def hide(anchors_L: Tensor, fraction: float, seed: int) -> Tensor:
    """A fraction of the anchors, chosen by seed and position, as a boolean [L]; at least one."""
    positions = anchors_L.nonzero().squeeze(1)
    require(len(positions) > 0, "the text holds no anchor to hide")
    u = uniforms(seed, Stream.MASK, positions)
    chosen = positions[u.argsort()[: max(1, round(fraction * len(positions)))]]
    hidden_L = torch.zeros_like(anchors_L)
    hidden_L[chosen] = True
    return hidden_L


def readable_sequences(valid: Blocks, tokenizer: Tokenizer, n: int, among: int = 200) -> list[int]:
    """The sequences that read most like prose: those with the largest fraction of letters and single spaces."""

    def prose(index: int) -> float:
        text = tokenizer.decode(valid[index].tolist(), skip_special=True)
        plain = sum(c.isalpha() or c == " " for c in text) - 2 * text.count("  ") - 5 * text.count("_")
        return plain / max(1, len(text))

    best = sorted(range(min(len(valid), among)), key=prose, reverse=True)
    return sorted(best[:n])


def spans(tokenizer: Tokenizer, tokens: list[int], anchors: list[bool], hidden: list[bool]) -> list[Span]:
    """A sequence as marked text; the special tokens at its ends are left out."""
    marked = []
    for token, anchor, masked in zip(tokens, anchors, hidden):
        if token not in tokenizer.special_ids:
            role = "masked" if masked else "anchor" if anchor else ""
            marked.append(Span(tokenizer.token(token), role))
    return marked


def reading_table(tokenizer: Tokenizer, readings: list[Reading]) -> Html:
    """The first hidden anchors of a text, and the guesses of both networks."""

    def word(token: int) -> Html:
        return tag("code", visible(tokenizer.token(token)))

    def best(tokens: list[int], probabilities: list[float], truth: int) -> Html:
        said = [
            tag("mark", word(t), f" {p:.0%}", class_="right" if t == truth else None)
            for t, p in zip(tokens, probabilities)
        ]
        return join(said, ", ")

    rows = []
    for r in readings[:LISTED_OF_EACH]:
        guesses = [best(g.tokens, g.probabilities, r.truth) for g in (r.anchor, r.denoiser)]
        rows.append((word(r.truth), guesses[0], r.anchor.rank, guesses[1], r.denoiser.rank))
    head = ("hidden", "anchor network", "rank of the truth", "denoiser", "rank of the truth")
    return table(head, rows)


def visible(text: str) -> str:
    """Make the spaces and line breaks of a single token visible."""
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5") or "\u2205"

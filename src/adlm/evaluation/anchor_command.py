"""`adlm anchors CHECKPOINT TEXT`: which tokens of a text are anchors, and how both networks predict them when hidden.

The text is an argument, a file (its path, or @path) or standard input. Written: a table on the terminal, a page with
the marked text and the curves, and the same as JSON.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm.api import LanguageModel, load
from adlm.diffusion.schedules import make_schedule
from adlm.errors import require
from adlm.evaluation.anchor_levels import NETWORKS, SHARES, Level, anchors_of, read_level
from adlm.evaluation.anchor_report import pieces, visible
from adlm.evaluation.results import model_facts, result_path, versions, write_result
from adlm.objectives.anchors import describe_rule, for_texts
from adlm.reporting.chart import Series, line_chart
from adlm.reporting.html import Html, columns, legend, page, passage, section, table, tag, write
from adlm.schema import Config

# Anchors listed on the terminal; the page and the JSON file hold all.
LISTED = 20


def run_anchors(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    lm = load(cfg.eval.checkpoint, cfg.train.device, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root)
    require(lm.model.anchor_head is not None, f"{cfg.eval.checkpoint} has no anchor network (model.anchored=false)")
    require(not lm.model.config.causal, f"{cfg.eval.checkpoint} is causal: it has no masks to hide anchors behind")
    tokens = lm.tokenizer.encode(read_text(args))
    require(bool(tokens), "the text has no tokens")
    schedule, rule = make_schedule(lm.loaded.noise), for_texts(lm.loaded.objective)
    rows = list(cut(tokens, lm.tokenizer.bos_id, lm.length))
    levels = [Level(share) for share in SHARES]
    for level in levels:
        for number, row_L in enumerate(rows):
            maskable_L = torch.tensor([t not in lm.tokenizer.special_ids for t in row_L.tolist()], device=row_L.device)
            for draw in range(cfg.eval.draws):
                turn = number * cfg.eval.draws + draw
                place = (number * (lm.length - 1) - 1, cfg.eval.seed, turn)  # -1: the begin token is not in the text
                read_level(level, lm.model, schedule, rule, row_L.to(lm.device), maskable_L.to(lm.device), *place)
    anchors = [
        flag for row_L in rows for flag in (anchors_of(rule, row_L) & (row_L != lm.tokenizer.bos_id)).tolist()[1:]
    ]
    result = {
        **model_facts(lm.loaded, cfg.eval.checkpoint, cfg.eval.ema),
        "rule": describe_rule(rule),
        "tokens": len(tokens),
        "anchors": sum(anchors),
        "levels": [level.as_dict() for level in levels],
        "readings": token_readings(lm, tokens, anchors, levels),
        "settings": {"draws": cfg.eval.draws, "seed": cfg.eval.seed},
        "versions": versions(lm.device),
    }
    show(result)
    path = result_path(cfg.eval.out, cfg.eval.checkpoint, "anchors.json")
    write_result(path, result)
    write(path.with_suffix(".html"), report(lm, tokens, anchors, result))
    print(f"written to {path.with_suffix('.html')} and {path}")
    return result


def read_text(args: Sequence[str]) -> str:
    """The words of the command line, the file they name, or standard input."""
    if not args or list(args) == ["-"]:
        require(not sys.stdin.isatty(), "which text? adlm anchors CHECKPOINT 'some words', or @FILE, or < FILE")
        return sys.stdin.read()
    text = " ".join(args)
    if text.startswith("@"):
        require(Path(text[1:]).is_file(), f"{text}: there is no file {text[1:]!r}")
        text = text[1:]
    try:
        return Path(text).read_text(encoding="utf-8") if len(text) < 4096 and Path(text).is_file() else text
    except UnicodeDecodeError:
        raise ValueError(f"{text} is not UTF-8 text") from None


def cut(tokens: Sequence[int], bos_id: int, length: int) -> list[Tensor]:
    """Rows of the model's length, a begin token in front of each."""
    room = length - 1
    return [torch.tensor([bos_id, *tokens[a : a + room]]) for a in range(0, len(tokens), room)]


def token_readings(
    lm: LanguageModel, tokens: list[int], anchors: list[bool], levels: list[Level]
) -> list[dict[str, Any]]:
    """Every anchor of the text with what both networks say at each share of masks."""
    found = []
    for position, (token, anchor) in enumerate(zip(tokens, anchors)):
        if not anchor:
            continue
        said = []
        for level in levels:
            if (reading := level.first.get(position)) is not None:
                said.append({"share": level.share} | {n: guess_facts(lm, getattr(reading, n)) for n in NETWORKS})
        found.append({"position": position, "token": lm.tokenizer.token(token), "said": said})
    return found


def guess_facts(lm: LanguageModel, guess: Any) -> dict[str, Any]:
    best = [{"token": lm.tokenizer.token(t), "p": round(p, 4)} for t, p in zip(guess.tokens, guess.probabilities)]
    return {"rank": guess.rank, "p": round(guess.probability, 4), "best": best}


def summary(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """One line per share of masks; a cell of two numbers is "anchor network / denoiser"."""
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
    """Text of a model is not markup."""
    return text.replace("[", r"\[")


def report(lm: LanguageModel, tokens: list[int], anchors: list[bool], result: dict[str, Any]) -> str:
    notes = {}
    for reading in result["readings"]:
        ranks = ", ".join(f"{e['anchor']['rank']} at {e['share']:.0%}" for e in reading["said"])
        notes[reading["position"]] = f"rank by the anchor network: {ranks}"
    off = [False] * len(anchors)  # nothing is hidden in the text that is shown
    marked = [
        piece._replace(note=notes.get(i, "")) for i, piece in enumerate(pieces(lm.tokenizer, tokens, anchors, off))
    ]
    return page(
        "Anchors",
        section("The text", legend({"anchor": "anchor"}), passage(marked), lead=f"Anchors are {result['rule']}."),
        section(
            "Prediction",
            columns(*curves(result)),
            table(*summary(result)),
            lead="Every token is hidden in turn together with a share of the others. Recall: hidden anchors whose truth"
            " is the first guess. Precision: first guesses that would be anchors, and are right."
            " Two numbers: anchor network / denoiser.",
        ),
        section("Every anchor", reading_table(result)),
        subtitle=f"{result['anchors']} of {result['tokens']} tokens are anchors; {result['checkpoint']}",
    )


def curves(result: dict[str, Any]) -> list[Html]:
    def series(what: str) -> list[Series]:
        levels = [(100 * level["share"], {n: level[n][what] for n in NETWORKS}) for level in result["levels"]]
        names = {"anchor": "anchor network", "denoiser": "denoiser"}
        return [
            Series(names[n], [(x, float(v[n])) for x, v in levels if v[n] is not None], marks=True) for n in NETWORKS
        ]

    recall, rank, across = series("recall"), series("median_rank"), "masked, %"
    return [
        line_chart("Recall of hidden anchors", recall, across, "share found"),
        line_chart("Rank of the truth at hidden anchors", rank, across, "median rank", log_y=True),
    ]


def reading_table(result: dict[str, Any]) -> Html:
    rows = []
    for reading in result["readings"]:
        for entry in reading["said"]:
            cells: list[Any] = [tag("code", visible(reading["token"])), f"{entry['share']:.0%}"]
            for name in NETWORKS:
                best = ", ".join(f"{visible(b['token'])} {b['p']:.0%}" for b in entry[name]["best"])
                cells += [best, entry[name]["rank"]]
            rows.append(cells)
    return table(("anchor", "masked", "anchor network", "rank of the truth", "denoiser", "rank of the truth"), rows)

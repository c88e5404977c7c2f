"""The predictions of both networks of an anchored model at hidden anchors, as a growing fraction of a text is hidden.

To hide a fraction r of a sequence, its maskable positions are put into a random order and hidden window by window, so
that each is hidden at least once, together with the fraction r of the others. At each hidden position both heads are
read once per window.

A network *finds* an anchor if the true token is its first guess; *recall* is the fraction of hidden anchors found. It
*claims* an anchor at a hidden position if its first guess there is an anchor by the same rule, applied to the sequence
with all holes filled by first guesses; *precision* is the fraction of claims whose guess is the true token.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm.api import LanguageModel
from adlm.api.command import open_model, read_text
from adlm.data.blocks import Blocks
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import Schedule, make_schedule, noise_level
from adlm.diffusion.random import Stream, uniforms
from adlm.errors import require
from adlm.evaluation import model_facts, result_path, versions, write_result
from adlm.evaluation.perplexity import EVALUATION_SEED
from adlm.io import progress
from adlm.io.export import Loaded
from adlm.io.paths import write_atomically
from adlm.models import Network
from adlm.objectives.anchors import anchor_rule, describe_for_texts, describe_rule, for_texts
from adlm.reporting import Html, Series, Span, columns, join, legend, line_chart, page, passage, section, table, tag
from adlm.schema import Config, ObjectiveConfig

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
NETWORKS = ("anchor", "denoiser")


class Guesses(NamedTuple):
    """The likeliest tokens at a position with their probabilities, and the rank of the true one (1: first)."""

    tokens: list[int]
    probabilities: list[float]
    rank: int
    probability: float
    """Probability of the true token."""


class Reading(NamedTuple):
    """The predictions of both networks at one hidden position."""

    position: int
    truth: int
    anchor: Guesses
    denoiser: Guesses


@torch.no_grad()
def read_hidden(model: Network, schedule: Schedule, tokens_L: Tensor, hidden_L: Tensor, top: int = 3) -> list[Reading]:
    """Mask the hidden positions of a clean sequence, run the model once, and read both heads there."""
    require(model.anchor_head is not None, "this model has no anchor network (model.anchored=false)")
    z_BL = torch.where(hidden_L, model.mask_id, tokens_L)[None]
    sigma_B = noise_level(hidden_L.float().mean()[None], schedule) if model.config.is_time_conditioned else None
    hidden = model(z_BL, sigma_B)
    positions, found = hidden_L.nonzero().squeeze(1), list[list[Guesses]]()
    truth_N = tokens_L[positions]
    assert hidden.anchor_BLD is not None and model.anchor_head is not None
    for head, hidden_BLD in ((model.anchor_head, hidden.anchor_BLD), (model.head, hidden.denoiser_BLD)):
        logits_NV = head(hidden_BLD[0, positions]).float()
        logits_NV[:, model.mask_id] = -torch.inf  # a prediction is never the mask
        found.append(guesses(logits_NV, truth_N, top))
    return [Reading(*each) for each in zip(positions.tolist(), truth_N.tolist(), *found)]


def guesses(logits_NV: Tensor, truth_N: Tensor, top: int) -> list[Guesses]:
    """The `top` likeliest tokens of each position, and the rank of the true one."""
    p_NV = logits_NV.softmax(-1)
    p_N = p_NV.gather(1, truth_N[:, None])
    rank_N = 1 + (p_NV > p_N).sum(-1)
    best = p_NV.topk(min(top, p_NV.shape[1]))
    columns = (best.indices.tolist(), best.values.tolist(), rank_N.tolist(), p_N.squeeze(1).tolist())
    return [Guesses(*found) for found in zip(*columns)]


def anchors_of(rule: ObjectiveConfig, tokens_L: Tensor) -> Tensor:
    """Boolean [L]: which positions of a sequence are anchors."""
    return anchor_rule(rule)(tokens_L[None], rule)[0]


@dataclass
class Tally:
    """Counts for one network at one fraction of masks."""

    ranks: list[int] = field(default_factory=list)
    """Rank of the true token at each hidden anchor (1: first)."""
    nats: list[float] = field(default_factory=list)
    claims: int = 0
    right_claims: int = 0

    @property
    def recall(self) -> float | None:
        return sum(r == 1 for r in self.ranks) / len(self.ranks) if self.ranks else None

    @property
    def precision(self) -> float | None:
        return self.right_claims / self.claims if self.claims else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "recall": self.recall,
            "median_rank": statistics.median(self.ranks) if self.ranks else None,
            "nats": statistics.fmean(self.nats) if self.nats else None,
            "hidden_anchors": len(self.ranks),
            "claims": self.claims,
        }


@dataclass
class Level:
    """All counts at one fraction of masks."""

    fraction: float
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in NETWORKS})
    agree: list[bool] = field(default_factory=list)
    """For each hidden anchor, whether both networks have the same first guess."""
    first: dict[int, Reading] = field(default_factory=dict)
    """The first reading of each anchor, by position in the text."""

    def add(
        self, rule: ObjectiveConfig, tokens_L: Tensor, anchors_L: Tensor, readings: list[Reading], offset: int
    ) -> None:
        """Add the predictions of both networks for one window; `offset` is where the sequence begins in the text."""
        for name, tally in self.tallies.items():
            filled_L = tokens_L.clone()
            for reading in readings:
                filled_L[reading.position] = getattr(reading, name).tokens[0]
            claimed_L = anchors_of(rule, filled_L)
            for reading in readings:
                said: Guesses = getattr(reading, name)
                if anchors_L[reading.position]:
                    tally.ranks.append(said.rank)
                    tally.nats.append(-math.log(max(said.probability, 1e-30)))
                if claimed_L[reading.position]:
                    tally.claims += 1
                    tally.right_claims += said.rank == 1
        for reading in readings:
            if anchors_L[reading.position]:
                self.agree.append(reading.anchor.tokens[0] == reading.denoiser.tokens[0])
                self.first.setdefault(offset + reading.position, reading)

    def as_dict(self) -> dict[str, Any]:
        networks = {name: tally.as_dict() for name, tally in self.tallies.items()}
        return {"share": self.fraction, **networks, "agreement": statistics.fmean(self.agree) if self.agree else None}


def windows(maskable_L: Tensor, fraction: float, seed: int, turn: int) -> Iterator[Tensor]:
    """Masks, boolean [L], each of round(fraction * n) of the n maskable positions, at least one; together they cover
    all."""
    require(0 < fraction <= 1, f"a fraction of masks must lie in (0, 1], got {fraction}")
    positions = maskable_L.nonzero().squeeze(1)
    require(len(positions) > 0, "there is no position to hide: the text has only special tokens")
    order = positions[uniforms(seed, Stream.ORDER, turn, positions).argsort()]
    n = len(order)
    k = max(1, round(fraction * n))
    for start in range(0, math.ceil(n / k) * k, k):
        hidden_L = torch.zeros_like(maskable_L)
        hidden_L[order[(start + torch.arange(k)) % n]] = True
        yield hidden_L


def read_levels(
    lm: LanguageModel, rule: ObjectiveConfig, sequences: Sequence[Tensor], draws: int, seed: int
) -> list[Level]:
    """Hide every maskable position of every sequence of a text, `draws` times at each fraction, and read both
    networks. Every sequence begins with a token that is not part of the text."""
    levels = [Level(fraction) for fraction in FRACTIONS]
    passes = sum(math.ceil(1 / level.fraction) for level in levels) * len(sequences) * draws
    with progress("reading", passes) as advance:
        for level in levels:
            for number, tokens_L in enumerate(sequences):
                special = [t in lm.tokenizer.special_ids for t in tokens_L.tolist()]
                tokens_L, maskable_L = tokens_L.to(lm.device), ~torch.tensor(special, device=lm.device)
                anchors_L = anchors_of(rule, tokens_L) & maskable_L
                for draw in range(draws):
                    for hidden_L in windows(maskable_L, level.fraction, seed, number * draws + draw):
                        readings = read_hidden(lm.model, lm.schedule, tokens_L, hidden_L)
                        level.add(rule, tokens_L, anchors_L, readings, number * (lm.length - 1) - 1)
                        advance()
    return levels


# ---- adlm anchors ----------------------------------------------------------------------------------------------------
# The text is an argument, a file (its path, or @path) or standard input. The output is a table on the terminal, a page
# with the marked text and the curves, and the same as JSON. The demo's page shows anchors of held-out text.

# Number of anchors listed on the terminal; the page and the JSON file list all.
LISTED = 20
# On the demo's page: held-out texts, the fraction of their anchors that is hidden, and hidden anchors listed per text.
EXAMPLES, HIDDEN, LISTED_OF_EACH = 3, 0.2, 6


def run_anchors(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm anchors CHECKPOINT TEXT`: print the result, write it as a page and as JSON, and return it."""
    lm = open_model(cfg)
    require(lm.model.anchor_head is not None, f"{cfg.eval.checkpoint} has no anchor network (model.anchored=false)")
    require(not lm.model.config.causal, f"{cfg.eval.checkpoint} is causal: it has no masks to hide anchors behind")
    tokens = lm.tokenizer.encode(read_text(args, "adlm anchors CHECKPOINT 'some words'"))
    require(bool(tokens), "the text has no tokens")
    rule = for_texts(lm.loaded.objective)
    room = lm.length - 1  # without the begin token
    sequences = [torch.tensor([lm.tokenizer.bos_id, *tokens[a : a + room]]) for a in range(0, len(tokens), room)]
    levels = read_levels(lm, rule, sequences, cfg.eval.draws, EVALUATION_SEED)
    anchors = [
        flag for x_L in sequences for flag in (anchors_of(rule, x_L) & (x_L != lm.tokenizer.bos_id)).tolist()[1:]
    ]
    result = {
        **model_facts(lm.loaded, cfg.eval.checkpoint, cfg.eval.ema),
        "rule": describe_for_texts(lm.loaded.objective),
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
    """Every anchor of the text with the predictions of both networks at each fraction of masks."""
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
    """The table: one line per fraction of masks; cells with two numbers are "anchor network / denoiser"."""
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
    """Escape the text of a model so that it is not read as markup."""
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
    """Charts of recall and rank over the fraction of masks."""

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
    """A table of every anchor of the text with the guesses of both networks."""
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
        # special tokens (the ends of a text, padding) count in the loss, but there is nothing to show
        text_L = torch.tensor([t not in loaded.tokenizer.special_ids for t in tokens_L.tolist()])
        text_L[: 0 if valid.starts is None else valid.starts[index]] = False  # a prompt is never hidden
        anchors_L = anchors_of(cfg, tokens_L) & text_L
        hidden_L = hide(anchors_L, HIDDEN, seed=index)
        readings = read_hidden(loaded.model, make_schedule(loaded.noise), tokens_L, hidden_L)
        found += int(anchors_L.sum())
        total += int(text_L.sum())
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
        f" ({found / max(1, total):.0%} of these texts)."
        f" {HIDDEN:.0%} of them are replaced by masks; the anchor network predicts them, the denoiser decides.",
    )


def hide(anchors_L: Tensor, fraction: float, seed: int) -> Tensor:
    """Boolean [L]: a fraction of the anchors, chosen by seed and position; at least one if there are any."""
    positions = anchors_L.nonzero().squeeze(1)
    u = uniforms(seed, Stream.MASK, positions)
    chosen = positions[u.argsort()[: max(1, round(fraction * len(positions)))]]
    hidden_L = torch.zeros_like(anchors_L)
    hidden_L[chosen] = True
    return hidden_L


def readable_sequences(valid: Blocks, tokenizer: Tokenizer, n: int, among: int = 200) -> list[int]:
    """The sequences most like prose: those with the largest fraction of letters and single spaces."""

    def prose(index: int) -> float:
        text = tokenizer.decode(valid[index].tolist(), skip_special=True)
        plain = sum(c.isalpha() or c == " " for c in text) - 2 * text.count("  ") - 5 * text.count("_")
        return plain / max(1, len(text))

    best = sorted(range(min(len(valid), among)), key=prose, reverse=True)
    return sorted(best[:n])


def spans(tokenizer: Tokenizer, tokens: list[int], anchors: list[bool], hidden: list[bool]) -> list[Span]:
    """A sequence as marked text, without the special tokens at its ends."""
    marked = []
    for token, anchor, masked in zip(tokens, anchors, hidden):
        if token not in tokenizer.special_ids:
            role = "masked" if masked else "anchor" if anchor else ""
            marked.append(Span(tokenizer.token(token), role))
    return marked


def reading_table(tokenizer: Tokenizer, readings: list[Reading]) -> Html:
    """A table of the first hidden anchors of a text with the guesses of both networks."""

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

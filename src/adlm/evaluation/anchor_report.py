"""Anchors for the eye: held-out rows with their anchors marked, some hidden, and what both networks say there."""

import numpy as np
import torch

from adlm.data import Blocks, Tokenizer
from adlm.diffusion.schedules import make_schedule
from adlm.evaluation.anchors import Reading, hide, read_hidden
from adlm.io.export import Loaded
from adlm.objectives.anchors import describe_rule, find_anchors, for_texts
from adlm.reporting.html import Html, Piece, join, legend, passage, section, table, tag

# Held-out rows shown, the share of their anchors that is hidden, and hidden anchors listed below each row.
EXAMPLES = 3
HIDDEN_SHARE = 0.2
LISTED = 6


def anchors_section(loaded: Loaded, valid: Blocks) -> Html:
    """Held-out rows with their anchors, some of them hidden, and what both networks read there."""
    cfg = for_texts(loaded.objective)
    blocks, found, total = [], 0, 0
    for number, index in enumerate(readable_rows(valid, loaded.tokenizer, EXAMPLES), start=1):
        tokens_L = torch.from_numpy(valid.rows(np.array([index]))[0])
        anchors_L = find_anchors(tokens_L[None], cfg)[0]
        # special tokens (the ends of a row) count like others for the loss, but there is nothing to see in them
        anchors_L &= torch.tensor([t not in loaded.tokenizer.special_ids for t in tokens_L.tolist()])
        hidden_L = hide(anchors_L, HIDDEN_SHARE, seed=index)
        readings = read_hidden(loaded.model, make_schedule(loaded.noise), tokens_L, hidden_L)
        found += int(anchors_L.sum())
        total += len(tokens_L)
        blocks += [
            tag("h3", f"Held-out text {number}"),
            passage(pieces(loaded.tokenizer, tokens_L.tolist(), anchors_L.tolist(), hidden_L.tolist())),
            reading_table(loaded.tokenizer, readings),
        ]
    return section(
        "Anchors",
        legend({"anchor": "anchor", "masked": "anchor that was hidden from the model"}),
        *blocks,
        lead=f"Anchors are the tokens that make the rest easy: here {describe_rule(cfg)}"
        f" ({found / total:.0%} of these texts)."
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

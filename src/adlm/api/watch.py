"""A text appearing from masks, live in the terminal; anchors - tokens rare in their row - are marked."""

from dataclasses import replace

import torch
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from adlm.api.language_model import LanguageModel
from adlm.api.results import Generation
from adlm.engine import Request, Result
from adlm.objectives.anchors import counts_in_sequence

HOLE, NEW, ANCHOR = "bright_black", "bold black on bright_yellow", "bold cyan"


def watch_text(lm: LanguageModel, request: Request, console: Console | None = None) -> Generation:
    """Draw one row and show every evaluation; returns the finished text."""
    engine = lm.engine(request.settings.batch_size)
    with Live(console=console, refresh_per_second=20, transient=False) as live:
        for update in engine.stream(replace(request, watch=True)):
            drawn = [] if isinstance(update, Result) else update.drawn
            live.update(view(lm, update.tokens, drawn, update.nfe, request))
            if isinstance(update, Result):
                return lm.finish(update)
    raise AssertionError("a stream ends with its result")


def view(lm: LanguageModel, tokens: list[int], drawn: list[int], nfe: int, request: Request) -> Panel:
    """One frame: holes as dots, tokens just drawn lit up, anchors in colour."""
    tok, new = lm.tokenizer, set(drawn)
    rare = (counts_in_sequence(torch.tensor([tokens])) <= lm.loaded.objective.tau)[0].tolist()
    text = Text()
    for l, token in enumerate(tokens):
        if token == tok.mask_id:
            text.append(" \u00b7", HOLE)
        elif token not in tok.special_ids:
            style = NEW if l in new else ANCHOR if rare[l] and tok.token(token).strip().isalnum() else ""
            text.append(tok.token(token), style)
    masks = tokens.count(tok.mask_id)
    title = f"{request.settings.sampler}, seed {request.seed}: {nfe} evaluations, {masks} of {len(tokens)} to come"
    return Panel(text, title=title, subtitle="cyan: rare in this text", subtitle_align="left")

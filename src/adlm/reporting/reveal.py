"""The animated reveal: a text appears from masks step by step, in the page itself, with a scrubber and a play button.

The page holds the first canvas and what changed at each step, so remasking samplers are shown as they work. Without
scripts the finished text stands there.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from adlm.api import Generation, LanguageModel
from adlm.data.tokenizers import Tokenizer
from adlm.engine import Request, Result
from adlm.reporting.html import Html, asset, tag


class Frame(NamedTuple):
    """A canvas after some step: the text of each position, None where the mask is."""

    step: int
    pieces: Sequence[str | None]


def watch(lm: LanguageModel, request: Request) -> tuple[list[Frame], Generation]:
    """One text with every canvas on the way."""
    frames = []
    for update in lm.engine(request.settings.batch_size).stream(replace(request, watch=True)):
        frames.append(Frame(update.nfe, [piece(lm.tokenizer, t) for t in update.tokens]))
        if isinstance(update, Result):
            return frames, lm.finish(update)
    raise AssertionError("a stream ends with its result")


def piece(tokenizer: Tokenizer, token: int) -> str | None:
    """The text of a position; None for the mask, nothing for the ends of a row."""
    if token == tokenizer.mask_id:
        return None
    return "" if token in tokenizer.special_ids else tokenizer.token(token)


def changes(frames: Sequence[Frame]) -> list[list]:
    """[step, [[position, text or null], ...]] of each frame against the one before it; the first is against masks."""
    before: list[str | None] = [None] * len(frames[0].pieces)
    found = []
    for frame in frames:
        after = list(frame.pieces)
        found.append([frame.step, [[i, b] for i, (a, b) in enumerate(zip(before, after)) if a != b]])
        before = after
    return found


def reveal(frames: Sequence[Frame], label: str) -> Html:
    """One player. `frames` are in the order of generation; the page must also hold `reveal_script`, once."""
    final = [tag("mark", hole_text() if piece is None else piece) for piece in frames[-1].pieces]
    # "<" must not end the script element early
    data = json.dumps({"length": len(final), "frames": changes(frames)}, ensure_ascii=False).replace("<", "\\u003c")
    slider = tag(
        "input", type="range", min=0, max=len(frames), value=len(frames), step=1, aria_label=f"step of: {label}"
    )
    controls = tag(
        "div",
        tag("button", "Play", type="button", class_="play"),
        slider,
        tag("output", f"step {frames[-1].step}"),
        class_="controls",
        hidden=True,
    )
    return tag(
        "div",
        controls,
        tag("p", *final, class_="passage canvas"),
        tag("script", Html(data), type="application/json"),
        class_="reveal",
        role="group",
        aria_label=label,
    )


def hole_text() -> str:
    return "\u00b7\u00b7\u00b7"


def reveal_script() -> Html:
    """The player's script, written into the page once."""
    return Html(f"<script>{asset('reveal.js')}</script>")

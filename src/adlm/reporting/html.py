"""Building blocks of a self-contained HTML report: one file, no external host, light and dark, readable on a phone.

Every block is a function that returns `Html`. Plain strings handed to a block are escaped, `Html` is kept as it is, so
text of a model can never become markup. Charts are in chart.py.

The animated reveal shows a text that appears from masks step by step, with a scrubber and a play button. The page holds
the first canvas and what changed at each step, so remasking samplers are shown as they work. Without scripts the
finished text stands there.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

from adlm.api import Generation, LanguageModel
from adlm.engine import Request, Result

# What HTML cannot hold: control characters a byte-level tokenizer may produce.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
# What stands for a mask in the finished text.
HOLE = "\u00b7\u00b7\u00b7"
_VOID = {"br", "hr", "img", "input", "link", "meta"}


class Html(str):
    """Text that is markup already."""


def esc(value: Any) -> Html:
    """Return a value as HTML: escaped, unless it is Html."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(_CONTROL.sub("\ufffd", str(value)), quote=True))


def join(parts: Iterable[Any], separator: str = "") -> Html:
    return Html(esc(separator).join(esc(part) for part in parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` and `data_row` become class and data-row; None and False leave an attribute out."""
    text = f"<{name}"
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            text += f" {key}"
        elif value is not None and value is not False:
            text += f' {key}="{esc(str(value))}"'
    return Html(f"{text}>" if name in _VOID else f"{text}>{join(children)}</{name}>")


def section(title: str, *children: Any, lead: Any = "") -> Html:
    """A part of the report with its heading; `lead` says what there is to see."""
    identity = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    opening = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", title), opening, *children, id=identity)


def paragraph(*children: Any) -> Html:
    return tag("p", *children)


def details(summary: str, *children: Any) -> Html:
    """Something to unfold."""
    return tag("details", tag("summary", summary), *children)


def code(text: str) -> Html:
    """Commands or settings, as they are typed."""
    return tag("pre", tag("code", text))


def columns(*children: Any) -> Html:
    """Side by side where the screen is wide enough, below each other where it is not."""
    return tag("div", *children, class_="columns")


def tiles(facts: Mapping[str, Any]) -> Html:
    """The few numbers to see first: label -> value."""
    return tag(
        "dl", *(tag("div", tag("dt", label), tag("dd", show(value))) for label, value in facts.items()), class_="tiles"
    )


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> Html:
    """A table that scrolls by itself when it is wider than the screen. Numbers are set to the right."""
    body = []
    for row in rows:
        cells = [tag("td", show(cell), class_="number" if is_number(cell) else None) for cell in row]
        body.append(tag("tr", *cells))
    content = (
        tag("caption", caption) if caption else "",
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if head else "",
        tag("tbody", *body),
    )
    return tag("div", tag("table", *content), class_="scroll")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def show(value: Any) -> Any:
    """A number as people read it; anything else as it is."""
    if isinstance(value, bool) or not is_number(value):
        return value
    if isinstance(value, int) or abs(value) >= 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}"


class Span(NamedTuple):
    """A stretch of text with a role: '' (plain), anchor, masked, new, or another class of style.css."""

    text: str
    role: str = ""
    note: str = ""
    """Shown when the pointer rests on it."""


def passage(spans: Iterable[Span]) -> Html:
    """Text with some tokens set apart; spaces and line breaks are kept."""
    parts = [
        tag("mark", s.text, class_=s.role, title=s.note or None) if s.role else esc(s.text) for s in _merged(spans)
    ]
    return tag("p", *parts, class_="passage")


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Join neighbouring plain spans: smaller files, and words that a search in the page finds."""
    merged: list[Span] = []
    for span in spans:
        if merged and not span.role and not merged[-1].role:
            merged[-1] = Span(merged[-1].text + span.text)
        else:
            merged.append(span)
    return merged


def legend(roles: Mapping[str, str]) -> Html:
    """What the roles of a passage mean: role -> words."""
    parts = [tag("span", tag("mark", "token", class_=role), " ", words) for role, words in roles.items()]
    return tag("p", *parts, class_="legend")


def page(title: str, *children: Any, subtitle: str = "") -> str:
    """The whole document."""
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(asset("style.css"))),
    )
    header = tag("header", tag("h1", title), tag("p", subtitle) if subtitle else "")
    body = tag("main", header, *children)
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', body), lang='en')}\n"


def asset(name: str) -> str:
    """A style sheet or script that ships with the package and is written into the page."""
    return (resources.files("adlm.reporting") / "static" / name).read_text(encoding="utf-8")


class Snapshot(NamedTuple):
    """A canvas after some evaluation: the text of each position, None where the mask is."""

    step: int
    texts: Sequence[str | None]


def watch(lm: LanguageModel, request: Request) -> tuple[list[Snapshot], Generation]:
    """Draw one text, and keep every canvas on the way; special tokens have no text."""
    tok, snapshots = lm.tokenizer, []
    for update in lm.engine(request.settings.batch_size).stream(replace(request, watch=True)):
        texts = [None if t == tok.mask_id else "" if t in tok.special_ids else tok.token(t) for t in update.tokens]
        snapshots.append(Snapshot(update.nfe, texts))
        if isinstance(update, Result):
            return snapshots, lm.finish(update)
    raise AssertionError("a stream ends with its result")


def changes(snapshots: Sequence[Snapshot]) -> list[list]:
    """What changed, [step, [[position, text or null], ...]], from snapshot to snapshot; before the first: masks."""
    before: list[str | None] = [None] * len(snapshots[0].texts)
    found = []
    for snapshot in snapshots:
        after = list(snapshot.texts)
        found.append([snapshot.step, [[i, b] for i, (a, b) in enumerate(zip(before, after)) if a != b]])
        before = after
    return found


def reveal(snapshots: Sequence[Snapshot], label: str) -> Html:
    """The player of one text, from its snapshots in their order; the page must also hold `reveal_script`, once."""
    final = [tag("mark", HOLE if text is None else text) for text in snapshots[-1].texts]
    # "<" must not end the script element early
    data = json.dumps({"length": len(final), "frames": changes(snapshots)}, ensure_ascii=False).replace("<", "\\u003c")
    slider = tag(
        "input", type="range", min=0, max=len(snapshots), value=len(snapshots), step=1, aria_label=f"step of: {label}"
    )
    controls = tag(
        "div",
        tag("button", "Play", type="button", class_="play"),
        slider,
        tag("output", f"step {snapshots[-1].step}"),
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


def reveal_script() -> Html:
    """The player's script, written into the page once."""
    return Html(f"<script>{asset('reveal.js')}</script>")

"""Building blocks of a self-contained HTML report: one file, no external host, light and dark, readable on a phone.

Every block is a function that returns `Html`. Plain strings handed to a block are escaped, `Html` is kept as it is, so
text of a model can never become markup. Charts are in chart.py, the animated reveal in reveal.py.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from adlm.io.paths import write_atomically

# What HTML cannot hold: control characters a byte-level tokenizer may produce.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
_VOID = {"br", "hr", "img", "input", "link", "meta"}


class Html(str):
    """Text that is markup already."""


def esc(value: Any) -> Html:
    """A value as HTML: escaped, unless it is Html."""
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


class Piece(NamedTuple):
    """A stretch of text with a role: '' (plain), anchor, masked, new, or another class of style.css."""

    text: str
    role: str = ""
    note: str = ""
    """Shown when the pointer rests on it."""


def passage(pieces: Iterable[Piece]) -> Html:
    """Text with some tokens set apart; spaces and line breaks are kept."""
    spans = [
        tag("mark", p.text, class_=p.role, title=p.note or None) if p.role else esc(p.text) for p in _merged(pieces)
    ]
    return tag("p", *spans, class_="passage")


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring plain pieces as one: smaller files, and words that a search in the page finds."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and not piece.role and not merged[-1].role:
            merged[-1] = Piece(merged[-1].text + piece.text)
        else:
            merged.append(piece)
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


def write(path: Path, document: str) -> None:
    """Whole or not at all: a browser that reloads never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, document)

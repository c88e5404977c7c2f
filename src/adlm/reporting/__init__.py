"""Self-contained HTML reports: line charts as SVG, and the building blocks of a page."""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

from adlm.api import Generation, LanguageModel
from adlm.engine import Request, Result
from adlm.errors import require

# ---- pages -----------------------------------------------------------------------------------------------------------
# Building blocks of a self-contained HTML report: one file, no external host, light and dark, readable on a phone.
#
# Every block is a function that returns `Html`. Plain strings are escaped and `Html` is kept as it is, so a model's
# text can never become markup.
#
# The animated reveal shows a text that appears from masks step by step, with a slider and a play button. The page has
# the first canvas and the changes of each step, so it also shows how remasking samplers work. Without scripts it shows
# the finished text.

# Characters that HTML cannot contain: control characters that a byte-level tokenizer may produce.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
# Shown for a mask in the finished text.
HOLE = "\u00b7\u00b7\u00b7"
_VOID = {"br", "hr", "img", "input", "link", "meta"}


class Html(str):
    """Text that is already markup."""


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
    """A part of the report with its heading; `lead` is an introductory paragraph."""
    identity = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    opening = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", title), opening, *children, id=identity)


def paragraph(*children: Any) -> Html:
    return tag("p", *children)


def details(summary: str, *children: Any) -> Html:
    """Content that the reader can unfold."""
    return tag("details", tag("summary", summary), *children)


def code(text: str) -> Html:
    """A block of commands or settings."""
    return tag("pre", tag("code", text))


def columns(*children: Any) -> Html:
    """Blocks side by side if the screen is wide enough, else below each other."""
    return tag("div", *children, class_="columns")


def tiles(facts: Mapping[str, Any]) -> Html:
    """The most important numbers, as label -> value."""
    return tag(
        "dl", *(tag("div", tag("dt", label), tag("dd", show(value))) for label, value in facts.items()), class_="tiles"
    )


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> Html:
    """A table that scrolls if it is wider than the screen. Numbers are right-aligned."""
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
    """A number formatted for people; anything else unchanged."""
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
    """Shown when the pointer is over it."""


def passage(spans: Iterable[Span]) -> Html:
    """Text with some tokens highlighted; spaces and line breaks are kept."""
    parts = [
        tag("mark", s.text, class_=s.role, title=s.note or None) if s.role else esc(s.text) for s in _merged(spans)
    ]
    return tag("p", *parts, class_="passage")


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Join neighbouring plain spans: files are smaller, and a search in the page finds whole words."""
    merged: list[Span] = []
    for span in spans:
        if merged and not span.role and not merged[-1].role:
            merged[-1] = Span(merged[-1].text + span.text)
        else:
            merged.append(span)
    return merged


def legend(roles: Mapping[str, str]) -> Html:
    """A legend for the roles of a passage: role -> description."""
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
    """The text of a style sheet or script of the package, to be included in the page."""
    return (resources.files("adlm.reporting") / "static" / name).read_text(encoding="utf-8")


class Snapshot(NamedTuple):
    """A canvas after some evaluation: the text of each position, None for a mask."""

    step: int
    texts: Sequence[str | None]


def watch(lm: LanguageModel, request: Request) -> tuple[list[Snapshot], Generation]:
    """Draw one text and record every canvas; special tokens have no text."""
    tok, snapshots = lm.tokenizer, []
    for update in lm.engine(request.settings.batch_size).stream(replace(request, watch=True)):
        texts = [None if t == tok.mask_id else "" if t in tok.special_ids else tok.token(t) for t in update.tokens]
        snapshots.append(Snapshot(update.nfe, texts))
        if isinstance(update, Result):
            return snapshots, lm.finish(update)
    raise AssertionError("a stream ends with its result")


def changes(snapshots: Sequence[Snapshot]) -> list[list]:
    """Changes between snapshots, [step, [[position, text or null], ...]]; the first starts from all masks."""
    before: list[str | None] = [None] * len(snapshots[0].texts)
    found = []
    for snapshot in snapshots:
        after = list(snapshot.texts)
        found.append([snapshot.step, [[i, b] for i, (a, b) in enumerate(zip(before, after)) if a != b]])
        before = after
    return found


def reveal(snapshots: Sequence[Snapshot], label: str) -> Html:
    """The player of one text, from its snapshots in order; the page must also include `reveal_script`, once."""
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
    """The player's script, to be included in the page once."""
    return Html(f"<script>{asset('reveal.js')}</script>")


# ---- charts ----------------------------------------------------------------------------------------------------------
# A small line chart as inline SVG: axes with round numbers, log scales, intervals, several series.
#
# Colours come from the page's style sheet (classes s0, s1, ...), so a chart follows light and dark mode. Hovering over
# a point shows its numbers, and a table below the chart has all of them for readers who cannot see the picture.

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 40
COLOURS = 6
# Longer series are thinned to this many points: more would not be visible.
MOST_POINTS = 400


class Series(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    interval: Sequence[tuple[float, float]] | None = None
    """Low and high end at each point."""
    marks: bool = False
    """Draw each point as a dot."""
    x_interval: Sequence[tuple[float, float]] | None = None
    """Left and right end at each point (of a scatter)."""
    labels: Sequence[str] | None = None
    """Name of each point, for the tooltip and the table."""


@dataclass(frozen=True)
class Axis:
    """A scale that maps a value to a position in [0, 1]."""

    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def wider(self, fraction: float) -> "Axis":
        """The axis with room at both ends."""
        if self.log:
            margin = (self.high / self.low) ** fraction
            return Axis(self.low / margin, self.high * margin, True)
        margin = (self.high - self.low) * fraction
        return Axis(self.low - margin, self.high + margin, False)

    def ticks(self) -> list[float]:
        found = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        slack = 1e-9
        return [t for t in found if -slack <= self.at(t) <= 1 + slack]


def linear_step(low: float, high: float, most: int = 6) -> float:
    """A step of 1, 2 or 5 times a power of ten, such that at most `most` steps cover the range."""
    rough = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(m * scale for m in (1, 2, 5, 10) if m * scale >= rough * (1 - 1e-9))


def linear_ticks(low: float, high: float) -> list[float]:
    step = linear_step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; for a few decades also 2 and 5 times them; for less than one decade, all round numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    if span < 0.7:
        return linear_ticks(low, high)
    multiples = (1,) if span > 3 else (1, 2, 5)
    return [m * 10.0**d for d in decades for m in multiples]


def make_axis(values: Sequence[float], log: bool, tight: bool) -> Axis:
    """An axis over the values: exactly (tight), or out to the next round number."""
    low, high = min(values), max(values)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    if tight:
        return Axis(low, high, log)
    if log:
        return Axis(low, high, True).wider(0.04)
    step = linear_step(low, high)
    return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, False)


def number(value: float) -> str:
    """A short label: 1500 -> 1.5k, 0.25 -> 0.25."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    scatter: bool = False,
) -> Html:
    """A figure with a title, the chart, a legend and the numbers as a table.

    `scatter` is for a few individual points: room at both sides, and intervals as bars, not as a band.
    """
    series = [clean(s, log_x, log_y) for s in series]
    series = [s for s in series if s.points]
    require(bool(series), f"chart {title!r} has no points that can be drawn")
    ends = [v for s in series for pair in s.interval or () for v in pair]
    sides = [v for s in series for pair in s.x_interval or () for v in pair]
    x_axis = make_axis([x for s in series for x, _ in s.points] + sides, log_x, tight=True)
    x_axis = x_axis.wider(0.04) if scatter else x_axis
    y_axis = make_axis([y for s in series for _, y in s.points] + ends, log_y, tight=False)

    def place(x: float, y: float) -> str:
        across = LEFT + x_axis.at(x) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - y_axis.at(y) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [*draw_axes(x_axis, y_axis, x_label, y_label + (" (log scale)" if log_y else ""))]
    for i, s in enumerate(series):
        if scatter:
            bars = [(place(x, low), place(x, high)) for (x, _), (low, high) in zip(s.points, s.interval or ())]
            bars += [(place(left, y), place(right, y)) for (_, y), (left, right) in zip(s.points, s.x_interval or ())]
            parts += [tag("polyline", points=" ".join(ends), class_=f"bar s{i % COLOURS}") for ends in bars]
        elif s.interval:
            upper = [place(x, high) for (x, _), (_, high) in zip(s.points, s.interval)]
            lower = [place(x, low) for (x, _), (low, _) in zip(s.points, s.interval)]
            parts.append(tag("polygon", points=" ".join(upper + lower[::-1]), class_=f"band f{i % COLOURS}"))
        line = " ".join(place(x, y) for x, y in s.points)
        # after the last colour, the colours repeat with dashed lines
        look = f"line s{i % COLOURS}" + " dashed" * (i // COLOURS % 2)
        parts.append(tag("polyline", points=line, class_=look))
        for (x, y), label in zip(s.points, s.labels or [""] * len(s.points)):
            across, _, down = place(x, y).partition(",")
            # invisible dots still show their tooltip
            look = {"class_": f"point f{i % COLOURS}"} if s.marks else {"fill": "transparent"}
            said = tag("title", f"{s.name}{', ' * bool(label)}{label}: {x:.5g}, {y:.5g}")
            parts.append(tag("circle", said, cx=across, cy=down, r=3.5, **look))
    words = "; ".join(f"{s.name}: from {s.points[0][1]:.4g} to {s.points[-1][1]:.4g}" for s in series)
    label = f"{title}. {x_label} against {y_label}. {words}"
    picture = tag("svg", *parts, class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    names = [tag("li", tag("i", class_=f"k{i % COLOURS}"), s.name) for i, s in enumerate(series)]
    keys = tag("ul", *names, class_="keys")
    named = any(s.labels for s in series)
    rows = [
        (s.name, *([label] if named else []), float(x), float(y))
        for s in series
        for (x, y), label in zip(s.points, s.labels or [""] * len(s.points))
    ]
    numbers = details("Numbers", table(("series", *(["point"] if named else []), x_label, y_label), rows))
    return tag("figure", tag("figcaption", title), picture, keys if len(series) > 1 else "", numbers)


def clean(s: Series, log_x: bool, log_y: bool) -> Series:
    """Drop points that the axes cannot show, and thin out long series."""
    columns = [s.interval, s.x_interval, s.labels]
    for column in columns:
        require(
            column is None or len(column) == len(s.points),
            f"series {s.name!r} has {len(s.points)} points, {len(column or ())} intervals or labels",
        )
    kept = []
    for i, (x, y) in enumerate(s.points):
        up = (y, *(s.interval[i] if s.interval else ()))
        across = (x, *(s.x_interval[i] if s.x_interval else ()))
        positive = (not log_x or min(across) > 0) and (not log_y or min(up) > 0)
        if positive and all(math.isfinite(v) for v in (*up, *across)):
            kept.append(i)
    stride = math.ceil(len(kept) / MOST_POINTS) or 1
    kept = kept[::stride] + (kept[-1:] if kept and (len(kept) - 1) % stride else [])
    interval, x_interval, labels = ([column[i] for i in kept] if column else None for column in columns)
    return Series(s.name, [s.points[i] for i in kept], interval, s.marks, x_interval, labels)  # type: ignore[arg-type]


def draw_axes(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[Html]:
    """Grid, axes, tick labels and axis labels."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in y_axis.ticks():
        y = f"{bottom - y_axis.at(value) * (bottom - TOP):.1f}"
        parts.append(tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", number(value), x=LEFT - 6, y=y, dy="0.35em", text_anchor="end"))
    for value in x_axis.ticks():
        x = f"{LEFT + x_axis.at(value) * (right - LEFT):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", number(value), x=x, y=bottom + 17, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", esc(x_label), x=(LEFT + right) / 2, y=HEIGHT - 5, text_anchor="middle"))
    middle = (TOP + bottom) / 2
    turn = f"rotate(-90 12 {middle})"
    parts.append(tag("text", esc(y_label), x=12, y=middle, text_anchor="middle", transform=turn))
    return parts

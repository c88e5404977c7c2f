"""Stage 3 of `adlm evaluate`: the table on the terminal and the page, from results.json, texts and reveals.

The page shows frontiers: generative perplexity against entropy along temperature or top_p, one chart per number of
steps; and every measure against evaluations and seconds, one line per sampler.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.reporting import (
    Html,
    Series,
    Snapshot,
    columns,
    details,
    line_chart,
    page,
    paragraph,
    reveal,
    reveal_script,
    section,
    table,
    tag,
    tiles,
)

# measure -> (name, whether its axis is logarithmic)
MEASURES = {
    "gen_ppl": ("generative perplexity", True),
    "mauve": ("MAUVE", False),
    "entropy": ("entropy, nats", False),
    "distinct_1": ("distinct-1", False),
    "distinct_2": ("distinct-2", False),
    "distinct_3": ("distinct-3", False),
    "shared_4": ("shared 4-grams", False),
}
# Measures with charts; the others are only in the table.
DRAWN = ("gen_ppl", "mauve", "entropy")
Point = dict[str, Any]
"""An entry of results["settings"]."""


def build_report(results: dict[str, Any], texts: dict[str, list[str]], reveals: dict[str, list[Snapshot]]) -> str:
    """The page. `texts`: label of a setting -> some of its texts; `reveals`: title -> snapshots."""
    points = results["settings"]
    first, data = points[0], results.get("reference")
    facts = {
        "Samples per setting": results["samples"],
        "Settings": len(points),
        **{
            title(MEASURES[m][0]): Html(f"{figure(first, m)}<br><small>{first['label']}</small>")
            for m in DRAWN
            if m in first["metrics"]
        },
    }
    notes = [paragraph(note) for note in results.get("notes", ())]
    return page(
        f"Samples of {results['checkpoint']}",
        tiles(facts),
        *([section("Notes", *notes)] if notes else []),
        *frontiers([p for p in points if "gen_ppl" in p["metrics"]], data),
        *knobs(points),
        *costs(points),
        summary(points, data),
        section("Being written", *players(reveals), lead="One text of each sampler, step by step.") if reveals else "",
        section("Samples", *shown(texts), lead="The first texts of each setting, nothing chosen."),
        fine_print(results),
        reveal_script() if reveals else "",
        subtitle=f"{results['algo'].upper()}, {results['parameters']:,} parameters, step {results.get('step')}: "
        "generative perplexity alone is easily fooled, so every number stands beside the others.",
    )


def title(words: str) -> str:
    return words[0].upper() + words[1:]


def value(point: Point, measure: str) -> float:
    return point["metrics"][measure][0]


def ends(point: Point, measure: str) -> tuple[float, float]:
    number, low, high = point["metrics"][measure]
    return (number, number) if low is None else (low, high)


def figure(point: Point, measure: str) -> str:
    """A value formatted for people."""
    number = value(point, measure)
    return f"{number:,.1f}" if measure == "gen_ppl" else f"{number:.3f}"


def swept(points: Sequence[Point], key: str) -> list[Any]:
    """The values of a setting, in order of appearance."""
    return list(dict.fromkeys(p[key] for p in points))


def steps_of(points: Sequence[Point]) -> list[int]:
    """The numbers of steps, without the meaningless ones of samplers that have no steps."""
    return swept([p for p in points if p["steps_matter"]] or points, "steps")


def lines(points: Sequence[Point], keys: Sequence[str], name: Callable[[Point], str]) -> dict[str, list[Point]]:
    """Group points with equal values of `keys`, by name."""
    found: dict[str, list[Point]] = {}
    groups: dict[tuple, str] = {}
    for p in points:
        group = tuple(p[k] for k in keys)
        groups.setdefault(group, name(p))
        found.setdefault(groups[group], []).append(p)
    return found


def knob_of(points: Sequence[Point]) -> str:
    """The setting that varies along a frontier: temperature, unless only top_p was swept."""
    return "top_p" if len(swept(points, "temperature")) == 1 and len(swept(points, "top_p")) > 1 else "temperature"


def frontiers(points: Sequence[Point], data: dict[str, Any] | None) -> list[Html]:
    """Generative perplexity against entropy along temperature (or top_p), one chart for each number of steps."""
    if not points:
        return []
    knob = knob_of(points)
    other = "top_p" if knob == "temperature" else "temperature"
    several = len(swept(points, other)) > 1
    charts = []
    for steps in steps_of(points):
        here = [p for p in points if p["steps"] == steps or not p["steps_matter"]]
        series = []
        for name, group in lines(
            here, ("sampler", other), lambda p: p["sampler"] + (f", {other} {p[other]:g}" if several else "")
        ).items():
            group = sorted(group, key=lambda p: p[knob])
            series.append(
                Series(
                    name,
                    [(value(p, "entropy"), value(p, "gen_ppl")) for p in group],
                    [ends(p, "gen_ppl") for p in group],
                    True,
                    [ends(p, "entropy") for p in group],
                    [f"{knob} {p[knob]:g}" for p in group],
                )
            )
        if data and "gen_ppl" in data["metrics"]:
            at = (value(data, "entropy"), value(data, "gen_ppl"))
            bars = ([ends(data, "gen_ppl")], True, [ends(data, "entropy")])
            series.append(Series("the data itself", [at], *bars, ["sequences of the data"]))
        charts.append(
            line_chart(f"{steps} steps", series, "entropy, nats", MEASURES["gen_ppl"][0], log_y=True, scatter=True)
        )
    lead = (
        f"Each line runs along {knob.replace('_', '-')}. Right and low is better: as varied as the data, and as likely"
        " to the judge. A point that is low but far to the left has bought its perplexity with repetition."
    )
    return [section("Frontier", columns(*charts), lead=lead)]


def knobs(points: Sequence[Point]) -> list[Html]:
    """Each measure over temperature and over top_p, if they were swept."""
    found = []
    for knob, other in (("temperature", "top_p"), ("top_p", "temperature")):
        if len(swept(points, knob)) < 2:
            continue
        first = swept(points, other)[0]
        here = [p for p in points if p[other] == first]
        charts = charts_against(here, ("sampler", "steps"), line_name(points), knob, knob, log_x=False)
        extra = f" at {other} {first:g}" if len(swept(points, other)) > 1 else ""
        found.append(section(f"Over {knob.replace('_', '-')}", columns(*charts), lead=f"Every measure{extra}."))
    return found


def line_name(points: Sequence[Point]) -> Callable[[Point], str]:
    several = len(steps_of(points)) > 1
    return lambda p: p["sampler"] + (f", T={p['steps']}" if several and p["steps_matter"] else "")


def costs(points: Sequence[Point]) -> list[Html]:
    """Each measure against network evaluations and against seconds, one line per sampler."""
    if len(lines(points, ("sampler", "steps"), lambda p: str((p["sampler"], p["steps"])))) < 2:
        return []
    first = swept(points, "temperature")[0], swept(points, "top_p")[0]
    here = [p for p in points if (p["temperature"], p["top_p"]) == first]
    found = []
    for title, key, words in (
        ("Against network evaluations", "nfe", "network evaluations per sample"),
        ("Against seconds", "seconds", "seconds per sample"),
    ):
        charts = charts_against(here, ("sampler",), lambda p: p["sampler"], key, words, log_x=True)
        lead = f"At temperature {first[0]:g}, top-p {first[1]:g}; along a line, more steps."
        if key == "seconds":
            lead += " Time of the whole batch on this machine, shared among its texts."
        found.append(section(title, columns(*charts), lead=lead))
    return found


def charts_against(
    points: Sequence[Point],
    keys: Sequence[str],
    name: Callable[[Point], str],
    x: str,
    x_label: str,
    log_x: bool,
) -> list[Html]:
    """One chart for each measure in DRAWN against the field `x`, one line for each group of equal `keys`."""
    charts = []
    for measure in DRAWN:
        if not all(measure in p["metrics"] for p in points):
            continue
        words, log_y = MEASURES[measure]
        series = []
        for label, group in lines(points, keys, name).items():
            group = sorted(group, key=lambda p: p[x])
            at = [(p[x], value(p, measure)) for p in group]
            said = [p["label"] for p in group]
            series.append(Series(label, at, [ends(p, measure) for p in group], True, None, said))
        charts.append(line_chart(title(words), series, x_label, words, log_x, log_y, scatter=True))
    return charts


def summary(points: Sequence[Point], data: dict[str, Any] | None) -> Html:
    """A table of every number with its interval."""
    measures = [m for m in MEASURES if any(m in p["metrics"] for p in points)]
    rows = []
    for p in [*([data] if data else []), *points]:
        cells = []
        for m in measures:
            if m not in p["metrics"]:
                cells.append("")
                continue
            low, high = ends(p, m)
            spread = f"{low:,.1f} - {high:,.1f}" if m == "gen_ppl" else f"{low:.3f} - {high:.3f}"
            cells.append(Html(f"{figure(p, m)}<br><small>{spread}</small>"))
        name = p["label"] if p is not data else tag("em", "the data itself")
        rows.append((name, *cells, *((float(p["nfe"]), float(p["seconds"])) if p is not data else ("", ""))))
    head = ("setting", *(MEASURES[m][0] for m in measures), "evaluations", "seconds")
    return section("All numbers", table(head, rows), lead="With 95% bootstrap intervals over samples.")


def players(reveals: dict[str, list[Snapshot]]) -> list[Html]:
    return [part for label, frames in reveals.items() for part in (tag("h3", label), reveal(frames, label))]


def shown(texts: dict[str, list[str]]) -> list[Html]:
    blocks = []
    for number, (label, some) in enumerate(texts.items()):
        passages = [tag("p", text, class_="passage") for text in some]
        blocks += [tag("h3", label), *passages] if number == 0 else [details(label, *passages)]
    return blocks


def fine_print(results: dict[str, Any]) -> Html:
    """The facts that are needed to repeat or compare the numbers."""
    rows: list[tuple[Any, Any]] = []
    if judge := results.get("judge"):
        rows.append(("judge", f"{judge['name']} ({judge.get('kind', 'not opened')}); rule {judge['rule']}"))
    rows += [(tag("code", name), words) for name, words in results["definitions"].items()]
    rows += [("weights", tag("code", results["weights_sha256"][:16]))]
    rows += [(name, version) for name, version in results["versions"].items()]
    return section("Definitions and versions", table((), rows))


def show(results: dict[str, Any]) -> None:
    """Print the table; notes go to stderr."""
    names = [m for m in MEASURES if any(m in p["metrics"] for p in results["settings"])]
    listing = Table("setting", *(MEASURES[m][0] for m in names), "evaluations", "seconds", box=None)
    for column in listing.columns[1:]:
        column.justify = "right"
    for p in [*filter(None, [results["reference"]]), *results["settings"]]:
        cells = []
        for m in names:
            _, low, high = p["metrics"].get(m, (None, None, None))
            half = "" if low is None else f" +-{(high - low) / 2:.2g}"
            cells.append(figure(p, m) + half if m in p["metrics"] else "")
        cost = (f"{p['nfe']:.1f}", f"{p['seconds']:.3f}") if "nfe" in p else ("", "")
        listing.add_row(p["label"], *cells, *cost)
    console = Console()
    (console if console.is_terminal else Console(width=190)).print(listing)
    for note in results["notes"]:
        print(f"note: {note}", file=sys.stderr)

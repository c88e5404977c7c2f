"""Reports: well-formed documents, text that stays text, numbers that are there, nothing fetched from elsewhere."""

import math
import re

import pytest
from documents import Document, player_data

from adlm import reporting
from adlm import reporting as report
from adlm.io.paths import write_atomically
from adlm.reporting import Axis, Html, Series, Span, esc, legend, line_chart, page, passage, section, table, tag, tiles

HOSTILE = "<script>alert('x')</script> & \"quotes\" \x00\x1b"


def example_page() -> str:
    loss = Series("training", [(i, 8 * math.exp(-i / 40) + 2) for i in range(100)])
    valid = Series("validation", [(0, 10.0), (50, 4.5), (99, 3.25)], [(9, 11), (4, 5), (3, 3.5)], marks=True)
    return page(
        "Report <of> a run",
        tiles({"perplexity": 31.5, "tokens": 12_345_678, "label <b>": "a & b"}),
        section("Curves", report.columns(line_chart("Loss & co", [loss, valid], "step", "nats", log_y=True))),
        section("Text", passage([Span("one "), Span(HOSTILE, "anchor", 'rests "here"')]), legend({"anchor": "rare"})),
        section("Table", table(("name", "value"), [("a<b", 0.123456), ("steps", 1200), ("yes", True)], "numbers")),
        report.details("More", report.code("adlm sample runs/demo key='<x>'")),
        subtitle="subtitle",
    )


def test_page_is_well_formed_and_complete():
    text = example_page()
    assert text.startswith("<!doctype html>")
    document = Document(text)
    for words in ("Report <of> a run", "31.5", "12,345,678", "a & b", "0.1235", "1,200", "True", "key='<x>'"):
        assert words in document.words
    assert ("lang", "en") in document.attributes
    assert any(key == "content" and "width=device-width" in (value or "") for key, value in document.attributes)


def test_nothing_is_fetched_from_elsewhere():
    text = example_page()
    assert not re.search(r"https?://|@import|url\(|<link|\bsrc=", text)


def test_every_colour_has_a_light_and_a_dark_value():
    style = report.asset("style.css")
    (root,) = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = re.findall(r"(--[\w-]+): (.*?);", root)
    assert colours and all(re.fullmatch(r"light-dark\(#\w{6}, #\w{6}\)", value) for _, value in colours)
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= {name for name, _ in colours}


def test_text_stays_text():
    document = Document(example_page())
    assert "script" not in document.tags
    assert "<script>alert('x')</script> & \"quotes\"" in document.words
    assert "\x00" not in document.words and "\x1b" not in document.words and "\ufffd" in document.words
    assert ("title", 'rests "here"') in document.attributes
    assert esc(Html("<b>")) == "<b>" and esc("<b>") == "&lt;b&gt;"
    assert tag("p", "x", title='"><script>', hidden=True, id=None) == '<p title="&quot;&gt;&lt;script&gt;" hidden>x</p>'


def test_passage_keeps_every_character_and_joins_plain_neighbours():
    spans = [Span("a"), Span("b\n"), Span(" c", "anchor"), Span("d", "anchor"), Span("e")]
    assert Document(passage(spans)).words == "ab\n cde"
    assert passage(spans).count("<mark") == 2
    assert passage(spans).startswith('<p class="passage">ab\n<mark')


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 600, False, [0, 100, 200, 300, 400, 500, 600]),
        (-0.5, 0.5, False, [-0.4, -0.2, 0, 0.2, 0.4]),
        (1, 1000, True, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (30, 5000, True, [50, 100, 200, 500, 1000, 2000, 5000]),
        (1, 1e6, True, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (300, 900, True, [300, 400, 500, 600, 700, 800, 900]),
    ],
)
def test_ticks_are_round_numbers(low, high, log, expected):
    assert Axis(low, high, log).ticks() == pytest.approx(expected)


@pytest.mark.parametrize("log", [False, True])
def test_axis_is_monotone_from_0_to_1(log):
    axis = Axis(2.0, 50.0, log)
    places = [axis.at(v) for v in (2.0, 3.0, 10.0, 49.0, 50.0)]
    assert places[0] == 0 and places[-1] == pytest.approx(1) and places == sorted(places)
    assert axis.at(10.0) == pytest.approx(0.5 if log else 1 / 6)


def test_number_labels():
    said = [reporting.number(v) for v in (0, 0.25, 7, 999, 1500, 20_000, 3e6, 4.2e9)]
    assert said == ["0", "0.25", "7", "999", "1.5k", "20k", "3M", "4.2G"]


def polyline(text: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'<polyline points="([^"]*)"', text)
    return [tuple(map(float, pair.split(","))) for pair in points.split()]


def test_chart_puts_points_where_the_axes_say():
    text = line_chart("t", [Series("s", [(0, 0), (5, 10), (10, 5)])], "x", "y")
    bottom, right = reporting.HEIGHT - reporting.BOTTOM, reporting.WIDTH - reporting.RIGHT
    middle, half = (reporting.LEFT + right) / 2, (reporting.TOP + bottom) / 2
    assert polyline(text) == [(reporting.LEFT, bottom), (middle, reporting.TOP), (right, half)]
    assert "s: 5, 10" in Document(text).words  # what the pointer reads
    assert any(key == "aria-label" and "from 0 to 5" in (value or "") for key, value in Document(text).attributes)


def test_chart_leaves_out_what_has_no_place():
    points = [(0, 1), (1, math.nan), (2, math.inf), (3, -1), (4, 10)]
    assert len(polyline(line_chart("t", [Series("s", points)], "x", "y", log_y=True))) == 2
    with pytest.raises(ValueError, match="no points"):
        line_chart("t", [Series("s", [(0, math.nan)])], "x", "y")
    with pytest.raises(ValueError, match="intervals"):
        line_chart("t", [Series("s", [(0, 1)], [(0, 1), (1, 2)])], "x", "y")


def test_long_series_are_thinned_and_keep_their_ends():
    points = [(i, math.sin(i)) for i in range(10_001)]
    drawn = reporting.clean(Series("s", points), False, False).points
    assert len(drawn) <= reporting.MOST_POINTS + 1 and drawn[0] == points[0] and drawn[-1] == points[-1]


def test_a_constant_series_can_be_drawn():
    for log in (False, True):
        assert len(polyline(line_chart("t", [Series("s", [(1, 3), (2, 3)])], "x", "y", log_y=log))) == 2


def test_write_replaces_the_file_whole(tmp_path):
    path = tmp_path / "new" / "report.html"
    write_atomically(path, "first")
    write_atomically(path, "second")
    assert path.read_text() == "second" and [p.name for p in path.parent.iterdir()] == ["report.html"]


# The animated reveal

SNAPSHOTS = [
    report.Snapshot(1, ["a", None, None]),
    report.Snapshot(2, ["a", "</script><b>", None]),
    report.Snapshot(3, [None, "</script><b>", "c"]),
    report.Snapshot(5, ["z", "</script><b>", "c"]),
]


def test_reveal_data_gives_back_every_canvas():
    data = player_data(report.reveal(SNAPSHOTS, "a text"))
    canvas = [None] * data["length"]
    for snapshot, (step, changed) in zip(SNAPSHOTS, data["frames"], strict=True):
        for i, text in changed:
            assert canvas[i] != text
            canvas[i] = text
        assert (canvas, step) == (list(snapshot.texts), snapshot.step)


def test_reveal_is_well_formed_inert_and_complete_without_scripts():
    text = page("t", report.reveal(SNAPSHOTS, 'say "hi"'), report.reveal_script())
    document = Document(text)
    assert "b" not in document.tags
    assert "z</script><b>c" in document.words
    assert text.count("<script") == 2 and ("aria-label", 'say "hi"') in document.attributes
    assert [value for key, value in document.attributes if key == "max"] == ["4"]
    assert not re.search(r"https?://", text)

"""benchmarks/infilling.py: which sentences it takes, where it cuts them, who sees what, and what is counted."""

import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from exports import export

import adlm
from adlm.evaluation.judge import open_judge

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "infilling.py"
LONG = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen."
DOCUMENTS = [
    f"Too short. Also short. The first that fits is not taken, since a title may stand before it. {LONG} After it.",
    "Nothing here is long enough. Nothing at all.",
    f"A title of many words stands here and it is long enough to be one of them. {LONG.replace('ten', 'TEN')}",
    f"A title of many words stands here and it is long enough to be one of them. {LONG.replace('ten', '[MASK]')}",
]


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(BENCHMARK))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("infilling")
    torch.manual_seed(0)
    export(folder / "diffusion", length=256)
    export(folder / "causal", length=256, causal=True, anchored=False)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return folder


def test_sentences_are_neither_short_nor_templates(benchmark):
    assert list(benchmark["sentences"](DOCUMENTS)) == [LONG, LONG.replace("ten", "TEN")]


def test_holes_are_whole_words_of_so_many_tokens(benchmark, home):
    judge = open_judge(str(home / "causal"), torch.device("cpu"))
    chance, found = random.Random(0), set()
    for _ in range(200):
        hole = benchmark["cut"](LONG, judge, 10, chance)
        assert "".join(hole) == LONG and hole.left and hole.right and len(judge.encode(hole.middle)) == 10
        before = len(hole.left.split())
        assert hole.middle[0] == hole.right[0] == " " and hole.middle.split() == LONG.split()[before : before + 2]
        found.add(hole)
    assert {hole.middle for hole in found} == {" four five", " six seven"}, "those with ten bytes"
    assert benchmark["cut"](LONG, judge, 3, chance) is None


def test_both_kinds_of_model_are_asked_and_judged(benchmark, home, capsys, monkeypatch):
    names = [str(home / name) for name in ("diffusion", "causal")]
    more = ["--texts", str(home / "texts.jsonl"), "--judge", names[1], "--hole", "10", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["infilling.py", *names, *more, "--out", str(home / "out.json")])
    benchmark["main"]()
    found = json.loads((home / "out.json").read_text())
    text, *rows = found["rows"]
    holes = [benchmark["Hole"](**hole) for hole in found["holes"]]
    assert len(holes) == 2 and text["judge_perplexity"] > 1
    for name, row in zip(names, rows):
        assert row["model"] == name and row["exact"] == 0 and row["sentences"] == 2 and len(row["filled"]) == 2
    said = capsys.readouterr().out
    assert all(name[-30:] in said for name in names)
    lm = adlm.load(names[1], device="cpu")
    again = lm.generate(prompt=holes[0].left, max_new_tokens=10, temperature=0.0)[0].text
    assert rows[1]["filled"][0] == again.removeprefix(holes[0].left), "the causal one reads the left side alone"


def test_the_right_words_are_counted_and_judged_as_the_text(benchmark, home, monkeypatch):
    main = benchmark["main"]
    monkeypatch.setitem(main.__globals__, "fill", lambda lm, holes: [holes[0].middle, " wrong words"])
    more = ["--texts", str(home / "texts.jsonl"), "--judge", str(home / "causal"), "--hole", "10", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["infilling.py", str(home / "diffusion"), *more, "--out", str(home / "out.json")])
    main()
    text, row = json.loads((home / "out.json").read_text())["rows"]
    assert row["exact"] == 1 and row["judge_perplexity"] != pytest.approx(text["judge_perplexity"], rel=1e-9)
    monkeypatch.setitem(main.__globals__, "fill", lambda lm, holes: [hole.middle for hole in holes])
    main()
    text, row = json.loads((home / "out.json").read_text())["rows"]
    assert row["exact"] == 2 and row["judge_perplexity"] == text["judge_perplexity"]

"""`adlm evaluate` on tiny models, from end to end: what a rerun repeats, ranks, failures, report."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from judges import train_judged

from adlm import cli, config
from adlm.api import load
from adlm.evaluation import judge as judging
from adlm.evaluation.evaluate import label, make_settings, run_evaluate
from adlm.schema import SamplingConfig


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return train_judged(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(autouse=True)
def no_mauve(request, monkeypatch):
    """It takes seconds, and one test asks for it."""
    if "mauve" not in request.node.name:
        monkeypatch.setattr("adlm.evaluation.measures.mauve_available", lambda: False)


def line(home: Path, out: Path, *more: str, run: str = "adlm") -> list[str]:
    return [
        str(home / run), f"out={out}", f"eval.judge={home / 'ar'}", "sampling.n=6", "sampling.steps=4",
        f"data.cache_dir={home / 'cache'}", *more,
    ]  # fmt: skip


def evaluate_config(arguments: list[str]) -> config.Config:
    defaults = cli.COMMANDS["evaluate"].defaults
    return config.load([*defaults, f"eval.checkpoint={arguments[0]}", *arguments[1:]], run_folder=False)


def product(base: SamplingConfig, **lists) -> list[SamplingConfig]:
    """Every combination of the values of some settings."""
    return [replace(base, **dict(zip(lists, values))) for values in itertools.product(*lists.values())]


# The sweep


def test_each_setting_of_a_sweep_is_drawn_once(home, tmp_path):
    lm = load(home / "adlm", device="cpu")
    base = SamplingConfig(sampler="mdlm", top_p=0.9)
    sweep = product(base, sampler=["mdlm", "first-hitting"], steps=[4, 8], temperature=[0.5, 1.0])
    found = make_settings(lm, [*sweep, *sweep], tmp_path)
    assert [s.label for s in found] == [
        "mdlm-T4-temp0.5-p0.9", "mdlm-T4-temp1-p0.9", "mdlm-T8-temp0.5-p0.9",
        "mdlm-T8-temp1-p0.9", "first-hitting-temp0.5-p0.9", "first-hitting-temp1-p0.9",
    ]  # fmt: skip
    close = product(base, temperature=[0.99999999, 1.0], top_p=[0.9, 0.90000001])
    assert len({label(c) for c in close}) == 4, "samples are kept by label"


# From end to end


def test_a_causal_model_judged_by_itself_gives_its_exact_perplexity(home, tmp_path):
    """Rule `tokens`: the likelihood that `adlm ppl` measures, here from the model's own dense log-probabilities."""
    found = run_evaluate(evaluate_config(line(home, tmp_path, "eval.judge_rule=tokens", run="ar")))
    lm = load(home / "ar")
    (entry,) = found["settings"]
    rows = [json.loads(x)["tokens"] for x in (tmp_path / "samples" / entry["file"]).read_text().splitlines()]
    nats, count = 0.0, 0
    for row in rows:
        log_p = lm.log_probs(torch.tensor([row]))[0]
        nats -= log_p[torch.arange(len(row) - 1), torch.tensor(row[1:])].double().sum().item()
        count += len(row) - 1
    assert entry["sampler"] == "autoregressive"
    assert entry["judged_tokens"] == count
    assert entry["metrics"]["gen_ppl"][0] == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_results_report_and_a_second_run(home, tmp_path, monkeypatch, capsys):
    cfg = evaluate_config(line(home, tmp_path))
    sweep = product(cfg.sampling, sampler=["mdlm", "remdm-cap"], steps=[2, 4], temperature=[0.5, 1.0])
    found = run_evaluate(cfg, sweep)
    assert len(found["settings"]) == 8
    assert found["reference"]["rows"] == 6
    for entry in [*found["settings"], found["reference"]]:
        for name, (value, low, high) in entry["metrics"].items():
            assert math.isfinite(value) and low <= value <= high, name
        assert {"gen_ppl", "entropy", "distinct_1", "shared_4"} <= set(entry["metrics"])
    assert found["judge"]["rule"].startswith("text: ")
    assert found == json.loads((tmp_path / "results.json").read_text()), "what is returned is what is written"
    page = (tmp_path / "report.html").read_text()
    for part in ("Frontier", "Over temperature", "Against network evaluations", "Against seconds", "the data itself"):
        assert part in page
    assert "http://" not in page and "https://" not in page

    def never(*arguments, **named):
        raise AssertionError("there was nothing left to do")

    monkeypatch.setattr("adlm.evaluation.evaluate.record", never)
    monkeypatch.setattr("adlm.evaluation.measures.open_judge", never)
    assert run_evaluate(cfg, sweep) == found
    assert "0 drawn now, 6 found" in capsys.readouterr().out


def test_more_samples_only_draw_what_is_new(home, tmp_path):
    few = run_evaluate(evaluate_config(line(home, tmp_path)))
    path = tmp_path / "samples" / few["settings"][0]["file"]
    before = path.read_text()
    many = run_evaluate(evaluate_config(line(home, tmp_path, "sampling.n=9")))
    assert path.read_text().startswith(before)
    assert many["settings"][0]["file"] == path.name
    assert many["settings"][0]["judged_tokens"] > few["settings"][0]["judged_tokens"]


def test_other_weights_have_other_files(home, tmp_path):
    first = run_evaluate(evaluate_config(line(home, tmp_path, "eval.judge=none")))
    raw = run_evaluate(evaluate_config(line(home, tmp_path, "eval.judge=none", "eval.ema=false")))
    assert first["settings"][0]["file"] != raw["settings"][0]["file"]
    assert "gen_ppl" not in first["settings"][0]["metrics"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_drawn(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("adlm.evaluation.evaluate.draw_samples", lambda *args: pytest.fail("it was drawn"))
    with pytest.raises(ValueError, match=f"out='{tmp_path}/file/x' is not a writable folder"):
        run_evaluate(evaluate_config(line(home, tmp_path / "file" / "x")))


def test_a_judge_that_fails_loses_nothing(home, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    arguments = ["evaluate", *line(home, tmp_path / "out", f"eval.judge={broken}")]
    assert cli.main(arguments) == 1
    said = capsys.readouterr()
    assert "cannot be loaded" in said.err and "are kept in" in said.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"][0]["metrics"]["entropy"][0] > 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert cli.main(["evaluate", *line(home, tmp_path / "out")]) == 0
    assert "0 drawn now, 6 found" in capsys.readouterr().out


def test_mauve_of_samples_against_the_data(home, tmp_path):
    pytest.importorskip("mauve")
    cfg = evaluate_config(line(home, tmp_path, "sampling.n=24"))
    found = run_evaluate(cfg, product(cfg.sampling, sampler=["mdlm", "remdm-cap"]))
    for entry in found["settings"]:
        value, low, high = entry["metrics"]["mauve"]
        assert 0 <= low <= value <= high <= 1
    assert "MAUVE" in (tmp_path / "report.html").read_text()
    assert any("says little" in note for note in found["notes"])
    assert len(list((tmp_path / "mauve").iterdir())) == 2


def test_without_data_there_is_no_comparison(home, tmp_path, capsys):
    arguments = line(home, tmp_path, "data=file", f"data.path={tmp_path / 'nothing.jsonl'}")
    found = run_evaluate(evaluate_config(arguments))
    assert found["reference"] is None and found["settings"][0]["metrics"]["gen_ppl"][0] > 1
    assert any("nothing to compare with" in note for note in found["notes"])


def test_the_document_of_the_release(home, tmp_path):
    """In the folder of the results; also where `out` names it, as the release's sampling.generated_seqs_path does."""
    found = run_evaluate(evaluate_config(line(home, tmp_path / "x.json", "eval.judge=none")))
    document = json.loads((tmp_path / "x.json").read_text())
    assert document == json.loads((tmp_path / "x" / "release.json").read_text())
    assert document["entropy"] == found["settings"][0]["metrics"]["entropy"][0] and document["gen_ppl"] is None
    assert len(document["text_samples"]) == len(document["entropies"]) == 6


def test_chunks_that_are_missing_or_corrupt_are_judged_again(home, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "CHUNK", 2)
    arguments = line(home, tmp_path, "data=file", f"data.path={tmp_path / 'nothing.jsonl'}")
    found = run_evaluate(evaluate_config(arguments))
    chunks = sorted((tmp_path / "scores").rglob("*.npz"))
    assert len(chunks) == 3
    chunks[0].unlink()
    chunks[1].write_bytes(chunks[1].read_bytes()[:100])
    kept = chunks[2].stat().st_mtime_ns
    again = run_evaluate(evaluate_config(arguments))
    assert again["settings"] == found["settings"]
    assert chunks[2].stat().st_mtime_ns == kept
    assert all(p.stat().st_size > 100 for p in chunks)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(home, tmp_path):
    more = ("sampling.sampler=remdm-cap", "sampling.n=7")
    alone = run_evaluate(evaluate_config(line(home, tmp_path / "one", *more)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "adlm"]
    command += ["evaluate", *line(home, tmp_path / "two", *more)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    for a, b in zip(alone["settings"], two["settings"], strict=True):
        b["metrics"].pop("mauve", None)  # other processes may have it; here the fixture `no_mauve` is on
        assert a["metrics"] == b["metrics"]
        assert a["fingerprint"] == b["fingerprint"]
    assert not list((tmp_path / "two" / "samples").glob("*.part*"))
    assert two["reference"]["metrics"] == alone["reference"]["metrics"]


def test_parts_of_a_killed_run_with_more_ranks_are_found(home, tmp_path):
    """Files of ranks that no longer exist, one with a last line cut short, are merged and only the rest is drawn."""
    arguments = line(home, tmp_path, "eval.judge=none")
    found = run_evaluate(evaluate_config(arguments))
    path = tmp_path / "samples" / found["settings"][0]["file"]
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    path.with_suffix(".part0.jsonl").write_text("".join(lines[::2]))
    path.with_suffix(".part3.jsonl").write_text(lines[1] + lines[3][:40])
    again = run_evaluate(evaluate_config(arguments))
    assert again["settings"][0]["metrics"] == found["settings"][0]["metrics"]
    timeless = [replace_times(x) for x in path.read_text().splitlines()]
    assert timeless == [replace_times(x) for x in lines]


def replace_times(text: str) -> dict:
    return {k: v for k, v in json.loads(text).items() if k not in ("seconds", "spent")}


@pytest.mark.slow
def test_killed_in_stage_two_and_run_again(home, tmp_path):
    """SIGKILL while the judge reads 6 chunks of data and 6 of samples: the second run judges only what is missing."""
    arguments = line(home, tmp_path, "sampling.n=60")
    slow = (
        "import time; from adlm.evaluation import judge; from adlm import cli; import sys; judge.CHUNK = 10;"
        "old = judge.score_texts\n"
        "def score(*a):\n    time.sleep(0.3); return old(*a)\n"
        "judge.score_texts = score; sys.exit(cli.main(sys.argv[1:]))"
    )
    total = 12
    process = subprocess.Popen([sys.executable, "-c", slow, "evaluate", *arguments], env=environment())
    deadline = time.monotonic() + 200
    while len(list(tmp_path.rglob("0*.npz"))) < 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was at work when it was killed"
    judged = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("0*.npz")}
    drawn = {p: p.read_bytes() for p in (tmp_path / "samples").iterdir()}
    assert len(drawn) == 1 and 7 <= len(judged) < total
    assert json.loads((tmp_path / "results.json").read_text())["settings"], "what stage 1 found is written"
    command = [sys.executable, "-c", slow, "evaluate", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("0 drawn now, 60 found") == 1
    assert {p: p.read_bytes() for p in (tmp_path / "samples").iterdir()} == drawn
    assert {p: p.stat().st_mtime_ns for p in judged} == judged
    assert len(list(tmp_path.rglob("0*.npz"))) == total

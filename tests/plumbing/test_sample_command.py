"""`adlm sample`: the file of samples and what a rerun continues, what is refused, watching."""

import io
import json
import os
from pathlib import Path

import pytest
from exports import export
from rich.console import Console

import adlm
from adlm import cli
from adlm.api.command import run_sample, watch_text
from adlm.schema import Config, SamplingConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("diffusion") / "export")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder, device="cpu")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return adlm.load(
        export(tmp_path_factory.mktemp("causal") / "export", causal=True, anchored=False, conditioning="none"), "cpu"
    )


def config(folder, out="", **sampling) -> Config:
    cfg = Config(out=out, sampling=SamplingConfig(**({"steps": 4, "n": 5} | sampling)))
    cfg.eval.checkpoint, cfg.train.device = str(folder), "cpu"
    return cfg


def test_samples_go_to_a_file_and_a_rerun_continues(folder, tmp_path, capsys):
    out = tmp_path / "deep" / "samples.jsonl"
    first = run_sample(config(folder, out=str(out), n=3))
    assert first["drawn"] == 3
    whole = out.read_text().splitlines()
    # a crash in the middle of the third line
    out.write_text("\n".join(whole[:2]) + "\n" + whole[2][:20])
    second = run_sample(config(folder, out=str(out), n=6, batch_size=1))
    assert (second["drawn"], second["already_there"]) == (4, 2)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == list(range(6))
    straight = run_sample(config(folder, n=6))
    assert [line["text"] for line in sorted(lines, key=lambda s: s["seed"])] == straight["texts"]
    assert "--- seed 5" in capsys.readouterr().out
    assert run_sample(config(folder, out=str(out), n=6))["drawn"] == 0
    assert capsys.readouterr().out == f"all 6 samples are in {out} already\n"


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path, monkeypatch, capsys):
    """Only a folder of runs speaks for itself: one that is named like an owner on the hub keeps nobody from the hub."""
    monkeypatch.chdir(tmp_path)
    for place in ("runs/one/config.yaml", "runs/two/config.yaml", "Qwen/notes.txt"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert cli.main(["sample", "runs/three"]) == 1
    assert "eval.checkpoint='runs/three' does not exist; runs has one, two" in capsys.readouterr().err
    assert cli.main(["sample", "Qwen/Qwen3-0.6B"]) == 1
    assert "cannot be fetched from the hub" in capsys.readouterr().err


def test_texts_are_shown_in_the_order_of_their_seeds(folder, capsys):
    """Whichever is finished first: with mdlm a text takes as many evaluations as it has steps that draw something."""
    found = run_sample(config(folder, n=12, steps=12, sampler="mdlm", batch_size=12, length=12))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- seed")]
    assert [int(line.split()[2].strip(",")) for line in shown] == list(range(12))
    assert len({line.split()[3] for line in shown}) > 1 and found["drawn"] == 12, "they did not all end together"


def test_a_file_of_other_settings_is_refused(folder, tmp_path):
    out = tmp_path / "samples.jsonl"
    run_sample(config(folder, out=str(out), n=1))
    with pytest.raises(ValueError, match="other settings"):
        run_sample(config(folder, out=str(out), n=2, top_p=0.5))
    out.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is not a sample"):
        run_sample(config(folder, out=str(out)))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_drawn(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("adlm.api.command.draw", lambda *args: pytest.fail("it was drawn and would be lost"))
    for out in (tmp_path, tmp_path / "file" / "samples.jsonl", Path(os.devnull)):
        with pytest.raises(ValueError, match=f"out='{out}' cannot be written"):
            run_sample(config(folder, out=str(out)))


def test_line_breaks_of_unicode_are_part_of_a_sample(folder, tmp_path):
    from adlm.api.command import read_samples, record

    out, text = tmp_path / "samples.jsonl", "a\u2028b\u2029c\x85d\x1ce"
    record(out, adlm.Generation(text, [1], 1, 0.1, seed=7), "me")
    assert read_samples(out, "me")[7]["text"] == text


@pytest.mark.parametrize("text", ["my notes", "my\nnotes", '{"steps": 3', "\n{", b"\xff\xfe"])
def test_a_file_that_is_not_of_samples_is_left_alone(folder, tmp_path, text):
    out = tmp_path / "notes.txt"
    written = text if isinstance(text, bytes) else text.encode()
    out.write_bytes(written)
    with pytest.raises(ValueError, match="line 1 is not a sample"):
        run_sample(config(folder, out=str(out)))
    assert out.read_bytes() == written


@pytest.mark.parametrize("size", [0, 1, 12, 40])
def test_a_crash_in_the_first_line_is_forgotten(folder, tmp_path, size):
    out = tmp_path / "samples.jsonl"
    run_sample(config(folder, out=str(out), n=1))
    os.truncate(out, size)
    assert run_sample(config(folder, out=str(out), n=2))["drawn"] == 2
    assert len(out.read_bytes().split(b"\n")) == 3


def test_conditions_come_from_the_configuration(folder):
    got = run_sample(config(folder, prompt="ab", length=10, banned="x, y", n=2))
    assert all(t.startswith("ab") for t in got["texts"])
    assert run_sample(config(folder, template="a [MASK:2] b", n=1))["texts"][0].endswith(" b")
    for key in ("banned", "required", "choices"):  # nobody who types a comma wants texts without the condition
        with pytest.raises(ValueError, match=f"sampling.{key} holds no text, only commas"):
            run_sample(config(folder, length=10, **{key: " , "}))


def test_watch_shows_the_reveal(folder, lm):
    screen = io.StringIO()
    request = lm.request(prompt="ab", length=12, steps=6)
    text = watch_text(lm, request, Console(file=screen, force_terminal=True, width=80))
    assert text.tokens == lm.generate(prompt="ab", length=12, steps=6)[0].tokens
    assert "evaluations" in screen.getvalue()
    assert run_sample(config(folder, n=1), watch=True)["drawn"] == 1
    with pytest.raises(ValueError, match="--watch shows one text"):
        run_sample(config(folder, n=2), watch=True)


def test_causal_models_sample_from_the_command(causal, tmp_path):
    causal.save(tmp_path / "ar")
    assert run_sample(config(tmp_path / "ar", n=2))["drawn"] == 2


def test_the_command_line(folder, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    line = [
        "sample",
        str(folder),
        "sampling.n=2",
        "sampling.steps=4",
        f"out={out}",
        "train.device=cpu",
        "--json",
    ]
    assert cli.main(line) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["drawn"] == 2
    assert len(out.read_text().splitlines()) == 2
    assert cli.main([*line, "sampling=remdm-loop"]) == 1
    assert "other settings" in capsys.readouterr().err
    for bad, message in (("sampling.steps=0", "sampling.steps"), ("sampling.top_p=0", "sampling.top_p")):
        assert cli.main([*line[:4], bad]) == 1
        assert message in capsys.readouterr().err

"""What may happen to a run besides training: signals, damage, changed data, other folders, and what it says."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from kills import in_a_fork
from runs import overrides, run_config, write_corpus
from safetensors.torch import load_file

from adlm import cli
from adlm.io.load import load_checkpoint
from adlm.io.paths import claimed, writable_folder
from adlm.schema import Config
from adlm.training import loop, metrics, optim
from adlm.training import run as runs
from adlm.training.metrics import RunLog, read_metrics

pty = pytest.importorskip("pty")  # as os.fork: not on Windows
SMALL = {
    "model__length": 16,
    "model__n_blocks": 1,
    "train__global_batch_size": 4,
    "train__steps": 4,
    "train__valid_every": 2,
    "train__valid_sequences": 4,
    "checkpoint__every": 2,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    loop.train(run_config(folder, **SMALL))
    return folder


@pytest.fixture
def again(finished, tmp_path) -> Config:
    """The settings of a copy of the finished run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return run_config(finished, **SMALL, out=tmp_path / "run")


def files(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".claim"}


# ---- exports


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "README.md"])
def test_a_rerun_repairs_a_corrupt_export(again, name):
    path, weights = Path(again.out) / "export" / name, load_file(Path(again.out) / "export" / "model.safetensors")
    if name == "README.md":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    loop.train(again)
    assert path.is_file()
    repaired = load_checkpoint(again.out).model.state_dict()
    assert all(torch.equal(repaired[key], x) for key, x in weights.items())


def test_a_rerun_draws_missing_curves_and_removes_leftovers(again):
    run = Path(again.out)
    before = files(run)
    (run / "curves.png").unlink()
    for leftover in (run / ".export-abc", run / "checkpoints" / "partial-step-00000006"):
        leftover.mkdir()
        (leftover / "half").write_text("x")
    loop.train(again)
    assert {**files(run), "curves.png": b""} == {**before, "curves.png": b""} and (run / "curves.png").is_file()
    assert not list(run.rglob("half"))


def test_the_newer_of_export_and_checkpoint_is_loaded(again, finished, monkeypatch, capsys):
    longer = run_config(finished, **SMALL | {"train__steps": 6}, out=again.out)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "export_run", lambda *what: None)
        loop.train(longer)
    assert load_checkpoint(again.out).info["step"] == 6
    newest = Path(again.out) / "checkpoints" / "step-00000006"
    shutil.copytree(newest, newest.with_name("kept"))
    for path in newest.glob("*.distcp"):
        path.write_bytes(b"")
    assert load_checkpoint(again.out).info["step"] == 4 and "step 6 is corrupt" in capsys.readouterr().err
    shutil.rmtree(newest)
    newest.with_name("kept").rename(newest)
    loop.train(longer)
    exported = json.loads((Path(again.out) / "export" / "config.json").read_text())
    assert exported["step"] == 6


# ---- data


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_changed_data_is_refused_by_name(tmp_path, tokenizer):
    settings = SMALL | {"data__tokenizer": tokenizer, "train__steps": 2, "train__valid_every": 0}
    loop.train(run_config(tmp_path, **settings))
    write_corpus(tmp_path / "corpus.jsonl", seed=1)
    with pytest.raises(ValueError, match=r"was trained on other data: .*; put the data back, or use another out="):
        loop.train(run_config(tmp_path, **settings | {"train__steps": 4}))
    write_corpus(tmp_path / "corpus.jsonl")
    loop.train(run_config(tmp_path, **settings | {"train__steps": 4}))


def test_changed_validation_data_is_said(finished, tmp_path, capsys):
    other = write_corpus(tmp_path / "other.jsonl", documents=20, seed=2)
    train = write_corpus(tmp_path / "train.jsonl")
    settings = SMALL | {"train__steps": 2, "data__path": train, "data__valid_path": finished / "corpus.jsonl"}
    loop.train(run_config(finished, **settings, out=tmp_path / "new"))
    settings |= {"train__steps": 4, "data__valid_path": other}
    assert loop.train(run_config(finished, **settings, out=tmp_path / "new")).finished
    assert "the validation data has changed" in capsys.readouterr().err


def test_paths_of_a_run_are_absolute(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path / "corpus.jsonl")
    monkeypatch.chdir(tmp_path)
    settings = SMALL | {"data__path": "corpus.jsonl", "data__cache_dir": "cache", "out": "run"}
    loop.train(run_config(tmp_path, **settings | {"train__steps": 2}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["ppl", str(tmp_path / "run"), "train.device=cpu", "--json"]) == 0, capsys.readouterr().err
    for stored in ("config.yaml", "export/config.json", "checkpoints/step-00000002/state.json"):
        assert str(tmp_path / "corpus.jsonl") in (tmp_path / "run" / stored).read_text(), stored
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    loop.train(run_config(tmp_path, **settings))
    assert "data." not in capsys.readouterr().err.split("resuming")[1].splitlines()[0]  # no change is reported


# ---- metrics and curves


def test_what_is_no_event_does_not_block_a_resume(again):
    path = Path(again.out) / "metrics.jsonl"
    whole, before = path.read_bytes(), read_metrics(Path(again.out))
    junk = [b"\xff\xfe", b"[1]", b"null", b'{"kind": "train"}', b'{"step": "x", "kind": "train"}', b'{"kind": "tra']
    path.write_bytes(b"\n".join(junk[:3]) + b"\n" + whole + b"\n".join(junk[3:]))
    assert read_metrics(Path(again.out)) == before
    (Path(again.out) / "curves.png").unlink()
    assert loop.train(again).finished
    assert path.read_bytes() == whole and (Path(again.out) / "curves.png").is_file()


def test_a_line_after_a_full_disk_is_whole(tmp_path, monkeypatch):
    log = RunLog(tmp_path, run_config(tmp_path), None, active=True)
    log.write("train", 1, {"nll": 1.0})

    def full(*what, **how):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"kind": "train", "st')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        log.write("train", 2, {"nll": 1.0})
    log.write("train", 3, {"nll": 1.0})
    assert [e["step"] for e in read_metrics(tmp_path)] == [1, 3]


def test_lines_of_a_log_say_how_long_the_rest_takes(tmp_path, monkeypatch, capsys):
    log, now = RunLog(tmp_path, run_config(tmp_path), 100, active=True), [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    for step, seconds in ((110, 300.0), (120, 20.0), (140, 10.0), (3000, 7.0)):  # the compiler works before the first
        now[0] += seconds
        log.line(step, 3000, {"nelbo": 5.0})
    first, *more, last = capsys.readouterr().err.splitlines()
    assert first == "step 110/3000  nelbo 5" and last == "step 3000/3000  nelbo 5"
    assert more == ["step 120/3000  nelbo 5  1:36:00 left", "step 140/3000  nelbo 5  0:23:50 left"]


def test_a_picture_that_cannot_be_drawn_is_no_failure(again, monkeypatch, capsys):
    (Path(again.out) / "curves.png").unlink()

    def broken(*what):
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(metrics, "draw_curves", broken)
    assert loop.train(again).finished
    assert "curves.png is not drawn: no fonts\n" in capsys.readouterr().err


def test_curves_have_one_unit(again, monkeypatch):
    import matplotlib.figure

    labels = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *what, **how: labels.extend(a.get_ylabel() for a in self.axes)
    )
    metrics.plot_curves(Path(again.out))
    assert labels == ["nats per token"] * 2


# ---- the folder


@pytest.mark.parametrize("how", ["gone", "file"])
def test_checkpoints_that_cannot_be_read_are_not_none(again, tmp_path, how):
    """A disk that is not mounted, say: the run must not start again."""
    folder = Path(again.out) / "checkpoints"
    shutil.rmtree(folder)
    if how == "gone":
        folder.symlink_to(tmp_path / "not mounted")
    else:
        folder.write_text("")
    before = files(Path(again.out))
    with pytest.raises(ValueError, match="checkpoints cannot be read"):
        loop.train(again)
    assert files(Path(again.out)) == before


def test_what_the_dead_left_half_written_is_removed(tmp_path):
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    for name in (f".results.json.{dead}", f".writable-{dead}", f".results.json.{os.getpid()}", ".hidden", "a.123"):
        (tmp_path / name).write_text("")
    writable_folder("out", tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f".results.json.{os.getpid()}", ".hidden", "a.123"}


def test_one_file_of_samples_has_one_writer(again, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    line = ["sample", again.out, "train.device=cpu", "sampling.n=2", "sampling.length=8", f"out={out}"]
    with claimed(out, str):
        assert cli.main(line) == 1
    assert "is being written by another process" in capsys.readouterr().err and not out.read_text()
    assert cli.main(line) == 0 and len(out.read_text().splitlines()) == 2


# ---- signals


def stop_at(step: int, do) -> None:
    """Have `do` called in the update of this step."""
    update, done = optim.Ema.update, 0

    def patched(self, **arguments):
        nonlocal done
        done += 1
        if done == step:
            do()
        update(self, **arguments)

    optim.Ema.update = patched


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_saves_first_and_the_status_names_it(tmp_path, finished, name, status):
    line = ["train", *overrides(tmp_path, **SMALL)]

    def train() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which is respected
        stop_at(3, lambda: os.kill(os.getpid(), getattr(signal, name)))
        return cli.main(line)

    assert in_a_fork(train) == status
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir() and not (tmp_path / "run" / "export").exists()
    if name == "SIGTERM":  # the same command resumes
        assert cli.main(line) == 0
        losses = [[e.get("nll", e.get("nelbo")) for e in read_metrics(f / "run")] for f in (tmp_path, finished)]
        assert losses[0] == losses[1]


def test_a_run_whose_terminal_is_closed_saves(tmp_path):
    line, (read, write) = ["train", *overrides(tmp_path, **SMALL)], os.pipe()

    def wait() -> None:
        os.write(write, b"x")
        time.sleep(0.5)

    child, terminal = pty.fork()
    if not child:
        status = 1
        try:
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            stop_at(3, wait)
            status = cli.main(line)
        finally:
            os._exit(status)
    os.read(read, 1)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    assert "/4" in shown  # the progress bar counts steps


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runs.Interruption():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- what is said


def test_the_end_says_where_the_model_is_and_what_next(again, finished, capsys):
    line = ["train", *overrides(finished, **SMALL, out=again.out, optim__lr=0.03)]
    assert cli.main(line) == 0
    said = capsys.readouterr()
    assert f"Model: {again.out}/export (step 4, validation perplexity at most " in said.out
    assert f"adlm sample {again.out}\n" in said.out and f"adlm serve {again.out}\n" in said.out
    assert "nothing is trained; optim.lr was 0.01, is 0.03; to train on, give more train.steps, or another" in said.err

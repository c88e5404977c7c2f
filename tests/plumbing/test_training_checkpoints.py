"""Checkpoints of a run: corruption is noticed, a full disk survived, the right ones are kept."""

import threading
from pathlib import Path

import pytest
import torch
from runs import ALONE, assert_same_run, run_config, weights

from adlm.schema import CheckpointConfig
from adlm.training import checkpoint, loop
from adlm.training.checkpoint import Checkpoints, problem_of, read_weights
from adlm.training.metrics import read_metrics


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    loop.train(run_config(folder))
    return folder


def spoil(folder: Path, how: str) -> None:
    victim = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    victim.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_corrupt_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path, capsys, uninterrupted, how):
    cfg = run_config(tmp_path)
    loop.train(cfg)
    folder = tmp_path / "run" / "checkpoints"
    newest, before = sorted(folder.glob("step-*"))[-1:], sorted(folder.glob("step-*"))[-2]
    spoil(newest[0], how)
    assert problem_of(newest[0]) and not problem_of(before)
    (tmp_path / "run" / "export" / "model.safetensors").unlink()
    assert read_weights(tmp_path / "run", ema=True)[1]["step"] == 8 and newest[0].exists()  # readers change nothing
    loop.train(cfg)
    assert "step 12 is corrupt" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", uninterrupted / "run")
    assert len(list(folder.glob("corrupt-*"))) == 1
    for each in folder.glob("step-*"):
        spoil(each, how)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is corrupt"):
        loop.train(cfg)


def test_a_full_disk_does_not_stop_training_until_the_end(tmp_path, monkeypatch, capsys):
    calls = 0
    original = checkpoint.dcp.save

    def save(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls in (1, 2):
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    loop.train(run_config(tmp_path))
    assert "No space left on device; training continues" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("partial-*"))
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="step 12 could not be written"):
        loop.train(run_config(tmp_path, out=tmp_path / "other"))


def test_a_checkpoint_is_completed_beside_training(tmp_path, monkeypatch, capsys):
    """What was saved is what stood there when `save` returned, it appears when it is safe, and a failure is told."""
    may_go_on, sealed = threading.Event(), checkpoint.seal

    def slow_seal(folder: Path, entries: dict) -> list[Path]:
        assert may_go_on.wait(60)
        return sealed(folder, entries)

    monkeypatch.setattr(checkpoint, "seal", slow_seal)
    checkpoints, state = Checkpoints(tmp_path, CheckpointConfig(), ALONE), {"model": {"x": torch.ones(1000)}}
    checkpoints.save(state, {"step": 1}, wait=False)
    assert checkpoints.steps() == []
    state["model"]["x"].zero_()
    may_go_on.set()
    checkpoints.finish_writing()
    assert checkpoints.steps() == [1] and problem_of(checkpoints.path(1)) is None
    checkpoints.load(1, state)
    assert torch.equal(state["model"]["x"], torch.ones(1000))

    monkeypatch.setattr(checkpoint, "seal", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
    checkpoints.save(state, {"step": 2}, wait=False)
    checkpoints.writing.join()
    monkeypatch.setattr(checkpoint, "seal", sealed)
    checkpoints.save(state, {"step": 3})
    assert "step 2 could not be written" in capsys.readouterr().err
    assert checkpoints.steps() == [1, 3] and not list(checkpoints.folder.glob("partial-*"))


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    cfg = run_config(tmp_path, checkpoint__every=2, checkpoint__keep=2, checkpoint__best=False)
    loop.train(cfg)
    checkpoints = Checkpoints(tmp_path / "run", cfg.checkpoint, None)
    assert checkpoints.steps() == [10, 12]
    cfg.checkpoint.keep = 1
    checkpoints.prune(best_step=10)
    assert checkpoints.steps() == [10, 12]
    checkpoints.prune(best_step=12)
    assert checkpoints.steps() == [12]


@pytest.mark.parametrize(("best", "saved"), [(True, [3, 6, 9, 12]), (False, [12])])
def test_better_bounds_are_saved_unless_that_is_off(tmp_path, best, saved):
    cfg = run_config(tmp_path, checkpoint__every=1000, checkpoint__keep=9, checkpoint__best=best, train__valid_every=3)
    loop.train(cfg)
    bounds = [line["nll"] for line in read_metrics(tmp_path / "run") if line["kind"] == "valid"]
    assert bounds == sorted(bounds, reverse=True)
    assert Checkpoints(tmp_path / "run", cfg.checkpoint, None).steps() == saved


def test_weights_can_be_read_without_the_run(uninterrupted):
    run = uninterrupted / "run"
    averaged, info = read_weights(run, ema=True)
    raw, _ = read_weights(run, ema=False)
    exported = weights(run)
    assert info["step"] == 12 and all(torch.equal(averaged[name], exported[name]) for name in exported)
    assert any(not torch.equal(raw[name], exported[name]) for name in exported)

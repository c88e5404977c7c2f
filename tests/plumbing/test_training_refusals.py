"""Runs that cannot start or go on say so in one line; finished runs are left alone."""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from runs import ALONE, run_config, start, wait_for_step

from adlm.data.tokenizers import load_tokenizer
from adlm.schema import CheckpointConfig
from adlm.training import loop, run
from adlm.training.checkpoint import Checkpoints, read_weights
from adlm.training.metrics import read_metrics


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    loop.train(run_config(folder))
    return folder


def test_resuming_with_another_model_or_tokenizer_is_refused(tmp_path):
    loop.train(run_config(tmp_path))
    with pytest.raises(ValueError, match=r"started with model\.n_blocks=2, now it is 3"):
        loop.train(run_config(tmp_path, model__n_blocks=3))
    with pytest.raises(ValueError, match="another tokenizer"):
        loop.train(run_config(tmp_path, data__tokenizer="bpe-300"))
    with pytest.raises(ValueError, match=r"started with optim\.name=adamw, now it is muon"):
        loop.train(run_config(tmp_path, optim="muon"))
    for key, before, now in (("global_batch_size", 8, 16), ("length_warmup", 1, 2)):
        with pytest.raises(ValueError, match=rf"started with train\.{key}={before}, now it is {now}"):
            loop.train(run_config(tmp_path, **{f"train__{key}": now}))
    with pytest.raises(ValueError, match=r"checkpoint\.resume=true"):
        loop.train(run_config(tmp_path, checkpoint__resume=False))


def test_resuming_may_not_move_what_was_read(tmp_path):
    """More steps are no change, unless a fraction of them had another length; an EMA cannot start in the middle."""
    settings = {"optim__ema": 0.0, "train__steps": 4}
    loop.train(run_config(tmp_path, **settings))
    assert loop.train(run_config(tmp_path, **settings | {"train__steps": 6})).step == 6
    with pytest.raises(ValueError, match=r"started with optim\.ema=0\.0, now it is 0\.9"):
        loop.train(run_config(tmp_path, **settings | {"optim__ema": 0.9}))
    settings |= {"train__length_warmup": 2, "out": tmp_path / "shorter"}
    loop.train(run_config(tmp_path, **settings))
    with pytest.raises(ValueError, match=r"started with train\.steps=4, now it is 6"):
        loop.train(run_config(tmp_path, **settings | {"train__steps": 6}))


def test_a_key_that_a_checkpoint_does_not_know_had_its_default(tmp_path):
    """A run of an older version may not change its objective because a recipe sets what came later."""
    tokenizer = load_tokenizer("bytes")
    before = asdict(run_config(tmp_path, recipe="fast"))
    del before["objective"]["anchor_fraction"]
    info = {"config": before, "tokenizer": tokenizer.fingerprint}
    with pytest.raises(ValueError, match=r"started with objective\.anchor_fraction=1\.0, now it is 0\.25"):
        run.check_same_run(info, run_config(tmp_path, recipe="fast"), tokenizer)
    run.check_same_run(info, run_config(tmp_path, recipe="fast", objective__anchor_fraction=1), tokenizer)


def test_a_finished_run_keeps_its_bound(tmp_path):
    """That of its last weights, not the best on the way, when the command is given again."""
    settings = {"optim__lr": 0.5, "optim__ema": 0.0, "train__valid_every": 2}  # a rate that makes it worse
    first = loop.train(run_config(tmp_path, **settings))
    values = [e["nll"] for e in read_metrics(tmp_path / "run") if e["kind"] == "valid"]
    assert first.valid_nll == values[-1] > min(values)
    card = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert loop.train(run_config(tmp_path, **settings)).valid_nll == first.valid_nll
    again = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert again["valid_nll"] == card["valid_nll"] == first.valid_nll and again["tokens"] == card["tokens"]


def test_init_from_starts_at_given_weights(tmp_path, uninterrupted):
    cfg = run_config(tmp_path, checkpoint__init_from=uninterrupted / "run" / "export", train__steps=1)
    loop.train(cfg)
    first = next(e for e in read_metrics(tmp_path / "run") if e["kind"] == "valid")
    last = [e for e in read_metrics(uninterrupted / "run") if e["kind"] == "valid"][-1]
    assert first["nll"] == pytest.approx(last["nll"], rel=1e-5)
    gone = run_config(tmp_path, checkpoint__init_from=tmp_path / "gone", train__steps=2)
    assert loop.train(gone).step == 2  # a run that goes on does not need it any more
    with pytest.raises(ValueError, match="is another model"):
        loop.train(
            run_config(
                tmp_path, checkpoint__init_from=uninterrupted / "run" / "export", model__n_blocks=3, out=tmp_path / "x"
            )
        )
    with pytest.raises(ValueError, match=r"checkpoint\.init_from=.* config\.json is missing"):
        loop.train(run_config(tmp_path, checkpoint__init_from=tmp_path, out=tmp_path / "y"))


def test_a_run_folder_is_for_one_run_at_a_time(tmp_path):
    process = start(tmp_path, "train.steps=1000000")
    wait_for_step(tmp_path / "run", 1, process)
    with pytest.raises(ValueError, match=rf"run' is in use by process {process.pid}; wait for it"):
        loop.train(run_config(tmp_path))
    os.killpg(process.pid, signal.SIGKILL)  # and whoever dies has no claim
    process.communicate()
    done = max(Checkpoints(tmp_path / "run", CheckpointConfig(), None).steps(), default=0)
    assert loop.train(run_config(tmp_path, train__steps=done + 2)).finished


def test_preparing_data_can_be_interrupted(tmp_path):
    """It may take hours; a signal that waited for the first step to end would look lost."""
    prepare = loop.setup.prepare_data

    def interrupted(*what):
        os.kill(os.getpid(), signal.SIGINT)
        return prepare(*what)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.train(run_config(tmp_path), course=loop.Course(interrupted))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        loop.train(run_config(tmp_path, data__path=tmp_path / "nowhere.jsonl"))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(tmp_path, capsys):
    loop.train(run_config(tmp_path, train__steps=4))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".claim"}
    capsys.readouterr()
    result = loop.train(run_config(tmp_path, train__steps=3, optim__lr=0.02))
    assert result.step == 4 and result.finished
    assert "is finished: step 4 of train.steps=3" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before
    assert loop.train(run_config(tmp_path, train__steps=5, optim__lr=0.02)).step == 5
    assert "at step 4; optim.lr was 0.01, is 0.02; train.steps was 4, is 5" in capsys.readouterr().err
    with pytest.raises(ValueError, match="started with seed=1, now it is 2"):
        loop.train(run_config(tmp_path, train__steps=6, seed=2))


def test_unwritable_run_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"not a writable folder"):
        loop.train(run_config(tmp_path, out=tmp_path / "file" / "run"))


def test_dry_run_trains_nothing(tmp_path):
    facts = loop.run_train(run_config(tmp_path), dry_run=True)
    assert facts["parameters"] > 0 and facts["tokens"] == 12 * 8 * 32
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), ALONE)
    assert checkpoints.newest_valid() is None
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        read_weights(tmp_path, ema=True)

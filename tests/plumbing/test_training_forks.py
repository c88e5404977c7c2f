"""A run that starts from a checkpoint of another one: same settings continue it bit for bit, others are obeyed."""

import json
from pathlib import Path

import pytest
import torch
from runs import losses, overrides, run_config, weights

from adlm import cli, compare
from adlm.training import loop
from adlm.training.metrics import read_metrics

STEP = "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """12 steps, with checkpoints after 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("base")
    loop.train(run_config(folder, checkpoint__keep=9))
    return folder


def trained(run: Path) -> list[tuple]:
    """The losses of all steps."""
    return [entry for entry in losses(run) if entry[0] == "train"]


def forked(base: Path, out: Path, **changes: object):
    changes = {"checkpoint__init_from": base / "run" / STEP, "out": out} | changes
    return run_config(base, **changes)


def test_the_same_settings_continue_the_run_bit_for_bit(base, tmp_path):
    """Weights, EMA, moments, order of sequences and noise: all that is left of the loss are the steps before."""
    result = loop.train(forked(base, tmp_path / "run"))
    assert (result.step, result.finished) == (12, True)
    assert trained(tmp_path / "run") == trained(base / "run")[4:]
    for name, value in weights(base / "run").items():
        assert torch.equal(weights(tmp_path / "run")[name], value), name
    first, *_ = read_metrics(tmp_path / "run")
    assert (first["kind"], first["step"]) == ("valid", 4), "all forks of a checkpoint begin with its bound"


def test_other_settings_are_obeyed_and_named(base, tmp_path, capsys):
    found = {}
    for name, changes in {
        "seed": {"seed": 2},
        "objective": {"objective__gamma": 0.5},
        "rate": {"optim__lr": 1e-3},
        "longer": {"train__steps": 14},
    }.items():
        loop.train(forked(base, tmp_path / name, **changes))
        found[name] = trained(tmp_path / name)
    same = trained(base / "run")[4:]
    assert all(entries != same for entries in found.values())
    for name in ("rate", "objective"):
        assert found[name][0] == same[0], "the first bound is of weights that no update has changed yet"
    assert found["seed"][0] != same[0] and found["longer"][-1][1] == 14
    said = capsys.readouterr().err
    assert f"starting at step 4 of {base / 'run' / STEP}; objective.gamma was 0.003, is 0.5" in said.replace("\n", " ")


def test_a_fork_resumes_as_every_run(base, tmp_path):
    whole = tmp_path / "whole"
    loop.train(forked(base, whole, seed=2))
    parts = tmp_path / "parts"
    loop.train(forked(base, parts, seed=2, train__steps=8))
    loop.train(forked(base, parts, seed=2))
    assert trained(whole) == trained(parts)
    for name, value in weights(whole).items():
        assert torch.equal(weights(parts)[name], value), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__n_blocks": 3}, r"has model\.n_blocks=2, this run 3: its tensors would not fit"),
        ({"optim": "muon"}, r"has optim\.name=adamw, this run muon"),
        ({"data__tokenizer": "bpe-300"}, "has another tokenizer than this run's data"),
        ({"train__steps": 4}, r"is at step 4, so train\.steps must be above that, got 4"),
        ({"lora__rank": 2}, r"checkpoint\.init_from="),
    ],
)
def test_what_does_not_fit_is_refused(base, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        loop.train(forked(base, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_start_named_after_the_run_has_begun_is_said_to_be_ignored(base, tmp_path, capsys):
    loop.train(forked(base, tmp_path / "run"))
    capsys.readouterr()
    loop.train(forked(base, tmp_path / "run"))
    assert "init_from" not in capsys.readouterr().err
    loop.train(forked(base, tmp_path / "run", checkpoint__init_from=base / "run" / "export"))
    assert "which is not read: the run has begun" in capsys.readouterr().err


def test_a_corrupt_checkpoint_is_refused(base, tmp_path):
    copy = tmp_path / "copy" / STEP
    copy.mkdir(parents=True)
    for file in (base / "run" / STEP).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"checkpoint\.init_from=.* is corrupt"):
        loop.train(forked(base, tmp_path / "run", checkpoint__init_from=copy))


def test_forks_are_compared_at_equal_flops_of_what_they_add(base, tmp_path, capsys):
    """Steps before the checkpoint are not counted; two seeds of a fork are two runs."""
    keys = overrides(base, out=tmp_path, eval__draws=1, eval__sequences=8, train__valid_every=0)
    start = f"checkpoint.init_from={base / 'run' / STEP}"
    names = [f"adlm+{start}+seed=1,2", f"adlm+{start}+objective.anchor_rule=none"]
    assert cli.main(["compare", *keys, "compare.equal_flops=true", *names]) == 0
    ran = {entry["name"]: entry["config"] for entry in json.loads((tmp_path / "table.json").read_text())["entries"]}
    steps = [ran[name]["train"]["steps"] for name in (f"adlm+{start}+seed=1", f"adlm+{start}+seed=2", names[1])]
    cost, without = (
        compare.step_flops(run_config(base, **more), run_config(base))
        for more in ({}, {"objective__anchor_rule": "none"})
    )
    assert steps == [12, 12, 4 + round(8 * cost / without)] and steps[2] > 12
    for uneven in ("objective.gamma_until=0.5", "train.length_warmup=2"):
        assert cli.main(["compare", *keys, "compare.equal_flops=true", uneven, names[0]]) == 1
        assert "objective.gamma_until=1 (or 0) and train.length_warmup=1" in capsys.readouterr().err

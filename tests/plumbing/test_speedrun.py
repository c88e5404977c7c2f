"""`adlm speedrun`: the rules are kept, and the record is what the log says."""

import json

import pytest
from runs import overrides

from adlm import cli, compare, config


def cfg_of(*words: str):
    return config.load(["experiment=speedrun", *words], run_folder=False)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data=pydocs", "data.name=pydocs is against the rules of the speedrun, which has data.name=wikipedia"),
        ("model.length=512", "which has model.length=1024"),
        ("algo=ar", "which has model.causal=False"),
        ("train.valid_sequences=511", "at least 512"),
        ("train.valid_every=0", "never looks"),
    ],
)
def test_what_cannot_be_compared_is_refused(word, said):
    compare.check_rules(cfg_of())
    with pytest.raises(ValueError, match=said):
        compare.check_rules(cfg_of(word))


def log(speeds: list[float], bounds: list[float], every: int = 33) -> list[dict]:
    """A log of windows of `every` steps, each with a validation behind it."""
    events = [{"kind": "valid", "step": 0, "nll": 10.9, "time": 100.0}]
    for i, (speed, bound) in enumerate(zip(speeds, bounds), 1):
        events.append({"kind": "train", "step": i * every, "tokens_per_s": speed, "time": 100.0 + 9 * i})
        events.append({"kind": "valid", "step": i * every, "nll": bound, "time": 100.5 + 9 * i})
    return events


def test_the_record_is_the_first_validation_below_the_target():
    cfg = cfg_of("train.steps=132", "train.length_warmup_fraction=0.5")  # sequences are whole from step 66 on
    tokens = 33 * 16 * 1024
    found = compare.read_record(log([10.0, 4e5, 20.0, 2e5], [8.0, 7.0, 6.9, 6.7]), cfg)
    # the first and the third window compiled: each counts at the speed of the one after it
    assert found["step_seconds"] == pytest.approx(tokens * (2 / 4e5 + 2 / 2e5), abs=0.01)
    assert (found["tokens"], found["bound"], found["seconds"]) == (4 * tokens, 6.7, 36.5)
    missed = compare.read_record(log([10.0, 4e5], [8.0, 7.0]), cfg)
    assert missed == {"target": 6.726, "reached": False, "best": 7.0}
    assert "was not reached; the best bound is 7.000" in compare.describe(missed)


def test_a_run_leaves_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "check_rules", lambda cfg: None)  # a toy keeps none of them
    monkeypatch.setattr(compare, "TARGET", 100.0)
    keys = overrides(
        tmp_path,
        train__steps=4,
        train__valid_every=2,
        train__log_every=1,
        train__cuda_graphs="false",
        train__compile="false",
    )
    assert cli.main(["speedrun", *keys]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["reached"] and record["tokens"] == 0 and record["parameters"] > 0 and len(record["validation"]) == 64
    assert "written to" in capsys.readouterr().out

"""Folders that af510e1 wrote still load, still generate and still resume, whatever their keys are called now."""

import json
import shutil

import pytest
from regenerate import HERE, RESUMED, resumed

import adlm
from adlm import config

GOLDEN = json.loads(RESUMED.read_text())["run_v1"]
EXPORTS = sorted(folder.name for folder in HERE.glob("export_v1*"))


@pytest.mark.parametrize("name", [*EXPORTS, "run_v1"])
def test_a_folder_loads_generates_and_is_saved_again(name, tmp_path):
    lm = adlm.load(HERE / name, "cpu")
    first = lm.generate(length=16, steps=8)[0]
    assert len(first.tokens) == 16
    lm.save(tmp_path / "again")
    assert adlm.load(tmp_path / "again", "cpu").generate(length=16, steps=8)[0].text == first.text


def test_raw_and_averaged_weights_of_a_run_load():
    raw, averaged = (adlm.load(HERE / "run_v1", "cpu", ema=ema) for ema in (False, True))
    assert raw.score("the cat sat").nll != averaged.score("the cat sat").nll


def test_an_interrupted_run_resumes_to_the_same_losses(tmp_path):
    found = resumed(tmp_path)
    assert list(found) == list(GOLDEN)
    for term, numbers in GOLDEN.items():
        assert found[term] == pytest.approx(numbers, rel=1e-3 if term == "grad_norm" else 1e-5), term
    before = (HERE / "run_v1" / "metrics.jsonl").read_text()
    assert (tmp_path / "run_v1" / "metrics.jsonl").read_text().startswith(before)


def test_settings_of_an_old_run_are_read(tmp_path):
    """Its config.yaml names every key of its time; a saved file of today is read back, too."""
    cfg = config.from_yaml(shutil.copy(HERE / "run_v1" / "config.yaml", tmp_path))
    assert (cfg.algo, cfg.model.hidden_size, cfg.train.steps) == ("adlm", 8, 12)

"""The model in the box: how it is made from a run, and the one that is shipped."""

import json
import sys
from pathlib import Path

import pytest
import torch
from exports import export
from runs import overrides

import adlm
from adlm import cli
from adlm.io.load import BOX, default_checkpoint, load_checkpoint

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import make_box  # noqa: E402


def test_a_run_becomes_a_box(tmp_path, monkeypatch, capsys):
    run, box = tmp_path / "run", tmp_path / "box"
    assert cli.main(["train", *overrides(tmp_path, train__steps=2)]) == 0
    with pytest.raises(ValueError, match="adlm ppl"):
        make_box.make_box(run, box)
    assert cli.main(["ppl", str(run), f"data.cache_dir={tmp_path / 'cache'}"]) == 0
    make_box.make_box(run, box)
    trained, boxed = (load_checkpoint(folder).model for folder in (run, box))
    for a, b in zip(trained.parameters(), boxed.parameters()):
        assert torch.equal(a.bfloat16().float(), b), "bf16 on disk, float32 in use"
    card = (box / "README.md").read_text()
    found = json.loads((run / "ppl-file.json").read_text())["continuous"]["bits_per_byte"]
    assert "license: cc-by-sa-4.0" in card and f"{found:.3f} on held-out text" in card
    assert not any(str(tmp_path) in (box / name).read_text() for name in ("README.md", "config.json"))
    assert (box / "model.safetensors").stat().st_mode == (box / "config.json").stat().st_mode
    monkeypatch.setattr("adlm.io.load.BOX", box)
    assert default_checkpoint() == box
    assert len(adlm.load(box).generate(n=1, steps=4, length=16)[0].tokens) == 16
    monkeypatch.setattr(make_box, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are shipped"):
        make_box.make_box(run, box)


def test_the_shipped_model_is_small_and_says_where_it_comes_from():
    assert sum(file.stat().st_size for file in BOX.iterdir()) < 42_000_000
    card = (BOX / "README.md").read_text()
    assert "license: cc-by-sa-4.0" in card and "bits per byte" in card and "adlm train" in card


def test_the_shipped_model_writes_words():
    (sample,) = adlm.load(device="cpu").generate(n=1, steps=32, length=64, seed=0)
    words = [word for word in sample.text.lower().split() if word.isalpha()]
    assert len(words) > 20 and {"the", "of", "in", "and"} & set(words)


def test_an_export_of_an_earlier_version_loads(tmp_path):
    folder = export(tmp_path / "old")
    info = json.loads((folder / "config.json").read_text())
    info["objective"]["anchor_share"] = info["objective"].pop("anchor_fraction")
    info["model"]["bridge"] = "collapsed"
    (folder / "config.json").write_text(json.dumps(info))
    loaded = load_checkpoint(folder)
    assert (loaded.objective.anchor_fraction, loaded.model.config.bridge) == (1.0, "linear")
    info["model"]["from_the_future"] = 1
    (folder / "config.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"config\.json has unknown ModelConfig keys: from_the_future"):
        load_checkpoint(folder)

"""The model in the box: how it is made from a run, and the one that is shipped."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from exports import export

import adlm
from adlm import cli, config
from adlm.api.command import in_four_bits
from adlm.io.load import BOX, default_checkpoint, load_checkpoint, locate
from adlm.io.quantised import shrink

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import make_box  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
TEXT = f"data.path={GOLDEN / 'train.txt'}"
LLAMA = (
    "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.conditioning=none", "model.tied=true",
    "model.hidden_size=32", "model.n_heads=2", "model.n_kv_heads=1", "model.n_blocks=2", "model.length=32",
)  # fmt: skip


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A toy of what the box is made of: a causal Llama-type model, adapted, in four bits, measured."""
    folder = tmp_path_factory.mktemp("adapted")
    base = folder / make_box.BASE
    data = ["data=file", f"data.path={GOLDEN / 'train.txt'}", f"data.valid_path={GOLDEN / 'valid.txt'}"]
    little = [f"data.cache_dir={folder / 'cache'}", "train.device=cpu", "train.num_threads=1", "train.valid_every=0"]
    train = ["train", *data, *little, "algo=ar", "recipe=published", "data.tokenizer=text8", *LLAMA, "train.steps=1"]
    adapt = ["adapt", str(base), *data, *little, "train.steps=2", "train.global_batch_size=6", "optim.warmup=1"]
    adapt += ["model.block_length=16,1,4,64,16,0"]  # one of them comes up twice as often
    with pytest.MonkeyPatch.context() as patch:
        for line in ([*train, f"out={base}"], [*adapt, f"out={folder / 'run'}"]):
            patch.setattr(sys, "argv", ["adlm", *line])
            assert cli.main(line) == 0
    assert cli.main(["export", str(folder / "run"), str(folder / "four-bit"), "--four-bit", *little[:2]]) == 0
    measure = ["ppl", str(folder / "four-bit"), "data=file", f"data.path={GOLDEN / 'valid.txt'}", "eval.draws=1"]
    assert cli.main([*measure, "eval.block_length=1,4,16,64,0", "eval.sequences=4", *little[:3]]) == 0
    return folder


def check_box(box):
    """What any model in the box must satisfy."""
    files = {file.name: file for file in box.iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "tokenizer.json", "README.md", "LICENSE"}
    assert sum(file.stat().st_size for file in files.values()) < make_box.MOST_BYTES
    assert files["model.safetensors"].stat().st_mode == files["config.json"].stat().st_mode
    card, licence = (files[name].read_text() for name in ("README.md", "LICENSE"))
    assert "license: cc-by-sa-4.0" in card and "bits per byte" in card and "data.path=WIKIPEDIA" in card
    assert "CC-BY-SA-4.0" in licence and "Apache-2.0" in licence and "Wikipedia" in licence
    info = json.loads(files["config.json"].read_text())
    assert info["data_settings"] == {} and not any("/" in word for word in info["command"])
    assert "/" not in info["tokenizer"]["name"]


def test_four_bits_of_a_run_are_fitted_to_its_own_text(adapted, tmp_path, capsys):
    line = ["export", str(adapted / "run"), str(tmp_path / "fitted"), "--four-bit", "train.device=cpu"]
    assert cli.main([*line, f"data.cache_dir={adapted / 'cache'}"]) == 0
    assert "rounded to nearest" not in capsys.readouterr().err
    run = adlm.load(adapted / "run", device="cpu")
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    fitted, again = (in_four_bits(run, config.load([*line[5:], "data=file", path]).data) for path in [TEXT, TEXT])
    plain = shrink(before)
    assert all(torch.equal(x, again[name]) for name, x in fitted.items())
    assert {name: x.shape for name, x in fitted.items()} == {name: x.shape for name, x in plain.items()}
    changed = [name for name, x in plain.items() if name.endswith(".codes") and not torch.equal(x, fitted[name])]
    assert len(changed) == 1 + 4 * 2, "the embedding, and four matrices of each block"
    assert all(torch.equal(x, before[name]) for name, x in run.model.state_dict().items()), "the model stays as it was"


def test_an_adapted_model_becomes_a_box(adapted, tmp_path, monkeypatch):
    box = make_box.make_box(adapted / "four-bit", "4,1,16,64,0", tmp_path / "box")
    check_box(box)
    assert (box / "model.safetensors").read_bytes() == (adapted / "four-bit" / "model.safetensors").read_bytes()
    measured = json.loads((adapted / "four-bit" / "ppl-file.json").read_text())
    card = (box / "README.md").read_text()
    assert f"{measured['K=4']['bits_per_byte']:.3f} on held-out text" in card
    assert all(f"{K}: {measured[f'K={K}']['bits_per_byte']:.3f}" in card for K in (1, 4, 16, 32))
    licence = (box / "LICENSE").read_text()
    assert "PSF-2.0" in licence and "three works" in licence and "wikipedia and pydocs" in card
    assert f"{make_box.BASE} (Apache-2.0)" in card and f"adlm adapt {make_box.BASE} " in card
    monkeypatch.setattr("adlm.io.load.BOX", box)
    assert default_checkpoint() == box
    lm = adlm.load(device="cpu")
    assert lm.model.config.block_lengths == (4, 1, 16, 32, 32), "its own first"
    assert len(lm.generate("the")[0].tokens) == 32, "as long as the model, which is shorter than a text of its own"
    lm.new_tokens = 8
    assert len(lm.generate("the")[0].tokens) == len(lm.tokenizer.encode("the")) + 1 + 8
    assert lm.generate("the [MASK:3] of")[0].text.endswith("of") and lm.score("the").nll > 0


@pytest.mark.parametrize(
    ("change", "order", "message"),
    [
        ({}, "5,1,0", "5,1,0 is no order of the block lengths of .*, which are 16,1,4,64,16,0"),
        ({"command": ["adlm", "adapt", "another.gguf"]}, "", f"not made of {make_box.BASE}.* adlm adapt another.gguf"),
        (
            {"model": {"block_length": "16,4"}},
            "",
            "model.block_length='16,4': the box continues texts, and fills holes",
        ),
        ({"model": {"block_length": "16,1,2,0"}}, "", "was not measured for K=2: adlm ppl"),
    ],
)
def test_what_cannot_be_in_the_box_is_refused(adapted, tmp_path, change, order, message):
    folder = tmp_path / "changed"
    shutil.copytree(adapted / "four-bit", folder)
    info = json.loads((folder / "config.json").read_text())
    model = info["model"] | change.get("model", {})
    (folder / "config.json").write_text(json.dumps(info | change | {"model": model}))
    with pytest.raises(ValueError, match=message):
        make_box.make_box(folder, order, tmp_path / "box")
    assert not (tmp_path / "box").exists()


def test_a_box_is_small_measured_and_in_four_bits(adapted, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"is not in four bits: adlm export .* --four-bit"):
        make_box.make_box(adapted / "run" / "export", "", tmp_path / "box")
    shutil.copytree(adapted / "four-bit", tmp_path / "unmeasured", ignore=shutil.ignore_patterns("ppl-*"))
    with pytest.raises(ValueError, match="must hold one result of `adlm ppl"):
        make_box.make_box(tmp_path / "unmeasured", "", tmp_path / "box")
    monkeypatch.setattr(make_box, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are shipped"):
        make_box.make_box(adapted / "four-bit", "", tmp_path / "box")


def test_the_shipped_model_is_what_a_box_must_be():
    """Small, measured, under its licences; it writes, fills and scores, and says the same whenever it is asked."""
    check_box(BOX)
    lm = adlm.load(device="cpu")
    (sample,) = lm.generate("The history of the city", length=64, steps=32, top_p=0.9, seed=0)
    words = [word for word in sample.text.lower().split() if word.isalpha()]
    assert len(words) > 20 and {"the", "of", "in", "and"} & set(words)
    assert lm.generate("The [MASK] of", steps=1)[0].text.endswith(" of")
    assert 0 < lm.score("The history of the city.", draws=4).nll < 8


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


def test_a_folder_called_box_does_not_hide_the_model_unless_it_holds_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box").mkdir()
    assert locate("box") == default_checkpoint()
    (tmp_path / "box" / "config.json").write_text("{}")
    assert locate("box") == Path("box")

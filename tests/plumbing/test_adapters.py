"""Low-rank fine-tuning as users run it: only adapters are kept, a run resumes exactly, the base is found and merged."""

import json
import shutil

import pytest
import torch
from exports import export
from runs import overrides
from safetensors.torch import load_file

import adlm
from adlm import cli, config
from adlm.compat.foreign_files import SavedTensors
from adlm.io.load import load_checkpoint
from adlm.training.loop import run_train, train


def line(folder, **changes) -> list[str]:
    """A tiny low-rank run on the exported model in `folder`."""
    base = folder / "base"
    if not base.exists():
        export(base, length=32)
    given = {"lora__rank": 2, "checkpoint__init_from": base, "optim__ema": 0.5, "train__steps": 8} | changes
    words = overrides(folder, **given)
    settings = load_checkpoint(base).model.config
    return [*words, f"model.length={settings.length}", "model.dropout=0"]


def final(run) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "adapter.safetensors")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_resumes_exactly(tmp_path, optimizer):
    more = {"optim": optimizer}
    in_parts = line(tmp_path, out=tmp_path / "parts", checkpoint__every=5, **more)
    train(config.load(line(tmp_path, out=tmp_path / "whole", **more), world_size=1))
    train(config.load(in_parts, world_size=1))
    # as a kill after step 5 would have left it
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000008")
    shutil.rmtree(tmp_path / "parts" / "export")
    train(config.load(in_parts, world_size=1))
    whole, parts = final(tmp_path / "whole"), final(tmp_path / "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert any(x.abs().max() > 0 for name, x in whole.items() if name.endswith("lora_b"))


def test_a_checkpoint_holds_adapters_alone(tmp_path):
    result = train(config.load(line(tmp_path), world_size=1))
    saved = SavedTensors(tmp_path / "run" / "checkpoints" / "step-00000008")
    parts = {name.partition(".")[0] for name in saved.tensors}
    assert parts == {"model", "ema", "optimizer", "guard"}
    assert all("lora_" in name for name in saved.tensors if not name.startswith("guard"))
    assert result.valid_nll is not None
    assert not (tmp_path / "run" / "export" / "model.safetensors").exists()
    info = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert info["adapter"]["base"] == str(tmp_path / "base") and info["adapter"]["rank"] == 2


def test_loading_finds_the_base_and_changes_the_matrices_of_blocks_alone(tmp_path):
    train(config.load(line(tmp_path), world_size=1))
    before, after = load_checkpoint(tmp_path / "base"), load_checkpoint(tmp_path / "run")
    new = after.model.state_dict()
    for name, w in before.model.state_dict().items():
        adapted = ".blocks." in name and w.ndim == 2 and ".modulation." not in name
        assert torch.equal(w, new[name]) != adapted, name
    # exported: one model, which needs no base
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    alone = load_checkpoint(tmp_path / "merged")
    assert all(torch.equal(w, new[name]) for name, w in alone.model.state_dict().items())
    with pytest.raises(ValueError, match=r"adapts .*base', which is in none of"):
        load_checkpoint(tmp_path / "run")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "run" / "export" / "base")
    assert all(torch.equal(w, new[name]) for name, w in load_checkpoint(tmp_path / "run").model.state_dict().items())
    export(tmp_path / "base", length=32, seed=3)
    with pytest.raises(ValueError, match=r"adapts another model than .* holds now"):
        load_checkpoint(tmp_path / "run")


def test_adapters_of_an_earlier_version_are_as_strong_as_they_say(tmp_path):
    train(config.load(line(tmp_path), world_size=1))
    base, strong = (load_checkpoint(tmp_path / name).model.state_dict() for name in ("base", "run"))
    about = tmp_path / "run" / "export" / "config.json"
    info = json.loads(about.read_text())
    info["adapter"]["alpha"] /= 2
    about.write_text(json.dumps(info))
    weak = load_checkpoint(tmp_path / "run").model.state_dict()
    for name, w in base.items():
        torch.testing.assert_close(2 * (weak[name] - w), strong[name] - w, rtol=0, atol=1e-6)
    assert any(not torch.equal(weak[name], w) for name, w in base.items())


def test_an_unfinished_run_is_loaded_with_its_base(tmp_path):
    train(config.load(line(tmp_path), world_size=1))
    finished = load_checkpoint(tmp_path / "run").model.state_dict()
    shutil.rmtree(tmp_path / "run" / "export")
    running = load_checkpoint(tmp_path / "run")
    assert all(torch.equal(w, finished[name]) for name, w in running.model.state_dict().items())
    assert running.info["step"] == 8
    raw = load_checkpoint(tmp_path / "run", ema=False).model.state_dict()
    assert any(not torch.equal(w, finished[name]) for name, w in raw.items())


def test_adapters_of_an_adapted_model(tmp_path):
    train(config.load(line(tmp_path), world_size=1))
    second = line(tmp_path, out=tmp_path / "second", checkpoint__init_from=tmp_path / "run" / "export")
    train(config.load(second, world_size=1))
    lm = adlm.load(tmp_path / "second", device="cpu")
    assert lm.generate(steps=2, length=8)[0].text is not None


def test_resuming_on_another_base_is_refused(tmp_path):
    train(config.load(line(tmp_path), world_size=1))
    shutil.rmtree(tmp_path / "base")
    export(tmp_path / "base", length=32, seed=3)
    with pytest.raises(ValueError, match=r"holds adapters of .*base', whose weights are not those of"):
        train(config.load(line(tmp_path, train__steps=12), world_size=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint__init_from": ""}, "lora.rank=2 adapts a trained model: name it by checkpoint.init_from"),
        ({"lora__rank": -1}, "lora.rank=-1 must be at least 0"),
        ({"lora__rank": 100_000}, "lora.rank=100000 must be at most 16, the width of the model"),
    ],
)
def test_bad_settings_are_answered_in_one_line(tmp_path, capsys, changes, message):
    assert cli.main(["train", *line(tmp_path, **changes)]) == 1
    assert message in capsys.readouterr().err


def test_a_plan_counts_what_trains(tmp_path, capsys):
    facts = run_train(config.load(line(tmp_path), world_size=1), dry_run=True)
    assert facts["trained_parameters"] < facts["parameters"] / 2
    assert "trained parameters" in capsys.readouterr().err


def test_finetune_keeps_adapters_and_reports_the_whole_model(tmp_path, capsys):
    export(tmp_path / "base", length=24)
    (tmp_path / "my.txt").write_text("The cat sat on the old red mat with a bird. " * 60)
    words = [
        str(tmp_path / "my.txt"), f"init_from={tmp_path / 'base'}", "lora.rank=4", f"out={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path / 'cache'}", "train.device=cpu", "train.steps=6", "sampling.steps=4", "eval.draws=1",
    ]  # fmt: skip
    assert cli.main(["finetune", *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["after"] < facts["before"]
    assert f"{facts['after']:.3f}" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "export" / "adapter.safetensors").stat().st_size < 40_000

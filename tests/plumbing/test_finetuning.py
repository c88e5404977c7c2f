"""adlm finetune: from any model, on one's own text, to a run folder and a report of before and after."""

import json
import random
import re
import shlex
import shutil
from dataclasses import replace

import pytest
from documents import Document
from exports import L, export
from runs import WORDS

import adlm
from adlm import cli, config
from adlm.finetuning import exported, settings_for
from adlm.io.load import load_checkpoint
from adlm.training.metrics import read_metrics


def stories(path, n: int = 60):
    rng = random.Random(0)
    sentences = (
        f"The {rng.choice(WORDS)} {rng.choice(WORDS)} on the old red mat with a {rng.choice(WORDS)}." for _ in range(n)
    )
    path.write_text(" ".join(sentences))
    return path


@pytest.fixture
def line(tmp_path) -> list[str]:
    """The arguments of a fine-tuning of seconds, in a folder of its own."""
    export(tmp_path / "model")
    return [
        str(stories(tmp_path / "my.txt")), f"checkpoint.init_from={tmp_path / 'model'}", f"out={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path / 'cache'}", "train.device=cpu", "train.steps=6", "sampling.steps=4", "eval.draws=1",
    ]  # fmt: skip


def test_finetuning_ends_with_a_better_model_and_a_report(tmp_path, line, capsys):
    assert cli.main(["finetune", *line, "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out.splitlines()[-1])
    assert facts["after"] < facts["before"] and facts["finished"]
    assert f"{facts['before']:.3f} -> {facts['after']:.3f}" in printed.out
    events = read_metrics(tmp_path / "run")
    assert events[0]["kind"] == "valid" and events[0]["step"] == 0, "validated before the first step"
    text = (tmp_path / "run" / "report.html").read_text()
    words = Document(text).words
    for expected in (f"{facts['after']:.3f}", f"from {facts['before']:.3f}", "my.txt", "Written from nothing: before"):
        assert expected in words
    assert text.count('class="reveal"') + text.count("Left out") == 6 and text.count('class="reveal"') >= 2
    lm = adlm.load(tmp_path / "run", device="cpu")
    assert lm.model.config == load_checkpoint(tmp_path / "model").model.config, "the start's network"
    assert lm.tokenizer.fingerprint == load_checkpoint(tmp_path / "model").tokenizer.fingerprint
    # the same line finds the run, also when the text has changed since, and rebuilds the report
    (tmp_path / "run" / "report.html").unlink()
    assert cli.main(["finetune", *line]) == 0
    assert "is finished" in capsys.readouterr().err and (tmp_path / "run" / "report.html").is_file()


def test_finetuning_from_python(tmp_path, line):
    short = [word for word in line[3:] if not word.startswith(("train.device", "train.steps"))]
    result = adlm.finetune(
        tmp_path / "my.txt", start=tmp_path / "model", out=tmp_path / "run", steps=2, device="cpu", settings=short
    )
    assert result.run == str(tmp_path / "run") and result.report.endswith("report.html")
    assert result.lm.generate(steps=2, length=8)[0].text is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "data.name=file needs data.path"),
        (["no.txt"], "data.path='no.txt' does not exist"),
        (["no.txt", "init_from=nowhere"], "checkpoint.init_from='nowhere' does not exist"),
        (["no.txt", "init_from=."], "checkpoint.init_from='.' is neither a run folder nor an exported folder"),
        (["no.txt", "model=tiny"], "model=...: `adlm finetune` does not read this group"),
    ],
)
def test_bad_input_is_answered_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adlm.io.load.default_checkpoint", lambda: export(tmp_path / "model"))
    assert cli.main(["finetune", *words]) == 1
    assert message in capsys.readouterr().err


def test_what_is_typed_wins_and_schedules_follow(tmp_path, line):
    loaded = load_checkpoint(tmp_path / "model")
    typed = ["data=file", f"data.path={line[0]}", *line[1:], "optim.lr=1e-5", "train.steps=400", "model.dropout=0.2"]
    cfg = settings_for(loaded, tmp_path / "model", typed)
    assert (cfg.optim.lr, cfg.optim.warmup, cfg.train.valid_every, cfg.model.dropout) == (1e-5, 10, 50, 0.2)
    assert cfg.data.tokenizer == str((tmp_path / "model" / "tokenizer.json").resolve())
    assert (cfg.model.length, cfg.objective.time_density) == (L, 1.0)
    assert config.from_yaml(save(tmp_path, cfg)) == cfg


def test_masks_begin_at_once_where_the_start_was_trained_causally_first(tmp_path, line):
    loaded = load_checkpoint(tmp_path / "model")
    begun = loaded._replace(objective=replace(loaded.objective, causal_until=0.2, gamma_until=0.4))
    objective = settings_for(begun, tmp_path / "model", ["data=file", f"data.path={line[0]}", *line[1:]]).objective
    assert (objective.causal_until, objective.gamma_until) == (0.0, 0.4)


def test_a_large_model_trains_adapters_on_a_cpu(tmp_path, line, monkeypatch):
    """In as much time: fewer tokens, in shorter sequences; the model keeps its length, and who types a rank gets it."""
    from adlm import finetuning

    export(tmp_path / "model", length=64, block_length="4,1,0", shift=True, conditioning="none", anchored=False)
    loaded = load_checkpoint(tmp_path / "model")
    words = ["data=file", f"data.path={line[0]}", *(word for word in line[1:] if not word.startswith("train.steps"))]
    small = settings_for(loaded, tmp_path / "model", words)
    assert (small.lora.rank, small.model.length) == (0, 64)
    monkeypatch.setattr(finetuning, "LARGE", 1)
    monkeypatch.setattr(finetuning, "SMALL", 100)
    large = settings_for(loaded, tmp_path / "model", words)
    assert (large.lora.rank, large.optim.name, large.model.length) == (finetuning.RANK, "adamw", 16)
    read = [cfg.train.steps * cfg.train.global_batch_size * cfg.model.length for cfg in (small, large)]
    assert read[1] < read[0] and large.train.valid_sequences < small.train.valid_sequences
    for rank in (0, 2):
        assert settings_for(loaded, tmp_path / "model", [*words, f"lora.rank={rank}"]).lora.rank == rank
    assert cli.main(["finetune", *line]) == 0
    tuned = load_checkpoint(tmp_path / "run")
    assert tuned.model.config == loaded.model.config, "its length and its block lengths, too"


def save(folder, cfg):
    from adlm.config import as_yaml

    (folder / "config.yaml").write_text(as_yaml(cfg))
    return folder / "config.yaml"


def test_a_start_that_is_no_export_is_exported_into_the_run_folder(tmp_path):
    """A release checkpoint, or a run that has not finished."""
    loaded = load_checkpoint(export(tmp_path / "model"))
    assert exported(loaded, tmp_path / "model", tmp_path / "run") == (tmp_path / "model").resolve()
    folder = exported(loaded, tmp_path / "some.ckpt", tmp_path / "run")
    assert folder == (tmp_path / "run" / "start").resolve()
    assert load_checkpoint(folder).tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_a_run_that_began_with_another_model_is_not_taken_for_one_of_this(tmp_path, line, capsys):
    """Its report would compare it with a model that it never was; the same model may have moved."""
    (tmp_path / "model").rename(tmp_path / "first")
    export(tmp_path / "model", seed=7)
    assert cli.main(["finetune", *line, f"init_from={tmp_path / 'first'}"]) == 0
    report = (tmp_path / "run" / "report.html").read_bytes()
    assert cli.main(["finetune", *line]) == 1
    assert "began with other weights" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").read_bytes() == report
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    assert cli.main(["finetune", *line, f"init_from={tmp_path / 'copy'}"]) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_a_likelihood_is_not_called_a_bound_and_commands_can_be_pasted(tmp_path, line, capsys, causal):
    """Causal models learn too, and theirs is exact; a folder may have a space in its name."""
    export(tmp_path / "model", causal=causal, anchored=False, conditioning="none")
    run = tmp_path / "my run"
    assert cli.main(["finetune", *line, f"out={run}"]) == 0
    out, words = capsys.readouterr().out, Document((run / "report.html").read_text()).words
    assert ("upper bound" in out) != causal and ("at most this high" in words) != causal and "after" in words
    assert [shlex.split(command)[2] for command in re.findall("^  adlm .*", out, re.M)] == 3 * [str(run)]

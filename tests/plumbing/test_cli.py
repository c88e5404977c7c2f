"""The command line: what reaches a command, exit statuses, one-line errors, help, JSON."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from adlm import cli
from adlm.cli import COMMANDS, Command
from adlm.compat import command_lines
from adlm.config.keys import keys

ROOT = Path(__file__).parents[2]


@pytest.fixture
def probe(monkeypatch):
    """A command that records how it was called and then does what the test wants."""
    calls = []

    def run_probe(cfg, **arguments):
        calls.append((cfg, arguments))
        return run_probe.result() if callable(run_probe.result) else run_probe.result

    run_probe.result = None
    run_probe.calls = calls
    monkeypatch.setattr(cli, "run_probe", run_probe, raising=False)
    command = Command(
        "adlm.cli:run_probe", "a probe", words=("eval.checkpoint",), flags={"dry-run": "do nothing"},
        defaults=("model=nano",), reads=("eval", "model", "train.steps"),
    )  # fmt: skip
    monkeypatch.setitem(COMMANDS, "probe", command)
    monkeypatch.setitem(
        COMMANDS, "words", Command("adlm.cli:run_probe", "a probe with words", rest=True, reads=("seed",))
    )
    return run_probe


def raiser(error):
    def raise_it():
        raise error

    return raise_it


def test_every_command_of_the_table_exists():
    for name, command in COMMANDS.items():
        module, _, function = command.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert set(command.words) <= set(keys())
        assert command.help


def test_words_defaults_and_flags_reach_the_command(probe):
    assert cli.main(["probe", "runs/a", "--dry-run", "train.steps=5", "model.length=64"]) == 0
    cfg, arguments = probe.calls[0]
    assert (cfg.eval.checkpoint, cfg.train.steps, cfg.model.hidden_size, cfg.model.length) == ("runs/a", 5, 128, 64)
    assert arguments == {"dry_run": True}
    assert cli.main(["probe", "model=tiny"]) == 0
    assert probe.calls[1][0].model.hidden_size == 512


def test_further_words_are_handed_over(probe):
    assert cli.main(["words", "list", "seed=3", "all of it"]) == 0
    assert probe.calls[0][1] == {"args": ["list", "all of it"]}
    assert probe.calls[0][0].seed == 3


def test_a_file_name_with_an_equals_sign_is_a_word(probe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "epoch=3.ckpt").touch()
    assert cli.main(["probe", "epoch=3.ckpt"]) == 0
    assert probe.calls[0][0].eval.checkpoint == "epoch=3.ckpt"


@dataclass
class Outcome:
    ppl: float


@pytest.mark.parametrize(
    ("result", "document"), [({"a": 1}, {"a": 1}), (Outcome(3.5), {"ppl": 3.5}), (None, {}), (0, {})], ids=repr
)
def test_json_is_the_last_line(probe, capsys, result, document):
    probe.result = lambda: print("said on the way") or result
    assert cli.main(["probe", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "said on the way"
    assert json.loads(lines[-1]) == document


def test_without_json_results_are_not_printed(probe, capsys):
    probe.result = {"a": 1}
    assert cli.main(["probe"]) == 0
    assert capsys.readouterr().out == ""


def test_only_the_first_rank_prints_the_document(probe, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["probe", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_command_may_set_its_status(probe):
    probe.result = 1
    assert cli.main(["probe"]) == 1


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("top_p=0 must\nbe above 0"), 1, "adlm: error: top_p=0 must be above 0"),
        (FileNotFoundError(2, "No such file or directory", "runs/x"), 1, "runs/x"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied"),
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), 1, "pip install 'adlm[data]'"),
        (KeyboardInterrupt(), 130, "adlm: error: interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line(probe, capsys, monkeypatch, error, status, says):
    monkeypatch.delenv("ADLM_DEBUG", raising=False)
    probe.result = raiser(error)
    assert cli.main(["probe"]) == status
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(probe, capsys, monkeypatch):
    monkeypatch.setenv("ADLM_DEBUG", "1")
    probe.result = raiser(ValueError("bad"))
    assert cli.main(["probe"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("adlm: error: bad\n")


def test_a_bug_is_not_hidden(probe):
    probe.result = raiser(RuntimeError("a bug"))
    with pytest.raises(RuntimeError):
        cli.main(["probe"])


def test_help_shows_the_defaults_of_the_command(capsys):
    for command, shown in (
        ("score", "eval.draws = 64"), ("finetune", "data.name = 'file'"), ("evaluate", "sampling.n = 128"),
        ("demo", "model.hidden_size = 128"), ("train", "model.hidden_size = 768"),
    ):  # fmt: skip
        assert cli.main([command, "--help"]) == 0
        assert f"\n  {shown} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["probee"], 2, "did you mean 'probe'?"),
        (["infill"], 2, "sampling.template="),
        (["probe", "--watch"], 2, "unknown flag '--watch'; this command knows --dry-run, --json, --help"),
        (["probe", "-x"], 2, "unknown flag '-x'"),
        (["probe", "a", "b"], 2, "'b' is not of the form key=value; quote a value that has spaces"),
        (["train", "x.txt", "--steps", "5"], 2, "settings are written train.steps=VALUE"),
        (["sample", "README.md"], 1, "README.md is a text and no model; adlm train README.md makes one of it"),
        (["probe", "model=smal"], 1, "did you mean 'small'?"),
        (["probe", "modle=small"], 1, "did you mean 'model'?"),
        (["probe", "train.stepz=3"], 1, "did you mean 'train.steps'?"),
        (["import", "x.ckpt"], 2, "adlm import needs eval.checkpoint and out"),
        (["import", "x.ckpt", "folder"], 1, "x.ckpt is not a file"),
        (["convert", "nowhere", "x.ckpt"], 1, "nowhere is not an exported model"),
        (["export", "nowhere", "folder"], 1, "eval.checkpoint='nowhere' does not exist"),
        (["probe", "sampling.steps=3"], 1, "sampling.steps: `adlm probe` does not read this key (did you mean"),
        (["probe", "sampling=mdlm"], 1, "sampling=...: `adlm probe` does not read this group"),
        (["sample", "model=small"], 1, "model=...: `adlm sample` does not read this group"),
        (
            ["sample", "train.steps=5"],
            1,
            "train.steps: `adlm sample` does not read this key (did you mean 'sampli",
        ),
        (["sample", "data=lm1b"], 1, "data=...: `adlm sample` does not read this group"),
        (["ppl", "algo=ar"], 1, "algo=...: `adlm ppl` does not read this group"),
        (["evaluate", "train.steps=5"], 1, "train.steps: `adlm evaluate` does not read"),
        (["serve", "sampling.n=5"], 1, "sampling.n: `adlm serve` does not read this key; `adlm serve --help`"),
        (["score", "a", "b", "c"], 1, "'c' is one word too many"),
        (["config", "out=list"], 1, "out takes any str"),
        (["config", "modl=list"], 1, "did you mean 'model'?"),
        (["config", "foo=list"], 1, "unknown key 'foo'; `adlm config` prints all keys"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_lines(probe, capsys, argv, status, says):
    assert cli.main(argv) == status
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not probe.calls


def test_no_arguments_is_wrong_usage_and_help_is_not(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"adlm \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_lists_keys_with_meaning_and_default(probe, capsys):
    assert cli.main(["probe", "model=smal", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: adlm probe [checkpoint] [key=value ...] [--dry-run] [--json]" in out
    assert re.search(r"eval\.draws = 4 +Noise draws per sequence of the bound", out)
    assert "eval.ema = true" in out
    assert "sampling.steps" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_config_help_shows_every_key(capsys):
    assert cli.main(["config", "-h"]) == 0
    out = capsys.readouterr().out
    assert [key for key in keys() if f"  {key} = " not in out] == []


def test_choices_of_groups_and_keys(capsys):
    assert cli.main(["config", "model=list"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^nano +For a CPU", out, re.MULTILINE)
    assert cli.main(["config", "sampling.sampler=list"]) == 0
    assert "remdm-loop" in capsys.readouterr().out.splitlines()


def test_config_prints_yaml_that_can_be_read_back(capsys, tmp_path):
    from adlm import config

    assert cli.main(["config", "model=nano", "seed=3"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert config.from_yaml(tmp_path / "config.yaml") == config.load(["model=nano", "seed=3"])


def test_the_releases_modes_are_commands(probe, monkeypatch, capsys):
    monkeypatch.setattr(command_lines, "MODES", {mode: "probe" for mode in command_lines.MODES})
    assert cli.release_main("adlm_main", ["mode=ppl_eval", "data=wikitext2", "eval.checkpoint_path=x.ckpt"]) == 0
    cfg = probe.calls[0][0]
    assert (cfg.eval.checkpoint, cfg.algo) == ("x.ckpt", "two-stage")
    assert cli.release_main("main", ["mode=pple_val"]) == 1
    assert "did you mean 'ppl_eval'?" in capsys.readouterr().err


def script() -> list[str]:
    found = shutil.which("adlm", path=str(Path(sys.executable).parent))
    return [found] if found else [sys.executable, "-c", "import sys; from adlm.cli import main; sys.exit(main())"]


def test_a_reader_that_leaves_is_not_an_error(tmp_path):
    line = f"{shlex.join(script())} config | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("141\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["adlm_main", "main"])
def test_the_shims_run_from_the_repository(program):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", program, "mode=trian"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("adlm: error: mode='trian' is unknown (did you mean 'train'?)")


@pytest.mark.parametrize(
    ("command", "old"), [("train", "out"), ("sample", "sampling.out"), ("evaluate", "eval.out"), ("bench", "bench.out")]
)
def test_out_is_where_the_command_writes(command, old, monkeypatch):
    """Under its name of earlier versions, too; not given, it is the folder of a run for commands that make one."""
    seen = {}
    monkeypatch.setattr(cli, "_target", lambda command: lambda cfg, **arguments: seen.update(cfg=cfg))
    for key in ("out", old):
        assert cli.main([command, f"{key}=somewhere"]) == 0
        assert seen["cfg"].out == "somewhere"
    assert cli.main([command]) == 0
    assert seen["cfg"].out == ("runs/adlm-pydocs-small" if command == "train" else "")


def test_an_experiment_wins_over_the_defaults_of_a_command(monkeypatch):
    found = []
    monkeypatch.setattr(cli, "_target", lambda command: lambda cfg, **arguments: found.append(cfg))
    for line, task, method in (
        (["experiment=coconut-gsm8k", "data.path=x.jsonl"], "gsm8k", "coconut-double"),
        (["experiment=coconut-gsm8k", "data.path=x.jsonl", "method=cot"], "gsm8k", "cot"),
        ([], "prosqa", "acot"),
    ):
        assert cli.main(["reason", "train", *line]) == 0
        assert (found[-1].reason.task, found[-1].reason.method, found[-1].algo) == (task, method, "ar")

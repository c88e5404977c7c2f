"""Files from a stranger: nothing in them is executed or unpacked without bounds, and every one is answered in one line.

The files are written by support/hostile. Here each is read in this process; the slow test runs each in a process of
its own and measures what it took.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile.cases import CANARY, CASES, HEAVY, sample, start
from hostile.exported_folders import exported
from hostile.pickles import calls
from hostile.run_folders import MANIFESTS, metadata_with, run_folder
from runs import ON_A_CPU, overrides

from adlm import cli, config
from adlm.data.blocks import sha256
from adlm.data.tokenizer_checks import check_regex
from adlm.schema import CheckpointConfig
from adlm.training.checkpoint import Checkpoints, problem_of, read_weights, seal
from adlm.training.parallel import World

HELPERS = Path(hostile.__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def valid_files(tmp_path_factory):
    start(tmp_path_factory.mktemp("valid"))


@pytest.fixture
def quick_settings(monkeypatch):
    """Command lines that differ in paths alone are composed once: composing takes longer than reading a file."""
    load, known = config.load, COMPOSED

    def cached(line, **options):
        paths = [word for word in line if "=/" in word]
        rest = (*(word for word in line if "=/" not in word), *(word.partition("=")[0] for word in paths))
        if (rest, str(options)) not in known:
            known[rest, str(options)] = load(line, **options)
        cfg = copy.deepcopy(known[rest, str(options)])
        config._assign(cfg, dict(word.split("=", 1) for word in paths))
        return cfg

    monkeypatch.setattr(cli.config, "load", cached)


COMPOSED: dict = {}


def check_answer(found: dict) -> None:
    """Exit status 1, one line that says why, no traceback, nothing run."""
    lines = found["said"].strip().split("\n")
    assert not found["ran"], "code of the file was run"
    assert found["status"] == 1, found
    assert all(line.startswith("adlm: warning: checkpoint of step") for line in lines[:-1]), found["said"]
    assert lines[-1].startswith("adlm: error: ") and len(lines[-1]) < 1500, found["said"][:3000]


@pytest.mark.parametrize("name", [name for name in CASES if name not in HEAVY])
def test_a_hostile_file_is_answered_in_one_line(name, tmp_path, quick_settings):
    check_answer(hostile.run(name, tmp_path / "case"))


def test_there_are_many_kinds():
    kinds = {name.split(":")[0] for name in CASES}
    assert len(CASES) >= 80 and len(kinds) >= 15


def test_the_traps_are_real(tmp_path):
    """An ordinary reader springs them."""
    import pickle

    pickle.loads(calls(tmp_path)["os.system"])
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize("ema", ["true", "false"])
def test_an_export_with_a_checkpoint_put_into_it_is_an_export(tmp_path, ema, quick_settings, capsys):
    line = metadata_with(tmp_path, calls(tmp_path)["os.system"])
    model = exported(tmp_path)
    shutil.copytree(Path(line[1]) / "checkpoints", model / "checkpoints")
    assert cli.main([*sample(model), f"eval.ema={ema}"]) == 0, capsys.readouterr().err
    assert not (tmp_path / CANARY).exists()


# ---- checkpoints of a run -------------------------------------------------------------------------------------------


def checkpoints_of(run: Path) -> Checkpoints:
    return Checkpoints(run, CheckpointConfig(), World(0, 1, torch.device("cpu"), "fp32", "none"))


def test_a_checkpoint_is_loaded_as_torch_loads_it(tmp_path):
    """Every tensor that the ordinary reader finds, and the same numbers."""
    run, checkpoint = run_folder(tmp_path)
    described = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    blank = {name: torch.full(m.size, torch.nan, dtype=m.properties.dtype) for name, m in described.items()}
    ours, theirs = blank, copy.deepcopy(blank)
    checkpoints_of(run).load(6, ours)
    dcp.load(theirs, checkpoint_id=checkpoint)
    weights, info = read_weights(run, ema=True)
    assert len(ours) > 50 and info["step"] == 6
    for name in described:
        assert torch.equal(ours[name], theirs[name]), name
    assert all(torch.equal(weights[name], ours[f"ema.{name}"]) for name in weights) and weights


def test_a_resumed_checkpoint_is_read_as_data(tmp_path):
    run, checkpoint = run_folder(tmp_path)
    (checkpoint / ".metadata").write_bytes(calls(tmp_path)["os.system"])
    with pytest.raises(ValueError, match="refused, nothing of it was run"):
        checkpoints_of(run).load(6, {"model": {}})
    assert not (tmp_path / CANARY).exists()


@pytest.mark.slow
def test_a_resumed_run_reads_its_checkpoint_as_data(tmp_path, capsys):
    """The checkpoint of step 1 is a stranger's; then it is put right, and the run resumes."""
    line = [*overrides(tmp_path, train__steps=1, checkpoint__every=1), "train.device=cpu"]
    assert cli.main(["train", *line]) == 0
    more = [word for word in line if not word.startswith("train.steps")] + ["train.steps=2"]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.copytree(checkpoint, tmp_path / "kept")
    (checkpoint / ".metadata").write_bytes(calls(tmp_path)["os.system"])
    seal(checkpoint)
    capsys.readouterr()
    assert cli.main(["train", *more]) == 1
    assert "refused, nothing of it was run" in capsys.readouterr().err
    assert not (tmp_path / CANARY).exists()
    shutil.rmtree(checkpoint)
    shutil.move(tmp_path / "kept", checkpoint)
    assert cli.main(["train", *more]) == 0
    assert "resuming" in capsys.readouterr().err


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_checkpoint_with_a_malformed_manifest_is_corrupt(tmp_path, name, capsys):
    """And the one before it is used."""
    run, checkpoint = run_folder(tmp_path)
    newer = run / "checkpoints" / "step-00000012"
    shutil.copytree(checkpoint, newer)
    assert problem_of(newer) is None
    (newer / "manifest.json").write_text(MANIFESTS[name])
    assert (problem_of(newer) or "").startswith("manifest.json is missing or unreadable")
    assert checkpoints_of(run).newest_valid() == 6
    assert "checkpoint of step 12 is corrupt" in capsys.readouterr().err


# ---- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[1]", "null", '{"a": 1}', "[" * 100_000, "5", "\xff"])
def test_a_spoiled_memory_of_digests_is_made_anew(tmp_path, text):
    (tmp_path / "source.txt").write_text("hello")
    (tmp_path / "sources.json").write_text(text, encoding="latin-1")
    (first,) = sha256([tmp_path / "source.txt"], tmp_path)
    assert sha256([tmp_path / "source.txt"], tmp_path) == [first] and len(first) == 64
    assert first in json.loads((tmp_path / "sources.json").read_text()).values()


@pytest.mark.parametrize(
    "pattern",
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",  # noqa: E501
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",  # noqa: E501
    ],
    ids=["gpt2", "llama3", "gpt4", "gpt4o"],
)
def test_the_patterns_of_known_tokenizers_are_read(pattern):
    check_regex(pattern, "x: ")


@pytest.mark.slow
def test_hostile_files_take_little_memory_and_time(tmp_path):
    """Twice the size of the file and 500 MB, and 10 s of CPU time; each case in a process of its own."""
    path = os.pathsep.join([str(HELPERS), *sys.path])
    process = subprocess.run(
        [sys.executable, "-m", "hostile", str(tmp_path)],
        env=ON_A_CPU | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found = [json.loads(line) for line in process.stdout.splitlines()]
    assert {f["name"] for f in found} == set(CASES)
    for f in found:
        check_answer(f)
        assert f["memory_mb"] <= 500 + 2 * f["file_mb"] and f["cpu_s"] <= 10, f
    print("largest:", *(max(found, key=lambda f, key=key: f[key]) for key in ("memory_mb", "cpu_s")), sep="\n")

"""`torchrun -m adlm sample | evaluate | ppl | zeroshot`: ranks share the rows; the files are those of one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ON_A_CPU, run_config, write_corpus

from adlm.training.loop import train

pytestmark = pytest.mark.timeout(1800)  # several processes each, on a machine that may be busy

DIES = """
import os, signal, sys
from adlm import cli
from adlm.api import command
from adlm.evaluation import evaluate

record, drawn = command.record, []

def dying(*what, **more):
    record(*what, **more)
    drawn.append(what)
    if os.environ["RANK"] == "1" and len(drawn) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

command.record = evaluate.record = dying
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    train(run_config(folder, out=folder / "run", train__steps=4))
    return folder / "run"


def adlm(*arguments: object, ranks: int = 1, program: tuple[str, ...] = ("-m", "adlm")) -> subprocess.CompletedProcess:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    line = [sys.executable, *several, *program, *map(str, arguments)]
    return subprocess.run(line, env=ON_A_CPU, capture_output=True, text=True, timeout=900)


def samples(file: Path) -> list[dict]:
    """Lines of a file, without the time that each took."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in sample.items() if k not in ("seconds", "spent")} for sample in found]


@pytest.mark.slow
def test_two_ranks_draw_the_file_of_one_and_a_rerun_what_a_dead_one_left(model, tmp_path):
    how = (model, "sampling.n=9", "sampling.batch_size=2", "sampling.steps=6", "sampling.seed=3")
    one, two, dead = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "dead"))
    assert adlm("sample", *how, f"out={one}").returncode == 0
    done = adlm("sample", *how, f"out={two}", ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert samples(two) == samples(one) and [s["seed"] for s in samples(one)] == list(range(3, 12))
    (tmp_path / "dies.py").write_text(DIES)
    died = adlm("sample", *how, f"out={dead}", ranks=2, program=(str(tmp_path / "dies.py"),))
    assert died.returncode != 0
    kept = {s["seed"] for file in tmp_path.glob("dead.part*.jsonl") for s in samples(file)}
    assert 2 <= len(kept) < 9, "what was drawn is on disk, and not everything was"
    again = adlm("sample", *how, f"out={dead}", "--json", ranks=2)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads(again.stdout.splitlines()[-1])["drawn"] == 9 - len(kept), "only what was missing"
    assert samples(dead) == samples(one) and not list(tmp_path.glob("*.part*"))


@pytest.mark.slow
def test_several_ranks_need_a_file(model):
    done = adlm("sample", model, ranks=2)
    assert done.returncode != 0 and "2 processes draw into one file: give out=FILE.jsonl" in done.stderr


@pytest.mark.slow
def test_two_ranks_evaluate_as_one_and_a_rerun_completes(model, tmp_path):
    how = (model, "sampling.n=9", "sampling.steps=4,6", "eval.judge=none")
    one, two = tmp_path / "one", tmp_path / "two"
    assert adlm("evaluate", *how, f"out={one}").returncode == 0
    (tmp_path / "dies.py").write_text(DIES)
    assert adlm("evaluate", *how, f"out={two}", ranks=2, program=(str(tmp_path / "dies.py"),)).returncode != 0
    done = adlm("evaluate", *how, f"out={two}", ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    names = sorted(p.name for p in (one / "samples").iterdir())
    assert names == sorted(p.name for p in (two / "samples").iterdir()) and len(names) == 2
    for name in names:
        assert samples(one / "samples" / name) == samples(two / "samples" / name)
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, two))
    for a, b in zip(first["settings"], second["settings"], strict=True):
        assert a["metrics"] == b["metrics"]


@pytest.mark.slow
def test_two_ranks_measure_as_one(model, tmp_path):
    (tmp_path / "root" / "lambada").mkdir(parents=True)
    write_corpus(tmp_path / "root" / "lambada" / "lambada_test.jsonl", documents=30)
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    for command, *how in (
        ["ppl", model, "eval.draws=2"],
        ["zeroshot", model, "lambada", f"data.root={tmp_path / 'root'}"],
    ):
        found = []
        for ranks in (1, 2):
            out = tmp_path / f"{command}-{ranks}.json"
            done = adlm(command, *how, cache, "eval.batch_size=3", f"out={out}", ranks=ranks)
            assert done.returncode == 0, done.stderr[-2000:]
            found.append(json.loads(out.read_text()))
        assert found[0] == found[1], command

"""More than one rank: the same curve, checkpoints that change hands, DDP and FSDP2 alike (gloo, on the CPU)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import overrides
from safetensors.torch import load_file

from adlm.training.metrics import read_metrics

pytestmark = pytest.mark.timeout(1800)  # several processes each, on a machine that may be busy


def launch(folder: Path, ranks: int, name: str, *more: str, **changes: object) -> Path:
    """Train under torchrun with `ranks` processes (1: alone) and return the run folder."""
    out = folder / name
    run(ranks, "-m", "adlm", "train", *overrides(folder, out=out, **changes), *more)
    return out


def run(ranks: int, *arguments: str) -> str:
    """What it says on stderr."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *several, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def curve(run: Path) -> list[float]:
    return [e.get("nelbo", e.get("nll")) for e in read_metrics(run)]


def assert_same_curve(a: Path, b: Path) -> None:
    assert len(curve(a)) == len(curve(b)) > 10
    np.testing.assert_allclose(curve(a), curve(b), rtol=1e-5)
    first, second = (load_file(run / "export" / "model.safetensors") for run in (a, b))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    launch(folder, 1, "alone")
    return folder


def test_two_ranks_give_the_curve_of_one(alone):
    assert_same_curve(launch(alone, 2, "two"), alone / "alone")


@pytest.mark.slow
def test_four_ranks_give_the_curve_of_one(alone):
    assert_same_curve(launch(alone, 4, "four"), alone / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fsdp_gives_the_curve_of_ddp(alone, optimizer):
    ddp = launch(alone, 2, f"ddp-{optimizer}", optim=optimizer)
    fsdp = launch(alone, 2, f"fsdp-{optimizer}", "train.strategy=fsdp", optim=optimizer)
    assert_same_curve(fsdp, ddp)


@pytest.mark.slow
def test_no_bridge_on_two_ranks(alone):
    one = launch(alone, 1, "one-none", model__bridge="none")
    assert_same_curve(launch(alone, 2, "two-none", model__bridge="none"), one)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_saved_on_two_ranks_resumed_on_one_and_on_four(alone, ranks, strategy):
    """Stop at step 8 by cutting the later checkpoints away, then go on with another number of ranks."""
    name = f"{strategy}-2-to-{ranks}"
    run = launch(alone, 2, name, f"train.strategy={strategy}")
    for step in (run / "checkpoints").glob("step-*"):
        if int(step.name[5:]) > 8:
            for file in step.iterdir():
                file.unlink()
            step.rmdir()
    assert [p.name for p in (run / "checkpoints").glob("step-*")]
    assert_same_curve(launch(alone, ranks, name, "train.strategy=ddp"), alone / "alone")


FAILS_ONCE = """
import sys
from adlm import cli
from adlm.training import checkpoint

seal = checkpoint.seal

def full(folder):
    checkpoint.seal = seal
    raise OSError(28, "No space left on device")

checkpoint.seal = full
sys.exit(cli.main(sys.argv[1:]))
"""


def test_what_fails_on_the_first_rank_fails_on_all(alone, tmp_path):
    """The first rank alone completes a checkpoint; the others must not wait for it in vain."""
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    out = alone / "full"
    said = run(2, str(tmp_path / "fails_once.py"), "train", *overrides(alone, out=out))
    assert said.count("No space left on device; training continues") == 1
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    assert_same_curve(out, alone / "alone")


PREPARES_FOR_LONG = """
import functools, time
from datetime import timedelta
import torch.distributed as dist
from adlm.schema import TrainConfig
from adlm.training.parallel import world

dist.init_process_group = functools.partial(dist.init_process_group, timeout=timedelta(seconds=1))
with world(TrainConfig(device="cpu")) as ranks:
    for _ in range(2):
        began = time.monotonic()
        with ranks.main_first():
            time.sleep(3 if ranks.is_main else 0)
        assert time.monotonic() - began > 2.5
"""


@pytest.mark.slow
def test_ranks_wait_for_the_first_longer_than_a_barrier_would(tmp_path):
    (tmp_path / "prepares.py").write_text(PREPARES_FOR_LONG)
    run(2, str(tmp_path / "prepares.py"))


@pytest.mark.slow
def test_algorithms_are_compared_on_two_ranks(alone):
    out = alone / "compared"
    run(2, "-m", "adlm", "compare", *overrides(alone, out=out, train__steps=2, eval__sequences=4), "mdlm", "adlm")
    assert (out / "table.md").read_text().count("\n| ") == 2


@pytest.mark.slow
def test_adapters_on_two_ranks(alone):
    """Low-rank adapters of the model above, whose weights are whole on every rank (ddp) or sharded (fsdp)."""
    given = {"lora__rank": 2, "checkpoint__init_from": alone / "alone" / "export", "train__steps": 6}
    one, ddp = launch(alone, 1, "low-rank", **given), launch(alone, 2, "low-rank-ddp", **given)
    fsdp = launch(alone, 2, "low-rank-fsdp", "train.strategy=fsdp", **given)
    first = load_file(one / "export" / "adapter.safetensors")
    for run in (ddp, fsdp):
        np.testing.assert_allclose(curve(run), curve(one), rtol=1e-5)
        second = load_file(run / "export" / "adapter.safetensors")
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)

"""More than one rank: the same curve, checkpoints that change hands, DDP and FSDP2 alike (gloo, on the CPU)."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import overrides, wait_for_step
from safetensors.torch import load_file

from adlm.training.metrics import read_metrics
from adlm.training.watch import Doing, behind, describe

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
def test_blocks_on_two_ranks(alone, strategy):
    """Ranks have sequences of other block lengths, and make another number of passes."""
    settings = {"algo": "bd3lm", "model__block_length": "4,1,2,0", "model__shift": True, "train__batch_size": 2}
    one = launch(alone, 1, f"one-blocks-{strategy}", **settings)
    two = launch(alone, 2, f"two-blocks-{strategy}", f"train.strategy={strategy}", **settings)
    assert_same_curve(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_saved_on_two_ranks_resumed_on_one_and_on_four(alone, ranks, strategy):
    """Stop at step 8 by cutting the later checkpoints away, then go on with another number of ranks."""
    name = f"{strategy}-2-to-{ranks}"
    run = launch(alone, 2, name, f"train.strategy={strategy}")
    cut_off(run, 8)
    assert_same_curve(launch(alone, ranks, name, "train.strategy=ddp"), alone / "alone")


FAILS_ONCE = """
import sys
import time
from adlm import cli
from adlm.training import checkpoint

seal = checkpoint.seal

def full(folder, entries):
    checkpoint.seal = seal
    raise OSError(28, "No space left on device")

checkpoint.seal = full
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
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


# Ranks that come and go


AGENT = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--max-restarts=3", "--monitor-interval=0.2"]


def agent(port: int, nodes: str, *arguments: str, ranks: int = 1) -> subprocess.Popen:
    """One node of a run: an agent of torchrun with its ranks, in a group of processes of its own."""
    meeting = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *AGENT, *meeting, "--rdzv-conf=last_call_timeout=2,join_timeout=600", *arguments],
        env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    """Until the agent listens: the first one that does is the host of the meeting, which must not die."""
    for _ in range(600):
        assert process.poll() is None, process.communicate()[1]
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the agent does not listen")


def cut_off(run: Path, step: int) -> None:
    """Remove the checkpoints after `step`: the run resumes there."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    assert (run / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.slow
def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(alone):
    """Two agents of torchrun; one is killed during the run. The other one goes on alone from the newest checkpoint, and
    ends with the weights of a run that changed from two ranks to one at the same step."""
    changes = {"train__steps": 400, "checkpoint__every": 20, "checkpoint__keep": 100, "train__valid_every": 0}
    line = ["-m", "adlm", "train", *overrides(alone, out=alone / "elastic", **changes)]
    port = free_port()
    agents = [agent(port, "1:2", *line)]
    try:
        wait_for_port(port, agents[0])
        agents.append(agent(port, "1:2", *line))
        wait_for_step(alone / "elastic", 130, agents[0])
        agents[1].kill()  # and not its rank, which Linux kills then
        said = agents[0].communicate(timeout=900)[1]
    finally:
        for process in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert agents[0].returncode == 0, said[-3000:]
    found = re.search(r"at step (\d+) with 1 rank in place of 2; lost (\d+) steps, ([\d.]+) s since", said)
    assert found is not None, said[-3000:]
    print(found.group())
    resumed, lost = int(found[1]), int(found[2])
    assert resumed >= 120 and resumed % 20 == 0, "at most the steps since the last checkpoint are lost"
    launch(alone, 2, "reference", **changes)
    cut_off(alone / "reference", resumed)
    launch(alone, 1, "reference", **changes)
    first, second = (load_file(alone / run / "export" / "model.safetensors") for run in ("elastic", "reference"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0 <= lost <= 40


@pytest.mark.slow
def test_hsdp_on_two_nodes_of_two_gives_the_curve_of_ddp(alone):
    out, port = alone / "hsdp", free_port()
    line = ["-m", "adlm", "train", *overrides(alone, out=out), "train.strategy=hsdp"]
    agents = [agent(port, "2", *line, ranks=2) for _ in range(2)]
    said = [process.communicate(timeout=900)[1] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], said[0][-3000:]
    assert_same_curve(out, alone / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_ranks_share_eight_sequences(alone, strategy):
    """3, 3 and 2 of them: the curve stays the same, with micro-batches of at most two as well."""
    assert_same_curve(launch(alone, 3, f"three-{strategy}", f"train.strategy={strategy}"), alone / "alone")
    name = f"three-{strategy}-small"
    assert_same_curve(launch(alone, 3, name, f"train.strategy={strategy}", "train.batch_size=2"), alone / "alone")


@pytest.mark.slow
def test_checkpoints_at_a_url_are_resumed_by_ranks_that_share_no_disk(alone, tmp_path):
    """Two ranks write to a URL; another one, with a folder of its own that is empty, resumes from there."""
    url = f"file://{tmp_path}/checkpoints"
    launch(alone, 2, "at-url", f"checkpoint.url={url}", train__steps=12)
    assert not list((alone / "at-url" / "checkpoints").glob("step-*"))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    (tmp_path / "checkpoints" / "step-00000012" / "manifest.json").unlink()  # as if it had not been completed
    launch(alone, 1, "elsewhere", f"checkpoint.url={url}", train__steps=12)
    first, second = (load_file(alone / run / "export" / "model.safetensors") for run in ("at-url", "elsewhere"))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)
    assert len(curve(alone / "elsewhere")) < len(curve(alone / "at-url")), "the first eight steps were not taken again"


HANGS = """
import sys, time
import torch.distributed as dist
from adlm.training import watch

watch.LATE, watch.EVERY = 2.0, 0.3
from adlm import cli
from adlm.data import loader

read = loader.Batches.read

def stuck_disk(self, first):
    if self.rank == 1 and first >= 24 and not hasattr(self, "was_stuck"):
        self.was_stuck = True
        time.sleep(8)
    return read(self, first)

loader.Batches.read = stuck_disk
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_shows_its_stack(alone, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    said = run(2, str(tmp_path / "hangs.py"), "train", *overrides(alone, out=alone / "hung"))
    waiting = re.search(r"waiting: rank 0 \(.*\): (.*), for [\d.]+ s; furthest behind: rank 1 \(.*\): (.*), for", said)
    assert waiting is not None, said[-3000:]
    assert "count their tokens" in waiting[1] and waiting[2] == "reading sequences"
    assert re.search(r"rank 1 \(.*the others wait for it. Its stacks:", said)
    assert "stuck_disk" in said
    assert_same_curve(alone / "hung", alone / "alone")


def doing(rank: int, step: int, waits: bool, seconds: float = 60, **more: object) -> Doing:
    return Doing(rank, f"work of {rank}", step, waits, seconds=seconds, **more)


def test_those_furthest_behind_are_waited_for():
    nobody = [doing(0, 5, True, seconds=3), doing(1, 5, False)]
    assert behind(nobody) == [], "no rank has waited for long"
    assert [r.rank for r in behind([doing(0, 5, True), doing(1, 5, False)])] == [1]
    assert [r.rank for r in behind([doing(0, 5, True), doing(1, 4, True), doing(2, 5, False)])] == [1]
    assert [r.rank for r in behind([doing(0, 5, True), doing(1, 5, True)])] == [0, 1], "no telling: all show stacks"
    text = describe([doing(0, 5, True), doing(1, 5, False)], [doing(1, 5, False, silent=50.0)])
    assert "rank 0" in text and "furthest behind: rank 1" in text and "not heard of for 50 s" in text

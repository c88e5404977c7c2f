"""A run that is killed at any file operation resumes bit for bit, and its export is that of its newest checkpoint."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from kills import DIED, count_operations, in_a_fork
from runs import run_config
from safetensors.torch import load_file

from adlm.io.load import load_checkpoint
from adlm.schema import Config
from adlm.training import loop
from adlm.training.checkpoint import problem_of, read_weights
from adlm.training.metrics import read_metrics

SMALL = {
    "model__length": 16,
    "model__n_blocks": 1,
    "train__global_batch_size": 4,
    "train__valid_every": 2,
    "train__valid_sequences": 4,
    "checkpoint__every": 2,
}
SHORT, LONG = 4, 6  # steps of a run, and of the same run extended


class Kills:
    """Runs that are killed, beside the same runs in peace: one from the start, and one that extends a finished run."""

    def __init__(self, folder: Path):
        self.folder = folder
        loop.train(self.settings("short", SHORT))
        shutil.copytree(folder / "short", folder / "extended")
        loop.train(self.settings("extended", LONG))
        self.operations = {}
        for extends in (False, True):
            cfg = self.start("counted", extends)
            assert in_a_fork(lambda cfg=cfg: self.train_counting(cfg)) == 0
            self.operations[extends] = int((folder / "operations").read_text())
            shutil.rmtree(folder / "counted")

    def settings(self, name: str, steps: int) -> Config:
        return run_config(self.folder, out=self.folder / name, train__steps=steps, **SMALL)

    def start(self, name: str, extends: bool) -> Config:
        if extends:
            shutil.copytree(self.folder / "short", self.folder / name)
        return self.settings(name, LONG if extends else SHORT)

    def train_counting(self, cfg: Config) -> None:
        count = count_operations(Path(cfg.out))
        loop.train(cfg)
        (self.folder / "operations").write_text(str(count()))

    def kill(self, name: str, extends: bool, operations: list[int]) -> None:
        """Kill a run and its reruns at these operations, run it once more, and compare."""
        cfg, whole = self.start(name, extends), self.folder / ("extended" if extends else "short")
        run, killed = Path(cfg.out), 0
        for at in operations:
            died = in_a_fork(lambda at=at: (count_operations(run, at), loop.train(cfg)))
            assert died in (DIED, 0)  # a rerun has less to do, and may come to its end
            killed += died == DIED
            check_loading(run)
        assert killed, operations
        assert in_a_fork(lambda: loop.train(cfg)) == 0, (name, operations)
        check_same(run, whole)


def check_loading(run: Path) -> None:
    """Whoever loads a run in any state gets its newest weights."""
    valid = [p for p in (run / "checkpoints").glob("step-*") if problem_of(p) is None]
    if valid:
        loaded = load_checkpoint(run)
        assert loaded.info["step"] == max(int(p.name[5:]) for p in valid)
        newest = read_weights(run, ema=True)[0]
        assert all(torch.equal(x, newest[name]) for name, x in loaded.model.state_dict().items() if name in newest)


def check_same(run: Path, whole: Path) -> None:
    assert events(run) == events(whole)
    exported, newest = load_file(run / "export" / "model.safetensors"), read_weights(run, ema=True)
    expected = load_file(whole / "export" / "model.safetensors")
    assert exported.keys() == expected.keys() == newest[0].keys()
    for name, x in exported.items():
        assert torch.equal(x, expected[name]) and torch.equal(x, newest[0][name]), name
    assert json.loads((run / "export" / "config.json").read_text())["step"] == newest[1]["step"]
    assert load_checkpoint(run).info["step"] == newest[1]["step"]
    assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in whole.iterdir())  # nothing is left over
    assert all(p.name.startswith("step-") for p in (run / "checkpoints").iterdir())


def events(run: Path) -> list[dict]:
    drop = {"time", "tokens_per_s", "memory_gib"}
    return [{k: v for k, v in e.items() if k not in drop} for e in read_metrics(run)]


@pytest.fixture(scope="module")
def kills(tmp_path_factory) -> Kills:
    return Kills(tmp_path_factory.mktemp("kills"))


def test_the_export_of_an_extended_run_survives_a_kill_at_its_end(kills):
    """The operations after the last checkpoint are those that draw the curves and write the export."""
    last = kills.operations[True]
    for back in (0, 3):
        kills.kill(f"end{back}", True, [last - back])


def test_kills_at_random_file_operations(kills):
    rng = random.Random(0)
    for extends in (False, True):
        kills.kill(f"random-{extends}", extends, [rng.randint(1, kills.operations[extends])])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_at_random_file_operations(kills):
    rng = random.Random(1)
    for number in range(100):
        extends = number % 2 == 1
        again = [rng.randint(1, kills.operations[extends])] if number % 5 == 0 else []  # some reruns are killed, too
        kills.kill(f"kill{number}", extends, [rng.randint(1, kills.operations[extends]), *again])
        shutil.rmtree(kills.folder / f"kill{number}")

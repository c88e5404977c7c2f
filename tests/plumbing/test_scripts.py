"""The Slurm scripts, with stand-ins for Slurm's own commands: requeue on a time limit, statuses, resumed results."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def slurm(tmp_path):
    """A folder of stand-ins in front of PATH; each call is written down in calls.txt."""

    def command(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{tmp_path}/calls.txt"\n{body}\n')
        path.chmod(0o755)

    command("scontrol", '[ "$1" = show ] && echo node1; exit 0')
    env = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4",
    }  # fmt: skip
    (tmp_path / "calls.txt").touch()
    return command, env, (tmp_path / "calls.txt").read_text


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_name_no_site(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert not any(word in text for word in ("--partition", "--account", "module load", "conda", "bashrc", " cd "))


def test_training_ends_with_the_status_of_its_step(slurm):
    command, env, calls = slurm
    command("srun", "exit 3")
    done = subprocess.run([SCRIPTS / "slurm_train.sh", "model=nano", "out=runs/x"], env=env)
    assert done.returncode == 3
    assert "torchrun --nnodes=1 --nproc-per-node=4 --rdzv-id=7" in calls()
    assert "-m adlm train model=nano out=runs/x" in calls()
    assert "requeue" not in calls()


def test_the_time_limit_saves_and_requeues(slurm):
    command, env, calls = slurm
    # The step takes a while to save after TERM: the script must wait for it, not leave at once.
    command("srun", 'trap \'sleep 0.5; echo saved >> "$(dirname "$0")/../calls.txt"; exit 0\' TERM; sleep 60 & wait')
    job = subprocess.Popen([SCRIPTS / "slurm_train.sh", "out=runs/x"], env=env)
    deadline = time.monotonic() + 20
    while "srun" not in calls() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)  # the stand-in has written its name; let it set its trap
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 0
    lines = calls().splitlines()
    assert lines.index("saved") < lines.index("scontrol requeue 7")


def test_training_without_a_folder_is_refused(slurm):
    done = subprocess.run([SCRIPTS / "slurm_train.sh", "model=nano"], env=slurm[1], capture_output=True, text=True)
    assert done.returncode == 2
    assert "out=FOLDER" in done.stderr


def test_zero_shot_goes_on_where_it_stopped(slurm, tmp_path):
    command, env, calls = slurm
    command("srun", 'echo progress; echo "{\\"ppl\\": 3.5}"')
    results = tmp_path / "zeroshot.jsonl"
    results.write_text('{"set": "ptb", "result": {"ppl": 2.5}}\n')
    done = subprocess.run([SCRIPTS / "slurm_zeroshot.sh", "runs/x", results, "data.root=here"], env=env)
    assert done.returncode == 0
    lines = results.read_text().splitlines()
    assert len(lines) == 8
    assert lines[1] == '{"set": "lambada", "result": {"ppl": 3.5}}'
    assert "adlm ppl runs/x data=lambada data.root=here --json" in calls()
    assert "data=ptb" not in calls()

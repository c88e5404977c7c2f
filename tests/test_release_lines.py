"""The release's own command lines, typed as in its README apart from tiny sizes and local files, run to the end."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_compat_overrides import README_TRAIN

from adlm.compat.release import export_release, load_release

ROOT = Path(__file__).parents[1]
TINY = (
    "loader.global_batch_size=4 model.length=32 model.hidden_size=16 model.n_heads=2 model.n_blocks=2 "
    "trainer.max_steps=4 trainer.val_check_interval=2 trainer.log_every_n_steps=1 train.valid_rows=4 "
    "train.compile=false data.tokenizer=bytes"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("release")
    texts = [f"Document {i} tells the story of number {i * i}, again and again." for i in range(200)]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = f"{README_TRAIN} {TINY} data.path={folder / 'docs.jsonl'} checkpointing.save_dir={folder / 'adlm'}/"
    env = {**os.environ, "ADLM_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "adlm_main", *shlex.split(line)]
    return folder, subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_training_line_runs(run):
    folder, done = run
    assert done.returncode == 0, done.stderr
    assert "adlm: note: trainer.num_nodes=1 ignored: torchrun decides" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["adlm", "cache", "docs.jsonl"], (
        "and makes no other folder"
    )
    info = json.loads((folder / "adlm" / "export" / "config.json").read_text())
    assert (info["algo"], info["step"], info["model"]["n_denoiser_blocks"]) == ("adlm", 4, 1)
    assert (info["objective"]["gamma"], info["objective"]["tau"]) == (3e-3, 5)


def test_its_model_goes_to_the_release_and_back(run):
    from adlm.training.export import load_folder

    folder, _ = run
    path = export_release(folder / "adlm", folder / "adlm" / "back.ckpt")
    ours, back = load_folder(folder / "adlm" / "export"), load_release(path, tokenizer="bytes")
    x = torch.randint(0, ours.model.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.model.log_probs(x), back.model.log_probs(x))

"""The release's own command lines, typed as in its README apart from tiny sizes and local files, run to the end."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from judges import save_gpt2
from release import README_SAMPLE, README_TRAIN

from adlm.compat.checkpoints import export_release, load_release

ROOT = Path(__file__).parents[2]
TINY = (
    "loader.global_batch_size=4 model.length=32 model.hidden_size=16 model.n_heads=2 model.n_blocks=2 "
    "trainer.max_steps=4 trainer.val_check_interval=2 trainer.log_every_n_steps=1 train.valid_sequences=4 "
    "train.compile=false data.tokenizer=bytes"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("release")
    texts = [f"Document {i} tells the story of number {i * i}, again and again." for i in range(200)]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = f"{README_TRAIN} {TINY} data.path={folder / 'docs.jsonl'} checkpointing.save_dir={folder / 'adlm'}/"
    env = {**os.environ, "ADLM_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
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
    from adlm.io.export import load_folder

    folder, _ = run
    path = export_release(folder / "adlm", folder / "adlm" / "back.ckpt")
    ours, back = load_folder(folder / "adlm" / "export"), load_release(path, tokenizer="bytes")
    x = torch.randint(0, ours.model.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.model.log_probs(x), back.model.log_probs(x))


def test_the_sampling_line_runs_and_writes_its_json(run):
    """As typed, with a small judge and local text. Reference values: the same samples, measured by hand."""
    from adlm.evaluation.judge import ReadingRule, open_judge, score_texts
    from adlm.evaluation.measures import entropy

    folder, _ = run
    export_release(folder / "adlm", folder / "ckpts" / "tiny.ckpt")
    save_gpt2(folder / "judge")
    line = (
        f"{README_SAMPLE} eval.checkpoint_path=ckpts/tiny.ckpt sampling.num_sample_batches=3 sampling.steps=8 "
        f"eval.gen_ppl_eval_model_name_or_path={folder / 'judge'} data.path={folder / 'docs.jsonl'} "
        "data.tokenizer=bytes"
    )
    env = {**os.environ, "ADLM_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "adlm_main", *shlex.split(line)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "outputs" / "adlm_samples-10_seed-5.json").read_text())
    assert list(found) == ["gen_ppl", "entropy", "MAUVE", "entropies", "text_samples"]
    results = json.loads((folder / "outputs" / "adlm_samples-10_seed-5" / "results.json").read_text())
    (entry,) = results["settings"]
    assert (entry["sampler"], entry["sampling"]["parity"], entry["top_p"]) == ("remdm-loop", "release", 0.9)
    assert results["judge"]["rule"].startswith("release: ")
    lines = (folder / "outputs" / "adlm_samples-10_seed-5" / "samples" / entry["file"]).read_text().splitlines()
    samples = [json.loads(text) for text in lines]
    assert [x["seed"] for x in samples] == [5, 6, 7]
    tokenizer = load_release(folder / "ckpts" / "tiny.ckpt", tokenizer="bytes").tokenizer
    judge = open_judge(str(folder / "judge"), torch.device("cpu"))
    rule = ReadingRule("release", tokenizer, 32)
    alone = [score_texts(judge, [rule.read(judge, x["tokens"])], 1) for x in samples]
    nats, tokens = sum(s.nats_N[0] for s in alone), sum(s.tokens_N[0] for s in alone)
    assert found["gen_ppl"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["entropies"] == pytest.approx([entropy(x["tokens"]) for x in samples])
    assert found["entropy"] == pytest.approx(sum(found["entropies"]) / 3)
    assert found["text_samples"] == [tokenizer.decode(x["tokens"]) for x in samples]
    assert found["MAUVE"] is None or 0 <= found["MAUVE"] <= 1, "where mauve-text is installed"

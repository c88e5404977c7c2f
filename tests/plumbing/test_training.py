"""The loop: it learns, and it resumes bit for bit."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import ALONE, assert_same_run, losses, read_lines, run_config, start, weights
from tiny import random_tokens, tiny_model

from adlm.data.loader import Batch, read_ahead
from adlm.objectives import make_objective
from adlm.objectives.nelbo import Nelbo
from adlm.schema import NoiseConfig, ObjectiveConfig, TrainConfig
from adlm.training import loop, metrics, optim
from adlm.training.metrics import LogWindow, read_metrics
from adlm.training.parallel import Step, world
from adlm.training.setup import corrupt, corrupted_batches, on_device, padded_indices, shortened, validate


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    loop.train(run_config(folder))
    return folder


def test_it_learns_and_leaves_a_complete_run_folder(uninterrupted):
    run = uninterrupted / "run"
    valid = [e["nll"] for e in read_metrics(run) if e["kind"] == "valid"]
    assert len(valid) == 3 and valid[-1] < 0.8 * valid[0]
    assert {p.name for p in run.iterdir()} >= {"config.yaml", "metrics.jsonl", "checkpoints", "export", "curves.png"}
    assert sorted(p.name for p in (run / "export").iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert len(list((run / "checkpoints").iterdir())) <= 3
    info = json.loads((run / "export" / "config.json").read_text())
    assert info["step"] == 12 and info["valid_nll"] == pytest.approx(valid[-1])


class Tokens(SimpleNamespace):
    """Sequences without a file."""

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices):
        return self.tokens[indices]

    def attention_masks(self, indices):
        return None

    def prompts(self, indices):
        return None


def test_validation_has_no_dropout_and_repeats_itself():
    """Twice the same number, that of the network as it is used; afterwards it trains on."""
    module, cfg = Step(tiny_model(dropout=0.5)), TrainConfig(batch_size=4, valid_sequences=0)
    objective, valid = (
        make_objective(ObjectiveConfig(), NoiseConfig(), 10, 1),
        Tokens(tokens=random_tokens(6, 12, 10).numpy()),
    )
    expected = validate(module.eval(), objective, valid, cfg, ALONE)
    module.train()
    assert [validate(module, objective, valid, cfg, ALONE) for _ in range(2)] == [expected, expected]
    assert module.training and module.model.training


def test_the_same_examples_are_dropped_out_anew_at_every_step(tmp_path, monkeypatch):
    """Dropout belongs to step and example, as all noise: here the first batch comes again and again."""
    seeds, seed, batches = [], torch.manual_seed, loop.Batches
    monkeypatch.setattr(loop, "Batches", lambda *a, **k: [next(iter(batches(*a, **k)))] * 9)
    monkeypatch.setattr(torch, "manual_seed", lambda number: (seeds.append(number), seed(number))[1])
    monkeypatch.setattr(loop, "export_run", lambda *what: None)
    settings = {"model__dropout": 0.1, "train__steps": 3, "train__valid_every": 0, "train__batch_size": 4}
    monkeypatch.setattr(loop, "validate_ema", lambda *what: None)
    loop.train(run_config(tmp_path, **settings))
    of_steps = seeds[-6:]
    assert len(seeds) == 7 and len(set(of_steps)) == 6, "two micro-batches in each of three steps"


class Dies(Exception):
    pass


MOVING = {
    "objective__gamma": 0.5,
    "objective__gamma_warmup": 0.25,
    "objective__gamma_until": 0.75,
}


@pytest.mark.parametrize(
    ("dies_at", "options"),
    [
        (1, {}),
        (5, {}),
        (11, {}),
        (7, {"model__dropout": 0.2, "train__batch_size": 4}),
        (7, {"optim": "muon"}),
        (5, {"train__length_warmup": 2, "objective__anchor_rule": "all", "objective__anchor_fraction": 0.5}),
        (9, {"train__length_warmup": 2, "train__batch_size": 4}),
        (7, {"recipe": "fast"}),
        (5, {"train__log_every": 5, "checkpoint__every": 3}),
        (7, MOVING),
    ],
    ids=[
        "before the first checkpoint",
        "middle",
        "end",
        "dropout",
        "muon",
        "shorter sequences, a fraction of the anchors",
        "micro-batches of shorter sequences",
        "fast recipe",
        "between two log lines",
        "moving gamma",
    ],
)
def test_a_run_that_died_resumes_bit_for_bit(tmp_path, monkeypatch, uninterrupted, dies_at, options):
    whole = uninterrupted / "run"
    if options:
        whole = tmp_path / "whole"
        loop.train(run_config(tmp_path, out=whole, **options))
    cfg = run_config(tmp_path, **options)
    updates = 0
    original = optim.Ema.update

    def update(self, **arguments):
        nonlocal updates
        updates += 1
        if updates > dies_at:
            raise Dies
        original(self, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(optim.Ema, "update", update)
        with pytest.raises(Dies):
            loop.train(cfg)
    loop.train(cfg)
    assert_same_run(tmp_path / "run", whole)


def test_accumulation_and_micro_batches_change_only_rounding(tmp_path, uninterrupted):
    cfg = run_config(tmp_path, train__batch_size=2)
    loop.train(cfg)
    ours, whole = losses(tmp_path / "run"), losses(uninterrupted / "run")
    assert [e[:2] for e in ours] == [e[:2] for e in whole]
    np.testing.assert_allclose([e[2] for e in ours], [e[2] for e in whole], rtol=1e-5)


def test_sequence_length_warmup(tmp_path, monkeypatch):
    """The first half of the run reads the same tokens in shorter sequences, each with a time and noise of its own."""
    read: list[tuple[torch.Size, int]] = []
    draw = Nelbo.corrupt

    def spy(self, rows, step, progress):
        assert rows.example_B.max() < rows.total and len(set(rows.example_B.tolist())) == len(rows.tokens_BL)
        read.append((rows.tokens_BL.shape, rows.total))
        return draw(self, rows, step, progress)

    monkeypatch.setattr(Nelbo, "corrupt", spy)
    settings = {"train__steps": 4, "train__batch_size": 4, "algo": "mdlm"}
    assert loop.train(run_config(tmp_path, **settings, train__length_warmup=4)).finished
    assert read[1:] == 4 * [((16, 8), 32)] + 4 * [((4, 32), 8)]  # two micro-batches a step, after one to count FLOPs
    with pytest.raises(ValueError, match=r"train\.length_warmup=5 must divide model\.length=32"):
        loop.train(run_config(tmp_path, **settings, train__length_warmup=5, out=tmp_path / "other"))


def test_corrupted_batches_are_the_same_drawn_ahead(tmp_path):
    cfg = run_config(tmp_path, algo="adlm", train__steps=6)
    objective = make_objective(cfg.objective, cfg.noise, 10, 3)
    batches = [Batch(random_tokens(4, 12, 10, seed=i).numpy(), None, np.arange(4) + 4 * i) for i in range(3)]
    cfg.train.global_batch_size, cfg.train.batch_size = 4, 2
    for i, (batch, tasks) in enumerate(read_ahead(corrupted_batches(objective, iter(batches), 2, cfg, ALONE))):
        assert batch is batches[i] and len(tasks) == 2
        for task, again in zip(tasks, corrupt(objective, batch, 2 + i, 2, cfg)):
            copied = on_device(task, torch.device("cpu"))
            for one in (task, copied):
                assert torch.equal(one.tokens_BL, again.tokens_BL) and one.count == again.count
                assert one.terms.keys() == again.terms.keys()
                for name, term in one.terms.items():
                    assert torch.equal(term.positions_N, again.terms[name].positions_N)
                    assert torch.equal(term.weights_N, again.terms[name].weights_N)
                    assert torch.equal(term.targets_N, again.terms[name].targets_N)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sequences_of_all_block_lengths_share_a_pass(tmp_path, strategy):
    """Ranks that share the weights of a pass must all make the same number."""
    settings = {"algo": "bd3lm", "model__block_length": "4,1,0", "model__shift": True, "train__strategy": strategy}
    cfg = run_config(tmp_path, **settings)
    objective = make_objective(cfg.objective, cfg.noise, 10, 3, cfg.model)
    batch = Batch(random_tokens(5, 12, 10).numpy(), None, np.arange(5))  # 3 sequences, and then 2
    cfg.train.global_batch_size = 5
    corrupted = corrupt(objective, batch, 2, 2, cfg)
    assert len(corrupted) == 2 and len(corrupted[0].tokens_BL) == 2, "K = 1 and K = L lie in one row"
    assert sum(part.count for part in corrupted) == 5 * 11


def test_shorter_sequences_hold_the_same_tokens_in_order():
    tokens, mask = np.arange(24).reshape(2, 12), np.arange(24).reshape(2, 12) % 5 > 0
    cut = shortened(Batch(tokens, mask, np.array([6, 7])), 3)
    assert cut.examples.tolist() == [18, 19, 20, 21, 22, 23]
    assert cut.tokens.tolist() == tokens.reshape(6, 4).tolist() and cut.attention_mask is not None
    assert cut.attention_mask[4].tolist() == mask[1, 4:8].tolist()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_nine_at_twenty_random_moments(tmp_path):
    """Also during checkpoint writes: with checkpoint.every=1 most of the time is spent writing them."""
    often = ("train.steps=150", "train.valid_every=50", "checkpoint.every=1", "train.log_every=5")
    rng = np.random.default_rng(0)
    kills, partial = 0, 0
    while kills < 20:
        process = start(tmp_path, *often)
        begun = len(read_lines(tmp_path / "run"))
        while process.poll() is None and len(read_lines(tmp_path / "run")) <= begun:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.25))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        partial += len(list((tmp_path / "run" / "checkpoints").glob("partial-*")))
    process = start(tmp_path, *often)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert kills >= 15 and partial >= 1, f"{kills} kills, {partial} in the middle of a checkpoint"
    whole = tmp_path / "whole"
    process = start(tmp_path, *often, f"out={whole}")
    process.communicate(timeout=300)
    assert_same_run(tmp_path / "run", whole)


def test_speed_leaves_out_what_is_no_training(monkeypatch):
    """Ten steps of 100 tokens, of which the last four came after a validation: 400 tokens in 4 s."""
    now = iter([0.0, 96.0, 100.0, 100.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    window = LogWindow(None, ALONE)
    for i in range(10):
        window.add({"nelbo": torch.tensor(100.0)})
        window.end_step(torch.tensor(100.0), torch.tensor(100.0), 0)
        if i == 5:
            window.restart()
    values = window.read(torch.tensor(1.0), 0.1, optim.GradientGuard(torch.device("cpu")))
    assert values["tokens_per_s"] == pytest.approx(100.0) and values["nelbo"] == pytest.approx(1.0)


def test_every_rank_validates_the_same_number_of_batches():
    for n, size, batch in [(10, 1, 4), (10, 2, 4), (10, 4, 4), (3, 4, 2), (16, 2, 8)]:
        parts = [padded_indices(n, rank, size, batch) for rank in range(size)]
        assert len({p.shape for p in parts}) == 1
        rows = np.concatenate([p.ravel() for p in parts])
        assert sorted(rows[rows >= 0]) == list(range(n))


def test_samples_during_training_are_recorded_and_change_nothing(tmp_path, uninterrupted):
    loop.train(run_config(tmp_path, train__sample_every=6, sampling__steps=8))
    samples = [e for e in read_metrics(tmp_path / "run") if e["kind"] == "sample"]
    assert [e["step"] for e in samples] == [6, 12] and all(isinstance(e["text"], str) for e in samples)
    ours, whole = weights(tmp_path / "run"), weights(uninterrupted / "run")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_a_sample_that_cannot_be_drawn_does_not_stop_training(tmp_path, capsys):
    settings = {"algo": "mdlm", "sampling__sampler": "anchor-first", "train__sample_every": 2, "train__steps": 4}
    assert loop.train(run_config(tmp_path, **settings)).finished
    said = capsys.readouterr().err
    assert said.count("no sample: sampling.sampler='anchor-first' needs a model with an anchor network") == 2


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/somewhere/bin/adlm", ["adlm"]),
        ("/here/src/adlm/__main__.py", ["adlm"]),
        ("/x/mine.py", ["python", "mine.py"]),
    ],
)
def test_the_recorded_command_names_no_path_of_this_machine(program, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "train", "model=nano"])
    assert loop.command_line() == [*said, "train", "model=nano"]


def test_faster_products_end_with_the_training(monkeypatch):
    """TF32 rounds to ten bits: a model that is asked for float32 after a training in this process must not get it."""
    monkeypatch.setattr("adlm.training.parallel.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with world(TrainConfig()):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"

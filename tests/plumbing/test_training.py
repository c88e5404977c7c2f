"""The loop: it learns, it resumes bit for bit, it survives corruption, and it says what is wrong in one line."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from marks import slow
from runs import ON_A_CPU, read_lines, run_config, start, wait_for_step
from safetensors.torch import load_file
from tiny import random_tokens, tiny_model
from torch import nn

from adlm import config
from adlm.data.loader import Batch, read_ahead
from adlm.data.tokenizers import load_tokenizer
from adlm.objectives import Sequences, make_objective
from adlm.objectives.base import read_positions
from adlm.objectives.nelbo import Nelbo
from adlm.schema import CheckpointConfig, NoiseConfig, ObjectiveConfig, OptimConfig, TrainConfig
from adlm.training import checkpoint, loop, metrics, optim
from adlm.training import run as runs
from adlm.training.checkpoint import Checkpoints, problem_of, read_weights
from adlm.training.metrics import LogWindow, read_metrics
from adlm.training.parallel import Step, World, parallelise, world
from adlm.training.setup import corrupt, corrupted_batches, on_device, padded_indices, shortened, validate

ALONE = World(0, 1, torch.device("cpu"), "fp32", "none")


def losses(run: Path) -> list[tuple]:
    """(kind, step, value) of every event, in order, times left out."""
    return [(e["kind"], e["step"], e.get("nelbo", e.get("nll"))) for e in read_metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


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


@pytest.mark.parametrize(("strategy", "passes"), [("ddp", 3 + 2), ("fsdp", 2)])
def test_sequences_that_are_read_alike_share_a_pass(tmp_path, strategy, passes):
    """Not where ranks share the weights of a pass: all of them must make the same number."""
    settings = {"algo": "bd3lm", "model__block_length": "4,1,0", "model__shift": True, "train__strategy": strategy}
    cfg = run_config(tmp_path, **settings)
    objective = make_objective(cfg.objective, cfg.noise, 10, 3, cfg.model)
    batch = Batch(random_tokens(5, 12, 10).numpy(), None, np.arange(5))  # 3 sequences, and then 2
    cfg.train.global_batch_size = 5
    corrupted = corrupt(objective, batch, 2, 2, cfg)
    assert len(corrupted) == passes
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


# Corruption


def spoil(folder: Path, how: str) -> None:
    victim = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    victim.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_corrupt_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path, capsys, uninterrupted, how):
    cfg = run_config(tmp_path)
    loop.train(cfg)
    folder = tmp_path / "run" / "checkpoints"
    newest, before = sorted(folder.glob("step-*"))[-1:], sorted(folder.glob("step-*"))[-2]
    spoil(newest[0], how)
    assert problem_of(newest[0]) and not problem_of(before)
    (tmp_path / "run" / "export" / "model.safetensors").unlink()
    assert read_weights(tmp_path / "run", ema=True)[1]["step"] == 8 and newest[0].exists()  # readers change nothing
    loop.train(cfg)
    assert "step 12 is corrupt" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", uninterrupted / "run")
    assert len(list(folder.glob("corrupt-*"))) == 1
    for each in folder.glob("step-*"):
        spoil(each, how)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is corrupt"):
        loop.train(cfg)


def test_a_full_disk_does_not_stop_training_until_the_end(tmp_path, monkeypatch, capsys):
    calls = 0
    original = checkpoint.dcp.save

    def save(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls in (1, 2):
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    loop.train(run_config(tmp_path))
    assert "No space left on device; training continues" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("partial-*"))
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="step 12 could not be written"):
        loop.train(run_config(tmp_path, out=tmp_path / "other"))


def test_a_checkpoint_is_completed_beside_training(tmp_path, monkeypatch, capsys):
    """What was saved is what stood there when `save` returned, it appears when it is safe, and a failure is told."""
    may_go_on, sealed = threading.Event(), checkpoint.seal

    def slow_seal(folder: Path, entries: dict) -> list[Path]:
        assert may_go_on.wait(60)
        return sealed(folder, entries)

    monkeypatch.setattr(checkpoint, "seal", slow_seal)
    checkpoints, state = Checkpoints(tmp_path, CheckpointConfig(), ALONE), {"model": {"x": torch.ones(1000)}}
    checkpoints.save(state, {"step": 1}, wait=False)
    assert checkpoints.steps() == []
    state["model"]["x"].zero_()
    may_go_on.set()
    checkpoints.finish_writing()
    assert checkpoints.steps() == [1] and problem_of(checkpoints.path(1)) is None
    checkpoints.load(1, state)
    assert torch.equal(state["model"]["x"], torch.ones(1000))

    monkeypatch.setattr(checkpoint, "seal", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
    checkpoints.save(state, {"step": 2}, wait=False)
    checkpoints.writing.join()
    monkeypatch.setattr(checkpoint, "seal", sealed)
    checkpoints.save(state, {"step": 3})
    assert "step 2 could not be written" in capsys.readouterr().err
    assert checkpoints.steps() == [1, 3] and not list(checkpoints.folder.glob("partial-*"))


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    cfg = run_config(tmp_path, checkpoint__every=2, checkpoint__keep=2, checkpoint__best=False)
    loop.train(cfg)
    checkpoints = Checkpoints(tmp_path / "run", cfg.checkpoint, None)
    assert checkpoints.steps() == [10, 12]
    cfg.checkpoint.keep = 1
    checkpoints.prune(best_step=10)
    assert checkpoints.steps() == [10, 12]
    checkpoints.prune(best_step=12)
    assert checkpoints.steps() == [12]


@pytest.mark.parametrize(("best", "saved"), [(True, [3, 6, 9, 12]), (False, [12])])
def test_better_bounds_are_saved_unless_that_is_off(tmp_path, best, saved):
    cfg = run_config(tmp_path, checkpoint__every=1000, checkpoint__keep=9, checkpoint__best=best, train__valid_every=3)
    loop.train(cfg)
    bounds = [line["nll"] for line in read_metrics(tmp_path / "run") if line["kind"] == "valid"]
    assert bounds == sorted(bounds, reverse=True)
    assert Checkpoints(tmp_path / "run", cfg.checkpoint, None).steps() == saved


def test_weights_can_be_read_without_the_run(uninterrupted):
    run = uninterrupted / "run"
    averaged, info = read_weights(run, ema=True)
    raw, _ = read_weights(run, ema=False)
    exported = weights(run)
    assert info["step"] == 12 and all(torch.equal(averaged[name], exported[name]) for name in exported)
    assert any(not torch.equal(raw[name], exported[name]) for name in exported)


# The guard


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_gradient_is_skipped_whole_and_counted(name):
    model = tiny_model()
    guard = optim.GradientGuard(torch.device("cpu"))
    update = optim.Updater(OptimConfig(name=name, weight_decay=0.1), model, guard=guard)
    optimizers = update.optimizers

    def step(value: float) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        update()

    step(1.0)
    moments = [{k: v.clone() for k, v in s.items()} for o in optimizers for s in o.state.values()]
    before = [p.clone() for p in model.parameters()]
    step(math.nan)
    step(math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    after = [s for o in optimizers for s in o.state.values()]
    assert all(torch.equal(m[k], s[k]) for m, s in zip(moments, after) for k in m)
    assert guard.skipped == 2 and guard.in_a_row == 2
    step(1.0)
    assert guard.in_a_row == 0 and not torch.equal(before[0], next(model.parameters()))


def test_training_stops_after_too_many_bad_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "gradient_norm", lambda parameters: torch.tensor(math.nan))
    monkeypatch.setattr(runs, "MAX_BAD_STEPS", 3)
    with pytest.raises(ValueError, match=r"stopped at step 3: the last 3 updates were skipped"):
        loop.train(run_config(tmp_path))


# Optimizers


@pytest.mark.parametrize(("size", "largest", "left"), [(4.0, 1.0, 1.0), (0.5, 1.0, 0.5), (4.0, 0.0, 4.0)])
def test_gradients_are_scaled_down_and_never_up(size, largest, left):
    model = nn.ParameterList([torch.zeros(n) for n in (3, 5)])
    update = optim.Updater(OptimConfig(clip=largest, ema=0.0), model)
    for p in model:
        p.grad = torch.full_like(p, size / 8**0.5)
    norm = optim.gradient_norm(update.parameters)
    clip = (largest / norm).clamp(max=1.0)
    update.step_plainly(clip, torch.zeros(()))
    assert norm.item() == pytest.approx(size)
    assert optim.gradient_norm(update.parameters).item() == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("everything", [False, True])
def test_weight_decay_is_for_matrices(name, everything):
    """Without a gradient a weight moves by its decay alone: norms, biases and modulations stay."""
    model = tiny_model(conditioning="sigma")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    cfg = OptimConfig(name=name, lr=0.1, muon_lr=0.1, weight_decay=0.5, ema=0.0)
    update = optim.Updater(cfg, model, decay_all=everything)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    stay = {n for n in before if "norm" in n or n.endswith("bias") or "modulation" in n}
    assert {"denoiser.blocks.0.modulation.weight", "denoiser.modulation.weight", "head.bias"} <= stay
    assert moved == (set(before) if everything else set(before) - stay)
    for n in moved:
        torch.testing.assert_close(dict(model.named_parameters())[n].detach(), 0.95 * before[n])


def test_a_run_of_an_earlier_version_goes_on_decaying_everything(tmp_path):
    """What decays is kept in the checkpoint. One that does not say is older, and resumes as it began."""
    cfg, folder = run_config(tmp_path, optim__weight_decay=0.5, train__steps=9), tmp_path / "run"
    folder.mkdir()

    def resume(step: int) -> int:
        with runs.Run(cfg, folder, ALONE) as run:
            run.begin(Step(tiny_model()), load_tokenizer("bytes"), "")
            run.step = step
            run.save()
            return len(run.updater.optimizers[0].param_groups)

    assert [resume(step) for step in (1, 2)] == [2, 2]
    newest = folder / "checkpoints" / "step-00000002"
    info = json.loads((newest / checkpoint.STATE).read_text())
    del info["decay_all"]
    (newest / checkpoint.STATE).write_text(json.dumps(info))
    checkpoint.seal(newest)
    assert [resume(step) for step in (3, 4)] == [1, 1]


def test_muon_takes_the_matrices_of_the_blocks_and_leaves_the_modulation():
    model = tiny_model(conditioning="sigma")
    adamw, muon = optim.build_optimizers(OptimConfig(name="muon"), model)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {names[id(p)] for p in optim.parameters_of([muon])}
    kinds = {name.split(".blocks.")[1].partition(".")[2] for name in taken}
    assert kinds == {"qkv.weight", "attn_out.weight", "mlp_in.weight", "mlp_out.weight"}
    assert taken | {names[id(p)] for p in optim.parameters_of([adamw])} == set(names.values())


def test_learning_rate():
    def rates(**options):
        return [optim.learning_rate_factor(OptimConfig(warmup=4, **options), step, 12) for step in (0, 2, 4, 8, 12)]

    assert rates(schedule="constant") == [0, 0.5, 1, 1, 1]
    assert rates(schedule="linear") == [0, 0.5, 1, 0.5, 0]
    assert rates(schedule="cosine", min_lr_ratio=0.1) == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    assert optim.learning_rate_factor(OptimConfig(warmup=0), 0, 10) == 1


def test_orthogonalise_brings_singular_values_near_one():
    for shape in [(3, 8, 8), (2, 4, 16), (2, 16, 4)]:
        values = torch.linalg.svdvals(
            optim.orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        )
        assert values.min() > 0.3 and values.max() < 1.3


def test_stacked_muon_equals_torch_muon_one_matrix_at_a_time():
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=g) for shape in [(8, 8), (24, 8), (8, 8), (8, 32)]]
    ours, theirs = [nn.Parameter(x.clone()) for x in start], [nn.Parameter(x.clone()) for x in start]
    muon = optim.Muon(ours, lr=0.01, momentum=0.95, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=g)
            b.grad = a.grad.clone()
        muon.step()
        reference.step()
    for a, b, x in zip(ours, theirs, start):
        # torch's iteration runs in bf16, ours in float32 on a CPU: compare the displacement
        assert (a - b).norm() < 0.03 * (b - x).norm()


def test_the_kernel_equals_the_plain_update(tmp_path):
    """Interpreted on the CPU; tests/test_gpu.py runs it for real."""
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    environment = ON_A_CPU | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    script = f"from update_cases import check_interpreted; check_interpreted({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_swapping_the_ema_in_and_out_restores_every_bit():
    model = tiny_model()
    ema = optim.Ema(model, 0.9)
    for p in model.parameters():
        p.data.add_(1.0)
    ema.update()
    raw = [p.clone() for p in model.parameters()]
    shadow = [x.clone() for x in ema.shadow.values()]
    with ema:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), shadow))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), raw))
    assert all(torch.equal(a, b) for a, b in zip(ema.shadow.values(), shadow))


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


# Bad input


def test_resuming_with_another_model_or_tokenizer_is_refused(tmp_path):
    loop.train(run_config(tmp_path))
    with pytest.raises(ValueError, match=r"started with model\.n_blocks=2, now it is 3"):
        loop.train(run_config(tmp_path, model__n_blocks=3))
    with pytest.raises(ValueError, match="another tokenizer"):
        loop.train(run_config(tmp_path, data__tokenizer="bpe-300"))
    with pytest.raises(ValueError, match=r"started with optim\.name=adamw, now it is muon"):
        loop.train(run_config(tmp_path, optim="muon"))
    for key, before, now in (("global_batch_size", 8, 16), ("length_warmup", 1, 2)):
        with pytest.raises(ValueError, match=rf"started with train\.{key}={before}, now it is {now}"):
            loop.train(run_config(tmp_path, **{f"train__{key}": now}))
    with pytest.raises(ValueError, match=r"checkpoint\.resume=true"):
        loop.train(run_config(tmp_path, checkpoint__resume=False))


def test_resuming_may_not_move_what_was_read(tmp_path):
    """More steps are no change, unless a fraction of them had another length; an EMA cannot start in the middle."""
    settings = {"optim__ema": 0.0, "train__steps": 4}
    loop.train(run_config(tmp_path, **settings))
    assert loop.train(run_config(tmp_path, **settings | {"train__steps": 6})).step == 6
    with pytest.raises(ValueError, match=r"started with optim\.ema=0\.0, now it is 0\.9"):
        loop.train(run_config(tmp_path, **settings | {"optim__ema": 0.9}))
    settings |= {"train__length_warmup": 2, "out": tmp_path / "shorter"}
    loop.train(run_config(tmp_path, **settings))
    with pytest.raises(ValueError, match=r"started with train\.steps=4, now it is 6"):
        loop.train(run_config(tmp_path, **settings | {"train__steps": 6}))


def test_a_key_that_a_checkpoint_does_not_know_had_its_default(tmp_path):
    """A run of an older version may not change its objective because a recipe sets what came later."""
    tokenizer = load_tokenizer("bytes")
    before = asdict(run_config(tmp_path, recipe="fast"))
    del before["objective"]["anchor_fraction"]
    info = {"config": before, "tokenizer": tokenizer.fingerprint}
    with pytest.raises(ValueError, match=r"started with objective\.anchor_fraction=1\.0, now it is 0\.25"):
        checkpoint.check_same_run(info, run_config(tmp_path, recipe="fast"), tokenizer)
    checkpoint.check_same_run(info, run_config(tmp_path, recipe="fast", objective__anchor_fraction=1), tokenizer)


def test_a_finished_run_keeps_its_bound(tmp_path):
    """That of its last weights, not the best on the way, when the command is given again."""
    settings = {"optim__lr": 0.5, "optim__ema": 0.0, "train__valid_every": 2}  # a rate that makes it worse
    first = loop.train(run_config(tmp_path, **settings))
    values = [e["nll"] for e in read_metrics(tmp_path / "run") if e["kind"] == "valid"]
    assert first.valid_nll == values[-1] > min(values)
    card = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert loop.train(run_config(tmp_path, **settings)).valid_nll == first.valid_nll
    again = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert again["valid_nll"] == card["valid_nll"] == first.valid_nll and again["tokens"] == card["tokens"]


def test_init_from_starts_at_given_weights(tmp_path, uninterrupted):
    cfg = run_config(tmp_path, checkpoint__init_from=uninterrupted / "run" / "export", train__steps=1)
    loop.train(cfg)
    first = next(e for e in read_metrics(tmp_path / "run") if e["kind"] == "valid")
    last = [e for e in read_metrics(uninterrupted / "run") if e["kind"] == "valid"][-1]
    assert first["nll"] == pytest.approx(last["nll"], rel=1e-5)
    gone = run_config(tmp_path, checkpoint__init_from=tmp_path / "gone", train__steps=2)
    assert loop.train(gone).step == 2  # a run that goes on does not need it any more
    with pytest.raises(ValueError, match="is another model"):
        loop.train(
            run_config(
                tmp_path, checkpoint__init_from=uninterrupted / "run" / "export", model__n_blocks=3, out=tmp_path / "x"
            )
        )
    with pytest.raises(ValueError, match=r"checkpoint\.init_from=.* config\.json is missing"):
        loop.train(run_config(tmp_path, checkpoint__init_from=tmp_path, out=tmp_path / "y"))


def test_a_run_folder_is_for_one_run_at_a_time(tmp_path):
    process = start(tmp_path, "train.steps=1000000")
    wait_for_step(tmp_path / "run", 1, process)
    with pytest.raises(ValueError, match=rf"run' is in use by process {process.pid}; wait for it"):
        loop.train(run_config(tmp_path))
    os.killpg(process.pid, signal.SIGKILL)  # and whoever dies has no claim
    process.communicate()
    done = max(Checkpoints(tmp_path / "run", CheckpointConfig(), None).steps(), default=0)
    assert loop.train(run_config(tmp_path, train__steps=done + 2)).finished


def test_preparing_data_can_be_interrupted(tmp_path):
    """It may take hours; a signal that waited for the first step to end would look lost."""
    prepare = loop.setup.prepare_data

    def interrupted(*what):
        os.kill(os.getpid(), signal.SIGINT)
        return prepare(*what)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.train(run_config(tmp_path), course=loop.Course(interrupted))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        loop.train(run_config(tmp_path, data__path=tmp_path / "nowhere.jsonl"))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(tmp_path, capsys):
    loop.train(run_config(tmp_path, train__steps=4))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".claim"}
    capsys.readouterr()
    result = loop.train(run_config(tmp_path, train__steps=3, optim__lr=0.02))
    assert result.step == 4 and result.finished
    assert "is finished: step 4 of train.steps=3" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before
    assert loop.train(run_config(tmp_path, train__steps=5, optim__lr=0.02)).step == 5
    assert "at step 4; optim.lr was 0.01, is 0.02; train.steps was 4, is 5" in capsys.readouterr().err
    with pytest.raises(ValueError, match="started with seed=1, now it is 2"):
        loop.train(run_config(tmp_path, train__steps=6, seed=2))


def test_unwritable_run_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"not a writable folder"):
        loop.train(run_config(tmp_path, out=tmp_path / "file" / "run"))


def test_dry_run_trains_nothing(tmp_path):
    facts = loop.run_train(run_config(tmp_path), dry_run=True)
    assert facts["parameters"] > 0 and facts["tokens"] == 12 * 8 * 32
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), ALONE)
    assert checkpoints.newest_valid() is None
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        read_weights(tmp_path, ema=True)


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


def test_compiled_steps_expect_any_number_of_scored_positions():
    """Every batch masks another number of positions; compiling again for each would take minutes a step."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model = tiny_model().train()
    step = Step(model)
    step.compiled = True
    model.compile(backend=counter)
    objective = make_objective(ObjectiveConfig(), NoiseConfig(), model.mask_id, 1)
    scored = set()
    for i in range(4):
        task = objective.corrupt(Sequences(random_tokens(4, 12, 10, seed=i), torch.arange(4), 4), i, 0.5)
        scored.add(len(read_positions(task)))
        step(task).total.backward()
    assert len(scored) > 1 and counter.frame_count == 1


def test_compiled_gradients_are_those_of_eager_under_autocast(monkeypatch):
    """The conditioning of adaLN is kept out of autocast; so must be its gradient, which the compiler traces."""
    torch.manual_seed(0)
    model = tiny_model().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = random_tokens(4, 12, 10)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if "modulation" in n or "time_" in n))

    def gradients(function) -> tuple[torch.Tensor, ...]:
        with world(config.load(["train.device=cpu", "train.precision=bf16"]).train) as ranks, ranks.autocast():
            loss = function(tokens).denoiser_BLD.float().square().mean()
        return torch.autograd.grad(loss, parameters)

    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its bf16 products are not there on every CPU
    for name, eager, compiled in zip(names, gradients(model), gradients(torch.compile(model, backend="aot_eager"))):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(("compile", "variants"), [("block", 3), slow("true", 1)])
def test_nothing_is_left_uncompiled(compile, variants, monkeypatch):
    """Every shape has its own compiled form, none is for any shape, and none is missing however many runs a process
    has made before: torch stops at eight without a word."""
    counter, plain = torch._dynamo.testing.CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: plain(f, backend=counter, **how))
    cfg = TrainConfig(compile=compile, length_warmup=4, device="cpu")
    objective = make_objective(ObjectiveConfig(gamma_warmup=0.0), NoiseConfig(), 10, 3)

    def tasks(rows, length):  # their numbers of scored positions differ
        return [
            objective.corrupt(Sequences(random_tokens(rows, length, 10), torch.arange(rows), rows), i, 1.0)
            for i in range(3)
        ]

    for run in range(1, 4):
        step = Step(tiny_model(n_blocks=3, n_denoiser_blocks=3))
        with world(cfg) as ranks:
            parallelise(step, cfg, ranks)
        for rows, length in ((16, 3), (4, 12)):
            for task in tasks(rows, length):
                step(task).total.backward()
        with torch.no_grad():
            for task in tasks(4, 12):
                step(task)
        assert counter.frame_count == run * 3 * variants
    for graph in counter.graphs:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert sum(isinstance(x, torch.SymInt) for x in inputs) <= 1, "more than the number of scored positions varies"


def test_faster_products_end_with_the_training(monkeypatch):
    """TF32 rounds to ten bits: a model that is asked for float32 after a training in this process must not get it."""
    monkeypatch.setattr("adlm.training.parallel.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with world(TrainConfig()):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"

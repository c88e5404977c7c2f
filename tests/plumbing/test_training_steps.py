"""One step of training: the guard, the optimizers, averaged weights, and the compiled step."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from marks import slow
from runs import ALONE, ON_A_CPU, run_config
from tiny import random_tokens, tiny_model
from torch import nn

from adlm import config
from adlm.data.tokenizers import load_tokenizer
from adlm.objectives import Sequences, make_objective
from adlm.objectives.base import read_positions
from adlm.schema import NoiseConfig, ObjectiveConfig, OptimConfig, TrainConfig
from adlm.training import checkpoint, loop, optim
from adlm.training import run as runs
from adlm.training.parallel import Step, parallelise, world

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
    """Interpreted on the CPU; tests/plumbing/test_gpu.py runs it for real."""
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


def test_a_shifted_model_is_compiled_once_for_all_numbers_of_scored_positions(monkeypatch):
    """The states of shifted predictions are read at other positions than those that are scored: theirs are computed
    between the compiled blocks, and a form for each number of them would be compiled at every step."""
    counter, plain = torch._dynamo.testing.CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: plain(f, backend=counter, **how))
    model = tiny_model(anchored=False, n_blocks=3, shift=True, block_length="4")
    cfg = TrainConfig(compile="block", device="cpu")
    objective = make_objective(ObjectiveConfig(name="nelbo"), NoiseConfig(), 10, 3, model.config)
    step = Step(model)
    with world(cfg) as ranks:
        parallelise(step, cfg, ranks)
    numbers = set()
    for i in range(4):
        batch = objective.corrupt(Sequences(random_tokens(4, 12, 10, seed=i), torch.arange(4), 4), i, 0.5)
        numbers.add(len(read_positions(batch)))
        step(batch).total.backward()
    assert len(numbers) > 1 and counter.frame_count == 3, "a form for the first block, the middle ones and the last"

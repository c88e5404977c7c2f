"""On a CUDA device: the same bits as the CPU where bits are promised, the same numbers elsewhere, no host syncs."""

import os
import signal

import pytest
import torch
from dense import dense_anelbo
from draw_cases import check_draws
from runs import start, wait_for_step
from tiny import MODERN, random_tokens, tiny_model

from adlm import config
from adlm.bench import time_training
from adlm.diffusion.random import Stream, uniforms, uniforms32
from adlm.models import build_model, layers
from adlm.models.linear_cross_entropy import cross_entropy_chunk
from adlm.objectives import Sequences, loss, make_objective
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig, OptimConfig, TrainConfig
from adlm.training.optim import Ema, GradientGuard, Updater
from adlm.training.parallel import Step, parallelise, world
from adlm.training.setup import text_like

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_counter_based_uniforms_have_the_same_bits():
    example, position = torch.arange(1000)[:, None], torch.arange(1000)
    for draw in (uniforms, uniforms32):
        cpu = draw(7, Stream.MASK, 3, example, position)
        gpu = draw(7, Stream.MASK, 3, example.cuda(), position.cuda())
        assert torch.equal(cpu, gpu.cpu())


@pytest.mark.parametrize("bridge", ["linear", "none"])
def test_fast_loss_equals_dense_loss(bridge):
    model = tiny_model(bridge=bridge, dtype=torch.float64).cuda()
    x0 = random_tokens(6, 12, 10).cuda()
    cfg = ObjectiveConfig(gamma=0.3, gamma_warmup=0.0, tau=2)
    objective = make_objective(cfg, NoiseConfig(), 10, seed=5)
    rows = Sequences(x0, torch.arange(6).cuda(), 6)
    task = objective.corrupt(rows, 3, 1.0)
    weight = objective.noised(rows, objective.seed, 3).weight_B
    fast = loss(model, task).total
    model.cpu()
    on_cpu = task._replace(tokens_BL=task.tokens_BL.cpu(), sigma_B=None)
    slow = dense_anelbo(model, on_cpu, x0.cpu(), weight.cpu(), 0.3, 2).sum()
    torch.testing.assert_close(fast.cpu().double(), slow.double(), rtol=1e-6, atol=0)


def test_a_step_never_waits_for_the_device():
    cfg = ModelConfig(hidden_size=64, n_heads=4, n_blocks=2, n_denoiser_blocks=1, length=64, cond_dim=16)
    model = build_model(cfg, 211, 210).cuda()
    objective = make_objective(ObjectiveConfig(gamma_warmup=0.0), NoiseConfig(), 210, seed=0)
    update = Updater(OptimConfig(), model, Ema(model, 0.99), GradientGuard(torch.device("cuda")))
    tasks = [
        objective.corrupt(Sequences(torch.randint(0, 200, (4, 64)).cuda(), torch.arange(4).cuda(), 4), i, 1.0)
        for i in (0, 1)
    ]
    for i, task in enumerate(tasks):
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # the first step compiles and allocates
        try:
            with torch.autocast("cuda", torch.bfloat16):
                (loss(model, task).total / task.count).backward()
            update()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_kernel_equals_the_plain_chunk(dtype):
    from adlm.models.kernels import cross_entropy_rows

    torch.manual_seed(0)
    z = (4 * torch.randn(33, 50304, device="cuda")).to(dtype)
    z[:, 50257:] = -torch.inf
    target, weight = torch.randint(0, 50257, (33,), device="cuda"), torch.rand(33, device="cuda")
    expected = cross_entropy_chunk(z.float().clone(), target, weight)  # which works in place
    loss_n, gradient = cross_entropy_rows(z.clone(), target, weight)
    torch.testing.assert_close(loss_n, expected[0], rtol=1e-5, atol=1e-5)
    rough = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
    torch.testing.assert_close(gradient.float(), expected[1], **rough)


def test_the_update_kernel_equals_the_plain_update(tmp_path):
    from update_cases import check_updates

    check_updates("cuda", tmp_path)


def test_the_gelu_inside_the_product():
    from adlm.engine.prepare import linear_gelu

    x, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((2, 24, 64), (256, 64), (256,)))
    got = linear_gelu(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()
    args = (t.bfloat16().float() for t in (x, weight, bias))
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(*args), approximate="tanh")
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_compiled_dropout_has_the_bits_of_the_eager_one():
    """Hashes of an arange: the compiler likes to turn those into arithmetic of indices, which does not wrap."""
    x = torch.randn(16, 1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.tensor([2**30 + 7, -5], dtype=torch.int32)
    results = []
    for function in (layers.dropout, torch.compile(layers.dropout)):
        y = function(x, 0.1, key.cuda())
        results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
    for compiled, eager in zip(*reversed(results)):
        torch.testing.assert_close(compiled, eager)
        assert torch.equal(compiled == 0, eager == 0)


@pytest.mark.parametrize("vocab_size", [300, 50258])
def test_the_draw_kernel_draws_what_the_plain_draw_draws(vocab_size):
    check_draws(vocab_size, "cuda")


@pytest.mark.parametrize(
    "variant",
    [{}, MODERN, MODERN | {"bridge": "none"}],
    ids=["published", "modern", "no bridge"],
)
def test_compiled_blocks_have_the_gradients_of_eager_ones(variant):
    cfg = ModelConfig(hidden_size=64, n_heads=4, n_blocks=2, n_denoiser_blocks=1, length=128, cond_dim=16, **variant)
    torch.manual_seed(0)
    model = build_model(cfg, 211, 210).cuda()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 211, (4, 128), device="cuda")

    def gradients() -> list[torch.Tensor]:
        hidden = model.eval()(tokens)
        parameters = [p for n, p in model.named_parameters() if "head" not in n]
        # without a bridge the anchor network's last norm is not reached: None from autograd, zeros if compiled
        return list(
            torch.autograd.grad(
                hidden.denoiser_BLD.square().mean(), parameters, allow_unused=True, materialize_grads=True
            )
        )

    eager = gradients()
    model.compile()
    for a, b in zip(gradients(), eager):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("conditioning", "causal_until"), [("constant", 0.0), ("sigma", 0.0), ("constant", 0.5)])
@pytest.mark.parametrize("compile", ["true", "block"])
def test_the_compiled_model_has_the_gradients_of_the_eager_one_at_full_width(compile, conditioning, causal_until):
    """Sizes and precision of real training: the compiler chooses other kernels there, and one was wrong."""
    cfg = ModelConfig(n_blocks=1, n_denoiser_blocks=1, dropout=0.0, conditioning=conditioning)
    torch.manual_seed(0)
    model = build_model(cfg, 1001, 1000).cuda().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows = Sequences(torch.randint(0, 1000, (16, cfg.length), device="cuda"), torch.arange(16, device="cuda"), 16)
    objective = ObjectiveConfig(gamma_warmup=0.0, causal_until=causal_until)
    task = make_objective(objective, NoiseConfig(), 1000, seed=0).corrupt(rows, 0, 0.0)

    def gradients() -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            total = loss(model, task).total
        return list(torch.autograd.grad(total / task.count, list(model.parameters())))

    eager = gradients()
    how = TrainConfig(compile=compile, global_batch_size=16)
    with world(how) as ranks:
        parallelise(Step(model), how, ranks)
    for (name, _), a, b in zip(model.named_parameters(), gradients(), eager):
        assert (a - b).norm() <= 0.05 * b.norm(), f"{name}: {a.norm():.3e} compiled, {b.norm():.3e} eager"


@pytest.mark.parametrize(("compile", "recipe"), [("false", "published"), ("true", "fast")])
def test_replayed_steps_train_as_launched_ones(compile, recipe):
    settings = ["model=nano", "algo=adlm", f"recipe={recipe}", "model.length=128", "model.dropout=0", "optim.lr=3e-3"]
    settings += ["optim.warmup=1", "data.tokenizer=bpe-500"]
    settings += [f"train.compile={compile}"]
    curves = []
    for graphs in ("false", "true"):
        torch._dynamo.reset()
        cfg = config.load([*settings, f"train.cuda_graphs={graphs}"])
        with world(cfg.train) as ranks:
            found = time_training(cfg, "ours", ranks, text_like((8, 16, 128), 500), (0, 16))
            curves.append(torch.tensor(found["losses"]))
    launched, replayed = curves
    torch.testing.assert_close(replayed, launched, rtol=5e-3, atol=0)
    assert launched[-4:].mean() < launched[:4].mean() - 0.2, "it learned, so that stale inputs or gradients would show"


@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_compiled_run_that_is_told_to_stop_saves(tmp_path, graphs):
    """As a cluster tells it: the signal goes to the whole group, the compiler's workers included."""
    long = ["train.steps=1000000", "train.valid_every=0", "checkpoint.every=1000000", "train.log_every=10"]
    more = ["train.compile=block", f"train.cuda_graphs={graphs}"]
    process = start(tmp_path, *long, *more, environment=dict(os.environ))
    wait_for_step(tmp_path / "run", 20, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143 and "stopped by a signal" in errors, errors
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))

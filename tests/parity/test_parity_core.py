"""The public release's numbers at toy size, from our code: networks, losses, gradients, optimizer, anchors."""

import pytest
import torch
from dense import dense_anelbo
from release import MASK, V, load

from adlm.compat.checkpoints import from_release
from adlm.objectives import CorruptedBatch, Sequences, Term, loss, make_objective
from adlm.objectives.anchors import counts_in_sequence
from adlm.objectives.base import select
from adlm.objectives.nelbo import gamma_at
from adlm.schema import NoiseConfig, ObjectiveConfig, OptimConfig
from adlm.training.optim import Ema, Updater, learning_rate_factor

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def fixture(parity):
    return torch.load(parity / "fixture_mini.pt", weights_only=True)


@pytest.fixture(scope="module")
def grads(parity):
    return torch.load(parity / "fixture_mini_grads.pt", weights_only=True)


def release_task(x0, x_t, t, gamma, attention_mask):
    """The loss of given noise: what our objective draws, with the release's t and x_t in place of ours."""
    weight_B, valid = 1 / t, attention_mask.bool()
    terms = {"nelbo": Term("denoiser", *select((x_t == MASK) & valid, x0, weight_B), exclude=MASK)}
    if gamma > 0:
        terms["anchor"] = Term("anchor", *select((counts_in_sequence(x0) <= 5) & valid, x0, weight_B), scale=gamma)
    return CorruptedBatch(x_t, None, int(valid.sum()), terms)


def test_anchor_logits_and_log_probs(fixture):
    f = fixture["forward"]
    model = load(fixture["state_dict"])
    with torch.no_grad():
        torch.testing.assert_close(model.anchor_logits(f["x_t"]), f["anchor_logits"], **CLOSE)
        torch.testing.assert_close(model.log_probs(f["x_t"]), f["log_probs"], **CLOSE)


def test_time_conditioned(fixture):
    f = fixture["forward"]
    model = load(fixture["state_dict"], conditioning="sigma")
    with torch.no_grad():
        expected = f["time_conditioned"]
        torch.testing.assert_close(model.anchor_logits(f["x_t"], f["sigma"]), expected["anchor_logits"], **CLOSE)
        torch.testing.assert_close(model.log_probs(f["x_t"], f["sigma"]), expected["log_probs"], **CLOSE)


def test_single_stage(fixture):
    backbone = {k: v for k, v in fixture["state_dict"].items() if k.startswith("backbone.")}
    model = load(backbone, anchored=False)
    f = fixture["forward"]
    with torch.no_grad():
        torch.testing.assert_close(model.log_probs(f["x_t"]), fixture["mdlm"]["log_probs"], **CLOSE)
        log_p = model.log_probs(f["x_t"]).gather(-1, f["x0"][..., None]).squeeze(-1)
    torch.testing.assert_close(-log_p / f["t"][:, None], fixture["mdlm"]["per_token_loss"], rtol=1e-5, atol=1e-4)


def test_noise_and_weight(fixture):
    from adlm.diffusion.process import make_schedule

    f, schedule = fixture["forward"], make_schedule(NoiseConfig())
    torch.testing.assert_close(schedule.sigma(f["t"]), f["sigma"], **CLOSE)
    torch.testing.assert_close(1 - schedule.alpha(f["t"]), f["move_chance"].squeeze(-1), **CLOSE)
    torch.testing.assert_close(schedule.weight(f["t"]), f["nelbo_weight"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", ["plain", "anchor_full", "anchor_ramp", "anchor_step0", "val"])
def test_loss_cases(fixture, case):
    expected = fixture["loss"]["cases"][case]
    f, model = fixture["forward"], load(fixture["state_dict"])
    cfg = ObjectiveConfig()
    ramp = gamma_at(cfg, expected["global_step"] / expected["max_steps"])
    gamma = ramp if expected["enable_anchor_loss"] and expected["prefix"] == "train" else 0.0
    assert gamma == pytest.approx(expected["gamma"])
    task = release_task(f["x0"], f["x_t"], f["t"], gamma, fixture["loss"]["attention_mask"])
    with torch.no_grad():
        output = loss(model, task)
        per_token = dense_anelbo(model, task, f["x0"], 1 / f["t"], gamma, 5)
    torch.testing.assert_close(output.total / output.count, expected["loss"], **CLOSE)
    torch.testing.assert_close(per_token, expected["per_token"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["plain", "anchor_full"])
def test_gradients(fixture, grads, case):
    f, model = fixture["forward"], load(fixture["state_dict"])
    gamma = 0.003 if case == "anchor_full" else 0.0
    output = loss(model, release_task(f["x0"], f["x_t"], f["t"], gamma, fixture["loss"]["attention_mask"]))
    (output.total / output.count).backward()
    named = dict(model.named_parameters())
    for name, expected in grads["grads"][case].items():
        ours = named[from_release(name, True)].grad
        assert (ours - expected).norm() <= 1e-5 * max(expected.norm().item(), 1e-2), name


def test_anchor_masks(fixture):
    for case in fixture["anchor_mask"]:
        sequence = torch.as_tensor(case["sequence"]).reshape(1, -1)
        expected = torch.as_tensor(case["mask"]).reshape(1, -1).bool()
        assert torch.equal(counts_in_sequence(sequence) <= case["threshold"], expected)


def test_autoregressive_model(fixture):
    ar = fixture["ar"]
    model = load(ar["state_dict"], anchored=False, causal=True, conditioning="none")
    x0 = fixture["forward"]["x0"]
    rows = Sequences(x0, torch.arange(len(x0)), len(x0), attention_mask_BL=fixture["loss"]["attention_mask"])
    objective = make_objective(ObjectiveConfig(name="autoregressive", gamma=0.0), NoiseConfig(), MASK, 0)
    with torch.no_grad():
        log_p = model.log_probs(x0[:, :-1])
        output = loss(model, objective.corrupt_for_bound(rows, 0))
    visible = torch.arange(V) != MASK  # the release writes -1000 where we write -inf
    torch.testing.assert_close(log_p[..., visible], ar["log_probs"][..., visible], **CLOSE)
    torch.testing.assert_close(output.total / output.count, ar["loss"], **CLOSE)


def test_six_optimizer_steps_with_clip_and_ema(fixture, grads):
    """AdamW, warm-up from rate 0, clipping by total norm, averages with warm-up: losses, norms and final weights."""
    run = grads["optim_run"]
    model = load(fixture["state_dict"]).train()
    cfg = OptimConfig(lr=run["lr"], warmup=run["warmup"], clip=run["clip"], ema=run["ema_decay"])
    ema = Ema(model, cfg.ema)
    update = Updater(cfg, model, ema)
    for number, step in enumerate(run["steps"]):
        gamma = gamma_at(ObjectiveConfig(), number / 1000)
        task = release_task(step["x0"], step["x_t"], step["t"], gamma, fixture["loss"]["attention_mask"])
        output = loss(model, task)
        (output.total / output.count).backward()
        factor = learning_rate_factor(cfg, number, 1000)
        norm = update(factor)
        torch.testing.assert_close(output.total.item() / output.count, float(step["loss"]), rtol=1e-5, atol=0)
        torch.testing.assert_close(norm.item(), float(step["grad_norm"]), rtol=1e-4, atol=0)
        assert factor * cfg.lr == pytest.approx(float(step["lr"]))
    assert ema.n == run["ema_num_updates"]
    named = dict(model.named_parameters())
    for name, expected in run["final"].items():
        torch.testing.assert_close(named[from_release(name, True)].detach(), expected, **CLOSE)
    for name, expected in run["final_ema"].items():
        torch.testing.assert_close(ema.shadow[from_release(name, True)], expected, **CLOSE)
    for name, expected in run["final_norms"].items():
        torch.testing.assert_close(named[from_release(name, True)].detach().norm(), expected, rtol=1e-5, atol=1e-5)

"""Causal steps: a diffusion model that also learns to predict the next token, with the same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense import plain_logits
from runs import run_config
from tiny import MODERN, random_tokens, tiny_model

from adlm import config
from adlm.models.network import count_flops
from adlm.objectives import Sequences, loss, make_objective
from adlm.objectives.base import position_losses
from adlm.objectives.nelbo import NEXT_TOKEN
from adlm.schema import NoiseConfig, ObjectiveConfig
from adlm.training import optim
from adlm.training.loop import train
from adlm.training.metrics import LogWindow, read_metrics
from adlm.training.parallel import World
from adlm.training.setup import average_flops, scored_fractions

V, L = 11, 12
KINDS = {
    "published": {},
    "one stack": {"anchored": False},
    "modern": {**MODERN, "bridge": "none"},
    "time": {"anchored": False, "conditioning": "sigma"},
    "shifted": {**MODERN, "anchored": False, "shift": True},
    "blocks": {**MODERN, "anchored": False, "block_length": "3,1,4"},
}


def objective_of(model, **settings):
    name = "anelbo" if model.config.anchored else "nelbo"
    cfg = ObjectiveConfig(name, **{"gamma": 0.3, "gamma_warmup": 0.0, "causal_until": 0.5} | settings)
    return make_objective(cfg, NoiseConfig(), V - 1, 5, model.config)


def some(n=6):
    return Sequences(random_tokens(n, L, V - 1), torch.arange(n), n)


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_step_is_that_of_a_causal_model(kind):
    """Loss and gradients against a loop over blocks that hides the future, and a softmax without the mask."""
    model, gradients, losses = tiny_model(dtype=torch.float64, **KINDS[kind]), [], []
    sequences = some()
    batch = objective_of(model).corrupt(sequences, 0, 0.0)
    assert torch.equal(batch.tokens_BL, sequences.tokens_BL) and list(batch.terms) == [NEXT_TOKEN]
    for fast in (True, False):
        model.zero_grad()
        if fast:
            total = loss(model, batch).total / batch.count
        else:
            logits, _ = plain_logits(model, sequences.tokens_BL, torch.zeros(6, dtype=torch.float64), causal=True)
            logits[..., V - 1] = -torch.inf
            log_p = logits[:, :-1].log_softmax(-1)
            total = -log_p.gather(-1, sequences.tokens_BL[:, 1:, None]).mean()
        total.backward()
        losses.append(total.item())
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, plain in zip(*gradients):
        if ours is None or plain is None:  # a head that is read by nobody in this step
            assert all(x is None or not x.any() for x in (ours, plain))
        else:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_told_of_the_future(kind):
    model = tiny_model(dtype=torch.float64, **KINDS[kind])
    sequences, objective = some(), objective_of(model)
    first = position_losses(model, objective.corrupt(sequences, 0, 0.0))
    for at in range(2, L):
        changed = sequences.tokens_BL.clone()
        changed[:, at:] = (changed[:, at:] + 3) % (V - 1)
        losses = position_losses(model, objective.corrupt(sequences._replace(tokens_BL=changed), 0, 0.0))
        read = at if model.config.shift else at - 1  # where the prediction of token `at` stands
        torch.testing.assert_close(losses[:, :read], first[:, :read], rtol=1e-9, atol=1e-12)
        assert not torch.allclose(losses[:, read:], first[:, read:])


def test_the_first_steps_are_causal():
    model = tiny_model()
    objective = objective_of(model, causal_until=0.35)
    causal = [step for step in range(20) if objective.corrupt(some(), step, step / 20).causal]
    assert causal == list(range(7))
    never = objective_of(model, causal_until=0.0)
    assert not any(never.corrupt(some(), step, step / 20).causal for step in range(20))


def test_other_steps_are_as_without():
    model = tiny_model()
    with_them, without = (objective_of(model, causal_until=c).corrupt(some(), 3, 0.15) for c in (0.1, 0.0))
    assert list(with_them.terms) == list(without.terms) == ["nelbo", "anchor"]
    assert torch.equal(with_them.tokens_BL, without.tokens_BL) and not with_them.inputs
    for name, term in with_them.terms.items():
        assert torch.equal(term.weights_N, without.terms[name].weights_N)
        assert torch.equal(term.positions_N, without.terms[name].positions_N)


@pytest.mark.parametrize("shift", [False, True])
def test_prompts_and_padding_are_read_and_not_learned(shift):
    model = tiny_model(anchored=False, shift=shift)
    position_L = torch.arange(L)
    given, real = (position_L < 4).expand(6, L), (position_L < 9).expand(6, L)
    sequences = some()._replace(given_BL=given, attention_mask_BL=real)
    batch = objective_of(model).corrupt(sequences, 0, 0.0)
    term, wanted = batch.terms[NEXT_TOKEN], list(range(4, 9))
    assert batch.count == 6 * len(wanted) == len(term.positions_N)
    read = [at if shift else at - 1 for at in wanted]
    assert (term.positions_N % L).view(6, -1).tolist() == [read] * 6
    assert torch.equal(term.targets_N.view(6, -1), sequences.tokens_BL[:, 4:9])


def test_each_term_is_averaged_over_the_steps_that_had_it():
    window, device = LogWindow(None, World(0, 1, torch.device("cpu"), "fp32", "none")), torch.device("cpu")
    for terms, count in (({NEXT_TOKEN: 30.0}, 10), ({"nelbo": 80.0, "anchor": 8.0}, 20), ({"nelbo": 100.0}, 20)):
        window.add({name: torch.tensor(value) for name, value in terms.items()})
        window.end_step(torch.tensor(float(count)), float(count), 0)
    kept = window.state()
    again = LogWindow(None, World(0, 1, device, "fp32", "none"))
    again.restore(kept)
    for each in (window, again):
        values = each.read(torch.tensor(1.0), 0.1, optim.GradientGuard(device))
        assert list(values)[:4] == ["nelbo", "anchor", NEXT_TOKEN, "ppl"]
        assert [values[name] for name in list(values)[:3]] == pytest.approx([180 / 40, 8 / 20, 30 / 10])


def test_a_run_resumes_between_causal_steps(tmp_path):
    keys = {"objective__causal_until": 0.5, "train__steps": 9, "checkpoint__every": 3}
    whole, cut = (run_config(tmp_path, algo="adlm", out=tmp_path / name, **keys) for name in ("whole", "cut"))
    train(whole)
    lines = [e for e in read_metrics(tmp_path / "whole") if e["kind"] == "train"]
    assert [NEXT_TOKEN in line for line in lines] == [step < 4.5 for step in range(9)]
    assert all(("nelbo" in line) == ("ppl" in line) == (NEXT_TOKEN not in line) for line in lines)

    def is_killed(weights, tokenizer, cfg, step):
        assert step == 4
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(cut, train=replace(cut.train, sample_every=4)), sample=is_killed)
    assert not (tmp_path / "cut" / "export").exists()
    train(cut)
    one, two = ((tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two


@pytest.mark.parametrize("short", [0.0, 0.25, 0.75])
@pytest.mark.parametrize(("anchored", "gamma_until"), [(True, 0.75), (False, 0.75), (False, 0.25)])
def test_flops_are_the_average_over_steps(anchored, gamma_until, short):
    """Where there are no anchors, the end that the settings give them means nothing. Sequences are shorter at first."""
    model = tiny_model(anchored=anchored)
    settings = {"name": "anelbo" if anchored else "nelbo", "causal_until": 0.5, "gamma_until": gamma_until}
    cfg = config.from_tree({f"objective.{key}": value for key, value in settings.items()}, "test")
    train_cfg = replace(cfg.train, length_warmup=4 if short else 1, length_warmup_fraction=short)
    cfg = replace(cfg, model=model.config, train=train_cfg)
    objective = make_objective(cfg.objective, cfg.noise, V - 1, 5, model.config)
    clean = some(64)
    _, anchors = scored_fractions(objective, clean)
    every_step = []
    for step in range(200):
        batch = objective.corrupt(clean, step, step / 200)
        parts = {name: len(term.positions_N) / clean.tokens_BL.numel() for name, term in batch.terms.items()}
        read = L // 4 if step < 200 * short else L
        if batch.causal:
            every_step.append(count_flops(replace(model.config, causal=True), V, read, 1.0).training_per_token)
        else:
            carried = parts.pop("anchor", 0.0)
            every_step.append(count_flops(model.config, V, read, *parts.values(), carried).training_per_token)
    assert anchors == pytest.approx(0.5 * anchored, rel=0.1)  # of 100 steps that are not causal, 50 have anchors
    whole = average_flops(cfg, objective, clean, V)
    assert whole == pytest.approx(np.mean(every_step), rel=0.01)
    frozen = replace(cfg, lora=replace(cfg.lora, rank=2))
    assert average_flops(frozen, objective, clean, V) == pytest.approx(whole * 2 / 3), "no gradients of weights"


@pytest.mark.parametrize("algo", ["sedd", "d3pm", "bd3lm", "ar", "a2r"])
def test_every_algorithm_may_begin_so_and_causal_models_do_in_any_case(tmp_path, algo):
    keys = {"train__steps": 4, "train__valid_every": 0, "checkpoint__every": 4, "algo": algo}
    cfgs = [run_config(tmp_path, out=tmp_path / str(c), objective__causal_until=c, **keys) for c in (0.0, 0.5)]
    for cfg in cfgs:
        train(cfg)
    lines = [[e for e in read_metrics(Path(cfg.out)) if e["kind"] == "train"] for cfg in cfgs]
    assert not any(NEXT_TOKEN in line for line in lines[0])
    if cfgs[0].model.causal:
        norms = [[line["grad_norm"] for line in each] for each in lines]
        assert norms[0] == norms[1] and not any(NEXT_TOKEN in line for line in lines[1])
    else:
        assert [NEXT_TOKEN in line for line in lines[1]] == [True, True, False, False]
    flops = []
    for cfg in cfgs:
        objective = make_objective(cfg.objective, cfg.noise, V - 1, 5, cfg.model)
        tokens_BL = random_tokens(8, cfg.model.length, V - 1)
        flops.append(average_flops(cfg, objective, Sequences(tokens_BL, torch.arange(8), 8), V))
    assert (flops[0] == flops[1]) == cfgs[0].model.causal


def test_anchors_must_outlast_the_causal_steps():
    with pytest.raises(ValueError, match=r"objective\.gamma_until=0\.25 must be above objective\.causal_until=0\.3"):
        config.load(["algo=adlm", "recipe=quick", "objective.causal_until=0.3"], run_folder=False)

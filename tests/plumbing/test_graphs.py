"""Steps replayed as CUDA graphs. On a CPU, with the promises of the recorder; plumbing/test_gpu.py has the real one."""

import numpy as np
import pytest
import torch
from runs import run_config
from tiny import random_tokens, tiny_model

from adlm.data.loader import Batch
from adlm.objectives import loss, make_objective
from adlm.objectives.base import read_positions
from adlm.schema import TrainConfig
from adlm.training import optim, parallel
from adlm.training.parallel import GraphedModel, Step, World
from adlm.training.setup import corrupt


def record_on_a_cpu(module, example, **options):
    """What torch's recorder of CUDA graphs promises: inputs, outputs and gradients lie in the same place every time."""
    weights = list(module.parameters())
    kept: dict[str, list[torch.Tensor]] = {}

    def place(name: str, values) -> list[torch.Tensor | None]:
        memory = kept.setdefault(name, [None if x is None else torch.empty_like(x) for x in values])
        for here, x in zip(memory, values):
            if here is not None:
                here.copy_(x)
        return [None if x is None else x.detach() for x in memory]

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for here, x in zip(example, inputs):
                here.copy_(x)
            with torch.enable_grad():
                ctx.states = module(*example)
            return tuple(place("states", [x.detach() for x in ctx.states]))

        @staticmethod
        def backward(ctx, *gradients):
            found = torch.autograd.grad(ctx.states, weights, gradients, allow_unused=True)
            return *[None] * len(example), *place("gradients", found)

    return lambda *inputs: Replay.apply(*inputs, *weights)


def test_replayed_steps_are_those_that_are_launched(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record_on_a_cpu)
    keys = {"train__steps": 12, "train__cuda_graphs": True, "optim__lr": 1e-2, "optim__warmup": 0}
    cfg = run_config(tmp_path, algo="adlm", objective__causal_until=0.5, **keys)
    weights, read = [], set()
    for replayed in (False, True):
        torch.manual_seed(0)
        model = tiny_model(dropout=0.0).train()
        step = Step(model)
        step.graphed = GraphedModel(model) if replayed else None
        objective = make_objective(cfg.objective, cfg.noise, model.mask_id, 1)
        update = optim.Updater(cfg.optim, step)
        for i in range(12):
            batch = Batch(random_tokens(8, 12, 10, seed=i).numpy(), None, np.arange(8))
            (task,) = corrupt(objective, batch, i, 1, cfg)
            positions_N = read_positions(task)
            read.add((task.causal, None if positions_N is None else len(positions_N)))
            (step(task).total / task.count).backward()
            update()
        weights.append([p.detach().clone() for p in model.parameters()])
        if step.graphed is not None:
            assert len({causal for causal, _ in read}) == 2
            assert len(step.graphed.recorded) == len(read) > 2, "one for each number of positions, one for causal steps"
            with torch.no_grad():
                step(task)
            assert len(step.graphed.recorded) == len(read), "a validation is not a training pass"
    for a, b in zip(*weights):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_replayed_is_refused(monkeypatch):
    monkeypatch.setattr(parallel, "choose_attention", lambda *settings: None)
    step, ranks = Step(tiny_model(), loss), World(0, 1, torch.device("cpu"), "fp32", "none")
    with pytest.raises(ValueError, match="needs a GPU"):
        parallel.parallelise(step, TrainConfig(cuda_graphs=True), ranks)

"""Gradients of biases out of the kernels that make what they are sums of: the kernels themselves, and who calls them.

Kernels run in Triton's interpreter here, and the compiler on the CPU, with plain formulas in their place;
tests/test_gpu.py has both for real.
"""

import os
import subprocess
import sys

import pytest
import torch
from tiny import MODERN, random_tokens, tiny_model
from torch._dynamo import lookup_backend

from adlm.models import bias_gradients, layers
from adlm.models.pointwise import rotate
from adlm.objectives import Rows, loss, make_objective
from adlm.schema import NoiseConfig, ObjectiveConfig
from adlm.training.parallel import expect_any_number


def test_the_kernels_equal_autograd():
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    script = "from bias_gradient_cases import check_kernels; check_kernels('cpu')"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


calls = []


def partial_sums(g):
    rows = g.float().flatten(0, -2)
    group = torch.arange(len(rows)) % bias_gradients.GROUPS
    return torch.zeros(bias_gradients.GROUPS, rows.shape[1]).index_add_(0, group, rows)


@bias_gradients.gelu_backward.register_kernel("cpu")
def _(g, x):
    calls.append(x.shape)
    g_x = torch.ops.aten.gelu_backward(g.float(), x.float(), approximate="tanh").to(x.dtype)
    return g_x, partial_sums(g_x)


@bias_gradients.heads_backward.register_kernel("cpu")
def _(gq, gk, gv, cos, sin):
    calls.append(gq.shape)
    g = torch.stack((rotate(gq, cos, -sin), rotate(gk, cos, -sin), gv), dim=2).flatten(2)
    return g, partial_sums(g)


VARIANTS = {
    "published": {},
    "shortcuts": {"bridge": "none", "value_residual": True, "skips": True},  # somebody else reads the values
    "normed": {"qk_norm": True},  # only the MLP's bias
    "squared": {"activation": "relu2", "bias": False},  # only the bias of queries, keys and values
    "no modulation": {"adaln": False},
    "time": {"time_conditioning": True},  # nothing is folded
    "modern": MODERN,
}
CALLS_OF_A_BLOCK = {"published": 2, "shortcuts": 2, "normed": 1, "squared": 1, "no modulation": 1}


@pytest.mark.parametrize(("variant", "precision"), [*((name, "fp32") for name in VARIANTS), ("published", "bf16")])
def test_compiled_models_have_the_gradients_of_eager_ones(variant, precision, monkeypatch):
    """Three batches, which score different numbers of positions: the compiler works once."""
    model = tiny_model(**VARIANTS[variant]).train()
    objective = make_objective(ObjectiveConfig(gamma=0.3, gamma_warmup=0.0, tau=2), NoiseConfig(), 10, seed=5)
    tasks = [objective.draw(Rows(random_tokens(24, 12, 10, seed=i), torch.arange(24), 24), i, 1.0) for i in (0, 1, 2)]
    assert len({len(term.rows_N) for task in tasks for term in task.terms.values()}) > 2

    def gradients(task):
        # without oneDNN: on some virtual machines its bf16 kernels use instructions the machine does not have
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            torch.backends.mkldnn.flags(enabled=precision == "fp32"),
        ):
            total = loss(model, task).total
            return torch.autograd.grad(total / task.count, list(model.parameters()), allow_unused=True)

    eager = [gradients(task) for task in tasks]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(layers, "sums_here", lambda x: torch.compiler.is_compiling())
    model.compile(backend=backend)
    for task, expected in zip(tasks, eager):
        calls.clear()
        expect_any_number(task)
        got = gradients(task)
        blocks = model.config.n_blocks + model.config.n_denoiser_blocks
        assert len(calls) == blocks * CALLS_OF_A_BLOCK.get(variant, 0)
        for (name, _), a, b in zip(model.named_parameters(), got, expected):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                bound = {"fp32": 1e-4, "bf16": 0.06}[precision]
                assert (a - b).norm() <= bound * b.norm() + 1e-6, f"{name}: {a.norm():.3e}, {b.norm():.3e} eager"
    assert len(graphs) == 1

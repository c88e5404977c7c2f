"""The chunked head loss against the dense one: values, every gradient, and what it never allocates."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from adlm.models import linear_cross_entropy, linear_losses, linear_nll


class Head(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


def problem(dtype, N=37, D=8, V=23, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V - 1, (N,), generator=g)
    weights = torch.rand(N, generator=g).to(dtype)
    return hidden, weight, bias, targets, weights


def dense(hidden, weight, bias, targets, weights, exclude):
    logits = F.linear(hidden, weight, bias)
    if exclude is not None:
        logits = logits.index_fill(1, torch.tensor([exclude]), -torch.inf)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("exclude", [None, 22])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 5, 37, 1000])
def test_equals_dense(dtype, tolerance, exclude, with_bias, chunk_size):
    hidden, weight, bias, targets, weights = problem(dtype)
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    fast = 3 * linear_cross_entropy(hidden, Head(weight, bias), targets, weights, exclude, chunk_size=chunk_size)
    slow = 3 * dense(hidden, weight, bias, targets, weights, exclude)
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=0)
    for a, b in zip(torch.autograd.grad(fast, inputs), torch.autograd.grad(slow, inputs)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_losses_without_gradient():
    hidden, weight, bias, targets, weights = problem(torch.float64)
    with torch.no_grad():
        value = linear_cross_entropy(hidden, Head(weight, bias), targets, weights)
        nll = linear_nll(hidden, Head(weight, bias), targets)
        losses = linear_losses(hidden, Head(weight, bias), targets, weights)
    torch.testing.assert_close(value, (nll * weights).sum())
    torch.testing.assert_close(value, losses.sum())
    assert not value.requires_grad


def test_no_positions_is_zero():
    hidden, weight, bias, targets, weights = problem(torch.float32)
    none = slice(0, 0)
    value = linear_cross_entropy(hidden[none], Head(weight, bias), targets[none], weights[none])
    value.backward()
    assert value.item() == 0
    assert weight.grad is not None and weight.grad.abs().max() == 0
    assert linear_nll(hidden[none], Head(weight, bias), targets[none]).shape == (0,)


def test_bf16_autocast_keeps_sums_in_float32():
    hidden, weight, bias, targets, weights = problem(torch.float32, N=64, D=32, V=101)
    exact = linear_cross_entropy(hidden, Head(weight, bias), targets, weights)
    # without oneDNN: on some virtual machines its bf16 kernels use instructions the machine does not have
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        value = linear_cross_entropy(hidden, Head(weight, bias), targets, weights)
    value.backward()
    assert value.dtype == torch.float32 and weight.grad.dtype == torch.float32
    assert abs(value.item() / exact.item() - 1) < 1e-2


class Largest(TorchDispatchMode):
    """Records the largest tensor any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_never_holds_more_than_one_chunk_of_logits():
    N, D, V, chunk_size = 600, 4, 500, 10
    hidden, weight, bias, targets, weights = problem(torch.float32, N, D, V)
    with Largest() as largest:
        linear_cross_entropy(hidden, Head(weight, bias), targets, weights, chunk_size=chunk_size).backward()
    assert largest.elements == chunk_size * V
    with Largest() as largest:
        dense(hidden, weight, bias, targets, weights, None).backward()
    assert largest.elements == N * V, "the probe sees the dense reference's logits"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, b, t, g: (h[0], w, b, t, g), "must be [N, D] and [V, D]"),
        (lambda h, w, b, t, g: (h[:, 1:], w, b, t, g), "must be [N, D] and [V, D]"),
        (lambda h, w, b, t, g: (h, w, b, t[1:], g), "one per hidden state"),
        (lambda h, w, b, t, g: (h, w, b, t, g[:-1]), "one per hidden state"),
        (lambda h, w, b, t, g: (h, w, b[1:], t, g), "bias must be"),
    ],
)
def test_bad_shapes(change, message):
    hidden, weight, bias, targets, weights = change(*problem(torch.float32))
    with pytest.raises(ValueError) as error:
        linear_cross_entropy(hidden, Head(weight, bias), targets, weights)
    assert message in str(error.value)


INTERPRETED = """
import torch
from adlm.models.kernels import cross_entropy_rows
from adlm.models.linear_cross_entropy import cross_entropy_chunk
generator = torch.Generator().manual_seed(0)
for n, V in ((5, 5000), (3, 8192), (4, 300), (2, 20000), (0, 9)):
    z, bias = 4 * torch.randn(n, V, generator=generator), torch.randn(V, generator=generator)
    bias[3] = bias[-2:] = -torch.inf  # an excluded class, and padding
    target, weight = torch.randint(4, max(5, V - 2), (n,), generator=generator), torch.rand(n, generator=generator)
    z += bias
    for a, b in zip(cross_entropy_rows(z.clone(), target, weight), cross_entropy_chunk(z.clone(), target, weight)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
broken = torch.full((1, 300), torch.nan)
loss, _ = cross_entropy_rows(broken, torch.tensor([3]), torch.ones(1))
assert loss.isnan().all()
"""


def test_the_kernel_equals_the_plain_chunk():
    """Interpreted on the CPU; tests/plumbing/test_gpu.py runs it for real."""
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Modulations in the weights: gradients of `fold` against those of the plain formula, compiled blocks, its kernels."""

import os
import subprocess
import sys

import pytest
import torch
from folding_cases import problem
from tiny import random_tokens, tiny_model

from adlm.models import folding, layers


def plain(parts: folding.Parts) -> list[torch.Tensor]:
    """What a block folds, map by map."""
    vectors = (parts.modulation @ parts.c_1C[0] + parts.modulation_bias).chunk(6)
    made = (
        *folding.entry_map(parts.qkv, None, parts.norm1, *vectors[:2]),
        *folding.exit_map(parts.attn_out, None, vectors[2]),
        *folding.entry_map(parts.mlp_in, parts.mlp_in_bias, parts.norm2, *vectors[3:5]),
        *folding.exit_map(parts.mlp_out, parts.mlp_out_bias, vectors[5]),
    )
    return [x for x in made if x is not None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("D", "C"), [(8, 4), (13, 7)])
def test_gradients_are_those_of_the_plain_formula(D, C, bias):
    gradients, parts = problem(D, C, bias, torch.float64, torch.float64)
    given = [g for g in gradients if g is not None]
    inputs = [x.requires_grad_() for x in parts if x is not None]
    results = []
    for maps in (plain(parts), [x for x in folding.fold(parts, torch.float64) if x is not None]):
        results.append((maps, torch.autograd.grad(maps, inputs, given)))
    for expected, got in zip(*results):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_products_in_bf16_leave_vectors_and_gradients_in_float32():
    _, parts = problem(16, 4, True)
    for x in parts:
        x.requires_grad_()  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        maps = folding.fold(parts, torch.bfloat16)
    for a, b in zip(maps, plain(parts), strict=True):
        assert a is not None and a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-5)
    sum(x.float().square().sum() for x in maps if x is not None).backward()  # type: ignore[union-attr]
    assert all(x is not None and x.grad is not None and x.grad.dtype == torch.float32 for x in parts)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False, "norm": "rmsnorm"}], ids=["published", "no bias"])
def test_compiled_blocks_fold_at_once(monkeypatch, options, recompute):
    """What a GPU does, by the twin of its kernels; only the rule that asks for a GPU is set aside."""
    folded = []
    monkeypatch.setattr(layers.Block, "folds_at_once", lambda block, c_BC: torch.compiler.is_compiling())
    monkeypatch.setattr(folding, "_unfold_entry", lambda *a, f=folding._unfold_entry: (folded.append(1), f(*a))[1])
    model = tiny_model(**options).train()
    tokens, stacks = random_tokens(16, 12, 11), [s for s in (model.anchor, model.denoiser) if s is not None]

    def gradients() -> list[torch.Tensor]:
        parameters = [p for n, p in model.named_parameters() if "head" not in n]
        return list(torch.autograd.grad(model(tokens).denoiser_BLD.square().mean(), parameters, allow_unused=True))

    for stack in stacks:
        stack.checkpoint_activations = recompute
    eager = gradients()
    assert not folded
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    for a, b in zip(gradients(), eager):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(folded) == 2 * sum(len(stack.blocks) for stack in stacks)
    torch._dynamo.reset()


def test_the_kernels_equal_their_twin():
    """Interpreted on the CPU; tests/test_gpu.py runs them for real."""
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    done = subprocess.run([sys.executable, "tests/folding_cases.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

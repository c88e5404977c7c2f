"""Fast forms of the engine draw the same rows: static shapes, kernels, compilation, folding, bfloat16, a GPU."""

import copy
import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
from engine_requests import L, M, V, mixed, request, rows
from tiny import tiny_model

from adlm.engine import Engine
from adlm.engine.prepare import AHEAD, Graphs, Uploads, compile_blocks, fold, pad_heads, to_bfloat16, unwrap


@pytest.fixture(scope="module")
def model():
    return tiny_model().requires_grad_(False)


def test_draws_in_pieces_are_the_same(model):
    requests = mixed(13)
    whole = rows(Engine(model), requests)
    engine = Engine(model)
    engine.evaluator.drawer.most = 2
    assert rows(engine, requests) == whole


class Padded(Graphs):
    """Static shapes without a GPU: the functions themselves, run twice as a capture does, and the shapes seen."""

    def __init__(self):
        super().__init__(on=False)
        self.on, self.shapes = True, {}

    def capture(self, function):
        seen = self.shapes.setdefault(function.__name__, set())

        def repeated(*args):
            seen.add(tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor)))
            function(*map(unwrap, args))
            return function(*map(unwrap, args))

        return repeated


def test_padding_to_static_shapes_changes_nothing(model, monkeypatch):
    requests = [request(s, sampler=n, eta=0.05) for s, n in enumerate(["mdlm", "remdm-cap", "remdm-conf"] * 6)]
    expected = rows(Engine(model, slots=5), requests)
    padded = Padded()
    monkeypatch.setattr("adlm.engine.evaluator.Graphs", lambda on: padded)
    engine = Engine(model, slots=5)
    assert rows(engine, requests) == expected
    masks, batches = ({shapes[i][-1] for shapes in padded.shapes["look"]} for i in (0, 1))
    assert batches <= {1, 2, 4, 8} and masks == {64}
    assert {shapes[0][-1] for shapes in padded.shapes["draw"]} <= {16, 64, 256}


def test_uploads_go_round_a_few_buffers(monkeypatch):
    """As on a GPU, with events that only say what was asked of them: no buffer is written before its last copy."""
    log: list[tuple[str, int]] = []

    class Copied:
        def __init__(self, i):
            self.synchronize = lambda: log.append(("waited for", i))
            self.record = lambda: log.append(("copied", i))

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    send, plain = Uploads(torch.device("cpu")), Uploads(torch.device("cpu"))
    send.copied = [Copied(i) for i in range(AHEAD)]
    for k in range(2 * AHEAD + 3):
        ints, floats = np.arange(2 * (k % 5 + 1)).reshape(2, -1) + k, np.linspace(0, k, 3)
        for ours, theirs, sent in zip(send(ints, floats), plain(ints, floats), (ints, floats)):
            assert torch.equal(ours, theirs) and np.array_equal(ours.numpy(), sent) and ours.dtype == theirs.dtype
        assert log[-2:] == [("waited for", k % AHEAD), ("copied", k % AHEAD)]
    assert len({b.data_ptr() for b in send.buffers}) == AHEAD


def test_the_kernel_draws_what_the_plain_draw_draws():
    """Interpreted on the CPU; tests/plumbing/test_gpu.py runs it for real."""
    pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
    code = "from draw_cases import check_draws; [check_draws(V, 'cpu') for V in (7, 300, 1111)]"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_compilation_serves_all_blocks_and_numbers_of_rows(model, monkeypatch):
    """The second size makes the rows a variable: a third size is not compiled again."""
    network, compiled = Engine(model).evaluator, []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    plain = fold(model)
    network.model = fold(model)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compile_blocks(network.model)
    with torch.no_grad():
        for n in (8, 4, 3, 5):
            tokens = torch.randint(0, V, (n, L))
            torch.testing.assert_close(network.model(tokens).denoiser_BLD, plain(tokens).denoiser_BLD)
    assert len(compiled) == 6  # first block, other blocks and the end of a stack, each for one size and then for any


def test_bfloat16_is_a_copy_and_keeps_norms_and_times_in_float32():
    """Not run here: some CPUs lack the instructions. The GPU test below does."""
    timed = tiny_model(conditioning="sigma").requires_grad_(False)
    low = copy.deepcopy(timed)
    to_bfloat16(low)
    kinds = {name: p.dtype for name, p in low.named_parameters()}
    assert kinds["head.weight"] == kinds["denoiser.blocks.0.qkv.weight"] == torch.bfloat16
    assert {d for n, d in kinds.items() if "norm" in n or "time_embedding" in n or "modulation" in n} == {torch.float32}
    assert all(p.dtype == torch.float32 for p in timed.parameters())


@pytest.mark.parametrize("options", [{}, {"conditioning": "sigma"}, {"anchored": False}, {"bridge": "none"}])
def test_folding_constants_changes_nothing(options):
    """In float64, where rounding, which depends on the CPU in float32, is far below what a wrong fold would do."""
    model, g = tiny_model(dtype=torch.float64, **options).requires_grad_(False), torch.Generator().manual_seed(0)
    tokens, sigma = torch.randint(0, V, (3, L), generator=g), torch.rand(3, generator=g, dtype=torch.float64)
    before = model(tokens, sigma)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    folded = fold(model)
    pad_heads(folded)
    after = folded(tokens, sigma)
    torch.testing.assert_close(after.denoiser_BLD, before.denoiser_BLD)
    torch.testing.assert_close(folded.head(after.denoiser_BLD), model.head(before.denoiser_BLD))
    if model.anchor_head is not None:
        torch.testing.assert_close(folded.anchor_head(after.anchor_BLD), model.anchor_head(before.anchor_BLD))
    assert folded.head.weight.shape[0] % 128 == 0
    to_bfloat16(folded)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters()), "the original is left alone"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(model):
    """float32 eager on the GPU gives the rows of the CPU; compiled bf16 with graphs does not depend on the order."""
    requests = mixed(26)
    expected = rows(Engine(model, slots=16), requests)
    assert (
        rows(Engine(copy.deepcopy(model), slots=16, device="cuda", precision="fp32", compile="false"), requests)
        == expected
    )
    fast = Engine(copy.deepcopy(model), slots=16, device="cuda")
    assert all(M not in row for row in rows(fast, requests))
    assert rows(fast, requests) == rows(fast, requests[::-1])[::-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_the_gpu_do_not_wait_for_it(model):
    """Once shapes are captured, a step that ends no row reads nothing back."""
    engine = Engine(copy.deepcopy(model), slots=4, device="cuda")
    engine.evaluator.warm_up()
    for seed in range(4):
        engine.submit(request(seed, sampler="remdm-cap", steps=500, eta=0.05, top_p=0.9))
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(slot is not None for slot in engine.slots)

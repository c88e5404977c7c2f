"""Other forms of a network compute the same: folded, packed, compiled, recomputed, and at some positions only."""

import functools
import mmap
from pathlib import Path

import pytest
import torch
import torch._dynamo
from dense import plain_block
from marks import slow
from tiny import MODERN, random_tokens, tiny_model
from variants import VARIANTS

from adlm.engine.prepare import PackedLinear, can_pack, compile_blocks, fold, prepare
from adlm.models import layers, transformer
from adlm.models.layers import Norm, normalise
from adlm.models.transformer import Context, ResidualStream, draw_keys
from adlm.objectives import Sequences, loss, make_objective
from adlm.objectives.base import CorruptedBatch, Term, read_positions, rounded, sum_terms
from adlm.schema import NoiseConfig, ObjectiveConfig


@pytest.mark.parametrize("variant", ["published", "modern", "time"])
@pytest.mark.parametrize("rows", [2, 12], ids=["few positions", "many positions"])
def test_vectors_folded_into_weights_change_neither_values_nor_gradients(variant, rows):
    """Both sides of the choice in `folds`; a time-conditioned block never folds."""
    model = tiny_model(dtype=torch.float64, **VARIANTS[variant])
    block, stack = model.denoiser.blocks[0], model.denoiser
    torch.manual_seed(0)
    for parameter in block.parameters():  # nothing at its special starting value
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(rows, 12, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    c = stack.conditioning(x, torch.rand(rows, dtype=torch.float64) * 3)
    cos, sin = stack.rotary.tables(12, None)
    target = torch.randn_like(x)
    leaves = [x, *block.parameters()]
    results = []
    ours = lambda: block(ResidualStream(x), Context(cos, sin, c)).total()  # noqa: E731
    for function in (ours, lambda: plain_block(block, x, c, cos, sin)):
        y = function()
        gradients = torch.autograd.grad((y * target).sum(), leaves, retain_graph=True)
        results.append((y, *gradients))
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"conditioning": "sigma"}, {"anchored": False}, MODERN])
def test_hidden_states_of_some_positions_are_those_of_all(options):
    model = tiny_model(dtype=torch.float64, **options).requires_grad_(False)
    tokens, sigma = random_tokens(3, 12, 11), torch.tensor([0.1, 0.9, 3.0]).double()
    sigma = sigma if model.config.is_time_conditioned else None
    every = model(tokens, sigma)
    flat, each = torch.tensor([35, 0, 13, 7, 8]), torch.tensor([[3, 0], [11, 11], [5, 6]])
    some = model(tokens, sigma, at_N=flat)
    torch.testing.assert_close(some.denoiser_BLD, every.denoiser_BLD.flatten(0, 1)[flat].unsqueeze(0))
    two = model(tokens, sigma, at_BQ=each).denoiser_BLD
    torch.testing.assert_close(two, every.denoiser_BLD[torch.arange(3)[:, None], each])
    if every.anchor_BLD is not None:
        assert torch.equal(some.anchor_BLD, every.anchor_BLD)


@pytest.mark.parametrize("options", [{}, {"conditioning": "sigma"}, MODERN])
def test_a_loss_that_reads_some_positions_has_the_gradients_of_one_that_runs_all(options):
    model = tiny_model(dtype=torch.float64, **options)
    anelbo = make_objective(ObjectiveConfig(name="anelbo", gamma=0.3), NoiseConfig(), model.mask_id, 1)
    task = anelbo.corrupt(Sequences(random_tokens(4, 12, 10), torch.arange(4), 4), 0, 0.5)
    hidden = model(task.tokens_BL, task.sigma_B)
    whole = sum_terms(model, hidden, task)
    assert read_positions(task) is not None
    results = []
    for found in (loss(model, task), loss(model, rounded(task)), whole):
        results.append([found.total, *torch.autograd.grad(found.total, model.parameters(), materialize_grads=True)])
    for some, round_number, every in zip(*results):
        torch.testing.assert_close(some, every, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(round_number, every, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scored", [0, 1, 31, 32, 33, 100, 230])
def test_a_round_number_of_positions_is_read_each_once_and_those_that_are_scored_first(scored):
    positions_N = torch.randperm(256)[:scored].sort().values
    term = Term("denoiser", positions_N, torch.zeros(scored, dtype=torch.long), torch.ones(scored))
    batch = CorruptedBatch(torch.zeros(4, 64, dtype=torch.long), None, 256, {"nelbo": term})
    read_M = read_positions(rounded(batch))
    assert len(read_M) % 32 == 0 and scored <= len(read_M) < scored + 32
    assert torch.equal(read_M[:scored], positions_N) and len(set(read_M.tolist())) == len(read_M)
    whole = term._replace(positions_N=torch.arange(240))
    assert read_positions(rounded(batch._replace(terms={"nelbo": whole}))) is None


def test_the_short_gelu_is_torch_s():
    x = torch.linspace(-40, 40, 4001, dtype=torch.float64, requires_grad=True)
    results = []
    for function in (layers.gelu, functools.partial(torch.nn.functional.gelu, approximate="tanh")):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    half = x.detach().bfloat16()
    assert layers.gelu(half).dtype == torch.bfloat16
    torch.testing.assert_close(layers.gelu(half), torch.nn.functional.gelu(half, approximate="tanh"))


def test_hashed_dropout():
    """Drops a share p, keeps the mean, has an independent mask for each key, and the gradient of its own mask."""
    x = torch.ones(400, 500, requires_grad=True)
    keys = [key for pair in draw_keys(1, x.device) for key in pair]
    kept = [layers.dropout(x, 0.1, key) for key in keys]
    assert torch.equal(kept[0], layers.dropout(x, 0.1, keys[0]))
    masks = [y > 0 for y in kept]
    for mask in masks:
        assert abs(mask.float().mean() - 0.9) < 0.003  # 4.5 standard errors
        assert all(abs(mask.float().mean(d) - 0.9).max() < 0.08 for d in (0, 1))
    assert abs((masks[0] & masks[1]).float().mean() - 0.81) < 0.004
    assert abs((masks[0][:, 1:] & masks[0][:, :-1]).float().mean() - 0.81) < 0.004
    torch.testing.assert_close(kept[0], masks[0] / 0.9)
    (gradient,) = torch.autograd.grad(kept[0].sum(), x)
    torch.testing.assert_close(gradient, masks[0] / 0.9)


def test_compiled_blocks_drop_by_keys(monkeypatch):
    """Every branch has a key of its own; without keys (not compiled, or not on a GPU) torch's dropout is used."""
    model = tiny_model(dropout=0.3).train()
    stack, drawn = model.denoiser, []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(transformer, "dropout", lambda x, p, key: (drawn.append((p, int(key))), x)[1])
    x = torch.randn(2, 12, model.config.hidden_size)
    stack(x)
    assert not drawn
    keys = [(torch.tensor(2 * i), torch.tensor(2 * i + 1)) for i in range(len(stack.blocks))]
    monkeypatch.setattr(stack, "dropout_keys", lambda device: keys)
    stack(x)
    assert drawn == [(0.3, key) for key in range(2 * len(stack.blocks))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_a_gradient_when_traced(dtype):
    """Some versions of the tracer drop the gradient of a function that ends in a conversion to the type it has."""
    grad = torch.randn(5, 8)
    traced = torch.compile(lambda x: normalise(x, "rmsnorm", dtype), backend="eager")
    x = torch.randn(5, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(normalise(x, "rmsnorm", dtype), x, grad.to(dtype))
    (got,) = torch.autograd.grad(traced(x), x, grad.to(dtype))
    assert expected.abs().max() > 0
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_gradient_of_the_norm(kind):
    norm = Norm(6, kind).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: normalise(x, kind, torch.float64), (x,))
    reference = torch.nn.functional.layer_norm if kind == "layernorm" else torch.nn.functional.rms_norm
    expected = reference(x, (6,), eps=1e-5 if kind == "layernorm" else 1e-6)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_the_bridge_follows_autocast():
    model = tiny_model(scale=0.1)
    # this library's bf16 products crash on some CPUs
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        rounded, _ = model.bridge.product(model.anchor_head)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), model.bridge.product(model.anchor_head)[0], rtol=2e-2, atol=2e-3)


def test_checkpointed_activations_give_the_same_gradients():
    tokens = random_tokens(2, 12, 11)
    gradients = []
    for recompute in (False, True):
        model = tiny_model(dtype=torch.float64).train()
        for stack in (model.anchor, model.denoiser):
            stack.checkpoint_activations = recompute
        model(tokens).denoiser_BLD.square().sum().backward()
        gradients.append(model.anchor.blocks[0].qkv.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("variant", [slow("published"), slow("modern"), slow("time")])
def test_recomputed_and_compiled_models_have_the_same_gradients(variant, monkeypatch):
    options = VARIANTS[variant] | {"n_blocks": 3, "n_denoiser_blocks": 3}
    model = tiny_model(dtype=torch.float64, **options).train()
    objective = make_objective(ObjectiveConfig(name="anelbo", gamma=0.3), NoiseConfig(), model.mask_id, 1)
    task = objective.corrupt(Sequences(random_tokens(4, 12, 10), torch.arange(4), 4), 0, 0.5)
    graphs = []

    def gradients(model):
        total = loss(model, task).total
        return [total, *torch.autograd.grad(total, model.parameters(), materialize_grads=True)]

    def backend(graph, example_inputs):  # the tracer alone; the code it would write takes a minute on a CPU
        graphs.append(graph)
        return graph.forward

    def recomputing(model):
        for stack in (model.anchor, model.denoiser):
            stack.checkpoint_activations = True
        return model

    expected, results = gradients(model), {"recomputed": gradients(recomputing(model))}
    for recompute in (False, True):
        model = tiny_model(dtype=torch.float64, **options).train()
        torch._dynamo.reset()
        graphs.clear()
        for block in [*model.anchor.blocks, *model.denoiser.blocks]:
            block.compile(fullgraph=True, backend=backend)
        results[f"compiled blocks, {recompute=}"] = gradients(recomputing(model) if recompute else model)
        # the first block of a stack, the others, and the last one, which is finished at some positions only
        assert len(graphs) == 3
        torch._dynamo.reset()
        model = tiny_model(dtype=torch.float64, **options).train()
        model.compile(fullgraph=True, backend="aot_eager")
        results[f"compiled model, {recompute=}"] = gradients(recomputing(model) if recompute else model)
    for name, found in results.items():
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("variant", [slow("published"), slow("modern"), slow("time")])
def test_the_compiled_inference_form_computes_the_same(variant, monkeypatch):
    model = tiny_model(**VARIANTS[variant]).requires_grad_(False)
    plain, compiled = fold(model), fold(model)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compile_blocks(compiled)
    with torch.no_grad():
        for n in (8, 4, 3, 5):
            tokens, at, sigma = random_tokens(n, 12, 11), torch.arange(2 * n).view(n, 2) % 12, torch.rand(n)
            for places in ({"at_BQ": at}, {"at_N": torch.arange(0, 12 * n, 5)}, {}):
                got, right = (m(tokens, sigma, **places).denoiser_BLD for m in (compiled, plain))
                torch.testing.assert_close(got, right)
                torch.testing.assert_close(right, model(tokens, sigma, **places).denoiser_BLD, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN for x86")
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_that_are_laid_out_for_a_cpu_compute_the_same(variant):
    """In float32, of blocks and heads, all of them; the model itself keeps its weights."""
    model = tiny_model(**VARIANTS[variant])
    packed, _ = prepare(model, torch.device("cpu"), "auto")
    left = [name for name, m in packed.named_modules() if isinstance(m, torch.nn.Linear)]
    assert all("modulation" in name or "time_embedding" in name for name in left)
    assert isinstance(packed.head, PackedLinear) and isinstance(model.head, torch.nn.Linear)
    sigma = torch.tensor([0.1, 0.7, 3.0])
    for length in (1, 12):
        tokens = random_tokens(3, length, 11)
        with torch.inference_mode():
            torch.testing.assert_close(packed.logits(tokens, sigma), model.logits(tokens, sigma), rtol=1e-4, atol=1e-5)
    double, _ = prepare(tiny_model(dtype=torch.float64, **VARIANTS[variant]), torch.device("cpu"), "auto")
    assert isinstance(double.head, torch.nn.Linear), "other precisions stay as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cache_on_a_cpu_starts_as_zeros_that_can_be_written(dtype):
    zeros = layers.untouched_zeros((2, 3, 4), dtype, torch.device("cpu"))
    assert zeros.dtype == dtype and torch.equal(zeros, torch.zeros(2, 3, 4, dtype=dtype))
    zeros[1, 2, 3] = 1.5
    assert zeros.sum() == 1.5


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of this process from Linux")
def test_a_cache_on_a_cpu_costs_what_it_holds():
    """Also where the system gives large allocations pages of 2 MB: a few tokens of many long sequences are little."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    cache = layers.untouched_zeros((256, 4096, 64), torch.float32, torch.device("cpu"))  # 256 MB
    cache[:, :16] = 1.0
    assert resident() - before < 16 * 2**20

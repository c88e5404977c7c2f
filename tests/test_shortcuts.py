"""Shortcuts past blocks: the value residual. The rest of the model does not notice."""

import functools

import pytest
import torch
import torch._dynamo
from dense import dense_logits, plain_logits
from tiny import MODERN, random_tokens, tiny_model

from adlm.data.tokenizers import load_tokenizer
from adlm.engine.prepare import compile_blocks, fold, to_bfloat16
from adlm.objectives import Rows, loss, make_objective
from adlm.schema import Config, NoiseConfig, ObjectiveConfig, OptimConfig
from adlm.training.export import describe, load_folder, save_folder
from adlm.training.optim import Muon, build_optimizers

TWINS = (plain_logits, dense_logits)
SHORTCUTS = {"values": {"value_residual": True}}
SHAPES = {
    "none": {"bridge": "none"},
    "residual": {"bridge": "residual"},
    "collapsed": {"bridge": "collapsed"},
    "one-stage": {"anchored": False, "n_blocks": 5},
}
BLOCKS = {"modern": MODERN, "published": {}, "time": {"time_conditioning": True}}
DEEP = {"n_blocks": 3, "n_denoiser_blocks": 4}
TOKENS, SIGMA = random_tokens(3, 12, 11), torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64)


def shortcut_model(shortcuts, shape="none", block="modern", dtype=torch.float64, **more):
    return tiny_model(dtype=dtype, **(DEEP | BLOCKS[block] | SHAPES[shape] | SHORTCUTS[shortcuts] | more))


every_shortcut = pytest.mark.parametrize("shortcuts", SHORTCUTS)
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shortcut
@every_shape
@pytest.mark.parametrize("block", BLOCKS)
def test_the_model_is_its_blocks_written_out(shortcuts, shape, block):
    """Values, and gradients of every parameter; the dense twin of the benchmarks too."""
    model = shortcut_model(shortcuts, shape, block)
    results = []
    for function in (lambda: model.logits(TOKENS, SIGMA), *(lambda f=f: f(model, TOKENS, SIGMA)[0] for f in TWINS)):
        y = function()
        results.append([y, *torch.autograd.grad(y.sin().sum(), model.parameters(), materialize_grads=True)])
    for ours, *twins in zip(*results, strict=True):
        for twin in twins:
            torch.testing.assert_close(ours, twin, rtol=1e-8, atol=1e-8)
    if model.anchor is not None:
        torch.testing.assert_close(model.anchor_logits(TOKENS, SIGMA), plain_logits(model, TOKENS, SIGMA)[1])


@every_shape
def test_the_first_block_of_a_stream_gives_its_values_to_the_others(shape):
    model = shortcut_model("values", shape)
    mixed = {name for name, _ in model.named_parameters() if name.endswith("value_mix")}
    blocks = {name for name, module in model.named_modules() if hasattr(module, "value_mix")}
    first = {"one-stage": {"denoiser.blocks.0"}, "collapsed": {"anchor.blocks.0", "denoiser.blocks.0"}}
    assert {name.removesuffix(".value_mix") for name in mixed} == blocks - first.get(shape, {"anchor.blocks.0"})


def test_shortcuts_are_off_unless_asked_for():
    names = dict(tiny_model(**MODERN).named_parameters())
    assert not [name for name in names if "value_mix" in name]


@every_shortcut
@every_shape
def test_positions_that_are_read_are_those_of_all(shortcuts, shape):
    model = shortcut_model(shortcuts, shape).requires_grad_(False)
    every = model(TOKENS).denoiser_BLD
    flat, each = torch.tensor([35, 0, 13, 7, 8]), torch.tensor([[3, 0], [11, 11], [5, 6]])
    torch.testing.assert_close(model(TOKENS, at=flat).denoiser_BLD[0], every.flatten(0, 1)[flat])
    torch.testing.assert_close(model(TOKENS, at=each).denoiser_BLD, every[torch.arange(3)[:, None], each])


@every_shortcut
@every_shape
def test_cache_equals_reading_everything_again(shortcuts, shape):
    model = shortcut_model(shortcuts, shape, causal=True)
    cache = model.make_cache(3, 12)
    parts = [model(part, cache=cache).denoiser_BLD for part in TOKENS.split([5, 1, 1, 4, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(TOKENS).denoiser_BLD, rtol=1e-9, atol=1e-9)


def gradients(model, task):
    total = loss(model, task).total
    return [total, *torch.autograd.grad(total, model.parameters(), materialize_grads=True)]


def drawn(model):
    anelbo = make_objective(ObjectiveConfig(name="anelbo", gamma=0.3), NoiseConfig(), model.mask_id, 1)
    return anelbo.draw(Rows(random_tokens(4, 12, 10), torch.arange(4), 4), 0, 0.5)


@every_shortcut
@pytest.mark.parametrize("shape", ["none", "collapsed"])
def test_recomputed_and_compiled_models_have_the_same_gradients(shortcuts, shape, monkeypatch):
    model = shortcut_model(shortcuts, shape).train()
    expected, task = gradients(model, drawn(model)), drawn(model)
    stacks = (model.anchor, model.denoiser)
    results = {}
    for stack in stacks:
        stack.checkpoint_activations = True
    results["recomputed"] = gradients(model, task)
    for stack in stacks:
        stack.checkpoint_activations = False
    # the tracer and its gradients; the code it would write takes a minute on a CPU
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    for block in [block for stack in stacks for block in stack.blocks]:
        block.compile(fullgraph=True)
    results["compiled blocks"] = gradients(model, task)
    model = shortcut_model(shortcuts, shape).train()
    model.compile(fullgraph=True)
    results["compiled model"] = gradients(model, task)
    for name, found in results.items():
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@every_shortcut
@every_shape
@pytest.mark.parametrize("block", BLOCKS)
def test_the_engine_s_copy_computes_the_same(shortcuts, shape, block):
    model = shortcut_model(shortcuts, shape, block, dtype=torch.float32).requires_grad_(False)
    folded = fold(model)
    torch.testing.assert_close(folded.logits(TOKENS, SIGMA.float()), model.logits(TOKENS, SIGMA.float()))
    to_bfloat16(folded)
    kinds = {p.dtype for name, p in folded.named_parameters() if name.endswith("value_mix")}
    assert kinds == {torch.float32}


@every_shortcut
def test_the_stream_keeps_its_precision(shortcuts):
    """Learned factors are float32 and must not widen what they multiply."""
    model = shortcut_model(shortcuts, dtype=torch.float32).requires_grad_(False)
    model.residual_dtype = torch.bfloat16
    seen = []
    for stack in (model.anchor, model.denoiser):
        stack.blocks[-1].register_forward_hook(lambda block, inputs, out: seen.append(out[0].dtype))
        stack.blocks[-1].attn_out.register_forward_hook(lambda linear, inputs, out: seen.append(inputs[0].dtype))
    # this library's bf16 products crash on some CPUs
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        rounded = model(TOKENS).denoiser_BLD
    assert seen == [torch.bfloat16] * 4 and rounded.dtype == torch.bfloat16


@every_shortcut
def test_muon_leaves_the_factors_to_adamw(shortcuts):
    model = shortcut_model(shortcuts)
    adamw, muon = build_optimizers(OptimConfig(name="muon"), model)
    assert isinstance(muon, Muon)
    owned = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert all(id(p) in owned for name, p in model.named_parameters() if name.endswith("value_mix"))


@every_shortcut
def test_the_engine_s_compiled_copy(shortcuts, monkeypatch):
    model = shortcut_model(shortcuts, dtype=torch.float32).requires_grad_(False)
    plain, compiled = fold(model), fold(model)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compile_blocks(compiled)
    with torch.no_grad():
        for n in (8, 4, 3, 5):
            tokens, at = random_tokens(n, 12, 11), torch.arange(2 * n).view(n, 2) % 12
            torch.testing.assert_close(compiled(tokens, at=at).denoiser_BLD, plain(tokens, at=at).denoiser_BLD)


@every_shortcut
@every_shape
def test_an_exported_folder_has_them(shortcuts, shape, tmp_path):
    tokenizer = load_tokenizer("text8")
    options = {"vocab_size": tokenizer.vocab_size, "mask_id": tokenizer.mask_id, "dtype": torch.float32}
    model = shortcut_model(shortcuts, shape, **options).requires_grad_(False)
    save_folder(tmp_path / "x", model.state_dict(), tokenizer, describe(Config(model=model.config), tokenizer))
    loaded = load_folder(tmp_path / "x").model
    assert loaded.config == model.config
    torch.testing.assert_close(loaded.logits(TOKENS), model.logits(TOKENS))

"""Shortcuts past blocks: the value residual and skips. The rest of the model does not notice."""

import functools
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from dense import dense_logits, plain_logits
from tiny import MODERN, TINY, random_tokens, tiny_model

from adlm.data.tokenizers import load_tokenizer
from adlm.engine.prepare import compile_blocks, fold, to_bfloat16
from adlm.io.export import describe, load_folder, save_folder
from adlm.models import build_model
from adlm.objectives import Sequences, loss, make_objective
from adlm.schema import Config, NoiseConfig, ObjectiveConfig, OptimConfig
from adlm.training.optim import Muon, build_optimizers

TWINS = (plain_logits, dense_logits)
SHORTCUTS = {
    "values": {"value_residual": True},
    "skips": {"skips": True},
    "both": {"value_residual": True, "skips": True},
}
FACTORS = ("value_mix", "skip")
SHAPES = {
    "none": {"bridge": "none"},
    "residual": {"bridge": "residual"},
    "linear": {"bridge": "linear"},
    "one-stage": {"anchored": False, "n_blocks": 5},
}
BLOCKS = {"modern": MODERN, "published": {}, "time": {"time_conditioning": True}}
DEEP = {"n_blocks": 3, "n_denoiser_blocks": 4}
TOKENS, SIGMA = random_tokens(3, 12, 11), torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64)


def shortcut_model(shortcuts, shape="none", block="modern", dtype=torch.float64, **more):
    return tiny_model(dtype=dtype, **(DEEP | BLOCKS[block] | SHAPES[shape] | SHORTCUTS[shortcuts] | more))


def gradients(model, task):
    total = loss(model, task).total
    return [total, *torch.autograd.grad(total, model.parameters(), materialize_grads=True)]


def drawn(model):
    cfg = ObjectiveConfig(name="anelbo" if model.config.anchored else "nelbo", gamma=0.3)
    rows = Sequences(random_tokens(4, 12, 10), torch.arange(4), 4)
    return make_objective(cfg, NoiseConfig(), model.mask_id, 1).corrupt(rows, 0, 0.5)


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
    first = {"one-stage": {"denoiser.blocks.0"}, "linear": {"anchor.blocks.0", "denoiser.blocks.0"}}
    assert {name.removesuffix(".value_mix") for name in mixed} == blocks - first.get(shape, {"anchor.blocks.0"})


@pytest.mark.parametrize(
    ("shape", "readers"),
    {
        "none": {"denoiser.blocks.3", "denoiser.blocks.2", "denoiser.blocks.1"},  # 0 1 2 | 3 4 5 6: 6-0, 5-1, 4-2
        "residual": {"denoiser.blocks.3", "denoiser.blocks.2", "denoiser.blocks.1"},
        "linear": {"anchor.blocks.2", "denoiser.blocks.3"},  # 0 1 2 | 0 1 2 3: 2-0, 3-0, and 2-1 are neighbours
        "one-stage": {"denoiser.blocks.4", "denoiser.blocks.3"},
    }.items(),
)
def test_later_blocks_read_the_stream_of_earlier_ones(shape, readers):
    model = shortcut_model("skips", shape)
    assert {name.removesuffix(".skip") for name, _ in model.named_parameters() if name.endswith(".skip")} == readers


def test_skips_within_the_anchor_network_and_across():
    """0 1 2 3 4 | 5: the anchor network reads its own stream, and leaves the first for the denoiser."""
    model = shortcut_model("both", n_blocks=5, n_denoiser_blocks=1)
    readers = {name for name, _ in model.named_parameters() if name.endswith(".skip")}
    assert readers == {"anchor.blocks.4.skip", "denoiser.blocks.0.skip"}
    torch.testing.assert_close(model.logits(TOKENS), plain_logits(model, TOKENS)[0], rtol=1e-9, atol=1e-9)


@every_shape
def test_the_start_is_that_of_the_plain_model_with_mixed_values(shape):
    cfg = replace(TINY, **DEEP | MODERN | SHAPES[shape], init="normal")
    starts = []
    for options in ({}, SHORTCUTS["skips"], SHORTCUTS["both"]):
        torch.manual_seed(0)
        starts.append(build_model(replace(cfg, **options), 11, 10))
    plain, skips, both = starts
    assert all(torch.equal(p, skips.state_dict()[name]) for name, p in plain.state_dict().items())
    assert torch.equal(plain(TOKENS).denoiser_BLD, skips(TOKENS).denoiser_BLD)
    factors = {name: p.tolist() for name, p in both.named_parameters() if name.endswith(FACTORS)}
    assert all(value == ([0.0] if name.endswith("skip") else [0.5, 0.5]) for name, value in factors.items())


@every_shape
def test_the_factors_learn_from_the_start(shape):
    """Outputs and heads start at zero, skips too: none of them may wait for another for ever."""
    torch.manual_seed(0)
    model = build_model(replace(TINY, **DEEP | MODERN | SHAPES[shape] | SHORTCUTS["both"], init="normal"), 11, 10)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(FACTORS)}
    optimizer, task = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), drawn(model)
    for _ in range(6):
        optimizer.zero_grad()
        loss(model, task).total.backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if name in before and (p == before[name]).any()]


def test_skips_that_would_pass_over_no_block_are_refused():
    with pytest.raises(ValueError, match=r"model\.skips=true needs 3 blocks"):
        shortcut_model("skips", "linear", n_blocks=2, n_denoiser_blocks=2)
    shortcut_model("skips", "none", n_blocks=2, n_denoiser_blocks=1)


def test_shortcuts_are_off_unless_asked_for():
    names = dict(tiny_model(**MODERN).named_parameters())
    assert not [name for name in names if name.endswith(FACTORS)]


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


@every_shortcut
@pytest.mark.parametrize("shape", ["none", "linear"])
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
    got, right = (m.logits(TOKENS, SIGMA.float()) for m in (folded, model))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)  # float32, in another order
    to_bfloat16(folded)
    kinds = {p.dtype for name, p in folded.named_parameters() if name.endswith(FACTORS)}
    assert kinds == {torch.float32}


@every_shortcut
def test_streams_and_values_keep_their_precision(shortcuts, monkeypatch):
    """Learned factors are float32 and must not widen what they multiply."""
    model, seen = shortcut_model(shortcuts, dtype=torch.float32).requires_grad_(False), []
    model.residual_dtype = torch.bfloat16
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):  # autocast would narrow again what comes too wide
        seen.append(v.dtype)
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for block in (*model.anchor.blocks, *model.denoiser.blocks):
        block.register_forward_hook(lambda block, inputs, out: seen.append(out[0].dtype))
    # this library's bf16 products crash on some CPUs
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        model(TOKENS)
    assert seen == [torch.bfloat16] * 14


@every_shortcut
def test_muon_leaves_the_factors_to_adamw(shortcuts):
    model = shortcut_model(shortcuts)
    adamw, muon = build_optimizers(OptimConfig(name="muon"), model)
    assert isinstance(muon, Muon)
    owned = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert all(id(p) in owned for name, p in model.named_parameters() if name.endswith(FACTORS))


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

"""Laws of the networks: linear bridge = dense bridge, the past never sees the future, sizes, caches, bad input."""

import functools
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from dense import dense_log_probs, dense_logits, plain_block, plain_logits
from marks import slow
from tiny import MODERN, TINY, random_tokens, tiny_model

from adlm import config, tables
from adlm.config.keys import group_choices
from adlm.engine import Engine, Request
from adlm.engine.prepare import PackedLinear, can_pack, compile_blocks, fold, prepare
from adlm.models import build_model, layers, transformer
from adlm.models.bridge import Bridge
from adlm.models.layers import Norm, normalise
from adlm.models.network import count_flops
from adlm.models.transformer import Context, ResidualStream, draw_keys
from adlm.objectives import Sequences, loss, make_objective
from adlm.objectives.base import CorruptedBatch, Term, read_positions, rounded, sum_terms
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig, SamplingConfig

BRIDGES = ["linear", "none"]
VARIANTS = {
    "published": {},
    "modern": MODERN,
    "time": {"conditioning": "sigma"},
    "one-stage": {"anchored": False},
    "causal": {"causal": True, "conditioning": "none"},
}


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_heads_equal_the_dense_network(variant, bridge):
    model = tiny_model(dtype=torch.float64, **(VARIANTS[variant] | {"bridge": bridge}))
    tokens, sigma = random_tokens(3, 12, 11), torch.tensor([0.1, 0.7, 3.0])
    for reference in (plain_logits, dense_logits):
        logits, anchor_logits = reference(model, tokens, sigma)
        torch.testing.assert_close(model.logits(tokens, sigma), logits, rtol=1e-9, atol=1e-9)
        if anchor_logits is not None:
            torch.testing.assert_close(model.anchor_logits(tokens, sigma), anchor_logits, rtol=1e-9, atol=1e-9)
    if not model.config.causal:
        log_probs = dense_log_probs(logits, tokens, model.mask_id)
        torch.testing.assert_close(model.log_probs(tokens, sigma), log_probs, rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("bias", [True, False])
def test_the_aligned_product_of_the_bridge_is_the_plain_one(bias):
    model = tiny_model(dtype=torch.float64, bias=bias)
    inputs = [p for p in (*model.bridge.parameters(), *model.anchor_head.parameters())]
    results = []
    for found in (
        model.bridge.product(model.anchor_head),
        model.bridge.aligned_product(model.anchor_head, torch.float64),
    ):
        parts = [x for x in found if x is not None]
        results.append([*parts, *torch.autograd.grad(sum(x.sin().sum() for x in parts), inputs)])
    for plain, aligned in zip(*results, strict=True):
        torch.testing.assert_close(aligned, plain)


def test_the_bridge_follows_autocast():
    model = tiny_model(scale=0.1)
    # this library's bf16 products crash on some CPUs
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        rounded, _ = model.bridge.product(model.anchor_head)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), model.bridge.product(model.anchor_head)[0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("bridge", BRIDGES)
def test_freezing_the_bridge_changes_nothing(bridge):
    model = tiny_model(dtype=torch.float64, bridge=bridge)
    tokens = random_tokens(2, 12, 11)
    before = model.logits(tokens)
    names = list(model.state_dict())
    model.freeze_bridge()
    torch.testing.assert_close(model.logits(tokens), before, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == names


def test_parameter_counts_with_the_gpt2_vocabulary():
    sizes = {
        293_189_028: ModelConfig(),
        169_627_218: ModelConfig(anchored=False),
        162_246_482: ModelConfig(anchored=False, causal=True, conditioning="none"),
    }
    for expected, cfg in sizes.items():
        with torch.device("meta"):
            model = build_model(cfg, 50258, 50257)
        assert sum(p.numel() for p in model.parameters()) == expected


def test_published_start_all_logits_zero_and_blocks_the_identity():
    torch.manual_seed(0)
    model = build_model(TINY, 11, 10).eval()
    tokens = random_tokens(2, 12, 11)
    assert model.logits(tokens).abs().max() == 0
    assert model.anchor_logits(tokens).abs().max() == 0
    x = torch.randn(2, 12, 16)
    assert torch.equal(model.anchor(x).stream_BLD, x)


class GatedBridge(Bridge):
    """A bridge as another package may bring it: the residual stream, and the anchor states through a learned gate."""

    def __init__(self, cfg, vocab_size):
        super().__init__(cfg, vocab_size)
        self.gate = torch.nn.Linear(cfg.hidden_size, cfg.hidden_size)

    def initialise(self, cfg):
        torch.nn.init.zeros_(self.gate.weight)
        torch.nn.init.zeros_(self.gate.bias)

    def forward(self, stream_BLD, anchor_BLD, anchor_head):
        return stream_BLD + self.gate(anchor_BLD).to(stream_BLD.dtype)

    @staticmethod
    def flops(cfg):
        return 2 * cfg.hidden_size**2


def test_a_bridge_of_another_package_trains_and_generates(monkeypatch):
    """As an entry point of the group adlm.bridges puts it into the table."""
    monkeypatch.setitem(tables.BRIDGES.targets, "gated", f"{__name__}:GatedBridge")
    options = [
        "algo=adlm",
        "recipe=fast",
        "model=nano",
        "model.hidden_size=16",
        "model.length=12",
        "model.bridge=gated",
    ]
    cfg = config.load(options)
    torch.manual_seed(0)
    model = build_model(cfg.model, 11, 10)
    assert isinstance(model.bridge, GatedBridge) and model.bridge.gate.weight.abs().max() == 0
    plain = build_model(replace(cfg.model, bridge="none"), 11, 10)
    extra = count_flops(cfg.model, 11, 12).forward_per_token - count_flops(plain.config, 11, 12).forward_per_token
    assert extra == 2 * 16 * 16
    assert set(model.state_dict()) - set(plain.state_dict()) == {"bridge.gate.weight", "bridge.gate.bias"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objective = make_objective(cfg.objective, cfg.noise, 10, seed=0)
    for step in range(3):
        optimizer.zero_grad()
        loss(
            model, objective.corrupt(Sequences(random_tokens(8, 12, 10), torch.arange(8), 8), step, 1.0)
        ).total.backward()
        optimizer.step()
    assert model.bridge.gate.weight.abs().max() > 0
    for precision in ("fp32", "bf16"):
        # this library's bf16 products crash on some CPUs
        with torch.backends.mkldnn.flags(enabled=False):
            (result,) = Engine(model, precision=precision).run([Request([10] * 12, SamplingConfig(steps=4))])
        assert result.finished and 10 not in result.tokens
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(ValueError, match="GatedBridge has no reference implementation"):
        dense_logits(model, random_tokens(2, 12, 11))


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("bridge", BRIDGES)
def test_causal_models_never_see_the_future(anchored, bridge):
    """The prediction made at l depends on tokens <= l only: gradient of the hidden state at l, by input position."""
    model = tiny_model(dtype=torch.float64, causal=True, conditioning="none", anchored=anchored, bridge=bridge)
    tokens = random_tokens(1, 12, 11)
    embedded = model.embedding.detach()[tokens].requires_grad_()
    x = embedded
    if model.anchor is not None:
        x = model.bridge(*model.anchor(x), model.anchor_head)
    hidden = model.denoiser(x).normed_BLD
    for l in range(12):
        (grad,) = torch.autograd.grad(hidden[0, l].sum(), embedded, retain_graph=True)
        assert grad[0, l + 1 :].abs().sum() == 0
        assert grad[0, : l + 1].abs().sum(-1).min() > 0, "and it does depend on all of the past"


def test_bidirectional_models_see_everything():
    model = tiny_model(dtype=torch.float64)
    tokens = random_tokens(1, 12, 11)
    changed = tokens.clone()
    changed[0, 11] = (changed[0, 11] + 1) % 11
    assert (model.logits(tokens) - model.logits(changed)).abs().amax(-1).min() > 0


@pytest.mark.parametrize("anchored", [False, True])
def test_cache_equals_reading_everything_again(anchored):
    model = tiny_model(dtype=torch.float64, causal=True, conditioning="none", anchored=anchored)
    tokens = random_tokens(3, 12, 11)
    whole = model(tokens).denoiser_BLD
    cache = model.make_cache(3, 12)
    parts = [model(part, cache=cache).denoiser_BLD for part in tokens.split([5, 1, 1, 4, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_cache_rows_may_stand_at_different_positions():
    model = tiny_model(dtype=torch.float64, causal=True, conditioning="none")
    tokens = random_tokens(2, 12, 11)
    whole = model(tokens).denoiser_BLD
    cache = model.make_cache(2, 12)
    model(tokens[:, :6], cache=cache)
    cache.seen_B[:] = torch.tensor([6, 3])  # row 1 is set back: its later keys are invisible until overwritten
    step = torch.stack([tokens[0, 6:8], tokens[1, 3:5]])
    hidden = model(step, cache=cache).denoiser_BLD
    torch.testing.assert_close(hidden[0], whole[0, 6:8], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hidden[1], whole[1, 3:5], rtol=1e-9, atol=1e-9)


def test_unconditioned_model_computes_one_row_of_modulations():
    model = tiny_model()
    rows = []
    model.anchor.blocks[0].modulation.register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    model(random_tokens(5, 12, 11))
    assert rows == [1]


def test_time_conditioning_changes_the_prediction_and_needs_sigma():
    model = tiny_model(conditioning="sigma")
    tokens = random_tokens(2, 12, 11)
    a, b = model.logits(tokens, torch.tensor([0.1, 0.1])), model.logits(tokens, torch.tensor([0.1, 2.0]))
    assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])
    with pytest.raises(ValueError, match="time-conditioned"):
        model(tokens)


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
    zeros = transformer.untouched_zeros((2, 3, 4), dtype, torch.device("cpu"))
    assert zeros.dtype == dtype and torch.equal(zeros, torch.zeros(2, 3, 4, dtype=dtype))
    zeros[1, 2, 3] = 1.5
    assert zeros.sum() == 1.5


def test_the_stream_keeps_its_precision():
    model, seen = tiny_model().requires_grad_(False), []
    model.residual_dtype = torch.bfloat16
    for block in (*model.anchor.blocks, *model.denoiser.blocks):
        block.register_forward_hook(lambda block, inputs, out: seen.append(out.x_BLD.dtype))
    # this library's bf16 products crash on some CPUs
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        model(random_tokens(3, 12, 11))
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bridge": "linaer"}, "did you mean 'linear'"),
        ({"n_heads": 3}, "model.n_heads=3 must split model.hidden_size=16 into heads of even width"),
        ({"causal": True, "conditioning": "sigma"}, "no noise level for model.conditioning=sigma"),
        ({"n_denoiser_blocks": 0}, "leaves no denoiser"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError) as error:
        build_model(replace(TINY, **options), 11, 10)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), "[batch, length]"),
        (torch.zeros(1, 3), "must be integers"),
        (torch.full((1, 3), 11), "allowed are 0..10"),
        (torch.full((1, 3), -1), "allowed are 0..10"),
        (torch.zeros(1, 13, dtype=torch.long), "allowed are 1..12"),
    ],
)
def test_bad_tokens(tokens, message):
    with pytest.raises(ValueError) as error:
        tiny_model().log_probs(tokens)
    assert message in str(error.value)


def test_what_a_model_does_not_have_is_said():
    with pytest.raises(ValueError, match="no anchor network"):
        tiny_model(anchored=False).anchor_logits(random_tokens(1, 4, 11))
    with pytest.raises(ValueError, match=r"model\.causal=true"):
        tiny_model().make_cache(1, 4)
    with pytest.raises(ValueError, match="mask_id=11"):
        build_model(TINY, 11, 11)


@pytest.mark.parametrize("recipe", ["published", "fast"])
@pytest.mark.parametrize("algo", group_choices("algo"))
def test_no_block_is_born_dead(algo, recipe):
    """Zeros at the start (heads, gates, outputs) must never multiply each other: every block learns within a few
    steps."""
    torch.manual_seed(0)
    cfg = config.load(
        [
            f"algo={algo}",
            f"recipe={recipe}",
            "model=nano",
            "model.hidden_size=16",
            "model.length=12",
            "model.n_blocks=2",
            "model.n_denoiser_blocks=1",
        ]
    )
    model = build_model(cfg.model, 11, 10)
    objective = make_objective(cfg.objective, cfg.noise, 10, seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".blocks." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    rows = Sequences(random_tokens(8, 12, 10), torch.arange(8), 8)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, objective.corrupt(rows, step, 1.0)).total.backward()
        optimizer.step()
    still = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    assert not still, still


@pytest.mark.parametrize("init", ["torch", "normal", "normal-zero"])
def test_blocks_start_at_the_identity_if_asked(init):
    block = build_model(replace(TINY, **MODERN | {"init": init}), 11, 10).denoiser.blocks[0]
    zero = [out.weight.abs().max() == 0 for out in (block.attn_out, block.mlp_out)]
    assert zero == [init == "normal-zero"] * 2
    assert block.qkv.weight.abs().max() > 0
    gated = replace(TINY, **MODERN | {"init": init, "conditioning": "constant"})
    block = build_model(gated, 11, 10).denoiser.blocks[0]
    assert block.modulation.weight.abs().max() == 0 and block.attn_out.weight.abs().max() > 0

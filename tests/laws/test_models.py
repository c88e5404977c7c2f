"""Laws of the networks: linear bridge = dense bridge, the past never sees the future, sizes, caches, bad input."""

from dataclasses import replace

import pytest
import torch
from dense import dense_log_probs, dense_logits, plain_logits
from tiny import MODERN, TINY, random_tokens, tiny_model
from variants import VARIANTS

from adlm import config, tables
from adlm.config.keys import group_choices
from adlm.engine import Engine, Request
from adlm.models import build_model
from adlm.models.bridge import Bridge
from adlm.models.network import count_flops
from adlm.objectives import Sequences, loss, make_objective
from adlm.schema import ModelConfig, SamplingConfig

BRIDGES = ["linear", "none"]


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

"""Low-rank adapters: merged and unmerged are one function, only adapters have gradients, and they start at the base."""

import pytest
import torch
from tiny import MODERN, random_tokens, tiny_model

from adlm.models.linear_cross_entropy import linear_cross_entropy
from adlm.models.network import (
    ALPHA,
    AdaptedLinear,
    adapt,
    adapters,
    base_weights,
    check_adapters,
    is_block_matrix,
    merged,
    weights_digest,
)
from adlm.objectives import Sequences, loss, make_objective
from adlm.schema import LoraConfig, NoiseConfig, ObjectiveConfig

LORA = LoraConfig(rank=3)
KINDS = [
    {}, {"bridge": "none"}, {"anchored": False, "conditioning": "sigma"}, MODERN,
    {"anchored": False, "causal": True, **MODERN},
]  # fmt: skip


def adapted(**options):
    """A tiny model in float64 with adapters that are away from zero, and its base."""
    base = tiny_model(dtype=torch.float64, **options)
    model = adapt(tiny_model(dtype=torch.float64, **options), LORA)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapters(dict(model.named_parameters())).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model.eval(), base


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("L", [4, 12])  # few positions: norms stay outside the weights; many: they are folded in
def test_merged_equals_unmerged(options, L):
    model, base = adapted(**options)
    plain = tiny_model(dtype=torch.float64, seed=9, **options)
    plain.load_state_dict(merged(model.state_dict(), LORA))
    x_BL, sigma_B = random_tokens(5, L, 11), torch.linspace(0.1, 2, 5).double()
    found, expected = model.logits(x_BL, sigma_B), plain.logits(x_BL, sigma_B)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (found - base.logits(x_BL, sigma_B)).abs().max() > 1e-2, "the adapters do something"


def test_merging_is_the_formula():
    model, base = adapted()
    weights, state = merged(model.state_dict(), LORA), model.state_dict()
    assert weights.keys() == base.state_dict().keys()
    for name, w in base.state_dict().items():
        stem = name.removesuffix(".weight")
        if is_block_matrix(name, w):
            w = w + ALPHA / 3 * state[f"{stem}.lora_b"] @ state[f"{stem}.lora_a"]
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-12)


def test_merging_rounds_once():
    """Weights and adapters in bfloat16, as files may hold them: the product and the sum are formed in float32."""
    small = {name: x.bfloat16() for name, x in adapted()[0].state_dict().items()}
    wide = merged({name: x.float() for name, x in small.items()}, LORA)
    for name, w in merged(small, LORA).items():
        assert torch.equal(w, wide[name].bfloat16()), name


def test_training_starts_at_the_base_and_trains_adapters_alone():
    base = tiny_model(dtype=torch.float64)
    model = adapt(tiny_model(dtype=torch.float64), LORA)
    x_BL = random_tokens(4, 12, 10)
    torch.testing.assert_close(model.logits(x_BL), base.logits(x_BL), rtol=0, atol=1e-12)
    objective = make_objective(ObjectiveConfig(gamma=0.5, gamma_warmup=0.0), NoiseConfig(), 10, 1)
    batch = objective.corrupt(Sequences(x_BL, torch.arange(4), 4), 3, 0.5)
    loss(model.train(), batch).total.backward()
    for name, parameter in model.named_parameters():
        is_adapter = name.endswith(("lora_a", "lora_b"))
        assert parameter.requires_grad == is_adapter and (parameter.grad is not None) == is_adapter, name
    matrices = [name for name, p in base.named_parameters() if is_block_matrix(name, p)]
    assert len(matrices) == sum(isinstance(m, AdaptedLinear) for m in model.modules()) == 4 * 3
    # the gradient with respect to B is that of the merged matrix, carried through A
    whole = tiny_model(dtype=torch.float64).train()
    loss(whole, batch).total.backward()
    for name in matrices:
        stem = name.removesuffix(".weight")
        grad, layer = whole.get_parameter(name).grad, model.get_submodule(stem)
        torch.testing.assert_close(layer.lora_b.grad, layer.scale * grad @ layer.lora_a.T, rtol=0, atol=1e-10)


def test_a_frozen_head_has_no_gradient_and_the_same_loss():
    h_ND = torch.randn(6, 4, requires_grad=True, dtype=torch.float64)
    head = torch.nn.Linear(4, 9).double()
    given = (torch.arange(6), torch.rand(6, dtype=torch.float64))
    expected = linear_cross_entropy(h_ND, head, *given)
    (wanted,) = torch.autograd.grad(expected, h_ND)
    head.requires_grad_(False)
    found = linear_cross_entropy(h_ND, head, *given)
    assert torch.equal(found, expected) and torch.equal(torch.autograd.grad(found, h_ND)[0], wanted)
    assert head.weight.grad is None


def test_adapters_of_another_model_are_refused():
    model, base = adapted()
    shapes = {name: tuple(x.shape) for name, x in adapters(model.state_dict()).items()}
    check_adapters(shapes, base.state_dict(), 3, "x")
    first = next(iter(shapes))
    without = {name: shape for name, shape in shapes.items() if name != first}
    for broken in (shapes | {"head.lora_a": (3, 16)}, without, shapes | {first: (2, 1)}):
        with pytest.raises(ValueError, match=r"x: .*lora_. is .* in the file and .* for its base"):
            check_adapters(broken, base.state_dict(), 3, "x")


def test_the_digest_depends_on_values_and_not_on_precision():
    base = tiny_model()
    half = {name: x.bfloat16() for name, x in base.state_dict().items()}
    assert weights_digest(half) == weights_digest({name: x.float() for name, x in half.items()})
    assert weights_digest(half) != weights_digest(base.state_dict())
    model = adapt(tiny_model(), LORA)
    assert weights_digest(base_weights(model.state_dict())) == weights_digest(base.state_dict())

"""Weights in four bits: what is read is the nearest of what can be written, and files have the size they claim."""

import torch

from adlm.io.quantised import GROUP, LEVELS, dequantise, expand, expanded_shapes, fit, is_shrunk, quantise, shrink


def test_values_on_the_grid_are_kept():
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (6, 2, GROUP))
    codes[..., 0] = 15  # the largest level shows the scale
    scale = torch.rand(6, 2).half().float() + 0.5
    x = (torch.tensor(LEVELS)[codes] * scale.half().float()[..., None]).flatten(1)
    torch.testing.assert_close(dequantise(*quantise(x)), x, rtol=2e-3, atol=2e-3)


def test_every_value_gets_its_nearest_level():
    torch.manual_seed(1)
    x = torch.randn(50, GROUP)
    codes, scale = fit(x)
    distance = (x[..., None] - scale[:, None, None] * torch.tensor(LEVELS)).abs()
    torch.testing.assert_close(distance.gather(-1, codes[..., None])[..., 0], distance.amin(-1))


def test_the_fitted_scale_is_better_than_the_largest_magnitude():
    torch.manual_seed(2)
    x = torch.randn(2000, GROUP)
    codes, scale = fit(x)
    levels, largest = torch.tensor(LEVELS), x.abs().amax(1, keepdim=True)
    plain = largest * levels[(x[..., None] / largest[..., None] - levels).abs().argmin(-1)]
    fitted = scale[:, None] * levels[codes]
    assert (x - fitted).square().mean() < 0.87 * (x - plain).square().mean()
    assert (x - fitted).square().mean().sqrt() < 0.085


def test_a_file_has_four_and_a_half_bits_a_value_and_comes_back():
    torch.manual_seed(3)
    weights = {
        "a.weight": torch.randn(24, 64),
        "odd": torch.randn(4, 33),
        "norm": torch.randn(64),
        "n": torch.arange(3),
    }
    small = shrink(weights)
    assert is_shrunk(small) and not is_shrunk(weights)
    size = sum(v.numel() * v.element_size() for name, v in small.items() if name.startswith("a.weight"))
    assert size == 24 * 64 * 4.5 / 8
    back = expand(small)
    assert {name: tuple(v.shape) for name, v in back.items()} == {name: tuple(v.shape) for name, v in weights.items()}
    assert expanded_shapes({n: tuple(v.shape) for n, v in small.items()}) == {
        n: tuple(v.shape) for n, v in back.items()
    }
    assert torch.equal(back["norm"], weights["norm"].bfloat16().float()) and torch.equal(back["n"], weights["n"])
    assert (back["a.weight"] - weights["a.weight"]).abs().max() < 0.5
    zeros = expand(shrink({"z": torch.zeros(2, 32)}))
    assert torch.equal(zeros["z"], torch.zeros(2, 32))


def test_shapes_that_do_not_fit_keep_their_names():
    shapes = {"a.codes": (4, 16), "a.scale": (4, 2)}
    assert expanded_shapes(shapes) == shapes

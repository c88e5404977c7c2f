"""Weights in four bits: what is read is the nearest of what can be written, and files have the size they claim."""

from pathlib import Path

import pytest
import torch

import adlm
from adlm.io.quantised import GROUP, LEVELS, dequantise, expand, expanded_shapes, fit, quantise, shrink


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
    size = sum(v.numel() * v.element_size() for name, v in small.items() if name.startswith("a.weight"))
    assert size == 24 * 64 * 4.5 / 8
    back = expand(small)
    assert {name: tuple(v.shape) for name, v in back.items()} == {name: tuple(v.shape) for name, v in weights.items()}
    assert expanded_shapes({n: tuple(v.shape) for n, v in small.items()}) == {
        n: tuple(v.shape) for n, v in back.items()
    }
    assert torch.equal(back["norm"], weights["norm"].bfloat16()) and torch.equal(back["n"], weights["n"])
    assert (back["a.weight"] - weights["a.weight"]).abs().max() < 0.5
    zeros = expand(shrink({"z": torch.zeros(2, 32)}))
    assert torch.equal(zeros["z"], torch.zeros(2, 32))


def test_weights_of_another_device_than_the_cpu_stay_there():
    """The device without memory stands for a GPU here: what mixes devices fails on both."""
    small = shrink({"w": torch.empty(8, 2 * GROUP, device="meta")})
    assert {value.device.type for value in small.values()} == {"meta"}
    assert expand(small)["w"].device.type == "meta"


def test_shapes_that_do_not_fit_keep_their_names():
    shapes = {"a.codes": (4, 16), "a.scale": (4, 2)}
    assert expanded_shapes(shapes) == shapes


def test_a_model_in_four_bits_loads_and_is_nearly_the_same(tmp_path):
    lm = adlm.load(Path(__file__).parents[1] / "golden" / "export_v1")
    lm.save(tmp_path / "small", "4bit")
    lm.save(tmp_path / "plain")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < 0.45 * sizes[1], "a toy has many vectors, which stay in two bytes, and a long header"
    small = adlm.load(tmp_path / "small")
    text = "the cat sat on the mat"
    assert small.score(text).nll == pytest.approx(lm.score(text).nll, rel=0.2)
    with pytest.raises(ValueError, match="precision='5bit'"):
        lm.save(tmp_path / "wrong", "5bit")

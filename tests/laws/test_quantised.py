"""Weights in four bits: what is read is the nearest of what can be written, and files have the size they claim."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import adlm
from adlm import cli
from adlm.io.quantised import (
    GROUP,
    LEVELS,
    calibrated,
    dequantise,
    expand,
    expanded_shapes,
    fit,
    products,
    quantise,
    rounding,
    shrink,
    triangle,
)

GOLDEN = Path(__file__).parents[1] / "golden"


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
    lm = adlm.load(GOLDEN / "export_v1")
    lm.save(tmp_path / "small", "4bit")
    lm.save(tmp_path / "plain")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < 0.45 * sizes[1], "a toy has many vectors, which stay in two bytes, and a long header"
    small = adlm.load(tmp_path / "small")
    text = "the cat sat on the mat"
    assert small.score(text).nll == pytest.approx(lm.score(text).nll, rel=0.2)
    with pytest.raises(ValueError, match="precision='5bit'"):
        lm.save(tmp_path / "wrong", "5bit")


def correlated(seed, C=96, n=400):
    """A matrix, and inputs whose columns are strongly correlated."""
    torch.manual_seed(seed)
    x_MC = torch.randn(n, C // 8) @ torch.randn(C // 8, C) + 0.3 * torch.randn(n, C)
    return torch.randn(40, C), x_MC


def output_error(w_RC, x_MC, codes, scale):
    return (x_MC @ (w_RC - dequantise(codes, scale)).T).square().sum()


def test_columns_that_are_not_correlated_make_up_for_nothing():
    w_RC, _ = correlated(0)
    for h_CC in (torch.eye(96), 7 * torch.eye(96), torch.zeros(96, 96)):
        assert all(map(torch.equal, calibrated(w_RC, h_CC), quantise(w_RC)))


def test_rounding_changes_each_later_column_as_the_dense_minimum_does():
    """A column is rounded; the best change of all later ones solves a least-squares problem."""
    _, x_MC = correlated(1, C=8)
    h_CC = products(x_MC).double()
    u_CC = triangle(h_CC, 0.0)
    for c in range(7):
        later = slice(c + 1, None)
        best = torch.linalg.solve(h_CC[later, later], h_CC[later, c])  # of |X_c e + X_later d|^2 with e = -1
        torch.testing.assert_close(-u_CC[c, later] / u_CC[c, c], best)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_of_correlated_inputs_change_less(seed):
    w_RC, x_MC = correlated(seed)
    plain = output_error(w_RC, x_MC, *quantise(w_RC))
    assert output_error(w_RC, x_MC, *calibrated(w_RC, products(x_MC))) < 0.5 * plain


def test_files_of_both_ways_have_the_same_form():
    w_RC, x_MC = correlated(5)
    weights = {"a.weight": w_RC, "b.weight": w_RC, "norm": torch.ones(3)}
    files = [shrink(weights), shrink(weights, {"a.weight": calibrated(w_RC, products(x_MC))})]
    plain, fitted = ({name: (v.dtype, v.shape, v.is_contiguous()) for name, v in file.items()} for file in files)
    assert plain == fitted
    assert torch.equal(files[0]["b.weight.codes"], files[1]["b.weight.codes"])
    assert not torch.equal(files[0]["a.weight.codes"], files[1]["a.weight.codes"])


def test_a_pass_rounds_every_map_behind_rounded_ones():
    torch.manual_seed(6)
    one, two = torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)
    model = torch.nn.Sequential(one, torch.nn.GELU(), two)
    plain, x_MC = dict(model.named_children()), torch.randn(50, 64)
    with rounding(model, ["0", "2"]) as found, torch.no_grad():
        y = model(x_MC)
    assert dict(model.named_children()) == plain
    first, last = (dequantise(linear.codes, linear.scale) for linear in found.values())
    h = torch.nn.functional.gelu(x_MC @ first.T + one.bias)
    torch.testing.assert_close(y, h @ last.T + two.bias)
    expected = calibrated(two.weight, products(h))
    torch.testing.assert_close(last, dequantise(*expected))


def test_inputs_that_are_no_numbers_are_refused():
    w_RC, x_MC = correlated(7)
    x_MC[3, 5] = torch.nan
    with pytest.raises(ValueError, match="its inputs in the text are not finite"):
        calibrated(w_RC, products(x_MC))


@pytest.mark.parametrize("name", ["export_v1", "export_v1_a2r"])
def test_a_fitted_export_predicts_more_like_its_model_than_a_plain_one(name, tmp_path):
    folder, text = GOLDEN / name, GOLDEN / "train.txt"
    lm = adlm.load(folder, device="cpu")
    lm.save(tmp_path / "plain", "4bit")
    line = ["export", str(folder), str(tmp_path / "fitted"), "--four-bit", "data=file", f"data.path={text}"]
    assert cli.main([*line, f"data.cache_dir={tmp_path / 'cache'}", "train.device=cpu"]) == 0
    tokens = lm.tokenizer.encode((GOLDEN / "valid.txt").read_text())
    tokens_BL = torch.tensor(tokens[: len(tokens) // 32 * 32]).view(-1, 32)
    hidden_BL = torch.rand(tokens_BL.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if not lm.model.config.causal:
        tokens_BL = tokens_BL.masked_fill(hidden_BL, lm.model.mask_id)

    def divergence(folder):
        log_p, log_q = (m.log_probs(tokens_BL).double() for m in (lm.model, adlm.load(folder, device="cpu").model))
        return (log_p.exp() * (log_p - log_q).nan_to_num()).sum(-1).mean().item()

    plain, fitted = divergence(tmp_path / "plain"), divergence(tmp_path / "fitted")
    assert fitted < 0.8 * plain, (fitted, plain)


def test_a_model_whose_text_is_not_here_is_rounded_to_nearest(tmp_path, capsys):
    line = ["export", str(GOLDEN / "export_v1"), str(tmp_path / "small"), "--four-bit", "train.device=cpu"]
    assert cli.main(line) == 0
    assert "note: rounded to nearest, not fitted to a text" in capsys.readouterr().err
    small = load_file(tmp_path / "small" / "model.safetensors")
    plain = shrink(load_file(GOLDEN / "export_v1" / "model.safetensors"))
    assert plain.keys() == small.keys() and all(torch.equal(x, small[name]) for name, x in plain.items())
    for more, message in (
        (["data=file", "data.path=none.txt"], "data.path='none.txt' does not exist"),
        (["data.path=none.txt"], "data.path: not read with data=checkpoint"),
    ):
        assert cli.main([*line, *more]) == 1
        assert message in capsys.readouterr().err
    assert cli.main([*line[:3], "data=pydocs"]) == 1
    assert "data=pydocs: only --four-bit reads a text" in capsys.readouterr().err

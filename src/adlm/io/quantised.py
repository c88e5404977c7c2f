"""Matrices in four bits, for small files: 32 values of a row share a scale, and each value is one of 16 levels.

    x = scale * LEVELS[code]          4.5 bits per value: 4 for the code, 16 / 32 for the scale (float16)

The levels are NF4's (Dettmers et al. 2023): quantiles of a normal distribution, which weights resemble. A group's scale
is the one of several candidates, each refitted by least squares, with the smallest error. Vectors, and matrices whose
rows are not a multiple of 32, stay in bfloat16. A file of such weights has `NAME.codes` (two in a byte, low half first)
and `NAME.scale` in place of `NAME`; `expand` restores the weights when the file is loaded.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adlm.errors import choose

GROUP = 32
LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
CODES, SCALE = ".codes", ".scale"
CANDIDATES = torch.linspace(0.7, 1.15, 10).tolist()
"""Scales to try, relative to the largest magnitude of the group."""
ROWS = 4096
"""Groups quantised at once, which bounds the memory."""


def nearest(x_GN: Tensor, scale_G: Tensor) -> Tensor:
    """Index of the level nearest to each value."""
    levels = torch.tensor(LEVELS, dtype=x_GN.dtype, device=x_GN.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(x_GN / scale_G[:, None], middles)


def fit(x_GN: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups, from the candidate with the smallest squared error."""
    levels = torch.tensor(LEVELS, dtype=x_GN.dtype, device=x_GN.device)
    largest_G = x_GN.abs().amax(1).clamp(min=1e-8)
    best, scale_G, codes_GN = torch.full_like(largest_G, torch.inf), largest_G, nearest(x_GN, largest_G)
    for candidate in CANDIDATES:
        q_GN = levels[nearest(x_GN, candidate * largest_G)]
        refit_G = (x_GN * q_GN).sum(1) / (q_GN * q_GN).sum(1).clamp(min=1e-12)
        refit_G = torch.where(refit_G > 0, refit_G, largest_G).half().to(x_GN.dtype)  # rounded as in the file
        tried_GN = nearest(x_GN, refit_G.clamp(min=1e-8))
        error_G = (x_GN - refit_G[:, None] * levels[tried_GN]).square().sum(1)
        better = error_G < best
        best, scale_G = torch.where(better, error_G, best), torch.where(better, refit_G, scale_G)
        codes_GN = torch.where(better[:, None], tried_GN, codes_GN)
    return codes_GN, scale_G


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] as codes [rows, columns / 2] and scales [rows, columns / 32]."""
    rows, columns = x.shape
    parts = [fit(part) for part in x.float().reshape(-1, GROUP).split(ROWS)]
    codes, scale = (torch.cat(each) for each in zip(*parts))
    pairs = codes.to(torch.uint8).reshape(rows, columns // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale.reshape(rows, columns // GROUP).half()


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The matrix of codes and scales."""
    levels, byte = torch.tensor(LEVELS, device=codes.device), torch.arange(256, device=codes.device)
    pairs = torch.stack((levels[byte & 15], levels[byte >> 4]), dim=-1)  # two levels per byte: half as many lookups
    values = pairs[codes.int()].view(len(codes), -1, GROUP)
    return values.mul_(scale.float().unsqueeze(-1)).flatten(1)


def shrink(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in four bits: matrices as codes and scales, the rest in bfloat16."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.ndim == 2 and value.shape[1] % GROUP == 0 and value.is_floating_point():
            found[name + CODES], found[name + SCALE] = quantise(value)
        else:
            found[name] = value.bfloat16() if value.is_floating_point() else value
    return found


PRECISIONS: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "fp32": lambda weights: {name: value.float() for name, value in weights.items()},
    "bf16": lambda weights: {name: value.bfloat16() for name, value in weights.items()},
    "4bit": shrink,
}


def in_precision(weights: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Weights in the form that a file of this precision holds."""
    return PRECISIONS[choose("precision", precision, PRECISIONS)](weights)


def expand(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a file of any precision, with codes and scales expanded."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith(CODES):
            own = name.removesuffix(CODES)
            found[own] = dequantise(value, weights[own + SCALE])
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) + CODES in weights):
            found[name] = value
    return found


def expanded_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that `expand` would give. Entries that do not fit together keep their names, so that a
    comparison with the model's shapes reports them."""
    found = dict(shapes)
    for name, shape in shapes.items():
        own = name.removesuffix(CODES)
        if own == name or len(shape) != 2 or shapes.get(own + SCALE) != (shape[0], 2 * shape[1] // GROUP):
            continue
        del found[name], found[own + SCALE]
        found[own] = (shape[0], 2 * shape[1])
    return found

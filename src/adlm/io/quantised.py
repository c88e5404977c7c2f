"""Matrices in four bits, for small files: 32 values of a row share a scale, and each value is one of 16 levels.

    x = scale * LEVELS[code]          4.5 bits per value: 4 for the code, 16 / 32 for the scale (float16)

The levels are NF4's (Dettmers et al. 2023): quantiles of a normal distribution, which weights resemble. A group's scale
is the one of several candidates, each refitted by least squares, with the smallest error. Vectors, and matrices whose
rows are not a multiple of 32, stay in bfloat16. A file of such weights has `NAME.codes` (two in a byte, low half first)
and `NAME.scale` in place of `NAME`; `expand` restores the weights when the file is loaded.

Without inputs, each value goes to its nearest level. With inputs, `calibrated` rounds a linear map so that its outputs
change little. Letters: R rows (outputs) and C columns (inputs) of a matrix, G groups of N = 32 values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.errors import choose, require

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
TOGETHER = 32
"""Columns whose errors are spread over all later ones by one product."""
DAMPING, TIED_DAMPING = 0.01, 0.3
"""What is added to the diagonal of H, relative to its mean. A head whose matrix is also the embedding takes the second:
an embedding is read row by row, and for that H is the identity."""


def nearest(x_GN: Tensor, scale_G: Tensor) -> Tensor:
    """Index of the level nearest to each value."""
    levels = torch.tensor(LEVELS, dtype=x_GN.dtype, device=x_GN.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(x_GN / scale_G[:, None], middles)


def fit(x_GN: Tensor, weight_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups, from the candidate with the smallest squared error. `weight_N`: how much the error of
    each place of a group counts."""
    parts = [fit_part(part_GN, weight_N) for part_GN in x_GN.split(ROWS)]
    codes_GN, scale_G = (torch.cat(each) for each in zip(*parts))
    return codes_GN, scale_G


def fit_part(x_GN: Tensor, weight_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """`fit` of at most ROWS groups."""
    levels = torch.tensor(LEVELS, dtype=x_GN.dtype, device=x_GN.device)
    weight_N = x_GN.new_ones(GROUP) if weight_N is None else weight_N
    largest_G = x_GN.abs().amax(1).clamp(min=1e-8)
    best, scale_G, codes_GN = torch.full_like(largest_G, torch.inf), largest_G, nearest(x_GN, largest_G)
    for candidate in CANDIDATES:
        q_GN = levels[nearest(x_GN, candidate * largest_G)]
        refit_G = (weight_N * x_GN * q_GN).sum(1) / (weight_N * q_GN * q_GN).sum(1).clamp(min=1e-12)
        refit_G = torch.where(refit_G > 0, refit_G, largest_G).half().to(x_GN.dtype)  # rounded as in the file
        tried_GN = nearest(x_GN, refit_G.clamp(min=1e-8))
        error_G = (weight_N * (x_GN - refit_G[:, None] * levels[tried_GN]).square()).sum(1)
        better = error_G < best
        best, scale_G = torch.where(better, error_G, best), torch.where(better, refit_G, scale_G)
        codes_GN = torch.where(better[:, None], tried_GN, codes_GN)
    return codes_GN, scale_G


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] as codes [rows, columns / 2] and scales [rows, columns / 32]."""
    codes, scale = fit(x.float().reshape(-1, GROUP))
    return pack(codes.view(x.shape), scale.view(len(x), -1))


def pack(codes_RC: Tensor, scale_RG: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales as in a file: two codes in a byte, scales in float16."""
    pairs = codes_RC.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale_RG.half()


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The matrix of codes and scales."""
    levels, byte = torch.tensor(LEVELS, device=codes.device), torch.arange(256, device=codes.device)
    pairs = torch.stack((levels[byte & 15], levels[byte >> 4]), dim=-1)  # two levels per byte: half as many lookups
    values = pairs[codes.int()].view(len(codes), -1, GROUP)
    return values.mul_(scale.float().unsqueeze(-1)).flatten(1)


# ---- rounding for inputs ---------------------------------------------------------------------------------------------
# A linear map W with inputs X computes X W^T. Rounded to Q, its outputs change by
#
#     |X (W - Q)^T|^2 = sum over rows of (w - q) H (w - q)^T,    H = X^T X
#
# Round one column of W after the other. The error e of column c is final, but the columns not yet rounded can make up
# for it. The best of their changes is -e U[c, later] / U[c, c], where U is the upper triangular matrix with U^T U =
# H^-1: minimise the quadratic form over what is left, column by column (optimal brain compression, Frantar et al. 2022;
# GPTQ). If H is the identity, nothing is made up for, and every value goes to its nearest level.


def triangle(h_CC: Tensor, damping: float) -> Tensor:
    """U with U^T U = (H + damping I)^-1, upper triangular; `damping` is relative to the mean of H's diagonal, so that
    directions without inputs have an inverse, too."""
    require(bool(h_CC.isfinite().all()), "a matrix cannot be fitted: its inputs in the text are not finite numbers")
    h_CC = h_CC.to("cpu" if h_CC.is_mps else h_CC.device, torch.float64)  # MPS has no float64
    mean = h_CC.diagonal().mean()
    damped_CC = h_CC + torch.where(mean > 0, damping * mean, 1.0) * torch.eye(len(h_CC), device=h_CC.device)
    inverse_CC = torch.cholesky_inverse(torch.linalg.cholesky(damped_CC))
    return torch.linalg.cholesky(inverse_CC, upper=True)


def calibrated(w_RC: Tensor, h_CC: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """A matrix as codes and scales, rounded for inputs X with X^T X = H. Scales are fitted first, with weights from H's
    diagonal. Then the columns are rounded, the one with the largest inputs first, since all others can make up for it.
    """
    R, C = w_RC.shape
    weight_C = h_CC.diagonal().float()
    weight_C = weight_C / weight_C.mean().clamp(min=1e-30) + damping
    groups = zip(w_RC.float().split(GROUP, dim=1), weight_C.split(GROUP))
    scale_GR = torch.stack([fit(w_RN.contiguous(), weight_N)[1] for w_RN, weight_N in groups])
    order_C = weight_C.argsort(descending=True, stable=True)
    order = order_C.tolist()
    u_CC = triangle(h_CC[order_C][:, order_C], damping).to(w_RC.device, torch.float32)
    w_CR = w_RC.float().T[order_C]
    codes_CR, levels = torch.empty_like(w_CR, dtype=torch.uint8), torch.tensor(LEVELS, device=w_RC.device)
    for start in range(0, C, TOGETHER):
        end = min(start + TOGETHER, C)
        error_NR = w_CR.new_empty(end - start, R)
        for c in range(start, end):
            scale_R = scale_GR[order[c] // GROUP]
            code_R = nearest(w_CR[c, :, None], scale_R.clamp(min=1e-8))[:, 0]
            error_R = (w_CR[c] - scale_R * levels[code_R]) / u_CC[c, c]
            w_CR[c + 1 : end] -= u_CC[c, c + 1 : end, None] * error_R
            codes_CR[order[c]], error_NR[c - start] = code_R.to(torch.uint8), error_R
        w_CR[end:] -= u_CC[start:end, end:].T @ error_NR
    return pack(codes_CR.T.contiguous(), scale_GR.T.contiguous())


def products(x: Tensor) -> Tensor:
    """H = X^T X of inputs [..., C]."""
    x_MC = x.flatten(0, -2).float()
    return x_MC.T @ x_MC


class Rounding(nn.Linear):
    """A linear map that is rounded when it is called, for the inputs of that call, and then computes as rounded. So in
    one pass every map is rounded behind maps that already are."""

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        self.codes, self.scale = calibrated(self.weight, products(input))
        return F.linear(input, dequantise(self.codes, self.scale).to(self.weight.dtype), self.bias)


@contextmanager
def rounding(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Rounding]]:
    """Let the linear maps with these names round themselves in the next pass of the model."""
    plain = {name: model.get_submodule(name) for name in names}
    found = {name: Rounding(linear) for name, linear in plain.items() if isinstance(linear, nn.Linear)}
    try:
        for name, linear in found.items():
            model.set_submodule(name, linear)
        yield found
    finally:
        for name, linear in plain.items():
            model.set_submodule(name, linear)


# ---- files -----------------------------------------------------------------------------------------------------------


def shrink(
    weights: Mapping[str, Tensor], rounded: Mapping[str, tuple[Tensor, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Weights in four bits: matrices as codes and scales, the rest in bfloat16. `rounded`: codes and scales by name
    of matrices that are not to be rounded to nearest."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if rounded and name in rounded:
            found[name + CODES], found[name + SCALE] = rounded[name]
        elif value.ndim == 2 and value.shape[1] % GROUP == 0 and value.is_floating_point():
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

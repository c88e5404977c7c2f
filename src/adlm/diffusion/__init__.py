"""Pure mathematics of masked diffusion: tensors in, tensors out; no state, no modules.

process.py  alpha(t), noise levels, loss weights, times; forward process, posteriors (Eq. 1, 2, 3, 6), SUBS
random.py   random numbers as a function of (seed, counters); filtering and drawing tokens
"""

import torch
from torch import Tensor

from adlm.errors import require

# Value checks at public entry points. Reading values costs a host sync on a device and a graph break under
# torch.compile, so these checks read only CPU tensors outside compilation. Shapes and dtypes are checked everywhere:
# they are known without reading.


def visible(x: Tensor) -> bool:
    """True when reading the values of `x` is free: on the CPU, outside torch.compile."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def check_range(name: str, x: Tensor, low: float, high: float) -> None:
    if visible(x) and x.numel() and not bool(((x >= low) & (x <= high)).all()):
        require(False, f"{name} must lie in [{low}, {high}], got values in [{x.min().item()}, {x.max().item()}]")


def check_tokens(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Check that token ids are integers in [0, vocab_size)."""
    require(
        not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool),
        f"{name} must hold integer token ids, got dtype {tokens.dtype}",
    )
    if visible(tokens) and tokens.numel():
        low, high = int(tokens.min()), int(tokens.max())
        require(
            low >= 0 and high < vocab_size,
            f"{name} must hold token ids in [0, {vocab_size - 1}], got ids in [{low}, {high}]",
        )


def check_not_nan(name: str, x: Tensor) -> None:
    # amax propagates NaN: one pass, no temporary
    if visible(x) and x.numel() and bool(x.amax().isnan()):
        require(False, f"{name} holds NaN in {int(x.isnan().sum())} of {x.numel()} entries; expected numbers")

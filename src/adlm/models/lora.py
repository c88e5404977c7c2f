"""Low-rank adapters (LoRA, arXiv 2106.09685): a matrix W of the blocks becomes W + (alpha / rank) B A.

W is [out, in], A [rank, in] and B [out, rank]. Only A and B train. B starts at zero, so that training starts from the
base model exactly. In training the two thin products run beside the frozen one; for inference the sum is formed once
(`merged`), and the model is again one without adapters.

Weights with adapters are those of the base under their own names, and beside each `NAME.weight` of a block
`NAME.lora_a` and `NAME.lora_b`.
"""

import hashlib
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.errors import require
from adlm.models.network import Network, is_block_matrix
from adlm.schema import LoraConfig

WEIGHT, A, B = "weight", "lora_a", "lora_b"
ALPHA = 16.0
"""Strength of the adapters that are trained. A file of adapters says its own."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter."""

    def __init__(self, linear: nn.Linear, cfg: LoraConfig):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        like = {"device": linear.weight.device, "dtype": torch.promote_types(linear.weight.dtype, torch.float32)}
        self.scale = ALPHA / cfg.rank
        self.lora_a = nn.Parameter(torch.empty(cfg.rank, linear.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, cfg.rank, **like))
        if not linear.weight.is_meta:
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as torch starts a linear layer

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.scale * self.lora_b)


def adapt(model: Network, cfg: LoraConfig) -> Network:
    """Freeze the model, and give every matrix of its blocks an adapter, drawn from torch's global generator."""
    model.requires_grad_(False)
    for owner in [module for name, module in model.named_modules() if ".blocks." in f".{name}."]:
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear) and name != "modulation":
                setattr(owner, name, AdaptedLinear(layer, cfg))
    return model


def adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters alone, of weights with adapters."""
    return {name: x for name, x in weights.items() if name.rpartition(".")[2] in (A, B)}


def base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The others: those of the base model."""
    return {name: x for name, x in weights.items() if name.rpartition(".")[2] not in (A, B)}


def merged(weights: Mapping[str, Tensor], cfg: LoraConfig, alpha: float = ALPHA) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same: W + (alpha / rank) B A, in at least float32 and
    rounded once to the precision of W."""
    found = base_weights(weights)
    for name, a in weights.items():
        stem, _, part = name.rpartition(".")
        if part == A:
            w, b = found[f"{stem}.{WEIGHT}"], weights[f"{stem}.{B}"]
            wide = torch.promote_types(w.dtype, torch.float32)
            delta = (alpha / cfg.rank) * (b.to(wide) @ a.to(wide))
            found[f"{stem}.{WEIGHT}"] = (w.to(wide) + delta.to(w.device)).to(w.dtype)
    return found


def check_adapters(found: Mapping[str, tuple[int, ...]], base: Mapping[str, Tensor], rank: int, what: str) -> None:
    """Refuse adapters that are not those of the matrices of a base's blocks. `found`: their shapes by name."""
    matrices = {name.rpartition(".")[0]: w for name, w in base.items() if is_block_matrix(name, w)}
    expected = {f"{stem}.{A}": (rank, w.shape[1]) for stem, w in matrices.items()}
    expected |= {f"{stem}.{B}": (w.shape[0], rank) for stem, w in matrices.items()}
    for name in sorted(expected.keys() | found.keys()):
        got, want = found.get(name, "missing"), expected.get(name, "unknown")
        require(got == want, f"{what}: {name:.80} is {got} in the file and {want} for its base")


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and values in float32: the same in whatever precision or file they are kept, so long
    as that holds the values exactly."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(f"{name} {tuple(x.shape)}\n".encode())
        found.update(x.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B"))
    return found.hexdigest()

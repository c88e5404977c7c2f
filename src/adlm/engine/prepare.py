"""The model as the engine runs it: in float32 itself, in bf16 a copy with everything constant folded.

Weights are converted once (autocast would convert them at every step), the modulations of a model without time
conditioning are numbers and not networks, and heads are padded to a width that matrix units like. Values change only by
the rounding of bf16.
"""

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.errors import choose
from adlm.models import LanguageModel
from adlm.models.layers import Block
from adlm.models.transformer import Stack

ALIGNED = 128


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def prepare(model: LanguageModel, device: torch.device, precision: str) -> tuple[LanguageModel, bool]:
    """(the model as the engine runs it, whether in bf16)."""
    choose("precision", precision, ("auto", "fp32", "bf16"))
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    # A model that asks for gradients belongs to a training run: freezing its bridge would stop its learning.
    trained = any(p.requires_grad for p in model.parameters())
    model = (copy.deepcopy(model).requires_grad_(False) if trained else model).to(device).eval()
    model.freeze_bridge()
    if not bf16:
        return model, False
    low = fold(copy.deepcopy(model))
    to_bfloat16(low)
    return low, True


class Constant(nn.Module):
    """A network whose input never changes."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class PaddedLinear(nn.Linear):
    """A linear layer computed at the next aligned width; the columns beyond are cut off."""

    def __init__(self, linear: nn.Linear):
        width = -(-linear.out_features // ALIGNED) * ALIGNED
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        more = width - linear.out_features
        self.weight = nn.Parameter(F.pad(linear.weight, (0, 0, 0, more)), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(F.pad(linear.bias, (0, more)), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[..., : self.out_features]


@torch.no_grad()
def fold(model: LanguageModel) -> LanguageModel:
    """The same function with constants computed: bridge, modulations (unless time-conditioned), aligned heads."""
    model.freeze_bridge()
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        if stack.time_embedding is None or stack.time_conditioning:
            continue
        c = stack.time_embedding(torch.zeros(1, device=model.embedding.device))
        stack.time_embedding = Constant(c)  # type: ignore[assignment]
        for part in [stack, *(b for b in stack.blocks if isinstance(b, Block))]:
            if part.modulation is not None:
                part.modulation = Constant(part.modulation(c))  # type: ignore[assignment]
    model.head = PaddedLinear(model.head)
    if model.anchor_head is not None:
        model.anchor_head = PaddedLinear(model.anchor_head)
    return model


def to_bfloat16(model: LanguageModel) -> None:
    """Linear weights and the frozen bridge in bf16; norms, modulations, embedding and noise level stay float32."""
    keep = {id(m) for name, part in model.named_modules() if name.endswith("time_embedding") for m in part.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module) not in keep:
            module.to(torch.bfloat16)
    if model.bridge is not None:
        model.bridge.to(torch.bfloat16)

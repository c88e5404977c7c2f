"""The model as the engine runs it: a copy with everything constant folded, in float32 or bf16.

The bridge is one matrix, norms and modulations of a model without time conditioning are part of the weights. In bf16
weights are converted once (autocast would convert them at every step), heads are padded to a width that matrix units
like, and the residual stream is bf16 too. Values change only by rounding.
"""

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.errors import choose
from adlm.models import LanguageModel
from adlm.models.compiling import allow_variants
from adlm.models.layers import Block, fold_entry, fold_exit, modulations
from adlm.models.transformer import Stack

ALIGNED = 128


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def prepare(model: LanguageModel, device: torch.device, precision: str) -> tuple[LanguageModel, bool]:
    """(the model as the engine runs it, whether in bf16)."""
    choose("precision", precision, ("auto", "fp32", "bf16"))
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    low = fold(model.to(device))
    if bf16:
        pad_heads(low)
        to_bfloat16(low)
        if device.type == "cuda":
            fuse_activations(low)
        low.residual_dtype = torch.bfloat16
    return low, bf16


@torch.library.custom_op("adlm::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b), tanh form, inside the matrix product. CUDA only: elsewhere the same call has another gelu."""
    out = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class GeluLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear_gelu(input, self.weight, self.bias)


def fuse_activations(model: LanguageModel) -> None:
    """The gelu of folded blocks into the map before it: the widest activations are written once instead of twice."""
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        if block.norm2.weight is None and block.activation == "gelu" and block.mlp_in.bias is not None:
            block.mlp_in.__class__ = GeluLinear
            block.activation = "done"


def compile_blocks(model: LanguageModel) -> None:
    """One block at a time and not the whole model: blocks are alike, so one compilation serves them all."""
    # The second size makes the batch dimension a variable: two or three compilations in all, not one per shape.
    allow_variants()
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.compile(fullgraph=True)
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        stack.finish = torch.compile(stack.finish, fullgraph=True)  # type: ignore[method-assign]


@torch.no_grad()
def fold(model: LanguageModel) -> LanguageModel:
    """A copy that computes the same function with constants computed: the bridge, and norms and modulations unless
    time-conditioned. It shares the largest tensors, which stay as they are: embedding, heads and bridge."""
    shared = [p for name, p in model.named_parameters() if ".blocks." not in name]
    low = copy.deepcopy(model, memo={id(p): p for p in shared}).eval()
    low.freeze_bridge()
    for stack in [m for m in low.modules() if isinstance(m, Stack)]:
        if not stack.time_conditioning:
            fold_stack(stack)
    return low


def pad_heads(model: LanguageModel) -> None:
    model.head = PaddedLinear(model.head)
    if model.anchor_head is not None:
        model.anchor_head = PaddedLinear(model.anchor_head)


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


def fold_stack(stack: Stack) -> None:
    """Norm weights and modulations of every block into its linear maps."""
    c = None
    if stack.time_embedding is not None:
        c = stack.time_embedding(torch.zeros(1, device=stack.norm.weight.device))  # type: ignore[union-attr]
    for block in stack.blocks:
        assert isinstance(block, Block)
        attend, feed = modulations(block.modulation, c, 2)
        block.qkv = folded(*fold_entry(block.norm1, attend, block.qkv))
        block.attn_out = folded(*fold_exit(block.attn_out, attend))
        block.mlp_in = folded(*fold_entry(block.norm2, feed, block.mlp_in))
        block.mlp_out = folded(*fold_exit(block.mlp_out, feed))
        block.norm1.weight = block.norm2.weight = block.modulation = None
    if c is not None and stack.modulation is not None:
        # what stands before the heads: folding it would change two V x D matrices and save two passes in all
        stack.modulation = Constant(stack.modulation(c))  # type: ignore[assignment]
        stack.time_embedding = Constant(c)  # type: ignore[assignment]


def folded(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear


class Constant(nn.Module):
    """A network whose input never changes."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def to_bfloat16(model: LanguageModel) -> None:
    """Linear weights, embedding and the frozen bridge in bf16; norms, modulations and noise level stay float32.
    Parameters are replaced and not converted: a folded model shares some with its original."""
    small = [part for name, part in model.named_modules() if name.endswith(("time_embedding", "modulation"))]
    keep = {id(m) for part in small for m in part.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module) not in keep:
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(p.to(torch.bfloat16), requires_grad=False))
    model.embedding = nn.Parameter(model.embedding.to(torch.bfloat16), requires_grad=False)
    if model.bridge is not None and model.bridge.frozen_matrix_DD is not None:
        model.bridge.frozen_matrix_DD = model.bridge.frozen_matrix_DD.to(torch.bfloat16)

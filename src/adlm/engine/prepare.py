"""The network as the engine runs it: a copy with everything constant folded, in float32 or bf16.

The bridge has its inference form; norms and modulations of a network without time conditioning are part of the
weights. In bf16 weights are converted once (autocast would convert them at every step), heads are padded to a width
that matrix units like, and the residual stream is bf16 too. In float32 on a CPU, oneDNN lays the weights out for its
products once. Values change only by rounding.
"""

import copy
import platform
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.errors import choose
from adlm.models import Network
from adlm.models.backends import allow_variants
from adlm.models.layers import (
    activate,
    fold_entry,
    fold_exit,
    modulations,
    normalise,
    pick_each,
    pick_flat,
    product_dtype,
)
from adlm.models.transformer import AttentionBlock, Block, Context, ResidualStream, Stack

ALIGNED = 128


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def prepare(model: Network, device: torch.device, precision: str) -> tuple[Network, bool]:
    """(the network as the engine runs it, whether in bf16)."""
    choose("precision", precision, ("auto", "fp32", "bf16"))
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    low = fold(model.to(device), fused_gelu=bf16 and device.type == "cuda")
    if bf16:
        pad_heads(low)
        to_bfloat16(low)
        low.residual_dtype = torch.bfloat16
    elif device.type == "cpu" and can_pack():
        pack(low)
    return low, bf16


@torch.no_grad()
def fold(model: Network, fused_gelu: bool = False) -> Network:
    """A copy that computes the same function with constants computed: the bridge, and norms and modulations unless
    time-conditioned. It shares the largest tensors, which stay as they are: embedding, heads and bridge. Weights that
    are bf16 already are shared all, and not folded: a product would be a second copy, rounded again."""
    rounded = model.embedding.dtype == torch.bfloat16
    shared = [p for name, p in model.named_parameters() if rounded or ".blocks." not in name]
    low = copy.deepcopy(model, memo={id(p): p for p in shared}).eval()
    low.freeze_bridge()
    for stack in [m for m in low.modules() if isinstance(m, Stack)]:
        if stack.is_time_conditioned or rounded:
            continue
        c_1C = None
        if stack.time_embedding is not None:
            c_1C = stack.time_embedding(torch.zeros(1, device=stack.norm.weight.device))
        stack.blocks = nn.ModuleList(FoldedBlock(block, c_1C, fused_gelu) for block in stack.blocks)  # type: ignore[arg-type]
        if c_1C is not None and stack.modulation is not None:
            # what stands before the heads: folding it would change two V x D matrices and save two passes in all
            stack.modulation = Constant(stack.modulation(c_1C))  # type: ignore[assignment]
            stack.time_embedding = Constant(c_1C)  # type: ignore[assignment]
    return low


class FoldedBlock(AttentionBlock):
    """A trained block whose norm weights and modulations are part of its linear maps."""

    def __init__(self, block: Block, c_1C: Tensor | None, fused_gelu: bool):
        super().__init__()
        self.heads, self.causal = block.heads, block.causal
        self.norm, self.epsilon = block.norm1.kind, block.norm1.epsilon
        self.q_norm, self.k_norm = block.q_norm, block.k_norm
        attend, feed = modulations(block.modulation, c_1C, 2)
        self.qkv = ConstantLinear(*fold_entry(block.norm1, attend, block.qkv))
        self.attn_out = ConstantLinear(*fold_exit(block.attn_out, attend))
        weight, bias = fold_entry(block.norm2, feed, block.mlp_in)
        if fused_gelu and block.activation == "gelu" and bias is not None:
            self.mlp_in = GeluLinear(weight, bias)
        else:
            self.mlp_in = ActivatedLinear(weight, bias, block.activation)
        self.mlp_out = ConstantLinear(*fold_exit(block.mlp_out, feed))
        self.train(block.training)

    def forward(self, stream: ResidualStream, context: Context) -> ResidualStream:
        x_BLD = stream.total()
        o_BLD = self.attention(self.qkv(self.normed(x_BLD)), context)
        if context.at_BQ is not None:  # attention has answered those queries only
            x_BLD = pick_each(x_BLD, context.at_BQ)
        elif context.at_N is not None:
            o_BLD, x_BLD = pick_flat(o_BLD, context.at_N), pick_flat(x_BLD, context.at_N)
        x_BLD = x_BLD + self.attn_out(o_BLD)
        return ResidualStream(x_BLD, self.mlp_out(self.mlp_in(self.normed(x_BLD))))

    def normed(self, x_BLD: Tensor) -> Tensor:
        return normalise(x_BLD, self.norm, product_dtype(x_BLD, self.qkv.weight), self.epsilon)


class ConstantLinear(nn.Linear):
    """A linear layer that is not trained, from its weight and bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]


class ActivatedLinear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str):
        super().__init__()
        self.linear, self.activation = ConstantLinear(weight, bias), activation

    def forward(self, input: Tensor) -> Tensor:
        return activate(self.linear(input), self.activation)


class GeluLinear(ConstantLinear):
    """The gelu inside the matrix product: the widest activations are written once instead of twice."""

    def forward(self, input: Tensor) -> Tensor:
        return linear_gelu(input, self.weight, self.bias)


@torch.library.custom_op("adlm::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b), tanh form, inside the matrix product. CUDA only: elsewhere the same call has another gelu."""
    out = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class PaddedLinear(ConstantLinear):
    """A linear layer computed at the next aligned width; the columns beyond are cut off."""

    def __init__(self, linear: nn.Linear):
        more = -linear.out_features % ALIGNED
        bias = None if linear.bias is None else F.pad(linear.bias, (0, more))
        super().__init__(F.pad(linear.weight, (0, 0, 0, more)), bias)
        self.out_features = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[..., : self.out_features]


def pad_heads(model: Network) -> None:
    for name in ("head", "anchor_head"):
        head = getattr(model, name)
        if head is not None and head.out_features % ALIGNED:
            setattr(model, name, PaddedLinear(head))


class PackedLinear(nn.Module):
    """A linear layer whose weight oneDNN has laid out for its products: with few rows 1.6 to 3 times as fast on a
    CPU as torch's own, which lays it out at every call, or reads it as it is."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.out_features = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")


def can_pack() -> bool:
    """Whether this torch has oneDNN's products; tried on x86 only."""
    known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def pack(model: Network) -> None:
    """The float32 matrices of blocks and heads in oneDNN's layout."""
    for owner_name, owner in list(model.named_modules()):
        for name, linear in list(owner.named_children()):
            inside = ".blocks." in f"{owner_name}." and name != "modulation"
            plain = type(linear) in (nn.Linear, ConstantLinear) and linear.weight.dtype == torch.float32
            if plain and (inside or name in ("head", "anchor_head")):
                setattr(owner, name, PackedLinear(linear))  # type: ignore[arg-type]


class Constant(nn.Module):
    """A module whose input never changes."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def to_bfloat16(model: Network) -> None:
    """Linear weights, embedding and the frozen bridge in bf16; norms, modulations and noise level stay float32.
    Parameters are replaced and not converted: a folded network shares some with its original. A tied head stays one
    with the embedding."""
    tied = model.head.weight is model.embedding
    small = [part for name, part in model.named_modules() if name.endswith(("time_embedding", "modulation"))]
    keep = {id(m) for part in small for m in part.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module) not in keep:
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(p.to(torch.bfloat16), requires_grad=False))
    low = model.head.weight.detach() if tied else model.embedding.to(torch.bfloat16)
    model.embedding = nn.Parameter(low, requires_grad=False)
    for module in model.bridge.modules() if model.bridge is not None else ():
        for name, value in module.named_buffers(recurse=False):
            setattr(module, name, value.to(torch.bfloat16) if value.is_floating_point() else value)


def compile_blocks(model: Network) -> None:
    """Compile one block at a time and not the whole network: blocks are alike, so one compilation serves them all."""
    # The second size makes the batch dimension a variable: two or three compilations in all, not one per shape.
    allow_variants()
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        for block in stack.blocks:
            block.compile(fullgraph=True)
        stack.finish = torch.compile(stack.finish, fullgraph=True)  # type: ignore[method-assign]

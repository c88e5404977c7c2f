"""The network as the engine runs it: a copy with everything constant folded, in float32 or bf16.

The bridge has its inference form; norms and modulations of a network without time conditioning are part of the
weights. In bf16, weights are converted once (autocast would convert them at every step), heads are padded to a width
that matrix units handle fast, and the residual stream is bf16 too. In float32 on a CPU, the weights are converted to
oneDNN's layout once. Values change only by rounding.

The module starts with CUDA graphs, and copies to the device that do not make the host wait.
"""

import copy
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from adlm.errors import choose
from adlm.models import Network
from adlm.models.layers import (
    activate,
    allow_variants,
    fold_entry,
    fold_exit,
    modulations,
    normalise,
    pick_each,
    pick_flat,
    product_dtype,
)
from adlm.models.transformer import AttentionBlock, Block, Context, ResidualStream, Stack

# ---- from host to device without waiting -----------------------------------------------------------------------------
# CUDA graphs, and many small arrays in one copy.
#
# One switch controls the graphs. Off, a function runs as it is; on, each input shape is one graph launch. A network
# evaluation of one sequence is a few hundred kernels of microseconds each, so launching them one by one from Python
# costs more than running them. A captured graph replays them in one launch. Inputs are copied into the buffers that the
# graph was captured with. Outputs belong to the graph, and are valid until the next call with the same shapes.
# Capturing runs the function a few times, so a captured function must be repeatable.
#
# A copy that the host does not wait for must come from pinned memory; any other may wait for everything queued before.
# Pinning is slow, so a few buffers are reused in turn. That also limits how far the host runs ahead of the device.

# Static shapes: sequences of a call, and positions masked again before it
SEQUENCE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MASK_SIZES = (64, 1024)
WARM_UP = 3
AHEAD = 8  # copies in flight


def at_least(n: int, sizes: tuple[int, ...]) -> int:
    """The smallest static size that holds n; beyond the largest size, a multiple of it."""
    return next((s for s in sizes if s >= n), -(-n // sizes[-1]) * sizes[-1])


class Graphs:
    def __init__(self, on: bool):
        self.on = on
        # One pool for all graphs, so that they share the memory needed only while a graph runs. This is safe because
        # they run one after the other, and a graph that reads another's output is captured after it.
        self.pool = torch.cuda.graph_pool_handle() if on else None

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` replayed as CUDA graphs, if these are on. It takes tensors, Fixed tensors and plain hashable
        values, returns tensors (a tuple, which may contain None), and may change tensors that it holds itself."""
        return Captured(function, self.pool) if self.on else lambda *args: function(*map(unwrap, args))


class Fixed:
    """A tensor at a fixed address (the output of another graph), which is read in place, not copied."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def place(self) -> tuple[int, torch.Size]:
        return self.tensor.data_ptr(), self.tensor.shape


def unwrap(x: Any) -> Any:
    return x.tensor if isinstance(x, Fixed) else x


class Captured:
    def __init__(self, function: Callable[..., Any], pool: Any):
        self.function, self.pool = function, pool
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        key = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args)
        if key not in self.captured:
            self.captured[key] = self.capture(args)
        graph, inputs, outputs = self.captured[key]
        for buffer, tensor in zip(inputs, tensors):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return outputs

    def capture(self, args: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [a.clone() if isinstance(a, Tensor) else unwrap(a) for a in args]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and allocates outside the capture
            for _ in range(WARM_UP):
                self.function(*fixed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = self.function(*fixed)
        return graph, [f for f, a in zip(fixed, args) if isinstance(a, Tensor)], outputs


class Uploads:
    def __init__(self, device: torch.device):
        self.device, self.turn = device, 0
        self.buffers = [torch.empty(0, dtype=torch.int64)] * AHEAD
        self.copied = [torch.cuda.Event() for _ in range(AHEAD)] if device.type == "cuda" else []

    def __call__(self, *arrays: NDArray) -> list[Tensor]:
        """Copy arrays of 8-byte numbers to the device, with their shapes and dtypes."""
        sizes, flat = [a.size for a in arrays], [a.view(np.int64).ravel() for a in arrays]
        if not self.copied:
            sent = torch.from_numpy(np.concatenate(flat)).to(self.device)
        else:
            n, turn = sum(sizes), self.turn % AHEAD
            self.turn += 1
            self.copied[turn].synchronize()  # the copy from this buffer, AHEAD calls ago
            if self.buffers[turn].numel() < n:
                self.buffers[turn] = torch.empty(2 * n, dtype=torch.int64, pin_memory=True)
            host = self.buffers[turn][:n]
            np.concatenate(flat, out=host.numpy())
            sent = host.to(self.device, non_blocking=True)
            self.copied[turn].record()
        kinds = (torch.float64 if a.dtype == np.float64 else torch.int64 for a in arrays)
        return [part.view(kind).view(a.shape) for part, kind, a in zip(sent.split(sizes), kinds, arrays)]


# ---- the network -----------------------------------------------------------------------------------------------------

ALIGNED = 128


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def prepare(model: Network, device: torch.device, precision: str) -> tuple[Network, bool]:
    """(the network as the engine runs it, whether it is in bf16)."""
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
    """A copy that computes the same function with constants folded: the bridge, and norms and modulations unless
    time-conditioned. It shares the largest tensors, which do not change: embedding, heads and bridge. bf16 weights are
    all shared and not folded, since a product would be a second copy, rounded again."""
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
            # the modulation before a head: folding it would change two V x D matrices, to save two passes in all
            stack.modulation = Constant(stack.modulation(c_1C))  # type: ignore[assignment]
            stack.time_embedding = Constant(c_1C)  # type: ignore[assignment]
    return low


class FoldedBlock(AttentionBlock):
    """A trained block whose norm weights and modulations are part of its linear maps."""

    def __init__(self, block: Block, c_1C: Tensor | None, fused_gelu: bool):
        super().__init__()
        self.heads = block.heads
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
        if context.at_BQ is not None:  # attention has computed those queries only
            x_BLD = pick_each(x_BLD, context.at_BQ)
        elif context.at_N is not None:
            o_BLD, x_BLD = pick_flat(o_BLD, context.at_N), pick_flat(x_BLD, context.at_N)
        x_BLD = x_BLD + self.attn_out(o_BLD)
        return ResidualStream(x_BLD, self.mlp_out(self.mlp_in(self.normed(x_BLD))))

    def normed(self, x_BLD: Tensor) -> Tensor:
        return normalise(x_BLD, self.norm, product_dtype(x_BLD, self.qkv.weight), self.epsilon)


class ConstantLinear(nn.Linear):
    """A linear layer that is not trained, made from a weight and a bias."""

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
    """A linear layer with gelu inside the matrix product: the widest activations are written once, not twice."""

    def forward(self, input: Tensor) -> Tensor:
        return linear_gelu(input, self.weight, self.bias)


@torch.library.custom_op("adlm::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b), tanh form, inside the matrix product. CUDA only: elsewhere the same call uses another gelu."""
    out = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class PaddedLinear(ConstantLinear):
    """A linear layer computed at the next aligned width; extra columns are dropped."""

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
    """A linear layer whose weight is in oneDNN's layout: with few rows 1.6 to 3 times as fast on a CPU as torch's own,
    which converts the weight at every call or uses it unconverted."""

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
    """Convert the float32 matrices of blocks and heads to oneDNN's layout."""
    for owner_name, owner in list(model.named_modules()):
        for name, linear in list(owner.named_children()):
            inside = ".blocks." in f"{owner_name}." and name != "modulation"
            plain = type(linear) in (nn.Linear, ConstantLinear) and linear.weight.dtype == torch.float32
            if plain and (inside or name in ("head", "anchor_head")):
                setattr(owner, name, PackedLinear(linear))  # type: ignore[arg-type]


class Constant(nn.Module):
    """A module that returns a constant, for one whose input never changes."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def to_bfloat16(model: Network) -> None:
    """Convert linear weights, embedding and the frozen bridge to bf16; norms, modulations and noise level stay float32.
    Parameters are replaced, not converted in place: a folded network shares some with its original. A tied head stays
    tied to the embedding."""
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
    """Compile each block instead of the whole network: blocks are alike, so one compilation serves them all."""
    # The second size makes the batch dimension a variable: two or three compilations in all, not one per shape.
    allow_variants()
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        for block in stack.blocks:
            block.compile(fullgraph=True)
        stack.finish = torch.compile(stack.finish, fullgraph=True)  # type: ignore[method-assign]

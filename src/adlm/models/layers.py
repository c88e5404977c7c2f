"""Parts of a transformer: norm, rotary positions, dropout, noise-level embedding, adaLN modulation.

Letters: B sequences, L positions, D width, N heads, H head width, C width of the conditioning vector.

The module starts with what depends on the machine, such as the choice of the attention kernel.
"""

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.diffusion.random import coins32
from adlm.schema import ModelConfig

# ---- the machine -----------------------------------------------------------------------------------------------------
# What depends on the machine: the attention kernel of a GPU, what torch's compiler has to be told, peak FLOP/s.
#
# Flash and cuDNN compute the same function. Which one is faster depends on shape, card and version (cuDNN won by a
# quarter on an H200 at length 1024), so both are timed at the start, forward and backward.

VARIANTS = 64
ROUNDS = 3
"""Rounds in which the attention kernels are timed in turn: an idle GPU is slow at first."""


def use(kernel: str) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(kernel in ("flash", "any"))
    cuda.enable_cudnn_sdp(kernel in ("cudnn", "any"))
    cuda.enable_mem_efficient_sdp(True)  # masks (the KV cache) and odd shapes
    cuda.enable_math_sdp(True)


def choose_attention(batch: int, cfg: ModelConfig, device: torch.device, backward: bool = True) -> dict[str, float]:
    """Select the faster kernel for this process. Returns the milliseconds measured."""
    times: dict[str, float] = {}
    for kernel in ("flash", "cudnn") * ROUNDS:
        try:
            use(kernel)
            ms = milliseconds(attention_pass(batch, cfg, device, backward))
            times[kernel] = min(times.get(kernel, math.inf), ms)
        except RuntimeError:  # not built for this card or shape
            continue
    use(min(times, key=lambda k: times[k]) if times else "any")
    return times


def attention_kernel() -> str:
    """The kernel that was selected."""
    cuda = torch.backends.cuda
    enabled = {"flash": cuda.flash_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled()}
    return "any" if all(enabled.values()) else next((kernel for kernel, on in enabled.items() if on), "neither")


def attention_pass(batch: int, cfg: ModelConfig, device: torch.device, backward: bool) -> Callable[[], None]:
    """One attention in bf16, forward or both ways."""
    heads = (cfg.n_heads, cfg.kv_heads, cfg.kv_heads)
    shape = (batch, cfg.length, sum(heads), cfg.head_width)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=backward)

    def run() -> None:
        q, k, v = qkv.transpose(1, 2).split(heads, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cfg.causal, enable_gqa=heads[0] != heads[1])
        if backward:
            out.sum().backward()

    return run


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Average time of a call on the GPU."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. A CPU gives each page of 4 KB memory when it is first written, so a long cache costs what it holds. Large
    pages would spoil that: one number in each 2 MB, and all of it is there."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def allow_variants() -> None:
    """Raise torch's limit of compiled variants per function. Training and inference, first, middle and last blocks and
    every shape count, over all models of a process; beyond the limit of 8 a function just runs uncompiled."""
    import torch._dynamo  # imported only to compile: the compiler takes longer to import than the rest of torch

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


def training_options(most: bool) -> dict[str, Any]:
    """Options of torch.compile for training. `most`: try several kernels for each product."""
    import torch._inductor.config

    options: dict[str, Any] = {"max_autotune": True} if most else {}
    # torch 2.11 on CUDA may sum along rows and along columns in one kernel. If the column sums are parts of one
    # gradient (shift and scale of a modulation), it is never written. tests/plumbing/test_gpu.py has the case.
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options


# Dense bf16 peak of a device, FLOP/s, by a part of its name (vendor data sheets, without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40": 181e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name; None if unknown (MFU is then not reported)."""
    matches = [part for part in PEAK_FLOPS if part in device_name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


# ---- layers ----------------------------------------------------------------------------------------------------------

EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-6}


class _Normalise(torch.autograd.Function):
    """x / rms(x); a LayerNorm subtracts the mean first.

    The backward pass reads the output, which the next matrix product keeps anyway, not the input: under bf16 a norm
    then keeps 2 bytes per number, where autograd's own would keep 6.
    """

    @staticmethod
    def forward(ctx, x: Tensor, center: bool, epsilon: float, dtype: torch.dtype) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if center:
            wide = wide - wide.mean(-1, keepdim=True)
        r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        y = wide * r
        # torch 2.11: a compiled function that returns a conversion to the same dtype has no gradient
        if y.dtype != dtype:
            y = y.to(dtype)
        ctx.save_for_backward(y, r)
        ctx.center, ctx.dtype = center, x.dtype
        return y

    @staticmethod
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        y, r = ctx.saved_tensors
        g, y = grad_outputs[0].to(r.dtype), y.to(r.dtype)
        g_x = g - y * (g * y).mean(-1, keepdim=True)
        if ctx.center:
            g_x = g_x - g.mean(-1, keepdim=True)
        return (g_x * r).to(ctx.dtype), None, None, None


def normalise(x: Tensor, kind: str, dtype: torch.dtype, epsilon: float = 0.0) -> Tensor:
    """Normalise without a weight; `dtype` is that of the product that follows. epsilon 0: the default in EPSILON."""
    return _Normalise.apply(x, kind == "layernorm", epsilon or EPSILON[kind], dtype)  # type: ignore[return-value]


class Norm(nn.Module):
    """LayerNorm or RMSNorm with a weight and no bias, always computed in at least float32."""

    def __init__(self, width: int, kind: str, epsilon: float = 0.0):
        super().__init__()
        self.kind, self.epsilon = kind, epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return normalise(x, self.kind, dtype, self.epsilon) * self.weight


class Rotary(nn.Module):
    """Rotary positions, half-split layout (the first half of a head is paired with the second). Its tables hold numbers
    even in a model on the meta device."""

    cos_LH: Tensor
    sin_LH: Tensor

    def __init__(self, head_width: int, length: int, base: float = 10000.0):
        super().__init__()
        # float64: at position 1023 a float32 angle is already off by 1e-4
        inverse_H = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width)
        angle_LH = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), inverse_H)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos_LH", angle_LH.cos().to(dtype), persistent=False)
        self.register_buffer("sin_LH", angle_LH.sin().to(dtype), persistent=False)

    def tables(self, length: int, positions_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin, broadcastable to [B, L, N, H/2]."""
        at = slice(length) if positions_BL is None else positions_BL
        return self.cos_LH[at].unsqueeze(-2), self.sin_LH[at].unsqueeze(-2)


def rotate(x_BLNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BLNH.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BLNH.dtype)


# In a compiled kernel that moves only a few bytes per number, arithmetic counts too. Instructions on Hopper: gelu by
# tanh 31, by a sigmoid 24; dropout by torch's generator 65, by our 32-bit hash 18, which also needs no stored mask.


def gelu(x: Tensor) -> Tensor:
    """x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2 u): one exponential."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def activate(h: Tensor, activation: str) -> Tensor:
    """The nonlinearity of the MLP: relu2, swiglu (the first half is the gate) or gelu (tanh form)."""
    if activation == "relu2":
        return F.relu(h).square()
    if activation == "swiglu":
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    assert activation == "gelu", activation
    return gelu(h) if torch.compiler.is_compiling() and h.is_cuda else F.gelu(h, approximate="tanh")


def dropout(x: Tensor, p: float, key_2: Tensor) -> Tensor:
    """Dropout whose mask is a hash of key and position: nothing random is kept for the backward pass."""
    position = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    return torch.where(coins32(key_2, position, p), 0, x * (1 / (1 - p)))


class TimeEmbedding(nn.Module):
    """Noise level sigma -> conditioning vector: sinusoids, a two-layer MLP, SiLU."""

    frequencies: Tensor
    N_SINUSOIDS = 256

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.N_SINUSOIDS, width), nn.SiLU(), nn.Linear(width, width))
        half = self.N_SINUSOIDS // 2
        exponent = torch.arange(half, dtype=torch.float64, device="cpu") / half
        frequencies = torch.exp(-math.log(10000.0) * exponent).to(torch.get_default_dtype())
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, sigma_B: Tensor) -> Tensor:
        angle = sigma_B.to(self.frequencies.dtype)[:, None] * self.frequencies
        return F.silu(self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1)))


class Modulation(NamedTuple):
    """The adaLN vectors of one branch. Each is [B, 1, D], [1, 1, D] if all sequences share it, or [1, N, D] for chosen
    positions."""

    shift: Tensor
    scale: Tensor
    gate: Tensor = None  # type: ignore[assignment]
    """Not used before a head."""

    def apply(self, h_BLD: Tensor) -> Tensor:
        return h_BLD * (1 + self.scale) + self.shift


def modulations(
    linear: nn.Module | None, c_BC: Tensor | None, branches: int, parts: int = 3
) -> list[Modulation | None]:
    """The modulation of each branch, from the conditioning vector; None without adaLN."""
    if linear is None or c_BC is None:
        return [None] * branches
    # a tiny product that scales every activation: not worth rounding to bf16
    with torch.autocast(c_BC.device.type, enabled=False):
        vectors = linear(c_BC).unsqueeze(1).chunk(branches * parts, dim=-1)
    return [Modulation(*vectors[i * parts : (i + 1) * parts]) for i in range(branches)]


def modulation_at(modulation: Modulation | None, at_N: Tensor, length: int) -> Modulation | None:
    """The modulation of each position that `pick_flat` picks, taken from its sequence: [1, N, D]."""
    if modulation is None or modulation.shift.shape[0] == 1:
        return modulation
    sequence_N = at_N // length
    return Modulation(*(None if v is None else v[sequence_N].transpose(0, 1) for v in modulation))  # type: ignore[arg-type]


# A modulation that all sequences share is a vector, like the norm's weight: a product with a diagonal matrix, which can
# be folded into the weights of the linear map next to it. The activations then need a plain norm and a plain sum only.
# Each folded vector saves the sum of its gradient over all positions, and the activations kept for that sum.


def enter(x_BLD: Tensor, norm: Norm, modulation: Modulation | None, linear: nn.Linear) -> Tensor:
    """linear(norm(x) * (1 + scale) + shift)."""
    if not folds(x_BLD, modulation, linear):
        h_BLD = norm(x_BLD) if modulation is None else modulation.apply(norm(x_BLD))
        return linear(h_BLD.to(product_dtype(h_BLD, linear.weight)))
    weight, bias = fold_entry(norm, modulation, linear)
    return F.linear(normalise(x_BLD, norm.kind, product_dtype(x_BLD, weight), norm.epsilon), weight, bias)


def leave(h_BLE: Tensor, linear: nn.Linear, modulation: Modulation | None) -> Tensor:
    """gate * linear(h)."""
    if modulation is None:
        return linear(h_BLE)
    if not folds(h_BLE, modulation, linear):
        return modulation.gate * linear(h_BLE)
    return F.linear(h_BLE, *fold_exit(linear, modulation))


def folds(x_BLD: Tensor, modulation: Modulation | None, linear: nn.Linear) -> bool:
    """Whether the vectors are folded into the weights. All sequences must share them; the weight must be the whole map
    (an adapter adds to it); it must not be bf16 already, which would round it twice; and positions must outnumber its
    rows (a decoder that reads one token at a time has fewer activations than weights)."""
    shared = modulation is None or modulation.shift.shape[:-1].numel() == 1
    plain = type(linear) is nn.Linear and linear.weight.dtype != torch.bfloat16
    return shared and plain and x_BLD.shape[0] * x_BLD.shape[1] >= linear.out_features


def fold_entry(norm: Norm, modulation: Modulation | None, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of `enter` as a map of the normalised x."""
    if modulation is None:
        return linear.weight * norm.weight, linear.bias
    through = (linear.weight * modulation.shift.view(-1)).sum(-1)
    bias = through if linear.bias is None else linear.bias + through
    return linear.weight * (norm.weight * (1 + modulation.scale.view(-1))), bias


def fold_exit(linear: nn.Linear, modulation: Modulation | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of `leave` as one linear map."""
    if modulation is None:
        return linear.weight, linear.bias
    gate_D = modulation.gate.view(-1)
    return gate_D[:, None] * linear.weight, None if linear.bias is None else gate_D * linear.bias


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of a linear map of x: autocast's, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


# If few positions are read, they are gathered in one of two forms. A loss reads a different number of positions in each
# sequence: one flat list, whose backward pass needs no sums. A sampler reads about the same number in each sequence: a
# rectangle, so that attention computes those queries alone.


class _Pick(torch.autograd.Function):
    """Select distinct rows of a matrix. Since none repeats, gradients need not be added up, as torch's own would be."""

    @staticmethod
    def forward(ctx, x_MD: Tensor, at_N: Tensor) -> Tensor:
        ctx.save_for_backward(at_N)
        ctx.rows = x_MD.shape[0]
        return x_MD.index_select(0, at_N)

    @staticmethod
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        (at_N,) = ctx.saved_tensors
        (g_ND,) = grad_outputs
        return g_ND.new_zeros(ctx.rows, g_ND.shape[1]).index_copy(0, at_N, g_ND), None


def pick_flat(x_BLD: Tensor, at_N: Tensor) -> Tensor:
    """Gather positions of all sequences as if they were one sequence: [1, N, D]. They are indices into the flattened
    [B * L], and must all be different."""
    return _Pick.apply(x_BLD.flatten(0, 1), at_N).unsqueeze(0)  # type: ignore[union-attr]


def pick_each(x_BLD: Tensor, at_BQ: Tensor) -> Tensor:
    """Gather the same number of positions from each sequence: [B, Q, D]."""
    return x_BLD.gather(1, at_BQ.unsqueeze(-1).expand(-1, -1, x_BLD.shape[-1]))

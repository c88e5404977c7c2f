"""Parts of a transformer block. The published block and a modern one are the same class under different options.

Letters: B rows, L positions, D width, N heads, H head width, C width of the conditioning vector.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.diffusion.uniforms import coins32
from adlm.schema import ModelConfig

EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-6}


class _Normalise(torch.autograd.Function):
    """x / rms(x), for a LayerNorm after taking away the mean.

    The backward pass reads the output, which the next matrix product keeps anyway, and not the input: under bf16 a
    norm then keeps 2 bytes per number where autograd's own would keep 6.
    """

    @staticmethod
    def forward(ctx, x: Tensor, center: bool, epsilon: float, dtype: torch.dtype) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if center:
            wide = wide - wide.mean(-1, keepdim=True)
        r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        y = wide * r
        # torch 2.11 compiles a function that returns a conversion to the same type without gradient
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


class Norm(nn.Module):
    """LayerNorm or RMSNorm with a weight and no bias, always computed in at least float32."""

    weight: nn.Parameter | None

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(width))
        """None once an inference copy has put it into the weights of the map that follows."""

    def normalise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Without the weight, in the precision of the product that follows."""
        return _Normalise.apply(x, self.kind == "layernorm", EPSILON[self.kind], dtype)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalise(x, torch.promote_types(x.dtype, torch.float32))
        return y if self.weight is None else y * self.weight


class Rotary(nn.Module):
    """Rotary positions, half-split layout (the first half of a head is paired with the second), base 10000."""

    cos_LH: Tensor
    sin_LH: Tensor

    def __init__(self, head_width: int, length: int):
        super().__init__()
        # float64 on the way: at position 1023 a float32 angle is off by 1e-4 already
        inverse_H = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angle_LH = torch.outer(torch.arange(length, dtype=torch.float64), inverse_H)
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


# Where a compiled kernel reads and writes a few bytes a number, its arithmetic counts too (instructions on Hopper):
# gelu by tanh 31, by a sigmoid 24; dropout by torch's generator 65, by our 32-bit hash 18, and no mask is kept.


def gelu(x: Tensor) -> Tensor:
    """x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2 u): one exponential."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


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
        exponent = torch.arange(half, dtype=torch.float64) / half
        frequencies = torch.exp(-math.log(10000.0) * exponent).to(torch.get_default_dtype())
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, sigma_B: Tensor) -> Tensor:
        angle = sigma_B.to(self.frequencies.dtype)[:, None] * self.frequencies
        return F.silu(self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1)))


@dataclass
class LayerCache:
    """Keys and values of one block for the tokens seen so far; rows may be at different positions."""

    k_BNLH: Tensor
    v_BNLH: Tensor

    def extend(self, k_BNlH: Tensor, v_BNlH: Tensor, positions_Bl: Tensor) -> tuple[Tensor, Tensor]:
        index = positions_Bl[:, None, :, None].expand_as(k_BNlH)
        self.k_BNLH.scatter_(2, index, k_BNlH.to(self.k_BNLH.dtype))
        self.v_BNLH.scatter_(2, index, v_BNlH.to(self.v_BNLH.dtype))
        return self.k_BNLH, self.v_BNLH


class Block(nn.Module):
    """Attention and MLP, each behind a norm, added to the residual stream.

    With adaLN the conditioning vector c shifts and scales both norms and gates both branches. Without time
    conditioning c is one row for the whole batch, so its six modulations are vectors, folded into the weights.

    A block leaves its last branch to whatever comes next: the sum is then part of the norm that reads it, one pass over
    the stream instead of two, also where every block is compiled by itself.

    With `value_residual` the first block of a stream gives its attention values to all later ones, and each of these
    attends to a v + b v_1: a plain path from the tokens to every depth, which starts as the mean of both.

    With `skips` the last block of a stream reads what stood in it after the first one, too, the second to last after
    the second, and so on: x + s x_i. s starts at 0: the model starts as the plain one, whose scale of the stream is the
    one that all other starting values were chosen for.
    """

    def __init__(self, cfg: ModelConfig, place: int, depth: int):
        """`place`: among the `depth` blocks of one residual stream, from 0."""
        super().__init__()
        D = cfg.hidden_size
        self.n_heads = cfg.n_heads
        self.causal = cfg.causal
        self.activation = cfg.activation
        self.dropout = cfg.dropout
        self.norm1 = Norm(D, cfg.norm)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.attn_out = nn.Linear(D, D, bias=False)
        self.norm2 = Norm(D, cfg.norm)
        self.mlp_in = nn.Linear(D, cfg.mlp_ratio * D, bias=cfg.bias)
        self.mlp_out = nn.Linear(cfg.mlp_ratio * D, D, bias=cfg.bias)
        self.q_norm = Norm(D // cfg.n_heads, "rmsnorm") if cfg.qk_norm else None
        self.k_norm = Norm(D // cfg.n_heads, "rmsnorm") if cfg.qk_norm else None
        self.modulation = nn.Linear(cfg.cond_dim, 6 * D) if cfg.adaln else None
        self.gives_values = cfg.value_residual and place == 0
        # (a, b), and s: vectors, since FSDP does not shard parameters without a dimension
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if cfg.value_residual and place > 0 else None
        # The block at the other end of a skip is so many places ahead, or behind. Neighbours, in the middle of an even
        # number of blocks, have none: it would pass over no block.
        ahead = depth - 1 - 2 * place
        self.leaves_skip = cfg.skips and ahead > 1
        self.skip = nn.Parameter(torch.zeros(1)) if cfg.skips and ahead < -1 else None

    def attention(
        self, qkv_BLE: Tensor, cos: Tensor, sin: Tensor, cache, positions_BL, mask, at_BQ, values_BLD
    ) -> Tensor:
        B, L, E = qkv_BLE.shape
        q_BLNH, k_BLNH, v_BLNH = qkv_BLE.view(B, L, 3, self.n_heads, E // (3 * self.n_heads)).unbind(2)
        if self.value_mix is not None:
            a, b = self.value_mix  # without a dimension, in which float32 leaves bf16 values bf16
            v_BLNH = a * v_BLNH + b * values_BLD.view(v_BLNH.shape)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH).to(v_BLNH.dtype), self.k_norm(k_BLNH).to(v_BLNH.dtype)
        # Rotated before heads and positions change places: a kernel writes its output in the order of its queries, and
        # in this order it is the input of the next product as it lies.
        q_BLNH, k_BLNH = rotate(q_BLNH, cos, sin), rotate(k_BLNH, cos, sin)
        if at_BQ is not None:
            assert not self.causal
            q_BLNH = activations_at(q_BLNH.flatten(2), at_BQ).unflatten(2, q_BLNH.shape[2:])
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if cache is None:
            o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=self.causal)
        else:
            k_BNLH, v_BNLH = cache.extend(k_BNLH, v_BNLH, positions_BL)
            q_BNLH = q_BNLH.to(k_BNLH.dtype)
            o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, attn_mask=mask)
        return o_BNLH.transpose(1, 2).flatten(2)

    def activate(self, h: Tensor) -> Tensor:
        if self.activation == "done":  # by the linear map before it, in an inference copy
            return h
        if self.activation == "relu2":
            return F.relu(h).square()
        return gelu(h) if torch.compiler.is_compiling() and h.is_cuda else F.gelu(h, approximate="tanh")

    def drop(self, branch_BLD: Tensor, key: Tensor | None) -> Tensor:
        if key is not None and torch.compiler.is_compiling():
            return dropout(branch_BLD, self.dropout, key)
        return F.dropout(branch_BLD, self.dropout, self.training)

    def forward(
        self,
        x_BLD: Tensor,
        due_BLD: Tensor | None,
        c_BC: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        positions_BL: Tensor | None = None,
        mask: Tensor | None = None,
        keys: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
        at: Tensor | None = None,
        values_BLD: Tensor | None = None,
        skip_BLD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stream and what is still to be added to it, of the block before and of this one; from the first block
        of a value residual also `values_BLD`, which later ones get.

        `keys`: of dropout. `at`: the positions that somebody reads after this block (see `activations_at`); what comes
        after attention, or after its keys and values, is computed for them alone. `skip_BLD`: an earlier stream.
        """
        x_BLD = settle(x_BLD, due_BLD)
        if self.skip is not None:
            assert skip_BLD is not None
            x_BLD = x_BLD + self.skip[0] * skip_BLD
        attend, feed = modulations(self.modulation, c_BC, 2)
        qkv_BLE = enter(x_BLD, self.norm1, attend, self.qkv)
        asks = at if at is not None and at.ndim == 2 else None
        o_BLD = self.attention(qkv_BLE, cos, sin, cache, positions_BL, mask, asks, values_BLD)
        if at is not None:
            L = x_BLD.shape[1]
            attend, feed = modulation_at(attend, at, L), modulation_at(feed, at, L)
            o_BLD, x_BLD = o_BLD if asks is not None else activations_at(o_BLD, at), activations_at(x_BLD, at)
        x_BLD = x_BLD + self.drop(leave(o_BLD, self.attn_out, attend), keys[0])
        h_BLF = self.activate(enter(x_BLD, self.norm2, feed, self.mlp_in))
        given_BLD = qkv_BLE.chunk(3, dim=-1)[2] if self.gives_values else None
        return x_BLD, self.drop(leave(h_BLF, self.mlp_out, feed), keys[1]), given_BLD


def settle(x_BLD: Tensor, due_BLD: Tensor | None) -> Tensor:
    """The residual stream with the branch that was left to be added; none was before the first block."""
    return x_BLD if due_BLD is None else x_BLD + due_BLD


class _Pick(torch.autograd.Function):
    """Some rows of a matrix, all different: then their gradients need not be added up, as torch's own would."""

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


def activations_at(x_BLD: Tensor, at: Tensor) -> Tensor:
    """At [B, Q]: those positions of each row, [B, Q, D]. At [N]: positions of all rows, flattened, as if they were one
    row: [1, N, D] (a loss scores another number in each row). Gradients need all positions different."""
    if at.ndim == 2:
        return x_BLD.gather(1, at.unsqueeze(-1).expand(-1, -1, x_BLD.shape[-1]))
    return _Pick.apply(x_BLD.flatten(0, 1), at).unsqueeze(0)  # type: ignore[union-attr]


class Modulation(NamedTuple):
    """What adaLN does to one branch, each [B, 1, D], or [1, 1, D] where all rows share it ([1, N, D] for chosen
    positions)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor = None  # type: ignore[assignment]
    """Not used before a head."""


def modulation_at(modulation: Modulation | None, at: Tensor, length: int) -> Modulation | None:
    """For `activations_at`: of each position that of its row, [1, N, D]; as it is where rows are still apart."""
    if modulation is None or modulation.shift.shape[0] == 1 or at.ndim == 2:
        return modulation
    row_N = at // length
    return Modulation(*(None if v is None else v[row_N].transpose(0, 1) for v in modulation))  # type: ignore[arg-type]


def modulations(
    linear: nn.Module | None, c_BC: Tensor | None, branches: int, parts: int = 3
) -> list[Modulation | None]:
    """The modulation of each branch, from the conditioning vector; None without adaLN."""
    if linear is None or c_BC is None:
        return [None] * branches
    # tiny, and it scales every activation: not worth rounding to bf16
    with torch.autocast(c_BC.device.type, enabled=False):
        vectors = linear(c_BC).unsqueeze(1).chunk(branches * parts, dim=-1)
    return [Modulation(*vectors[i * parts : (i + 1) * parts]) for i in range(branches)]


# Modulations that all rows share are vectors, like the norm's weight: products with diagonal matrices, which can go
# into the weights of the linear map next to them. What is left for the activations is a plain norm and a plain sum;
# what is saved, for every vector, is its gradient's sum over all positions and the activations kept for that.


def enter(x_BLD: Tensor, norm: Norm, modulation: Modulation | None, linear: nn.Linear) -> Tensor:
    """linear(norm(x) * (1 + scale) + shift)."""
    if norm.weight is None:  # an inference copy: everything is in the weights of the map already
        return linear(norm.normalise(x_BLD, product_dtype(x_BLD, linear.weight)))
    if not folds(x_BLD, modulation, linear):
        return linear(modulate(norm(x_BLD), modulation))
    weight, bias = fold_entry(norm, modulation, linear)
    return F.linear(norm.normalise(x_BLD, product_dtype(x_BLD, weight)), weight, bias)


def leave(h_BLE: Tensor, linear: nn.Linear, modulation: Modulation | None) -> Tensor:
    """gate * linear(h)."""
    if modulation is None:
        return linear(h_BLE)
    if not folds(h_BLE, modulation, linear):
        return modulation.gate * linear(h_BLE)
    return F.linear(h_BLE, *fold_exit(linear, modulation))


def folds(x_BLD: Tensor, modulation: Modulation | None, linear: nn.Linear) -> bool:
    """Whether the vectors go into the weights: they must be shared, and positions outnumber rows of the matrix (a
    decoder that reads one token at a time has fewer activations than weights)."""
    shared = modulation is None or modulation.shift.shape[:-1].numel() == 1
    return shared and x_BLD.shape[0] * x_BLD.shape[1] >= linear.out_features


def fold_entry(norm: Norm, modulation: Modulation | None, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of `enter` as a map of the normalised x."""
    assert norm.weight is not None
    if modulation is None:
        return linear.weight * norm.weight, linear.bias
    through = (linear.weight * modulation.shift.view(-1)).sum(-1)
    bias = through if linear.bias is None else linear.bias + through
    return linear.weight * (norm.weight * (1 + modulation.scale.view(-1))), bias


def fold_exit(linear: nn.Linear, modulation: Modulation | None) -> tuple[Tensor, Tensor | None]:
    if modulation is None:
        return linear.weight, linear.bias
    gate_D = modulation.gate.view(-1)
    return gate_D[:, None] * linear.weight, None if linear.bias is None else gate_D * linear.bias


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Of a linear map of x: autocast's, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def modulate(h_BLD: Tensor, modulation: Modulation | None) -> Tensor:
    return h_BLD if modulation is None else h_BLD * (1 + modulation.scale) + modulation.shift

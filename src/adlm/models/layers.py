"""Parts of a transformer block. The published block and a modern one are the same class under different options.

Letters: B rows, L positions, D width, N heads, H head width, C width of the conditioning vector.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.schema import ModelConfig


class Norm(nn.Module):
    """LayerNorm or RMSNorm with a weight and no bias, always computed in at least float32."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            x = x.float()
        if self.kind == "rmsnorm":
            return F.rms_norm(x, (x.shape[-1],), self.weight, eps=1e-6)
        return F.layer_norm(x, (x.shape[-1],), self.weight, eps=1e-5)


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
        """cos and sin, broadcastable to [B, N, L, H/2]."""
        if positions_BL is None:
            return self.cos_LH[:length], self.sin_LH[:length]
        return self.cos_LH[positions_BL].unsqueeze(1), self.sin_LH[positions_BL].unsqueeze(1)


def rotate(x_BNLH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BNLH.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BNLH.dtype)


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
    conditioning c is one row for the whole batch, so its six modulations are computed once and not per example.
    """

    def __init__(self, cfg: ModelConfig):
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

    def attention(self, h_BLD: Tensor, cos: Tensor, sin: Tensor, cache, positions_BL, mask) -> Tensor:
        B, L, D = h_BLD.shape
        qkv = self.qkv(h_BLD).view(B, L, 3, self.n_heads, D // self.n_heads)
        q_BNLH, k_BNLH, v_BNLH = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.q_norm is not None and self.k_norm is not None:
            q_BNLH, k_BNLH = self.q_norm(q_BNLH).to(v_BNLH.dtype), self.k_norm(k_BNLH).to(v_BNLH.dtype)
        q_BNLH, k_BNLH = rotate(q_BNLH, cos, sin), rotate(k_BNLH, cos, sin)
        if cache is None:
            o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=self.causal)
        else:
            k_BNLH, v_BNLH = cache.extend(k_BNLH, v_BNLH, positions_BL)
            q_BNLH = q_BNLH.to(k_BNLH.dtype)
            o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, attn_mask=mask)
        return self.attn_out(o_BNLH.transpose(1, 2).reshape(B, L, D))

    def mlp(self, h_BLD: Tensor) -> Tensor:
        h = self.mlp_in(h_BLD)
        h = F.gelu(h, approximate="tanh") if self.activation == "gelu" else F.relu(h).square()
        return self.mlp_out(h)

    def forward(
        self,
        x_BLD: Tensor,
        c_BC: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        positions_BL: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        attend, feed = None, None  # (shift, scale, gate) of each branch
        if self.modulation is not None and c_BC is not None:
            modulations = self.modulation(c_BC).unsqueeze(1).chunk(6, dim=-1)
            attend, feed = modulations[:3], modulations[3:]
        h_BLD = pre_norm(x_BLD, self.norm1, attend)
        x_BLD = self.add(x_BLD, self.attention(h_BLD, cos, sin, cache, positions_BL, mask), attend)
        return self.add(x_BLD, self.mlp(pre_norm(x_BLD, self.norm2, feed)), feed)

    def add(self, x_BLD: Tensor, y_BLD: Tensor, modulation: tuple[Tensor, ...] | None) -> Tensor:
        y_BLD = F.dropout(y_BLD, self.dropout, self.training)
        return x_BLD + (y_BLD if modulation is None else modulation[2] * y_BLD)


def pre_norm(x_BLD: Tensor, norm: Norm, modulation: tuple[Tensor, ...] | None) -> Tensor:
    """The norm, then h * (1 + scale) + shift."""
    h_BLD = norm(x_BLD)
    return h_BLD if modulation is None else h_BLD * (1 + modulation[1]) + modulation[0]

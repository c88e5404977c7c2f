"""What a block does to each number, or pair of numbers, between its matrix products: written for a compiler to fuse.

Letters as in `layers`; E = 3 D, the width of queries, keys and values together.
"""

import math

import torch
from torch import Tensor

from adlm.diffusion.uniforms import coins32

# gelu(x) = x (1 + tanh u) / 2 with u = GELU_SCALE (x + GELU_CUBE x^3)
GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), for the results of an autograd.Function: torch 2.11 compiles one that returns a conversion to the
    same type without gradient."""
    return x if x.dtype == dtype else x.to(dtype)


def split_heads(qkv_BLE: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, L, E = qkv_BLE.shape
    q_BLNH, k_BLNH, v_BLNH = qkv_BLE.view(B, L, 3, n_heads, E // (3 * n_heads)).unbind(2)
    return q_BLNH, k_BLNH, v_BLNH


def rotate(x_BLNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BLNH.to(cos.dtype).chunk(2, dim=-1)
    return cast(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), x_BLNH.dtype)


# Where a compiled kernel reads and writes a few bytes a number, its arithmetic counts too (instructions on Hopper):
# gelu by tanh 31, by a sigmoid 24; dropout by torch's generator 65, by our 32-bit hash 18, and no mask is kept.


def gelu(x: Tensor) -> Tensor:
    """The tanh form, written as x sigmoid(2 u): one exponential."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    u = GELU_SCALE * (wide + GELU_CUBE * wide**3)
    return cast(wide * torch.sigmoid(2 * u), x.dtype)


def dropout(x: Tensor, p: float, key_2: Tensor) -> Tensor:
    """Dropout whose mask is a hash of key and position: nothing random is kept for the backward pass."""
    position = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    return torch.where(coins32(key_2, position, p), 0, x * (1 / (1 - p)))

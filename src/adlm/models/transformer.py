"""One stack of blocks: bidirectional or causal, time-conditioned or not, with its own final norm.

Letters as in layers.py. The published block and a modern one are the same class under different options.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adlm.models.blockwise import Mask, attend_by_tiles
from adlm.models.layers import (
    Modulation,
    Norm,
    Rotary,
    TimeEmbedding,
    activate,
    dropout,
    enter,
    leave,
    modulation_at,
    modulations,
    pick_each,
    pick_flat,
    rotate,
)
from adlm.schema import ModelConfig


@dataclass
class LayerCache:
    """Keys and values of one block for the tokens seen so far; sequences may be at different positions."""

    k_BNLH: Tensor
    v_BNLH: Tensor
    visible: int = 0
    """How many leading entries attention reads; 0: all. Whoever knows that the others are empty saves time by it."""

    @property
    def reach(self) -> int:
        return self.visible or self.k_BNLH.shape[2]

    def extend(self, k_BNlH: Tensor, v_BNlH: Tensor, positions_Bl: Tensor) -> tuple[Tensor, Tensor]:
        row_B1 = torch.arange(len(positions_Bl), device=positions_Bl.device)[:, None]
        for kept, new in ((self.k_BNLH, k_BNlH), (self.v_BNLH, v_BNlH)):
            kept[row_B1, :, positions_Bl] = new.transpose(1, 2).to(kept.dtype)  # compiled in place, as a scatter is not
        return self.k_BNLH[:, :, : self.reach], self.v_BNLH[:, :, : self.reach]


class ResidualStream(NamedTuple):
    """The residual stream between two blocks.

    A block leaves its last branch pending: the sum is then part of the norm that reads it, one pass over the stream
    instead of two, also where every block is compiled by itself.
    """

    x_BLD: Tensor
    pending_BLD: Tensor | None = None
    """The pending residual, still to be added; None before the first block."""

    def total(self) -> Tensor:
        return self.x_BLD if self.pending_BLD is None else self.x_BLD + self.pending_BLD


class Context(NamedTuple):
    """What a block reads beside the stream: tensors only, so that one compilation serves all blocks."""

    cos: Tensor
    sin: Tensor
    """Rotary tables."""
    c_BC: Tensor | None = None
    """Conditioning vector, with adaLN."""
    cache: LayerCache | None = None
    """Keys and values read before, with `positions_BL` of the new tokens."""
    positions_BL: Tensor | None = None
    mask: Mask | None = None
    """What each position may attend to, broadcastable to [B, N, l, L]; None: everything, or the past if causal."""
    keys: tuple[Tensor, Tensor] | None = None
    """Dropout keys of the two branches; None: torch's own dropout."""
    at_N: Tensor | None = None
    """The positions that are read after this block (`pick_flat`): what follows attention is computed for them alone."""
    at_BQ: Tensor | None = None
    """The same for a sampler (`pick_each`): what follows keys and values is computed for them alone."""


class AttentionBlock(nn.Module):
    """What a block and its inference form (engine/prepare.py) have in common."""

    heads: tuple[int, int, int]
    """Heads of queries, keys and values: rows of `qkv` in this order, a head's side by side."""
    causal: bool
    q_norm: Norm | None
    k_norm: Norm | None

    def attention(self, qkv_BLE: Tensor, context: Context) -> Tensor:
        B, L, E = qkv_BLE.shape
        q_BLNH, k_BLNH, v_BLNH = qkv_BLE.view(B, L, -1, E // sum(self.heads)).split(self.heads, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH).to(v_BLNH.dtype), self.k_norm(k_BLNH).to(v_BLNH.dtype)
        # Rotated before heads and positions change places: a kernel writes its output in the order of its queries, and
        # in this order it is the input of the next product as it lies.
        q_BLNH, k_BLNH = rotate(q_BLNH, context.cos, context.sin), rotate(k_BLNH, context.cos, context.sin)
        if context.at_BQ is not None:
            assert not self.causal
            q_BLNH = pick_each(q_BLNH.flatten(2), context.at_BQ).unflatten(2, q_BLNH.shape[2:])
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if context.cache is not None:
            assert context.positions_BL is not None
            k_BNLH, v_BNLH = context.cache.extend(k_BNLH, v_BNLH, context.positions_BL)
            q_BNLH = q_BNLH.to(k_BNLH.dtype)
        return attend(q_BNLH, k_BNLH, v_BNLH, context.mask, self.causal).transpose(1, 2).flatten(2)


def attend(q_BNlH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask | None, causal: bool) -> Tensor:
    """Attention of N heads of queries to K heads of keys and values, each shared by N / K of them. `mask` as in
    Context."""
    N, K, l = q_BNlH.shape[1], k_BKLH.shape[1], q_BNlH.shape[2]
    if mask is not None and not isinstance(mask, Tensor):
        return attend_by_tiles(q_BNlH, k_BKLH, v_BKLH, mask)
    is_causal = causal and mask is None
    if N > K and l * N <= k_BKLH.shape[2] * K and not is_causal and (mask is None or mask.shape[1] == 1):
        # Few queries: heads that share keys are more queries of one head, and no key is repeated.
        shared_BKMH = q_BNlH.unflatten(1, (K, N // K)).flatten(2, 3)
        again = mask
        if mask is not None and mask.shape[2] != l * (N // K):  # else whoever made it has done so, once for all layers
            again = mask.expand(-1, -1, l, -1).repeat(1, 1, N // K, 1)
        out_BKMH = F.scaled_dot_product_attention(shared_BKMH, k_BKLH, v_BKLH, again)
        return out_BKMH.unflatten(2, (N // K, l)).flatten(1, 2)
    return F.scaled_dot_product_attention(q_BNlH, k_BKLH, v_BKLH, mask, is_causal=is_causal, enable_gqa=N > K)


class Block(AttentionBlock):
    """Attention and MLP, each behind a norm, added to the residual stream.

    With adaLN the conditioning vector c shifts and scales both norms and gates both branches. Without time
    conditioning c is one vector for the whole batch, so its six modulations are folded into the weights.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, H = cfg.hidden_size, cfg.head_width
        self.heads = (cfg.n_heads, cfg.kv_heads, cfg.kv_heads)
        self.causal = cfg.causal
        self.activation = cfg.activation
        self.dropout = cfg.dropout
        self.norm1 = Norm(D, cfg.norm, cfg.norm_eps)
        self.qkv = nn.Linear(D, sum(self.heads) * H, bias=cfg.qkv_bias)
        self.attn_out = nn.Linear(cfg.n_heads * H, D, bias=False)
        self.norm2 = Norm(D, cfg.norm, cfg.norm_eps)
        self.mlp_in = nn.Linear(D, cfg.mlp_rows, bias=cfg.bias)
        self.mlp_out = nn.Linear(cfg.mlp_width, D, bias=cfg.bias)
        self.q_norm = Norm(H, "rmsnorm", cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = Norm(H, "rmsnorm", cfg.norm_eps) if cfg.qk_norm else None
        self.modulation = nn.Linear(cfg.cond_dim, 6 * D) if cfg.adaln else None

    def drop(self, branch_BLD: Tensor, key: Tensor | None) -> Tensor:
        if key is not None and torch.compiler.is_compiling():
            return dropout(branch_BLD, self.dropout, key)
        return F.dropout(branch_BLD, self.dropout, self.training)

    def forward(self, stream: ResidualStream, context: Context) -> ResidualStream:
        x_BLD = stream.total()
        attend, feed = modulations(self.modulation, context.c_BC, 2)
        key1, key2 = (None, None) if context.keys is None else context.keys
        o_BLD = self.attention(enter(x_BLD, self.norm1, attend, self.qkv), context)
        if context.at_BQ is not None:  # attention has answered those queries only
            x_BLD = pick_each(x_BLD, context.at_BQ)
        elif context.at_N is not None:
            at_N, L = context.at_N, x_BLD.shape[1]
            o_BLD, x_BLD = pick_flat(o_BLD, at_N), pick_flat(x_BLD, at_N)
            attend, feed = modulation_at(attend, at_N, L), modulation_at(feed, at_N, L)
        x_BLD = x_BLD + self.drop(leave(o_BLD, self.attn_out, attend), key1)
        h_BLF = activate(enter(x_BLD, self.norm2, feed, self.mlp_in), self.activation)
        return ResidualStream(x_BLD, self.drop(leave(h_BLF, self.mlp_out, feed), key2))


class Features(NamedTuple):
    stream_BLD: Tensor
    """The residual stream after the last block, which a following stack may continue."""
    normed_BLD: Tensor
    """The same after the final norm (and modulation), in the stream's precision: the input of a linear head."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU memory is taken page by page, when it is first written: a long cache costs what it holds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class Stack(nn.Module):
    def __init__(self, cfg: ModelConfig, n_blocks: int):
        super().__init__()
        self.time_conditioning, self.time_input, self.dropout = cfg.time_conditioning, cfg.time_input, cfg.dropout
        self.kv_heads, self.head_width = cfg.kv_heads, cfg.head_width
        self.time_embedding = TimeEmbedding(cfg.cond_dim) if cfg.adaln else None
        self.rotary = Rotary(self.head_width, cfg.length, cfg.rope_base)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(n_blocks))
        self.norm = Norm(cfg.hidden_size, cfg.norm, cfg.norm_eps)
        self.modulation = nn.Linear(cfg.cond_dim, 2 * cfg.hidden_size) if cfg.adaln else None
        self.checkpoint_activations = False

    def conditioning(self, x_BLD: Tensor, sigma_B: Tensor | None) -> Tensor | None:
        """c_BC: one vector per sequence when time-conditioned, else one in all (sigma = 0)."""
        if self.time_embedding is None:
            return None
        if not self.time_conditioning:
            sigma_B = torch.zeros(1, device=x_BLD.device)
        elif sigma_B is None:
            raise ValueError(
                "sigma_B is missing: this model is time-conditioned and needs the noise level of each sequence"
            )
        if self.time_input == "t":
            sigma_B = -torch.expm1(-sigma_B)
        # tiny, and its output scales every activation: not worth rounding to bf16
        with torch.autocast(x_BLD.device.type, enabled=False):
            return self.time_embedding(sigma_B)

    def make_cache(self, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
        like = ((batch, self.kv_heads, length, self.head_width), dtype, device)
        return [LayerCache(untouched_zeros(*like), untouched_zeros(*like)) for _ in self.blocks]

    def forward(
        self,
        x_BLD: Tensor,
        sigma_B: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        positions_BL: Tensor | None = None,
        at_N: Tensor | None = None,
        at_BQ: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Features:
        """`at_N` or `at_BQ`: the positions that are read (see `Context`); the last block finishes those alone. `mask`:
        what each position may attend to (see `Context`), of all keys of the cache where there is one."""
        L = x_BLD.shape[1]
        layers: list[LayerCache] | list[None] = [None] * len(self.blocks)
        if cache is not None:
            layers = cache
            assert positions_BL is not None
            if mask is None:
                key_position = torch.arange(cache[0].reach, device=x_BLD.device)
                mask = (key_position <= positions_BL[:, :, None]).unsqueeze(1)  # [B, 1, l, L]
        cos, sin = self.rotary.tables(L, positions_BL)
        context = Context(cos, sin, self.conditioning(x_BLD, sigma_B), None, positions_BL, mask)
        stream, last = ResidualStream(x_BLD), self.blocks[-1]
        for block, layer, keys in zip(self.blocks, layers, self.dropout_keys(x_BLD.device)):
            own = context._replace(cache=layer, keys=keys)
            if block is last:
                own = own._replace(at_N=at_N, at_BQ=at_BQ)
            if self.checkpoint_activations and self.training:
                stream = checkpoint(block, stream, own, use_reentrant=False)
            else:
                stream = block(stream, own)
        (final,) = modulations(self.modulation, context.c_BC, 1, parts=2)
        return self.finish(stream, final if at_N is None else modulation_at(final, at_N, L))  # type: ignore[arg-type]

    def dropout_keys(self, device: torch.device) -> list[tuple[Tensor, Tensor]] | list[None]:
        """Two for each block, from torch's generator, for its two branches; only compiled blocks on a GPU use them."""
        if not (self.training and self.dropout and device.type == "cuda"):
            return [None] * len(self.blocks)
        return draw_keys(len(self.blocks), device)

    def finish(self, stream: ResidualStream, final: Modulation | None) -> Features:
        """Add the pending residual and normalise for a head."""
        x_BLD = stream.total()
        h_BLD = self.norm(x_BLD) if final is None else final.apply(self.norm(x_BLD))
        return Features(x_BLD, h_BLD.to(x_BLD.dtype))


def draw_keys(blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Keys of `dropout`, two for each block."""
    keys = torch.randint(-(2**31), 2**31, (2 * blocks, 2), dtype=torch.int32, device=device).unbind(0)
    return list(zip(keys[::2], keys[1::2]))

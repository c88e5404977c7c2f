"""One stack of blocks: bidirectional or causal, time-conditioned or not, with its own final norm.

Letters as in layers.py. The published block and a modern one are the same class with different options.

The module starts with the attention masks of block diffusion.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    untouched_zeros,
)
from adlm.schema import ModelConfig

# ---- attention in blocks ---------------------------------------------------------------------------------------------
# Attention of block diffusion: which position sees which when a sequence is a chain of blocks of K tokens.
#
# One pass trains all blocks of a sequence of L tokens. It reads [noisy ; clean], 2L positions, with the same rotary
# positions twice:
#
#     clean   sees the clean blocks up to and including its own (both directions inside a block; K = 1 is causal)
#     noisy   sees its own noisy block, both directions, and the clean blocks before it
#
# So a block sees no other noisy block and no later one. Keys and values of the clean half do not depend on the noise,
# so generation can cache them. K may differ between the sequences of a batch. Letters: M = 2L positions.
#
# Two sequences may share a row if each needs one half only: a sequence of one block has no clean block before it, and
# with shifted predictions a sequence with K = 1 is read at its clean tokens. Each half then has its own K: (L, 1), or
# (L, L) for two sequences of one block. The rule is the same, and no half sees the other.
#
# With a cache the rule is simpler, since the current block, noisy or clean, is the last one: a position sees all keys
# before the end of its block.

TILE = 128
"""Side, in positions, of the squares that flex_attention skips or computes as a whole."""
NARROW = 64
"""Widest head for which TILING was measured."""
TILING: Any = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
"""Sizes of flex_attention's kernels that were fastest on an H200: torch's own take 1.5 times as long forward."""
PAST = "past"
"""The mask of causal attention: a position sees itself and those before it."""
Mask = Any
"""Which query may see which key: booleans broadcastable to [B, heads, queries, keys], flex_attention's BlockMask, or
PAST."""


class Ranges(NamedTuple):
    """What each position of [noisy ; clean] sees: two ranges of keys, [B, M]. Tables, since a mask that divides by K
    takes twice the time of the attention."""

    first_BM: Tensor
    last_BM: Tensor
    """A noisy position sees its own block, [first, last). Empty for a clean position."""
    end_BM: Tensor
    """It sees the clean keys [L, end)."""

    @staticmethod
    def of(block_B: Tensor, L: int) -> "Ranges":
        """`block_B`: the block length of each row, [B], or of each of its halves, [B, 2]."""
        noisy_B1, clean_B1 = (block_B if block_B.ndim == 2 else block_B[:, None].expand(-1, 2)).split(1, dim=1)
        position_L = torch.arange(L, device=block_B.device)
        first_BL = position_L // noisy_B1 * noisy_B1
        end_BL = ((position_L // clean_B1 + 1) * clean_B1).clamp(max=L)
        nothing_BL = torch.zeros_like(first_BL)
        found = (
            torch.cat((first_BL, nothing_BL), 1),
            torch.cat(((first_BL + noisy_B1).clamp(max=L), nothing_BL), 1),
            L + torch.cat((first_BL, end_BL), 1),
        )
        return Ranges(*(x_BM.int() for x_BM in found))


def sees(first: Tensor, last: Tensor, end: Tensor, k: Tensor, L: int) -> Tensor:
    """Whether a position with these ranges sees position k of [noisy ; clean], elementwise."""
    return ((first <= k) & (k < last)) | ((k >= L) & (k < end))


def reading_positions(block_B: Tensor, L: int, shift: bool) -> Tensor:
    """Where in [noisy ; clean] the prediction of each token is read: at the token itself in the noisy half, or with
    `shift` at the one before it; for the first token of a block that is the clean token before the block. Nothing
    precedes token 0, which is read at itself. [B, L]; if each half has a block length, [B, M]: tokens of the clean half
    are then read there, too."""
    position_L = torch.arange(L, device=block_B.device)
    clean_L = L + ((position_L - 1).clamp(min=0) if shift else position_L)
    noisy_B = block_B if block_B.ndim == 1 else block_B[:, 0]
    found_BL = position_L.expand(len(block_B), L)
    if shift:
        begins_BL = position_L % noisy_B[:, None] == 0
        found_BL = (position_L - 1 + L * begins_BL).masked_fill(position_L == 0, 0)
    return found_BL if block_B.ndim == 1 else torch.cat((found_BL, clean_L.expand_as(found_BL)), 1)


def training_mask(block_B: Tensor, L: int, tiled: bool | None = None) -> tuple[Tensor, Mask]:
    """Rotary positions and mask of [noisy ; clean]. `tiled`: for flex_attention (None: in training on a GPU if L
    allows; without gradients a compiled pass ended in an illegal memory access, torch 2.11)."""
    position_M = torch.arange(L, device=block_B.device).repeat(2)
    ranges = Ranges.of(block_B, L)
    if tiled is None:
        tiled = block_B.is_cuda and L % TILE == 0 and torch.is_grad_enabled()
    if tiled:
        return position_M, tiled_mask(ranges, L)
    at_M = torch.arange(2 * L, device=block_B.device)
    first, last, end = (x_BM[:, :, None] for x_BM in ranges)
    return position_M, sees(first, last, end, at_M, L).unsqueeze(1)


def cached_mask(positions_Bl: Tensor, block_B: Tensor, keys: int) -> Tensor:
    """Which of the `keys` entries of a cache the new tokens at these positions see."""
    end_Bl = (positions_Bl // block_B[:, None] + 1) * block_B[:, None]
    return (torch.arange(keys, device=positions_Bl.device) < end_Bl[:, :, None]).unsqueeze(1)


def tiled_mask(ranges: Ranges, L: int) -> Mask:
    """The mask for flex_attention: which tiles are empty, which full, and the rule inside the others.

    The ends of both ranges rise with the position, so the first and last query of a tile decide, and the 2L x 2L mask
    is never formed.
    """
    from torch.nn.attention.flex_attention import BlockMask

    assert L % TILE == 0, f"{L} is no multiple of {TILE}"
    (first, first_of_last), (last, last_of_last), (end, end_of_last) = (
        (x_BM[:, ::TILE, None], x_BM[:, TILE - 1 :: TILE, None]) for x_BM in ranges
    )
    low = torch.arange(0, 2 * L, TILE, device=end.device)  # the keys of a tile: [low, high)
    high = low + TILE
    some = ((first < high) & (low < last_of_last)) | ((low >= L) & (low < end_of_last))
    full = ((first_of_last <= low) & (high <= last)) | ((low >= L) & (high <= end))

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(ranges.first_BM[b, q], ranges.last_BM[b, q], ranges.end_BM[b, q], k, L)

    partial, whole = listed((some & ~full).unsqueeze(1)), listed(full.unsqueeze(1))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(2 * L, 2 * L))


def listed(tiles_B1nn: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen tiles in each row, and the indices of its tiles, the chosen ones first."""
    chosen = tiles_B1nn.int()
    return chosen.sum(-1, dtype=torch.int32), chosen.sort(dim=-1, descending=True, stable=True).indices.int()


@functools.cache
def compiled_flex_attention() -> Any:
    """flex_attention for callers that are not compiled; uncompiled it would form all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_by_tiles(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask) -> Tensor:
    """Attention under a mask of tiles. Keys and values may have fewer heads than queries."""
    from torch.nn.attention.flex_attention import flex_attention

    if not q_BNLH.is_cuda:  # compiled for a CPU (torch 2.13), it assumes other strides
        q_BNLH, k_BKLH, v_BKLH = (x.contiguous() for x in (q_BNLH, k_BKLH, v_BKLH))
    flex = flex_attention if torch.compiler.is_compiling() or not q_BNLH.is_cuda else compiled_flex_attention()
    tiling = TILING if q_BNLH.is_cuda and q_BNLH.shape[-1] <= NARROW else None
    shared = q_BNLH.shape[1] != k_BKLH.shape[1]
    return flex(q_BNLH, k_BKLH, v_BKLH, block_mask=mask, enable_gqa=shared, kernel_options=tiling)


# ---- the stack -------------------------------------------------------------------------------------------------------


@dataclass
class LayerCache:
    """Keys and values of one block for the tokens seen so far; sequences may be at different positions."""

    k_BNLH: Tensor
    v_BNLH: Tensor
    visible: int = 0
    """Number of leading entries that attention reads (0: all). Saves time if the caller knows the others are empty."""

    @property
    def reach(self) -> int:
        return self.visible or self.k_BNLH.shape[2]

    def extend(self, k_BNlH: Tensor, v_BNlH: Tensor, positions_Bl: Tensor) -> tuple[Tensor, Tensor]:
        row_B1 = torch.arange(len(positions_Bl), device=positions_Bl.device)[:, None]
        for kept, new in ((self.k_BNLH, k_BNlH), (self.v_BNLH, v_BNlH)):
            kept[row_B1, :, positions_Bl] = new.transpose(1, 2).to(kept.dtype)  # in place when compiled; scatter is not
        return self.k_BNLH[:, :, : self.reach], self.v_BNLH[:, :, : self.reach]


class ResidualStream(NamedTuple):
    """The residual stream between two blocks.

    A block leaves the output of its last branch pending. The next norm adds it, in one pass over the stream instead of
    two, even if every block is compiled by itself.
    """

    x_BLD: Tensor
    pending_BLD: Tensor | None = None
    """The pending residual, still to be added; None before the first block."""

    def total(self) -> Tensor:
        return self.x_BLD if self.pending_BLD is None else self.x_BLD + self.pending_BLD


class Context(NamedTuple):
    """What a block reads besides the stream: tensors and PAST alone, so that one compilation serves all blocks."""

    cos: Tensor
    sin: Tensor
    """Rotary tables."""
    c_BC: Tensor | None = None
    """Conditioning vector, with adaLN."""
    cache: LayerCache | None = None
    """Keys and values of earlier tokens; `positions_BL` are the positions of the new ones."""
    positions_BL: Tensor | None = None
    mask: Mask | None = None
    """What each position may attend to, broadcastable to [B, N, l, L]; None: everything."""
    keys: tuple[Tensor, Tensor] | None = None
    """Dropout keys of the two branches; None: torch's own dropout."""
    at_N: Tensor | None = None
    """The positions that are read after this block (`pick_flat`): only they are computed after attention."""
    at_BQ: Tensor | None = None
    """The same for a sampler (`pick_each`): only they are computed after keys and values."""


class AttentionBlock(nn.Module):
    """The attention that a block and its inference form (engine/prepare.py) share."""

    heads: tuple[int, int, int]
    """Numbers of heads of queries, keys and values. Rows of `qkv` are in this order, those of a head side by side."""
    q_norm: Norm | None
    k_norm: Norm | None

    def attention(self, qkv_BLE: Tensor, context: Context) -> Tensor:
        B, L, E = qkv_BLE.shape
        q_BLNH, k_BLNH, v_BLNH = qkv_BLE.view(B, L, -1, E // sum(self.heads)).split(self.heads, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH).to(v_BLNH.dtype), self.k_norm(k_BLNH).to(v_BLNH.dtype)
        # Rotate before heads and positions are transposed: a kernel writes its output in the order of its queries, and
        # in this order the next product reads it without a copy.
        q_BLNH, k_BLNH = rotate(q_BLNH, context.cos, context.sin), rotate(k_BLNH, context.cos, context.sin)
        if context.at_BQ is not None:
            assert not isinstance(context.mask, str), "the queries picked are no prefix"
            q_BLNH = pick_each(q_BLNH.flatten(2), context.at_BQ).unflatten(2, q_BLNH.shape[2:])
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if context.cache is not None:
            assert context.positions_BL is not None
            k_BNLH, v_BNLH = context.cache.extend(k_BNLH, v_BNLH, context.positions_BL)
            q_BNLH = q_BNLH.to(k_BNLH.dtype)
        return attend(q_BNLH, k_BNLH, v_BNLH, context.mask).transpose(1, 2).flatten(2)


def attend(q_BNlH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask | None) -> Tensor:
    """Attention of N heads of queries to K heads of keys and values, each shared by N / K of them. `mask` as in
    Context."""
    N, K, l = q_BNlH.shape[1], k_BKLH.shape[1], q_BNlH.shape[2]
    if isinstance(mask, str):  # PAST
        return F.scaled_dot_product_attention(q_BNlH, k_BKLH, v_BKLH, is_causal=True, enable_gqa=N > K)
    if mask is not None and not isinstance(mask, Tensor):
        return attend_by_tiles(q_BNlH, k_BKLH, v_BKLH, mask)
    if N > K and l * N <= k_BKLH.shape[2] * K and (mask is None or mask.shape[1] == 1):
        # Few queries: treat heads that share keys as more queries of one head, so that no key is repeated.
        shared_BKMH = q_BNlH.unflatten(1, (K, N // K)).flatten(2, 3)
        again = mask
        if mask is not None and mask.shape[2] != l * (N // K):  # else it came repeated, once for all layers
            again = mask.expand(-1, -1, l, -1).repeat(1, 1, N // K, 1)
        out_BKMH = F.scaled_dot_product_attention(shared_BKMH, k_BKLH, v_BKLH, again)
        return out_BKMH.unflatten(2, (N // K, l)).flatten(1, 2)
    return F.scaled_dot_product_attention(q_BNlH, k_BKLH, v_BKLH, mask, enable_gqa=N > K)


class Block(AttentionBlock):
    """Attention and MLP, each behind a norm, added to the residual stream.

    With adaLN the conditioning vector c shifts and scales both norms and gates both branches. Without time
    conditioning c is one vector for the whole batch, so its six modulations are folded into the weights.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, H = cfg.hidden_size, cfg.head_width
        self.heads = (cfg.n_heads, cfg.kv_heads, cfg.kv_heads)
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
        self.modulation = nn.Linear(cfg.cond_dim, 6 * D) if cfg.has_adaln else None

    def drop(self, branch_BLD: Tensor, key: Tensor | None) -> Tensor:
        if key is not None and torch.compiler.is_compiling():
            return dropout(branch_BLD, self.dropout, key)
        return F.dropout(branch_BLD, self.dropout, self.training)

    def forward(self, stream: ResidualStream, context: Context) -> ResidualStream:
        x_BLD = stream.total()
        attend, feed = modulations(self.modulation, context.c_BC, 2)
        key1, key2 = (None, None) if context.keys is None else context.keys
        o_BLD = self.attention(enter(x_BLD, self.norm1, attend, self.qkv), context)
        if context.at_BQ is not None:  # attention has computed those queries only
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


class Stack(nn.Module):
    def __init__(self, cfg: ModelConfig, n_blocks: int):
        super().__init__()
        self.is_time_conditioned, self.reads_t, self.dropout = (
            cfg.is_time_conditioned,
            cfg.conditioning == "t",
            cfg.dropout,
        )
        self.kv_heads, self.head_width = cfg.kv_heads, cfg.head_width
        self.mask = PAST if cfg.causal else None
        """The mask of calls that give none."""
        self.time_embedding = TimeEmbedding(cfg.cond_dim) if cfg.has_adaln else None
        self.rotary = Rotary(self.head_width, cfg.length, cfg.rope_base)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(n_blocks))
        self.norm = Norm(cfg.hidden_size, cfg.norm, cfg.norm_eps)
        self.modulation = nn.Linear(cfg.cond_dim, 2 * cfg.hidden_size) if cfg.has_adaln else None
        self.checkpoint_activations = False
        self.compiles_blocks = False
        """Whether every block is compiled by itself."""

    def conditioning(self, x_BLD: Tensor, sigma_B: Tensor | None) -> Tensor | None:
        """c_BC: one vector per sequence when time-conditioned, else one for all (sigma = 0)."""
        if self.time_embedding is None:
            return None
        if not self.is_time_conditioned:
            sigma_B = torch.zeros(1, device=x_BLD.device)
        elif sigma_B is None:
            raise ValueError(
                "sigma_B is missing: this model is time-conditioned and needs the noise level of each sequence"
            )
        if self.reads_t:
            sigma_B = -torch.expm1(-sigma_B)
        # a tiny network whose output scales every activation: not worth rounding to bf16
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
        """Run the blocks. `at_N` or `at_BQ`: the positions that are read (see `Context`); the last block computes those
        alone. `mask`: what each position may attend to (see `Context`), with a cache among all its keys."""
        L = x_BLD.shape[1]
        layers: list[LayerCache] | list[None] = [None] * len(self.blocks)
        if cache is None:
            mask = self.mask if mask is None else mask
        else:
            layers = cache
            assert positions_BL is not None
            if mask is None:
                key_position = torch.arange(cache[0].reach, device=x_BLD.device)
                mask = (key_position <= positions_BL[:, :, None]).unsqueeze(1)  # [B, 1, l, L]
        cos, sin = self.rotary.tables(L, positions_BL)
        context = Context(cos, sin, self.conditioning(x_BLD, sigma_B), None, positions_BL, mask)
        stream, last = ResidualStream(x_BLD), self.blocks[-1]
        if at_N is not None and self.compiles_blocks:  # their number varies; one compiled form serves all
            torch._dynamo.maybe_mark_dynamic(at_N, 0)
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
        """Keys from torch's generator for the two branches of each block; only compiled blocks on a GPU use them."""
        if not (self.training and self.dropout and device.type == "cuda"):
            return [None] * len(self.blocks)
        return draw_keys(len(self.blocks), device)

    def finish(self, stream: ResidualStream, final: Modulation | None) -> Features:
        """Add the pending residual and normalise for a head."""
        x_BLD = stream.total()
        h_BLD = self.norm(x_BLD) if final is None else final.apply(self.norm(x_BLD))
        return Features(x_BLD, h_BLD.to(x_BLD.dtype))


def draw_keys(blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Draw keys of `dropout`, two for each block."""
    keys = torch.randint(-(2**31), 2**31, (2 * blocks, 2), dtype=torch.int32, device=device).unbind(0)
    return list(zip(keys[::2], keys[1::2]))

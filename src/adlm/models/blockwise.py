"""Attention of block diffusion: which position sees which when a sequence is a chain of blocks of K tokens.

One pass trains all blocks of a sequence of L tokens. It reads [noisy ; clean], 2L positions, with the same rotary
positions twice:

    clean   sees the clean blocks up to and including its own (both directions inside a block; K = 1 is causal)
    noisy   sees its own noisy block, both directions, and the clean blocks before it

So no block ever sees a noisy one but its own, or a later one; and keys and values of the clean half do not depend on
noise: generation may keep them. K may differ between the sequences of a batch. Letters: M = 2L positions.

With a cache the same rule is simpler, since the block that is read last stands in its place, noisy or clean: a position
sees all keys before the end of its block.
"""

import functools
from typing import Any

import torch
from torch import Tensor

TILE = 128
"""Positions of a side of the squares that flex_attention skips or computes whole."""
Mask = Any
"""Which query may see which key: booleans broadcastable to [B, heads, queries, keys], or flex_attention's BlockMask."""


def sees(q: Tensor, k: Tensor, K: Tensor, L: int) -> Tensor:
    """Whether position q sees position k of [noisy ; clean], elementwise; K: block length of the sequence."""
    noisy_q, noisy_k = q < L, k < L
    block_q, block_k = torch.where(noisy_q, q, q - L) // K, torch.where(noisy_k, k, k - L) // K
    own = noisy_q & noisy_k & (block_q == block_k)
    before = ~noisy_k & torch.where(noisy_q, block_k < block_q, block_k <= block_q)
    return own | before


def reading_positions(block_B: Tensor, L: int, shift: bool) -> Tensor:
    """Where in [noisy ; clean] the prediction of each token is read: at the token in the noisy half, or (`shift`) one
    before it, which is the last clean token for the first of a block. Nothing stands before token 0: it has its own."""
    position_L = torch.arange(L, device=block_B.device)
    if not shift:
        return position_L.expand(len(block_B), L)
    begins_BL = position_L % block_B[:, None] == 0
    return (position_L - 1 + L * begins_BL).masked_fill(position_L == 0, 0)


def training_mask(block_B: Tensor, L: int, tiled: bool | None = None) -> tuple[Tensor, Mask]:
    """Rotary positions and mask of [noisy ; clean]. `tiled`: for flex_attention (None: in training on a GPU, where L
    allows; a compiled pass without gradients ended in an illegal memory access there, torch 2.11)."""
    position_M = torch.arange(L, device=block_B.device).repeat(2)
    if tiled is None:
        tiled = block_B.is_cuda and L % TILE == 0 and torch.is_grad_enabled()
    if tiled:
        return position_M, tiled_mask(block_B, L)
    at_M = torch.arange(2 * L, device=block_B.device)
    return position_M, sees(at_M[:, None], at_M, block_B[:, None, None], L).unsqueeze(1)


def cached_mask(positions_Bl: Tensor, block_B: Tensor, keys: int) -> Tensor:
    """What new tokens at these positions see of the `keys` places of a cache."""
    end_Bl = (positions_Bl // block_B[:, None] + 1) * block_B[:, None]
    return (torch.arange(keys, device=positions_Bl.device) < end_Bl[:, :, None]).unsqueeze(1)


def tiled_mask(block_B: Tensor, L: int) -> Mask:
    """The mask for flex_attention: which tiles are empty, which full, and the rule inside the others.

    First and last position of a tile decide, since block numbers rise with positions; so 2L x 2L is never formed.
    """
    from torch.nn.attention.flex_attention import BlockMask

    assert L % TILE == 0, f"{L} is no multiple of {TILE}"
    n = L // TILE
    first_n = torch.arange(n, device=block_B.device) * TILE
    low_Bn, high_Bn = first_n // block_B[:, None], (first_n + TILE - 1) // block_B[:, None]  # blocks of a tile
    q_low, q_high, k_low, k_high = low_Bn[:, :, None], high_Bn[:, :, None], low_Bn[:, None], high_Bn[:, None]
    own_any, own_all = (q_low <= k_high) & (k_low <= q_high), (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    nothing = torch.zeros_like(own_any)

    def joined(own: Tensor, before: Tensor, up_to: Tensor) -> Tensor:
        return torch.cat((torch.cat((own, before), -1), torch.cat((nothing, up_to), -1)), -2).unsqueeze(1)

    some_B1nn = joined(own_any, k_low < q_high, k_low <= q_high)
    full_B1nn = joined(own_all, k_high < q_low, k_high <= q_low)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(q, k, block_B[b], L)

    partial, full = listed(some_B1nn & ~full_B1nn), listed(full_B1nn)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(2 * L, 2 * L))


def listed(tiles_B1nn: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are chosen, and their numbers, the chosen ones first."""
    chosen = tiles_B1nn.int()
    return chosen.sum(-1, dtype=torch.int32), chosen.sort(dim=-1, descending=True, stable=True).indices.int()


@functools.cache
def compiled_flex_attention() -> Any:
    """flex_attention where the caller is not compiled; uncompiled it would form all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_by_tiles(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask) -> Tensor:
    """Attention by a mask of tiles; heads of keys and values may be fewer."""
    from torch.nn.attention.flex_attention import flex_attention

    if not q_BNLH.is_cuda:  # compiled for a CPU (torch 2.13), it takes other strides for these
        q_BNLH, k_BKLH, v_BKLH = (x.contiguous() for x in (q_BNLH, k_BKLH, v_BKLH))
    flex = flex_attention if torch.compiler.is_compiling() or not q_BNLH.is_cuda else compiled_flex_attention()
    return flex(q_BNLH, k_BKLH, v_BKLH, block_mask=mask, enable_gqa=q_BNLH.shape[1] != k_BKLH.shape[1])

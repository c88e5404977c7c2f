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
import torch.nn.functional as F
from torch import Tensor

TILE = 128
"""Positions of a side of the squares that flex_attention skips or computes whole."""
Pattern = Any
"""Which query may see which key: a boolean tensor [B, 1, queries, keys] or a BlockMask of flex_attention."""


def sees(q: Tensor, k: Tensor, K: Tensor, L: int) -> Tensor:
    """Whether position q sees position k of [noisy ; clean], elementwise; K: block length of the sequence."""
    noisy_q, noisy_k = q < L, k < L
    block_q, block_k = torch.where(noisy_q, q, q - L) // K, torch.where(noisy_k, k, k - L) // K
    own = noisy_q & noisy_k & (block_q == block_k)
    before = ~noisy_k & torch.where(noisy_q, block_k < block_q, block_k <= block_q)
    return own | before


def training_pattern(block_B: Tensor, L: int, tiled: bool | None = None) -> tuple[Tensor, Pattern]:
    """Rotary positions and pattern of [noisy ; clean]. `tiled`: for flex_attention (None: on a GPU, where L allows)."""
    position_M = torch.arange(L, device=block_B.device).repeat(2)
    if tiled is None:
        tiled = block_B.is_cuda and L % TILE == 0
    if tiled:
        return position_M, tiled_pattern(block_B, L)
    at_M = torch.arange(2 * L, device=block_B.device)
    return position_M, sees(at_M[:, None], at_M, block_B[:, None, None], L).unsqueeze(1)


def cached_pattern(positions_Bl: Tensor, block_B: Tensor | None, keys: int) -> Tensor:
    """What new tokens at these positions see of the `keys` places of a cache; None: they are a causal network's."""
    K = torch.ones_like(positions_Bl[:, :1]) if block_B is None else block_B[:, None]
    end_Bl = (positions_Bl // K + 1) * K
    return (torch.arange(keys, device=positions_Bl.device) < end_Bl[:, :, None]).unsqueeze(1)


def tiled_pattern(block_B: Tensor, L: int) -> Pattern:
    """The pattern for flex_attention: which tiles are empty, which full, and the rule inside the others.

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


def attend(q_BNlH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Pattern | None, causal: bool) -> Tensor:
    """Attention of N heads of queries to K heads of keys and values, each shared by N / K of them. `mask`: which query
    sees which key; None: all of them, or those before (`causal`)."""
    groups = q_BNlH.shape[1] // k_BKLH.shape[1]
    if not (mask is None or isinstance(mask, Tensor)):
        from torch.nn.attention.flex_attention import flex_attention

        flex = flex_attention if torch.compiler.is_compiling() or not q_BNlH.is_cuda else compiled_flex_attention()
        return flex(q_BNlH, k_BKLH, v_BKLH, block_mask=mask, enable_gqa=groups > 1)
    is_causal = causal and mask is None
    l, few = q_BNlH.shape[2], groups * q_BNlH.shape[2] <= k_BKLH.shape[2]
    if groups > 1 and few and not is_causal and (mask is None or mask.shape[1] == 1):
        # Few queries: heads that share keys are more queries of one head, and no key is repeated.
        shared_BKMH = q_BNlH.unflatten(1, (-1, groups)).flatten(2, 3)
        repeated = None if mask is None else mask.expand(-1, -1, l, -1).repeat(1, 1, groups, 1)
        out_BKMH = F.scaled_dot_product_attention(shared_BKMH, k_BKLH, v_BKLH, repeated)
        return out_BKMH.unflatten(2, (groups, l)).flatten(1, 2)
    return F.scaled_dot_product_attention(q_BNlH, k_BKLH, v_BKLH, mask, is_causal=is_causal, enable_gqa=groups > 1)

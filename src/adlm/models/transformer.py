"""One stack of blocks: bidirectional or causal, time-conditioned or not, with its own final norm.

Letters as in layers.py. A stack returns both the residual stream and its final-normed version: the first is what a
following stack may continue from, the second is what a head reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adlm.models.layers import (
    Block,
    LayerCache,
    Modulation,
    Norm,
    Rotary,
    TimeEmbedding,
    modulate,
    modulation_at,
    modulations,
    settle,
)
from adlm.schema import ModelConfig


class Trail(NamedTuple):
    """What blocks leave for later ones of their residual stream, beside the stream itself."""

    values_BLD: Tensor | None = None
    """Attention values of the first block, for a value residual."""
    skips: tuple[Tensor, ...] = ()
    """The stream after blocks that left it for a later one, which has not come yet; the next to be read stands last."""


START = Trail()
"""Of a stream that begins."""


class Features(NamedTuple):
    stream_BLD: Tensor
    """The residual stream after the last block."""
    normed_BLD: Tensor
    """The same after the final norm (and modulation), in the stream's precision: the input of a linear head."""
    trail: Trail
    """For a stack that continues the stream."""


class StackCache:
    """Keys and values of every block of a causal stack."""

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers


class Stack(nn.Module):
    def __init__(self, cfg: ModelConfig, places: range, depth: int):
        """`places`: of its blocks in a residual stream of `depth` blocks, of which another stack may have the rest."""
        super().__init__()
        self.time_conditioning, self.dropout = cfg.time_conditioning, cfg.dropout
        self.n_heads, self.head_width = cfg.n_heads, cfg.hidden_size // cfg.n_heads
        self.time_embedding = TimeEmbedding(cfg.cond_dim) if cfg.adaln else None
        self.rotary = Rotary(self.head_width, cfg.length)
        self.blocks = nn.ModuleList(Block(cfg, place, depth) for place in places)
        self.norm = Norm(cfg.hidden_size, cfg.norm)
        self.modulation = nn.Linear(cfg.cond_dim, 2 * cfg.hidden_size) if cfg.adaln else None
        self.checkpoint_activations = False

    def conditioning(self, x_BLD: Tensor, sigma_B: Tensor | None) -> Tensor | None:
        """c_BC: one row per example when time-conditioned, else one row in all (sigma = 0)."""
        if self.time_embedding is None:
            return None
        if not self.time_conditioning:
            sigma_B = torch.zeros(1, device=x_BLD.device)
        elif sigma_B is None:
            raise ValueError("sigma_B is missing: this model is time-conditioned and needs the noise level of each row")
        # tiny, and its output scales every activation: not worth rounding to bf16
        with torch.autocast(x_BLD.device.type, enabled=False):
            return self.time_embedding(sigma_B)

    def make_cache(self, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> StackCache:
        shape = (batch, self.n_heads, length, self.head_width)
        return StackCache(
            [LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")) for _ in self.blocks]
        )

    def forward(
        self,
        x_BLD: Tensor,
        sigma_B: Tensor | None = None,
        cache: StackCache | None = None,
        positions_BL: Tensor | None = None,
        at: Tensor | None = None,
        trail: Trail = START,
    ) -> Features:
        """`at`: the positions that are read (see `activations_at`): the last block finishes those alone.
        `trail`: of the stack whose stream this one continues."""
        cos, sin = self.rotary.tables(x_BLD.shape[1], positions_BL)
        c_BC = self.conditioning(x_BLD, sigma_B)
        layers, mask = [None] * len(self.blocks), None
        if cache is not None:
            layers = cache.layers
            assert positions_BL is not None
            key_position = torch.arange(layers[0].k_BNLH.shape[2], device=x_BLD.device)
            mask = (key_position <= positions_BL[:, :, None]).unsqueeze(1)  # [B, 1, l, L]
        due_BLD, values_BLD, skips = None, trail.values_BLD, list(trail.skips)
        read = [None] * (len(self.blocks) - 1) + [at]
        L = x_BLD.shape[1]
        for block, layer, keys, at_last in zip(self.blocks, layers, self.dropout_keys(x_BLD.device), read):
            skip_BLD = None if block.skip is None else skips.pop()
            inputs = (x_BLD, due_BLD, c_BC, cos, sin, layer, positions_BL, mask, keys, at_last, values_BLD, skip_BLD)
            if self.checkpoint_activations and self.training:
                x_BLD, due_BLD, given_BLD = checkpoint(block, *inputs, use_reentrant=False)  # type: ignore[misc]
            else:
                x_BLD, due_BLD, given_BLD = block(*inputs)
            values_BLD = values_BLD if given_BLD is None else given_BLD
            if block.leaves_skip:
                x_BLD, due_BLD = settle(x_BLD, due_BLD), None
                skips.append(x_BLD)
        (final,) = modulations(self.modulation, c_BC, 1, parts=2)
        final = final if at is None else modulation_at(final, at, L)
        return Features(*self.finish(x_BLD, due_BLD, final), Trail(values_BLD, tuple(skips)))

    def dropout_keys(self, device: torch.device) -> list[tuple[Tensor, Tensor]] | list[tuple[None, None]]:
        """Two for each block, from torch's generator, for its two branches; only compiled blocks on a GPU use them."""
        if not (self.training and self.dropout and device.type == "cuda"):
            return [(None, None)] * len(self.blocks)
        return draw_keys(len(self.blocks), device)

    def finish(self, x_BLD: Tensor, due_BLD: Tensor | None, final: Modulation | None) -> tuple[Tensor, Tensor]:
        """The stream, and what a head reads."""
        x_BLD = settle(x_BLD, due_BLD)
        return x_BLD, modulate(self.norm(x_BLD), final).to(x_BLD.dtype)


def draw_keys(blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Keys of `dropout`, two for each block."""
    keys = torch.randint(-(2**31), 2**31, (2 * blocks, 2), dtype=torch.int32, device=device).unbind(0)
    return list(zip(keys[::2], keys[1::2]))

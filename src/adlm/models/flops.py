"""How much arithmetic a model needs: the numerator of MFU, and the compute column of every comparison.

Counted is what the method needs, not what an implementation spends: multiply-adds of matrix products times two, heads
and what follows the last attention only at the positions that are scored, the bridge as the D x D product it is,
recomputation not at all.
"""

from typing import NamedTuple

from adlm import tables
from adlm.schema import ModelConfig


class Flops(NamedTuple):
    forward_per_token: float
    """Forward pass, one token of a sequence of the given length."""
    training_per_token: float
    """Forward and backward: three times the forward."""


def count_flops(
    cfg: ModelConfig, vocab_size: int, length: int, scored: float = 0.5, anchors_scored: float = 0.0
) -> Flops:
    """`scored`, `anchors_scored`: fraction of positions that go through the head of the denoiser, of the anchors."""
    D = cfg.hidden_size
    blocks = cfg.n_blocks + (cfg.n_denoiser_blocks if cfg.anchored else 0)
    attended = length / 2 if cfg.causal else length
    per_block = 2 * (4 * D * D + 2 * cfg.mlp_ratio * D * D) + 4 * D * attended
    bridge = tables.BRIDGES.load(cfg.bridge, "model.bridge").flops(cfg) if cfg.anchored else 0
    heads = 2 * D * vocab_size * (scored + anchors_scored)
    unread = (1 - min(1.0, scored)) * 2 * (D * D + 2 * cfg.mlp_ratio * D * D)  # of the last block
    forward = blocks * per_block - unread + bridge + heads
    return Flops(forward, 3 * forward)


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

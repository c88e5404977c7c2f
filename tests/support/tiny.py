"""Tiny models with every parameter away from its special initial value, so that no gradient is zero by accident."""

from dataclasses import replace

import torch

from adlm.models import Network, build_model
from adlm.schema import ModelConfig

TINY = ModelConfig(hidden_size=16, n_heads=2, n_blocks=2, n_denoiser_blocks=1, length=12, dropout=0.0, cond_dim=8)
MODERN = {
    "norm": "rmsnorm", "qk_norm": True, "activation": "relu2", "bias": False, "init": "normal-zero",
    "conditioning": "none",
}  # fmt: skip


def tiny_model(vocab_size=11, mask_id=10, seed=0, dtype=torch.float32, scale=0.3, **options) -> Network:
    """`options` are fields of ModelConfig."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model(replace(TINY, **options), vocab_size, mask_id)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            base = 1.0 if "norm" in name and parameter.ndim == 1 else 0.0
            parameter.copy_(base + scale * noise)
    return model.eval()


def random_tokens(B, L, vocab_size, seed=0):
    """Tokens with a skewed distribution, so that some are frequent in a row and some are anchors."""
    u = torch.rand(B, L, generator=torch.Generator().manual_seed(seed))
    return (u**2 * vocab_size).long().clamp(max=vocab_size - 1)

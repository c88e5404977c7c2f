"""Tiny networks of every kind that the release has."""

from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

TINY = {
    "hidden_size": 16,
    "n_heads": 2,
    "n_blocks": 4,
    "n_denoiser_blocks": 2,
    "cond_dim": 8,
    "length": 12,
    "dropout": 0.0,
}
SHAPES = {
    "adlm": (ModelConfig(**TINY), ObjectiveConfig(), NoiseConfig()),
    "adlm-time": (ModelConfig(**TINY, conditioning="sigma"), ObjectiveConfig(tau=3), NoiseConfig("geometric")),
    "mdlm": (ModelConfig(**TINY, anchored=False), ObjectiveConfig(name="nelbo"), NoiseConfig()),
    "sedd": (
        ModelConfig(**TINY, anchored=False, conditioning="sigma"),
        ObjectiveConfig(name="score-entropy"),
        NoiseConfig(),
    ),
    "ar": (
        ModelConfig(**TINY, anchored=False, causal=True, conditioning="none"),
        ObjectiveConfig(name="autoregressive"),
        NoiseConfig(),
    ),
}

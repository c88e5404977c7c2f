"""adlm: anchored diffusion language models."""

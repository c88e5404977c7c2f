"""Networks: one transformer stack, the two-stage anchored network made of it, and the loss behind a large head.

network.py               Network: embedding, stacks, bridge, heads; initialisation, FLOPs
transformer.py           Block and Stack; the residual stream and what blocks read beside it
blockwise.py             attention of block diffusion: which position sees which
layers.py                norm, rotary positions, dropout, modulation, positions that are picked
lora.py                  low-rank adapters of a trained network
bridge.py                bridges: from the anchor network to the denoiser
linear_cross_entropy.py  losses behind a linear head, without all logits
kernels.py               the same as a Triton kernel
backends.py              what depends on the machine: attention kernel, compiler options, peak FLOP/s
"""

from adlm.models.linear_cross_entropy import linear_cross_entropy, linear_losses, linear_nll
from adlm.models.network import Cache, Hidden, Network, build_model

__all__ = ["Cache", "Hidden", "Network", "build_model", "linear_cross_entropy", "linear_losses", "linear_nll"]

"""Networks: one transformer stack, the two-stage anchored network made of it, and the loss behind a large head.

network.py               Network: embedding, stacks, bridge, heads; initialisation, FLOPs, low-rank adapters
transformer.py           Block and Stack, the residual stream; the attention masks of block diffusion
layers.py                the choice of the attention kernel; norm, rotary positions, dropout, modulation, gathering
bridge.py                bridges: from the anchor network to the denoiser
linear_cross_entropy.py  losses behind a linear head, a chunk of logits at a time
kernels.py               Triton kernels for that loss and for the draw of a token
"""

from adlm.models.linear_cross_entropy import linear_cross_entropy, linear_losses, linear_nll
from adlm.models.network import Cache, Hidden, Network, build_model

__all__ = ["Cache", "Hidden", "Network", "build_model", "linear_cross_entropy", "linear_losses", "linear_nll"]

"""Networks: one transformer stack, the two-stage anchored network made of it, and the loss behind a large head.

network.py               Network: embedding, stacks, bridge, heads; initialisation, FLOPs, low-rank adapters
transformer.py           Block and Stack, the residual stream; which position sees which in block diffusion
layers.py                what depends on the machine; norm, rotary positions, dropout, modulation, picked positions
bridge.py                bridges: from the anchor network to the denoiser
linear_cross_entropy.py  losses behind a linear head, without all logits
kernels.py               the same, and the draw of a token, as Triton kernels
"""

from adlm.models.linear_cross_entropy import linear_cross_entropy, linear_losses, linear_nll
from adlm.models.network import Cache, Hidden, Network, build_model

__all__ = ["Cache", "Hidden", "Network", "build_model", "linear_cross_entropy", "linear_losses", "linear_nll"]

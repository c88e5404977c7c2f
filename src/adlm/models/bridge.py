"""Bridges of the two-stage model: how the anchor network's prediction reaches the denoiser.

The paper feeds the denoiser y W_in^T + b_in where y = h W_out^T + b_out are the anchor logits. Nothing stands between
the two linear maps, so with M = W_in W_out the detour D -> V -> D is one D x D matrix,

    W_in (W_out h + b_out) + b_in = M h + (W_in b_out + b_in),

in training too: gradients reach both factors through the product. 2 D^2 V operations per step replace 4 N D V.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.schema import ModelConfig

ALIGNED = 64


class Bridge(nn.Module):
    """Base class of bridges. A new bridge is a subclass and a line in `tables.BRIDGES`."""

    unused: tuple[str, ...] = ()
    """Parts of the network whose parameters get no gradient from the denoiser's loss through this bridge."""

    def __init__(self, cfg: ModelConfig, vocab_size: int):
        super().__init__()

    def initialise(self, cfg: ModelConfig) -> None:
        """Set every parameter of the bridge, from torch's global generator."""

    def forward(self, stream_BLD: Tensor, anchor_BLD: Tensor, anchor_head: nn.Linear) -> Tensor:
        """The denoiser's input, from the anchor network's residual stream and its final-normed states."""
        raise NotImplementedError

    def from_logits(self, stream_BLD: Tensor, anchor_logits_BLV: Tensor) -> Tensor:
        """The reference implementation of `forward`, for tests and benchmarks: it forms every logit."""
        raise ValueError(f"{type(self).__name__} has no reference implementation; use bench.dense=false")

    def freeze(self, anchor_head: nn.Linear) -> "Bridge":
        """The inference form, for weights that no longer change. Its buffers and linear layers may become bf16."""
        return self

    @staticmethod
    def flops(cfg: ModelConfig) -> float:
        """Operations for one token, forward."""
        return 0


class NoBridge(Bridge):
    """The denoiser continues the residual stream; anchors appear in the loss only."""

    unused = ("anchor_head", "anchor.norm", "anchor.modulation")

    def forward(self, stream_BLD: Tensor, anchor_BLD: Tensor, anchor_head: nn.Linear) -> Tensor:
        return stream_BLD

    def from_logits(self, stream_BLD: Tensor, anchor_logits_BLV: Tensor) -> Tensor:
        return stream_BLD


class LinearBridge(Bridge):
    """The paper's bridge: the denoiser reads a linear map of the anchor logits and nothing else."""

    def __init__(self, cfg: ModelConfig, vocab_size: int):
        super().__init__(cfg, vocab_size)
        self.weight = nn.Parameter(torch.empty(cfg.hidden_size, vocab_size))  # W_in
        self.bias = nn.Parameter(torch.zeros(cfg.hidden_size)) if cfg.bias else None

    def initialise(self, cfg: ModelConfig) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        if cfg.init != "torch":
            nn.init.normal_(self.weight, std=bound)
        else:
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
            if cfg.init == "torch":
                nn.init.uniform_(self.bias, -bound, bound)

    def product(self, anchor_head: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """(M, offset). Under autocast, M is computed in its precision, like all products: the sum over the vocabulary
        is longer than any other, so the rounding errors of its terms average out."""
        device = self.weight.device.type
        if torch.is_autocast_enabled(device):
            return self.aligned_product(anchor_head, torch.get_autocast_dtype(device))
        matrix_DD = self.weight @ anchor_head.weight
        offset_D = self.bias
        if anchor_head.bias is not None:
            through = self.weight @ anchor_head.bias
            offset_D = through if offset_D is None else through + offset_D
        return matrix_DD, offset_D

    def aligned_product(self, anchor_head: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The same as one product: the head's bias is one more column of W_out, and zeros pad both factors to sizes
        that matrix units handle fast (50258 is only even, and takes three times as long)."""
        D, V = self.weight.shape
        out_VE = anchor_head.weight
        if anchor_head.bias is not None:
            out_VE = torch.cat((out_VE, anchor_head.bias[:, None]), dim=1)
        rows, columns = -V % ALIGNED, -out_VE.shape[1] % ALIGNED
        product_DE = F.pad(self.weight, (0, rows)).to(dtype) @ F.pad(out_VE, (0, columns, 0, rows)).to(dtype)
        matrix_DD, offset_D = product_DE[:, :D], self.bias
        if anchor_head.bias is not None:
            offset_D = product_DE[:, D] if offset_D is None else product_DE[:, D] + offset_D
        return matrix_DD, offset_D

    def forward(self, stream_BLD: Tensor, anchor_BLD: Tensor, anchor_head: nn.Linear) -> Tensor:
        return F.linear(anchor_BLD, *self.product(anchor_head)).to(stream_BLD.dtype)

    def from_logits(self, stream_BLD: Tensor, anchor_logits_BLV: Tensor) -> Tensor:
        return F.linear(anchor_logits_BLV, self.weight, self.bias)

    def freeze(self, anchor_head: nn.Linear) -> "FrozenLinearBridge":
        return FrozenLinearBridge(self, anchor_head)

    @staticmethod
    def flops(cfg: ModelConfig) -> float:
        return 2 * cfg.hidden_size**2


class FrozenLinearBridge(LinearBridge):
    """A linear bridge whose product is computed once. It keeps the factors, so that its weights can be saved."""

    matrix_DD: Tensor
    offset_D: Tensor | None

    def __init__(self, trained: LinearBridge, anchor_head: nn.Linear):
        nn.Module.__init__(self)
        self.weight, self.bias = trained.weight, trained.bias
        with torch.no_grad():
            matrix_DD, offset_D = trained.product(anchor_head)
        self.register_buffer("matrix_DD", matrix_DD, persistent=False)
        self.register_buffer("offset_D", offset_D, persistent=False)

    def forward(self, stream_BLD: Tensor, anchor_BLD: Tensor, anchor_head: nn.Linear) -> Tensor:
        return F.linear(anchor_BLD, self.matrix_DD, self.offset_D).to(stream_BLD.dtype)

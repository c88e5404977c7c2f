"""The bridge of the two-stage model: anchor logits -> denoiser width, without ever forming the logits.

The paper feeds the denoiser y W_in^T + b_in where y = h W_out^T + b_out are the anchor logits. Nothing stands between
the two linear maps, so with M = W_in W_out the detour D -> V -> D is one D x D matrix,

    W_in (W_out h + b_out) + b_in = M h + (W_in b_out + b_in),

in training too: gradients reach both factors through the product. 2 D^2 V operations a step replace 4 N D V.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNED = 64


class Bridge(nn.Module):
    frozen_matrix_DD: Tensor | None
    frozen_offset_D: Tensor | None

    def __init__(self, vocab_size: int, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, vocab_size))  # W_in
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.register_buffer("frozen_matrix_DD", None, persistent=False)
        self.register_buffer("frozen_offset_D", None, persistent=False)

    def collapse(self, anchor_head: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """(M, offset). Under autocast in its precision, as all products are: the sum over the vocabulary is longer
        than any other, so that the rounding of its terms averages out."""
        device = self.weight.device.type
        if torch.is_autocast_enabled(device):
            return self.collapse_aligned(anchor_head, torch.get_autocast_dtype(device))
        matrix_DD = self.weight @ anchor_head.weight
        offset_D = self.bias
        if anchor_head.bias is not None:
            through = self.weight @ anchor_head.bias
            offset_D = through if offset_D is None else through + offset_D
        return matrix_DD, offset_D

    def collapse_aligned(self, anchor_head: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The same as one product: with the head's bias as one more column of W_out, and with zeros up to sizes that
        matrix units like (50258 is only even: three times the time)."""
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

    def freeze(self, anchor_head: nn.Linear) -> None:
        """Compute the product once, for inference with weights that no longer change."""
        with torch.no_grad():
            self.frozen_matrix_DD, self.frozen_offset_D = self.collapse(anchor_head)

    def forward(self, anchor_BLD: Tensor, anchor_head: nn.Linear) -> Tensor:
        if self.frozen_matrix_DD is not None:
            return F.linear(anchor_BLD, self.frozen_matrix_DD, self.frozen_offset_D)
        return F.linear(anchor_BLD, *self.collapse(anchor_head))

"""Many small arrays to the device in one copy that the host does not wait for.

Such a copy has to come from pinned memory: from any other it may wait for everything queued before. Pinning is slow, so
a few buffers go round. That also bounds how far the host runs ahead of the device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AHEAD = 8  # copies under way


class Uploads:
    def __init__(self, device: torch.device):
        self.device, self.turn = device, 0
        self.buffers = [torch.empty(0, dtype=torch.int64)] * AHEAD
        self.copied = [torch.cuda.Event() for _ in range(AHEAD)] if device.type == "cuda" else []

    def __call__(self, *arrays: NDArray) -> list[Tensor]:
        """Arrays of 8-byte numbers, in their shapes and types."""
        sizes = [a.size for a in arrays]
        parts = self.send([a.view(np.int64).ravel() for a in arrays]).split(sizes)
        kinds = (torch.float64 if a.dtype == np.float64 else torch.int64 for a in arrays)
        return [part.view(kind).view(a.shape) for part, kind, a in zip(parts, kinds, arrays)]

    def send(self, arrays: list[NDArray[np.int64]]) -> Tensor:
        if not self.copied:
            return torch.from_numpy(np.concatenate(arrays)).to(self.device)
        n, turn = sum(a.size for a in arrays), self.turn % AHEAD
        self.turn += 1
        self.copied[turn].synchronize()  # the copy from this buffer, AHEAD calls ago
        if self.buffers[turn].numel() < n:
            self.buffers[turn] = torch.empty(2 * n, dtype=torch.int64, pin_memory=True)
        host = self.buffers[turn][:n]
        np.concatenate(arrays, out=host.numpy())
        sent = host.to(self.device, non_blocking=True)
        self.copied[turn].record()
        return sent

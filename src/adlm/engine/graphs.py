"""From host to device without waiting: CUDA graphs, and many small arrays in one copy.

Graphs stand behind one switch: off, a function is itself; on, each input shape is one graph launch. A network
evaluation of one sequence is a few hundred kernels of microseconds each, so launching them one by one from Python costs
more than running them. A captured graph replays them in one launch. Inputs are copied into the buffers the graph was
captured with, and outputs are the graph's own: valid until the next call with the same shapes. Capturing runs the
function a few times, so a captured function must be one that may be repeated.

A copy that the host does not wait for has to come from pinned memory: from any other it may wait for everything queued
before. Pinning is slow, so a few buffers go round. That also bounds how far the host runs ahead of the device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Static shapes: sequences of a call, and positions masked again before it
SEQUENCE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MASK_SIZES = (64, 1024)
WARM_UP = 3
AHEAD = 8  # copies under way


def at_least(n: int, sizes: tuple[int, ...]) -> int:
    """The static size that holds n; beyond the largest, multiples of it."""
    return next((s for s in sizes if s >= n), -(-n // sizes[-1]) * sizes[-1])


class Graphs:
    def __init__(self, on: bool):
        self.on = on
        # One pool for all: what a graph needs only while it runs is the same memory in each of them. Safe because they
        # run one after the other, and one that reads another's output is captured after it.
        self.pool = torch.cuda.graph_pool_handle() if on else None

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` takes tensors, Fixed tensors and plain hashable values, and returns tensors (a tuple, or None in
        it). It may change tensors that it holds itself."""
        return Captured(function, self.pool) if self.on else lambda *args: function(*map(unwrap, args))


class Fixed:
    """A tensor whose memory stays where it is (the output of another graph): read in place, not copied."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def place(self) -> tuple[int, torch.Size]:
        return self.tensor.data_ptr(), self.tensor.shape


def unwrap(x: Any) -> Any:
    return x.tensor if isinstance(x, Fixed) else x


class Captured:
    def __init__(self, function: Callable[..., Any], pool: Any):
        self.function, self.pool = function, pool
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        key = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args)
        if key not in self.captured:
            self.captured[key] = self.capture(args)
        graph, inputs, outputs = self.captured[key]
        for buffer, tensor in zip(inputs, tensors):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return outputs

    def capture(self, args: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [a.clone() if isinstance(a, Tensor) else unwrap(a) for a in args]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and allocates outside the capture
            for _ in range(WARM_UP):
                self.function(*fixed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = self.function(*fixed)
        return graph, [f for f, a in zip(fixed, args) if isinstance(a, Tensor)], outputs


class Uploads:
    def __init__(self, device: torch.device):
        self.device, self.turn = device, 0
        self.buffers = [torch.empty(0, dtype=torch.int64)] * AHEAD
        self.copied = [torch.cuda.Event() for _ in range(AHEAD)] if device.type == "cuda" else []

    def __call__(self, *arrays: NDArray) -> list[Tensor]:
        """Arrays of 8-byte numbers, in their shapes and types."""
        sizes, flat = [a.size for a in arrays], [a.view(np.int64).ravel() for a in arrays]
        if not self.copied:
            sent = torch.from_numpy(np.concatenate(flat)).to(self.device)
        else:
            n, turn = sum(sizes), self.turn % AHEAD
            self.turn += 1
            self.copied[turn].synchronize()  # the copy from this buffer, AHEAD calls ago
            if self.buffers[turn].numel() < n:
                self.buffers[turn] = torch.empty(2 * n, dtype=torch.int64, pin_memory=True)
            host = self.buffers[turn][:n]
            np.concatenate(flat, out=host.numpy())
            sent = host.to(self.device, non_blocking=True)
            self.copied[turn].record()
        kinds = (torch.float64 if a.dtype == np.float64 else torch.int64 for a in arrays)
        return [part.view(kind).view(a.shape) for part, kind, a in zip(sent.split(sizes), kinds, arrays)]

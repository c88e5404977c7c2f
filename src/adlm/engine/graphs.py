"""torch.compile and CUDA graphs behind one switch: off, a function is itself; on, each input shape is one graph launch.

A network evaluation of one row is a few hundred kernels of microseconds each, so launching them one by one from Python
costs more than running them. A captured graph replays them in one launch. Inputs are copied into the buffers the
graph was captured with, and outputs are the graph's own: valid until the next call with the same shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

WARM_UP = 3


class Graphs:
    def __init__(self, on: bool, compile: bool):
        self.on, self.compile = on, compile

    def wrap(self, function: Callable[..., Any], compile: bool = True) -> Callable[..., Any]:
        """`function` takes tensors first, then plain hashable values, and returns tensors (a tuple, or None in it).
        `compile` false: only captured."""
        if self.compile and compile:
            # The second size makes the batch dimension a variable, so a function is compiled two or three times per
            # combination of its plain arguments, not once per shape.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            function = torch.compile(function, fullgraph=True)
        return Captured(function) if self.on else function


class Captured:
    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        if key not in self.captured:
            self.captured[key] = self.capture(args)
        graph, inputs, outputs = self.captured[key]
        for buffer, tensor in zip(inputs, tensors):
            buffer.copy_(tensor)
        graph.replay()
        return outputs

    def capture(self, args: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [a.clone() if isinstance(a, Tensor) else a for a in args]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and allocates outside the capture
            for _ in range(WARM_UP):
                self.function(*fixed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(*fixed)
        return graph, [a for a in fixed if isinstance(a, Tensor)], outputs

"""The network of a training step as CUDA graphs: one launch forward and one back, where the host made a thousand.

A graph is a recording of kernels with their addresses, so everything it reads and writes must have a fixed shape and
place. Weights have. Batches are copied into the graph's own memory (kilobytes). Only the number of positions that the
denoiser's head reads changes from step to step: `objectives.base.rounded` fills it up to an eighth of the batch, and
there is a pair of graphs for each number met, two or three in practice. They share the memory of their activations: a
backward pass follows its forward pass before the next one starts. Gradients are the graph's, too, and have to be used
before the next step: no accumulation over micro-batches. Losses and update stay outside.
"""

from typing import Any

import torch
from torch import Tensor, nn

from adlm.models import Network
from adlm.models.network import Hidden


class _Network(nn.Module):
    """A model as torch's recorder wants it: tensors in, tensors out."""

    def __init__(self, model: Network, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, tokens_BL: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        hidden = self.model(tokens_BL, **dict(zip(self.names, given)))
        return tuple(states for states in hidden if states is not None)


class Replays:
    """A model whose training passes are replayed. Heads are the model's; its states are gone with the next call."""

    def __init__(self, model: Network):
        self.model = model
        self.recorded: dict[tuple, Any] = {}
        self.pool: Any = None

    @property
    def head(self) -> nn.Linear:
        return self.model.head

    @property
    def anchor_head(self) -> nn.Linear | None:
        return self.model.anchor_head

    def __call__(self, tokens_BL: Tensor, sigma_B: Tensor | None = None, at_N: Tensor | None = None) -> Hidden:
        given = {name: x for name, x in (("sigma_B", sigma_B), ("at_N", at_N)) if x is not None}
        key = (tokens_BL.shape, *((name, x.shape) for name, x in given.items()))
        if key not in self.recorded:
            self.recorded[key] = self.record(tokens_BL, given)
        denoiser_BLD, *anchor = self.recorded[key](tokens_BL, *given.values())
        return Hidden(denoiser_BLD, anchor[0] if anchor else None)

    def record(self, tokens_BL: Tensor, given: dict[str, Tensor]) -> Any:
        """Run both passes a few times, which also compiles them, and then once more for the recorder."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        own = tuple(x.clone() for x in (tokens_BL, *given.values()))  # where later batches are copied to
        if "at_N" in given:  # compiled once for all numbers
            torch._dynamo.maybe_mark_dynamic(own[-1], 0)
        device = tokens_BL.device.type
        precision = torch.get_autocast_dtype(device)
        with torch.autocast(device, precision, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            recorded = torch.cuda.make_graphed_callables(
                _Network(self.model, list(given)), own, allow_unused_input=True, pool=self.pool
            )
        torch.cuda.empty_cache()  # what the first passes took is in the graph's memory now
        return recorded

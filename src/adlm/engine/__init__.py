"""The generation engine: requests in, sequences out, whoever asks - command line, evaluation, server.

request.py    Request, Frame, Result; text with holes; the canvases of a request
engine.py     queue and slots; the engine of diffusion models
causal.py     the engine of causal models: key-value cache
evaluator.py  the device side: canvases, one network call
prepare.py    the network as the engine runs it: precision, constants folded
drawing.py    head, filters and draw at chosen positions, in bounded pieces
kernels.py    the draw as a Triton kernel
graphs.py     CUDA graphs and copies that nobody waits for
"""

import torch

from adlm.diffusion.schedules import Schedule
from adlm.engine.causal import CausalEngine
from adlm.engine.engine import Engine
from adlm.engine.request import Frame, Request, Result
from adlm.models import Network
from adlm.schema import ObjectiveConfig

__all__ = ["CausalEngine", "Engine", "Frame", "Request", "Result", "make_engine"]


def make_engine(
    model: Network,
    schedule: Schedule | None = None,
    slots: int = 16,
    device: str | torch.device = "cpu",
    precision: str = "auto",
    compile: str = "auto",
    tau: int = ObjectiveConfig.tau,
) -> Engine | CausalEngine:
    """The engine for this kind of model. A causal one has no use for `schedule` and `tau`, and ignores `compile`: it
    is never compiled, nor captured in graphs."""
    if model.config.causal:
        return CausalEngine(model, slots, device, precision)
    return Engine(model, schedule, slots, device, precision, compile, tau)

"""The generation engine: requests in, rows out, whoever asks - command line, evaluation, server.

request.py  Request, Frame, Result
rows.py     rows join and leave: queue, slots, cancelling, streaming
engine.py   diffusion models: every row's next event in one call
causal.py   causal models: key-value cache
windows.py  what a request asks for, canvas by canvas: strides, banned phrases, end of text
evaluator.py the device side: canvases, one evaluation
prepare.py  the model as the engine runs it: precision, constants folded
drawing.py  head, cut and draw at chosen positions, in bounded pieces
graphs.py   CUDA graphs
template.py text with holes
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

"""The generation engine: requests in, sequences out, for the command line, evaluation and the server.

request.py    Request, Frame, Result; text with holes; the canvases of a request
slots.py      queue and slots: sequences join, pause and leave
engine.py     how a sequence is filled: windows, trajectories, network calls
evaluator.py  the device side: canvases, one network call
blocks.py     block by block with a key-value cache; causal models are blocks of one
prepare.py    the network as the engine runs it: precision, constants folded, CUDA graphs
drawing.py    head, filters and draw at chosen positions, in bounded pieces
"""

from adlm.engine.blocks import block_of
from adlm.engine.engine import Engine, most_evaluations
from adlm.engine.request import Frame, Request, Result

__all__ = ["Engine", "Frame", "Request", "Result", "block_of", "most_evaluations"]

"""Objectives: what a network is trained on. tables.OBJECTIVES names them, tables.ANCHOR_RULES the anchor rules.

base.py       the interface: Sequences in, CorruptedBatch out; one loss for all objectives
anchors.py    which tokens are anchors
nelbo.py      NELBO of masked diffusion (Eq. 4), by times and by numbers of masks, for whole sequences and for blocks;
              ANELBO (Eq. 7): the NELBO and the anchor term
baselines.py  next-token cross-entropy (AR, A2R), D3PM's discrete-time bound, SEDD's score entropy
"""

from adlm.objectives.base import (
    CorruptedBatch,
    LossOutput,
    Objective,
    Sequences,
    Term,
    loss,
    make_objective,
    position_losses,
    sequence_bounds,
)

__all__ = [
    "CorruptedBatch",
    "LossOutput",
    "Objective",
    "Sequences",
    "Term",
    "loss",
    "make_objective",
    "position_losses",
    "sequence_bounds",
]

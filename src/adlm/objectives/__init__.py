"""Objectives: what a network is trained on. tables.OBJECTIVES names them, tables.ANCHOR_RULES the anchor rules.

base.py            what an objective is: Sequences in, CorruptedBatch out, and its one loss
nelbo.py           NELBO of masked diffusion (Eq. 4), by times and by numbers of masks
anchors.py         which tokens are anchors
blocks.py          the same for a chain of blocks (block diffusion)
anelbo.py          ANELBO (Eq. 7): the NELBO and the anchor term
d3pm.py            discrete-time bound of a prediction that may put mass on the mask
score_entropy.py   denoising score entropy (SEDD)
autoregressive.py  next-token cross-entropy (AR, A2R)
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

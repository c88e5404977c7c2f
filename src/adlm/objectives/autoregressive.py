"""Next-token cross-entropy: AR, and A2R when the model is anchored (section 4 of the paper).

The sequence is read up to its last but one token and every following token is a target; the likelihood is exact, not a
bound. A2R adds gamma * the anchor network's next-token cross-entropy where the *target* is an anchor.
"""

import torch
from torch import Tensor

from adlm.errors import require
from adlm.objectives.anelbo import anchor_term, draw_anchors, gamma_at
from adlm.objectives.base import CorruptedBatch, Objective, Sequences, Term, select
from adlm.schema import ModelConfig, ObjectiveConfig


class Autoregressive(Objective):
    """Nothing is corrupted: the network reads the clean sequence."""

    sampler = "autoregressive"

    @classmethod
    def check(cls, cfg: ObjectiveConfig, model: ModelConfig) -> None:
        # not a rule of the command line: `adlm reason` has anchors in its own way, and plain models
        require(
            model.anchored or cfg.gamma <= 0,
            f"objective.gamma={cfg.gamma}: plain AR has no anchors (algo=a2r has)",
        )

    def corrupt(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        batch = self.corrupt_for_bound(sequences, 0)
        gamma = gamma_at(self.cfg, progress)
        if gamma > 0:
            anchors_BL = self.find_anchors(sequences.tokens_BL, self.cfg)[:, 1:] & real_targets(sequences)
            scored_BL = draw_anchors(self.cfg, anchors_BL, sequences.example_B, self.seed, step)
            batch.terms["anchor"] = anchor_term(self.cfg, gamma, *next_tokens(sequences, scored_BL))
        return batch

    def corrupt_for_bound(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        scored_BL = real_targets(sequences)
        term = Term("denoiser", *next_tokens(sequences, scored_BL), exclude=self.mask_id)
        count = scored_BL.numel() if sequences.scored_BL is None else int(scored_BL.sum())
        return CorruptedBatch(sequences.tokens_BL[:, :-1], None, count, {"nll": term})


def real_targets(sequences: Sequences) -> Tensor:
    """Targets that are neither padding nor given, [B, L-1]."""
    if sequences.scored_BL is None:
        return torch.ones_like(sequences.tokens_BL[:, 1:], dtype=torch.bool)
    return sequences.scored_BL[:, 1:]


def next_tokens(sequences: Sequences, scored_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, targets and weights (1) of the scored predictions of the next token."""
    ones_B = torch.ones(len(sequences.tokens_BL), device=sequences.tokens_BL.device)
    return select(scored_BL, sequences.tokens_BL[:, 1:], ones_B)

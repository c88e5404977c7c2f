"""ANELBO (Eq. 7, Theorem 4.1): the NELBO through both networks + gamma * the anchor network's own cross-entropy.

The anchor term has the same weight w(t) and acts where the rule A(x) says anchor: at every such position, visible ones
included, as in the release (anchor_positions=all), or at masked ones only. It is a plain softmax over all V entries,
without SUBS. gamma is a function of the step (`gamma_at`). Perplexity never contains it.
"""

import torch
from torch import Tensor

from adlm.diffusion.uniforms import Stream, uniforms32
from adlm.objectives.base import CorruptedBatch, Sequences, Term
from adlm.objectives.nelbo import Nelbo
from adlm.schema import ObjectiveConfig


def gamma_at(cfg: ObjectiveConfig, progress: float) -> float:
    """Up a straight line from 0 to gamma at gamma_warmup; from there on gamma, and from gamma_until on 0."""
    if cfg.gamma_until < 1 and progress >= cfg.gamma_until:
        return 0.0
    return cfg.gamma * (progress / cfg.gamma_warmup) if progress < cfg.gamma_warmup else cfg.gamma


class Anelbo(Nelbo):
    def corrupt(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        noised = self.noised_for_training(sequences, step, progress)
        batch = self.batch_of(noised)
        gamma = gamma_at(self.cfg, progress)
        if gamma > 0:
            anchors_BL = self.find_anchors(sequences.tokens_BL, self.cfg)
            if self.cfg.anchor_positions == "masked":
                anchors_BL = anchors_BL & noised.masked_BL
            scored_BL = draw_anchors(self.cfg, anchors_BL, sequences.example_B, self.seed, step)
            batch.terms["anchor"] = anchor_term(self.cfg, gamma, *noised.where(scored_BL))
        return batch


def draw_anchors(cfg: ObjectiveConfig, anchors_BL: Tensor, example_B: Tensor, seed: int, step: int) -> Tensor:
    """Draw the anchors that are scored at this step, each with probability `anchor_fraction`."""
    if cfg.anchor_fraction == 1:
        return anchors_BL
    position_L = torch.arange(anchors_BL.shape[1], device=anchors_BL.device)
    return anchors_BL & (uniforms32(seed, Stream.ANCHOR, step, example_B[:, None], position_L) < cfg.anchor_fraction)


def anchor_term(cfg: ObjectiveConfig, gamma: float, positions_N: Tensor, targets_N: Tensor, weights_N: Tensor) -> Term:
    """The anchor network's cross-entropy at the anchors drawn.

    As in Eq. 7 it is a sum, divided by all tokens and not by the anchors among them, whatever the rule. With
    anchor_fraction = 1/4 a random quarter of the anchors is scored, and counts four times: the same sum on average, and
    the head, most of what anchors cost in training, reads a quarter of the positions.
    """
    return Term("anchor", positions_N, targets_N, weights_N / cfg.anchor_fraction, scale=gamma)

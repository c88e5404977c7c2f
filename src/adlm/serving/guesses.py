"""What the anchor network believes about the holes of rows: its best tokens, with probabilities."""

from typing import NamedTuple

import torch

from adlm.api import LanguageModel
from adlm.engine.drawing import LOGITS_AT_ONCE


class Guess(NamedTuple):
    position: int
    tokens: list[int]
    """Most probable first."""
    probabilities: list[float]


@torch.inference_mode()
def best_guesses(lm: LanguageModel, rows: list[list[int]], top: int = 1) -> list[list[Guess]]:
    """For every row, the anchor network's `top` tokens at each masked position; rows of one length share a pass.

    Only masked positions go through the head. Rows longer than the model are read by their last window.
    """
    model, found = lm.model, [[] for _ in rows]
    if model.anchor_head is None:
        return found
    length = model.config.length
    for size in sorted({min(len(r), length) for r in rows}):
        members = [i for i, r in enumerate(rows) if min(len(r), length) == size]
        tokens_BL = torch.tensor([rows[i][-size:] for i in members], device=lm.device)
        at = (tokens_BL == model.mask_id).nonzero()
        if not len(at):
            continue
        anchor_BLD = model(tokens_BL, lm.noise_level(tokens_BL)).anchor_BLD
        assert anchor_BLD is not None
        for piece in at.split(max(1, LOGITS_AT_ONCE // model.vocab_size)):
            logits_NV = model.anchor_head(anchor_BLD[piece[:, 0], piece[:, 1]]).float()
            logits_NV[:, model.mask_id] = -torch.inf
            p, token = logits_NV.softmax(-1).topk(min(top, model.vocab_size - 1))
            for (b, l), tokens, probabilities in zip(piece.tolist(), token.tolist(), p.tolist()):
                i = members[b]
                found[i].append(Guess(len(rows[i]) - size + l, tokens, probabilities))
    return found

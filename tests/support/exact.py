"""Denoisers that know the truth: p(x) is a table, small enough to enumerate."""

import itertools

import torch
from torch import nn

from adlm.models import Hidden
from adlm.models.layers import pick_flat
from adlm.objectives import Sequences


def sequences_of(tokens, start=0, total=None, **given):
    example = torch.arange(start, start + len(tokens))
    return Sequences(tokens, example, total or len(tokens), **given)


class ExactDenoiser(nn.Module):
    """The true p(x^l | visible part of z) of a table p(x), behind the interface of a model."""

    def __init__(self, p_x: torch.Tensor):
        super().__init__()
        self.n_tokens, self.length = p_x.shape[0], p_x.dim()
        self.mask_id, self.vocab_size = self.n_tokens, self.n_tokens + 1
        self.head = nn.Linear(self.vocab_size, self.vocab_size, bias=False)
        nn.init.eye_(self.head.weight)
        self.anchor_head = None
        self.sequences = torch.tensor(list(itertools.product(range(self.n_tokens), repeat=self.length)))
        self.p = p_x.reshape(-1)

    def forward(self, z_BL, sigma_B=None, at_N=None):
        logits_BLV = self.logits_of(z_BL)
        return Hidden(logits_BLV if at_N is None else pick_flat(logits_BLV, at_N), None)

    def logits_of(self, z_BL):
        agrees = ((z_BL[:, None] == self.sequences) | (z_BL[:, None] == self.mask_id)).all(-1)
        joint = agrees * self.p
        joint = joint / joint.sum(-1, keepdim=True)
        one_hot = nn.functional.one_hot(self.sequences, self.vocab_size).float()
        return torch.einsum("bs,slv->blv", joint, one_hot).clamp_min(1e-30).log()


class ExactBlocks(ExactDenoiser):
    """The same for [noisy ; clean]: p(x^l | visible part of its block, clean blocks before)."""

    def forward(self, z_BL, sigma_B=None, at_N=None, block_B=None):
        if block_B is None:
            return super().forward(z_BL, sigma_B, at_N)
        noisy_BL, clean_BL = z_BL.chunk(2, dim=1)
        block_BL = torch.arange(self.length) // block_B[:, None]
        states = torch.zeros(*noisy_BL.shape, self.vocab_size)
        for b in range(int(block_BL.max()) + 1):
            seen_BL = torch.where(block_BL < b, clean_BL, torch.where(block_BL == b, noisy_BL, self.mask_id))
            states = torch.where((block_BL == b)[..., None], self.logits_of(seen_BL), states)
        return Hidden(states if at_N is None else pick_flat(states, at_N), None)

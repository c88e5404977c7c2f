"""Block diffusion: the NELBO of a chain of blocks, log p(x) = sum_b log p(x^b | x^<b), each term bounded by itself.

    -log p(x) <= sum_b E [ weight * sum_{i in b masked} -log p_theta(x_i | x^b noisy, x^<b clean) ]

Every block has noise of its own: a time t_b with weight w(t_b), or k of its n tokens masked with weight n / k (nelbo.py
has both, and why they are one bound). Training counts: with K = 1 then every token is masked with weight 1, which is
autoregression without any noise, where a random time would leave a token out or weigh it by 1/t. K = L is the NELBO.

The network reads [noisy ; clean] (models/blockwise.py), or the noisy sequences alone where all are one block. If
predictions are shifted nothing stands before token 0: it is given, and neither masked nor scored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adlm.diffusion.schedules import GOLDEN_RATIO
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.objectives.base import CorruptedBatch, Sequences, Term, after_prompts


class BlockSettings(NamedTuple):
    """What an objective has to know of a block-diffusion model."""

    lengths: tuple[int, ...]
    """Block lengths K; the first is that of bounds."""
    shift: bool

    def own(self, sequences: Sequences) -> Tensor:
        """The block length of bounds, for every sequence."""
        return torch.full_like(sequences.example_B, min(self.lengths[0], sequences.tokens_BL.shape[1]))

    def drawn(self, sequences: Sequences, seed: int, step: int) -> Tensor:
        """A block length for each sequence of optimizer step `step`: all in turn, from a random one on."""
        lengths = torch.tensor(self.lengths, device=sequences.example_B.device)
        first = int(float(uniforms(seed, Stream.BLOCK, step, lengths[:1])) * len(lengths))
        return lengths[(sequences.example_B + first) % len(lengths)].clamp(max=sequences.tokens_BL.shape[1])


def block_times(t_B: Tensor, block_B: Tensor, L: int) -> Tensor:
    """A time for every block, [B, most blocks of a sequence]: the sequence's own for the first, then golden-ratio
    steps, which spread evenly over [0, 1) from any start."""
    most = -(-L // int(block_B.min()))
    return torch.remainder(t_B[:, None] + torch.arange(most, device=t_B.device) * GOLDEN_RATIO, 1.0)


class CountedMasks(NamedTuple):
    masked_BL: Tensor
    weight_BL: Tensor
    """n / k of the block."""
    last_Bb: Tensor
    """The k-th smallest uniform of each block (2b + u in block b)."""


def masks_by_count(u_BL: Tensor, real_BL: Tensor, block_B: Tensor, t_Bb: Tensor) -> CountedMasks:
    """Mask in each block the k of its n real positions that have the smallest uniforms, k = floor(t n) + 1."""
    block_BL = torch.arange(u_BL.shape[1], device=u_BL.device) // block_B[:, None]
    n_Bb = torch.zeros_like(t_Bb, dtype=torch.long).scatter_add_(1, block_BL, real_BL.long())
    k_Bb = torch.minimum((t_Bb * n_Bb).floor().long() + 1, n_Bb.clamp(min=1))
    # One sort for all blocks of a sequence: those of block b have keys in [2b, 2b + 1), or one more where not real.
    key_BL = 2 * block_BL + u_BL
    ordered_BL = (key_BL + (~real_BL).to(key_BL.dtype)).sort(dim=-1).values
    first_Bb = torch.arange(t_Bb.shape[1], device=u_BL.device) * block_B[:, None]
    last_Bb = ordered_BL.gather(1, (first_Bb + k_Bb - 1).clamp(max=u_BL.shape[1] - 1))
    weight_Bb = n_Bb / k_Bb
    return CountedMasks(key_BL <= last_Bb.gather(1, block_BL), weight_Bb.gather(1, block_BL), last_Bb)


class NoisedBlocks:
    """Sequences with noise in every block: which positions are masked, with which weight."""

    def __init__(
        self, sequences: Sequences, block_B: Tensor, masked_BL: Tensor, weight_BL: Tensor, shift: bool, mask_id: int
    ):
        self.sequences, self.block_B, self.weight_BL, self.shift = sequences, block_B, weight_BL, shift
        self.masked_BL = masked_BL.clone()
        self.masked_BL[:, : int(shift)] = False
        z_BL = torch.where(self.masked_BL, mask_id, sequences.tokens_BL)
        self.z_BL = after_prompts(sequences, z_BL, mask_id)
        self.whole = bool((block_B >= sequences.tokens_BL.shape[1]).all())
        """All sequences are one block, before which nothing clean stands."""

    def where(self, scored_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, targets and weights of the scored tokens, those left out that cannot be predicted."""
        positions_N = (scored_BL & predictable(self.sequences, self.shift)).flatten().nonzero().squeeze(1)
        targets_N = self.sequences.tokens_BL.flatten().index_select(0, positions_N)
        return positions_N, targets_N, self.weight_BL.flatten().index_select(0, positions_N).float()

    def batch(self, terms: dict[str, Term]) -> CorruptedBatch:
        tokens_BM = self.z_BL if self.whole else torch.cat((self.z_BL, self.sequences.tokens_BL), dim=1)
        count = int(predictable(self.sequences, self.shift).sum())
        block_B = None if self.whole else self.block_B
        return CorruptedBatch(tokens_BM, None, count, terms, block_B=block_B)


def predictable(sequences: Sequences, shift: bool = False) -> Tensor:
    """Tokens that are neither padding nor given, and that have one before them if predictions are shifted."""
    every_BL = torch.ones_like(sequences.tokens_BL, dtype=torch.bool)
    found_BL = every_BL if sequences.scored_BL is None else sequences.scored_BL.clone()
    found_BL[:, : int(shift)] = False
    return found_BL

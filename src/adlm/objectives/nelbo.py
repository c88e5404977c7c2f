"""NELBO of masked diffusion (Eq. 4), in continuous and in discrete time, and by numbers of masks.

With SUBS only masked positions contribute, each w(t) * -log <x_theta^l(z_t), x^l>:

    continuous   w(t) = -alpha'_t / (1 - alpha_t)
    T steps      w(t) = T (alpha_s - alpha_t) / (1 - alpha_t),   t in {1/T, ..., 1}, s = t - 1/T

so the bound is one weighted cross-entropy over masked positions. The prior and reconstruction terms vanish (alpha_0 =
1, alpha_1 = 0 up to the schedule's eps; times below sampling_eps are not visited, as in the release).

The same bound by numbers of masks instead of times (`corrupt_exact_count`):

    NELBO = sum_k S_k / k = L * E_{k ~ U{1..L}}[S_k / k],

where S_k is the expected cross-entropy sum with exactly k of L positions masked. Proof: integrating the continuous-time
weight over t, with alpha = 1 - t, gives each mask pattern of size k the weight B(k, L-k+1) = 1 / (k C(L, k)). It is the
same number for any schedule. This estimate has no variance from the number of masks, and needs no smallest time.

The module also has the bound for a chain of blocks (block diffusion), and the ANELBO (Eq. 7), which adds the anchor
term.
"""

import functools
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.process import (
    GOLDEN_RATIO,
    MOST_NOISE,
    Schedule,
    beta_quantile,
    draw_times,
    mask_fraction,
    mask_tokens,
    noise_level,
)
from adlm.diffusion.random import Stream, uniforms, uniforms32
from adlm.objectives.base import (
    CorruptedBatch,
    Objective,
    Sequences,
    Term,
    after_prompts,
    real_targets,
    select,
)
from adlm.schema import ObjectiveConfig

# ---- blocks ----------------------------------------------------------------------------------------------------------
# Block diffusion: the NELBO of a chain of blocks, log p(x) = sum_b log p(x^b | x^<b), with a bound for each term.
#
#     -log p(x) <= sum_b E [ weight * sum_{i in b masked} -log p_theta(x_i | x^b noisy, x^<b clean) ]
#
# Every block has its own noise: a time t_b with weight w(t_b), or k of its n tokens masked with weight n / k (the
# header says why both are one bound). Training uses numbers of masks: with K = 1 every token is then masked with weight
# 1, which is autoregression without any noise, whereas a random time would leave a token out or weight it by 1/t. K = L
# is the NELBO.
#
# The network reads [noisy ; clean] (models/transformer.py). At both extremes of K one half is enough (`Halves`), and
# two such sequences share a row. If predictions are shifted, nothing precedes token 0: it is given, and neither masked
# nor scored.


class Halves(IntEnum):
    """The halves of [noisy ; clean] that the network has to read."""

    BOTH = 0
    """[noisy ; clean]."""
    NOISY = 1
    """One block, with no clean token before it."""
    CLEAN = 2
    """Blocks of one token with shifted predictions: all are read at clean tokens, causally."""

    @staticmethod
    def of(block_B: Tensor, L: int, shift: bool) -> Tensor:
        """The halves that each sequence needs, by its block length."""
        one_block_B, one_token_B = block_B >= L, (block_B == 1) & shift
        return torch.where(one_block_B, Halves.NOISY, torch.where(one_token_B, Halves.CLEAN, Halves.BOTH))


class Rows(NamedTuple):
    """Where sequences lie in rows of [noisy ; clean]: those that need one half share a row, two by two."""

    row_B: Tensor
    half_B: Tensor
    """The half of its row that a sequence has: 0 noisy, 1 clean; 0 if it has both."""
    shares_B: Tensor
    """Whether another sequence has the other half."""
    block_R2: Tensor
    """Block length of the halves of each row."""

    @staticmethod
    def of(halves_B: Tensor, block_B: Tensor) -> "Rows":
        """Any sequence of one block may share a row with one that is read at clean tokens, or with another of one
        block. Those left over have a row for themselves."""
        noisy, clean = ((halves_B == half).nonzero().flatten().tolist() for half in (Halves.NOISY, Halves.CLEAN))
        n = min(len(noisy), len(clean))
        rest = noisy[n:]
        pairs = [*zip(noisy[:n], clean[:n]), *zip(rest[::2], rest[1::2])]
        shares_B = torch.zeros_like(halves_B, dtype=torch.bool)
        both = torch.tensor(pairs, dtype=torch.long, device=block_B.device).view(-1, 2)
        shares_B[both.flatten()] = True
        row_B, half_B = (~shares_B).cumsum(0) - 1, torch.zeros_like(halves_B)
        whole = int((~shares_B).sum())
        row_B[both] = torch.arange(whole, whole + len(pairs), device=block_B.device)[:, None]
        half_B[both[:, 1]] = 1
        return Rows(row_B, half_B, shares_B, torch.cat((block_B[~shares_B, None].expand(-1, 2), block_B[both])))


class BlockSettings(NamedTuple):
    """What an objective needs to know about a block-diffusion model."""

    lengths: tuple[int, ...]
    """Block lengths K; bounds use the first."""
    shift: bool

    def own(self, sequences: Sequences) -> Tensor:
        """The block length that bounds use, for every sequence."""
        return torch.full_like(sequences.example_B, min(self.lengths[0], sequences.tokens_BL.shape[1]))

    def drawn(self, sequences: Sequences, seed: int, step: int) -> Tensor:
        """A block length for each sequence of optimizer step `step`: all lengths in turn, starting at a random one."""
        lengths = torch.tensor(self.lengths, device=sequences.example_B.device)
        first = int(float(uniforms(seed, Stream.BLOCK, step, lengths[:1])) * len(lengths))
        return lengths[(sequences.example_B + first) % len(lengths)].clamp(max=sequences.tokens_BL.shape[1])


def block_times(t_B: Tensor, block_B: Tensor, L: int) -> Tensor:
    """A time for every block, [B, largest number of blocks]: the first block has the sequence's own, the next ones
    follow in golden-ratio steps, which spread evenly over [0, 1) from any start."""
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
    # One sort for all blocks of a sequence: keys of block b lie in [2b, 2b + 1), plus 1 where the position is not real.
    key_BL = 2 * block_BL + u_BL
    ordered_BL = (key_BL + (~real_BL).to(key_BL.dtype)).sort(dim=-1).values
    first_Bb = torch.arange(t_Bb.shape[1], device=u_BL.device) * block_B[:, None]
    last_Bb = ordered_BL.gather(1, (first_Bb + k_Bb - 1).clamp(max=u_BL.shape[1] - 1))
    weight_Bb = n_Bb / k_Bb
    return CountedMasks(key_BL <= last_Bb.gather(1, block_BL), weight_Bb.gather(1, block_BL), last_Bb)


class NoisedBlocks:
    """Sequences with noise in every block: which positions are masked, and their weights."""

    def __init__(
        self, sequences: Sequences, block_B: Tensor, masked_BL: Tensor, weight_BL: Tensor, shift: bool, mask_id: int
    ):
        self.sequences, self.block_B, self.weight_BL, self.shift = sequences, block_B, weight_BL, shift
        self.masked_BL = masked_BL.clone()
        self.masked_BL[:, : int(shift)] = False
        z_BL = torch.where(self.masked_BL, mask_id, sequences.tokens_BL)
        self.z_BL = after_prompts(sequences, z_BL, mask_id)
        self.halves_B = Halves.of(block_B, z_BL.shape[1], shift)
        needed = self.halves_B.unique().tolist()
        self.halves = Halves(needed[0]) if len(needed) == 1 else Halves.BOTH
        self.rows = Rows.of(self.halves_B, block_B) if len(needed) > 1 else None
        """None: all sequences are read alike, each by itself."""

    def where(self, scored_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, targets and weights of the scored tokens that can be predicted."""
        chosen_N = (scored_BL & predictable(self.sequences, self.shift)).flatten().nonzero().squeeze(1)
        targets_N = self.sequences.tokens_BL.flatten().index_select(0, chosen_N)
        weights_N = self.weight_BL.flatten().index_select(0, chosen_N).float()
        if self.rows is None:
            return chosen_N, targets_N, weights_N
        L = scored_BL.shape[1]
        start_B = (2 * self.rows.row_B + self.rows.half_B) * L
        return start_B[chosen_N // L] + chosen_N % L, targets_N, weights_N

    def batch(self, terms: dict[str, Term]) -> CorruptedBatch:
        z_BL, x_BL = self.z_BL, self.sequences.tokens_BL
        count = int(predictable(self.sequences, self.shift).sum())
        if self.rows is not None:
            return CorruptedBatch(self.in_rows(self.rows), None, count, terms, block_B=self.rows.block_R2)
        if self.halves == Halves.BOTH:
            return CorruptedBatch(torch.cat((z_BL, x_BL), dim=1), None, count, terms, block_B=self.block_B)
        if self.halves == Halves.NOISY:
            return CorruptedBatch(z_BL, None, count, terms)
        return CorruptedBatch(x_BL, None, count, terms, causal=True)

    def in_rows(self, rows: Rows) -> Tensor:
        """[noisy ; clean] of all rows, [R, 2L]."""
        z_BL, x_BL = self.z_BL, self.sequences.tokens_BL
        alone_B = ~rows.shares_B
        tokens_R2L = z_BL.new_empty(len(rows.block_R2), 2, z_BL.shape[1])
        tokens_R2L[rows.row_B[alone_B]] = torch.stack((z_BL, x_BL), 1)[alone_B]
        read_BL = torch.where((self.halves_B == Halves.CLEAN)[:, None], x_BL, z_BL)
        tokens_R2L[rows.row_B[~alone_B], rows.half_B[~alone_B]] = read_BL[~alone_B]
        return tokens_R2L.flatten(1)


def predictable(sequences: Sequences, shift: bool = False) -> Tensor:
    """True at tokens that are neither padding nor given and, if predictions are shifted, have one before them."""
    every_BL = torch.ones_like(sequences.tokens_BL, dtype=torch.bool)
    found_BL = every_BL if sequences.scored_BL is None else sequences.scored_BL.clone()
    found_BL[:, : int(shift)] = False
    return found_BL


# ---- NELBO -----------------------------------------------------------------------------------------------------------

# Validation noise is the same for every run, so that curves of different seeds and models are paired.
VALIDATION_SEED = 20251018
# Fraction of a run after which training times are uniform, as in the bound: the value measured in docs/results.md.
ANNEALED = 0.8


class Noised:
    """Sequences at time t: z_t with its loss weight w(t) and which positions are masked."""

    def __init__(self, sequences: Sequences, t_B: Tensor, u_BL: Tensor, schedule: Schedule, T: int, mask_id: int):
        self.sequences, self.t_B = sequences, t_B
        alpha_t_B = self.alpha_t_B = schedule.alpha(t_B)
        self.z_BL = mask_tokens(sequences.tokens_BL, u_BL, alpha_t_B[:, None], mask_id)
        # not z == mask: mask_tokens decides by u, and a clean sequence may contain the mask's id by mistake
        self.masked_BL = u_BL >= alpha_t_B[:, None]
        sigma_B = schedule.sigma(t_B)
        if sequences.given_BL is not None:
            self.z_BL = after_prompts(sequences, self.z_BL, mask_id)
            sigma_B = noise_level(masked_overall(sequences, mask_fraction(t_B, schedule)), schedule)
        self.sigma_B = sigma_B.clamp(max=MOST_NOISE).float()  # finite, since the network is conditioned on it
        if T > 0:
            alpha_s_B = self.alpha_s_B = schedule.alpha((t_B - 1 / T).clamp(min=0))
            weight_B = T * (alpha_s_B - alpha_t_B) / (1 - alpha_t_B)
        else:
            weight_B = schedule.weight(t_B)
        self.weight_B = weight_B.float()

    def where(self, scored_BL: Tensor, weight_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, targets and weights (w(t) unless given) where `scored_BL` holds, padding and prompts left out."""
        if self.sequences.scored_BL is not None:
            scored_BL = scored_BL & self.sequences.scored_BL
        return select(scored_BL, self.sequences.tokens_BL, self.weight_B if weight_B is None else weight_B)

    def batch(self, terms: dict[str, Term]) -> CorruptedBatch:
        return CorruptedBatch(self.z_BL, self.sigma_B, self.sequences.token_count, terms)


def masked_overall(sequences: Sequences, fraction_B: Tensor) -> Tensor:
    """Masked fraction of the whole sequence if `fraction_B` of its answer is masked, nothing of the prompt and all of
    the padding. A network conditioned on the noise level expects the level of whole sequences."""
    if sequences.given_BL is None or sequences.scored_BL is None:
        return fraction_B
    answer_B = sequences.scored_BL.to(fraction_B).mean(-1)
    padding_B = 1 - answer_B - sequences.given_BL.to(fraction_B).mean(-1)
    return fraction_B * answer_B + padding_B


def time_density(cfg: ObjectiveConfig, progress: float) -> float:
    """a of the density Beta(a, a) of training times: it goes linearly to 1, reached after ANNEALED of the run."""
    return cfg.time_density + (1.0 - cfg.time_density) * min(1.0, progress / ANNEALED)


NEXT_TOKEN = "next_token"
"""Name of the loss term of causal steps."""


class Nelbo(Objective):
    bound_name = "nelbo"
    """Name of the bound's term in logs."""
    subs = True

    @functools.cached_property
    def blocks(self) -> BlockSettings | None:
        """Settings of block diffusion. None: the model reads whole sequences and predicts a token at its position."""
        lengths, shift = self.model.block_lengths, self.model.shift
        return BlockSettings(lengths or (self.model.length,), shift) if lengths or shift else None

    def corrupt(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        if progress < self.cfg.causal_until:
            return self.corrupt_nothing(sequences)
        return self.corrupt_by_masks(sequences, step, progress)

    def corrupt_by_masks(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        return self.batch_of(self.noised_for_training(sequences, step, progress))

    def corrupt_nothing(self, sequences: Sequences) -> CorruptedBatch:
        """Clean sequences: every token is predicted from those before it."""
        follows_BL = F.pad(real_targets(sequences), (1, 0))
        targets_BL, one_B = sequences.tokens_BL, torch.ones(len(follows_BL), device=follows_BL.device)
        if not self.model.shift:  # read one position earlier; with shifted predictions the network does that
            follows_BL, targets_BL = follows_BL.roll(-1, 1), targets_BL.roll(-1, 1)
        term = Term("denoiser", *select(follows_BL, targets_BL, one_B), exclude=self.mask_id)
        sigma_B = torch.zeros_like(one_B)
        return CorruptedBatch(sequences.tokens_BL, sigma_B, len(term.positions_N), {NEXT_TOKEN: term}, causal=True)

    def corrupt_for_bound(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        if self.blocks is not None:
            return self.batch_of(self.blocks_by_time(sequences, draw, self.blocks))
        return self.batch_of(self.noised(sequences, VALIDATION_SEED, draw))

    def corrupt_for_validation(self, sequences: Sequences) -> CorruptedBatch:
        """For blocks, estimate by numbers of masks: times would weight single tokens by 1/t."""
        return (self.corrupt_for_bound if self.blocks is None else self.corrupt_exact_count)(sequences, 0)

    def noised_for_training(self, sequences: Sequences, step: int, progress: float) -> "Noised | NoisedBlocks":
        density = time_density(self.cfg, progress)
        if self.blocks is None:
            return self.noised(sequences, self.seed, step, density)
        block_B = self.blocks.drawn(sequences, self.seed, step)
        return self.blocks_by_count(sequences, block_B, (self.seed, Stream.MASK, step), density)

    def noised(self, sequences: Sequences, seed: int, counter: int, density: float = 1.0) -> Noised:
        """z_t of every sequence; times from Beta(density, density), uniform for the bound."""
        cfg, tokens_BL, example_B = self.cfg, sequences.tokens_BL, sequences.example_B
        t_B = beta_quantile(self.times(sequences, seed, counter), density)
        if cfg.T > 0:
            t_B = ((t_B * cfg.T).floor().clamp(max=cfg.T - 1) + 1) / cfg.T
        else:
            t_B = cfg.sampling_eps + (1 - cfg.sampling_eps) * t_B
        position_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        u_BL = uniforms32(seed, Stream.MASK, counter, example_B[:, None], position_L)
        return Noised(sequences, t_B, u_BL, self.schedule, cfg.T, self.mask_id)

    def batch_of(self, noised: "Noised | NoisedBlocks") -> CorruptedBatch:
        return noised.batch({self.bound_name: self.bound_term(noised)})

    def bound_term(self, noised: "Noised | NoisedBlocks") -> Term:
        return Term("denoiser", *noised.where(noised.masked_BL), exclude=self.mask_id)

    def blocks_by_count(
        self, sequences: Sequences, block_B: Tensor, stream: tuple[int, int, int], density: float = 1.0
    ) -> NoisedBlocks:
        """Mask an exact number of positions in each block; `stream`: seed, purpose and counter of the noise."""
        seed, _, counter = stream
        t_B = self.times(sequences, seed, counter)
        t_Bb = beta_quantile(block_times(t_B, block_B, sequences.tokens_BL.shape[1]), density)
        shift = self.model.shift
        masks = masks_by_count(order_uniforms(sequences, *stream), predictable(sequences, shift), block_B, t_Bb)
        return NoisedBlocks(sequences, block_B, masks.masked_BL, masks.weight_BL, shift, self.mask_id)

    def blocks_by_time(self, sequences: Sequences, draw: int, blocks: BlockSettings) -> NoisedBlocks:
        """Mask each block at its own time, for the bound."""
        L, eps, block_B = sequences.tokens_BL.shape[1], self.cfg.sampling_eps, blocks.own(sequences)
        t_Bb = eps + (1 - eps) * block_times(self.times(sequences, VALIDATION_SEED, draw), block_B, L)
        position_L = torch.arange(L, device=block_B.device)
        block_BL = position_L // block_B[:, None]
        u_BL = uniforms32(VALIDATION_SEED, Stream.MASK, draw, sequences.example_B[:, None], position_L)
        masked_BL = u_BL >= self.schedule.alpha(t_Bb).gather(1, block_BL)
        weight_BL = self.schedule.weight(t_Bb).gather(1, block_BL)
        return NoisedBlocks(sequences, block_B, masked_BL, weight_BL, blocks.shift, self.mask_id)

    @staticmethod
    def times(sequences: Sequences, seed: int, counter: int) -> Tensor:
        """Times in [0, 1): the caller's if given, else stratified ones."""
        if sequences.times_B is not None:
            return sequences.times_B
        return draw_times(seed, counter, sequences.example_B, sequences.total)

    def corrupt_exact_count(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        """Corrupt for validation with an exact number of masks in each sequence, stratified; noise as for the bound.

        One set of uniforms per sequence decides everything. The positions with the k smallest are masked. The k-th
        smallest is the time: it is Beta(k, L-k+1) distributed and independent of which positions these are, which is
        exactly the law of t given k masks. This time decides which padding is masked (it is never scored) and the noise
        level of a time-conditioned network. After a prompt, k tokens of the answer are masked.
        """
        stream = (VALIDATION_SEED, Stream.ORDER, draw)
        if self.blocks is not None:
            noised = self.blocks_by_count(sequences, self.blocks.own(sequences), stream)
            return noised.batch({"nelbo": self.bound_term(noised)})
        x_BL, real_BL = sequences.tokens_BL, predictable(sequences)
        t_B1 = self.times(sequences, VALIDATION_SEED, draw)[:, None]
        all_B = torch.full_like(sequences.example_B, x_BL.shape[1])
        masked_BL, weight_BL, time_B1 = masks_by_count(order_uniforms(sequences, *stream), real_BL, all_B, t_B1)
        z_BL = after_prompts(sequences, torch.where(masked_BL, self.mask_id, x_BL), self.mask_id)
        term = Term("denoiser", *select(masked_BL & real_BL, x_BL, weight_BL[:, 0]), exclude=self.mask_id)
        sigma_B = noise_level(masked_overall(sequences, time_B1[:, 0]), self.schedule).float()
        return CorruptedBatch(z_BL, sigma_B, sequences.token_count, {"nelbo": term})


def order_uniforms(sequences: Sequences, seed: int, purpose: int, counter: int) -> Tensor:
    """A float64 uniform for every position; sorting by them gives a random order of the positions."""
    position_L = torch.arange(sequences.tokens_BL.shape[1], device=sequences.tokens_BL.device)
    return uniforms(seed, purpose, counter, sequences.example_B[:, None], position_L)


# ---- ANELBO ----------------------------------------------------------------------------------------------------------
# ANELBO (Eq. 7, Theorem 4.1): the NELBO through both networks + gamma * the anchor network's own cross-entropy.
#
# The anchor term has the same weight w(t) and acts at the anchors of the rule A(x): at all of them, visible ones
# included, as in the release (anchor_positions=all), or at masked ones only. It is a plain softmax over all V entries,
# without SUBS. gamma is a function of the step (`gamma_at`). Perplexity never contains this term.


def gamma_at(cfg: ObjectiveConfig, progress: float) -> float:
    """The weight gamma at this point of a run: linear from 0 up to gamma_warmup, then constant, 0 from gamma_until."""
    if cfg.gamma_until < 1 and progress >= cfg.gamma_until:
        return 0.0
    return cfg.gamma * (progress / cfg.gamma_warmup) if progress < cfg.gamma_warmup else cfg.gamma


class Anelbo(Nelbo):
    def corrupt_by_masks(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
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

    As in Eq. 7 it is a sum, divided by the number of all tokens, not of anchors, whatever the rule. With
    anchor_fraction = 1/4 a random quarter of the anchors is scored, and counts four times: the sum is the same on
    average, and the head, the largest cost of anchors in training, reads a quarter of the positions.
    """
    return Term("anchor", positions_N, targets_N, weights_N / cfg.anchor_fraction, scale=gamma)

"""From hidden states of the chosen positions to tokens: head, filters, float64 draw, in pieces of bounded size.

Every column of `Draws` is one position of one sequence, with that sequence's own settings, so sequences with different
settings share a piece. A piece holds at most LOGITS_AT_ONCE logits, whatever the vocabulary. On a GPU pieces are padded
to a few fixed sizes, so that each can be one CUDA graph. Padding columns belong to a slot that is never read.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.constrain.matching import FILTERED, Match, letter_mass
from adlm.diffusion.random import LEAST_TEMPERATURE, Stream, filter_logits, gumbel_argmax, uniforms
from adlm.engine.prepare import Graphs

Head = Callable[[Tensor], Tensor]

# Rows of Draws.ints and Draws.floats
SLOT, POSITION, SEED, STEP, TOP_K, RELEASE = range(6)
TEMPERATURE, TOP_P, MIN_P = range(3)

LOGITS_AT_ONCE = 1 << 22  # float64 noise and its temporaries: about 200 MB
PIECES = (16, 64, 256)  # static shapes


def widen(array: NDArray, more: int, fill: int | tuple[int, ...] = 0) -> NDArray:
    """Append `more` columns of `fill` (one number, or one per row). np.pad costs ten times as much on arrays this
    small, and the host's time matters when one sequence is drawn at a time."""
    width = array.shape[-1]
    wide = np.empty((*array.shape[:-1], width + more), dtype=array.dtype)
    wide[..., :width] = array
    wide[..., width:] = fill if isinstance(fill, int) else np.array(fill)[:, None]
    return wide


class Filters(NamedTuple):
    """Which filters the draws of a call need; known on the host, so that unused ones are not even compiled."""

    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


class DrawSettings(NamedTuple):
    """How one sequence of a call draws."""

    slot: int
    seed: int
    step: int
    release: bool
    """The release's nucleus filter instead of ours."""
    temperature: float = 1.0
    """0: the most probable token."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Draws(NamedTuple):
    """Positions to draw, one column each, on the host."""

    ints: NDArray[np.int64]
    floats: NDArray[np.float64]

    @classmethod
    def of(cls, settings: Sequence[DrawSettings], positions: Sequence[NDArray[np.int64]]) -> "Draws":
        """Each sequence's settings, repeated for each of its positions."""
        if not settings:
            return cls(np.zeros((6, 0), dtype=np.int64), np.zeros((3, 0)))
        slot, seed, step, release, temperature, top_k, top_p, min_p = zip(*settings)
        counts = [len(p) for p in positions]
        ints = np.array([slot, slot, seed, step, top_k, release], dtype=np.int64)
        floats = np.array([temperature, top_p, min_p], dtype=np.float64)
        draws = cls(np.repeat(ints, counts, axis=1), np.repeat(floats, counts, axis=1))
        draws.ints[POSITION] = np.concatenate(positions)
        return draws

    def padded(self, more: int, spare: int) -> "Draws":
        """Append `more` draws in the slot `spare`, which is never read."""
        ints = widen(self.ints, more)
        ints[SLOT, ints.shape[1] - more :] = spare
        floats = widen(self.floats, more)
        floats[[TEMPERATURE, TOP_P], floats.shape[1] - more :] = 1.0
        return Draws(ints, floats)

    @property
    def filters(self) -> Filters:
        """The filters that these draws need."""
        return Filters(
            bool((self.floats[TEMPERATURE] != 1).any()),
            bool((self.ints[TOP_K] > 0).any()),
            bool((self.floats[TOP_P] < 1).any()),
            bool((self.floats[MIN_P] > 0).any()),
        )


class Drawn(NamedTuple):
    token: Tensor
    log_p: Tensor
    """What the tokens were drawn from: after temperature and filters."""
    logits: Tensor
    """The head's output, before temperature, filters and bans."""


ANY = Filters()  # for pieces drawn by the kernel, where settings are data, not code


def draw_fused(
    head: Head, banned_SV: Tensor, token_V: Tensor, hidden_ND: Tensor, ints: Tensor, floats: Tensor, filters: Filters
) -> Drawn:
    """`draw` with everything after the head in one kernel."""
    from adlm.models.kernels import draw_rows

    logits = head(hidden_ND)
    return Drawn(*draw_rows(logits, banned_SV, ints, floats), logits)


def draw(
    head: Head, banned_SV: Tensor, token_V: Tensor, hidden_ND: Tensor, ints: Tensor, floats: Tensor, filters: Filters
) -> Drawn:
    """Draw tokens [N]; also returns what they were drawn from [N, V]. Static shapes, no host sync."""
    logits = head(hidden_ND)
    log_p = filtered(logits, banned_SV, ints, floats, filters)
    return Drawn(gumbel_argmax(log_p, token_uniforms(ints, token_V)), log_p, logits)


def filtered(logits: Tensor, banned_SV: Tensor, ints: Tensor, floats: Tensor, filters: Filters) -> Tensor:
    """Log-probabilities [N, V] after bans, temperature and filters."""
    return filter_logits(
        logits.float().masked_fill(banned_SV[ints[SLOT]], -torch.inf),
        temperature=floats[TEMPERATURE].float() if filters.temperature else None,
        top_k=ints[TOP_K] if filters.top_k else None,
        top_p=floats[TOP_P] if filters.top_p else None,
        min_p=floats[MIN_P].float() if filters.min_p else None,
        release_nucleus=ints[RELEASE] > 0,
    )


def token_uniforms(ints: Tensor, token_V: Tensor) -> Tensor:
    """The uniforms [N, V] that decide which tokens are drawn."""
    row = ints.unsqueeze(-1)
    return uniforms(row[SEED], Stream.TOKEN, row[STEP], row[POSITION], token_V)


def pieces(sizes: list[int]) -> Iterator[slice]:
    """The columns of consecutive pieces."""
    a = 0
    for size in sizes:
        yield slice(a, a + size)
        a += size


class Drawer:
    """`draw` over any number of positions, in pieces, and the tokens that each slot may not draw."""

    def __init__(self, head: Head, slots: int, vocab_size: int, mask_id: int, graphs: Graphs, device: torch.device):
        # Zero-masking of SUBS and banned words are the same: tokens that a slot may not draw.
        self.banned_SV = torch.zeros(slots + 1, vocab_size, dtype=torch.bool, device=device)
        self.banned_SV[:, mask_id] = True
        # A buffer, not an arange inside the step: the compiler would narrow that to 32 bits, and the noise needs 64.
        self.token_V = torch.arange(vocab_size, device=device)
        self.head, self.mask_id, self.static = head, mask_id, graphs.on
        self.banned: list[list[int]] = [[] for _ in range(slots)]
        self.most = max(1, LOGITS_AT_ONCE // vocab_size)
        # the kernel needs triton, which comes with torch's CUDA builds
        self.fused = graphs.on and device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.draw = functools.partial(draw_fused if self.fused else draw, head, self.banned_SV, self.token_V)

    def matching(self, hidden_ND: Tensor, ints: Tensor, floats: Tensor, own: Draws, match: Match) -> Drawn:
        """Draw positions of one sequence so that its text can match (constrain/matching.py). The columns are all its
        masked positions; the result covers the drawn ones. `own`: the same columns on the host."""
        slot, seed, step = (int(own.ints[row, 0]) for row in (SLOT, SEED, STEP))
        greedy, filters = own.floats[TEMPERATURE, 0] < LEAST_TEMPERATURE, own.filters
        warm = Filters() if greedy else Filters(temperature=filters.temperature)
        a = match.span.constraint.automaton
        letter_V = torch.from_numpy(a.letter_V).to(hidden_ND.device)
        kept, plain, logits, mass = [], [], [], []
        for n in range(0, len(hidden_ND), self.most):
            part = slice(n, n + self.most)
            logits.append(self.head(hidden_ND[part]))
            settings = self.banned_SV, ints[:, part], floats[:, part]
            plain.append(filtered(logits[-1], *settings, warm))
            kept.append(plain[-1] if greedy or filters == warm else filtered(logits[-1], *settings, filters))
            mass.append(letter_mass(kept[-1], letter_V, a.every + 1, greedy))
            if kept[-1] is not plain[-1]:
                others = letter_mass(plain[-1], letter_V, a.every + 1, greedy) - FILTERED
                mass[-1] = torch.where(mass[-1] == -torch.inf, others, mass[-1])
        mass_NC = torch.cat(mass).cpu().numpy()
        letters = match.letters(mass_NC, self.banned[slot] + [self.mask_id], seed, step, bool(greedy))[match.drawn]
        rows = torch.from_numpy(np.flatnonzero(match.drawn)).to(hidden_ND.device)
        letter_N1 = torch.from_numpy(letters).to(hidden_ND.device).unsqueeze(-1)
        inside_NV = (letter_V == letter_N1) | (letter_N1 == a.every)
        drawn = torch.cat(logits)[rows]
        log_p, others = (torch.cat(p)[rows].masked_fill(~inside_NV, -torch.inf) for p in (kept, plain))
        log_p = torch.where((log_p > -torch.inf).any(-1, keepdim=True), log_p, others)
        if greedy:
            return Drawn(log_p.argmax(-1), log_p, drawn)
        return Drawn(gumbel_argmax(log_p, token_uniforms(ints[:, rows], self.token_V)), log_p, drawn)

    def prediction(self, drawn: Drawn, ints: Tensor) -> Tensor:
        """Log-probabilities [N, V] before temperature and filters; -inf for banned tokens."""
        return drawn.logits.float().masked_fill(self.banned_SV[ints[SLOT]], -torch.inf).log_softmax(-1)

    def ban(self, slot: int, tokens: list[int]) -> None:
        """Ban exactly `tokens` and the mask in `slot` from now on."""
        if tokens == self.banned[slot]:
            return
        self.banned[slot] = list(tokens)
        row = torch.zeros(self.banned_SV.shape[1], dtype=torch.bool)
        row[[*tokens, self.mask_id]] = True
        self.banned_SV[slot] = row.to(self.banned_SV.device)

    def sizes(self, n: int) -> list[int]:
        """Sizes of the pieces for n draws; with static shapes the last one may hold padding."""
        if not self.static:
            return [min(self.most, n - a) for a in range(0, n, self.most)]
        whole, rest = divmod(n, PIECES[-1])
        return [PIECES[-1]] * whole + ([next(s for s in PIECES if s >= rest)] if rest else [])

"""A step's draw, given that the finished text matches: forward-backward over states of the automaton and positions.

A step of a sampler has fixed positions F, positions D that it draws now, and positions M that stay masked. The network
has read the canvas once, and its predictions p_l at D and M are independent. Filling D and M from them would finish
the text now. We want this step's draw, given that the text finished in this way matches:

    P(x_D)  proportional to  prod_{l in D} p_l(x_l)  *  P(x_F, x_D, X_M matches),   X_l ~ p_l independently for l in M

Rejection sampling would do this: draw all masked positions by the step's predictions, start again unless the text
matches, keep D and mask M again. The automaton does it exactly, without rejections. With m_l(c) the probability of
letter c at position l (1 for the letter of a fixed token), and b_l(s) the probability that the positions from l on lead
from state s to a match,

    b_n(s) = 1 if s accepts, else 0          b_l(s) = sum over edges (s, c, s') of m_l(c) b_{l+1}(s')

From the start, position after position, edge (s, c, s') is taken with probability m_l(c) b_{l+1}(s') / b_l(s). This
draws a path of the whole text given that it matches. A drawn position then takes a token of its letter by p_l. The path
at M is dropped, which sums over X_M. Everything is in logarithms: a text that the model finds very unlikely has a
probability far below the smallest double, and may be the only one allowed.

Since b is positive only where a match remains possible, every step leaves a canvas that can be completed. Masking again
(remdm) removes tokens from such a canvas, so it can still be completed. Fixed positions never change.

Temperature acts on p_l first. At temperature 0 the limit of this distribution is the most probable text that matches:
sums become maxima. Filters (top_k, top_p, min_p) act next. If no text of kept tokens matches, as few filtered tokens as
possible are used, by their own probabilities: the limit of a filter that leaves them a vanishing weight.

If there are no predictions for later positions (in a causal model, or for the windows or blocks after this one), b only
says whether a match remains possible in the positions that are left, with the tokens that are given there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.constrain.automaton import TokenAutomaton
from adlm.diffusion.random import Stream, uniforms
from adlm.errors import require

FILTERED = 1e6
"""Cost of a filtered token in nats: a text with fewer of them always has more weight."""


def indicator(allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Log of 1 where allowed, log of 0 elsewhere."""
    return np.where(allowed, 0.0, -np.inf)


def backward(
    a: TokenAutomaton, mass_LC: NDArray[np.float64], end_S: NDArray[np.float64], greedy: bool = False
) -> NDArray[np.float64]:
    """log b [L + 1, S] for log m and log b_L; `greedy`: the best path instead of the sum over paths."""
    log_b = np.empty((len(mass_LC) + 1, len(end_S)))
    log_b[-1] = end_S
    for l in reversed(range(len(mass_LC))):
        w_E = mass_LC[l, a.letter_E] + log_b[l + 1, a.target_E]
        top_S = np.maximum.reduceat(w_E, a.first_S)
        log_b[l] = top_S
        if not greedy:
            shift_S = np.where(np.isfinite(top_S), top_S, 0.0)
            sum_S = np.add.reduceat(np.exp(w_E - shift_S[a.source_E]), a.first_S)
            with np.errstate(divide="ignore"):
                log_b[l] = shift_S + np.log(sum_S)
    return log_b


def sample_letters(
    a: TokenAutomaton, mass_LC: NDArray[np.float64], log_b: NDArray[np.float64], state: int, u_L: NDArray, greedy: bool
) -> list[int]:
    """Draw the letters of a path that matches, with one uniform per position; `greedy`: those of the best path."""
    require(np.isfinite(log_b[0, state]), "no text that matches the constraint is left")
    ends, found = np.append(a.first_S, len(a.source_E)), []
    for l, u in enumerate(u_L.tolist()):
        edges = slice(ends[state], ends[state + 1])
        w = mass_LC[l, a.letter_E[edges]] + log_b[l + 1, a.target_E[edges]]
        if greedy:
            chosen = int(w.argmax())
        else:
            total = np.cumsum(np.exp(w - w.max()))
            chosen = int(np.searchsorted(total, u * total[-1], side="right"))
        found.append(int(a.letter_E[edges][chosen]))
        state = int(a.target_E[edges][chosen])
    return found


def letter_mass(log_p_NV: Tensor, letter_V: Tensor, letters: int, greedy: bool) -> Tensor:
    """Log-probability of each letter [N, C] (of its best token if greedy). The last letter stands for every token."""
    index_NV, shape = letter_V.expand_as(log_p_NV), (len(log_p_NV), letters)
    top_NC = log_p_NV.new_full(shape, -torch.inf).scatter_reduce_(1, index_NV, log_p_NV, "amax")
    best_N = top_NC.amax(-1)
    if greedy:
        mass_NC = top_NC.double()
        mass_NC[:, -1] = best_N
        return mass_NC
    shift_NC = top_NC.masked_fill(top_NC == -torch.inf, 0.0)
    relative_NV = (log_p_NV - shift_NC.gather(1, index_NV)).exp_().double()
    sum_NC = torch.zeros(shape, dtype=torch.float64, device=log_p_NV.device).scatter_add_(1, index_NV, relative_NV)
    mass_NC = sum_NC.log() + shift_NC
    mass_NC[:, -1] = mass_NC.logsumexp(-1)
    return mass_NC


@dataclass(frozen=True, eq=False)
class Constraint:
    """The text between the first and the last hole of a request must match. If the last hole ends the sequence, an
    end-of-text token may end the text earlier."""

    automaton: TokenAutomaton
    said: str = "the constraint"
    """Its name in messages."""
    ends: dict[tuple, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    """Cache of log b after the last position of a span."""

    def span(self, tokens: Sequence[int], asked: Sequence[int], mask_id: int, start: int, stop: int) -> "MatchedSpan":
        """The part of the positions from `start` to before `stop` that must match. `tokens` is the current sequence,
        filled before `start`; `asked` is that of the request, with all its holes. The text before `start` gives the
        state of the automaton, which thus passes from window to window and from block to block."""
        a, holes_L = self.automaton, np.array(asked) == mask_id
        holes = np.flatnonzero(holes_L)
        (first, last), state = (int(holes[0]), int(holes[-1]) + 1), a.start
        for token in tokens[first:start]:
            after = a.follow(state, token)
            require(after is not None, f"no text that begins so matches {self.said}")
            assert after is not None
            state = after
        inside = slice(max(first, start) - start, max(0, min(last, stop) - start))
        letters_L = np.where(holes_L, a.every, a.letter_V[np.array(asked)])
        own, later = tuple(letters_L[start:stop].tolist()), tuple(letters_L[stop:last].tolist())
        return MatchedSpan(self, inside, state, own, later, last == len(tokens))

    def letters_left(self, banned: Sequence[int]) -> NDArray[np.bool_]:
        """Which letters have a token that is not banned."""
        a = self.automaton
        left_V = np.ones(len(a.letter_V), dtype=bool)
        left_V[list(banned)] = False
        found = np.bincount(a.letter_V[left_V], minlength=a.every + 1) > 0
        found[a.every] = True
        return found

    def check(self, tokens: Sequence[int], mask_id: int, banned: Sequence[int]) -> None:
        """Refuse a sequence if no text in its holes can match."""
        masked = np.flatnonzero(np.array(tokens) == mask_id)
        span = self.span(tokens, tokens, mask_id, 0, len(tokens))
        left_C = self.letters_left([*banned, mask_id])
        mass_LC = span.mass(tokens, masked, np.broadcast_to(indicator(left_C), (len(masked), len(left_C))))
        log_b = backward(self.automaton, mass_LC, span.end([*banned, mask_id]), greedy=True)
        shorter = " or fewer" if span.open_end else ""
        given = len(mass_LC) - len(masked)
        between = f" with the {given} tokens that are given between its holes" if given else ""
        require(
            bool(np.isfinite(log_b[0, span.state])),
            f"{self.said}: no text of {len(masked)} tokens{shorter} matches{between}",
        )


class MatchedSpan(NamedTuple):
    """A part of a canvas that must lead from `state` to a match."""

    constraint: Constraint
    inside: slice
    """Its positions."""
    state: int
    own: tuple[int, ...]
    """Letters of the request's tokens on this canvas; a hole has the letter that stands for every token."""
    later: tuple[int, ...]
    """Letters of the positions that follow on another canvas."""
    open_end: bool
    """The text may end before its last position."""

    def mass(self, tokens: Sequence[int], masked: NDArray[np.int64], mass_NC: NDArray) -> NDArray[np.float64]:
        """log m of every position: `mass_NC` at masked ones, a single letter at the others. A token that the request
        gave is part of the text, so the text has not ended before it."""
        a = self.constraint.automaton
        mass_LC = np.full((len(tokens), a.every + 1), -np.inf)
        mass_LC[np.arange(len(tokens)), a.letter_V[np.array(tokens)]] = 0.0
        mass_LC[np.isin(self.own, (a.every, a.ended)), a.every] = 0.0
        mass_LC[masked] = mass_NC
        return mass_LC[self.inside]

    def end(self, banned: Sequence[int]) -> NDArray[np.float64]:
        """log b after the last position: whether a match remains possible in the positions of `later` without the
        banned tokens."""
        a, known, key = self.constraint.automaton, self.constraint.ends, (self.later, self.open_end, tuple(banned))
        if key not in known:
            now, left_C = a.accepting_S.copy(), self.constraint.letters_left(banned)
            now[a.end], only_holes = self.open_end, set(self.later) <= {a.every}
            for letter in reversed(self.later):
                kept = (letter, a.every) if letter == a.ended else letter
                may_C = left_C if letter == a.every else np.isin(np.arange(len(left_C)), kept)
                before, now = now, np.logical_or.reduceat(may_C[a.letter_E] & now[a.target_E], a.first_S)
                if only_holes and (now == before).all():  # it no longer changes
                    break
            known[key] = indicator(now)
        return known[key]


class Match(NamedTuple):
    """What a step may draw on one canvas, or in one block."""

    span: MatchedSpan
    tokens: Sequence[int]
    """The tokens there, masks included."""
    masked: NDArray[np.int64]
    """Positions of the masks, in ascending order."""
    drawn: NDArray[np.bool_]
    """Which of them this step draws; the others stay masked."""

    def letters(
        self, mass_NC: NDArray[np.float64], banned: Sequence[int], seed: int, step: int, greedy: bool
    ) -> NDArray[np.int64]:
        """Draw the letters of all masked positions jointly, given their log-probabilities."""
        a, inside = self.span.constraint.automaton, self.span.inside
        mass_LC = self.span.mass(self.tokens, self.masked, mass_NC)
        log_b = backward(a, mass_LC, self.span.end(banned), greedy)
        # positions count from the start of the span; positions in the sequence would work as well
        u_L = uniforms(seed, Stream.LETTER, step, len(self.span.later), torch.arange(inside.start, inside.stop)).numpy()
        found = sample_letters(a, mass_LC, log_b, self.span.state, u_L, greedy)
        return np.array(found, dtype=np.int64)[self.masked - inside.start]

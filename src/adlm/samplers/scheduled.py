"""Samplers whose positions depend on the schedule alone: a row's whole mask trajectory is drawn before the network
runs.

Each position is a two-state chain (masked, visible) with given probabilities per step, so the step of its next change
has a known law: with H the running sum of -log(1 - p), the chain leaves its state at the first step where H has grown
by an Exp(1) number. One uniform per change, instead of one per step, gives the same distribution; the steps in
between are never visited, which is why a row needs far fewer network evaluations than it has steps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.samplers.plan import Event, Positions, Trajectory
from adlm.samplers.rates import Rates

# exp(-64) is below the resolution of a 52-bit uniform: a hazard of 64 is certainty
CERTAIN = 64.0


def cumulative_hazard(p: Tensor) -> NDArray[np.float64]:
    """H[i] = sum over steps before i of -log(1 - p): survival from step i to before step j is exp(H[i] - H[j])."""
    hazard = (-torch.log1p(-p.double())).clamp(max=CERTAIN)
    return np.concatenate([[0.0], hazard.cumsum(0).numpy()])


@dataclass(frozen=True)
class Scheduled:
    """Plan given by rates at shares t of masks (float64, [n]); what is still masked after the last step is filled in
    one more."""

    t: Tensor
    rates: Rates
    last_t: float = 0.0
    """Share told to the network at the filling step."""
    greedy_fill: bool = False
    """Fill with the most probable token (the release) instead of a draw."""
    looks = ""

    def __post_init__(self):
        for name, p in zip(("reveal", "remask"), self.rates):
            require(p.shape == self.t.shape, f"{name} needs one probability per step")
            require(bool(((p >= 0) & (p <= 1)).all()), f"{name} probabilities must lie in [0, 1]")

    @property
    def locks(self) -> bool:
        return not bool(self.rates.remask.any())

    def changes(self, holes: Positions, seed: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """(step, position) of every reveal and of every remask; each hole ends revealed, at the latest by the fill."""
        n = len(self.t)
        reveal = np.append(cumulative_hazard(self.rates.reveal), np.inf)  # the filling step reveals what is left
        remask = cumulative_hazard(self.rates.remask)
        reveals, remasks = [], []
        live, step, turn = holes, np.zeros(len(holes), dtype=np.int64), 0
        while len(live):
            step = next_change(reveal, step, draw(seed, Stream.REVEAL, turn, live))
            reveals.append((step, live))
            if self.locks:
                break
            again = next_change(remask, np.minimum(step + 1, n), draw(seed, Stream.REMASK, turn, live))
            alive = again < n
            live, again = live[alive], again[alive]
            remasks.append((again, live))
            step, turn = again + 1, turn + 1
        empty = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
        (reveal_step, revealed), (remask_step, remasked) = (
            (np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))
            for pairs in (reveals, remasks or empty)
        )
        return reveal_step, revealed, remask_step, remasked

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        if not len(holes):
            return
        reveal_step, revealed, remask_step, remasked = self.changes(holes, seed)
        steps, inverse = np.unique(reveal_step, return_inverse=True)
        draws = split(revealed, inverse, len(steps))
        # masked in step j: the network first sees it in a later step
        masks = split(remasked, np.searchsorted(steps, remask_step, side="right"), len(steps))
        for step, mask, drawn in zip(steps.tolist(), masks, draws):
            fill = step == len(self.t)
            yield Event(step, self.last_t if fill else float(self.t[step]), mask, drawn, fill and self.greedy_fill)


def draw(seed: int, stream: Stream, turn: int, positions: Positions) -> NDArray[np.float64]:
    return uniforms(seed, stream, turn, torch.from_numpy(positions)).numpy()


def next_change(H: NDArray, step: NDArray, u: NDArray) -> NDArray:
    """First step j >= step at which the state is left; len(H) - 1 when it never is."""
    # the maximum: where -log(u) is lost in rounding, the search would go back to the start of a plateau of H
    return np.maximum(np.searchsorted(H, H[step] - np.log(u), side="left") - 1, step)


def split(values: NDArray, group: NDArray, n: int) -> list[NDArray]:
    """`values` by group 0..n-1, in increasing order of value within a group."""
    order = np.lexsort((values, group))
    return np.split(values[order], np.searchsorted(group[order], np.arange(1, n)))

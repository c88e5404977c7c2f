"""What a sampler is: a plan that says which positions change, never which tokens they become.

In every masked-diffusion sampler of this package the choice of positions and the choice of tokens factor. So a
sampler is a *plan*: for the holes of one row it yields events - "mask these positions, look at the canvas, draw
those" - and the engine does the rest (network, cut, draw), for rows of any mixture of plans at once. A plan that
needs to see predictions says so in `looks` and is sent a `Look` after each event; it may then mask again what it does
not accept, so acceptance needs no mechanism of its own. Steps in which nothing is drawn never become events: they
cost no network call.
"""

from collections.abc import Generator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Event(NamedTuple):
    """One network evaluation of one row."""

    step: int
    """Number of the step, a counter of the row's random draws."""
    t: float
    """Share of masks the network is told (matters only to time-conditioned models)."""
    mask: Positions
    """Positions to mask before the network looks: masked again since the last event."""
    draw: Positions
    """Positions to draw, from p(x0 | canvas); never empty."""
    greedy: bool = False
    """Take the most probable token instead of drawing (the release's last step)."""


class Look(NamedTuple):
    """What the network said at the drawn positions, in their order; None where the plan did not ask."""

    probability: NDArray[np.float64] | None = None
    """Of the token that was drawn, under the distribution it was drawn from."""
    confidence: NDArray[np.float64] | None = None
    """Of the most probable token."""
    entropy: NDArray[np.float64] | None = None
    """Of that distribution, in nats."""
    anchor: NDArray[np.float64] | None = None
    """Largest probability that the anchor network gives to a token that is rare in this row."""
    normaliser: NDArray[np.float64] | None = None
    """Sum of e^logit over all tokens but the mask, divided by their number: 1 for a score that is normalised."""


Trajectory = Generator[Event, Look | None, None]


class Plan(Protocol):
    @property
    def looks(self) -> str:
        """Name of the field of `Look` the plan needs after each event; empty: none, and no host sync."""
        ...

    @property
    def locks(self) -> bool:
        """True if a token once drawn and kept is never masked again."""
        ...

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        """Events for a row whose positions `holes` are masked; the rest of the row is fixed."""
        ...


NOWHERE: Positions = np.empty(0, dtype=np.int64)

"""Plans that look at the last prediction: score, remdm-conf, confidence, entropy, anchor-first.

`score` is the analytic step of a model that learned ratios: they need not sum to one, and the rate follows their sum.

remdm-conf chooses what to *mask again* by how unsure the model was; its reveals come from the schedule, and with the
confidences as part of the state it is Eq. 6. The other three choose what to *reveal* by how sure the model is. They
keep every token a true draw from the model at its position, but the order is no longer random: the distribution of
whole rows is not that of the model's process. They draw at all masked positions and mask again what they do not
accept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.uniforms import Stream
from adlm.samplers.plan import NOWHERE, Event, Look, Positions, Trajectory
from adlm.samplers.rates import Rates
from adlm.samplers.scheduled import draw


def conf_remask(confidence: NDArray[np.float64], sigma_max: float) -> NDArray[np.float64]:
    """sigma^l = sigma_max * softmax over visible positions of -(probability at which the token was drawn).

    `confidence` is -probability at visible positions and -inf at masked ones, which get 0.
    """
    if not np.isfinite(confidence).any():
        return np.zeros_like(confidence)
    weight = np.exp(confidence - confidence.max())
    return sigma_max * weight / weight.sum()


@dataclass(frozen=True)
class Conf:
    """remdm-conf: `rates.reveal` as in MDLM, `rates.remask` holds sigma_max, shared out over the visible positions."""

    t: Tensor
    rates: Rates
    last_t: float = 0.0
    greedy_fill: bool = False
    looks = "probability"
    locks = False

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        confidence = np.full(len(holes), -np.inf)
        masked = np.ones(len(holes), dtype=bool)
        pending = np.zeros(len(holes), dtype=bool)  # masked again since the network last looked
        reveal, sigma_max = self.rates.reveal.tolist(), self.rates.remask.tolist()
        for step in range(len(reveal) + 1):
            fill = step == len(reveal)
            chosen = masked & (fill or draw(seed, Stream.REVEAL, step, holes) < reveal[step])
            again = np.zeros_like(masked)
            if not fill and not masked.all():
                again = draw(seed, Stream.REMASK, step, holes) < conf_remask(confidence, sigma_max[step])
            if chosen.any():
                t = self.last_t if fill else float(self.t[step])
                look = yield Event(step, t, holes[pending & masked], holes[chosen], fill and self.greedy_fill)
                assert look is not None
                assert look.probability is not None
                confidence[chosen] = -look.probability
                pending[:] = False
            confidence[again] = -np.inf
            masked = (masked & ~chosen) | again
            pending |= again


@dataclass(frozen=True)
class Score:
    """The analytic step with the score as it is (SEDD): a masked position takes token y with (e^D - 1) s_y, so it is
    revealed with the schedule's rate times the normaliser u = (e^sigma - 1) sum_y s_y, at most 1."""

    t: Tensor
    rates: Rates
    last_t: float = 0.0
    greedy_fill: bool = False
    looks = "normaliser"
    locks = True

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        masked, rejected = holes, NOWHERE
        for step, rate in enumerate(self.rates.reveal.tolist()):
            if not len(masked):
                return
            look = yield Event(step, float(self.t[step]), rejected, masked)
            assert look is not None and look.normaliser is not None
            masked = rejected = masked[draw(seed, Stream.REVEAL, step, masked) >= rate * look.normaliser]
        if len(masked):
            yield Event(len(self.t), self.last_t, rejected, masked, self.greedy_fill)


class Ordered:
    """Reveal the positions that rank best; never fewer than it takes to end within `steps` evaluations."""

    looks = ""
    locks = True

    def __init__(self, steps: int, threshold: float = 0.0):
        self.steps, self.threshold = steps, threshold

    def rank(self, look: Look) -> tuple[NDArray[np.int64], int]:
        """(order of the drawn positions, best first; how many of them pass)."""
        raise NotImplementedError

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        masked, rejected = holes, NOWHERE
        for step in range(self.steps):
            if not len(masked):
                return
            look = yield Event(step, len(masked) / len(holes), rejected, masked)
            assert look is not None
            order, passing = self.rank(look)
            least = -(-len(masked) // (self.steps - step))
            masked = rejected = np.sort(masked[order[max(passing, least) :]])


class Confidence(Ordered):
    """Reveal every position whose most probable token has at least `threshold`."""

    looks = "confidence"

    def rank(self, look: Look) -> tuple[NDArray[np.int64], int]:
        assert look.confidence is not None
        return np.argsort(-look.confidence, kind="stable"), int((look.confidence >= self.threshold).sum())


class Entropy(Ordered):
    """Reveal the largest prefix, by entropy, with sum H - max H <= threshold: a bound on the cost of independence."""

    looks = "entropy"

    def rank(self, look: Look) -> tuple[NDArray[np.int64], int]:
        assert look.entropy is not None
        order = np.argsort(look.entropy, kind="stable")
        before = np.cumsum(look.entropy[order]) - look.entropy[order]
        return order, int((before <= self.threshold).sum())


class AnchorFirst(Ordered):
    """Reveal first where the anchor network is surest of a rare token; the same number of positions at each step."""

    looks = "anchor"

    def rank(self, look: Look) -> tuple[NDArray[np.int64], int]:
        assert look.anchor is not None
        return np.argsort(-look.anchor, kind="stable"), 0

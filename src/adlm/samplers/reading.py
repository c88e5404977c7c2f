"""Samplers that read predictions: score, remdm-conf, confidence, entropy, anchor-first.

`score` is the analytic step of a model that learned ratios of probabilities. These need not sum to one, and the reveal
rate is proportional to their sum.

remdm-conf chooses what to *mask again* by how unsure the model was. Its reveals come from the schedule, and with the
confidences as part of the state it is Eq. 6. The other three choose what to *reveal* by how sure the model is. Every
token is still a true draw from the model at its position, but the order is no longer random, so whole sequences do not
have the distribution of the model's process. They draw at all masked positions and mask again what they do not accept.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.process import Schedule
from adlm.diffusion.random import Stream
from adlm.samplers import scheduled
from adlm.samplers.base import NOWHERE, Event, Positions, Prediction, Sampler, Trajectory, draw_uniforms
from adlm.samplers.scheduled import Analytic, Rates, Scheduled
from adlm.schema import SamplingConfig


class RemdmConf(Scheduled):
    """remdm-conf: `rates.reveal` as in MDLM; `rates.remask` holds sigma_max, divided among the visible positions."""

    reads = "probability"

    def __init__(self, cfg: SamplingConfig, schedule: Schedule):
        super().__init__(cfg, schedule)
        self.writes_once = False

    def step_rates(self, t: Tensor, s: Tensor) -> Rates:
        return scheduled.remdm_conf(t, s)

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        confidence = np.full(len(holes), -np.inf)
        masked = np.ones(len(holes), dtype=bool)
        pending = np.zeros(len(holes), dtype=bool)  # masked again since the last evaluation
        reveal, sigma_max = self.rates.reveal.tolist(), self.rates.remask.tolist()
        for step in range(len(reveal) + 1):
            fill = step == len(reveal)
            chosen = masked & (fill or draw_uniforms(seed, Stream.REVEAL, step, holes) < reveal[step])
            again = np.zeros_like(masked)
            if not fill and not masked.all():
                again = draw_uniforms(seed, Stream.REMASK, step, holes) < conf_remask(confidence, sigma_max[step])
            if chosen.any():
                t = self.last_t if fill else float(self.t[step])
                prediction = yield Event(step, t, holes[pending & masked], holes[chosen], fill and self.greedy_fill)
                assert prediction is not None and prediction.probability is not None
                confidence[chosen] = -prediction.probability
                pending[:] = False
            confidence[again] = -np.inf
            masked = (masked & ~chosen) | again
            pending |= again


def conf_remask(confidence: NDArray[np.float64], sigma_max: float) -> NDArray[np.float64]:
    """sigma^l = sigma_max * softmax over visible positions of -(probability at which the token was drawn).

    `confidence` is -probability at visible positions and -inf at masked ones, which get 0.
    """
    if not np.isfinite(confidence).any():
        return np.zeros_like(confidence)
    weight = np.exp(confidence - confidence.max())
    return sigma_max * weight / weight.sum()


class ScoreSampler(Analytic):
    """The analytic step with the unnormalised score (SEDD): a masked position takes token y with (e^D - 1) s_y, so it
    is revealed with the schedule's rate times the normaliser u = (e^sigma - 1) sum_y s_y, at most 1."""

    reads = "normaliser"

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        masked, rejected = holes, NOWHERE
        for step, rate in enumerate(self.rates.reveal.tolist()):
            if not len(masked):
                return
            prediction = yield Event(step, float(self.t[step]), rejected, masked)
            assert prediction is not None and prediction.normaliser is not None
            u = draw_uniforms(seed, Stream.REVEAL, step, masked)
            masked = rejected = masked[u >= rate * prediction.normaliser]
        if len(masked):
            yield Event(len(self.t), self.last_t, rejected, masked, self.greedy_fill)


class Ordered(Sampler):
    """Reveal the positions that rank best, at least as many as needed to finish in sampling.steps evaluations."""

    always_keeps = True
    in_release = False
    usual_threshold = 0.0
    """The threshold if sampling.threshold is -1."""

    def __init__(self, cfg: SamplingConfig, schedule: Schedule):
        super().__init__(cfg, schedule)
        self.threshold = cfg.threshold if cfg.threshold >= 0 else self.usual_threshold

    def rank(self, prediction: Prediction) -> tuple[NDArray[np.int64], int]:
        """(order of the drawn positions, best first; how many of them pass)."""
        raise NotImplementedError

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        masked, rejected = holes, NOWHERE
        for step in range(self.cfg.steps):
            if not len(masked):
                return
            prediction = yield Event(step, len(masked) / len(holes), rejected, masked)
            assert prediction is not None
            order, passing = self.rank(prediction)
            least = -(-len(masked) // (self.cfg.steps - step))
            masked = rejected = np.sort(masked[order[max(passing, least) :]])


class Confidence(Ordered):
    """Reveal every position whose most probable token has at least sampling.threshold."""

    reads = "confidence"
    usual_threshold = 0.9

    def rank(self, prediction: Prediction) -> tuple[NDArray[np.int64], int]:
        assert prediction.confidence is not None
        passing = int((prediction.confidence >= self.threshold).sum())
        return np.argsort(-prediction.confidence, kind="stable"), passing


class Entropy(Ordered):
    """Reveal the longest prefix, by ascending entropy, with sum H - max H <= sampling.threshold, a bound on the cost of
    drawing its positions independently."""

    reads = "entropy"
    usual_threshold = 0.2

    def rank(self, prediction: Prediction) -> tuple[NDArray[np.int64], int]:
        assert prediction.entropy is not None
        order = np.argsort(prediction.entropy, kind="stable")
        before = np.cumsum(prediction.entropy[order]) - prediction.entropy[order]
        return order, int((before <= self.threshold).sum())


class AnchorFirst(Ordered):
    """Reveal first where the anchor network is surest of a rare token; the same number of positions at each step."""

    reads = "anchor"

    def rank(self, prediction: Prediction) -> tuple[NDArray[np.int64], int]:
        assert prediction.anchor is not None
        return np.argsort(-prediction.anchor, kind="stable"), 0

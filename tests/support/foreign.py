"""A package of somebody else: an objective, an anchor rule, a schedule and two samplers, as docs/extending.md says."""

import numpy as np
import torch

from adlm.diffusion.process import LogLinear
from adlm.errors import require
from adlm.objectives.nelbo import Nelbo
from adlm.samplers.base import NOWHERE, Event, Sampler
from adlm.samplers.scheduled import Rates, Scheduled

ENTRY_POINTS = {
    "adlm.objectives": {"my-bound": "foreign:MyBound"},
    "adlm.anchor_rules": {"my-rule": "foreign:even"},
    "adlm.schedules": {"my-schedule": "foreign:MySchedule"},
    "adlm.samplers": {"my-rates": "foreign:MyRates", "my-order": "foreign:MyOrder"},
}


class MyBound(Nelbo):
    """The NELBO of masked positions with the weight 1."""

    bound_name = "mine"

    @classmethod
    def check(cls, cfg, model):
        require(not model.causal, "objective.name=my-bound needs model.causal=false")

    def bound_term(self, noised):
        term = super().bound_term(noised)
        return term._replace(weights_N=torch.ones_like(term.weights_N))


def even(tokens_BL, cfg):
    return tokens_BL % 2 == 0


class MySchedule(LogLinear):
    pass


class MyRates(Scheduled):
    """Half of what mdlm reveals; the filling step does the rest."""

    in_release = False

    def step_rates(self, t, s):
        return Rates((t - s) / t / 2, t * 0)

    @classmethod
    def check(cls, cfg):
        require(cfg.steps > 1 or cfg.eta == 0, "sampling.sampler=my-rates with one step needs sampling.eta=0")


class MyOrder(Sampler):
    """Right to left, while the model is sure."""

    reads = "confidence"
    steps_matter = False
    in_release = False

    def trajectory(self, holes, seed):
        for step, l in enumerate(holes[::-1]):
            prediction = yield Event(step, 1 - step / len(holes), NOWHERE, np.array([l]))
            assert prediction is not None and prediction.confidence is not None

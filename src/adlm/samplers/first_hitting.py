"""First-hitting sampler: the continuous-time reverse process, simulated exactly, one revealed position per evaluation.

With n masks left at time t the next one falls at t' = t u^(1/n), at a uniformly chosen position. These are the order
statistics of n independent uniforms, so drawing one uniform per hole and walking down says the same in one line.
"""

from dataclasses import dataclass

import numpy as np
import torch

from adlm.diffusion.uniforms import Stream, uniforms
from adlm.samplers.plan import NOWHERE, Event, Positions, Trajectory


@dataclass(frozen=True)
class FirstHitting:
    looks = ""
    locks = True

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        t = uniforms(seed, Stream.REVEAL, torch.from_numpy(holes)).numpy()
        for step, i in enumerate(np.argsort(-t, kind="stable")):
            yield Event(step, float(t[i]), NOWHERE, holes[i : i + 1])

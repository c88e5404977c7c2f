"""Left to right, one position per evaluation: the chain rule. For causal models, which see only what stands before.

The engine gives causal models a key-value cache, so that an evaluation reads one new token and not the whole row.
"""

from dataclasses import dataclass

from adlm.samplers.plan import NOWHERE, Event, Positions, Trajectory


@dataclass(frozen=True)
class LeftToRight:
    looks = ""
    locks = True

    def trajectory(self, holes: Positions, seed: int) -> Trajectory:
        for step in range(len(holes)):
            yield Event(step, 1 - step / len(holes), NOWHERE, holes[step : step + 1])

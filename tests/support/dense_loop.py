"""The slow, obvious reference implementation of the engine: a dense step-by-step loop over all states, enumerated.

`trajectories` returns the probability of everything a network could notice - the canvases it sees, at which steps, and
the final sequence. A sampler made of rates needs nothing: its rates are walked one step at a time (their formulas have
tests of their own). Any other sampler declares a reference: a function of the walk and the settings that yields, for
every step, the choices of positions with their probabilities.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from score_form import analytic_last_step, analytic_step, score_from_probs
from toy import ToyModel

from adlm.diffusion.process import LogLinear
from adlm.samplers.base import make_sampler
from adlm.samplers.scheduled import Scheduled
from adlm.schema import SamplingConfig

Canvas = tuple[int, ...]
Choose = Callable[[Canvas, tuple], Iterator | list]
"""(canvas, memory) -> (probability, positions revealed, positions masked) of every possible choice."""
Reference = Callable[["Walk", SamplingConfig], Iterator[Choose]]
DEFAULTS = {"eta": 0.3, "t_on": 0.6, "t_off": 0.2, "alpha_on": 0.7, "threshold": 0.55}


class Walk:
    """All states of one sampler with their probabilities. A state is (canvas, memory, what the network has seen).

    Memory (the probability of each token when it was drawn) and what was seen are kept only where needed: with them
    states multiply.
    """

    def __init__(self, model: ToyModel, start: Canvas, record: bool):
        self.model, self.m = model, model.mask_id
        self.record, self.remember = record, False
        self.holes = [l for l, t in enumerate(start) if t == self.m]
        self.states = {(start, (None,) * len(start), ()): 1.0}

    def masked(self, z: Canvas) -> list[int]:
        return [l for l in self.holes if z[l] == self.m]

    def step(self, number: int, choose: Choose) -> None:
        new: dict = defaultdict(float)
        for (z, memory, seen), prob in self.states.items():
            p = self.model.p(z)
            for q, reveal, remask in choose(z, memory):
                if q == 0:
                    continue
                for tokens in itertools.product(range(self.m), repeat=len(reveal)):
                    weight = prob * q * math.prod(p[l][v] for l, v in zip(reveal, tokens))
                    if weight == 0:
                        continue
                    row, mem = list(z), list(memory)
                    for l in remask:
                        row[l], mem[l] = self.m, None
                    for l, v in zip(reveal, tokens):
                        row[l], mem[l] = v, p[l][v] if self.remember else None
                    now = (*seen, (number, z)) if reveal and self.record else seen
                    new[tuple(row), tuple(mem), now] += weight
        self.states = dict(new)

    def independent(self, z: Canvas, reveal: float, remask: Callable[[int], float]) -> Iterator:
        """Every hole by itself: masked ones are revealed with probability `reveal`, visible ones masked with
        remask(l)."""
        options = [
            [(1 - reveal, ""), (reveal, "reveal")] if z[l] == self.m else [(1 - remask(l), ""), (remask(l), "mask")]
            for l in self.holes
        ]
        for pick in itertools.product(*options):
            changed = {what: [l for l, (_, w) in zip(self.holes, pick) if w == what] for what in ("reveal", "mask")}
            yield math.prod(w for w, _ in pick), changed["reveal"], changed["mask"]

    def finals(self) -> dict[Canvas, float]:
        out: dict = defaultdict(float)
        for (z, _, _), prob in self.states.items():
            out[z] += prob
        return dict(out)

    def paths(self) -> dict:
        out: dict = defaultdict(float)
        for (z, _, seen), prob in self.states.items():
            out[*seen, z] += prob
        return dict(out)


def trajectories(
    model: ToyModel, start: Canvas, c: SamplingConfig, reference: Reference | None = None, record: bool = False
) -> Walk:
    walk = Walk(model, start, record)
    for number, choose in enumerate((reference or rates_of)(walk, c)):
        walk.step(number, choose)
    return walk


def rates_of(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    """The reference of every sampler made of rates: Eq. 6 position by position, then the filling step."""
    sampler = make_sampler(c, LogLinear())
    assert isinstance(sampler, Scheduled) and not sampler.reads, f"{c.sampler} is not made of rates: give a reference"
    for reveal, remask in [*zip(*(p.tolist() for p in sampler.rates)), (1.0, 0.0)]:
        yield lambda z, memory, a=reveal, b=remask: walk.independent(z, a, lambda l: b)


def analytic_finals(model: ToyModel, start: Canvas, T: int, normalised: bool = True) -> dict[Canvas, float]:
    """The SEDD sampler in its own dense form: staggered score times transition, normalised per position.

    `normalised=False` reads the logits as a score that need not sum to one: s_y = e^z_y / K / (e^sigma - 1).
    """
    schedule, m, V = LogLinear(), model.mask_id, model.vocab_size
    states = {start: 1.0}
    grid = [(T - i) / T for i in range(T + 1)]
    for i in range(T + 1):
        last = i == T
        t = grid[i]
        new: dict = defaultdict(float)
        for z, prob in states.items():
            row = torch.tensor(z)
            p = torch.tensor(model.p(z), dtype=torch.float64)
            p = torch.where((row == m).unsqueeze(-1), p, torch.nn.functional.one_hot(row, V))
            if not normalised:
                logits = model.table[model.code(row[None])[0]].detach().double()
                p = torch.where((row == m).unsqueeze(-1), logits.exp() / (V - 1), p)
            sigma = schedule.sigma(max(t, 1e-9))
            score = score_from_probs(p, row, sigma, m)
            down = sigma if last else sigma - schedule.sigma(grid[i + 1])
            q = (analytic_last_step if last else analytic_step)(score, row, down, m)
            q = q.clamp(min=0)  # ratios that are too large leave less than nothing for the mask
            q = (q / q.sum(-1, keepdim=True)).tolist()
            for after in itertools.product(range(V), repeat=len(z)):
                weight = prob * math.prod(q[l][v] for l, v in enumerate(after))
                if weight:
                    new[after] += weight
        states = dict(new)
    return states

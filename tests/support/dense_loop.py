"""The slow, obvious twin of the engine: every sampler as a dense step-by-step loop over Eq. 6, enumerated exactly.

`trajectories` returns the probability of everything a network could notice - the canvases it sees, at which steps,
and the final row - by walking over all states. Formulas are written here from the paper and the release's
description, on purpose without using the package's samplers.
"""

import itertools
import math
from collections import defaultdict

import torch
from toy import ToyModel

from adlm.diffusion.schedules import LogLinear
from adlm.diffusion.score import analytic_last_step, analytic_step, score_from_probs


def sigma_max(a_s: float, a_t: float) -> float:
    return 1.0 if a_t == 0 else min(1.0, (1 - a_s) / a_t)


def eq6(alpha_s: float, alpha_t: float, sigma: float) -> tuple[float, float]:
    """(probability that a masked position takes a token, that a visible one is masked)."""
    return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), sigma


def steps(sampler: str, T: int, eta: float, t_on: float, t_off: float, alpha_on: float) -> list[tuple[float, float]]:
    """(reveal, remask) of every step of a sampler, uniform grid, one number at a time."""
    out = []
    if sampler == "dfm":
        t = 1.0
        while t > 1 / T:
            if t == 1:
                dt, p, r = 1 / T, 1 / T, 0.0
            else:
                a = 10 * t**0.25 * (1 - t) ** 0.25 + 1
                b = a - 1
                dt = min(1 / T, 1 / (a / t + b / (1 - t)))
                p, r = a * dt / t, b * dt / (1 - t)
            out.append((p, r))
            t -= dt
        return [*out, (1.0, 0.0)]
    for i in range(T, 0, -1):
        t, s = i / T, (i - 1) / T
        a_t, a_s = 1 - t, 1 - s
        if sampler == "mdlm":
            out.append(eq6(a_s, a_t, 0.0))
        elif sampler == "ddpm":
            out.append(eq6(1 - (1 - 1e-3) * s, 1 - (1 - 1e-3) * t, 0.0))
        elif sampler == "remdm-cap":
            out.append(eq6(a_s, a_t, min(eta, sigma_max(a_s, a_t))))
        elif sampler == "remdm-rescale":
            out.append(eq6(a_s, a_t, eta * sigma_max(a_s, a_t)))
        elif sampler == "forward-backward":
            out.append(eq6(a_s, a_t, min(1.0 if a_t == 0 else (a_s - a_t) / a_t, sigma_max(a_s, a_t))))
        elif sampler == "remdm-loop":
            if t > t_on:
                grow = alpha_on / (1 - t_on)
                out.append(eq6((1 - max(s, t_on)) * grow, (1 - t) * grow, 0.0))
            elif t > t_off:
                out.append(eq6(alpha_on, alpha_on, eta))
            else:
                shrink = (1 - alpha_on) / t_off
                out.append(eq6(1 - s * shrink, 1 - t * shrink, 0.0))
        else:
            raise KeyError(sampler)
    return [*out, (1.0, 0.0)]  # whatever is left, which has probability 0 on this grid


class Walk:
    """All states of one sampler with their probabilities. A state is (canvas, memory, what the network has seen).

    Memory (the probability of each token when it was drawn) and what was seen are kept only where needed: with them
    states multiply.
    """

    def __init__(self, model: ToyModel, start: tuple[int, ...], remember: bool, record: bool):
        self.model, self.m = model, model.mask_id
        self.remember, self.record = remember, record
        self.fixed = [t != self.m for t in start]
        self.states = {(start, (None,) * len(start), ()): 1.0}

    def step(self, number: int, choose) -> None:
        """`choose(z, memory)` gives (probability, positions revealed, positions masked) of every possible choice."""
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

    def independent(self, z, reveal, remask):
        """Every position by itself: masked ones revealed with `reveal`, visible ones masked with remask(l)."""
        options = []
        for l, token in enumerate(z):
            if self.fixed[l]:
                options.append([(1.0, None)])
            elif token == self.m:
                options.append([(1 - reveal, None), (reveal, "reveal")])
            else:
                options.append([(1 - remask(l), None), (remask(l), "mask")])
        for pick in itertools.product(*options):
            yield (
                math.prod(w for w, _ in pick),
                [l for l, (_, what) in enumerate(pick) if what == "reveal"],
                [l for l, (_, what) in enumerate(pick) if what == "mask"],
            )

    def finals(self) -> dict[tuple[int, ...], float]:
        out: dict = defaultdict(float)
        for (z, _, _), prob in self.states.items():
            out[z] += prob
        return dict(out)

    def paths(self) -> dict:
        out: dict = defaultdict(float)
        for (z, _, seen), prob in self.states.items():
            out[*seen, z] += prob
        return dict(out)


TAU = 5  # anchor-first: a token is rare up to this expected count
DEFAULTS = {"eta": 0.3, "t_on": 0.6, "t_off": 0.2, "alpha_on": 0.7, "threshold": 0.55}


def trajectories(
    model: ToyModel, start: tuple[int, ...], sampler: str, T: int, record: bool = False, **settings
) -> Walk:
    c = DEFAULTS | settings
    walk = Walk(model, start, remember=sampler == "remdm-conf", record=record)
    holes = [l for l, t in enumerate(start) if t == model.mask_id]
    if sampler == "remdm-conf":

        def conf(i):
            t, s = (T - i) / T, (T - i - 1) / T

            def choose(z, memory):
                weights = {l: math.exp(-memory[l]) for l in holes if memory[l] is not None}
                top = sigma_max(1 - s, 1 - t)
                remask = {l: top * w / sum(weights.values()) for l, w in weights.items()}
                return walk.independent(z, (t - s) / t, lambda l: remask[l])

            return choose

        for i in range(T):
            walk.step(i, conf(i))
    elif sampler in ("confidence", "entropy", "anchor-first"):
        for i in range(T):
            walk.step(i, lambda z, memory, i=i: [(1.0, ordered(model, sampler, z, T - i, c["threshold"]), [])])
    elif sampler == "first-hitting":
        for i in range(len(holes)):

            def one(z, memory):
                masked = [l for l in holes if z[l] == model.mask_id]
                return [(1 / len(masked), [l], []) for l in masked]

            walk.step(i, one)
    else:
        rates = steps(sampler, T, c["eta"], c["t_on"], c["t_off"], c["alpha_on"])
        for i, (reveal, remask) in enumerate(rates):
            assert -1e-12 <= reveal <= 1 + 1e-12, (sampler, i, reveal)
            reveal = min(max(reveal, 0.0), 1.0)
            walk.step(i, lambda z, memory, a=reveal, b=remask: walk.independent(z, a, lambda l: b))
    return walk


def ordered(model: ToyModel, sampler: str, z: tuple[int, ...], left: int, threshold: float) -> list[int]:
    """Positions revealed from canvas z by the rules that look at the prediction."""
    p, masked = model.p(z), [l for l, t in enumerate(z) if t == model.mask_id]
    least = -(-len(masked) // left)
    if sampler == "confidence":
        best = sorted(masked, key=lambda l: -max(p[l]))
        passing = sum(max(p[l]) >= threshold for l in masked)
    elif sampler == "entropy":
        H = {l: -sum(x * math.log(x) for x in p[l] if x > 0) for l in masked}
        best, passing, total = sorted(masked, key=lambda l: H[l]), 0, 0.0
        for l in best:
            if total > threshold:
                break
            passing, total = passing + 1, total + H[l]
    else:
        q = model.anchor_p(z)
        count = [sum(t == v for t in z) + sum(q[l][v] for l in masked) for v in range(model.mask_id)]
        score = {l: max(q[l][v] if count[v] <= TAU else 0.0 for v in range(model.mask_id)) for l in masked}
        best, passing = sorted(masked, key=lambda l: -score[l]), 0
    return sorted(best[: max(least, passing)])


def analytic_finals(
    model: ToyModel, start: tuple[int, ...], T: int, normalised: bool = True
) -> dict[tuple[int, ...], float]:
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

"""The slow, obvious form of every sampler that is not made of rates: for each step, the choices of positions with their
probabilities. `dense_loop.trajectories` walks them."""

import math
from collections.abc import Iterator

from dense_loop import Choose, Walk

from adlm.schema import SamplingConfig

TAU = 5  # anchor-first: a token is rare up to this expected count


def remdm_conf(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    walk.remember = True
    for i in range(c.steps):
        t, s = (c.steps - i) / c.steps, (c.steps - i - 1) / c.steps
        top = 1.0 if t == 1 else min(1.0, s / (1 - t))

        def choose(z, memory, t=t, s=s, top=top):
            weights = {l: math.exp(-memory[l]) for l in walk.holes if memory[l] is not None}
            remask = {l: top * w / sum(weights.values()) for l, w in weights.items()}
            return walk.independent(z, (t - s) / t, lambda l: remask[l])

        yield choose


def first_hitting(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    for _ in walk.holes:
        yield lambda z, memory: [(1 / len(walk.masked(z)), [l], []) for l in walk.masked(z)]


def left_to_right(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    for l in walk.holes:
        yield lambda z, memory, l=l: [(1.0, [l], [])]


def ordered(walk: Walk, c: SamplingConfig, rank) -> Iterator[Choose]:
    """rank(z, masked) -> (positions, best first; how many pass)."""
    for i in range(c.steps):

        def choose(z, memory, left=c.steps - i):
            masked = walk.masked(z)
            best, passing = rank(z, masked)
            return [(1.0, sorted(best[: max(-(-len(masked) // left), passing)]), [])]

        yield choose


def confidence(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    def rank(z, masked):
        sure = {l: max(walk.model.p(z)[l]) for l in masked}
        return sorted(masked, key=lambda l: -sure[l]), sum(sure[l] >= c.threshold for l in masked)

    return ordered(walk, c, rank)


def entropy(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    def rank(z, masked):
        H = {l: -sum(x * math.log(x) for x in walk.model.p(z)[l] if x > 0) for l in masked}
        best, passing, total = sorted(masked, key=lambda l: H[l]), 0, 0.0
        for l in best:
            if total > c.threshold:
                break
            passing, total = passing + 1, total + H[l]
        return best, passing

    return ordered(walk, c, rank)


def anchor_first(walk: Walk, c: SamplingConfig) -> Iterator[Choose]:
    def rank(z, masked):
        q, tokens = walk.model.anchor_p(z), range(walk.m)
        count = [sum(t == v for t in z) + sum(q[l][v] for l in masked) for v in tokens]
        score = {l: max(q[l][v] if count[v] <= TAU else 0.0 for v in tokens) for l in masked}
        return sorted(masked, key=lambda l: -score[l]), 0

    return ordered(walk, c, rank)


REFERENCES = {
    "remdm-conf": remdm_conf,
    "first-hitting": first_hitting,
    "autoregressive": left_to_right,
    "confidence": confidence,
    "entropy": entropy,
    "anchor-first": anchor_first,
}

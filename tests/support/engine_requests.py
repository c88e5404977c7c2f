"""Requests to an engine of a tiny model, and the rows it answers with."""

import itertools

from adlm.engine import Request, Result
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS

V, M, L = 11, 10, 12
DIFFUSION = [s for s in SAMPLERS if s != "autoregressive"]


def request(seed: int = 0, tokens=None, sampler: str = "mdlm", **settings) -> Request:
    extra = {k: settings.pop(k) for k in ("banned", "required", "stop_id", "watch") if k in settings}
    return Request(tokens or [M] * L, SamplingConfig(sampler=sampler, **({"steps": 6} | settings)), seed=seed, **extra)


def rows(engine, requests) -> list[list[int]]:
    """Final rows in the order of the requests."""
    ids = [engine.submit(r) for r in requests]
    done = {}
    while engine.busy:
        done |= {u.id: u for u in engine.step() if isinstance(u, Result)}
    return [done[i].tokens for i in ids]


def mixed(n: int) -> list[Request]:
    """Requests of every sampler, with different settings and lengths."""
    out = []
    for seed, sampler in zip(range(n), itertools.cycle(DIFFUSION)):
        tokens = [M] * (L if seed % 3 else 7)
        tokens[2] = seed % V if seed % V != M else 0
        cut = [{}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 5}, {"min_p": 0.1}][seed % 4]
        out.append(request(seed, tokens, sampler, eta=0.05, t_on=0.6, t_off=0.2, **cut))
    return out

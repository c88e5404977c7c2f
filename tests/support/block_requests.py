"""Models that write in blocks, and requests to them."""

import itertools
from dataclasses import replace

import torch
from tiny import MODERN, tiny_model

from adlm.engine import Engine, Request, Result
from adlm.models import Network
from adlm.schema import SamplingConfig
from adlm.tables import SAMPLERS

V, M, L = 11, 10, 12
TRAINED = "4,1,3,5,12"
GROUPED = MODERN | {"n_heads": 4, "n_kv_heads": 2, "activation": "swiglu", "init": "normal"}
KINDS = {
    "plain": {"anchored": False},
    "shifted": {"anchored": False, "shift": True},
    "anchored": {},
    "anchored, shifted": {"shift": True, "bridge": "none"},
    "grouped keys, shifted": GROUPED | {"anchored": False, "shift": True},
}
SAMPLED = sorted(SAMPLERS.entries)


def blocks_model(kind: str = "shifted", **options) -> Network:
    own = {"block_length": TRAINED, "conditioning": "none", "dtype": torch.float64} | KINDS[kind] | options
    return tiny_model(**own).requires_grad_(False)


def make(seed: int, prompt=(1,), length: int = L, K: int = 4, sampler: str = "mdlm", **settings) -> Request:
    extra = {k: settings.pop(k) for k in ("banned", "stop_id", "watch", "required") if k in settings}
    c = SamplingConfig(sampler=sampler, block_length=K, **({"steps": 3, "eta": 0.3, "alpha_on": 0.7} | settings))
    return Request([*prompt, *[M] * (length - len(prompt))], c, seed=seed, **extra)


def mixed(model: Network, K: int) -> list[Request]:
    """Every sampler, with prompts that end anywhere, other lengths, filters and an end of text. A draft has two tokens
    or more."""
    names = [s for s in SAMPLED if not SAMPLERS.load(s).misfit(model.config) and (K > 1 or s != "speculative")]
    more = itertools.cycle([{}, {"top_p": 0.8}, {"stop_id": 7}, {"temperature": 0.7, "top_k": 5}, {"stop_id": 3}])
    found = []
    for seed, (name, extra) in enumerate(zip(names, more)):
        prompt = [1 + l % 9 for l in range(1 + seed % 7)]
        found.append(make(seed, prompt, L - seed % 3, K, name, **extra))
    return found


def tokens(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """In the order of the requests."""
    ids, done = [engine.submit(r) for r in requests], {}
    while engine.busy:
        done |= {u.id: u.tokens for u in engine.step() if isinstance(u, Result)}
    return [done[i] for i in ids]


def drafted(seed: int, K: int = 4, prompt=(1,), **settings) -> Request:
    return make(seed, prompt, K=K, sampler="speculative", **settings)


def left_to_right(request: Request) -> Request:
    return replace(request, settings=replace(request.settings, sampler="autoregressive", block_length=1))

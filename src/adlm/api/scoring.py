"""The bound of given text, with an error bar and every token's share of it.

Diffusion: `draws` noisy versions of the row with times stratified over (0, 1]; a begin-of-text token stands in front,
always visible and never scored, so the result is the bound on -log p(text | begin). Causal: one pass, exact.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from adlm.api.results import Score
from adlm.errors import require
from adlm.models import LanguageModel as Network
from adlm.models import linear_nll
from adlm.objectives import Rows, make_objective
from adlm.schema import NoiseConfig, ObjectiveConfig

# Rows of 1024 tokens in one forward pass: memory is bounded, and a CPU gains nothing from more
TOKENS_AT_ONCE = 1 << 14


@torch.no_grad()
def score_tokens(
    model: Network, tokens: Sequence[int], bos_id: int, noise: NoiseConfig, objective: ObjectiveConfig, draws: int
) -> Score:
    require(len(tokens) > 0, "there is nothing to score: the text has no tokens")
    require(draws >= 1, f"draws must be at least 1, got {draws}")
    bad = [t for t in tokens if not 0 <= t < model.vocab_size or t == model.mask_id]
    require(not bad, f"token {bad[0] if bad else ''} cannot be scored: outside 0..{model.vocab_size - 1}, or the mask")
    causal = model.config.causal
    name = "autoregressive" if causal else "nelbo" if objective.name == "anelbo" else objective.name
    plain = make_objective(replace(objective, name=name, gamma=0.0, anchor_rule="none"), noise, model.mask_id, seed=0)
    draws = 1 if causal else draws
    device = next(model.parameters()).device
    per_draw, per_token = np.zeros(draws), []
    room = model.config.length - 1  # what is left beside the begin token; longer texts are scored piece by piece
    for a in range(0, len(tokens), room):
        row = torch.tensor([bos_id, *tokens[a : a + room]], device=device)
        share = np.zeros((draws, len(row)))
        at_once = max(1, TOKENS_AT_ONCE // len(row))
        for b in range(0, draws, at_once):
            example = torch.arange(b, min(b + at_once, draws), device=device)
            scored = torch.ones(len(example), len(row), dtype=torch.bool, device=device)
            scored[:, 0] = False
            task = plain.draw_bound(Rows(row.expand(len(example), -1), example, draws, scored), 0)
            task.tokens_BL[:, 0] = bos_id
            (term,) = task.terms.values()
            h_ND = model(task.tokens_BL, task.sigma_B).denoiser_BLD.flatten(0, 1).index_select(0, term.rows_N)
            nll_N = linear_nll(h_ND, model.head.weight, model.head.bias, term.targets_N, term.exclude)
            nats = (nll_N.double() * term.weights_N).cpu().numpy()
            at = np.stack(np.unravel_index(term.rows_N.cpu().numpy(), tuple(task.tokens_BL.shape)))
            np.add.at(share, (at[0] + b, at[1] + int(causal)), nats)  # a causal model's hidden state is one ahead
        per_draw += share.sum(1)
        per_token += share.mean(0)[1:].tolist()
    nll = float(per_draw.mean()) / len(tokens)
    stderr = float(per_draw.std(ddof=1) / math.sqrt(draws) / len(tokens)) if draws > 1 else 0.0
    return Score(nll, math.exp(min(nll, 700)), stderr, per_token, list(tokens))

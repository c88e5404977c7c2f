"""The bound of given text, also after a context, with an error bar and every token's part of it.

Causal: one pass, exact. Diffusion: a begin-of-text token and the context stand in front, always visible and never
scored; of the n tokens of the text k are masked, k = 1..n stratified over the draws, and the bound on
-log p(text | context) is n E[S_k / k] with S_k the cross-entropy of the masked ones (objectives/nelbo.py). A text
of one token has no noise at all. The sequence ends with the text: nothing is assumed about what may follow.
Models of another kind (score entropy, D3PM) are scored at random times, by their own bound.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from adlm.diffusion.schedules import diluted
from adlm.errors import require
from adlm.io.paths import float64_device
from adlm.models import Network
from adlm.objectives import Objective, Sequences, make_objective, position_losses
from adlm.schema import NoiseConfig, ObjectiveConfig

# Tokens of one forward pass: memory is bounded, and a CPU gains nothing from more.
TOKENS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Score:
    """How likely a text is: an upper bound on its negative log-likelihood (exact for causal models)."""

    nll: float
    """Nats per token."""
    ppl: float
    """exp(nll)."""
    stderr: float
    """Standard error of nll over the noise draws; 0 for causal models. Strata make it an overestimate."""
    per_token: list[float]
    """Each token's part of the bound, nats; they sum to nll * tokens."""
    tokens: list[int]


class ScoredSequence(NamedTuple):
    """One sequence: what is given, and what is scored."""

    given: list[int]
    scored: list[int]


def split(tokens: Sequence[int], context: Sequence[int], bos_id: int, length: int) -> Iterator[ScoredSequence]:
    """Sequences that hold the text after as much of the end of its context as fits; a text longer than a sequence is
    divided, and every part after the first stands alone."""
    room = length - 1
    first, rest = list(tokens[:room]), list(tokens[room:])
    kept = room - len(first)
    yield ScoredSequence([bos_id, *(context[-kept:] if kept else ())], first)
    for a in range(0, len(rest), room):
        yield ScoredSequence([bos_id], rest[a : a + room])


@torch.no_grad()
def score_tokens(
    model: Network,
    tokens: Sequence[int],
    bos_id: int,
    noise: NoiseConfig,
    objective: ObjectiveConfig,
    draws: int,
    context: Sequence[int] = (),
) -> Score:
    """The score of `tokens` after `context`, by the bound of the model's own kind."""
    require(len(tokens) > 0, "there is nothing to score: the text has no tokens")
    bad = [t for t in (*tokens, *context) if not 0 <= t < model.vocab_size or t == model.mask_id]
    require(not bad, f"token {bad[0] if bad else ''} cannot be scored: outside 0..{model.vocab_size - 1}, or the mask")
    draws = 1 if model.config.causal else draws
    bound = make_objective(objective, noise, model.mask_id, seed=0)
    per_draw, per_token = np.zeros(draws), []
    for part in split(tokens, context, bos_id, model.config.length):
        # a single token is masked in every draw: one draw is enough, unless the model is conditioned on its noise level
        alike = len(part.scored) == 1 and not model.config.time_conditioning and bound.subs
        nats = position_nats(model, part, bound, 1 if alike else draws)
        per_draw += nats.sum(1)
        per_token += nats.mean(0)[len(part.given) :].tolist()
    nll = float(per_draw.mean()) / len(tokens)
    stderr = float(per_draw.std(ddof=1) / math.sqrt(draws) / len(tokens)) if draws > 1 else 0.0
    return Score(nll, math.exp(min(nll, 700)), stderr, per_token, list(tokens))


def position_nats(model: Network, part: ScoredSequence, objective: Objective, draws: int) -> np.ndarray:
    """Nats of every position of the sequence in every draw: [draws, positions]."""
    causal = model.config.causal
    device = float64_device(next(model.parameters()).device)
    tokens_L = torch.tensor([*part.given, *part.scored], device=device)
    found = np.zeros((draws, len(tokens_L)))
    at_once = max(1, TOKENS_AT_ONCE // len(tokens_L))
    for b in range(0, draws, at_once):
        example = torch.arange(b, min(b + at_once, draws), device=device)
        scored = torch.ones(len(example), len(tokens_L), dtype=torch.bool, device=device)
        scored[:, : len(part.given)] = False
        sequences = Sequences(tokens_L.expand(len(example), -1), example, draws, scored)
        corrupt = objective.corrupt_exact_count if objective.subs else objective.corrupt_for_bound
        batch = corrupt(sequences, 0)
        if not causal:
            batch.tokens_BL[:, : len(part.given)] = tokens_L[: len(part.given)]
            assert batch.sigma_B is not None
            scored_fraction = len(part.scored) / len(tokens_L)
            batch = batch._replace(sigma_B=diluted(batch.sigma_B, scored_fraction, objective.schedule))
        # a causal model's hidden state is one ahead of the token it predicts
        found[b : b + len(example), int(causal) :] = position_losses(model, batch).cpu().numpy()
    return found

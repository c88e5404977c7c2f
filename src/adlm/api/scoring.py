"""The bound of a given text, optionally after a context, with a standard error and the contribution of every token.

Causal models, and models with blocks of one token: one pass, exact. Diffusion models: a begin-of-text token and the
context come first, always visible and never scored. Of the n tokens of the text k are masked, k = 1..n stratified
over the draws, and the bound on -log p(text | context) is n E[S_k / k] with S_k the cross-entropy of the masked tokens
(objectives/nelbo.py). The bound of a text of one token has no noise. The sequence ends with the text: nothing is
assumed about what may follow.
Models of another kind (score entropy, D3PM) are scored at random times, by their own bound.

The second half of the module reads the model's prediction for each hole of a text.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.process import Schedule, noise_level
from adlm.diffusion.random import Stream, gumbel_argmax, uniforms
from adlm.engine.blocks import own_block, shift_of
from adlm.engine.drawing import LOGITS_AT_ONCE
from adlm.errors import require
from adlm.io.paths import float64_device
from adlm.models import Network
from adlm.models.transformer import PAST
from adlm.objectives import Objective, Sequences, make_objective, position_losses
from adlm.schema import NoiseConfig, ObjectiveConfig

# Tokens of one forward pass, by kind of device. The limit bounds memory and, in a server, how long other requests wait
# for one pass; a CPU gains nothing from more.
TOKENS_AT_ONCE = {"cpu": 1 << 9}
TOKENS_ELSEWHERE = 1 << 14
T = TypeVar("T")
Parts = Generator[None, None, T]
"""A computation in parts: a generator that yields after each pass of the network and returns the value."""


@dataclass(frozen=True)
class Score:
    """How likely a text is: an upper bound on its negative log-likelihood, or its exact value."""

    nll: float
    """Nats per token."""
    ppl: float
    """exp(nll)."""
    stderr: float | None
    """Standard error of nll over the noise draws; 0 if nll is exact, None if there is only one draw. Stratification
    makes it an overestimate."""
    per_token: list[float]
    """Each token's contribution to the bound, in nats; they sum to nll * len(tokens)."""
    tokens: list[int]
    exact: bool = False
    """Whether nll is the likelihood itself, not a bound: causal models, and models with blocks of one token."""


class ScoredSequence(NamedTuple):
    """One sequence: its given tokens, and the tokens that are scored."""

    given: list[int]
    scored: list[int]


def split(tokens: Sequence[int], context: Sequence[int], bos_id: int, length: int) -> Iterator[ScoredSequence]:
    """Sequences with the text after as much of the end of its context as fits. A text longer than one sequence is
    divided, and the parts after the first have no context."""
    room = length - 1
    first, rest = list(tokens[:room]), list(tokens[room:])
    kept = room - len(first)
    yield ScoredSequence([bos_id, *(context[-kept:] if kept else ())], first)
    for a in range(0, len(rest), room):
        yield ScoredSequence([bos_id], rest[a : a + room])


def whole(parts: Parts[T]) -> T:
    """The value of a computation in parts."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def score_tokens(
    model: Network,
    tokens: Sequence[int],
    bos_id: int,
    noise: NoiseConfig,
    objective: ObjectiveConfig,
    draws: int,
    context: Sequence[int] = (),
) -> Parts[Score]:
    """The score of `tokens` after `context`, by the bound of the model's objective."""
    require(len(tokens) > 0, "there is nothing to score: the text has no tokens")
    bad = [t for t in (*tokens, *context) if not 0 <= t < model.vocab_size or t == model.mask_id]
    require(not bad, f"token {bad[0] if bad else ''} cannot be scored: outside 0..{model.vocab_size - 1}, or the mask")
    exact = own_block(model) == 1
    draws = 1 if exact else draws
    bound = make_objective(objective, noise, model.mask_id, seed=0, model=model.config)
    per_draw, per_token, varies = np.zeros(draws), [], False
    for part in split(tokens, context, bos_id, model.config.length):
        # a single token is masked in every draw: one draw is enough, unless the model is conditioned on the noise level
        alike = len(part.scored) == 1 and not model.config.is_time_conditioned and bound.subs
        varies = varies or not (exact or alike)
        nats = yield from position_nats(model, part, bound, 1 if alike else draws)
        per_draw += nats.sum(1)
        per_token += nats.mean(0)[len(part.given) :].tolist()
    nll = float(per_draw.mean()) / len(tokens)
    stderr = None if varies else 0.0
    if draws > 1:
        stderr = float(per_draw.std(ddof=1) / math.sqrt(draws) / len(tokens))
    return Score(nll, math.exp(min(nll, 700)), stderr, per_token, list(tokens), exact)


def position_nats(model: Network, part: ScoredSequence, objective: Objective, draws: int) -> Parts[np.ndarray]:
    """Nats of every position of the sequence in every draw: [draws, positions]."""
    causal = model.config.causal
    device = float64_device(next(model.parameters()).device)
    tokens_L = torch.tensor([*part.given, *part.scored], device=device)
    found = np.zeros((draws, len(tokens_L)))
    at_once = sequences_at_once(device, len(tokens_L))
    for b in range(0, draws, at_once):
        example = torch.arange(b, min(b + at_once, draws), device=device)
        given = (torch.arange(len(tokens_L), device=device) < len(part.given)).expand(len(example), -1)
        sequences = Sequences(tokens_L.expand(len(example), -1), example, draws, given_BL=given)
        corrupt = objective.corrupt_exact_count if objective.subs else objective.corrupt_for_bound
        batch = corrupt(sequences, 0)
        # a causal model's hidden state is one position before the token it predicts
        found[b : b + len(example), int(causal) :] = position_losses(model, batch).cpu().numpy()
        yield
    return found


def sequences_at_once(device: torch.device, length: int) -> int:
    return max(1, TOKENS_AT_ONCE.get(device.type, TOKENS_ELSEWHERE) // length)


class TokenLogProbs(NamedTuple):
    """Log-probability of a token given those before it, and of the likeliest tokens there."""

    log_p: float
    best: list[tuple[int, float]]
    """Most probable first."""


def left_to_right(
    model: Network, tokens: Sequence[int], given: Sequence[int], schedule: Schedule, top: int
) -> Parts[list[TokenLogProbs]]:
    """log p(token | tokens before it) for each of `tokens` after `given`, by the chain rule, as a causal model factors
    the text anyway. A diffusion model reads each token's past with that token and all later ones masked: its likelihood
    when it writes from left to right, in its own blocks if it has them. The sum over the end of a text is the
    log-likelihood of that end given the beginning."""
    device, first, length = next(model.parameters()).device, len(given), len(given) + len(tokens)
    tokens_L, found = torch.tensor([*given, *tokens], device=device), []
    in_one_pass = own_block(model) == 1 and shift_of(model) == 1
    at_once = length if in_one_pass else sequences_at_once(device, 2 * length if own_block(model) else length)
    for a in range(first, length, at_once):
        at = torch.arange(a, min(a + at_once, length), device=device)
        with torch.no_grad():
            if in_one_pass:
                hidden_ND = model(tokens_L[None], mask=PAST).denoiser_BLD[0, at - int(model.config.causal)]
            else:
                hidden_here = torch.arange(length, device=device) >= at[:, None]
                tokens_NL = tokens_L.expand(len(at), -1).masked_fill(hidden_here, model.mask_id)
                sigma_N = noise_level(hidden_here.float().mean(-1), schedule)
                hidden_ND = states_in_writing(model, tokens_NL, sigma_N)[torch.arange(len(at), device=device), at]
            targets_N = tokens_L[at]
            for rows in torch.arange(len(at), device=device).split(max(1, LOGITS_AT_ONCE // model.vocab_size)):
                found += read_log_probs(model, hidden_ND[rows], targets_N[rows], top)
        yield
    return found


def states_in_writing(model: Network, canvas_BL: Tensor, sigma_B: Tensor) -> Tensor:
    """The hidden states [B, L, D] of canvases as in generation: the whole canvas at once, or in the model's own blocks,
    where the block with the first mask is the one being written. The last block is padded with masks to full length."""
    block, length = own_block(model), canvas_BL.shape[1]
    if not block:
        return model(canvas_BL, sigma_B).denoiser_BLD
    rest = min(-length % block, model.config.length - length)
    noisy_BL = F.pad(canvas_BL, (0, rest), value=model.mask_id)
    block_B = torch.full_like(canvas_BL[:, 0], block)
    return model(torch.cat((noisy_BL, noisy_BL), dim=1), block_B=block_B).denoiser_BLD[:, :length]  # [noisy ; clean]


def read_log_probs(model: Network, hidden_ND: Tensor, targets_N: Tensor, top: int) -> list[TokenLogProbs]:
    logits_NV = model.head(hidden_ND).float()
    logits_NV[:, model.mask_id] = -torch.inf
    log_p_NV = logits_NV.log_softmax(-1)
    chosen_N = log_p_NV.gather(-1, targets_N[:, None])[:, 0]
    best = log_p_NV.topk(min(top, model.vocab_size - 1))
    rows = zip(chosen_N.tolist(), best.indices.tolist(), best.values.tolist())
    return [TokenLogProbs(log_p, list(zip(tokens, values))) for log_p, tokens, values in rows]


# ---- holes -----------------------------------------------------------------------------------------------------------
# The model's prediction for each hole of a text, read in one evaluation.
#
# At hole l of a canvas z the network predicts p_l(v | z), the model's distribution of that position with all other
# holes open: the average over everything the others could become. `stderr` says how much it depends on the others:
# for k = 1..K all other holes are filled by draws from the same prediction, and p_l is read again, once for each hole;
# the standard error of the probability of token v is sd_k(p_l(v | z_k)) / sqrt(K). It is 0 for a hole whose prediction
# does not change. The draws of one prediction are independent across holes, as in a sampler that reveals all holes but
# one in one step; so this is the error of a one-step reading, not of the data.


@dataclass(frozen=True)
class SlotRead:
    """The prediction at one hole."""

    position: int
    tokens: list[int]
    """The likeliest tokens, most probable first."""
    probabilities: list[float]
    stderr: list[float] | None
    """Standard error of each of these probabilities over draws of the other holes; None for fewer than two draws."""
    entropy: float
    """Entropy of the whole prediction, in nats."""


SlotReads = Sequence[SlotRead]


def read_slots(
    model: Network, tokens_L: Tensor, noise_level: Callable[[Tensor], Tensor], top: int, draws: int
) -> Parts[list[SlotRead]]:
    """The predictions at every hole of one sequence."""
    c = model.config
    require(not c.causal, "a causal model predicts no hole in the middle; this needs a diffusion model")
    require(
        not c.block_lengths or c.length in c.block_lengths,
        f"what a model puts into holes is read from the whole canvas, and this one was trained for blocks of"
        f" {', '.join(map(str, sorted(set(c.block_lengths))))}; {c.length} (or 0) would have to be among them",
    )
    holes = torch.nonzero(tokens_L == model.mask_id)[:, 0]
    require(len(holes) > 0, "the template has no hole: [MASK] is one token, [MASK:3] are three")
    log_p_NV = predictions(model, tokens_L[None], noise_level, torch.zeros_like(holes), holes)
    yield
    best = log_p_NV.topk(min(top, model.vocab_size - 1))
    entropy_N = torch.special.entr(log_p_NV.exp()).sum(-1)
    errors_NK: Tensor | None = None
    if draws > 1:
        drawn_NK = []
        for k in range(draws):
            ids_V = torch.arange(model.vocab_size, device=holes.device)
            u_NV = uniforms(0, Stream.TOKEN, k, holes.unsqueeze(-1), ids_V)
            filled_L = tokens_L.clone()
            filled_L[holes] = gumbel_argmax(log_p_NV, u_NV)
            again = yield from each_hole_again(model, tokens_L, filled_L, holes, noise_level)
            drawn_NK.append(again.exp().gather(1, best.indices).double())
        errors_NK = torch.stack(drawn_NK).std(0) / draws**0.5
    return [
        SlotRead(
            int(holes[i]),
            best.indices[i].tolist(),
            best.values[i].exp().tolist(),
            None if errors_NK is None else errors_NK[i].tolist(),
            float(entropy_N[i]),
        )
        for i in range(len(holes))
    ]


def each_hole_again(
    model: Network, tokens_L: Tensor, filled_L: Tensor, holes: Tensor, noise_level: Callable[[Tensor], Tensor]
) -> Parts[Tensor]:
    """The prediction at each hole with the others filled, [N, V], one sequence for each hole."""
    found, at_once = [], sequences_at_once(tokens_L.device, len(tokens_L))
    for a in range(0, len(holes), at_once):
        own = holes[a : a + at_once]
        rows = torch.arange(len(own), device=own.device)
        canvas_NL = filled_L.expand(len(own), -1).clone()
        canvas_NL[rows, own] = model.mask_id
        found.append(predictions(model, canvas_NL, noise_level, rows, own))
        yield
    return torch.cat(found)


def predictions(
    model: Network, tokens_BL: Tensor, noise_level: Callable[[Tensor], Tensor], rows: Tensor, at: Tensor
) -> Tensor:
    """Log-probabilities [N, V] at the positions `at` of the sequences `rows`, the mask excluded."""
    with torch.no_grad():
        hidden_BLD = model(tokens_BL, noise_level(tokens_BL)).denoiser_BLD
        logits_NV = model.head(hidden_BLD[rows, at]).float()
    logits_NV[:, model.mask_id] = -torch.inf
    return logits_NV.log_softmax(-1)

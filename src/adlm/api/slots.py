"""What the model puts into each hole of a text, read in one evaluation.

At hole l of a canvas z the network predicts p_l(v | z), which is the model's distribution of that position with all
other holes open: the average over everything the others could become. How much of it hangs on the others is told by
`stderr`. For k = 1..K all other holes are filled by draws of the same prediction and p_l is read again, once for each
hole; the standard error of the probability of token v is sd_k(p_l(v | z_k)) / sqrt(K). A hole whose reading does not
change has none. Draws of one prediction are independent of each other, as in a sampler that reveals all
holes but one in one step; so this is the error of a one-step reading, not of the data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.api.scoring import Parts, sequences_at_once
from adlm.diffusion.categorical import gumbel_argmax
from adlm.diffusion.uniforms import Stream, uniforms
from adlm.errors import require
from adlm.models import Network


@dataclass(frozen=True)
class SlotRead:
    """The prediction at one hole."""

    position: int
    tokens: list[int]
    """The likeliest, most probable first."""
    probabilities: list[float]
    stderr: list[float] | None
    """Of each of these probabilities, over draws of the other holes; None: not asked for."""
    entropy: float
    """Of the whole prediction, nats."""


SlotReads = Sequence[SlotRead]


def read_slots(
    model: Network, tokens_L: Tensor, noise_level: Callable[[Tensor], Tensor], top: int, draws: int
) -> Parts[list[SlotRead]]:
    """Every hole of one sequence."""
    require(not model.config.causal, "a causal model predicts no hole in the middle; this needs a diffusion model")
    holes = torch.nonzero(tokens_L == model.mask_id)[:, 0]
    require(len(holes) > 0, "the template has no hole: [MASK] is one token, [MASK:3] are three")
    log_p_NV = predictions(model, tokens_L[None], noise_level, torch.zeros_like(holes), holes)
    yield
    best = log_p_NV.topk(min(top, model.vocab_size - 1))
    entropy_N = torch.special.entr(log_p_NV.exp()).sum(-1)
    errors_NK: Tensor | None = None
    if draws:
        drawn_NK = []
        for k in range(draws):
            ids_V = torch.arange(model.vocab_size, device=holes.device)
            u_NV = uniforms(0, Stream.TOKEN, k, holes.unsqueeze(-1), ids_V)
            filled_L = tokens_L.clone()
            filled_L[holes] = gumbel_argmax(log_p_NV, u_NV)
            again = yield from each_hole_again(model, tokens_L, filled_L, holes, noise_level)
            drawn_NK.append(again.exp().gather(1, best.indices).double())
        sd_NK = torch.stack(drawn_NK).std(0) if draws > 1 else torch.zeros_like(drawn_NK[0])
        errors_NK = sd_NK / draws**0.5
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
    """Log-probabilities [N, V] at positions of sequences, the mask excluded."""
    with torch.no_grad():
        hidden_BLD = model(tokens_BL, noise_level(tokens_BL)).denoiser_BLD
        logits_NV = model.head(hidden_BLD[rows, at]).float()
    logits_NV[:, model.mask_id] = -torch.inf
    return logits_NV.log_softmax(-1)

"""The interface of objectives: an objective turns clean sequences into a corrupted batch, and all share one loss.

An objective draws noise and decides which positions of which head are scored against which targets with which weights.
NELBO, ANELBO, autoregressive and score-entropy losses differ in nothing else, so `corrupt` is the objective, and `loss`
is one function. `corrupt` never reads the model: the loop can run it ahead of time, on another stream, and the host
knows the number of scored positions before the network starts.

Losses are sums; the loop divides once by the count over all ranks. Noise is a function of (seed, step, example).
Letters: B sequences, L positions, D width, N scored positions, M computed positions.
"""

import functools
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from adlm import tables
from adlm.diffusion.process import Schedule, make_schedule
from adlm.io.paths import float64_device
from adlm.models import Hidden, Network, linear_cross_entropy, linear_losses
from adlm.models.linear_cross_entropy import ChunkLoss, cross_entropy_chunk
from adlm.models.transformer import PAST, Mask
from adlm.objectives.anchors import AnchorRule, anchor_rule
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig


class Sequences(NamedTuple):
    """Clean sequences, and the number of each among the `total` that share stratified times (a global batch, a data
    set)."""

    tokens_BL: Tensor
    example_B: Tensor
    """Number of each sequence in [0, total)."""
    total: int
    attention_mask_BL: Tensor | None = None
    """False at padding, which carries no loss; None: no padding."""
    times_B: Tensor | None = None
    """Times in [0, 1) that an evaluation has chosen; None: drawn, stratified over the `total` sequences."""
    given_BL: Tensor | None = None
    """True at given tokens (a prompt): never masked, never scored. Padding is then always masked, since it must not
    reveal where an answer ends. None: nothing is given."""

    def at(self, rows: Tensor) -> "Sequences":
        """Select some of the sequences, which keep their numbers."""
        chosen = {name: x[rows] for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**chosen)

    @property
    def scored_BL(self) -> Tensor | None:
        """True at tokens that may be scored, neither padding nor given; None: all."""
        real_BL = None if self.attention_mask_BL is None else self.attention_mask_BL.bool()
        if self.given_BL is None:
            return real_BL
        return ~self.given_BL if real_BL is None else real_BL & ~self.given_BL

    @property
    def token_count(self) -> int:
        """Number of tokens that the loss is divided by."""
        return self.tokens_BL.numel() if self.scored_BL is None else int(self.scored_BL.sum())


class Term(NamedTuple):
    """One sum of the loss: positions of one head against targets."""

    head: str
    """denoiser or anchor."""
    positions_N: Tensor
    """Positions scored, as indices into the flattened [B * L] hidden states of the tokens."""
    targets_N: Tensor
    weights_N: Tensor
    """Weight of each position, without `scale`; more columns if the chunk loss takes more numbers per position."""
    scale: float = 1.0
    """Factor of the whole term in the total (gamma of the anchor term)."""
    exclude: int | None = None
    """Class left out of the softmax (the mask)."""
    chunk_loss: ChunkLoss = cross_entropy_chunk


class CorruptedBatch(NamedTuple):
    """What the network reads, and what its predictions are scored against."""

    tokens_BL: Tensor
    """Input of the network: partly masked sequences."""
    sigma_B: Tensor | None
    """Noise level of each sequence, for time-conditioned networks."""
    count: int
    """Tokens of the sequences: what the loss is divided by, summed over ranks."""
    terms: dict[str, Term]
    """Terms of the loss by name; the first one is the bound."""
    read_M: Tensor | None = None
    """Positions whose denoiser states are computed, if these are more than its term scores (`rounded`)."""
    block_B: Tensor | None = None
    """Block length of each sequence, if tokens_BL is [noisy ; clean] (models/transformer.py); [B, 2] if sequences share
    rows. Positions of the terms then count both halves."""
    causal: bool = False
    """Causal attention, in a network that otherwise sees everything."""

    @property
    def inputs(self) -> dict[str, Mask]:
        """The network's arguments besides tokens and noise level; none for whole sequences with full attention."""
        if self.causal:
            return {"mask": PAST}
        return {} if self.block_B is None else {"block_B": self.block_B}


class LossOutput(NamedTuple):
    total: Tensor
    """Sum over tokens of all terms, scaled: what is differentiated."""
    count: int
    terms: dict[str, Tensor]
    """Sums of each term alone, unscaled and detached; the first one is the bound."""


class Objective:
    """Base class of the objectives in tables.OBJECTIVES."""

    subs: ClassVar[bool] = False
    """The head predicts the token at a mask (SUBS), so the bound can be estimated by numbers of masks, too."""
    learns_score: ClassVar[bool] = False
    """The head learns ratios of probabilities, which need not sum to one."""
    sampler: ClassVar[str] = "mdlm"
    """The sampler of models trained with this objective, unless sampling.sampler names one."""
    model: ModelConfig = ModelConfig()
    """The model to train. Only its block lengths and whether its outputs are shifted matter here."""

    def __init__(self, cfg: ObjectiveConfig, schedule: Schedule, mask_id: int, seed: int):
        self.cfg, self.schedule, self.mask_id, self.seed = cfg, schedule, mask_id, seed

    @functools.cached_property
    def find_anchors(self) -> AnchorRule:
        """A(x), looked up on first use: an evaluation needs no rule, and a rule may come from another package."""
        return anchor_rule(self.cfg)

    @classmethod
    def check(cls, cfg: ObjectiveConfig, model: ModelConfig) -> None:
        """Refuse settings and models that do not fit. Called before training; the command line also calls it for
        objectives of other packages. It checks ours without loading torch (ObjectiveConfig.check)."""

    def corrupt(self, sequences: Sequences, step: int, progress: float) -> CorruptedBatch:
        """Corrupt the sequences of optimizer step `step`; `progress` in [0, 1] is how much of the run is done."""
        raise NotImplementedError

    def corrupt_for_bound(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        """Corrupt for validation: the only term is the bound (or the exact likelihood), and the noise depends only on
        the example and `draw`."""
        raise NotImplementedError

    def corrupt_for_validation(self, sequences: Sequences) -> CorruptedBatch:
        """Corrupt for the bound that is watched during training."""
        return self.corrupt_for_bound(sequences, 0)

    def corrupt_exact_count(self, sequences: Sequences, draw: int) -> CorruptedBatch:
        """Corrupt for the same bound, estimated by numbers of masks instead of times; only if `subs`."""
        raise NotImplementedError


def make_objective(
    cfg: ObjectiveConfig, noise: NoiseConfig, mask_id: int, seed: int, model: ModelConfig | None = None
) -> Objective:
    """Build the objective; `model` matters if it is a block-diffusion model or has shifted outputs."""
    objective = tables.OBJECTIVES.load(cfg.name, "objective.name")(cfg, make_schedule(noise), mask_id, seed)
    objective.model = model or objective.model
    return objective


class Heads(Protocol):
    """The part of a model that a loss reads besides its hidden states."""

    @property
    def head(self) -> Any: ...
    @property
    def anchor_head(self) -> Any: ...


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the copy to a GPU does not make the host wait."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)


def on_device(corrupted: CorruptedBatch, device: torch.device) -> CorruptedBatch:
    """Move all tensors of a corrupted batch to the device."""
    terms = {
        name: term._replace(
            positions_N=put(term.positions_N, device),
            targets_N=put(term.targets_N, device),
            weights_N=put(term.weights_N, device),
        )
        for name, term in corrupted.terms.items()
    }
    rest = {"sigma_B": corrupted.sigma_B, "read_M": corrupted.read_M, "block_B": corrupted.block_B}
    moved = {name: None if x is None else put(x, device) for name, x in rest.items()}
    return corrupted._replace(tokens_BL=put(corrupted.tokens_BL, device), terms=terms, **moved)


def loss(model: Network, batch: CorruptedBatch) -> LossOutput:
    """Run the network once and sum every term of the batch."""
    at_N = read_positions(batch)
    hidden = model(batch.tokens_BL, batch.sigma_B, at_N=at_N, **batch.inputs)
    return sum_terms(model, hidden, batch, gathered=at_N is not None)


def sum_terms(model: Heads, hidden: Hidden, batch: CorruptedBatch, gathered: bool = False) -> LossOutput:
    """The loss of hidden states already computed. `gathered`: the denoiser's states are those of the positions that its
    term scores, possibly followed by others; otherwise those of all positions."""
    total = torch.zeros((), device=batch.tokens_BL.device)
    terms = {}
    for name, term in batch.terms.items():
        of_denoiser = term.head == "denoiser"
        hidden_BLD, head = (hidden.denoiser_BLD, model.head) if of_denoiser else (hidden.anchor_BLD, model.anchor_head)
        assert hidden_BLD is not None and head is not None, f"{name} reads a head this model lacks"
        value = linear_cross_entropy(
            states_at(hidden_BLD, term.positions_N, gathered and of_denoiser),
            head,
            term.targets_N,
            term.weights_N,
            exclude=term.exclude,
            chunk_loss=term.chunk_loss,
        )
        total = total + term.scale * value
        terms[name] = value.detach()
    return LossOutput(total, batch.count, terms)


@torch.no_grad()
def position_losses(model: Network, batch: CorruptedBatch) -> Tensor:
    """The loss of every position of a validation batch in nats, float64 [B, L]; 0 where nothing is scored."""
    batch = on_device(batch, next(model.parameters()).device)
    (term,) = batch.terms.values()
    at_N = read_positions(batch)
    hidden = model(batch.tokens_BL, batch.sigma_B, at_N=at_N, **batch.inputs)
    losses_N = linear_losses(
        states_at(hidden.denoiser_BLD, term.positions_N, at_N is not None),
        model.head,
        term.targets_N,
        term.weights_N,
        exclude=term.exclude,
        chunk_loss=term.chunk_loss,
    )
    device = float64_device(losses_N.device)
    length = batch.tokens_BL.shape[1] // (1 if batch.block_B is None or batch.block_B.ndim == 2 else 2)
    losses = torch.zeros(len(batch.tokens_BL), length, dtype=torch.float64, device=device)
    losses.view(-1).index_copy_(0, term.positions_N.to(device), losses_N.to(device).double())
    return losses


def sequence_bounds(model: Network, batch: CorruptedBatch) -> Tensor:
    """The bound of every sequence of a validation batch, nats summed over its positions, float64 [B]."""
    return position_losses(model, batch).sum(-1)


def states_at(hidden_BLD: Tensor, positions_N: Tensor, gathered: bool) -> Tensor:
    hidden_MD = hidden_BLD.flatten(0, 1)
    return hidden_MD[: len(positions_N)] if gathered else hidden_MD.index_select(0, positions_N)


MOST = 0.9
"""If a larger fraction of the positions is read, gathering them costs more than it saves."""


def read_positions(batch: CorruptedBatch) -> Tensor | None:
    """The positions that the denoiser's head reads; None if they are so many that all states are computed."""
    denoiser = [term for term in batch.terms.values() if term.head == "denoiser"]
    if len(denoiser) != 1 or len(denoiser[0].positions_N) > MOST * batch.tokens_BL.numel():
        return None
    return denoiser[0].positions_N if batch.read_M is None else batch.read_M


def rounded(batch: CorruptedBatch) -> CorruptedBatch:
    """Round the number of positions read up to a multiple of an eighth of all, with positions that are not scored. The
    loss is the same. For callers who need shapes that seldom change."""
    positions_N = read_positions(batch)
    if positions_N is None:
        return batch
    n = batch.tokens_BL.numel()
    more = -len(positions_N) % max(1, n // 8)
    other = torch.ones(n, dtype=torch.bool, device=positions_N.device).index_fill_(0, positions_N, False)
    return batch._replace(read_M=torch.cat((positions_N, other.nonzero().squeeze(1)[:more])))


def after_prompts(sequences: Sequences, z_BL: Tensor, mask_id: int) -> Tensor:
    """Noisy sequences as the network reads them: prompts clean, and padding after answers masked."""
    if sequences.given_BL is None:
        return z_BL
    z_BL = torch.where(sequences.given_BL, sequences.tokens_BL, z_BL)
    if sequences.attention_mask_BL is None:
        return z_BL
    return z_BL.masked_fill(~sequences.attention_mask_BL.bool(), mask_id)


def real_targets(sequences: Sequences) -> Tensor:
    """True at tokens that follow another one and are neither padding nor given, [B, L-1]."""
    if sequences.scored_BL is None:
        return torch.ones_like(sequences.tokens_BL[:, 1:], dtype=torch.bool)
    return sequences.scored_BL[:, 1:]


def select(scored_BL: Tensor, targets_BL: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat positions where `scored_BL` holds, with their targets and their sequence's weight."""
    positions_N = scored_BL.flatten().nonzero().squeeze(1)
    targets_N = targets_BL.flatten().index_select(0, positions_N)
    weights_N = weight_B.index_select(0, positions_N // targets_BL.shape[1])
    return positions_N, targets_N, weights_N

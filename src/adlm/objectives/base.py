"""What an objective is: it turns clean rows into a task for the network, and the task's loss is always the same.

An objective draws noise and decides which rows of which head are scored against which targets with which weights. That
is all a NELBO, an ANELBO, an autoregressive or a score-entropy loss is, so `draw` is the objective and `loss` is one
function. `draw` never looks at the model: the loop can run it ahead of time, on another stream, and the number of
scored rows is known to the host before the network starts.

Losses are sums; the loop divides once by the count over all ranks. Noise is a function of (seed, step, example).
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from adlm.models import Network, linear_cross_entropy, linear_losses
from adlm.models.linear_cross_entropy import ChunkLoss, cross_entropy_chunk
from adlm.schema import ModelConfig


class Rows(NamedTuple):
    """Clean rows, and where each stands among the `total` rows that share their times (a global batch, a data set)."""

    tokens_BL: Tensor
    example_B: Tensor
    total: int
    attention_mask_BL: Tensor | None = None
    """False at padding, which carries no loss; None: no padding."""
    times_B: Tensor | None = None
    """Times in [0, 1) that an evaluation has chosen; None: drawn, stratified over the `total` rows."""


class Term(NamedTuple):
    """One sum of the loss: rows of one head against targets."""

    head: str
    """denoiser or anchor."""
    rows_N: Tensor
    """Positions scored, as indices into the flattened [B * L] hidden states."""
    targets_N: Tensor
    weights_N: Tensor
    """Weight of each position, without `scale`; more columns if the chunk loss takes more numbers per row."""
    scale: float = 1.0
    """Factor of the whole term in the total (gamma of the anchor term)."""
    exclude: int | None = None
    """Class left out of the softmax (the mask)."""
    chunk_loss: ChunkLoss = cross_entropy_chunk
    floor: float = 0.0
    """Nats of cross-entropy below which a position carries no loss (0: every position counts)."""


class Task(NamedTuple):
    tokens_BL: Tensor
    """What the network reads."""
    sigma_B: Tensor | None
    """Noise level of each row."""
    count: int
    """Tokens of the rows: what the loss is divided by, summed over ranks."""
    terms: dict[str, Term]
    read_M: Tensor | None = None
    """Positions of which the denoiser's states are computed, where these are more than its term scores (`rounded`)."""


class LossOutput(NamedTuple):
    total: Tensor
    """Sum over tokens of all terms, scaled: what is differentiated."""
    count: int
    terms: dict[str, Tensor]
    """Sums of each term alone, unscaled and detached; the first one is the bound."""


class Objective(Protocol):
    def check(self, model: ModelConfig) -> None:
        """Refuse a model this objective cannot train."""
        ...

    def draw(self, rows: Rows, step: int, progress: float) -> Task:
        """The training task of optimizer step `step`; `progress` in [0, 1] is its share of the run."""
        ...

    def draw_bound(self, rows: Rows, draw: int) -> Task:
        """The validation task: the bound alone (or the exact likelihood), with noise fixed by example and `draw`."""
        ...


def loss(model: Network, task: Task) -> LossOutput:
    """Run the network once and score every term of the task."""
    at_N = only_rows(task)
    hidden = model(task.tokens_BL, task.sigma_B, at_N=at_N)
    return score_terms(model, hidden.denoiser_BLD, hidden.anchor_BLD, task, picked=at_N is not None)


MOST = 0.9
"""Share of the positions from which picking those that are read costs more than it spares."""


def only_rows(task: Task) -> Tensor | None:
    """The positions the denoiser's head reads, if they are few enough that the network should be spared the others."""
    denoiser = [term for term in task.terms.values() if term.head == "denoiser"]
    if len(denoiser) != 1 or len(denoiser[0].rows_N) > MOST * task.tokens_BL.numel():
        return None
    return denoiser[0].rows_N if task.read_M is None else task.read_M


def rounded(task: Task) -> Task:
    """The same task, which reads a round number of positions, a multiple of an eighth of all: those that are scored,
    and then others. For whoever needs shapes that seldom change; the loss is the same."""
    rows_N = only_rows(task)
    if rows_N is None:
        return task
    positions = task.tokens_BL.numel()
    more = -len(rows_N) % max(1, positions // 8)
    other = torch.ones(positions, dtype=torch.bool, device=rows_N.device).index_fill_(0, rows_N, False)
    return task._replace(read_M=torch.cat((rows_N, other.nonzero().squeeze(1)[:more])))


@torch.no_grad()
def term_losses(model: Network, task: Task) -> Tensor:
    """The loss of every position of a task's only term, without gradients: [N]."""
    (term,) = task.terms.values()
    at_N = only_rows(task)
    hidden_ND = model(task.tokens_BL, task.sigma_B, at_N=at_N).denoiser_BLD.flatten(0, 1)
    hidden_ND = hidden_ND.index_select(0, term.rows_N) if at_N is None else hidden_ND[: len(term.rows_N)]
    return linear_losses(
        hidden_ND, model.head, term.targets_N, term.weights_N, exclude=term.exclude, chunk_loss=term.chunk_loss
    )


class Heads(Protocol):
    """The part of a model that scoring needs."""

    @property
    def head(self) -> Any: ...
    @property
    def anchor_head(self) -> Any: ...


def score_terms(
    model: Heads, denoiser_BLD: Tensor, anchor_BLD: Tensor | None, task: Task, picked: bool = False
) -> LossOutput:
    """`picked`: the denoiser's states are already those of the rows its term scores, and perhaps more behind them."""
    total = torch.zeros((), device=task.tokens_BL.device)
    terms = {}
    for name, term in task.terms.items():
        hidden_BLD, head = (denoiser_BLD, model.head) if term.head == "denoiser" else (anchor_BLD, model.anchor_head)
        assert hidden_BLD is not None and head is not None, f"{name} reads a head this model lacks"
        hidden_ND, there = hidden_BLD.flatten(0, 1), picked and term.head == "denoiser"
        hidden_ND = hidden_ND[: len(term.rows_N)] if there else hidden_ND.index_select(0, term.rows_N)
        value = linear_cross_entropy(
            hidden_ND, head, term.targets_N, term.weights_N, exclude=term.exclude, chunk_loss=term.chunk_loss
        )
        total = total + term.scale * value
        terms[name] = value.detach()
    return LossOutput(total, task.count, terms)


@torch.no_grad()
def row_bounds(model: Network, task: Task) -> Tensor:
    """The bound of every row of a validation task, nats summed over the row, float64: [B]."""
    (term,) = task.terms.values()
    loss_N = term_losses(model, task)
    row_N = term.rows_N // task.tokens_BL.shape[1]
    return torch.zeros(len(task.tokens_BL), dtype=torch.float64, device=loss_N.device).index_add_(
        0, row_N, loss_N.double()
    )


def select(term_rows_BL: Tensor, targets_BL: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat positions where `term_rows_BL` holds, with their targets and their row's weight."""
    rows_N = term_rows_BL.flatten().nonzero().squeeze(1)
    targets_N = targets_BL.flatten().index_select(0, rows_N)
    weights_N = weight_B.index_select(0, rows_N // targets_BL.shape[1])
    return rows_N, targets_N, weights_N


def count_tokens(rows: Rows) -> int:
    return rows.tokens_BL.numel() if rows.attention_mask_BL is None else int(rows.attention_mask_BL.sum())

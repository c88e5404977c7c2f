"""What the public functions return."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One finished text."""

    text: str
    tokens: list[int]
    nfe: int
    """Network evaluations (a diffusion model needs far fewer than steps x tokens; guidance counts two each)."""
    seconds: float
    """From its first evaluation to its end; texts of one batch share that time."""
    seed: int


@dataclass(frozen=True)
class Partial:
    """A text on its way: holes still show as the mask token."""

    text: str
    tokens: list[int]
    step: int
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation."""


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
    """Each token's share of the bound, nats; they sum to nll * tokens."""
    tokens: list[int]

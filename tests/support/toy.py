"""A model given by a table, small enough to enumerate: every canvas has its own logits at every position."""

import itertools

import torch
from torch import Tensor, nn

from adlm.models import Hidden
from adlm.models.layers import pick_each, pick_flat
from adlm.schema import ModelConfig


class ToyModel(nn.Module):
    """p(x0 | z) is row z of a table. The hidden state *is* the row of logits and the heads are the identity."""

    def __init__(self, vocab_size: int, length: int, seed: int = 0, scale: float = 1.5, anchored: bool = True):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.vocab_size, self.mask_id = vocab_size, vocab_size - 1
        self.config = ModelConfig(length=length, anchored=anchored)
        shape = (vocab_size**length, length, vocab_size)
        self.table = nn.Parameter(torch.randn(shape, generator=g) * scale)
        self.anchor_table = nn.Parameter(torch.randn(shape, generator=g) * scale)
        self.head = self.identity()
        self.anchor_head = self.identity() if anchored else None
        self.calls = 0
        self.sigmas: list[Tensor] = []
        self.known: dict = {}

    def identity(self) -> nn.Linear:
        head = nn.Linear(self.vocab_size, self.vocab_size, bias=False)
        nn.init.eye_(head.weight)
        return head

    @property
    def embedding(self) -> Tensor:
        """The engine asks for its type."""
        return self.table

    def freeze_bridge(self) -> None:
        pass

    def code(self, tokens_BL: Tensor) -> Tensor:
        """Shorter sequences are read as if masks followed."""
        L = self.config.length
        tokens = nn.functional.pad(tokens_BL, (0, L - tokens_BL.shape[1]), value=self.mask_id)
        return (tokens * self.vocab_size ** torch.arange(L)).sum(-1)

    def forward(self, tokens_BL: Tensor, sigma_B: Tensor | None = None, cache=None, at_N=None, at_BQ=None) -> Hidden:
        self.calls += 1
        if sigma_B is not None:
            self.sigmas.append(sigma_B)
        code, L = self.code(tokens_BL), tokens_BL.shape[1]
        denoiser_BLV = self.table[code, :L]
        if at_N is not None:
            denoiser_BLV = pick_flat(denoiser_BLV, at_N)
        if at_BQ is not None:
            denoiser_BLV = pick_each(denoiser_BLV, at_BQ)
        return Hidden(denoiser_BLV, self.anchor_table[code, :L] if self.anchor_head is not None else None)

    def p(self, z: tuple[int, ...]) -> list[list[float]]:
        """Prediction at every position of canvas z, mask excluded; float64 lists [L][V]."""
        return self.predictions(self.table, z)

    def anchor_p(self, z: tuple[int, ...]) -> list[list[float]]:
        return self.predictions(self.anchor_table, z)

    def predictions(self, table: Tensor, z: tuple[int, ...]) -> list[list[float]]:
        key = (id(table), z)
        if key not in self.known:
            with torch.no_grad():
                logits = table[self.code(torch.tensor([z]))[0], : len(z)].double().clone()
            logits[:, self.mask_id] = -torch.inf
            self.known[key] = logits.softmax(-1).tolist()
        return self.known[key]

    def finals(self, length: int) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.vocab_size - 1), repeat=length))

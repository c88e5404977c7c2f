"""The settings of a network: what shape it has, and which adapters it trains."""

from dataclasses import dataclass
from typing import Annotated

from adlm import tables
from adlm.errors import require
from adlm.rules import (
    AtLeastOne,
    Choices,
    Count,
    FractionBelowOne,
    Numbers,
    Range,
    WholeNumber,
    numbers,
)


@dataclass
class ModelConfig:
    """One transformer family: plain or anchored, bidirectional or causal, published block or modern block."""

    hidden_size: Count = 768
    """Width D of the residual stream."""
    n_heads: Count = 12
    """Attention heads; must divide hidden_size into an even head width, unless head_size gives that."""
    n_kv_heads: WholeNumber = 0
    """Heads of keys and values, each shared by n_heads / n_kv_heads heads of queries; 0: as many as n_heads."""
    head_size: WholeNumber = 0
    """Width of a head; 0: hidden_size / n_heads."""
    n_blocks: Count = 12
    """Blocks before the anchors are read (all blocks, when not anchored)."""
    n_denoiser_blocks: WholeNumber = 6
    """Blocks after the anchors are read; ignored when not anchored. The paper uses half of n_blocks."""
    length: Annotated[int, Range(low=4)] = 1024
    """Longest sequence in tokens."""
    dropout: FractionBelowOne = 0.1
    """Dropout probability on the output of attention and MLP, in training."""
    anchored: bool = True
    """Two stages: an anchor network whose prediction feeds a denoiser."""
    bridge: Annotated[str, Choices(tables.BRIDGES)] = "linear"
    """How anchors reach the denoiser: linear (the paper's: the denoiser reads a linear map of the anchor logits), none
    (it continues the residual stream, anchors only appear in the loss)."""
    causal: bool = False
    """Attention to the past only (AR, A2R)."""
    block_length: Annotated[str, Numbers()] = ""
    """Block diffusion: tokens K of a block, which is denoised after the blocks before it (1: token by token; 0 or
    empty: the whole sequence at once). Of several, 16,1,4,64,1024, each training sequence takes one in turn, and the
    first is the model's own K in bounds and generation; a number named twice comes up twice as often."""
    conditioning: Annotated[str, Choices(("none", "constant", "sigma", "t"))] = "constant"
    """What norms and gates are modulated by (adaLN): none (no adaLN), constant (one learned vector, as in the published
    block), sigma (the noise level sigma(t)) or t (the fraction of masks, GIDD)."""
    cond_dim: Count = 128
    """Width of the conditioning vector."""
    norm: Annotated[str, Choices(("layernorm", "rmsnorm"))] = "layernorm"
    """layernorm or rmsnorm."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    norm_eps: Annotated[float, Range(low=0, high=0.1)] = 0.0
    """What a norm adds to the mean square; 0: 1e-5 (layernorm) or 1e-6 (rmsnorm)."""
    activation: Annotated[str, Choices(("gelu", "relu2", "swiglu"))] = "gelu"
    """MLP activation: gelu (tanh form), relu2 (squared ReLU) or swiglu (silu of one half times the other)."""
    bias: bool = True
    """Biases in MLP, heads and bridge."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    rope_base: AtLeastOne = 10000.0
    """Base of the rotary frequencies."""
    tied: bool = False
    """The head is the embedding, the anchor network's too; needs bias=false, and bridge=none if anchored."""
    shift: bool = False
    """The prediction for position i is read at position i-1 (for position 0, at 0), as in diffusion models made of
    causal ones. Causal models read so by themselves."""
    mlp_size: WholeNumber = 0
    """Width of the MLP; 0: 4 * hidden_size."""
    init: Annotated[str, Choices(("torch", "normal", "normal-zero"))] = "torch"
    """How weights start: torch (uniform +-1/sqrt(fan-in), heads at zero, as published), normal (standard deviation
    0.02) or normal-zero (the same, but output projections of attention and MLP at zero; under adaLN gates are zero
    instead)."""

    @property
    def has_adaln(self) -> bool:
        return self.conditioning != "none"

    @property
    def is_time_conditioned(self) -> bool:
        return self.conditioning in ("sigma", "t")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_size or self.hidden_size // self.n_heads

    @property
    def mlp_width(self) -> int:
        return self.mlp_size or 4 * self.hidden_size

    @property
    def mlp_rows(self) -> int:
        """Outputs of the first map of the MLP: two halves under swiglu."""
        return (2 if self.activation == "swiglu" else 1) * self.mlp_width

    def check(self) -> None:
        """Refuse values that do not fit together."""
        require(
            self.head_size > 0 or self.hidden_size % (2 * self.n_heads) == 0,
            f"model.n_heads={self.n_heads} must split model.hidden_size={self.hidden_size} into heads of even width",
        )
        require(self.head_size % 2 == 0, f"model.head_size={self.head_size} must be even")
        require(
            self.n_heads % self.kv_heads == 0,
            f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}",
        )
        require(
            not (self.tied and (self.bias or (self.anchored and self.bridge != "none"))),
            "model.tied=true needs model.bias=false, and model.bridge=none if anchored: an embedding has no bias, and"
            " another bridge reads a head of its own",
        )
        require(
            not (self.shift and self.causal),
            "model.shift=true needs model.causal=false: a causal model predicts the next token in any case",
        )
        require(
            not self.anchored or self.n_denoiser_blocks >= 1,
            "model.n_denoiser_blocks=0 leaves no denoiser: give at least 1, or model.anchored=false",
        )
        require(
            not (self.causal and self.is_time_conditioned),
            f"model.causal=true has no noise level for model.conditioning={self.conditioning}: choose none or constant",
        )
        require(
            not (self.causal and self.block_length),
            f"model.block_length={self.block_length} needs model.causal=false: a causal model has blocks of one token",
        )
        require(
            not (self.block_lengths and self.is_time_conditioned),
            f"model.block_length={self.block_length}: every block has a noise level of its own, which"
            f" model.conditioning={self.conditioning} cannot tell apart",
        )

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The block lengths K that the model is trained for, first that of bounds and generation unless another one is
        asked for; empty: the whole sequence, always."""
        found = numbers(self.block_length)
        return tuple(min(K or self.length, self.length) for K in found) if any(found) else ()


@dataclass
class LoraConfig:
    """Low-rank adapters: a matrix W of the blocks becomes W + (16 / rank) B A, and only B and A train."""

    rank: WholeNumber = 0
    """Rank of the adapters of a model that is fine-tuned (checkpoint.init_from); 0: all of its weights train."""

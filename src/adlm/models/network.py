"""The network of this package, one class: MDLM, ADLM, AR and A2R differ in configuration alone.

    tokens -> embedding -> [anchor stack -> bridge ->] denoiser stack -> hidden states

A network returns hidden states and owns its heads. It does not return logits: objectives and samplers pick the few
positions they need first, so that no [batch, length, vocabulary] tensor is ever built. `logits`, `log_probs` and
`anchor_logits` are dense conveniences for users and tests.

The module ends with low-rank adapters of a trained network.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm import tables
from adlm.diffusion.process import subs
from adlm.errors import require
from adlm.models.bridge import Bridge
from adlm.models.layers import pick_each, pick_flat
from adlm.models.transformer import Block, LayerCache, Mask, Stack, cached_mask, reading_positions, training_mask
from adlm.schema import LoraConfig, ModelConfig


class Hidden(NamedTuple):
    """Final-normed hidden states, ready for the heads."""

    denoiser_BLD: Tensor
    anchor_BLD: Tensor | None


class Cache:
    """Keys and values, in both stacks, of the tokens that a causal or block-diffusion network has read."""

    def __init__(self, denoiser: list[LayerCache], anchor: list[LayerCache] | None, seen_B: Tensor):
        self.denoiser = denoiser
        self.anchor = anchor
        self.seen_B = seen_B
        """Tokens already read in each sequence."""

    @property
    def layers(self) -> list[LayerCache]:
        return [*self.denoiser, *(self.anchor or [])]


class Network(nn.Module):
    bridge: Bridge | None

    def __init__(self, cfg: ModelConfig, vocab_size: int, mask_id: int):
        super().__init__()
        cfg.check()
        require(vocab_size > 1, f"vocab_size={vocab_size} must be at least 2 (one token and the mask)")
        require(0 <= mask_id < vocab_size, f"mask_id={mask_id} is outside the vocabulary 0..{vocab_size - 1}")
        self.config, self.vocab_size, self.mask_id = cfg, vocab_size, mask_id
        D = cfg.hidden_size
        self.embedding = nn.Parameter(torch.empty(vocab_size, D))
        self.anchor = Stack(cfg, cfg.n_blocks) if cfg.anchored else None
        unmade = "meta" if cfg.tied else None
        self.anchor_head = nn.Linear(D, vocab_size, bias=cfg.bias, device=unmade) if cfg.anchored else None
        self.bridge = tables.BRIDGES.load(cfg.bridge, "model.bridge")(cfg, vocab_size) if cfg.anchored else None
        self.denoiser = Stack(cfg, cfg.n_denoiser_blocks if cfg.anchored else cfg.n_blocks)
        self.head = nn.Linear(D, vocab_size, bias=cfg.bias, device=unmade)
        if cfg.tied:
            tie(self)
        self.residual_dtype: torch.dtype | None = None
        """Precision of the residual stream; None: that of the embedding."""
        if not self.embedding.is_meta:  # a meta model is shapes alone, and filling it would import the compiler
            initialise(self)

    def forward(
        self,
        tokens_BL: Tensor,
        sigma_B: Tensor | None = None,
        cache: Cache | None = None,
        at_N: Tensor | None = None,
        at_BQ: Tensor | None = None,
        mask: Mask | None = None,
        block_B: Tensor | None = None,
    ) -> Hidden:
        """Compute hidden states; sigma_B (noise level of each sequence) matters only to a time-conditioned network.

        With a cache (causal networks, block diffusion), tokens_BL continues each sequence where it stopped. `at_N` or
        `at_BQ` names the positions that the denoiser's head will read, if they are few. Only their states are returned,
        [1, N, D] (`layers.pick_flat`, for a loss) or [B, Q, D] (`layers.pick_each`, for a sampler), and most of the
        last block is skipped. `mask` says what each position may attend to: booleans broadcastable to [B, heads, L, L]
        (real_BL[:, None, None] for padding) or PAST. The default is everything, or PAST if causal.

        `block_B` is the block length of each sequence. Without a cache, tokens_BL is then [noisy ; clean]
        (transformer.py) and the states are those of the noisy half; `at_N` indexes that half, without the first token
        of a sequence if predictions are shifted. If it is [B, 2], a block length for each half, two sequences share a
        row, and the states are those of both halves. With a cache, `block_B` decides what new tokens see, and states
        are returned where they were computed, shifted or not.
        """
        positions_BL = None
        if cache is not None:
            positions_BL = cache.seen_B[:, None] + torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
            cache.seen_B = cache.seen_B + tokens_BL.shape[1]
        x_BLD = nn.functional.embedding(tokens_BL, self.embedding)
        return self.read(x_BLD, sigma_B, cache, positions_BL, at_N, at_BQ, mask, block_B)

    def read(
        self,
        x_BLD: Tensor,
        sigma_B: Tensor | None = None,
        cache: Cache | None = None,
        positions_BL: Tensor | None = None,
        at_N: Tensor | None = None,
        at_BQ: Tensor | None = None,
        mask: Mask | None = None,
        block_B: Tensor | None = None,
    ) -> Hidden:
        """`forward` on embeddings, for inputs that are not tokens; with a cache the caller gives their positions."""
        if self.residual_dtype is not None:
            x_BLD = x_BLD.to(self.residual_dtype)
        read_BL = anchor_BLD = None
        if block_B is not None and cache is not None:
            assert positions_BL is not None
            mask = cached_mask(positions_BL, block_B, cache.denoiser[0].reach)
        elif block_B is not None:
            positions_BL, mask = training_mask(block_B, x_BLD.shape[1] // 2)
            read_BL = reading_positions(block_B, x_BLD.shape[1] // 2, self.config.shift)
        if self.anchor is not None and self.anchor_head is not None and self.bridge is not None:
            anchor_cache = None if cache is None else cache.anchor
            stream_BLD, anchor_BLD = self.anchor(x_BLD, sigma_B, anchor_cache, positions_BL, mask=mask)
            x_BLD = self.bridge(stream_BLD, anchor_BLD, self.anchor_head)
        denoiser_cache = None if cache is None else cache.denoiser
        if read_BL is not None:
            read_N = None if at_N is None else flat(read_BL, x_BLD.shape[1])[at_N]
            states_BMD = self.denoiser(x_BLD, sigma_B, None, positions_BL, read_N, mask=mask).normed_BLD
            denoiser_BLD = pick_each(states_BMD, read_BL) if at_N is None else states_BMD
            return Hidden(denoiser_BLD, None if anchor_BLD is None else pick_each(anchor_BLD, read_BL))
        if self.config.shift and cache is None:
            denoiser_BLD = self.shifted(x_BLD, sigma_B, at_N, at_BQ, mask)
            return Hidden(denoiser_BLD, None if anchor_BLD is None else earlier(anchor_BLD))
        denoised = self.denoiser(x_BLD, sigma_B, denoiser_cache, positions_BL, at_N, at_BQ, mask)
        return Hidden(denoised.normed_BLD, anchor_BLD)

    def shifted(
        self, x_BLD: Tensor, sigma_B: Tensor | None, at_N: Tensor | None, at_BQ: Tensor | None, mask: Mask | None
    ) -> Tensor:
        """The denoiser's states, each moved to the position it predicts, the next one (model.shift)."""
        if at_BQ is not None:
            return self.denoiser(x_BLD, sigma_B, at_BQ=(at_BQ - 1).clamp(min=0), mask=mask).normed_BLD
        states_BLD = earlier(self.denoiser(x_BLD, sigma_B, mask=mask).normed_BLD)
        # Positions 0 and 1 read the same state, and the last block would need distinct positions: picked here instead.
        return states_BLD if at_N is None else pick_flat(states_BLD, at_N)

    def make_cache(self, batch: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        require(
            self.config.causal or bool(self.config.block_lengths),
            "a KV cache needs model.causal=true or model.block_length: other models re-read every position",
        )
        require(
            0 < length <= self.config.length, f"cache length={length} is outside 1..model.length={self.config.length}"
        )
        device = self.embedding.device
        dtype = dtype or self.embedding.dtype
        anchor = None if self.anchor is None else self.anchor.make_cache(batch, length, dtype, device)
        seen_B = torch.zeros(batch, dtype=torch.long, device=device)
        return Cache(self.denoiser.make_cache(batch, length, dtype, device), anchor, seen_B)

    def freeze_bridge(self) -> None:
        """Replace the bridge by its inference form, once the weights are final."""
        if self.bridge is not None and self.anchor_head is not None:
            self.bridge = self.bridge.freeze(self.anchor_head)

    # Dense conveniences

    def logits(self, tokens_BL: Tensor, sigma_B: Tensor | None = None) -> Tensor:
        """Raw denoiser logits at every position, float32 or better: [B, L, V]."""
        check_tokens(tokens_BL, self.vocab_size, self.config.length)
        return at_least_float32(self.head(self(tokens_BL, sigma_B).denoiser_BLD))

    def anchor_logits(self, tokens_BL: Tensor, sigma_B: Tensor | None = None) -> Tensor:
        """Raw logits of the anchor network at every position: [B, L, V]."""
        if self.anchor_head is None:
            raise ValueError("this model has no anchor network (model.anchored=false): anchor_logits does not exist")
        check_tokens(tokens_BL, self.vocab_size, self.config.length)
        return at_least_float32(self.anchor_head(self(tokens_BL, sigma_B).anchor_BLD))

    def log_probs(self, tokens_BL: Tensor, sigma_B: Tensor | None = None) -> Tensor:
        """log p_theta: of x_0 given z_t after SUBS (diffusion), or of the next token (causal): [B, L, V]."""
        logits_BLV = self.logits(tokens_BL, sigma_B)
        if not self.config.causal:
            return subs(logits_BLV, tokens_BL, self.mask_id)
        logits_BLV[..., self.mask_id] = -torch.inf
        return logits_BLV.log_softmax(-1)


def flat(position_BQ: Tensor, length: int) -> Tensor:
    """Positions of each sequence, [B, Q], as indices into the flattened [B * length]."""
    first_B = torch.arange(len(position_BQ), device=position_BQ.device) * length
    return (first_B[:, None] + position_BQ).flatten()


def earlier(x_BLD: Tensor) -> Tensor:
    """Shift each state one position to the right; the first position keeps its own."""
    return torch.cat((x_BLD[:, :1], x_BLD[:, :-1]), dim=1)


def tie(model: Network) -> None:
    """Make the embedding the weight of the heads: one parameter, saved and loaded as `embedding` alone."""
    heads = {"head": model.head} | ({} if model.anchor_head is None else {"anchor_head": model.anchor_head})
    for head in heads.values():
        head.weight = model.embedding

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in heads:
            state.pop(f"{prefix}{name}.weight", None)

    def put_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "embedding" in state:
            state.update({f"{prefix}{name}.weight": state[prefix + "embedding"] for name in heads})

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(put_in)


def build_model(cfg: ModelConfig, vocab_size: int, mask_id: int) -> Network:
    """The network of a configuration, freshly initialised from torch's global generator."""
    return Network(cfg, vocab_size, mask_id)


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def check_tokens(tokens_BL: Tensor, vocab_size: int, length: int) -> None:
    """Validate what a user hands to a public function. Reads values back, so it stays out of training steps."""
    shape = tuple(tokens_BL.shape)
    require(tokens_BL.ndim == 2, f"tokens must have shape [batch, length], got {shape}")
    require(not tokens_BL.is_floating_point(), f"tokens must be integers, got {tokens_BL.dtype}")
    require(0 < shape[1] <= length, f"tokens have {shape[1]} positions, allowed are 1..{length} (model.length)")
    if tokens_BL.numel():
        low, high = int(tokens_BL.min()), int(tokens_BL.max())
        require(
            low >= 0 and high < vocab_size, f"tokens lie in {low}..{high}, allowed are 0..{vocab_size - 1} (vocab_size)"
        )


def parameter_count(model: Network, trained: bool = False) -> int:
    """Number of parameters, or of those that train."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Whether this is a matrix inside a block, other than the modulation: Muon and low-rank adapters apply to these."""
    return ".blocks." in name and parameter.ndim == 2 and ".modulation." not in name


@torch.no_grad()
def initialise(model: Network) -> None:
    """Set every parameter. `torch`: like the release (all logits 0, every block the identity while adaLN gates are
    zero). `normal`: standard deviation 0.02, residual outputs scaled down by depth or (`normal-zero`) zero."""
    cfg = model.config
    normal = cfg.init != "torch"
    depth = sum(isinstance(m, Block) for m in model.modules())
    if normal:
        for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():  # after all linear layers, since some are exceptions
        if isinstance(module, Block):
            for out in (module.attn_out, module.mlp_out):
                # not under adaLN, whose gates start at zero: zero times zero would never receive a gradient
                if cfg.init == "normal-zero" and not cfg.has_adaln:
                    nn.init.zeros_(out.weight)
                elif normal and not cfg.has_adaln:
                    nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * depth))
        if isinstance(module, Block | Stack) and module.modulation is not None:
            nn.init.zeros_(module.modulation.weight)
            nn.init.zeros_(module.modulation.bias)
    if normal:
        nn.init.normal_(model.embedding, std=0.02)
    else:
        nn.init.kaiming_uniform_(model.embedding, a=math.sqrt(5))
    for head in (model.head, model.anchor_head):
        if head is not None and not cfg.tied:
            nn.init.zeros_(head.weight)
            if head.bias is not None:
                nn.init.zeros_(head.bias)
    if model.anchor_head is not None and normal and not cfg.tied:
        nn.init.normal_(model.anchor_head.weight, std=0.02)
    if model.bridge is not None:
        model.bridge.initialise(cfg)


class Flops(NamedTuple):
    """FLOPs of a model per token: the numerator of MFU, and the compute column of every comparison.

    They are what the method needs, not what an implementation spends: two for each multiply-add of a matrix product.
    The heads and everything after the last attention count only at scored positions, the bridge counts as one D x D
    product, and recomputation does not count.
    """

    forward_per_token: float
    """Forward pass, one token of a sequence of the given length."""
    training_per_token: float
    """Forward and backward: three times the forward."""


def count_flops(
    cfg: ModelConfig, vocab_size: int, length: int, scored: float = 0.5, anchors_scored: float = 0.0
) -> Flops:
    """Count FLOPs; `scored`, `anchors_scored`: fraction of positions that the denoiser's and the anchor head read."""
    D, E = cfg.hidden_size, cfg.n_heads * cfg.head_width
    blocks = cfg.n_blocks + (cfg.n_denoiser_blocks if cfg.anchored else 0)
    ways = reading_ways(cfg, length)
    read, attended = (sum(numbers) / len(ways) for numbers in zip(*ways))
    after_attention = D * E + D * (cfg.mlp_rows + cfg.mlp_width)
    products = 2 * (D * E + 2 * D * cfg.kv_heads * cfg.head_width + after_attention)
    bridge = tables.BRIDGES.load(cfg.bridge, "model.bridge").flops(cfg) if cfg.anchored else 0
    heads = 2 * D * vocab_size * (scored + anchors_scored)
    unread = (read - min(1.0, scored)) * 2 * after_attention  # of the last block
    forward = blocks * (read * products + 4 * E * attended) - unread + bridge + heads
    return Flops(forward, 3 * forward)


def reading_ways(cfg: ModelConfig, length: int) -> list[tuple[int, float]]:
    """The ways in which training reads sequences, in turn, each as (positions read per token, keys that these attend
    to in total)."""
    if cfg.causal:
        return [(1, length / 2)]
    ways: list[tuple[int, float]] = []
    for K in cfg.block_lengths or (length,):
        if length <= K:
            ways.append((1, length))
        elif K == 1 and cfg.shift:
            ways.append((1, length / 2))
        else:  # noisy and clean: each sees its own block and, on average, half of the clean ones
            ways.append((2, length + K))
    return ways


# ---- low-rank adapters -----------------------------------------------------------------------------------------------
# Low-rank adapters (LoRA, arXiv 2106.09685): a matrix W of the blocks becomes W + (alpha / rank) B A.
#
# W is [out, in], A [rank, in] and B [out, rank]. Only A and B train. B starts at zero, so that training starts from the
# base model exactly. In training the two thin products run beside the frozen one. For inference the sum is formed once
# (`merged`), and the model is one without adapters again.
#
# The weights of an adapted model are those of the base under their own names, with `NAME.lora_a` and `NAME.lora_b`
# beside each `NAME.weight` of a block.

WEIGHT, A, B = "weight", "lora_a", "lora_b"
ALPHA = 16.0
"""Strength of the adapters trained here. A file of adapters states its own."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter."""

    def __init__(self, linear: nn.Linear, cfg: LoraConfig):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        like = {"device": linear.weight.device, "dtype": torch.promote_types(linear.weight.dtype, torch.float32)}
        self.scale = ALPHA / cfg.rank
        self.lora_a = nn.Parameter(torch.empty(cfg.rank, linear.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, cfg.rank, **like))
        if not linear.weight.is_meta:
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as torch starts a linear layer

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.scale * self.lora_b)


def adapt(model: Network, cfg: LoraConfig) -> Network:
    """Freeze the model and add an adapter, drawn from torch's global generator, to every matrix of its blocks."""
    width = model.config.hidden_size
    require(cfg.rank <= width, f"lora.rank={cfg.rank} must be at most {width}, the width of the model")
    model.requires_grad_(False)
    for owner in [module for name, module in model.named_modules() if ".blocks." in f".{name}."]:
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear) and name != "modulation":
                setattr(owner, name, AdaptedLinear(layer, cfg))
    return model


def adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters among the weights of an adapted model."""
    return {name: x for name, x in weights.items() if name.rpartition(".")[2] in (A, B)}


def base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the base model among those of an adapted model."""
    return {name: x for name, x in weights.items() if name.rpartition(".")[2] not in (A, B)}


def merged(weights: Mapping[str, Tensor], cfg: LoraConfig, alpha: float = ALPHA) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same: W + (alpha / rank) B A, computed in at least
    float32 and rounded once to the precision of W."""
    found = base_weights(weights)
    for name, a in weights.items():
        stem, _, part = name.rpartition(".")
        if part == A:
            w, b = found[f"{stem}.{WEIGHT}"], weights[f"{stem}.{B}"]
            wide = torch.promote_types(w.dtype, torch.float32)
            delta = (alpha / cfg.rank) * (b.to(wide) @ a.to(wide))
            found[f"{stem}.{WEIGHT}"] = (w.to(wide) + delta.to(w.device)).to(w.dtype)
    return found


def check_adapters(found: Mapping[str, tuple[int, ...]], base: Mapping[str, Tensor], rank: int, what: str) -> None:
    """Refuse adapters that do not fit the matrices of the base's blocks. `found`: their shapes by name."""
    matrices = {name.rpartition(".")[0]: w for name, w in base.items() if is_block_matrix(name, w)}
    expected = {f"{stem}.{A}": (rank, w.shape[1]) for stem, w in matrices.items()}
    expected |= {f"{stem}.{B}": (w.shape[0], rank) for stem, w in matrices.items()}
    for name in sorted(expected.keys() | found.keys()):
        got, want = found.get(name, "missing"), expected.get(name, "unknown")
        require(got == want, f"{what}: {name:.80} is {got} in the file and {want} for its base")


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and values in float32: independent of file and precision, as long as the precision
    holds the values exactly."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(f"{name} {tuple(x.shape)}\n".encode())
        found.update(x.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B"))
    return found.hexdigest()

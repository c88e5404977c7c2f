"""The networks for reasoning: our own causal stack, or a causal Hugging Face model, behind one protocol.

A network turns embeddings into final hidden states and owns its head. It keeps what it has read in a memory (a cache of
keys and values). Sequences of different lengths are read together: each call passes a chunk that is padded on the
right, with the number of real positions of every sequence. A real position never sees padding, in either network.

Coconut feeds the final hidden state of a position back as the input of the next one, at the slots (a continuous
thought). The slots must be read one after another, everything else at once: with n slots, n + 2 reads of a memory
instead of n + 1 reads of whole sequences. The memory is then differentiable: thoughts are trained through it. The
sequences of a batch have the same number of slots, at different positions.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from adlm.data.tokenizers import Backend, Tokenizer, load_tokenizer, train_bpe
from adlm.errors import require
from adlm.io.load import load_released
from adlm.io.paths import path_of
from adlm.models import Cache, Hidden, Network, build_model
from adlm.models.layers import allow_variants, pick_flat
from adlm.models.network import count_flops
from adlm.models.transformer import LayerCache
from adlm.objectives.base import CorruptedBatch, LossOutput, Term, loss, on_device, put, sum_terms
from adlm.reasoning.methods import IGNORE, Example, Layout, add_markers, parts, whole_text
from adlm.schema import Config

VOCABULARY = 1024
"""Entries of a vocabulary made from the training examples."""


class ReasoningNetwork(Protocol):
    """The interface of a network, which is also an nn.Module."""

    longest: int
    """The most positions of a sequence."""

    @property
    def head(self) -> Any:
        """With .weight [V, D] and .bias [V] or None."""
        ...

    @property
    def anchor_head(self) -> None: ...

    def embed(self, tokens_BL: Tensor) -> Tensor: ...

    def remember(self, batch: int, length: int, gradients: bool) -> Any:
        """An empty memory for sequences of up to `length` positions."""
        ...

    def read(self, x_BLD: Tensor, memory: Any = None, real_B: Tensor | None = None) -> Tensor:
        """Hidden states of a chunk. With a memory, the chunk continues what was read before, and its first real_B
        positions are kept."""
        ...


class KeptLayerCache(LayerCache):
    """A layer cache that is differentiable: each extension creates new tensors, so gradients flow through it."""

    def extend(self, k_BNlH: Tensor, v_BNlH: Tensor, positions_Bl: Tensor) -> tuple[Tensor, Tensor]:
        index = positions_Bl[:, None, :, None].expand_as(k_BNlH)
        self.k_BNLH = self.k_BNLH.scatter(2, index, k_BNlH.to(self.k_BNLH.dtype))
        self.v_BNLH = self.v_BNLH.scatter(2, index, v_BNlH.to(self.v_BNLH.dtype))
        return self.k_BNLH, self.v_BNLH


class OwnNetwork(nn.Module):
    """A causal Network of ours. One position of its length stays free: padding of a chunk is written there."""

    anchor_head = None

    def __init__(self, model: Network):
        super().__init__()
        require(model.config.causal and not model.config.anchored, "reasoning needs a plain causal model (algo=ar)")
        self.model = model
        self.longest = model.config.length - 1

    @property
    def head(self) -> nn.Linear:
        return self.model.head

    def forward(self, tokens_BL: Tensor, sigma_B: Tensor | None = None, at_N: Tensor | None = None) -> Hidden:
        """The whole network in one pass, for the loss; compiled if `parallelise` does so."""
        return self.model(tokens_BL, sigma_B, at_N=at_N)

    def flops_per_token(self, length: float, scored: float) -> float | None:
        """Training FLOPs per token, for sequences of a mean length with a fraction of scored tokens; None: unknown."""
        return count_flops(self.model.config, self.model.vocab_size, round(length), scored).training_per_token

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return nn.functional.embedding(tokens_BL, self.model.embedding)

    def remember(self, batch: int, length: int, gradients: bool) -> Cache:
        device = self.model.embedding.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        cache = self.model.make_cache(batch, length + 1, dtype)
        if gradients:
            cache.denoiser[:] = [KeptLayerCache(layer.k_BNLH, layer.v_BNLH) for layer in cache.denoiser]
        return cache

    def read(self, x_BLD: Tensor, memory: Cache | None = None, real_B: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.model.read(x_BLD).denoiser_BLD
        assert real_B is not None
        # padding beyond the end is written to the spare last position, to which no real position attends
        spare = memory.denoiser[0].k_BNLH.shape[2] - 1
        positions_BL = (memory.seen_B[:, None] + torch.arange(x_BLD.shape[1], device=x_BLD.device)).clamp(max=spare)
        with torch.compiler.set_stance("force_eager"):
            hidden = self.model.read(x_BLD, cache=memory, positions_BL=positions_BL)
        memory.seen_B = memory.seen_B + real_B
        return hidden.denoiser_BLD


@dataclass
class HuggingFaceMemory:
    cache: Any
    """The growing cache of transformers: chunks with their padding, one after another."""
    real_BK: Tensor
    """Which entries of the cache are not padding."""
    seen_B: Tensor


class HuggingFaceNetwork(nn.Module):
    """The body and the head of a causal model of transformers."""

    anchor_head = None

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.longest: int = model.config.max_position_embeddings

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, tokens_BL: Tensor, sigma_B: Tensor | None = None, at_N: Tensor | None = None) -> Hidden:
        states_BLD = self.read(self.embed(tokens_BL))
        return Hidden(states_BLD if at_N is None else pick_flat(states_BLD, at_N), None)

    def flops_per_token(self, length: float, scored: float) -> float | None:
        return None

    def compile_blocks(self) -> None:
        """Compile the blocks (the first ModuleList of the model). All share one compiled block per sequence length, and
        there are few lengths, since sequences are padded to a multiple. Only reads without a memory use it: reads with
        one have too many shapes."""
        allow_variants()
        for block in next((m for m in self.model.base_model.modules() if isinstance(m, nn.ModuleList)), ()):
            block.compile(dynamic=False)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens_BL)

    def remember(self, batch: int, length: int, gradients: bool) -> HuggingFaceMemory:
        from transformers import DynamicCache

        device = self.head.weight.device
        real_BK = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return HuggingFaceMemory(DynamicCache(), real_BK, torch.zeros(batch, dtype=torch.long, device=device))

    def read(self, x_BLD: Tensor, memory: HuggingFaceMemory | None = None, real_B: Tensor | None = None) -> Tensor:
        body = self.model.base_model
        if memory is None:
            return body(inputs_embeds=x_BLD, use_cache=False).last_hidden_state
        assert real_B is not None
        offset_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
        memory.real_BK = torch.cat([memory.real_BK, (offset_L < real_B[:, None]).long()], dim=1)
        with torch.compiler.set_stance("force_eager"):
            output = body(
                inputs_embeds=x_BLD,
                attention_mask=memory.real_BK,
                position_ids=(memory.seen_B[:, None] + offset_L).clamp(max=self.longest - 1),
                past_key_values=memory.cache,
                use_cache=True,
            )
        memory.seen_B = memory.seen_B + real_B
        return output.last_hidden_state


SAFELY = {"trust_remote_code": False}
"""Arguments for `transformers`, for every folder: do not run its code, and do not ask whether to."""


def load_base(base: str) -> tuple[OwnNetwork | HuggingFaceNetwork, Tokenizer]:
    """A pretrained model and its tokenizer with the markers: in our stack, which is faster, if it supports the model
    (Llama, Qwen); otherwise in transformers."""
    path = path_of(base)
    if path.is_dir() or path.suffix == ".gguf":
        try:
            return load_own(path)
        except ValueError as error:
            print(f"adlm: reason.base={base!r} is read by transformers ({error})", file=sys.stderr)
    return load_hugging_face(base)


def load_own(path: Path) -> tuple[OwnNetwork, Tokenizer]:
    """A released causal model (folder or GGUF file) in our stack, for training; new tokens get mean embeddings."""
    loaded = load_released(path, "cpu")
    known = loaded.tokenizer.vocab_size - 1  # without the mask, which never occurs in text
    tokenizer = add_markers(loaded.tokenizer)
    model = build_model(
        loaded.model.config, max(tokenizer.vocab_size, loaded.model.vocab_size), tokenizer.mask_id
    ).requires_grad_()
    weights = {name: x.float() for name, x in loaded.model.state_dict().items()}
    for name in {"embedding", "head.weight"} & weights.keys():
        rows = weights[name][:known]
        weights[name] = torch.cat([rows, rows.mean(0).expand(model.vocab_size - known, -1)])
    model.load_state_dict(weights)
    return OwnNetwork(model), tokenizer


def load_hugging_face(base: str) -> tuple[HuggingFaceNetwork, Tokenizer]:
    """A causal model by hub name, folder or GGUF file, and its tokenizer with the markers; new tokens get mean
    embeddings. Quantised weights of a GGUF file are converted to float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError(f"reason.base={base!r} needs transformers: pip install 'adlm[eval]'") from None
    path = path_of(base)
    is_gguf = path.suffix == ".gguf"
    require(path.is_file() or not is_gguf, f"reason.base={base!r} is not a file")
    name = str(path.parent) if is_gguf else str(path) if path.is_dir() else base
    options: dict[str, Any] = SAFELY | ({"gguf_file": path.name} if is_gguf else {})
    try:
        backend = AutoTokenizer.from_pretrained(name, **options).backend_tokenizer  # type: ignore[union-attr]
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"reason.base={base!r} is no causal model that can be loaded: {lines[0]}") from None
    if is_gguf:
        model = without_quantisation(model)
    tokenizer = add_markers(Tokenizer(Backend.from_str(backend.to_str()), base))
    old = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > old:
        model.resize_token_embeddings(tokenizer.vocab_size, mean_resizing=False)
        with torch.no_grad():
            for layer in {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
                layer.weight[old:] = layer.weight[:old].mean(0)
    network = HuggingFaceNetwork(model)
    check_head(network, base)
    return network, tokenizer


def without_quantisation(model: Any) -> Any:
    """The same weights in a model without the quantisation settings of its file, for training and saving."""
    from transformers import AutoModelForCausalLM

    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    return plain.float()


@torch.no_grad()
def check_head(network: HuggingFaceNetwork, base: str) -> None:
    """Refuse architectures that scale or cap logits after the head, which the loss here would ignore."""
    was_training = network.training
    network.eval()
    tokens_BL = torch.arange(8, device=network.head.weight.device)[None]
    ours, theirs = network.head(network.read(network.embed(tokens_BL))), network.model(tokens_BL).logits
    network.train(was_training)
    require(
        torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3),
        f"reason.base={base!r} does more to its logits than a linear head; such architectures are not supported",
    )


def build_network(cfg: Config, train: list[Example]) -> tuple[OwnNetwork | HuggingFaceNetwork, Tokenizer]:
    """The network before its first step, and its tokenizer with the markers."""
    torch.manual_seed(cfg.seed)
    if cfg.reason.base:
        return load_base(cfg.reason.base)
    if cfg.data.tokenizer:
        tokenizer = load_tokenizer(cfg.data.tokenizer, map(whole_text, train), cfg.data.root)
    else:
        tokenizer = word_tokenizer(train)
    tokenizer = add_markers(tokenizer)
    return OwnNetwork(build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)), tokenizer


def word_tokenizer(train: list[Example]) -> Tokenizer:
    """A BPE of the training examples. A word is the same token everywhere, also at the start of a question or step:
    otherwise a network from scratch must learn for every name that "Tom" and " Tom" are the same."""
    return train_bpe((text for example in train for text in parts(example)), VOCABULARY, prefix_space=True)


# Sequences through a network


class PaddedSequences(NamedTuple):
    """Token sequences as a batch, padded on the right."""

    tokens_BL: Tensor
    length_B: Tensor
    first_slot_B: Tensor
    n_slots: int
    """Number of fed-back positions in every sequence; 0: plain tokens."""


class ReasoningBatch(NamedTuple):
    """A batch with its targets."""

    sequences: PaddedSequences
    scored: CorruptedBatch
    tokens: int
    """Tokens read, without padding."""

    @property
    def terms(self) -> dict[str, Term]:
        return self.scored.terms


def pad_sequences(
    token_lists: list[list[int]], slots: list[range], fed_back: bool, device: torch.device, multiple: int = 1
) -> PaddedSequences:
    """Sequences with their slots, as tensors on a device. `multiple`: see `padded`."""
    tokens = padded(token_lists, 0, multiple)
    length, first = np.array([len(ids) for ids in token_lists]), np.array([at.start for at in slots])
    on_device = (put(torch.from_numpy(array), device) for array in (tokens, length, first))
    return PaddedSequences(*on_device, n_slots=len(slots[0]) if fed_back else 0)


def padded(lists: list[list[int]], filler: int, multiple: int = 1) -> np.ndarray:
    """A matrix with one row per list, as wide as the longest list rounded up to a multiple: there are fewer shapes, and
    a GPU is faster."""
    length = -(-max(map(len, lists)) // multiple) * multiple
    out = np.full((len(lists), length), filler, dtype=np.int64)
    for row, values in zip(out, lists):
        row[: len(values)] = values
    return out


def make_batch(
    layouts: list[Layout], fed_back: bool, gamma: float, mask_id: int, device: torch.device, multiple: int = 1
) -> ReasoningBatch:
    """A batch with the terms of the loss: next tokens of trace and answer, and gamma times the anchors at the slots."""
    sequences = pad_sequences([l.tokens for l in layouts], [l.slots for l in layouts], fed_back, device, multiple)
    terms = {}
    for name, lists, scale in (
        ("nll", [l.targets for l in layouts], 1.0),
        ("anchor", [l.anchors for l in layouts], gamma),
    ):
        labels_N = padded(lists, IGNORE, multiple).reshape(-1)
        (at_N,) = np.nonzero(labels_N != IGNORE)
        if len(at_N):
            position_N, target_N = (put(torch.from_numpy(x), device) for x in (at_N, labels_N[at_N]))
            weight_N = torch.ones(len(at_N), device=device)
            terms[name] = Term("denoiser", position_N, target_N, weight_N, scale, exclude=mask_id)
    scored = CorruptedBatch(sequences.tokens_BL, None, len(terms["nll"].positions_N), terms)
    return ReasoningBatch(sequences, scored, sum(len(l.tokens) for l in layouts))


def batch_on(batch: ReasoningBatch, device: torch.device) -> ReasoningBatch:
    """The batch with all tensors moved from the host to the device."""
    scored, sequences = on_device(batch.scored, device), batch.sequences
    length_B, first_B = (put(x, device) for x in (sequences.length_B, sequences.first_slot_B))
    return batch._replace(
        scored=scored, sequences=PaddedSequences(scored.tokens_BL, length_B, first_B, sequences.n_slots)
    )


def batch_loss(network: Any, batch: ReasoningBatch) -> LossOutput:
    """The loss of a batch, as sums to differentiate and log. Without fed-back thoughts it is the loss of `adlm train`:
    one call of the network, or of its CUDA graphs."""
    if batch.sequences.n_slots == 0:
        return loss(network, batch.scored)
    return sum_terms(network, Hidden(read_sequences(network, batch.sequences), None), batch.scored)


def read_sequences(network: ReasoningNetwork, sequences: PaddedSequences, memory: Any = None) -> Tensor:
    """Final hidden states of every position of every sequence, [B, L, D]; fills the memory, if given."""
    x_BLD = network.embed(sequences.tokens_BL)
    if sequences.n_slots == 0:
        return network.read(x_BLD, memory, sequences.length_B)
    B, L = sequences.tokens_BL.shape
    n, first_B = sequences.n_slots, sequences.first_slot_B
    if memory is None:
        memory = network.remember(B, L, gradients=torch.is_grad_enabled())
    each_B, one_B = torch.arange(B, device=first_B.device), torch.ones_like(first_B)
    before = int(first_B.max())
    parts = [network.read(x_BLD[:, :before], memory, first_B)]
    thought_BD = parts[0][each_B, first_B - 1]
    for _ in range(n):
        parts.append(network.read(thought_BD[:, None].to(x_BLD.dtype), memory, one_B))
        thought_BD = parts[-1][:, 0]
    after_B = sequences.length_B - first_B - n
    position_Bl = first_B[:, None] + n + torch.arange(int(after_B.max()), device=first_B.device)
    rest_BlD = x_BLD[each_B[:, None], position_Bl.clamp(max=L - 1)]
    parts.append(network.read(rest_BlD, memory, after_B))
    # back to the order of positions: the three parts of a sequence are at 0, at `before` and at `before + n`
    at_L = torch.arange(L, device=first_B.device)
    index_BL = torch.where(at_L < first_B[:, None], at_L, at_L - first_B[:, None] + before)
    read_BKD = torch.cat(parts, dim=1)
    return read_BKD[each_B[:, None], index_BL.clamp(max=read_BKD.shape[1] - 1)]

"""The networks that are taught to reason: our own causal stack, or a causal Hugging Face model, behind one protocol.

A network turns embeddings into final hidden states and owns its head. What it has read is kept in a `Memory`, and rows
of different lengths are read together: each call hands over a chunk that is padded on the right, with the number of
real positions of every row. Padding is never seen by a real position, in either network.

A memory may be differentiable: continuous thoughts are trained through it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adlm.data.tokenizers import Backend, Tokenizer
from adlm.errors import require
from adlm.io.paths import path_of
from adlm.models import Cache
from adlm.models import Network as LanguageModel
from adlm.models.backends import allow_variants
from adlm.models.transformer import LayerCache


class Memory(Protocol):
    seen_B: Tensor
    """Real positions read so far in each row."""


class Network(Protocol):
    """Also an nn.Module."""

    longest: int
    """Most positions of a row."""

    @property
    def head(self) -> Any:
        """With .weight [V, D] and .bias [V] or None."""
        ...

    @property
    def anchor_head(self) -> None: ...

    def embed(self, tokens_BL: Tensor) -> Tensor: ...

    def remember(self, batch: int, length: int, gradients: bool) -> Any:
        """An empty memory for rows of up to `length` positions."""
        ...

    def read(self, x_BLD: Tensor, memory: Any = None, real_B: Tensor | None = None) -> Tensor:
        """Hidden states of a chunk; with a memory it follows what was read before, and real_B of it are kept."""
        ...


class KeptLayerCache(LayerCache):
    """Keys and values that remember how they were computed: each extension is a new tensor, so gradients flow."""

    def extend(self, k_BNlH: Tensor, v_BNlH: Tensor, positions_Bl: Tensor) -> tuple[Tensor, Tensor]:
        index = positions_Bl[:, None, :, None].expand_as(k_BNlH)
        self.k_BNLH = self.k_BNLH.scatter(2, index, k_BNlH.to(self.k_BNLH.dtype))
        self.v_BNLH = self.v_BNLH.scatter(2, index, v_BNlH.to(self.v_BNLH.dtype))
        return self.k_BNLH, self.v_BNLH


class OwnNetwork(nn.Module):
    """A causal LanguageModel. One position of its length is kept free: padding of a chunk is written there."""

    anchor_head = None

    def __init__(self, model: LanguageModel):
        super().__init__()
        require(model.config.causal and not model.config.anchored, "reasoning needs a plain causal model (algo=ar)")
        self.model = model
        self.longest = model.config.length - 1

    @property
    def head(self) -> nn.Linear:
        return self.model.head

    def compile_blocks(self) -> None:
        """One block, compiled for every length that occurs (few: see GPU_ROW_MULTIPLE), serves all blocks; compiled for
        any length, the norm of its queries ends in an error of the compiler. Only reads without a memory use it: those
        with one come in too many shapes."""
        allow_variants()
        for block in self.model.denoiser.blocks:
            block.compile(dynamic=False)

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
        # padding that would fall outside is written to the spare last position, which no real position attends to
        spare = memory.denoiser[0].k_BNLH.shape[2] - 1
        positions_BL = (memory.seen_B[:, None] + torch.arange(x_BLD.shape[1], device=x_BLD.device)).clamp(max=spare)
        with torch.compiler.set_stance("force_eager"):
            hidden = self.model.read(x_BLD, cache=memory, positions_BL=positions_BL)
        memory.seen_B = memory.seen_B + real_B
        return hidden.denoiser_BLD


@dataclass
class HuggingFaceMemory:
    cache: Any
    """transformers' growing cache: chunks with their padding, one after another."""
    real_BK: Tensor
    """Which of its entries are real."""
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

    def compile_blocks(self) -> None:
        """As in our own network; the blocks of a model are the first list among its modules."""
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


def load_hugging_face(base: str, prepare: Callable[[Tokenizer], Tokenizer]) -> tuple[HuggingFaceNetwork, Tokenizer]:
    """A causal model by hub name, folder or GGUF file, and its tokenizer after `prepare`; new tokens get mean
    embeddings. The quantised weights of a GGUF file are read as float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError(f"reason.base={base!r} needs transformers: pip install 'adlm[eval]'") from None
    path = path_of(base)
    is_gguf = path.suffix == ".gguf"
    require(path.is_file() or not is_gguf, f"reason.base={base!r} is not a file")
    name = str(path.parent) if is_gguf else str(path) if path.is_dir() else base
    options = {"gguf_file": path.name} if is_gguf else {}
    try:
        backend = AutoTokenizer.from_pretrained(name, **options).backend_tokenizer  # type: ignore[union-attr]
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"reason.base={base!r} is no causal model that can be loaded: {lines[0]}") from None
    if is_gguf:
        model = without_quantisation(model)
    tokenizer = prepare(Tokenizer(Backend.from_str(backend.to_str()), base))
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
    """The same weights in a model that knows nothing of the file they came from, to be trained and saved as any."""
    from transformers import AutoModelForCausalLM

    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    return plain.float()


@torch.no_grad()
def check_head(network: HuggingFaceNetwork, base: str) -> None:
    """Some architectures scale or cap logits after the head, which the loss here would not know of."""
    was_training = network.training
    network.eval()
    tokens_BL = torch.arange(8, device=network.head.weight.device)[None]
    ours, theirs = network.head(network.read(network.embed(tokens_BL))), network.model(tokens_BL).logits
    network.train(was_training)
    require(
        torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3),
        f"reason.base={base!r} does more to its logits than a linear head; such architectures are not supported",
    )

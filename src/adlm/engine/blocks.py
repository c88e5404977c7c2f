"""Generation in blocks: K positions at a time, left to right, each block given everything before it as clean text.

A position attends to everything up to the end of its own block, whether that block is clean or still has masks. So the
keys and values of finished blocks never change, and the cache is exact. A position's keys and values are stored at that
position in the cache. Those of the current block are rewritten at every reading, and nothing else uses them.

A reading takes n positions of every slot, from the first one that is not cached: the last finished block, if it has not
been read as clean text yet, the current block, or both. So slots at different blocks share a network call, and a
finished block needs no call of its own as long as two blocks cost as much as one. A causal model is the case K = 1,
where only clean text is read. Positions that a slot does not need are written after its clean text, and are written
again before they are read.

If outputs are shifted to the right, the prediction for a position is read one position before it. For the first
position of a block that is the last one of the clean text, which is read only once, so its hidden state is kept: the
slot's edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.engine.prepare import Graphs, at_least, autocast
from adlm.engine.request import Request
from adlm.errors import require
from adlm.models import Cache, Network
from adlm.models.transformer import LayerCache, cached_mask

# Rows of BlockReading.rows
FIRST, BLOCK, EDGE = range(3)
FUSED = 512
"""Up to this many positions in a network call, a second block of each slot costs next to nothing."""
KEYS = (256, 512, 1024, 2048, 4096, 8192, 16384)  # static shapes: positions that are attended to
CHUNK = 64
"""On a GPU prompts are read in multiples of this many tokens, so that there are few shapes to compile for."""


def shift_of(model: Network) -> int:
    """Number of positions before a token at which its prediction is read."""
    return int(model.config.causal or model.config.shift)


def own_block(model: Network) -> int:
    """Default length of the blocks that a model writes; 0: it reads canvases as a whole."""
    c = model.config
    own = 1 if c.causal else c.block_lengths[0] if c.block_lengths else c.length
    return 0 if own == c.length else own


def block_of(request: Request, model: Network) -> int:
    """Length of the blocks in which a request is filled; 0: its canvas is read as a whole. Requests that the model
    cannot fill are refused.

    If no length is asked for, a model that can do both reads the canvas as a whole when the request needs it.
    """
    c, asked, tokens = model.config, request.settings.block_length, request.tokens
    lengths = (1,) if c.causal else c.block_lengths
    known = ", ".join(map(str, sorted(set(lengths)))) or f"{c.length}, the whole sequence (model.block_length is empty)"
    require(
        asked in (0, *lengths, *(() if lengths else (c.length,))),
        f"sampling.block_length={asked}: the model was trained for blocks of {known}",
    )
    first = tokens.index(model.mask_id)
    block = asked % c.length if asked else own_block(model)
    why = needs_whole(request, first, block, model) if block else ""
    if not block or (why and not asked and c.length in lengths):
        return 0
    kind = "a causal model" if c.causal else f"a model that writes blocks of {block}"
    whole = f" or sampling.block_length={c.length}" if c.length in lengths else ""
    require(not why, f"{why}: {kind} continues text; take a diffusion model that reads the whole canvas{whole}")
    require(
        first > 0 or not shift_of(model),
        f"{kind} needs a first token to start from, and position 0 is a hole: nothing predicts it",
    )
    return block


def needs_whole(request: Request, first: int, block: int, model: Network) -> str:
    """Why a request needs the whole canvas; empty if blocks suffice. `first`: its first hole."""
    after = request.tokens[(first // block + 1) * block :]
    if any(t != model.mask_id for t in after):
        return "text stands after the holes, and all holes must stand at the end"
    if request.required:
        return "required words need a diffusion model that can plan ahead"
    return "sampling.stride moves a window" if len(request.tokens) > model.config.length else ""


class BlockReading(NamedTuple):
    """What a network call reads: n positions of each of the first B slots, with a cache of `keys` positions."""

    n: int
    keys: int
    rows: NDArray[np.int64]
    """[3, B]: first position; block length; which state is kept as the edge (0: the present edge, l: that of position
    first + l - 1)."""

    def places(self, slot_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into the flattened states [B, 1 + n] of positions of slots."""
        return slot_N * (self.n + 1) + 1 + position_N - self.rows[FIRST][slot_N]


@dataclass
class Held:
    """What the cache of a slot holds."""

    block: int = 1
    filled: int = 0
    """Number of positions whose keys and values are those of clean text."""
    tokens: Sequence[int] = field(default_factory=list)
    """The part of that text that the host knows."""

    def common(self, block: int, tokens: Sequence[int]) -> int:
        """Number of positions from the start, in whole blocks, that `tokens` would fill in the same way."""
        if block != self.block:
            return 0
        size = min(self.filled, len(self.tokens), len(tokens))
        same = next((l for l in range(size) if self.tokens[l] != tokens[l]), size)
        return same - same % block


class Kept(NamedTuple):
    """The device state of a paused sequence."""

    held: Held
    layers: list[Tensor]
    edges: list[Tensor]


class BlockReader:
    """The cache of all slots, and the network that reads with it."""

    def __init__(self, network: Network, canvas_SL: Tensor, graphs: Graphs, device: torch.device, bf16: bool):
        """`canvas_SL`: the tokens of all slots, by position. `device`: the network's."""
        self.network, self.canvas_SL, self.graphs, self.device, self.bf16 = network, canvas_SL, graphs, device, bf16
        self.shift, self.length = shift_of(network), network.config.length
        slots, dtype = canvas_SL.shape[0], torch.bfloat16 if bf16 else None
        self.held = [Held() for _ in range(slots)]
        self.cache = network.make_cache(slots, self.length, dtype)
        width, stream = network.embedding.shape[1], network.residual_dtype or network.embedding.dtype
        stacks = 1 if network.anchor is None else 2
        self.edges = [torch.zeros(slots, 1, width, dtype=stream, device=device) for _ in range(stacks)]
        """The edges of all slots, in the denoiser and the anchor network."""
        self.offset_L = torch.arange(self.length, device=canvas_SL.device)
        self.read = graphs.capture(self.look_in_blocks)

    # Host side: what to read

    def reach(self, i: int, start: int) -> int:
        """The position up to which slot i must be read before a draw in the block that begins at `start`."""
        block = self.held[i].block
        return start if self.shift and block == 1 else min(start + block, self.length)

    def plan(self, starts: dict[int, int], sizes: tuple[int, ...]) -> tuple[BlockReading, list[int]]:
        """The next reading for slots whose blocks begin at `starts`, and the slots that can draw after it. The others
        only read a finished block. `sizes`: static numbers of slots."""
        B, held = max(starts) + 1, self.held
        B = at_least(B, sizes) if self.graphs.on else B
        n = max(1, *(self.reach(i, start) - held[i].filled for i, start in starts.items()))
        if B * n > FUSED:
            n = max(held[i].block for i in starts)
        rows = np.zeros((3, B), dtype=np.int64)
        rows[BLOCK] = [h.block for h in held[:B]]
        # Slots that take no part read the start of their text again.
        for i, start in starts.items():
            rows[FIRST, i] = min(held[i].filled, self.length - n)
            rows[EDGE, i] = start - rows[FIRST, i]
        drawing = [i for i, start in starts.items() if held[i].filled + n >= self.reach(i, start)]
        for i, start in starts.items():
            held[i].filled = start
        return BlockReading(n, self.keys(int(rows[FIRST].max()) + n), rows), drawing

    def sizes(self, block: int, slots: int) -> tuple[int, ...]:
        """Possible numbers of positions of each slot in one reading, for blocks of that length."""
        if self.shift and block == 1:
            return (1,)
        return (block,) if 2 * block * slots > FUSED or 2 * block > self.length else (2 * block, block)

    def keys(self, n: int) -> int:
        return min(self.length, at_least(n, KEYS)) if self.graphs.on else n

    # Device side

    def look_in_blocks(
        self, mask: Tensor, rows: Tensor, slot: int, n: int, keys: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Mask what was masked again, and read. Returns the states [B, 1 + n, D] of denoiser and anchor network, the
        edge first, and the tokens of the slots. The rows are slots from `slot` on."""
        self.canvas_SL.index_put_((mask[0], mask[1]), torch.full_like(mask[0], self.network.mask_id))
        B = rows.shape[1]
        canvas_BL = self.canvas_SL[slot : slot + B]
        tokens_Bn = canvas_BL.gather(1, rows[FIRST].unsqueeze(-1) + self.offset_L[:n]).to(self.device)
        cache = view(self.cache, slice(slot, slot + B), keys)
        cache.seen_B = rows[FIRST].to(self.device)
        mask_B1nk = self.mask(rows.to(self.device), n, keys)
        with autocast(self.device, self.bf16):
            hidden = self.network(tokens_Bn, cache=cache, mask=mask_B1nk)
        edge_B = rows[EDGE].to(self.device).view(B, 1, 1)
        states = []
        for edge_S1D, h_BnD in zip(self.edges, hidden):
            edge_B1D = edge_S1D[slot : slot + B]
            states.append(torch.cat([edge_B1D, h_BnD.to(edge_B1D.dtype)], dim=1))
            edge_B1D.copy_(states[-1].gather(1, edge_B.expand(-1, 1, edge_B1D.shape[-1])))
        home = self.canvas_SL.device
        return states[0].to(home), states[1].to(home) if len(states) == 2 else None, canvas_BL[:, :keys].clone()

    def mask(self, rows: Tensor, n: int, keys: int) -> Tensor:
        """What the n positions of each slot see, as the numbers that attention adds, made once for all layers. They are
        repeated for heads that share keys if `attend` treats those as queries of one head."""
        position_Bn = rows[FIRST].unsqueeze(-1) + torch.arange(n, device=self.device)
        seen_B1nk = cached_mask(position_Bn, rows[BLOCK], keys)
        added = torch.zeros(seen_B1nk.shape, dtype=self.cache.denoiser[0].k_BNLH.dtype, device=self.device)
        added.masked_fill_(~seen_B1nk, -torch.inf)
        groups = self.network.config.n_heads // self.network.config.kv_heads
        return added.repeat(1, 1, groups, 1) if groups * n <= keys else added

    @torch.inference_mode()
    def admit(self, i: int, block: int, tokens: Sequence[int]) -> None:
        """Fill the cache of slot i with `tokens`, the whole blocks on its canvas, except the last one, which is read
        together with the first block to be drawn. A prefix that some slot already holds is copied."""
        wanted = max(0, len(tokens) - block)
        common = [h.common(block, tokens[:wanted]) for h in self.held]
        source = int(np.argmax(common))
        shared = common[source]
        if common[i] < shared:
            for layer in tensors_of(self.cache):
                layer[i, :, :shared] = layer[source, :, :shared]
        self.held[i] = Held(block, wanted, list(tokens))
        if shared < wanted:
            n = wanted - shared
            n = min(-(-n // CHUNK) * CHUNK, self.length - shared) if self.graphs.on else n
            rows = torch.tensor([[shared], [block], [0]], device=self.canvas_SL.device)
            self.look_in_blocks(rows[:2, :0], rows, i, n, self.keys(shared + n))

    def forget(self, i: int) -> None:
        """Forget the cache of slot i, whose canvas now holds another text."""
        self.held[i] = Held()

    def keep(self, i: int) -> Kept:
        held = self.held[i]
        layers = [layer[i, :, : held.filled].clone() for layer in tensors_of(self.cache)]
        return Kept(Held(held.block, held.filled, held.tokens), layers, [edge[i].clone() for edge in self.edges])

    def bring_back(self, i: int, kept: Kept) -> None:
        self.held[i] = kept.held
        for layer, copy in zip(tensors_of(self.cache), kept.layers):
            layer[i, :, : copy.shape[1]] = copy
        for edge, copy in zip(self.edges, kept.edges):
            edge[i] = copy


def view(cache: Cache, slots: slice, keys: int) -> Cache:
    """A view of some slots, in shared memory, of which the first `keys` positions are read."""

    def part(layers: list[LayerCache]) -> list[LayerCache]:
        return [LayerCache(c.k_BNLH[slots], c.v_BNLH[slots], keys) for c in layers]

    anchor = None if cache.anchor is None else part(cache.anchor)
    return Cache(part(cache.denoiser), anchor, cache.seen_B[slots])


def tensors_of(cache: Cache) -> list[Tensor]:
    """Keys and values of all layers, [B, N, L, H] each."""
    return [kv for layer in cache.layers for kv in (layer.k_BNLH, layer.v_BNLH)]

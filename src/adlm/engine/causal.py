"""The engine of causal models (AR, A2R): left to right with a key-value cache, at different positions in one call.

Same requests, same random numbers per (seed, step, position), same joining, leaving, streaming and cancelling as the
other engine. The fixed tokens must all stand before the holes - a causal model cannot see what comes after - and
position 0 must be given (usually the begin-of-text token), since nothing predicts it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from adlm.engine.drawing import SLOT, Drawer, Draws, DrawSettings, pieces
from adlm.engine.engine import ActiveSequence, BaseEngine
from adlm.engine.graphs import Graphs
from adlm.engine.prepare import autocast, prepare
from adlm.engine.request import Frame, Request
from adlm.errors import require
from adlm.io.paths import float64_device
from adlm.models import Cache, Network
from adlm.models.transformer import LayerCache


@dataclass(eq=False)
class Continuation(ActiveSequence):
    """A sequence being continued: `written` grows from the prompt to `length`."""

    written: list[int] = field(default_factory=list)
    length: int = 0


def slot_view(cache: Cache, i: int) -> Cache:
    """The cache of one slot, sharing memory: filled by reading a prompt alone while other sequences wait."""

    def view(layers: list[LayerCache]) -> list[LayerCache]:
        return [LayerCache(c.k_BNLH[i : i + 1], c.v_BNLH[i : i + 1]) for c in layers]

    anchor = None if cache.anchor is None else view(cache.anchor)
    return Cache(view(cache.denoiser), anchor, torch.zeros_like(cache.seen_B[i : i + 1]))


def layers_of(cache: Cache) -> list[Tensor]:
    """Keys and values of all layers, [B, N, L, H] each."""
    return [kv for layer in [*cache.denoiser, *(cache.anchor or [])] for kv in (layer.k_BNLH, layer.v_BNLH)]


class CausalEngine(BaseEngine[Continuation]):
    def __init__(self, model: Network, slots: int = 16, device: str | torch.device = "cpu", precision: str = "auto"):
        require(model.config.causal, "CausalEngine needs a causal model (model.causal=true)")
        super().__init__(model, slots)
        self.network_device = torch.device(device)
        self.device = float64_device(self.network_device)  # of draws
        self.network, self.bf16 = prepare(model, self.network_device, precision)
        dtype = torch.bfloat16 if self.bf16 else None
        self.cache = self.network.make_cache(slots, model.config.length, dtype)
        plain = Graphs(on=False)
        self.drawer = Drawer(self.head, slots, model.vocab_size, model.mask_id, plain, self.device)

    def head(self, hidden_ND: Tensor) -> Tensor:
        with autocast(self.network_device, self.bf16):
            return self.network.head(hidden_ND.to(self.network_device)).to(self.device)

    def check(self, request: Request) -> None:
        super().check(request)
        holes = [l for l, t in enumerate(request.tokens) if t == self.model.mask_id]
        require(not holes or holes[0] > 0, "a causal model needs a first token to start from, and position 0 is a hole")
        require(
            not holes or holes == list(range(holes[0], len(request.tokens))),
            "a causal model continues text: all holes must stand at the end (a template needs a diffusion model)",
        )
        require(not request.required, "required words need a diffusion model: a causal one cannot plan ahead")
        require(request.settings.guidance == 0, "sampling.guidance needs a diffusion model")
        require(len(request.tokens) <= self.model.config.length, "sampling.stride needs a diffusion model")

    def admit(self, i: int, id: int, request: Request) -> None:
        prompt = [t for t in request.tokens if t != self.model.mask_id]
        self.drawer.ban(i, [w[0] for w in request.banned if len(w) == 1])
        self.slots[i] = Continuation(id, request, written=prompt, length=len(request.tokens))
        if len(prompt) > 1:  # the last token is read together with the last tokens of the others
            with torch.inference_mode(), autocast(self.network_device, self.bf16):
                tokens = torch.tensor([prompt[:-1]], device=self.network_device)
                self.network(tokens, cache=slot_view(self.cache, i))

    def keep(self, i: int) -> list[Tensor]:
        seen = len(self.active(i).written)
        return [kv_1NLH[:, :, :seen].clone() for kv_1NLH in layers_of(slot_view(self.cache, i))]

    def bring_back(self, i: int, kept: list[Tensor]) -> None:
        self.drawer.ban(i, [w[0] for w in self.active(i).request.banned if len(w) == 1])
        for kv_1NLH, copy in zip(layers_of(slot_view(self.cache, i)), kept):
            kv_1NLH[:, :, : copy.shape[2]] = copy

    def tokens(self, i: int) -> list[int]:
        text = self.active(i)
        return [*text.written, *[self.model.mask_id] * (text.length - len(text.written))]

    @torch.inference_mode()
    def evaluate(self, chosen: list[int]) -> None:
        """Read the last token of every sequence, draw the next of the chosen ones."""
        group, texts = chosen, [self.active(i) for i in chosen]
        if not texts:
            return
        last, seen = np.zeros((2, len(self.slots)), dtype=np.int64)
        for i, text in enumerate(self.slots):
            # Idle slots read token 0 at position 0: what they write there is overwritten when a sequence moves in.
            # Those that stand still read their last token, and will again.
            if text is not None:
                last[i], seen[i] = text.written[-1], len(text.written) - 1
        self.cache.seen_B.copy_(torch.from_numpy(seen))
        drawn = self.draw(torch.from_numpy(last).to(self.network_device), group, texts).tolist()
        for i, text, token in zip(group, texts, drawn):
            text.nfe += 1
            text.written.append(token)
            if len(text.written) == text.length or token == text.request.stop_id:
                self.finish(i, text.written)
            elif text.request.watch:
                at = len(text.written) - 1
                self.updates.append(Frame(text.id, self.tokens(i), at, text.nfe, [at]))

    def draw(self, last_S: Tensor, group: list[int], texts: list[Continuation]) -> Tensor:
        settings = []
        for slot, text in zip(group, texts):
            s = text.request.settings
            filters = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
            settings.append(DrawSettings(slot, text.request.seed, 0, s.parity == "release", **filters))
        draws = Draws.of(settings, [np.array([len(t.written)]) for t in texts])
        phrases, sizes = self.phrase_bans(group, texts), self.drawer.sizes(len(texts))
        ints, floats = torch.from_numpy(draws.ints).to(self.device), torch.from_numpy(draws.floats).to(self.device)
        with autocast(self.network_device, self.bf16):
            hidden_SD = self.network(last_S[:, None], cache=self.cache).denoiser_BLD[:, 0].to(self.device)
        for slot, token in phrases:
            self.drawer.banned_SV[slot, token] = True
        h_ND = hidden_SD[ints[SLOT]]
        tokens = [self.drawer(h_ND[a], ints[:, a], floats[:, a], draws.filters).token for a in pieces(sizes)]
        for slot, token in phrases:
            self.drawer.banned_SV[slot, token] = False
        return torch.cat(tokens)

    def phrase_bans(self, group: list[int], texts: list[Continuation]) -> list[tuple[int, int]]:
        """(slot, token) that would complete a banned phrase now."""
        found = []
        for i, text in zip(group, texts):
            single = {w[0] for w in text.request.banned if len(w) == 1}
            for word in text.request.banned:
                head = list(word[:-1])
                if head and word[-1] not in single and text.written[-len(head) :] == head:
                    found.append((i, word[-1]))
        return found

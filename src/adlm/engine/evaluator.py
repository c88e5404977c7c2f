"""The device side of the engine: canvases of all slots, and one evaluation of a group of them.

`Evaluator.evaluate` masks what was masked again, reads the canvases, runs the network once, draws at the chosen
positions only and writes the tokens back. If these positions are few, the network's last block is computed at them
only, too. Nothing is copied to the host unless it is asked for.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.constrain.matching import Match
from adlm.diffusion.process import Schedule, noise_level
from adlm.engine.blocks import BlockReader, BlockReading, own_block
from adlm.engine.drawing import (
    ANY,
    PIECES,
    POSITION,
    SLOT,
    Drawer,
    Drawn,
    Draws,
    Filters,
    Head,
    pieces,
    widen,
)
from adlm.engine.prepare import (
    MASK_SIZES,
    SEQUENCE_SIZES,
    Fixed,
    Graphs,
    Uploads,
    at_least,
    autocast,
    compile_blocks,
    prepare,
)
from adlm.errors import choose
from adlm.io.paths import float64_device
from adlm.models import Network
from adlm.models.layers import choose_attention
from adlm.samplers.base import Prediction
from adlm.schema import ObjectiveConfig

FEW = (16, 64)
"""Static numbers of draws per sequence; up to the last one, the last block is computed at the draws only."""


class Canvases(NamedTuple):
    """What a network call reads if canvases are read as a whole. They have one length."""

    length: int
    slots: NDArray[np.int64]
    """[B]: slot of each sequence of the call."""


class Call(NamedTuple):
    """One network call, described on the host."""

    read: Canvases | BlockReading
    """What it reads: canvases as a whole, or current blocks."""
    t: NDArray[np.float64]
    """[B]: fraction of masks that each sequence is conditioned on."""
    mask: NDArray[np.int64]
    """[2, M]: slot and position to mask first."""
    source: NDArray[np.int64]
    """[N]: sequence of the call that each draw reads."""
    draws: Draws
    matches: tuple[Match, ...] = ()
    """For constrained texts: what each sequence of the call may become. Its draws are then all its masked positions,
    and only those that the match names are written."""


Observer = Callable[["Call", Tensor, Tensor], None]
"""Called with a call, the tokens it read [B, L] and the anchor network's states there [B, L, D]."""


class Evaluator:
    def __init__(
        self,
        model: Network,
        schedule: Schedule,
        slots: int,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        compile: str = "auto",
        tau: int = ObjectiveConfig.tau,
    ):
        """`tau`: largest number of occurrences of a rare token, for samplers that read anchors."""
        choose("compile", compile, ("auto", "true", "graphs", "false"))
        self.network_device = torch.device(device)
        self.device = float64_device(self.network_device)  # of canvases and draws
        cuda = self.device.type == "cuda"
        self.model, self.bf16 = prepare(model, self.network_device, precision)
        self.length, self.mask_id = model.config.length, model.mask_id
        self.time_conditioned = model.config.is_time_conditioned
        self.schedule, self.tau = schedule, tau
        # At least one spare slot, which padding reads and writes.
        rows = max(slots + 1, at_least(slots, SEQUENCE_SIZES))
        self.canvas_SL = torch.full((rows, self.length), self.mask_id, device=self.device)
        self.mask_token = torch.tensor(self.mask_id, device=self.device)  # assigning a number would copy from the host
        self.spare = slots
        self.observer: Observer | None = None
        self.upload = Uploads(self.device)
        if cuda and self.bf16:
            choose_attention(slots, model.config, self.device, backward=False)
        compiled = compile == "true" or (compile == "auto" and cuda)
        self.graphs = Graphs(on=cuda and compile != "false")
        if compiled and self.graphs.on:
            compile_blocks(self.model)
        self.head: Head = functools.partial(self.logits, self.model.head)
        self.drawer = Drawer(self.head, slots, model.vocab_size, self.mask_id, self.graphs, self.device)
        self.read_canvases = self.graphs.capture(self.look)
        self.write_draws = self.graphs.capture(self.draw)

    @functools.cached_property
    def blocks(self) -> BlockReader:
        """The reader of blocks, with its cache; created when the first sequence needs it."""
        with torch.inference_mode(False):  # its tensors are changed outside inference mode, too
            return BlockReader(self.model, self.canvas_SL, self.graphs, self.network_device, self.bf16)

    def hidden(self, tokens_BL: Tensor, sigma_B: Tensor, at_BQ: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        at_BQ = None if at_BQ is None else at_BQ.to(self.network_device)
        with autocast(self.network_device, self.bf16):
            told_B = sigma_B.float().to(self.network_device) if self.time_conditioned else None
            h = self.model(tokens_BL.to(self.network_device), told_B, at_BQ=at_BQ)
        return h.denoiser_BLD.to(self.device), None if h.anchor_BLD is None else h.anchor_BLD.to(self.device)

    def logits(self, head: Head, hidden_ND: Tensor) -> Tensor:
        """Logits of a head, in bf16 if the network is; what follows them is not."""
        with autocast(self.network_device, self.bf16):
            return head(hidden_ND.to(self.network_device)).to(self.device)

    # The two halves of an evaluation, each one graph launch. Both may be repeated: neither reads state that it changes.

    def look(
        self, mask: Tensor, slot_B: Tensor, sigma_B: Tensor, at_BQ: Tensor | None, L: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Mask what was masked again, and run the network: hidden states for both heads, and the tokens it read.

        `at_BQ`: positions of each sequence at which the denoiser's states are needed; None: all.
        """
        self.canvas_SL.index_put_((mask[0], mask[1]), self.mask_token)
        tokens_BL = self.canvas_SL[slot_B, :L]
        return *self.hidden(tokens_BL, sigma_B, at_BQ), tokens_BL

    def draw(
        self,
        denoiser_BLD: Tensor,
        place_N: Tensor,
        ints: Tensor,
        floats: Tensor,
        filters: Filters,
        reads: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Draw one piece and write it to the canvases; returns what the samplers read of each draw. `place_N`: indices
        of its states among the flattened ones."""
        drawn = self.drawer.draw(denoiser_BLD.flatten(0, 1)[place_N], ints, floats, filters)
        return self.write(drawn, ints, reads)

    def write(self, drawn: Drawn, ints: Tensor, reads: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Write drawn tokens to the canvases; returns what the samplers read of each draw."""
        self.canvas_SL[ints[SLOT], ints[POSITION]] = drawn.token
        log_p = self.drawer.prediction(drawn, ints) if UNFILTERED & set(reads) else drawn.log_p
        return tuple(LOOKS[name](log_p if name in UNFILTERED else drawn.log_p, drawn.token) for name in reads)

    @torch.inference_mode()
    def warm_up(self, length: int = 0, least: int = 1) -> None:
        """Compile and capture the shapes for `least` or more sequences of this length, if few tokens are masked again.
        For a model that writes in blocks: those of its own block length and short texts."""
        if not self.graphs.on:
            return

        def numbers(*values: int, columns: int) -> Tensor:
            return torch.tensor(values, device=self.device)[:, None].expand(-1, columns)

        def draw_from(states: Tensor) -> None:
            for size in PIECES:
                ints, floats = numbers(self.spare, 0, 0, 0, 0, 0, columns=size), numbers(1, 1, 0, columns=size)
                self.write_draws(Fixed(states), numbers(0, columns=size)[0], ints, floats.double(), ANY, ())

        block = own_block(self.model)
        # Largest first: it is compiled for its own size, and the others share one compilation for any size.
        sizes = [
            s for s in SEQUENCE_SIZES if at_least(least, SEQUENCE_SIZES) <= s <= at_least(self.spare, SEQUENCE_SIZES)
        ]
        for B in reversed(sizes):
            mask = numbers(self.spare, 0, columns=MASK_SIZES[0])
            for n in self.blocks.sizes(block, B) if block else ():
                rows, keys = numbers(0, block, 0, columns=B), self.blocks.keys(n)
                draw_from(self.blocks.read(mask, rows, 0, n, keys)[0])
            sigma_B, slot_B = torch.zeros(B, device=self.device).double(), numbers(self.spare, columns=B)[0]
            for most in () if block else FEW:
                at_BQ = numbers(*[0] * B, columns=most)
                draw_from(self.read_canvases(mask, slot_B, sigma_B, at_BQ, length or self.length)[0])

    def sigma(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        """The noise level at fractions t of masks, for a time-conditioned network; others ignore the numbers."""
        return noise_level(t, self.schedule) if self.time_conditioned else t

    def load(self, slot: int, tokens: Sequence[int], banned: list[int], at: int = 0) -> None:
        """Put tokens on the canvas of a slot, from position `at` on, and ban tokens in that slot."""
        tokens_L, here = torch.tensor(tokens, device=self.device), slice(at, at + len(tokens))
        self.canvas_SL[slot, here] = tokens_L
        self.drawer.ban(slot, banned)

    def read(self, slots: Sequence[int], first: Sequence[int], length: int) -> NDArray[np.int64]:
        """Copy parts of canvases to the host; this waits for everything queued before."""
        if max(first) == 0:
            return self.canvas_SL[slots, :length].cpu().numpy()
        at = np.array(first)[:, None] + np.arange(length)
        slots_N, at_NL = (torch.from_numpy(a).to(self.device) for a in (np.array(slots)[:, None], at))
        return self.canvas_SL[slots_N, at_NL].cpu().numpy()

    def places(self, call: Call, sequences: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """Where the states of the draws come from: the positions to compute in each of the `sequences` [B, Q] (None:
        all), and for each draw the index of its state among these [N]."""
        position_N = call.draws.ints[POSITION]
        if isinstance(call.read, BlockReading):
            return None, call.read.places(call.source, position_N - self.blocks.shift)
        length, sequence_N = call.read.length, call.source  # sequences in ascending order
        column_N = np.arange(len(sequence_N)) - np.searchsorted(sequence_N, sequence_N)
        most = int(column_N.max(initial=0)) + 1
        if most > min(FEW[-1], length):
            return None, sequence_N * length + position_N
        wanted = at_least(most, FEW) if self.graphs.on else most
        at_BQ = np.zeros((sequences, wanted), dtype=np.int64)
        at_BQ[sequence_N, column_N] = position_N
        return at_BQ, sequence_N * wanted + column_N

    @torch.inference_mode()
    def evaluate(self, call: Call, reads: frozenset[str] = frozenset()) -> Prediction:
        """Run one call; returns the requested fields of Prediction, for all draws in order."""
        B, N, M = len(call.t), len(call.source), call.mask.shape[1]
        sizes = self.drawer.sizes(N) if not call.matches else [N]
        more, more_sequences, more_masks = sum(sizes) - N, 0, 0
        if self.graphs.on:
            more_sequences, more_masks = at_least(B, SEQUENCE_SIZES) - B, at_least(M, MASK_SIZES) - M
        draws = call.draws.padded(more, self.spare)
        at_BQ, places_N = self.places(call, B + more_sequences)
        # Padding masks and draws in the spare slot.
        arrays = [
            widen(call.mask, more_masks, (self.spare, 0)),
            widen(self.sigma(call.t), more_sequences),
            widen(places_N, more),
            draws.ints,
            draws.floats,
            call.read.rows
            if isinstance(call.read, BlockReading)
            else widen(call.read.slots, more_sequences, self.spare),
        ]
        mask, sigma_B, place_N, ints, floats, rows, *at = self.upload(*arrays, *([] if at_BQ is None else [at_BQ]))
        filters, names = ANY if self.drawer.fused else draws.filters, tuple(sorted(reads & LOOKS.keys()))
        if isinstance(call.read, BlockReading):
            states = self.blocks.read(mask, rows, 0, call.read.n, call.read.keys)
        else:
            states = self.read_canvases(mask, rows, sigma_B, at[0] if at else None, call.read.length)
        denoiser_BLD, anchor_BLD, tokens_BL = states
        if self.observer is not None and anchor_BLD is not None:
            self.observer(call, tokens_BL, anchor_BLD)
        seen: list[tuple[Tensor, ...]] = []
        if call.matches:
            h_ND = denoiser_BLD.flatten(0, 1)[place_N]
            seen = [self.draw_matching(h_ND, ints, floats, call.draws, m, names) for m in columns_of(call.matches)]
        for piece in pieces(sizes if not call.matches else []):
            columns = place_N[piece], ints[:, piece], floats[:, piece]
            values = self.write_draws(Fixed(denoiser_BLD), *columns, filters, names)
            seen.append(tuple(v.clone() for v in values))  # the next piece of that size overwrites them
        found = {name: torch.cat(parts)[:N].double().cpu().numpy() for name, parts in zip(names, zip(*seen))}
        if "normaliser" in reads:
            found["normaliser"] = self.normaliser_look(denoiser_BLD.flatten(0, 1)[place_N[:N]])
        if "anchor" in reads:
            assert anchor_BLD is not None
            whole_N = places_N if at_BQ is None else call.source * anchor_BLD.shape[1] + call.draws.ints[POSITION]
            at_N, sequence_N = (torch.from_numpy(a).to(self.device) for a in (whole_N, call.source))
            found["anchor"] = self.anchor_look(anchor_BLD.flatten(0, 1)[at_N], tokens_BL, sequence_N, ints[:, :N])
        if call.matches:
            drawn_N = np.concatenate([match.drawn for match in call.matches])
            found |= {name: found[name][drawn_N] for name in ("normaliser", "anchor") if name in found}
        return Prediction(**found)

    def draw_matching(
        self, h_ND: Tensor, ints: Tensor, floats: Tensor, draws: Draws, own: tuple[slice, Match], reads: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        """Draw and write the positions of one sequence whose text must match."""
        (here, match), on_host = own, Draws(draws.ints[:, own[0]], draws.floats[:, own[0]])
        drawn = self.drawer.matching(h_ND[here], ints[:, here], floats[:, here], on_host, match)
        return self.write(drawn, ints[:, here][:, torch.from_numpy(match.drawn).to(self.device)], reads)

    def normaliser_look(self, h_ND: Tensor) -> NDArray[np.float64]:
        """For each draw, the mean of e^logit over all tokens but the mask, before any filter."""
        parts = []
        for a in range(0, len(h_ND), self.drawer.most):
            logits = self.head(h_ND[a : a + self.drawer.most]).double()
            logits[:, self.mask_id] = -torch.inf
            parts.append(logits.logsumexp(-1) - math.log(logits.shape[1] - 1))
        return torch.cat(parts).exp().cpu().numpy()

    def anchor_look(self, h_ND: Tensor, tokens_BL: Tensor, sequence_N: Tensor, ints: Tensor) -> NDArray[np.float64]:
        """For each draw, the largest anchor probability of a token that is rare in its sequence.

        Rare: at most tau expected occurrences, counting visible tokens as they are and masked ones by their predicted
        probabilities. This is the paper's anchor rule (count in the sequence <= tau) for a partly known sequence.
        """
        head, most = self.model.anchor_head, self.drawer.most
        assert head is not None

        def probabilities(a: int) -> Tensor:
            logits = self.logits(head, h_ND[a : a + most]).float()
            return logits.masked_fill(self.drawer.banned_SV[ints[SLOT, a : a + most]], -torch.inf).softmax(-1)

        counts_BV = torch.zeros(tokens_BL.shape[0], head.out_features, device=self.device)
        counts_BV.scatter_add_(1, tokens_BL, (tokens_BL != self.mask_id).float())
        for a in range(0, len(h_ND), most):
            counts_BV.index_add_(0, sequence_N[a : a + most], probabilities(a))
        rare_BV = counts_BV <= self.tau
        best = [
            probabilities(a).masked_fill(~rare_BV[sequence_N[a : a + most]], 0.0).amax(-1)
            for a in range(0, len(h_ND), most)
        ]
        return torch.cat(best).double().cpu().numpy()

    @torch.inference_mode()
    def word_log_probs(self, tokens: list[int], words: list[int], t: float) -> NDArray[np.float64]:
        """log p(word token j at position l | tokens), [len(tokens), len(words)]: where a required word could stand."""
        tokens_1L = torch.tensor([tokens], device=self.device)
        sigma = torch.from_numpy(self.sigma(np.array([t]))).to(self.device)
        h_LD = self.hidden(tokens_1L, sigma)[0][0]
        out = []
        for a in range(0, len(tokens), self.drawer.most):
            logits = self.head(h_LD[a : a + self.drawer.most]).float()
            logits[:, self.mask_id] = -torch.inf
            out.append(logits.log_softmax(-1)[:, words])
        return torch.cat(out).double().cpu().numpy()


def columns_of(matches: tuple[Match, ...]) -> Iterator[tuple[slice, Match]]:
    """The columns of each sequence, with what it must match."""
    yield from zip(pieces([len(match.masked) for match in matches]), matches)


LOOKS = {
    "probability": lambda log_p, token: log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1).exp(),
    "confidence": lambda log_p, token: log_p.amax(-1).exp(),
    "entropy": lambda log_p, token: torch.special.entr(log_p.exp()).sum(-1),
}
UNFILTERED = {"confidence", "entropy"}
"""These use the prediction before temperature and filters: a greedy draw makes the choice certain, but the model no
surer of it."""

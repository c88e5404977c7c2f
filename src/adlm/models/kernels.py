"""Triton kernels: the loss of a chunk of logits, and the draw of a token."""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from adlm.diffusion import random
from adlm.diffusion.random import _GOLDEN, _MIX_1, _MIX_2, Stream

# ---- the loss --------------------------------------------------------------------------------------------------------
# Imported on a GPU only: triton comes with torch's CUDA builds.
#
# The loss of a chunk of logits is bound by memory traffic: n x V numbers that a matrix product has just written. The
# compiler's kernels read them three times and write them once. Here one program handles one row: it reads the row once
# from memory and once more from cache, and writes the gradient in its place.

BLOCK, WARPS = 2048, 8  # numbers per load: eight per thread


@triton.jit
def _load(start, at, V, BLOCK: tl.constexpr):
    lane = at + tl.arange(0, BLOCK)
    return tl.load(start + lane, mask=lane < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _cross_entropy_rows(logits, target, weight, loss, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    # Every lane keeps its own running peak and sum of exponentials; they are joined once, at the end. Four numbers at a
    # time need five exponentials, one of them to rescale the sum. Exponentials are the bottleneck of this pass.
    for at in range(0, V, 4 * BLOCK):
        a, b = _load(start, at, V, BLOCK), _load(start, at + BLOCK, V, BLOCK)
        c, d = _load(start, at + 2 * BLOCK, V, BLOCK), _load(start, at + 3 * BLOCK, V, BLOCK)
        higher = tl.maximum(peak, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(a - safe) + tl.exp(b - safe) + tl.exp(c - safe) + tl.exp(d - safe)
        peak = higher
    row_peak = tl.max(peak, 0)
    row_total = tl.sum(total * tl.exp(peak - row_peak), 0)

    gold_at = tl.load(target + row)
    w = tl.load(weight + row)
    gold = tl.load(start + gold_at).to(tl.float32)
    tl.store(loss + row, (tl.log(row_total) + row_peak - gold) * w)
    scale = w / row_total
    for at in range(0, V, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        g = tl.exp(_load(start, at, V, BLOCK) - row_peak) * scale - tl.where(lane == gold_at, w, 0.0)
        tl.store(start + lane, g.to(logits.dtype.element_ty), mask=lane < V)


def cross_entropy_rows(logits_nV: Tensor, target_n: Tensor, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy_chunk` as a kernel: weighted cross-entropies, and their gradient in the memory of the logits."""
    n, V = logits_nV.shape
    assert logits_nV.is_contiguous() and weight_n.dtype == torch.float32
    loss_n = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    if n:
        launch = _cross_entropy_rows[(n,)]  # type: ignore[index]
        launch(logits_nV, target_n, weight_n.contiguous(), loss_n, V, BLOCK, num_warps=WARPS)
    return loss_n, logits_nV


# ---- the draw --------------------------------------------------------------------------------------------------------
# `drawing.draw` as one kernel: one program applies the filters and the Gumbel noise of a position.
#
# Everything between the logits and the token (ban, temperature, top-k, nucleus, min-p, noise) is a few dozen passes
# over a row of V numbers that stay in cache. Launched one by one, they cost more than the network at small batches;
# compiled together, they take the compiler minutes. Here one program handles one row. Settings are data of the row,
# not part of the code, so rows with different settings share one launch.
#
# top-k and the nucleus both keep a *prefix* of the row, by descending logit and, among equals, by ascending id. A
# prefix is (edge, stop): every token above the edge, and those at the edge with an id below `stop`. Bisection over the
# bits of float32 finds the edge without sorting (see `random.leading`, the reference implementation).

DRAW_BLOCK, DRAW_WARPS = 8192, 32  # numbers of a pass that are in flight together
NOISE_BLOCK = 4096  # fewer, because 64-bit hashes and logarithms need the registers
GOLDEN, MIX_1, MIX_2 = tl.constexpr(_GOLDEN), tl.constexpr(_MIX_1), tl.constexpr(_MIX_2)
TOKEN_STREAM = tl.constexpr(int(Stream.TOKEN))
LEAST_TEMPERATURE = tl.constexpr(random.LEAST_TEMPERATURE)
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _absorb(h, counter):
    """`random._absorb`: one step of the counter-based hash, in int64 with logical shifts."""
    x = h - (~counter) * GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _order(z):
    """float32 -> int32 in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _weight(z, peak, COUNT: tl.constexpr):
    return tl.full(z.shape, 1.0, tl.float32) if COUNT else tl.exp(z - peak)


@triton.jit
def _mass(row, V, peak, low, edge, stop, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of e^(logit - peak) over the tokens of the prefix (edge, stop) whose order is at least `low`; with COUNT,
    their number. Each lane adds up a few numbers in float32, and the lanes are added in float64."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, V, BLOCK):
        z = tl.load(row + at + lane, mask=at + lane < V, other=-float("inf"))
        order = _order(z)
        inside = (order >= low) & ((order > edge) | ((order == edge) & (at + lane < stop))) & (at + lane < V)
        total += tl.where(inside, _weight(z, peak, COUNT), 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _masses(row, V, peak, low, more, edge, stop, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`_mass` for low + more, low + 2 more and low + 3 more in one pass: it finds two bits of the edge at a time."""
    lane = tl.arange(0, BLOCK)
    low1, low2, low3 = (low + more).to(tl.int32), (low + 2 * more).to(tl.int32), (low + 3 * more).to(tl.int32)
    total1 = tl.zeros((BLOCK,), tl.float32)
    total2 = tl.zeros((BLOCK,), tl.float32)
    total3 = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, V, BLOCK):
        z = tl.load(row + at + lane, mask=at + lane < V, other=-float("inf"))
        order = _order(z)
        inside = ((order > edge) | ((order == edge) & (at + lane < stop))) & (at + lane < V)
        weight = tl.where(inside, _weight(z, peak, COUNT), 0.0)
        total1 += tl.where(order >= low1, weight, 0.0)
        total2 += tl.where(order >= low2, weight, 0.0)
        total3 += tl.where(order >= low3, weight, 0.0)
    return tl.sum(total1.to(tl.float64), 0), tl.sum(total2.to(tl.float64), 0), tl.sum(total3.to(tl.float64), 0)


@triton.jit
def _shorten(row, V, peak, need, short, edge, stop, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The prefix that `random.leading` finds within the prefix (edge, stop)."""
    found = tl.full((), LOWEST, tl.int64)
    for i in range(16):
        more = tl.full((), 1, tl.int64) << (30 - 2 * i)
        mass1, mass2, mass3 = _masses(row, V, peak, found, more, edge, stop, COUNT, BLOCK)
        found += more * ((mass1 >= need).to(tl.int64) + (mass2 >= need).to(tl.int64) + (mass3 >= need).to(tl.int64))
    new_edge = found.to(tl.int32)
    above = _mass(row, V, peak, new_edge + 1, edge, stop, COUNT, BLOCK)
    each = tl.full((), 1.0, tl.float64)
    if not COUNT:
        bits = tl.where(new_edge >= 0, new_edge, new_edge ^ 0x7FFFFFFF)
        each = tl.exp(bits.to(tl.float32, bitcast=True) - peak).to(tl.float64)
    ties = (need - above) / each
    none_yet = tl.where(above > 0, 0.0, 1.0).to(tl.float64)
    room = tl.where(short, tl.maximum(tl.floor(ties), none_yet), tl.ceil(ties))
    room = tl.minimum(room, 1.0 * V).to(tl.int32)
    # the id after the last of `room` tokens at the edge
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros((), tl.int32)
    new_stop = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        z = tl.load(row + start + lane, mask=start + lane < V, other=-float("inf"))
        at = ((_order(z) == new_edge) & (start + lane < V)).to(tl.int32)
        rank = seen + tl.cumsum(at, 0)
        taken = (at > 0) & (rank <= room)
        new_stop = tl.maximum(new_stop, tl.max(tl.where(taken, start + lane + 1, 0), 0))
        seen += tl.sum(at, 0)
    # two prefixes with the same edge: the shorter one
    new_stop = tl.where(new_edge == edge, tl.minimum(new_stop, stop), new_stop)
    return new_edge, new_stop


@triton.jit
def _draw_rows(logits, stride, banned, ints, floats, N, token, log_p, V, BLOCK: tl.constexpr, NOISE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(ints + n), tl.load(ints + N + n)
    seed, step = tl.load(ints + 2 * N + n), tl.load(ints + 3 * N + n)
    k, short = tl.load(ints + 4 * N + n), tl.load(ints + 5 * N + n) > 0
    temperature, p = tl.load(floats + n).to(tl.float32), tl.load(floats + N + n)
    min_p = tl.load(floats + 2 * N + n).to(tl.float32)
    greedy = temperature < LEAST_TEMPERATURE  # the limit, the best token alone, without a division by zero
    k = tl.where(greedy, 1, k)
    temperature = tl.where(greedy, 1.0, temperature)

    lane = tl.arange(0, BLOCK)
    row = log_p + n * V
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    for at in range(0, V, BLOCK):
        inside = at + lane < V
        z = tl.load(logits + n * stride + at + lane, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        never = tl.load(banned + slot * V + at + lane, mask=inside, other=1) != 0
        z = tl.where(never, -float("inf"), z) + 0.0  # -0 becomes 0, since `_order` tells them apart
        tl.store(row + at + lane, z, mask=inside)
        peaks = tl.maximum(peaks, z)
    peak = tl.max(peaks, 0)
    tl.debug_barrier()  # later passes read what other threads have written

    edge, stop = tl.full((), LOWEST, tl.int32), tl.zeros((), tl.int32) + V
    if k > 0:
        need = tl.minimum(k, V).to(tl.float64)
        edge, stop = _shorten(row, V, peak, need, False, edge, stop, True, BLOCK)
    if p < 1:
        need = p * _mass(row, V, peak, tl.full((), LOWEST, tl.int32), edge, stop, False, BLOCK)
        edge, stop = _shorten(row, V, peak, need, short, edge, stop, False, BLOCK)
    floor = peak + tl.log(min_p)

    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, V, BLOCK):
        z = tl.load(row + at + lane, mask=at + lane < V, other=-float("inf"))
        order = _order(z)
        kept = ((order > edge) | ((order == edge) & (at + lane < stop))) & (z >= floor)
        total += tl.where(kept, tl.exp(z - peak), 0.0)
    normaliser = peak + tl.log(tl.sum(total.to(tl.float64), 0)).to(tl.float32)

    h = _absorb(_absorb(_absorb(seed, tl.full((), TOKEN_STREAM, tl.int64)), step), position)
    lane = tl.arange(0, NOISE)
    best = tl.full((NOISE,), -float("inf"), tl.float64)
    best_id = tl.zeros((NOISE,), tl.int32)
    for at in range(0, V, NOISE):
        inside = at + lane < V
        z = tl.load(row + at + lane, mask=inside, other=-float("inf"))
        order = _order(z)
        kept = ((order > edge) | ((order == edge) & (at + lane < stop))) & (z >= floor) & inside
        value = tl.where(kept, z - normaliser, -float("inf"))
        bits = (_absorb(h, (at + lane).to(tl.int64)) >> 12) & 0xFFFFFFFFFFFFF
        u = (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
        score = value.to(tl.float64) - tl.log(-tl.log(u))
        better = score > best
        best_id = tl.where(better, at + lane, best_id)
        best = tl.where(better, score, best)
        tl.store(row + at + lane, value, mask=inside)
    winner = tl.max(best, 0)
    tl.store(token + n, tl.min(tl.where(best == winner, best_id, V - 1), 0).to(tl.int64))


def draw_rows(logits_NV: Tensor, banned_SV: Tensor, ints: Tensor, floats: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N] and the float32 log-probabilities [N, V] they were drawn from; logits float32 or bf16."""
    N, V = logits_NV.shape
    assert logits_NV.stride(1) == 1 and banned_SV.is_contiguous()
    ints, floats = ints.contiguous(), floats.contiguous()
    token_N = torch.empty(N, dtype=torch.int64, device=logits_NV.device)
    log_p_NV = torch.empty(N, V, dtype=torch.float32, device=logits_NV.device)
    launch = _draw_rows[(N,)]  # type: ignore[index]
    block = min(DRAW_BLOCK, triton.next_power_of_2(V))
    shape = {"V": V, "BLOCK": block, "NOISE": min(NOISE_BLOCK, block)}
    banned = banned_SV.view(torch.uint8)
    launch(logits_NV, logits_NV.stride(0), banned, ints, floats, N, token_N, log_p_NV, **shape, num_warps=DRAW_WARPS)
    return token_N, log_p_NV

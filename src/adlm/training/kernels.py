"""Clipping, AdamW or Muon, and the weights' EMA in as few passes over memory as possible. On a GPU only.

All of this is a few operations per number, so reading and writing take the time. Clipping, AdamW and EMA one after the
other move 48 bytes per parameter, together 36 (weight, two moments and EMA read and written, gradient read). Muon's
work before and after its matrix products moves 104 bytes as separate operations, and 32 in two passes. The gradient's
norm must be known first, and takes 4 more. Tensors share a launch: a program takes a chunk of one of them and finds it
through a table of addresses. `optim.Updater` without `fused` is the reference implementation.
"""

import numpy as np
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

CHUNK, BLOCK, WARPS = 8192, 512, 4  # numbers per program; numbers in registers at a time, four per thread

# Rows of the table with a column per tensor: addresses, then the settings of its group.
WEIGHT, GRADIENT, MOMENT, SQUARE, STEP, EMA = (tl.constexpr(row) for row in range(6))
LR, BETA1, BETA2, EPS, DECAY = (tl.constexpr(row) for row in range(5))
ADDRESSES, SETTINGS = 6, 5
# Rows of the numbers that a program needs for its tensor.
KIND, PULL, RATE, NEW, NEW_SQUARE, SPREAD, FLOOR = (tl.constexpr(row) for row in range(7))
NUMBERS = 7
STAYS, MOVES, ALIGNED = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _address(addresses, row: tl.constexpr, T, tensor):
    return tl.load(addresses + row * T + tensor)


@triton.jit
def _floats(addresses, row: tl.constexpr, T, tensor):
    return _address(addresses, row, T, tensor).to(tl.pointer_type(tl.float32))


@triton.jit
def _lerp(a, b, weight):
    """torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def _count_step(addresses, settings, skip, numbers, T, BLOCK: tl.constexpr):
    """Count the step of every tensor that has a gradient, unless it is skipped, and write the numbers of its update.
    They are computed in float64, since 1 - beta^step in float32 is wrong in the fifth digit."""
    tensor = tl.arange(0, BLOCK)
    inside = tensor < T
    column = tl.where(inside, tensor, 0)
    gradient = _address(addresses, GRADIENT, T, column)
    skipped = tl.load(skip).to(tl.int32)
    count = _floats(addresses, STEP, T, column)
    counted = inside & (gradient != 0)
    step = tl.load(count, mask=counted, other=0.0) + (1 - skipped)
    tl.store(count, step, mask=counted)

    bits = gradient | _address(addresses, WEIGHT, T, column) | _address(addresses, EMA, T, column)
    bits |= _address(addresses, MOMENT, T, column) | _address(addresses, SQUARE, T, column)
    kind = tl.where((gradient != 0) & (skipped == 0), tl.where(bits % 16 == 0, ALIGNED, MOVES), STAYS)
    lr, eps = tl.load(settings + LR * T + column), tl.load(settings + EPS * T + column)
    beta1, beta2 = tl.load(settings + BETA1 * T + column), tl.load(settings + BETA2 * T + column)
    decay = tl.load(settings + DECAY * T + column)
    correction1 = 1 - tl.exp(step.to(tl.float64) * tl.log(beta1))
    correction2 = 1 - tl.exp(step.to(tl.float64) * tl.log(beta2))
    tl.store(numbers + KIND * T + tensor, kind.to(tl.float32), mask=inside)
    tl.store(numbers + PULL * T + tensor, (lr * decay).to(tl.float32), mask=inside)
    tl.store(numbers + RATE * T + tensor, (lr / correction1).to(tl.float32), mask=inside)
    tl.store(numbers + NEW * T + tensor, (1 - beta1).to(tl.float32), mask=inside)
    tl.store(numbers + NEW_SQUARE * T + tensor, (1 - beta2).to(tl.float32), mask=inside)
    tl.store(numbers + SPREAD * T + tensor, (1 / tl.sqrt(correction2)).to(tl.float32), mask=inside)
    tl.store(numbers + FLOOR * T + tensor, eps.to(tl.float32), mask=inside)


@triton.jit
def _move(
    addresses, numbers, T, tensor, start, n, clip, ema_weight,
    WITH_EMA: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clip and update n numbers of a tensor and its EMA. WHOLE: n is CHUNK, and all addresses are multiples of 16."""
    weight, gradient = _floats(addresses, WEIGHT, T, tensor) + start, _floats(addresses, GRADIENT, T, tensor) + start
    moment, square = _floats(addresses, MOMENT, T, tensor) + start, _floats(addresses, SQUARE, T, tensor) + start
    ema = _floats(addresses, EMA, T, tensor) + start
    if WHOLE:  # for loads of four numbers; the compiler trusts such a hint on a pointer made here, not on an argument
        weight, gradient = tl.multiple_of(weight, 16), tl.multiple_of(gradient, 16)
        moment, square, ema = tl.multiple_of(moment, 16), tl.multiple_of(square, 16), tl.multiple_of(ema, 16)
    pull, rate = tl.load(numbers + PULL * T + tensor), tl.load(numbers + RATE * T + tensor)
    new, new_square = tl.load(numbers + NEW * T + tensor), tl.load(numbers + NEW_SQUARE * T + tensor)
    spread, floor = tl.load(numbers + SPREAD * T + tensor), tl.load(numbers + FLOOR * T + tensor)
    factor = tl.load(clip)
    for at in range(0, CHUNK, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        inside = tl.full((BLOCK,), 1, tl.int1) if WHOLE else lane < n
        p, g = tl.load(weight + lane, mask=inside), tl.load(gradient + lane, mask=inside)
        m, v = tl.load(moment + lane, mask=inside), tl.load(square + lane, mask=inside)
        if WITH_EMA:  # loaded here: after a store, the load would wait for it
            s = tl.load(ema + lane, mask=inside)
        g *= factor
        m = _lerp(m, g, new)
        v = _lerp(v, g * g, new_square)
        p -= pull * p
        p -= rate * m / (tl.sqrt(v) * spread + floor)
        tl.store(weight + lane, p, mask=inside)
        tl.store(moment + lane, m, mask=inside)
        tl.store(square + lane, v, mask=inside)
        if WITH_EMA:
            tl.store(ema + lane, _lerp(s, p, ema_weight), mask=inside)


@triton.jit
def _move_all(
    addresses, numbers, chunks, clip, ema_weight, T,
    WITH_EMA: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per chunk: find its tensor, and update it according to its kind."""
    chunk = chunks + 3 * tl.program_id(0)
    tensor, start, n = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    kind = tl.load(numbers + KIND * T + tensor).to(tl.int32)
    if (kind == ALIGNED) & (n == CHUNK):
        _move(addresses, numbers, T, tensor, start, n, clip, ema_weight, WITH_EMA, True, CHUNK, BLOCK)
    elif kind != STAYS:
        _move(addresses, numbers, T, tensor, start, n, clip, ema_weight, WITH_EMA, False, CHUNK, BLOCK)
    elif WITH_EMA:
        weight, ema = _floats(addresses, WEIGHT, T, tensor) + start, _floats(addresses, EMA, T, tensor) + start
        for at in range(0, CHUNK, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            p, s = tl.load(weight + lane, mask=lane < n), tl.load(ema + lane, mask=lane < n)
            tl.store(ema + lane, _lerp(s, p, ema_weight), mask=lane < n)


def addresses_of(tensors: list[list[Tensor | None]]) -> np.ndarray:
    """One column per tensor, 0 for a missing one (numpy reads lists of numbers several times faster than torch)."""
    return np.array([[0 if x is None else x.data_ptr() for x in row] for row in tensors]).T


class OnePass:
    """Clip, AdamW and EMA of float32 tensors of these sizes on one device."""

    def __init__(self, sizes: list[int], device: torch.device):
        self.device = device
        chunks = [(i, start, min(CHUNK, n - start)) for i, n in enumerate(sizes) for start in range(0, n, CHUNK)]
        self.chunks = torch.tensor(chunks, dtype=torch.int64).to(device)

    def __call__(
        self,
        tensors: list[list[Tensor | None]],
        settings: list[list[float]],
        clip: Tensor,
        skip: Tensor,
        ema_weight: float,
    ) -> None:
        """For each tensor, `tensors` holds weight, gradient (None: the weight stays), both moments, step count and EMA
        (None for all tensors: no EMA), all contiguous; `settings` holds rate, betas, eps and weight decay.

        Gradients are multiplied by `clip`, and do not change in memory. Where `skip` is 1, only the EMA moves, by
        `ema_weight` of its distance from the weight. Nothing is read back, so the host never waits."""
        T = len(tensors)
        # Addresses of gradients and rates change at every step, so everything is sent, in one copy. torch does not
        # reuse pinned memory before the copies from it are done.
        host = torch.empty(ADDRESSES + SETTINGS, T, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        rows = host.numpy()
        rows[:ADDRESSES] = addresses_of(tensors)
        rows[ADDRESSES:].view(np.float64)[:] = np.array(settings).T
        table = host.to(self.device, non_blocking=True)
        addresses, settings_of = table[:ADDRESSES], table[ADDRESSES:].view(torch.float64)
        numbers = torch.empty(NUMBERS, T, dtype=torch.float32, device=self.device)
        launch = _count_step[(1,)]  # type: ignore[index]
        launch(addresses, settings_of, skip, numbers, T, BLOCK=triton.next_power_of_2(T))
        launch = _move_all[(len(self.chunks),)]  # type: ignore[index]
        shape = {"WITH_EMA": tensors[0][EMA.value] is not None, "CHUNK": CHUNK, "BLOCK": BLOCK}
        launch(addresses, numbers, self.chunks, clip, ema_weight, T, **shape, num_warps=WARPS)


# Muon: each stack of matrices of one shape has its own grid, chunks by matrices, and the same settings throughout.
MUON_WEIGHT, MUON_GRADIENT, MUON_MOMENTUM, MUON_EMA = (tl.constexpr(row) for row in range(4))


@triton.jit
def _here(addresses, row: tl.constexpr, T, tensor, start, WHOLE: tl.constexpr):
    pointer = _floats(addresses, row, T, tensor) + start
    return tl.multiple_of(pointer, 16) if WHOLE else pointer


@triton.jit
def _gather_momentum(
    addresses, first, T, out, clip, skip, momentum, n,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the momentum of each matrix towards its clipped gradient; write Nesterov's, a step ahead, to the stack."""
    start, matrix = tl.program_id(0) * CHUNK, tl.program_id(1)
    gradient = _here(addresses, MUON_GRADIENT, T, first + matrix, start, WHOLE)
    buffer = _here(addresses, MUON_MOMENTUM, T, first + matrix, start, WHOLE)
    out += matrix.to(tl.int64) * n + start
    factor, skipped = tl.load(clip), tl.load(skip) > 0
    for at in range(0, CHUNK, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        inside = tl.full((BLOCK,), 1, tl.int1) if WHOLE else start + lane < n
        b = tl.load(buffer + lane, mask=inside)
        g = tl.where(skipped, b, tl.load(gradient + lane, mask=inside) * factor)
        b = _lerp(b, g, 1 - momentum)
        tl.store(buffer + lane, b, mask=inside)
        tl.store(out + lane, _lerp(g, b, momentum).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _move_matrices(
    addresses, first, T, update, skip, rate, pull, ema_weight, n,
    WITH_EMA: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decay and update the weights, unless skipped, and move their EMA."""
    start, matrix = tl.program_id(0) * CHUNK, tl.program_id(1)
    weight = _here(addresses, MUON_WEIGHT, T, first + matrix, start, WHOLE)
    ema = _here(addresses, MUON_EMA, T, first + matrix, start, WHOLE)
    update += matrix.to(tl.int64) * n + start
    keep = 1 - tl.load(skip)
    for at in range(0, CHUNK, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        inside = tl.full((BLOCK,), 1, tl.int1) if WHOLE else start + lane < n
        p, u = tl.load(weight + lane, mask=inside), tl.load(update + lane, mask=inside).to(tl.float32)
        if WITH_EMA:
            s = tl.load(ema + lane, mask=inside)
        p = p * (1 - keep * pull) - keep * rate * u
        tl.store(weight + lane, p, mask=inside)
        if WITH_EMA:
            tl.store(ema + lane, _lerp(s, p, ema_weight), mask=inside)


class TwoPasses:
    """The work before and after the products of a Muon step: computing the momentum, and moving the weights."""

    def __init__(self, tensors: list[list[Tensor | None]], clip: Tensor, skip: Tensor):
        """`tensors` holds weight, gradient, momentum and EMA (None for all: no EMA) of each matrix, contiguous, with
        matrices of one shape next to each other. `clip` and `skip` as for OnePass."""
        self.tensors, self.clip, self.skip = tensors, clip, skip
        assert tensors[0][0] is not None
        self.device, self.with_ema = tensors[0][0].device, tensors[0][MUON_EMA.value] is not None
        addresses = addresses_of(tensors)
        self.aligned = not (addresses % 16).any()
        host = torch.empty(addresses.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = addresses
        self.addresses = host.to(self.device, non_blocking=True)

    def grid(self, stack_KRC: Tensor) -> tuple[tuple[int, int], dict[str, int | bool]]:
        n = stack_KRC[0].numel()
        shape = {"WHOLE": self.aligned and n % CHUNK == 0, "CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": WARPS}
        return (triton.cdiv(n, CHUNK), len(stack_KRC)), {"n": n, **shape}

    def gather_momentum(self, first: int, out_KRC: Tensor, momentum: float) -> Tensor:
        """Write the momentum of the matrices from number `first` on into a contiguous stack."""
        grid, shape = self.grid(out_KRC)
        launch = _gather_momentum[grid]  # type: ignore[index]
        launch(self.addresses, first, len(self.tensors), out_KRC, self.clip, self.skip, momentum, **shape)
        return out_KRC

    def move(self, first: int, update_KRC: Tensor, rate: float, pull: float, ema_weight: float) -> None:
        """Shrink the weights by `pull` and move them by -`rate` times the update (contiguous)."""
        grid, shape = self.grid(update_KRC)
        launch = _move_matrices[grid]  # type: ignore[index]
        moved = (self.addresses, first, len(self.tensors), update_KRC, self.skip, rate, pull, ema_weight)
        launch(*moved, WITH_EMA=self.with_ema, **shape)

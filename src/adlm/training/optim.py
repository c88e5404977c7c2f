"""Optimizers, learning-rate schedule, gradient clipping and EMA.

Nothing here makes the host wait for the device: whether a gradient is finite is a 0/1 tensor on the device, which
cancels the update of that step there.
"""

import importlib.util
import math
from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from adlm.models.network import is_block_matrix
from adlm.schema import OptimConfig

MUON_MOMENTUM = 0.95


def learning_rate_factor(cfg: OptimConfig, step: int, steps: int) -> float:
    """Fraction of the peak rate at optimizer step `step` (from 0: the first update of a warm-up has rate 0)."""
    if step < cfg.warmup:
        return step / cfg.warmup
    if cfg.schedule == "constant":
        return 1.0
    done = min(1.0, (step - cfg.warmup) / max(1, steps - cfg.warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left


NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of the quintic iteration that drives singular values to about 1 (Jordan et al., Muon)."""


def orthogonalise(g_KRC: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix to each of K stacked matrices, approximately: by matrix products only, in bf16 on
    a GPU."""
    x = g_KRC.bfloat16() if g_KRC.is_cuda else g_KRC
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:  # x <- a x + (b G + c G G) x with G = x x^T; sums inside the products
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(g_KRC.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum. Matrices of one shape are stacked, so a model of n blocks needs one call per shape, not
    one per matrix. The update is scaled by 0.2 sqrt(longer side), which makes `lr` comparable with AdamW's."""

    @staticmethod
    def scale(shape: torch.Size) -> float:
        return 0.2 * math.sqrt(max(shape[-2:]))

    def stacks(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Matrices with a gradient, stacked by group and shape, with the group's settings."""
        found: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            found += [(group, params) for params in by_shape.values()]
        return found

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float):
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        """Update all matrices with a gradient; nothing changes if `found_inf` is 1."""
        for group, params in self.stacks():
            lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
            buffers = [state_of(self, p)["momentum"] for p in params]
            grads = [p.grad for p in params if p.grad is not None]
            keep = 1.0
            if self.found_inf is not None:
                keep = 1.0 - self.found_inf
                grads = [torch.where(self.found_inf > 0, buffer, grad) for buffer, grad in zip(buffers, grads)]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)  # a skipped step moves the buffer towards itself
            nesterov = torch._foreach_lerp(grads, buffers, momentum)
            update_KRC = orthogonalise(torch.stack([whole(g) for g in nesterov]))
            if weight_decay:
                torch._foreach_mul_(params, 1 - keep * lr * weight_decay)
            updates = (update_KRC * (-lr * self.scale(update_KRC.shape) * keep)).unbind(0)
            sharded: list[Tensor] = [
                distribute_tensor(update, p.device_mesh, p.placements) if isinstance(p, DTensor) else update
                for update, p in zip(updates, params)
            ]
            torch._foreach_add_(params, sharded)


def state_of(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The optimizer's state for a parameter: zeros at first, as torch would create them."""
    state = optimizer.state[p]
    if not state and isinstance(optimizer, Muon):
        state["momentum"] = torch.zeros_like(p)
    elif not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    return state


def whole(x: Tensor) -> Tensor:
    """The full tensor if it is sharded: orthogonalising needs all of a matrix."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, except modulations. Pulling norms, biases and modulations to zero
    would switch something off."""
    return parameter.ndim >= 2 and ".modulation." not in name


def build_optimizers(cfg: OptimConfig, model: nn.Module, decay_all: bool = False) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters that train. With optim.name=muon, Muon takes the matrices of the blocks; embedding,
    heads and bridge stay with AdamW."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    muon = [p for n, p in named if cfg.name == "muon" and is_block_matrix(n, p)]
    chosen = {id(p) for p in muon}
    alike = decay_all or cfg.weight_decay == 0
    groups = {cfg.weight_decay: [p for n, p in named if id(p) not in chosen and (alike or is_decayed(n, p))]}
    if not alike:
        groups[0.0] = [p for n, p in named if id(p) not in chosen and not is_decayed(n, p)]
    rest = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, fused=True)
    ]
    if muon:
        optimizers.append(Muon(muon, cfg.muon_lr, MUON_MOMENTUM, cfg.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Total norm of the gradients, on the device."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


class GradientGuard:
    """Decides on the device whether to skip an update, because its gradient is not finite."""

    def __init__(self, device: torch.device):
        self.skipped = torch.zeros((), device=device)
        self.in_a_row = torch.zeros((), device=device)

    def judge(self, norm: Tensor) -> Tensor:
        """1.0 if the update of this step must be skipped, else 0.0."""
        bad = (~norm.isfinite()).float()
        self.skipped = self.skipped + bad
        self.in_a_row = (self.in_a_row + bad) * bad
        return bad

    def state(self) -> Tensor:
        """Three numbers, for the format of earlier checkpoints, where the first was a running mean."""
        return torch.stack([torch.zeros_like(self.skipped), self.skipped, self.in_a_row])

    def restore(self, state: Tensor) -> None:
        _, self.skipped, self.in_a_row = state.to(self.skipped.device).unbind(0)


class Ema:
    """Exponential moving average (EMA) of the weights, with a warm-up: decay min(ema, (1+n)/(10+n)) at the n-th
    update. As a context manager it swaps the EMA into the model, for validation."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.n = decay, 0
        self.parameters = dict(model.named_parameters())
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.shadow = {name: p.detach().clone() for name, p in trained.items()} if decay else {}

    @property
    def weight(self) -> float:
        """Weight of the current parameters in the next EMA."""
        n = self.n + 1
        return 1 - min(self.decay, (1 + n) / (10 + n))

    @torch.no_grad()
    def update(self, done: Container[str] = ()) -> None:
        """Move the EMA towards the current weights. `done`: names of those already moved."""
        if not self.shadow:
            return
        left = [name for name in self.shadow if name not in done]
        if left:
            current = [self.parameters[name].detach() for name in left]
            torch._foreach_lerp_([self.shadow[name] for name in left], current, self.weight)
        self.n += 1

    def whole(self) -> dict[str, Tensor]:
        """The EMA weights (raw weights if there is no EMA or a weight does not train), gathered from all ranks."""
        source = {name: p.detach() for name, p in self.parameters.items()} | self.shadow
        return {name.removeprefix("model."): whole(x) for name, x in source.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and EMA; calling it twice restores both bit for bit."""
        for name, shadow in self.shadow.items():
            kept = self.parameters[name].detach().clone()
            self.parameters[name].copy_(shadow)
            shadow.copy_(kept)

    def __enter__(self) -> "Ema":
        self.swap()
        return self

    def __exit__(self, *exception) -> None:
        self.swap()


def fits_one_pass(parameters: Iterable[Tensor]) -> bool:
    """Whether our kernel can update these: contiguous, unsharded float32 tensors on a GPU, with triton installed."""

    def fits(p: Tensor) -> bool:
        return p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and not isinstance(p, DTensor)

    return importlib.util.find_spec("triton") is not None and all(fits(p) for p in parameters)


class FusedAdamW:
    """The step of a torch.optim.AdamW, with clipping before and EMA after it, in one pass over memory. State and
    settings stay in the optimizer, so a run can resume with or without it."""

    def __init__(self, optimizer: torch.optim.Optimizer, ema: Ema):
        from adlm.training.kernels import OnePass

        self.optimizer, self.ema = optimizer, ema
        names, parameters = {p: name for name, p in ema.parameters.items()}, parameters_of([optimizer])
        self.names = {p: names[p] for p in parameters}
        self.one_pass = OnePass([p.numel() for p in parameters], parameters[0].device)

    def step(self, clip: Tensor, skip: Tensor) -> Iterable[str]:
        """Take the step; returns the names of the weights whose EMA was moved: all, with or without a gradient."""
        tensors: list[list[Tensor | None]] = []
        settings: list[list[float]] = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                grad = None if p.grad is None else p.grad.contiguous()
                # a parameter that never had a gradient has no state, as with torch
                state: dict[str, Any] = {} if grad is None else state_of(self.optimizer, p)
                moments = [state.get(key) for key in ("exp_avg", "exp_avg_sq", "step")]
                tensors.append([p, grad, *moments, self.ema.shadow.get(self.names[p])])
                settings.append([group["lr"], *group["betas"], group["eps"], group["weight_decay"]])
        self.one_pass(tensors, settings, clip, skip, self.ema.weight)
        torch.autograd.graph.increment_version(self.names)  # as torch does, so that graphs notice changed weights
        return self.names.values()


class FusedMuon:
    """The step of a Muon, with clipping and EMA, in two passes over memory and the products between them."""

    def __init__(self, optimizer: Muon, ema: Ema):
        self.optimizer, self.ema = optimizer, ema
        self.names = {p: name for name, p in ema.parameters.items()}

    def step(self, clip: Tensor, skip: Tensor) -> Iterable[str]:
        """Take the step; returns the names of the weights whose EMA was moved: those with a gradient."""
        from adlm.training.kernels import TwoPasses

        stacks = self.optimizer.stacks()
        moving: list[Any] = [p for _, params in stacks for p in params]
        if not moving:
            return ()
        tensors: list[list[Tensor | None]] = [
            [p, p.grad.contiguous(), state_of(self.optimizer, p)["momentum"], self.ema.shadow.get(self.names[p])]
            for p in moving
        ]
        passes, first = TwoPasses(tensors, clip, skip), 0
        for group, params in stacks:
            shape = (len(params), *params[0].shape)
            ahead_KRC = torch.empty(shape, dtype=torch.bfloat16, device=params[0].device)
            update_KRC = orthogonalise(passes.gather_momentum(first, ahead_KRC, group["momentum"])).contiguous()
            rate, pull = group["lr"] * Muon.scale(update_KRC.shape), group["lr"] * group["weight_decay"]
            passes.move(first, update_KRC, rate, pull, self.ema.weight)
            first += len(params)
        torch.autograd.graph.increment_version(moving)
        return [self.names[p] for p in moving]


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


class Updater:
    """What a step does with its gradients: clip, check, update, move the EMA, and clear them."""

    def __init__(
        self,
        cfg: OptimConfig,
        module: nn.Module,
        ema: Ema | None = None,
        guard: GradientGuard | None = None,
        decay_all: bool = False,
    ):
        """Without `ema` there is no EMA; without `guard` no update is skipped. `decay_all`: weight decay for norms,
        biases and modulations, too."""
        self.optimizers, self.largest = build_optimizers(cfg, module, decay_all), cfg.clip
        self.ema, self.guard = ema or Ema(module, 0.0), guard
        self.parameters = list(module.parameters())
        self.fused: list[FusedAdamW | FusedMuon] = []
        """One for each optimizer, or none: the same is then done by separate operations."""
        if fits_one_pass(parameters_of(self.optimizers)):
            self.fused = [
                FusedMuon(optimizer, self.ema) if isinstance(optimizer, Muon) else FusedAdamW(optimizer, self.ema)
                for optimizer in self.optimizers
            ]

    @torch.no_grad()
    def __call__(self, rate: float = 1.0) -> Tensor:
        """Update at this fraction of the peak rates; returns the gradients' norm before clipping, on the device."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
        norm = gradient_norm(self.parameters)
        skip = torch.zeros_like(norm) if self.guard is None else self.guard.judge(norm)
        clip = (self.largest / (norm + 1e-6)).clamp(max=1.0) if self.largest > 0 else torch.ones_like(norm)
        moved = {name for fused in self.fused for name in fused.step(clip, skip)}
        if not self.fused:
            self.step_plainly(clip, skip)
        self.ema.update(done=moved)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm

    def step_plainly(self, clip: Tensor, skip: Tensor) -> None:
        """The reference implementation of the fused steps, without the EMA."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        if self.largest > 0 and grads:
            torch._foreach_mul_(grads, clip)
        for optimizer in self.optimizers:
            # the hook of torch's gradient scaler: a fused AdamW changes neither weights nor state if found_inf is 1
            optimizer.found_inf = skip  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()

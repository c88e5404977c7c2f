"""Optimizer steps by the kernel that clips, updates and averages in one pass, and by its reference implementation."""

from pathlib import Path

import torch
from torch import Tensor, nn

from adlm.schema import CheckpointConfig, OptimConfig
from adlm.training import kernels, optim
from adlm.training.checkpoint import Checkpoints, tensors
from adlm.training.optim import Ema, GradientGuard, Updater
from adlm.training.parallel import World

CLOSE = {"rtol": 2e-5, "atol": 2e-7}
STEPS, SKIPPED = 7, (3, 5)


class Odd(nn.Module):
    """Whole chunks, tails, single numbers; matrices for Muon; one weight that is frozen."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        n = kernels.CHUNK
        shapes = [(2 * n,), (n + 5,), (1,), (37, 3), (), (n // 64, 64), (3, n + 4)]
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        matrices = [(8, 12), (8, 12), (n // 8, 16), (8, 12), (3, n // 2 + 1)]  # less than a chunk, two, one and a tail
        self.blocks = nn.ModuleList([nn.Linear(*sizes) for sizes in matrices])
        for p in self.blocks.parameters():
            nn.init.normal_(p, generator=generator)
        self.weights.append(nn.Parameter(torch.randn(9, generator=generator), requires_grad=False))


class Student:
    def __init__(self, cfg: OptimConfig, device: str, fused: bool):
        self.model = nn.ModuleDict({"model": Odd(torch.Generator().manual_seed(0))}).to(device)
        self.ema, self.guard = Ema(self.model, cfg.ema), GradientGuard(torch.device(device))
        self.update = Updater(cfg, self.model, self.ema, self.guard, decay_all=True)
        assert self.update.fused
        if not fused:
            self.update.fused = []
        # the norm is then summed in another order, which the bf16 of Muon on a GPU could make visible
        self.transposed = fused and cfg.name == "adamw"
        (group,) = self.update.optimizers[0].param_groups  # and a second one, with settings of its own
        last = group["params"][2:]
        del group["params"][2:]
        other = {"lr": 3 * group["lr"], "peak": 3 * group["peak"], "betas": (0.5, 0.99), "eps": 1e-3}
        self.update.optimizers[0].add_param_group({"params": last, "weight_decay": 0.3, **other})

    def step(self, number: int) -> Tensor:
        """Gradients are a function of the step: small, clipped and not finite."""
        g = torch.Generator().manual_seed(100 + number)
        scale = (1.0, 1e-3, 2.0, float("nan"), 1e-3, float("inf"), 2e-3)[number]
        for i, p in enumerate(self.model.parameters()):
            grad = scale * torch.randn(p.shape, generator=g).to(p.device)
            if not p.requires_grad or (i == 1 and number in (0, 2)):
                continue  # the second has none in some steps, the first one included
            if i == 0 or (p.shape == (12, 8) and number == 4):  # not on a multiple of 16 bytes
                grad = torch.cat([grad.flatten()[:1], grad.flatten()])[1:].view(grad.shape)
            elif i == 5 and self.transposed:  # in another order, which torch's AdamW cannot read
                grad = grad.T.contiguous().T
            p.grad = grad
        return self.update(1 / (number + 1))

    def state(self) -> dict[str, dict[str, Tensor]]:
        return tensors(self.model, self.update.optimizers, self.ema, self.guard)  # type: ignore[arg-type]


def structure(optimizer: torch.optim.Optimizer) -> object:
    state = optimizer.state_dict()
    described = {i: [(k, x.dtype, x.shape, x.device) for k, x in of.items()] for i, of in state["state"].items()}
    return described, state["param_groups"]


def assert_same(a: Student, b: Student, moved_by_muon: float = 0.0) -> None:
    """`moved_by_muon`: how far the weights of its matrices may be apart."""
    for ours, theirs in zip(a.update.optimizers, b.update.optimizers):
        assert structure(ours) == structure(theirs)
    assert a.ema.n == b.ema.n
    states = a.state(), b.state()
    for part, expected in states[1].items():
        assert list(states[0][part]) == list(expected)
        for name, tensor in expected.items():
            close = CLOSE if part == "optimizer" or "blocks" not in name else CLOSE | {"atol": 2e-7 + moved_by_muon}
            torch.testing.assert_close(states[0][part][name], tensor, **close, msg=lambda m, n=name: f"{n}: {m}")


def check_updates(device: str, folder: Path) -> None:
    """Gradients small, large, missing and bad; two groups; with and without average, clipping and weight decay."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "ema": 0.7, "clip": 1.0}
    for change in ({}, {"ema": 0.0}, {"clip": 0.0, "weight_decay": 0.0}, {"name": "muon"}):
        cfg = OptimConfig(**settings | change)
        kernel, plain = Student(cfg, device, fused=True), Student(cfg, device, fused=False)
        before: dict[str, dict[str, Tensor]] = {}
        # the last bit of a momentum can make another bf16 number of it, where the products are in bf16
        loose = 3e-4 if cfg.name == "muon" and device == "cuda" else 0.0
        for number in range(STEPS):
            versions = [p._version for p in kernel.model.parameters() if p.requires_grad]
            torch.testing.assert_close(kernel.step(number), plain.step(number), equal_nan=True)
            moved = [p._version for p in kernel.model.parameters() if p.requires_grad]
            assert all(now > then for now, then in zip(moved, versions)), "autograd does not notice the update"
            assert all(p.grad is None for p in kernel.model.parameters())
            assert_same(kernel, plain, loose)
            state = {part: {k: x.clone() for k, x in of.items()} for part, of in kernel.state().items()}
            if number in SKIPPED:  # nothing but the average moves
                for part in ("model", "optimizer"):
                    assert all(torch.equal(x, before[part][k]) for k, x in state[part].items())
                assert all((x != before["ema"][k]).any() for k, x in state["ema"].items() if k != "weights.7")
            before = state
        assert kernel.guard.skipped == len(SKIPPED)
        counts = {of["step"].item() for of in kernel.update.optimizers[0].state.values()}
        assert counts == {STEPS - len(SKIPPED), STEPS - len(SKIPPED) - 2}  # one weight had no gradient twice
    check_precision(device)
    check_resuming(OptimConfig(**settings), device, folder)


def check_precision(device: str) -> None:
    """Under a constant gradient both corrected moments are constant, and a step is the rate: in float32 the correction
    1 - beta2^step of the first steps would be wrong in the fifth digit."""
    model = nn.ParameterList([torch.zeros(5)]).to(device)
    update = Updater(OptimConfig(lr=1.0, weight_decay=0.0, clip=0.0, ema=0.0), model)
    for number in range(1, 6):
        model[0].grad = torch.ones_like(model[0])
        update()
        torch.testing.assert_close(model[0].detach(), torch.full_like(model[0], -number), rtol=2e-6, atol=0)


def check_resuming(cfg: OptimConfig, device: str, folder: Path) -> None:
    """A checkpoint that one has written, continued by the other."""
    ranks = World(0, 1, torch.device(device), "fp32", "none")
    uninterrupted = Student(cfg, device, fused=False)
    for number in range(STEPS):
        uninterrupted.step(number)
    for fused in (True, False):
        writer, reader = Student(cfg, device, fused), Student(cfg, device, not fused)
        for number in range(4):
            writer.step(number)
        checkpoints = Checkpoints(folder / str(fused), CheckpointConfig(), ranks)
        checkpoints.save(writer.state(), {"step": 4})
        state = reader.state()
        checkpoints.load(4, state)
        reader.guard.restore(state["guard"]["state"])
        reader.ema.n = writer.ema.n
        for number in range(4, STEPS):
            reader.step(number)
        assert_same(reader, uninterrupted)


def check_interpreted(folder: str) -> None:
    """On the CPU, in a process where TRITON_INTERPRET=1."""
    optim.fits_one_pass = lambda parameters: True
    kernels.CHUNK, kernels.BLOCK = 128, 64  # the interpreter takes its time
    check_updates("cpu", Path(folder))

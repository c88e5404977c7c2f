"""One process or many: ranks, devices, DDP, FSDP2 and HSDP, compiling and CUDA graphs, with or without torchrun.

Every rank computes its part of the global batch. Gradients are averaged over ranks, so a loss is multiplied by the
number of ranks and divided by the global token count before it is differentiated.
"""

import atexit
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from adlm.data.tokenizers import limit_threads
from adlm.errors import require
from adlm.io.paths import die_with_parent, float64_device, pick_device
from adlm.models import Network
from adlm.models.layers import allow_variants, choose_attention, training_options
from adlm.models.network import Hidden
from adlm.models.transformer import Mask
from adlm.objectives import LossOutput, loss
from adlm.schema import TrainConfig
from adlm.training.watch import Watch

PREPARING_TIMEOUT = timedelta(days=7)
"""How long the other ranks wait for the first one to prepare data."""


@dataclass
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    precision: str
    """fp32 or bf16."""
    compile: str
    """model, max (model, with a search for kernels), block or none."""
    local_size: int = 1
    """Number of ranks on this node."""
    beside: Any = None
    """A process group on CPUs for work beside training; None: there is one process."""
    watch: Watch | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def at(self, what: str, step: int | None = None, waits: bool = False, long: bool = False) -> None:
        """Note what this rank starts to do, for the others to read (watch.py)."""
        if self.watch is not None:
            self.watch.at(what, step, waits, long)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on one of them."""
        if self.size == 1:
            return flag
        self.at("waiting for all ranks to answer a question", waits=True)
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def barrier(self) -> None:
        if self.size > 1:
            self.at("waiting for all ranks to come this far", waits=True)
            dist.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the others: for work whose result is cached on disk.

        That may be hours of tokenising, and a barrier times out after ten minutes on GPUs (thirty on CPUs). So the
        others wait for a key in the store through which the ranks have met.
        """
        if self.size == 1:
            yield
            return
        store = dist.distributed_c10d._get_default_store()
        word = f"adlm/main_first/{store.add(f'adlm/main_first/turns/{self.rank}', 1)}"
        if not self.is_main:
            self.at("waiting for rank 0, which prepares or loads", waits=True)
            store.wait([word], PREPARING_TIMEOUT)
        self.at("preparing or loading", long=True)
        try:
            yield
        finally:
            if self.is_main:
                store.set(word, "done")

    @functools.cached_property
    def float64_device(self) -> torch.device:
        return float64_device(self.device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


@contextmanager
def world(cfg: TrainConfig) -> Iterator[World]:
    """Join the process group that torchrun describes, if any, and leave it at the end. Inside another `world` that
    group is used, since torch cannot join a group twice."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(cfg.device)
    limit_threads(cfg.num_threads)
    products = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    elif cfg.num_threads > 0:
        torch.set_num_threads(cfg.num_threads)
    # Compute compiled gradients outside autocast, like autograd: what the forward pass kept in float32 stays float32.
    if hasattr(torch._functorch.config, "backward_pass_autocast"):  # not in every version of torch
        torch._functorch.config.backward_pass_autocast = "off"
    alone = size == 1 and not cfg.is_sharded
    require(alone or device.type != "mps", "train.device=mps is for one process; use train.device=cpu, or no torchrun")
    precision = cfg.precision if cfg.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
    compiling = {"auto": "model" if device.type == "cuda" else "none", "true": "model", "false": "none"}
    mode = compiling.get(cfg.compile, cfg.compile)
    if cfg.is_sharded and mode in ("model", "max"):
        mode = "block"  # sharded blocks gather their weights outside the compiled graph
    found = World(rank, size, device, precision, mode, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    try:
        with nullcontext() if alone or dist.is_initialized() else process_group(found):
            yield found
    finally:
        torch.set_float32_matmul_precision(products)  # later sampling in float32 must be in full float32


@contextmanager
def process_group(ranks: World) -> Iterator[None]:
    """Join the other ranks, watch them, and leave at the end. A rank that loses them exits with a one-line error, and
    torchrun restarts with the ranks that are left."""
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(key, value)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # the torchrun agent: an orphaned rank would keep running beside its replacement
    try:
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.size)
        ranks.beside = dist.new_group(backend="gloo")
        if ranks.size > 1:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            ranks.watch = Watch(ranks.rank, ranks.size, store).start()
        yield
    except RuntimeError as error:
        if ranks.size == 1 or not is_loss_of_ranks(error):
            raise
        # neither Python's exit nor torch's may wait for lost ranks; there is nothing left to write
        atexit.register(os._exit, 1)
        raise ConnectionError(
            f"rank {ranks.rank} of {ranks.size} lost another one ({str(error).strip().splitlines()[0][:200]});"
            " torchrun with --max-restarts=N starts again from the newest checkpoint"
        ) from None
    if ranks.watch is not None:
        ranks.watch.stop()
    dist.destroy_process_group()


def is_loss_of_ranks(error: RuntimeError) -> bool:
    """Whether an error is about the connection to other ranks. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)


class TensorsOnly(nn.Module):
    """A model in the form that torch's graph recorder needs: tensors in, tensors out."""

    def __init__(self, model: Network, names: list[str], mask: Mask | None):
        super().__init__()
        self.model, self.names, self.mask = model, names, mask

    def forward(self, tokens_BL: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        hidden = self.model(tokens_BL, mask=self.mask, **dict(zip(self.names, given)))
        return tuple(states for states in hidden if states is not None)


class GraphedModel:
    """A model whose training passes are replayed as CUDA graphs: one launch forward and one backward, instead of a
    thousand by the host. Heads are the model's; the next call overwrites the states.

    A graph is a recording of kernels with their addresses, so everything it reads and writes needs a fixed shape and
    address. Weights have both. Batches are copied into the graph's own memory (kilobytes). Only the number of positions
    that the denoiser's head reads changes from step to step: `objectives.base.rounded` rounds it up to a multiple of an
    eighth of the batch. There is a pair of graphs for each such number, two or three in practice, and one for causal
    steps. They share the memory of their activations, since a backward pass follows its forward pass before the next
    one starts. Gradients belong to the graph, too, and must be used before the next step, so there is no accumulation
    over micro-batches. Losses and update stay outside.
    """

    def __init__(self, model: Network):
        self.model = model
        self.recorded: dict[tuple, Any] = {}
        self.pool: Any = None

    @property
    def head(self) -> nn.Linear:
        return self.model.head

    @property
    def anchor_head(self) -> nn.Linear | None:
        return self.model.anchor_head

    def __call__(
        self,
        tokens_BL: Tensor,
        sigma_B: Tensor | None = None,
        at_N: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Hidden:
        """`mask` must not hold tensors."""
        given = {name: x for name, x in (("sigma_B", sigma_B), ("at_N", at_N)) if x is not None}
        key = (mask, tokens_BL.shape, *((name, x.shape) for name, x in given.items()))
        if key not in self.recorded:
            self.recorded[key] = self.record(tokens_BL, given, mask)
        denoiser_BLD, *anchor = self.recorded[key](tokens_BL, *given.values())
        return Hidden(denoiser_BLD, anchor[0] if anchor else None)

    def record(self, tokens_BL: Tensor, given: dict[str, Tensor], mask: Mask | None) -> Any:
        """Run both passes a few times, which also compiles them, then record them."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        own = tuple(x.clone() for x in (tokens_BL, *given.values()))  # where later batches are copied to
        if "at_N" in given:  # compiled once for all numbers
            torch._dynamo.maybe_mark_dynamic(own[-1], 0)
        device = tokens_BL.device.type
        precision = torch.get_autocast_dtype(device)
        with torch.autocast(device, precision, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            recorded = torch.cuda.make_graphed_callables(
                TensorsOnly(self.model, list(given), mask), own, allow_unused_input=True, pool=self.pool
            )
        torch.cuda.empty_cache()  # the graph now has its own memory for what the first passes used
        return recorded


class Step(nn.Module):
    """The model with its loss as one module, which DDP and FSDP wrap, so that heads are used inside `forward`."""

    def __init__(self, model: Any, score: Callable[[Any, Any], LossOutput] = loss):
        super().__init__()
        self.model = model
        self.score = score
        self.compiled = False
        self.graphed: GraphedModel | None = None

    @property
    def network(self) -> Network:
        """The network inside the model, possibly the model itself."""
        return next(module for module in self.model.modules() if isinstance(module, Network))

    def forward(self, batch: Any) -> LossOutput:
        if self.compiled:
            # the number of scored positions varies; without the hint, the compiler would find out by compiling twice
            for term in getattr(batch, "terms", {}).values():
                torch._dynamo.maybe_mark_dynamic(term.positions_N, 0)
        replayed = self.graphed is not None and self.training and torch.is_grad_enabled()
        return self.score(self.graphed if replayed else self.model, batch)


def parallelise(step: Step, cfg: TrainConfig, world: World) -> nn.Module:
    """Compile, checkpoint activations, and wrap for more than one rank."""
    model = step.network
    if cfg.residual == "bf16" and world.precision == "bf16":
        model.residual_dtype = torch.bfloat16
    if world.device.type == "cuda":
        choose_attention(cfg.at_once(world.size), model.config, world.device)
    stacks = [s for s in (model.anchor, model.denoiser) if s is not None]
    for stack in stacks:
        stack.checkpoint_activations = cfg.checkpoint_activations
        stack.compiles_blocks = world.compile == "block"
    step.compiled = world.compile in ("block", "model", "max")
    if cfg.cuda_graphs:
        on = "train.cuda_graphs=true"  # what can be known without a device is in config.check_train
        require(world.device.type == "cuda", f"{on} needs a GPU, not train.device={world.device}")
        step.graphed = GraphedModel(model)
    if step.compiled:
        torch._dynamo.reset()  # an earlier run in the same process may have used up the limit of compiled variants
        allow_variants()
        # few shapes occur (early and late training, validation): each gets its own kernels, not the slower ones that
        # fit any shape
        how: dict[str, Any] = {"options": training_options(most=world.compile == "max"), "dynamic": False}
        for module in [b for s in stacks for b in s.blocks] if world.compile == "block" else [model]:
            module.compile(**how)
    if cfg.is_sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = mesh_of(cfg, world)
        for stack in stacks:
            for block in stack.blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(step, mesh=mesh)
        return step
    if world.size == 1:
        return step
    # some parameters get gradients from the anchor loss only, which may be off
    unused = model.bridge is not None and bool(model.bridge.unused)
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        step, device_ids=devices, find_unused_parameters=unused, gradient_as_bucket_view=True
    )


def mesh_of(cfg: TrainConfig, world: World) -> DeviceMesh:
    """fsdp: shards over all ranks. hsdp: shards over the ranks of a node, replicated over nodes."""
    if cfg.strategy == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    inside = world.local_size
    require(
        world.size % inside == 0,
        f"train.strategy=hsdp needs the same number of ranks on every node; {world.size} are not a multiple of the"
        f" {inside} of this one",
    )
    return init_device_mesh(world.device.type, (world.size // inside, inside), mesh_dim_names=("copies", "shards"))


@contextmanager
def accumulating(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only after the last micro-batch of a step."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
    yield


class Interruption:
    """Handles SIGTERM, SIGINT and SIGHUP: they ask the loop to save and stop; a second SIGINT stops at once."""

    number = 0
    """The signal received first; 0: none."""

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):  # nohup
                continue
            try:
                self.before[number] = signal.signal(number, self.receive)
            except ValueError:  # not the main thread, whose owner handles signals
                break
        return self

    def receive(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not self.requested:
            print("stopping after this step; Ctrl-C again stops at once, without saving", file=sys.stderr, flush=True)
        self.requested, self.number = True, self.number or number

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

"""Checkpoints that survive: atomic, checksummed, resumable on another number of ranks.

A checkpoint is a folder `checkpoints/step-00001000` with the tensors of every stateful part (written by
torch.distributed.checkpoint, so ranks may change), `state.json` (step, best bound, counters) and `manifest.json` (size
and SHA-256 of every file). It is written under another name and renamed when complete, so a kill at any moment leaves
the older ones untouched. Checksums reveal a corrupt one, and the one before it is used. With checkpoint.url the
checkpoints are kept at that URL (storage.py), and the folder only holds them while they are written and read.
"""

import json
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from adlm.compat.foreign_files import SavedTensors
from adlm.errors import require
from adlm.io.paths import (
    absolute_paths,
    check_object,
    checkpoint_steps,
    claimed,
    read_json,
    sync_folder,
    writable_folder,
)
from adlm.migration import migrate_tree
from adlm.schema import CheckpointConfig, DataConfig, ReasonConfig
from adlm.training.optim import Ema, GradientGuard, state_of
from adlm.training.parallel import Step, World
from adlm.training.storage import STATE, described, problem_of, remote, seal
from adlm.training.watch import note

# normal in a single process
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

RESUMED_FIELDS = {
    "window": dict, "ema_n": int, "best": float, "best_step": int, "bound": float, "extra": dict, "data": dict,
    "decay_all": bool, "ranks": int, "saved": float,
}  # fmt: skip
SECTIONS = ("model", "noise", "objective", "data", "optim", "train")
State = dict[str, dict[str, Tensor]]


def tensors(step: Step, optimizers: list[torch.optim.Optimizer], ema: Ema, guard: GradientGuard) -> State:
    """Every tensor that a resumed run needs, by name; of the weights, those that train. Fresh optimizers get their
    (zero) state here, so that the same call describes what to save and where to load."""
    names = {id(p): name.removeprefix("model.") for name, p in step.named_parameters()}
    optimizer_state: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer_state |= {f"{names[id(p)]}.{key}": value for key, value in state_of(optimizer, p).items()}
    return {
        "model": {name.removeprefix("model."): p.detach() for name, p in step.named_parameters() if p.requires_grad},
        "ema": {name.removeprefix("model."): x for name, x in ema.shadow.items()},
        "optimizer": optimizer_state,
        "guard": {"state": guard.state()},
    }


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, run: Path, cfg: CheckpointConfig, world: World):
        self.folder, self.cfg, self.world = run / "checkpoints", cfg, world
        self.remote = remote(cfg.url)
        self.writing: threading.Thread | None = None
        self.failure: Exception | None = None

    @property
    def place(self) -> str:
        return self.cfg.url or str(self.folder)

    @property
    def is_first_of_node(self) -> bool:
        return self.world.rank % self.world.local_size == 0

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return self.remote.steps() if self.remote else checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        """Where the files of a checkpoint are read; for a URL, the folder into which this node fetches them."""
        folder = self.folder / f"partial-of-{socket.gethostname()}" if self.remote else self.folder
        return folder / f"step-{step:08d}"

    # Ranks

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on one of them; unlike `World.any` in the group beside training."""
        if self.world.beside is None:
            return flag
        answer = torch.tensor(float(flag))
        dist.all_reduce(answer, group=self.world.beside)
        return bool(answer)

    def together(self, do: Callable[[], None], here: bool = True) -> None:
        """Run `do` on the ranks where `here` is true. If it fails on one rank it raises on all, so that none is left
        waiting."""
        failure = None
        if here:
            try:
                do()
            except OSError as error:
                failure = error
        if self.any(failure is not None):
            raise failure or OSError("another process could not write")

    # Writing

    def save(self, state: State, info: dict[str, Any], wait: bool = True) -> None:
        """Write the checkpoint of info["step"]; all ranks call it. Raises OSError, leaving older ones as they were.

        `wait=False` returns once everything is copied to host memory. A thread does the rest, which takes many times as
        long; a failure there is reported at the next call.
        """
        self.finish_writing()
        if self.any(self.world.is_main and info["step"] in self.steps()):
            return
        if wait:
            self.write(state, info)
            return
        copy = {part: {name: x.to("cpu", copy=True) for name, x in xs.items()} for part, xs in state.items()}
        # with several ranks it may wait for a lost one, and Python must still be able to exit
        alone = self.world.beside is None
        self.writing = threading.Thread(target=self.write_beside, args=(copy, info), daemon=not alone)
        self.writing.start()

    def write(self, state: State, info: dict[str, Any]) -> None:
        """Write under another name, rename when complete, and prune old checkpoints; all ranks call it."""
        step, rank = info["step"], self.world.rank
        partial = self.folder / f"partial-step-{step:08d}"
        entries: dict[str, dict[str, Any]] = {}

        def clear() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob("partial-*"):
                shutil.rmtree(stale, ignore_errors=True)

        def check_own() -> None:
            own = sorted(partial.glob(f"__{rank}_*"))
            entries.update(described(own))
            if self.remote:
                self.remote.put(step, own)

        def complete() -> None:
            (partial / STATE).write_text(json.dumps(info, indent=1), encoding="utf-8")
            last = seal(partial, entries)
            if self.remote:
                self.remote.put(step, last)
            else:
                partial.rename(self.folder / f"step-{step:08d}")
                sync_folder(self.folder)
            self.prune(info.get("best_step"))

        try:
            self.together(clear, here=self.is_first_of_node)
            dcp.save(state, checkpoint_id=partial, process_group=self.world.beside)  # a failure raises on all ranks
            self.together(check_own)
            self.gather(entries)
            self.together(complete, here=self.world.is_main)
            if self.remote and self.is_first_of_node:
                shutil.rmtree(partial, ignore_errors=True)
        except (OSError, dcp.CheckpointException) as error:
            free = shutil.disk_usage(self.folder.parent).free  # torch's message for a full disk may not mention it
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"checkpoint of step {step} could not be written to {self.place}"
                f" ({free / 2**20:,.0f} MiB free): {brief(error)}"
            ) from None

    def gather(self, entries: dict[str, dict[str, Any]]) -> None:
        """Collect on the first rank what each rank knows about its files."""
        if self.world.beside is None:
            return
        found: list[Any] | None = [None] * self.world.size if self.world.is_main else None
        dist.gather_object(entries, found, dst=0, group=self.world.beside)
        for others in found or ():
            entries.update(others)

    def write_beside(self, *what: Any) -> None:
        """Write in a thread, and keep a failure for `finish_writing`."""
        try:
            self.write(*what)
        except Exception as error:
            self.failure = error

    def finish_writing(self, patience: float | None = None) -> None:
        """Wait until the last checkpoint is complete, and report a failure. `patience`: seconds to wait."""
        if self.writing is not None:
            self.world.at("waiting for the last checkpoint to be complete", waits=True)
            self.writing.join(patience)
        if self.failure is not None and self.world.is_main:
            note(f"warning: {self.failure}; training continues")
        self.writing = self.failure = None

    def prune(self, best_step: int | None) -> None:
        """Remove all checkpoints but the newest `keep` and the best."""
        for step in self.steps()[: -self.cfg.keep]:
            if step == best_step:
                continue
            if self.remote:
                self.remote.remove(step)
                continue
            with suppress(OSError):  # an extra checkpoint is harmless
                gone = self.path(step).rename(self.folder / f"partial-{self.path(step).name}")
                shutil.rmtree(gone, ignore_errors=True)

    # Reading

    def problem(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint, fetched first if need be; None if nothing."""
        if self.remote:
            self.remote.fetch(step, self.path(step))
        return problem_of(self.path(step))

    def newest_valid(self, set_aside: bool = False) -> int | None:
        """The newest step with a valid checkpoint; None if there is no checkpoint at all. `set_aside`: move corrupt
        ones away, so that their steps can be saved again; for a run that trains, not for readers."""
        found = None
        if self.world.is_main:
            steps, corrupt = self.steps(), []
            for step in reversed(steps):
                problem = self.problem(step)
                if problem is None:
                    found = step
                    break
                note(f"warning: checkpoint of step {step} is corrupt ({problem}); trying the one before it")
                corrupt.append(step)
            else:
                found = None if not steps else -1
            for step in corrupt if found != -1 and set_aside else ():
                if self.remote:
                    self.remote.remove(step)
                else:
                    self.path(step).rename(self.folder / f"corrupt-step-{step:08d}-{time.time_ns()}")
        if self.world.size > 1:
            box = [found]
            dist.broadcast_object_list(box, src=0)
            found = box[0]
        require(
            found != -1,
            f"every checkpoint in {self.place} is corrupt; remove the folder to start again from step 0",
        )
        if self.remote and found is not None:
            if self.is_first_of_node and not self.world.is_main:
                self.remote.fetch(found, self.path(found))
            self.world.barrier()
        return found

    def read_info(self, step: int, resumed: Collection[str] = ()) -> dict[str, Any]:
        """The `info` that `save` was given, migrated to this version's names. `resumed`: sections that a run reads when
        it resumes from here."""
        path = self.path(step) / STATE
        info = check_object(read_json(path), {"step": int, "config": dict}, RESUMED_FIELDS, str(path))
        require(info["step"] == step, f"{path} is the state of step {info['step']}, not of {step}")
        if "progress" in info:  # a reasoning run of an earlier version
            try:
                progress = info.pop("progress")
                info |= {"best": 1 - progress["best"], "extra": {"stages": progress["stages"]}}
                if info["config"]["reason"]["method"] == "acot":
                    info["config"]["objective"]["gamma"] = info["config"]["reason"]["gamma"]
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} is not the state of a reasoning run ({error})") from None
        config = migrate_tree(info["config"], str(path), resumed)
        for name, section in (("data", DataConfig), ("reason", ReasonConfig)):  # relative in earlier versions
            config[name] = config.get(name, {}) | absolute_paths(section, config.get(name, {}))
        return info | {"config": config}

    def load(self, step: int, state: State) -> None:
        """Fill the tensors of `state` in place."""
        try:
            dcp.load(state, storage_reader=CheckedReader(self.path(step)))
        except dcp.CheckpointException as error:
            raise ValueError(f"{self.path(step)} cannot be resumed: {brief(error)}") from None


class CheckedReader(dcp.FileSystemReader):
    """torch's checkpoint reader, except that every pickle is read as data: a foreign folder can execute nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.saved = SavedTensors(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that torch would have unpickled, built from checked names and numbers."""
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for name, saved in self.saved.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in saved.shards]
            properties = TensorProperties(dtype=getattr(torch, saved.dtype))
            described[name] = TensorStorageMetadata(properties, torch.Size(saved.size), chunks)
            places |= {MetadataIndex(name, torch.Size(s.offsets)): s for s in saved.shards}
        return Metadata(described, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            found = self.saved.read(self.storage_data[item.storage_index])
            for axis, (start, n) in enumerate(zip(item.storage_offsets, item.lengths)):
                found = found.narrow(axis, start, n)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def check_state(info: dict[str, Any], source: str) -> None:
    """Refuse a state that does not describe its model."""
    check_object(info, {"tokenizer": str}, {}, source)
    check_object(info["config"], {"algo": str} | dict.fromkeys(SECTIONS, dict), {}, f"{source}: config")


@contextmanager
def claimed_run_folder(out: str, ranks: World) -> Iterator[Path]:
    """The run folder, for one run at a time: two would write into each other's checkpoints. Partial files of a killed
    run are removed, and so is a folder that stayed empty."""
    folder = writable_folder("out", Path(out))
    if not ranks.is_main:
        yield folder
        return
    path = folder / ".claim"

    def refusal(process: str) -> str:
        return f"out={out!r} is in use by process {process or '?'}; wait for it, or use another out="

    with claimed(path, refusal) as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for leftover in [*folder.glob(".export-*"), *folder.glob("checkpoints/partial-*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            yield folder
        finally:
            if list(folder.iterdir()) == [path]:
                with suppress(OSError):
                    path.unlink()
                    folder.rmdir()


def of_run(run: Path) -> Checkpoints:
    """The checkpoints of a run, for a reader in one process."""
    return Checkpoints(run, CheckpointConfig(), World(0, 1, torch.device("cpu"), "fp32", "none"))


def newest_step(run: Path, newer_than: float) -> int | None:
    """The step of a run's newest valid checkpoint, if it is above `newer_than` (-1: any step)."""
    try:
        found = of_run(run).newest_valid()
    except ValueError:  # all of them are corrupt
        if newer_than < 0:
            raise
        return None
    return found if found is not None and found > newer_than else None


def read_weights(run: Path, ema: bool, step: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and info of the newest valid checkpoint of a run, in one process, without building its optimizer.
    `step`: read this checkpoint instead, which is known to be valid."""
    checkpoints = of_run(run)
    step = checkpoints.newest_valid() if step is None else step
    require(step is not None, f"{run} holds no checkpoint yet")
    assert step is not None
    info = checkpoints.read_info(step)
    check_state(info, str(checkpoints.path(step) / STATE))
    saved = SavedTensors(checkpoints.path(step))
    part = "ema." if ema and any(name.startswith("ema.") for name in saved.tensors) else "model."
    weights = {name.removeprefix(part): saved.tensor(name) for name in saved.tensors if name.startswith(part)}
    return weights, info


def brief(error: BaseException) -> str:
    """The root cause of an error, in one line."""
    causes: Iterable[Any] = getattr(error, "failures", {}).values()
    for cause in causes:
        error = cause[0] if isinstance(cause, tuple) else cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

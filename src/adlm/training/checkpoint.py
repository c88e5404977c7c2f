"""Checkpoints that survive: atomic, checksummed, resumable on another number of ranks.

A checkpoint is a folder `checkpoints/step-00001000` with the tensors of every stateful part (written by
torch.distributed.checkpoint, so ranks may change), `state.json` (step, best bound, counters) and `manifest.json` (size
and SHA-256 of every file). It is written under another name and renamed when complete, so a kill at any moment leaves
the older ones untouched. A corrupt one is noticed by its checksums and the one before it is used. With checkpoint.url
the folder is a place to write in and read from, and the checkpoints are kept there (storage.py).
"""

import json
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
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
from adlm.io.paths import absolute_paths, check_object, checkpoint_steps, read_json, sync_folder
from adlm.migration import migrate_tree
from adlm.schema import CheckpointConfig, DataConfig, ReasonConfig
from adlm.training.optim import Ema, GradientGuard, state_of
from adlm.training.parallel import Step, World
from adlm.training.storage import STATE, described, problem_of, remote, seal
from adlm.training.watch import note

# what one process is, and no reason to worry
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

RESUMED_FIELDS = {
    "window": dict, "ema_n": int, "best": float, "best_step": int, "bound": float, "extra": dict, "data": dict,
    "decay_all": bool, "ranks": int, "saved": float,
}  # fmt: skip
SECTIONS = ("model", "noise", "objective", "data", "optim", "train")
State = dict[str, dict[str, Tensor]]


def tensors(step: Step, optimizers: list[torch.optim.Optimizer], ema: Ema, guard: GradientGuard) -> State:
    """Every tensor a resumed run needs, by name: of the weights those that train. Fresh optimizers get their (zero)
    state here, so that the same call describes what to save and where to load."""
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
        """Where the files of a checkpoint are read: those of a URL where this node has fetched them to."""
        folder = self.folder / f"partial-of-{socket.gethostname()}" if self.remote else self.folder
        return folder / f"step-{step:08d}"

    # Ranks

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is on one of them; beside training, unlike `World.any`."""
        if self.world.beside is None:
            return flag
        answer = torch.tensor(float(flag))
        dist.all_reduce(answer, group=self.world.beside)
        return bool(answer)

    def together(self, do: Callable[[], None], here: bool = True) -> None:
        """Something that the ranks do where `here` is true. If it fails on one it has failed on all: none is left
        waiting for the others."""
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

        `wait=False` returns when everything is copied to the host's memory, and a thread does the rest, which takes
        many times as long; what fails there is reported at the next call.
        """
        self.finish_writing()
        if self.any(self.world.is_main and info["step"] in self.steps()):
            return
        if wait:
            self.write(state, info)
            return
        copy = {part: {name: x.to("cpu", copy=True) for name, x in xs.items()} for part, xs in state.items()}
        # with several ranks it may wait for one that is gone: Python's end must not wait for that
        alone = self.world.beside is None
        self.writing = threading.Thread(target=self.write_beside, args=(copy, info), daemon=not alone)
        self.writing.start()

    def write(self, state: State, info: dict[str, Any]) -> None:
        """Write under another name, rename when complete, remove what need not be kept; all ranks call it."""
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
            dcp.save(state, checkpoint_id=partial, process_group=self.world.beside)  # what fails on one fails on all
            self.together(check_own)
            self.gather(entries)
            self.together(complete, here=self.world.is_main)
            if self.remote and self.is_first_of_node:
                shutil.rmtree(partial, ignore_errors=True)
        except (OSError, dcp.CheckpointException) as error:
            free = shutil.disk_usage(self.folder.parent).free  # torch's own words for a full disk may not mention it
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"checkpoint of step {step} could not be written to {self.place}"
                f" ({free / 2**20:,.0f} MiB free): {brief(error)}"
            ) from None

    def gather(self, entries: dict[str, dict[str, Any]]) -> None:
        """Give the first rank what all ranks have found out about their files."""
        if self.world.beside is None:
            return
        found: list[Any] | None = [None] * self.world.size if self.world.is_main else None
        dist.gather_object(entries, found, dst=0, group=self.world.beside)
        for others in found or ():
            entries.update(others)

    def write_beside(self, *what: Any) -> None:
        """Write in a thread; a failure is kept for whoever comes back."""
        try:
            self.write(*what)
        except Exception as error:
            self.failure = error

    def finish_writing(self, patience: float | None = None) -> None:
        """Wait until the last checkpoint is complete, or tell what became of it. `patience`: seconds to wait."""
        if self.writing is not None:
            self.world.at("waiting for the last checkpoint to be complete", waits=True)
            self.writing.join(patience)
        if self.failure is not None and self.world.is_main:
            note(f"warning: {self.failure}; training continues")
        self.writing = self.failure = None

    def prune(self, best_step: int | None) -> None:
        """Keep the newest `keep`, and the best."""
        for step in self.steps()[: -self.cfg.keep]:
            if step == best_step:
                continue
            if self.remote:
                self.remote.remove(step)
                continue
            with suppress(OSError):  # a checkpoint too many is no failure
                gone = self.path(step).rename(self.folder / f"partial-{self.path(step).name}")
                shutil.rmtree(gone, ignore_errors=True)

    # Reading

    def problem(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint, fetched first if need be; None if nothing."""
        if self.remote:
            self.remote.fetch(step, self.path(step))
        return problem_of(self.path(step))

    def newest_valid(self, set_aside: bool = False) -> int | None:
        """The newest step whose files are what they were when written; None if there is no checkpoint at all.
        `set_aside`: corrupt ones are moved out of the way, so that their steps can be saved again; for a run that
        trains, not for readers."""
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
        """What `save` was given beside the tensors, as this version names it. `resumed`: sections that
        the run reads which resumes from here."""
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
    """torch's reader of a checkpoint, with every pickle in it read as data: a foreign folder runs nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.saved = SavedTensors(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch would have unpickled, made of checked names and numbers."""
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
    """Refuse a state that does not say what model it is of."""
    check_object(info, {"tokenizer": str}, {}, source)
    check_object(info["config"], {"algo": str} | dict.fromkeys(SECTIONS, dict), {}, f"{source}: config")


def of_run(run: Path) -> Checkpoints:
    """The checkpoints of a run, for a reader in one process."""
    return Checkpoints(run, CheckpointConfig(), World(0, 1, torch.device("cpu"), "fp32", "none"))


def newest_step(run: Path, newer_than: float) -> int | None:
    """The step of the newest valid checkpoint of a run, if it is newer than a given step (-1: than none)."""
    try:
        found = of_run(run).newest_valid()
    except ValueError:  # all of them are corrupt
        if newer_than < 0:
            raise
        return None
    return found if found is not None and found > newer_than else None


def read_weights(run: Path, ema: bool, step: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of the newest valid checkpoint of a run, in one process, without building its optimizer. `step`: of a
    checkpoint that is known to be valid."""
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
    """The root of an error in one line."""
    causes: Iterable[Any] = getattr(error, "failures", {}).values()
    for cause in causes:
        error = cause[0] if isinstance(cause, tuple) else cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

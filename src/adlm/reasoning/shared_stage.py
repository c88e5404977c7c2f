"""The weights after the first stage, kept for other runs: staged methods begin alike, with plain chain of thought.

Everything random is a function of (seed, step) and each stage starts with fresh moments, so a run that takes these
weights over ends as if it had trained its first stage itself. A file is named by a digest of all that they depend on.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
from safetensors.torch import save
from torch import Tensor

from adlm.errors import require
from adlm.io.paths import path_of, write_atomically
from adlm.schema import Config
from adlm.training.parallel import World
from adlm.training.run import Run
from adlm.training.watch import note

if TYPE_CHECKING:
    from adlm.reasoning.training import ReasoningSetup

GUARD, PREFIX = "guard", "model."


class KeptStage(NamedTuple):
    """What is read back."""

    weights: dict[str, Tensor]
    guard: Tensor
    step: int
    stages: list[dict[str, Any]]
    """Validations of the first stage."""

    def resume(self, run: Run) -> None:
        """Let a run that has these weights go on behind the first stage."""
        run.guard.restore(self.guard)
        run.step, run.extra = self.step, {"stages": self.stages}
        note(f"the first stage is taken over: step {self.step}")


class SharedStage(NamedTuple):
    path: Path

    @classmethod
    def of(cls, cfg: Config, setup: "ReasoningSetup", ranks: World, sorted_batches: int) -> "SharedStage":
        """The file of a run's first stage. `sorted_batches`: how many are sorted together."""
        require(
            cfg.optim.ema == 0, f"reason.stage0 keeps weights without their EMA: optim.ema={cfg.optim.ema} must be 0"
        )
        schedule, reason = setup.schedule, cfg.reason
        plan = schedule.plans[0]
        depends_on = {
            "seed": cfg.seed,
            "model": asdict(cfg.model),
            "optim": asdict(cfg.optim),
            "batch": (cfg.train.global_batch_size, cfg.train.batch_size, sorted_batches),
            "precision": ranks.precision,
            "base": reason.base,
            "stories": reason.story_steps,
            "tokenizer": setup.tokenizer.fingerprint,
            "examples": setup.fingerprints()["train"],
            "plan": (plan.slots, plan.removed, plan.anchored and plan.slots > 0, plan.fed_back),
            "steps": schedule.within_stage(0)[1],
            "epoch": (schedule.n, schedule.per_epoch),
        }
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        return cls(path_of(reason.stage0) / f"stage0-{digest}.safetensors")

    def read(self) -> KeptStage | None:
        """The weights, if some run has left them."""
        if not self.path.is_file():
            return None
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                facts = json.loads(file.metadata()["run"])
            guard = found.pop(GUARD)
            weights = {name.removeprefix(PREFIX): value for name, value in found.items()}
            return KeptStage(weights, guard, facts["step"], facts["stages"])
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{self.path} cannot be read ({error}): remove it, or give another reason.stage0"
            ) from None

    def write(self, run: Run) -> None:
        """Keep the weights of a run at the end of its first stage, unless they are there."""
        if self.path.is_file():
            return
        state = run.module.model.state_dict()
        tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
        facts = {"run": json.dumps({"step": run.step, "stages": run.extra["stages"]})}
        content = save(tensors | {GUARD: run.guard.state().cpu()}, metadata=facts)
        write_atomically(self.path, lambda file: file.write(content))

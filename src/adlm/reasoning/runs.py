"""Reasoning runs on disk: the exported network with the settings of its last stage, its answers and its results.

The end of the module stores the first stage, which is the same for several methods.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import require
from adlm.io import export
from adlm.io.load import is_released
from adlm.io.paths import check_object, path_of, read_json, write_atomically
from adlm.reasoning.answers import Accuracy, Answerer, Reply, score
from adlm.reasoning.logic import is_guessed
from adlm.reasoning.methods import Example, encode, plans_of
from adlm.reasoning.networks import SAFELY, HuggingFaceNetwork, OwnNetwork
from adlm.reasoning.tasks import task_of
from adlm.schema import Config, DataConfig, ReasonConfig
from adlm.training.parallel import World
from adlm.training.run import Run
from adlm.training.watch import note

if TYPE_CHECKING:
    from adlm.reasoning.training import ReasoningSetup


EXPORT, RESULTS, SETTINGS = "export", "results.json", "reason.json"
UNGUESSED = ", not guessed"
"""Suffix for the questions of a test set that the rule "the deeper candidate" gets wrong or cannot decide."""


class LoadedRun(NamedTuple):
    network: OwnNetwork | HuggingFaceNetwork
    tokenizer: Tokenizer
    reason: ReasonConfig
    data: DataConfig
    seed: int
    stage: int
    """The stage whose layout is used for questions."""
    max_new_tokens: int
    """Most tokens of an answer."""

    def answerer(self, batch_size: int = 0) -> Answerer:
        """An answerer with the layout of its stage."""
        plan, task = plans_of(self.reason)[self.stage], task_of(self.reason)
        how = self.max_new_tokens, batch_size, self.reason.anchor_tokens
        return Answerer(self.network, self.tokenizer, task, plan, *how)


def export_run(run: Path, cfg: Config, network: Any, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """Write run/export: the network in its own format, and reason.json with the settings for asking it."""
    folder = run / EXPORT
    if isinstance(network, OwnNetwork):
        own = replace(cfg, model=network.model.config)  # a released base has settings other than the section model
        parameters = sum(p.numel() for p in network.parameters())
        info = export.describe(own, tokenizer, parameters=parameters, step=facts["step"])
        export.save_folder(folder, network.model.state_dict(), tokenizer, info)
    else:
        network.model.save_pretrained(folder)
        tokenizer.save(folder / export.TOKENIZER)
    data = {"path": cfg.data.path, "valid_path": cfg.data.valid_path}
    settings = {"format": export.FORMAT, "reason": asdict(cfg.reason), "data": data, "seed": cfg.seed, **facts}
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))


def load_run(path: str, device: torch.device) -> LoadedRun:
    """The exported network of a run folder (or of an export folder itself)."""
    folder = Path(path) / EXPORT if (Path(path) / EXPORT).is_dir() else Path(path)
    require((folder / SETTINGS).is_file(), f"{path} is not a finished reasoning run: {folder / SETTINGS} is missing")
    fields = {"reason": dict, "seed": int, "stage": int, "max_new_tokens": int}
    settings = check_object(read_json(folder / SETTINGS), fields, {}, str(folder / SETTINGS))
    saved = {name: settings[name] for name in ("reason", "data") if name in settings}
    found = export.sections(saved, str(folder / SETTINGS))
    reason, data = found["reason"], found.get("data", DataConfig())
    stages = len(plans_of(reason))
    require(0 <= settings["stage"] < stages, f"{folder / SETTINGS}: stage={settings['stage']} of {stages} stages")
    if is_released(folder):
        from transformers import AutoModelForCausalLM

        tokenizer = load_tokenizer(str(folder / export.TOKENIZER))
        network: Any = HuggingFaceNetwork(
            AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **SAFELY).float()
        )
    else:
        loaded = export.load_folder(folder)
        network, tokenizer = OwnNetwork(loaded.model), loaded.tokenizer
    return LoadedRun(
        network.to(device).eval(),
        tokenizer,
        reason,
        data,
        *(settings[name] for name in ("seed", "stage", "max_new_tokens")),
    )


def write_answers(run: Path, name: str, examples: list[Example], replies: list[Reply], answerer: Answerer) -> None:
    """Write answers-<set>.jsonl: every question with the model's text and whether it is correct, for reading and for
    comparing two runs question by question."""
    lines = []
    for example, reply in zip(examples, replies):
        line = {"question": example.question, "answer": example.answer, "written": reply.text}
        anchors = {"anchors": answerer.anchor_words(reply)} if reply.slots else {}
        lines.append(json.dumps(line | {"correct": reply.correct} | anchors, ensure_ascii=False) + "\n")
    write_atomically(run / f"answers-{name}.jsonl", "".join(lines))


def read_answers(run: str | Path) -> dict[str, dict[str, bool]]:
    """Test set -> question -> whether the run answered it correctly. Answers of earlier versions are left out: they do
    not have this."""
    found = {}
    for path in sorted(Path(run).glob("answers-*.jsonl")):
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
            right = {line["question"]: line["correct"] for line in lines if "correct" in line}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} holds no answers ({error}); `adlm reason eval {run}` writes it anew") from None
        if right:
            found[path.stem.removeprefix("answers-")] = right
    return found


def ask_tests(
    run: Path, answerer: Answerer, tests: dict[str, list[Example]], ranks: World, say: Callable[[str], None]
) -> dict[str, dict[str, float | int]]:
    """Answer test questions, write the answers to the run's folder, and return the facts of every accuracy. If a blind
    rule answers some questions of a set, the other questions get a separate accuracy."""
    found: dict[str, Accuracy] = {}
    for name, examples in tests.items():
        answerer.check_room(encode(examples, answerer.tokenizer), f"test set {name}")
        found[name], replies = answerer.answer(examples, ranks)
        write_answers(run, name, examples, replies, answerer)
        is_hard = [answerer.task.is_logic and not is_guessed(example) for example in examples]
        if 0 < sum(is_hard) < len(examples):
            found[name + UNGUESSED] = score([reply for reply, hard in zip(replies, is_hard) if hard])
    for name, accuracy in found.items():
        say(f"test {name}: {accuracy}")
    return {name: accuracy.facts() for name, accuracy in found.items()}


def write_results(run: Path, results: dict[str, Any]) -> None:
    write_atomically(run / RESULTS, json.dumps(results, indent=1))


def read_results(run: str | Path) -> dict[str, Any]:
    """Read results.json, with today's names of task and method. Earlier versions called every shape of ProsQA prosqa;
    the settings of the export tell them apart."""
    path = Path(run) / RESULTS
    require(path.is_file(), f"{run} holds no {RESULTS}: train it to the end, or evaluate it first")
    fields = {"task": str, "method": str, "network": str, "stage": int, "finished": bool, "valid": dict, "tests": dict}
    results = check_object(read_json(path), fields, {}, str(path))
    scores = {"n": int, "accuracy": float, "low": float, "high": float, "tokens": float}
    for name, found in {"valid": results["valid"], **results["tests"]}.items():
        check_object(found, scores, {}, f"{path}: {name}")
    settings = Path(run) / EXPORT / SETTINGS
    if settings.is_file():
        try:
            reason = export.section(ReasonConfig, read_json(settings)["reason"])
            results |= {"task": reason.task, "method": reason.method}
        except (ValueError, KeyError, TypeError):
            results["task"] += " (of another version)"
    return results


# ---- the first stage, shared by runs ---------------------------------------------------------------------------------
# The weights after the first stage, stored for other runs: all staged methods begin with plain chain of thought.
#
# Everything random is a function of (seed, step), and each stage starts with new optimizer moments, so a run that loads
# these weights ends as if it had trained its first stage itself. The file name is a digest of all that they depend on.

GUARD, PREFIX = "guard", "model."


class KeptStage(NamedTuple):
    """The contents of a file."""

    weights: dict[str, Tensor]
    guard: Tensor
    step: int
    stages: list[dict[str, Any]]
    """Validations of the first stage."""

    def resume(self, run: Run) -> None:
        """Let a run with these weights continue after the first stage."""
        run.guard.restore(self.guard)
        run.step, run.extra = self.step, {"stages": self.stages}
        note(f"the first stage is taken over: step {self.step}")


class SharedStage(NamedTuple):
    path: Path

    @classmethod
    def of(cls, cfg: Config, setup: "ReasoningSetup", ranks: World, sorted_batches: int) -> "SharedStage":
        """The file of a run's first stage. `sorted_batches`: how many batches are sorted together."""
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
            "device": (ranks.device.type, ranks.compile),
            "base": reason.base,
            "stories": (reason.story_steps, setup.task.story_lr_ratio),
            "tokenizer": setup.tokenizer.fingerprint,
            "examples": setup.fingerprints()["train"],
            "plan": (plan.slots, plan.removed, plan.anchored and plan.slots > 0, plan.fed_back),
            "steps": schedule.within_stage(0)[1],
            "epoch": (schedule.n, schedule.per_epoch),
        }
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        return cls(path_of(reason.stage0) / f"stage0-{digest}.safetensors")

    def read(self) -> KeptStage | None:
        """The weights, if a run has stored them."""
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
        """Store the weights of a run at the end of its first stage, unless the file exists."""
        if self.path.is_file():
            return
        state = run.module.model.state_dict()
        tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
        facts = {"run": json.dumps({"step": run.step, "stages": run.extra["stages"]})}
        content = save(tensors | {GUARD: run.guard.state().cpu()}, metadata=facts)
        write_atomically(self.path, lambda file: file.write(content))

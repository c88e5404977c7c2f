"""A trained network that answers: how it is asked and graded, how sure an accuracy is, and how it is kept on disk."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import require
from adlm.io import export
from adlm.io.paths import check_object, read_json, write_atomically
from adlm.reasoning.examples import Example, written_answer
from adlm.reasoning.methods import StagePlan, encode, lay_out, markers_of, plans_of
from adlm.reasoning.networks import (
    SAFELY,
    HuggingFaceNetwork,
    OwnNetwork,
    PaddedSequences,
    ReasoningNetwork,
    pad_sequences,
    read_sequences,
)
from adlm.reasoning.tasks import ReasoningTask
from adlm.schema import Config, ReasonConfig
from adlm.training.parallel import World

TOGETHER = 128
"""Questions answered together where eval.batch_size does not say how many."""
EXPORT, RESULTS, SETTINGS = "export", "results.json", "reason.json"


class Accuracy(NamedTuple):
    """How a network did on a set of questions."""

    n: int
    correct: int
    tokens: float
    """Sequential steps per answer: tokens written (without end of text) and continuous thoughts."""
    unfinished: int
    """Texts that had not ended when there was no room left."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.n)
        return (
            f"accuracy {100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}, {self.correct} of {self.n}),"
            f" {self.tokens:.1f} tokens per answer"
        )

    def facts(self) -> dict[str, float | int]:
        low, high = wilson(self.correct, self.n)
        return {
            "n": self.n,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "tokens": self.tokens,
            "unfinished": self.unfinished,
        }


def wilson(correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction: sensible at 0 and n right answers, where the usual one has no width."""
    p, zz = correct / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))


@torch.inference_mode()
def generate(
    network: ReasoningNetwork, prompts: PaddedSequences, max_new_tokens: int, eos_id: int, mask_id: int
) -> list[list[int]]:
    """The most probable continuation of every prompt, token by token, with the end of text if it is reached."""
    B, device = len(prompts.tokens_BL), prompts.tokens_BL.device
    room = network.longest - int(prompts.length_B.max())
    steps = min(max_new_tokens, room)
    memory = network.remember(B, min(network.longest, prompts.tokens_BL.shape[1] + steps), gradients=False)
    each_B, one_B = torch.arange(B, device=device), torch.ones_like(prompts.length_B)
    hidden_BD = read_sequences(network, prompts, memory)[each_B, prompts.length_B - 1]
    ended_B = torch.zeros(B, dtype=torch.bool, device=device)
    written = []
    for step in range(steps):
        logits_BV = network.head(hidden_BD).float()
        logits_BV[:, mask_id] = -torch.inf
        token_B = logits_BV.argmax(-1).masked_fill(ended_B, eos_id)
        written.append(token_B)
        ended_B = ended_B | (token_B == eos_id)
        if step + 1 == steps or bool(ended_B.all()):
            break
        hidden_BD = network.read(network.embed(token_B[:, None]), memory, one_B)[:, 0]
    if not written:
        return [[] for _ in range(B)]
    texts = torch.stack(written, dim=1).tolist()
    return [text[: text.index(eos_id) + 1] if eos_id in text else text for text in texts]


@dataclass
class Answerer:
    """A network, and how a stage of its method asks it."""

    network: Any
    tokenizer: Tokenizer
    task: ReasoningTask
    plan: StagePlan
    max_new_tokens: int
    batch_size: int = 0
    """Questions answered together; 0: TOGETHER."""

    def answer(self, examples: list[Example], ranks: World) -> tuple[Accuracy, list[str]]:
        """Answer every question; the accuracy and what was written, in the order of the examples."""
        was_training = self.network.training
        self.network.eval()
        markers, eos_id, mask_id = markers_of(self.tokenizer), self.tokenizer.eos_id, self.tokenizer.mask_id
        layouts = [lay_out(example, self.plan, markers) for example in encode(examples, self.tokenizer)]
        order = sorted(range(len(layouts)), key=lambda i: layouts[i].prompt)  # like lengths together: less padding
        written: list[list[int]] = [[] for _ in layouts]
        together = self.batch_size or TOGETHER
        for start in range(0, len(order), together):
            part = order[start : start + together]
            prompts = [layouts[i].tokens[: layouts[i].prompt] for i in part]
            padded = pad_sequences(prompts, [layouts[i].slots for i in part], self.plan.fed_back, ranks.device)
            with ranks.autocast():
                answers = generate(self.network, padded, self.max_new_tokens, eos_id, mask_id)
            for i, answer in zip(part, answers):
                written[i] = answer
        self.network.train(was_training)
        ended = [tokens[-1:] == [eos_id] for tokens in written]
        texts = [self.tokenizer.decode(tokens, skip_special=True) for tokens in written]
        correct = 0
        for text, example in zip(texts, examples):
            answer = written_answer(text)
            correct += answer is not None and self.task.same_answer(answer, example.answer)
        thoughts = self.plan.slots if self.plan.fed_back else 0
        tokens = (sum(map(len, written)) - sum(ended)) / len(written) + thoughts
        return Accuracy(len(examples), correct, tokens, ended.count(False)), texts


# Runs on disk


class LoadedRun(NamedTuple):
    network: OwnNetwork | HuggingFaceNetwork
    tokenizer: Tokenizer
    reason: ReasonConfig
    seed: int
    stage: int
    """The stage as which its questions are asked."""
    max_new_tokens: int


def export_run(run: Path, cfg: Config, network: Any, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """run/export: the network in its own format, and reason.json, which says how it wants to be asked."""
    folder = run / EXPORT
    if isinstance(network, OwnNetwork):
        info = export.describe(
            cfg, tokenizer, parameters=sum(p.numel() for p in network.parameters()), step=facts["step"]
        )
        export.save_folder(folder, network.model.state_dict(), tokenizer, info)
    else:
        network.model.save_pretrained(folder)
        tokenizer.save(folder / export.TOKENIZER)
    settings = {"format": export.FORMAT, "reason": asdict(cfg.reason), "seed": cfg.seed, **facts}
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))


def load_run(path: str, device: torch.device) -> LoadedRun:
    """The exported network of a run folder (or of an export folder itself)."""
    folder = Path(path) / EXPORT if (Path(path) / EXPORT).is_dir() else Path(path)
    require((folder / SETTINGS).is_file(), f"{path} is not a finished reasoning run: {folder / SETTINGS} is missing")
    fields = {"reason": dict, "seed": int, "stage": int, "max_new_tokens": int}
    settings = check_object(read_json(folder / SETTINGS), fields, {}, str(folder / SETTINGS))
    reason = export.section(ReasonConfig, settings["reason"], str(folder / SETTINGS))
    stages = len(plans_of(reason))
    require(0 <= settings["stage"] < stages, f"{folder / SETTINGS}: stage={settings['stage']} of {stages} stages")
    if reason.base:
        from transformers import AutoModelForCausalLM

        tokenizer = load_tokenizer(str(folder / export.TOKENIZER))
        network: Any = HuggingFaceNetwork(
            AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **SAFELY).float()
        )
    else:
        loaded = export.load_folder(folder)
        network, tokenizer = OwnNetwork(loaded.model), loaded.tokenizer
    return LoadedRun(
        network.to(device).eval(), tokenizer, reason, settings["seed"], settings["stage"], settings["max_new_tokens"]
    )


def write_results(run: Path, results: dict[str, Any]) -> None:
    write_atomically(run / RESULTS, json.dumps(results, indent=1))


def read_results(run: str | Path) -> dict[str, Any]:
    """results.json, with the task as it is called today: earlier versions called every shape of ProsQA prosqa, and what
    tells them apart is in the settings of the export."""
    path = Path(run) / RESULTS
    require(path.is_file(), f"{run} holds no {RESULTS}: train it to the end, or evaluate it first")
    fields = {"task": str, "method": str, "network": str, "stage": int, "finished": bool, "valid": dict, "tests": dict}
    results = check_object(read_json(path), fields, {}, str(path))
    scores = {"n": int, "accuracy": float, "low": float, "high": float, "tokens": float}
    for name, score in {"valid": results["valid"], **results["tests"]}.items():
        check_object(score, scores, {}, f"{path}: {name}")
    settings = Path(run) / EXPORT / SETTINGS
    if settings.is_file():
        try:
            results["task"] = export.section(ReasonConfig, read_json(settings)["reason"]).task
        except (ValueError, KeyError, TypeError):
            results["task"] += " (of another version)"
    return results

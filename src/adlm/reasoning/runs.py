"""A reasoning run on disk: how its network is built, exported, loaded again, and what its results file holds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adlm.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from adlm.errors import require
from adlm.io import export
from adlm.models import build_model
from adlm.reasoning.examples import Example, parts, whole_text
from adlm.reasoning.methods import add_markers
from adlm.reasoning.networks import HuggingFaceNetwork, OwnNetwork, load_hugging_face
from adlm.schema import Config, ReasonConfig

EXPORT, RESULTS, SETTINGS = "export", "results.json", "reason.json"
VOCABULARY = 1024


class Run(NamedTuple):
    network: OwnNetwork | HuggingFaceNetwork
    tokenizer: Tokenizer
    reason: ReasonConfig
    seed: int
    stage: int
    """The stage whose plan its questions are laid out by."""
    max_new_tokens: int


def build(cfg: Config, train: list[Example]) -> tuple[OwnNetwork | HuggingFaceNetwork, Tokenizer]:
    """The network before its first step, and its tokenizer with the markers."""
    torch.manual_seed(cfg.seed)
    if cfg.reason.base:
        return load_hugging_face(cfg.reason.base, add_markers)
    if cfg.data.tokenizer:
        tokenizer = load_tokenizer(cfg.data.tokenizer, map(whole_text, train), cfg.data.root)
    else:
        tokenizer = word_tokenizer(train)
    tokenizer = add_markers(tokenizer)
    return OwnNetwork(build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)), tokenizer


def word_tokenizer(train: list[Example]) -> Tokenizer:
    """A BPE of the training examples. A word is one token wherever it stands, also at the start of a question or a
    step: else a network from scratch must learn for every name that "Tom" and " Tom" are the same."""
    return train_bpe((text for example in train for text in parts(example)), VOCABULARY, prefix_space=True)


def export_run(run: Path, cfg: Config, network: Any, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """run/export: the network in its own format, and reason.json, which says how it wants to be asked."""
    folder = run / EXPORT
    if isinstance(network, OwnNetwork):
        info = export.describe(cfg, tokenizer, parameters=parameter_count(network), step=facts["step"])
        export.save_folder(folder, network.model.state_dict(), tokenizer, info)
    else:
        network.model.save_pretrained(folder)
        tokenizer.save(folder / export.TOKENIZER)
    settings = {"format": export.FORMAT, "reason": asdict(cfg.reason), "seed": cfg.seed, **facts}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1))


def load_run(path: str, device: torch.device) -> Run:
    """The exported network of a run folder (or of an export folder itself)."""
    folder = Path(path) / EXPORT if (Path(path) / EXPORT).is_dir() else Path(path)
    require((folder / SETTINGS).is_file(), f"{path} is not a finished reasoning run: {folder / SETTINGS} is missing")
    settings = json.loads((folder / SETTINGS).read_text())
    reason = export.section(ReasonConfig, settings["reason"])
    if reason.base:
        from transformers import AutoModelForCausalLM

        tokenizer = load_tokenizer(str(folder / export.TOKENIZER))
        network: Any = HuggingFaceNetwork(AutoModelForCausalLM.from_pretrained(folder).float())
    else:
        loaded = export.load_folder(folder)
        network, tokenizer = OwnNetwork(loaded.model), loaded.tokenizer
    return Run(
        network.to(device).eval(), tokenizer, reason, settings["seed"], settings["stage"], settings["max_new_tokens"]
    )


def parameter_count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def write_results(run: Path, results: dict[str, Any]) -> None:
    (run / RESULTS).write_text(json.dumps(results, indent=1))


def read_results(run: str | Path) -> dict[str, Any]:
    path = Path(run) / RESULTS
    require(path.is_file(), f"{run} holds no {RESULTS}: train it to the end, or evaluate it first")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None

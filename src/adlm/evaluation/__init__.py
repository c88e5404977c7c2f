"""Measurements of models, by command.

ppl        perplexity.py: bounds and likelihoods of a corpus; intervals.py: their errors
zeroshot   the same on eight public data sets, beside published values
evaluate   evaluate.py: samples over a sweep of settings; judge.py: a causal model that scores them; measures.py: all
           metrics of the samples; evaluate_report.py: the page with the frontiers
anchors    anchors.py: the predictions of both networks at hidden anchors, and the page that shows them
           (the demo's page shows the same)
lm-eval    harness.py: our models in lm-evaluation-harness

This file writes result files and what each contains to make its numbers repeatable: model, data and versions.
`adlm compare` is in adlm/compare.py, since it also trains.
"""

import contextlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adlm.data.blocks import Blocks
from adlm.io.export import Loaded
from adlm.io.load import SMOLLM2, locate
from adlm.io.paths import BOX, BOX_NAME, write_atomically
from adlm.models.network import parameter_count

PACKAGES = (
    "adlm", "torch", "numpy", "tokenizers", "safetensors", "datasets", "transformers", "mauve-text", "faiss-cpu",
    "scikit-learn", "gguf",
)  # fmt: skip


def versions(device: torch.device) -> dict[str, str]:
    """Versions of Python and of the packages that results may depend on, and the device."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return found | {"device": kind}


def data_facts(blocks: Blocks) -> dict[str, Any]:
    """What identifies the sequences: a fingerprint of source contents, reader, detokenizer, tokenizer and packing."""
    m = blocks.manifest
    detokenizer, detokenizer_version = m["origin"]["detokenizer"]
    return {
        "corpus": m["corpus"],
        "split": m["split"],
        "fingerprint": m["fingerprint"],
        "contents": m["origin"]["contents"],
        "files": m["files"],
        "detokenizer": detokenizer,
        "detokenizer_version": detokenizer_version,
        "tokenizer": m["tokenizer"],
        "packing": m["packing"],
        "row_length": blocks.length,
        "rows": len(blocks),
        "corpus_documents": m["documents"],
        "corpus_tokens": m["tokens"],
    }


def model_facts(loaded: Loaded, checkpoint: str, ema: bool) -> dict[str, Any]:
    """What identifies the model; `checkpoint` and `ema` are as the user gave them."""
    info = loaded.info
    return {
        "checkpoint": checkpoint or BOX_NAME,
        "algo": info["algo"],
        "step": info.get("step"),
        "parameters": parameter_count(loaded.model),
        "vocab_size": info["vocab_size"],
        "length": loaded.model.config.length,
        "weights": "averaged" if ema else "raw",
        "tokenizer": loaded.tokenizer.fingerprint,
    }


def result_path(out: str, checkpoint: str, name: str) -> Path:
    """The file of a result: `out` if that is FILE.json; else `name` in the folder `out`, or beside the checkpoint."""
    if out.endswith(".json"):
        return Path(out)
    place = Path(out) if out else beside(checkpoint)
    return (place.parent if place.is_file() else place) / name


def beside(checkpoint: str) -> Path:
    """The path beside which results of a checkpoint are written: its own folder or file. For a model in a package,
    which may be read-only and is replaced by the next version: runs/box or runs/smollm2 in the current folder."""
    place = locate(checkpoint)
    if place == BOX:
        return Path("runs") / BOX_NAME
    return Path("runs") / SMOLLM2 if checkpoint == SMOLLM2 and not Path(SMOLLM2).exists() else place


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON. A failure does not raise: the caller still returns the result."""
    try:
        write_atomically(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        print(f"warning: {path} cannot be written ({error.strerror}); give out=FILE", file=sys.stderr)

"""What a result must carry to be repeated: data hashes, settings, versions; and the file it is written to."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adlm.data import Blocks
from adlm.io.export import Loaded
from adlm.io.paths import write_atomically
from adlm.training.setup import parameter_count

PACKAGES = (
    "adlm", "torch", "numpy", "tokenizers", "safetensors", "datasets", "transformers", "mauve-text", "faiss-cpu",
    "scikit-learn", "gguf",
)  # fmt: skip


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return found | {"device": kind}


def data_facts(blocks: Blocks) -> dict[str, Any]:
    """Which rows these are: a fingerprint over source contents, reader, detokenizer, tokenizer and packing."""
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
    info = loaded.info
    return {
        "checkpoint": checkpoint,
        "algo": info["algo"],
        "step": info.get("step"),
        "parameters": parameter_count(loaded.model),
        "vocab_size": info["vocab_size"],
        "length": loaded.model.config.length,
        "weights": "averaged" if ema else "raw",
        "tokenizer": loaded.tokenizer.fingerprint,
    }


def result_path(out: str, checkpoint: str, name: str) -> Path:
    """eval.out, else `name` in the checkpoint's folder (beside a file)."""
    if out:
        return Path(out)
    place = Path(checkpoint)
    return (place if place.is_dir() else place.parent) / name


def write_result(path: Path, result: dict[str, Any]) -> None:
    """A result that cannot be written is still returned: a read-only checkpoint is no reason to lose it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        print(f"warning: {path} cannot be written ({error.strerror}); give eval.out", file=sys.stderr)

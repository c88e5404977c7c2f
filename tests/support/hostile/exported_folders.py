"""Exported folders: their settings, their weights, and links to what is no file."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hostile.cases import base, case, cases, sample


def exported(folder: Path) -> Path:
    shutil.copytree(base().export, folder / "model")
    return folder / "model"


def config_with(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    model = exported(folder)
    config = json.loads((model / "config.json").read_text())
    found = change(config)
    text = found if isinstance(found, str | bytes) else json.dumps(config)
    (model / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return sample(model)


def setting(part: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[part].update({key: value})


CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "[]": lambda config: "[]",
    "{}": lambda config: "{}",
    "null": lambda config: "null",
    "empty": lambda config: "",
    "deep": lambda config: "[" * 100_000,
    "deep tables": lambda config: '{"a":' * 100_000,
    "not UTF-8": lambda config: b"\xff\xfe{}",
    "5 MB": lambda config: " " * 5_000_000,
    "an integer of 10,000 digits": lambda config: '{"format": ' + "1" * 10_000 + "}",
    "an algo 900 deep": lambda config: json.dumps(config).replace('"test"', "[" * 900 + "]" * 900),
    "a width 900 deep": lambda config: json.dumps(config).replace(
        '"hidden_size": 16', '"hidden_size": ' + "[" * 900 + "]" * 900
    ),
    "format 2": lambda config: config.update(format=2),
    "format true": lambda config: config.update(format=True),
    "no vocab_size": lambda config: config.pop("vocab_size"),
    "no model": lambda config: config.pop("model"),
    "no noise": lambda config: config.pop("noise"),
    "algo 5": lambda config: config.update(algo=5),
    "a model that is a number": lambda config: config.update(model=3),
    "an objective that is a list": lambda config: config.update(objective=[]),
    "a vocabulary of 10^12": lambda config: config.update(vocab_size=10**12),
    "vocab_size true": lambda config: config.update(vocab_size=True),
    "new_tokens -5": lambda config: config.update(new_tokens=-5),
    "mask_id -1": lambda config: config.update(mask_id=-1),
    "mask_id 1.5": lambda config: config.update(mask_id=1.5),
    "a width of 40,000": setting("model", "hidden_size", 40_000),
    "a width of 10^15": setting("model", "hidden_size", 10**15),
    "a width of 2^70": setting("model", "hidden_size", 2**70),
    "a width that is a text": setting("model", "hidden_size", "16"),
    "a width that is nan": setting("model", "hidden_size", float("nan")),
    "a million blocks": setting("model", "n_blocks", 10**6),
    "20 blocks": setting("model", "n_blocks", 20),
    "no heads": setting("model", "n_heads", 0),
    "an MLP of 10^15": setting("model", "mlp_size", 10**15),
    "a length of 10^12": setting("model", "length", 10**12),
    "a length of 10^8": setting("model", "length", 10**8),
    "dropout nan": setting("model", "dropout", float("nan")),
    "causal 'yes'": setting("model", "causal", "yes"),
    "an unknown norm": setting("model", "norm", "x" * 100_000),
    "an unknown key": setting("model", "import_me", "os"),
    "an unknown noise": setting("noise", "name", "os.system"),
    "gamma as a list": setting("objective", "gamma", [1]),
    "a step that is a text": lambda config: config.update(step="3"),
    "a digest that is a list": lambda config: config.update(weights_file_sha256=[1]),
    "another digest": lambda config: config.update(weights_file_sha256="0" * 64),
}
cases("config", CONFIGS, config_with)


@case("config: a pipe")
def _(folder: Path) -> list[str]:
    model = exported(folder)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    return sample(model)


cases("config", {f"a link to {target}": target for target in ("/dev/zero", "/dev/stdin", "/proc/kmsg", ".", "nowhere")},
      lambda folder, target: linked(folder, "config.json", target))  # fmt: skip
cases("weights", {f"a link to {target}": target for target in ("/dev/zero", "/proc/self/mem")},
      lambda folder, target: linked(folder, "model.safetensors", target))  # fmt: skip
cases("tokenizer", {f"a link to {target}": target for target in ("/dev/urandom", "/proc/kmsg")},
      lambda folder, target: linked(folder, "tokenizer.json", target))  # fmt: skip


def linked(folder: Path, name: str, target: str) -> list[str]:
    model = exported(folder)
    (model / name).unlink()
    (model / name).symlink_to(target)
    return sample(model)


def weights_with(folder: Path, data: bytes) -> list[str]:
    model = exported(folder)
    config = json.loads((model / "config.json").read_text())
    del config["weights_file_sha256"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(data)
    return sample(model)


def header(entries: Any, more: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + more


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


cases("weights", {
    "empty": b"",
    "three bytes": b"abc",
    "a header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "a header of 90 MB": struct.pack("<Q", 90_000_000) + b"{}",
    "a header that is no JSON": header(b"{{{{"),
    "a deep header": header(b'{"a":' * 50_000),
    "a pickle": pickle.dumps({"embedding": 1}),
    "a tensor of 4 TB": header({"embedding": entry([10**6, 10**6], 0, 4 * 10**12)}),
    "sizes that overflow": header({"embedding": entry([2**40, 2**40], 0, 4)}, bytes(4)),
    "offsets backwards": header({"embedding": entry([1], 8, 4)}, bytes(8)),
    "one place for two": header({"embedding": entry([1], 0, 4), "head.weight": entry([1], 0, 4)}, bytes(4)),
    "a gap": header({"embedding": entry([1], 4, 8)}, bytes(8)),
    "no tensors": header({}),
    "one tensor": header({"embedding": entry([260, 16], 0, 16_640)}, bytes(16_640)),
    "30,000 tensors": header({f"t{i}": entry([0], 0, 0) for i in range(30_000)}),
    "an unknown dtype": header({"embedding": entry([1], 0, 4, "PICKLE")}, bytes(4)),
}, weights_with)  # fmt: skip


def retyped(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    from safetensors.torch import load_file

    tensors = load_file(base().export / "model.safetensors")
    change(tensors)
    line = weights_with(folder, b"")
    save_file(tensors, folder / "model" / "model.safetensors")
    return line


cases("weights", {
    "one tensor more": lambda tensors: tensors.update(more=torch.zeros(3)),
    "one tensor less": lambda tensors: tensors.pop("head.bias"),
    "another shape": lambda tensors: tensors.update({"head.bias": torch.zeros(3)}),
    "integers": lambda tensors: tensors.update({"head.bias": torch.zeros(260, dtype=torch.int8)}),
}, retyped)  # fmt: skip

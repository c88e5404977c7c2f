"""Release checkpoints whose tensors or whose archive are not what they should be."""

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostile.cases import base, case, cases, sample


def spoiled(folder: Path, change: Callable[[dict[str, Any]], Any], ema: bool = False) -> list[str]:
    tree = torch.load(base().release, weights_only=True)
    change(tree)
    torch.save(tree, folder / "bad.ckpt")
    return [*sample(folder / "bad.ckpt"), f"eval.ema={str(ema).lower()}"]


def share_storages(tree: dict[str, Any]) -> None:
    """Every parameter is the same megabyte, seen in its own shape; 1,500 blocks of them."""
    tree["hyper_parameters"]["config"].pop("model")
    storage, state = torch.zeros(2**18), tree["state_dict"]
    block = {k: v for k, v in state.items() if k.startswith("backbone.blocks.0.")}
    for i in range(1500):
        state |= {k.replace(".0.", f".{i}.", 1): storage[: v.numel()].view(v.shape) for k, v in block.items()}


def set_config(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        found = tree["hyper_parameters"]["config"]
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


def set_weight(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["state_dict"].update({"backbone.output_layer.linear.bias": value})


def wide(tree: dict[str, Any]) -> None:
    """An embedding of 400 GB, of one number."""
    tree["hyper_parameters"]["config"].pop("model")
    tree["state_dict"]["backbone.vocab_embed.embedding"] = torch.zeros(1).expand(10**7, 10**4)


SPOILED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "one number seen as 400 GB": wide,
    "21,000 tensors": lambda tree: tree["state_dict"].update({f"backbone.blocks.{i}.x": 1 for i in range(21_000)}),
    "a tensor that is a number": set_weight(3),
    "integers for weights": set_weight(torch.zeros(260, dtype=torch.int8)),
    "a wrong shape": set_weight(torch.zeros(7)),
    "no state_dict": lambda tree: tree.pop("state_dict"),
    "a state_dict that is a list": lambda tree: tree.update(state_dict=[1]),
    "a length of 10^12": set_config("model", "length", value=10**12),
    "a length of -5": set_config("model", "length", value=-5),
    "a length that is a list": set_config("model", "length", value=[[1] * 1000]),
    "dropout 7": set_config("model", "dropout", value=7.0),
    "another number of heads": set_config("model", "n_heads", value=7),
    "parameterization as a table": set_config("parameterization", value={"a": 1}),
    "an unknown noise": set_config("noise", "type", value="x" * 10_000),
    "sigma_min that is nan": set_config("noise", "sigma_min", value=float("nan")),
}
cases("ckpt", SPOILED, spoiled)
cases("ckpt", {"storages shared by 1,500 blocks": share_storages}, spoiled, heavy=True)
cases("ckpt ema", {
    "no EMA weights": lambda tree: tree.pop("ema"),
    "EMA that is a number": lambda tree: tree.update(ema=5),
    "too few EMA weights": lambda tree: tree["ema"]["shadow_params"].pop(),
    "EMA weights of one storage": lambda tree: tree["ema"].update(
        shadow_params=[tree["ema"]["shadow_params"][0]] * len(tree["ema"]["shadow_params"])),
}, lambda folder, change: spoiled(folder, change, ema=True))  # fmt: skip


def rewritten(folder: Path, change: Callable[[bytearray], Any]) -> list[str]:
    data = bytearray(base().release.read_bytes())
    found = change(data)
    (folder / "bad.ckpt").write_bytes(data if found is None else found)
    return sample(folder / "bad.ckpt")


def forge_sizes(data: bytearray) -> None:
    entry = data.index(b"PK\x01\x02", data.rindex(b"PK\x01\x02") - 4000)
    data[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)


def set_flag(data: bytearray) -> None:
    entry = data.index(b"PK\x01\x02")
    data[entry + 8 : entry + 10] = struct.pack("<H", 1)  # encrypted


cases("ckpt zip", {
    "empty": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "without its last bytes": lambda data: data[:-30],
    "random bytes": lambda data: np.random.default_rng(0).bytes(10_000),
    "sizes beyond the file": forge_sizes,
    "an encrypted member": set_flag,
    "a pickle of the old kind": lambda data: pickle.dumps({"state_dict": {}}),
    "a flipped bit": lambda data: data.__setitem__(slice(2000, 2001), bytes([data[2000] ^ 1])) or
        data.__setitem__(slice(len(data) // 2, len(data) // 2 + 1), bytes([data[len(data) // 2] ^ 1])),
}, rewritten)  # fmt: skip


def archive(folder: Path, members: dict[str, tuple[bytes, int]]) -> list[str]:
    with zipfile.ZipFile(folder / "bad.ckpt", "w") as new:
        for name, (content, how) in members.items():
            new.writestr(name, content, compress_type=how)
    return sample(folder / "bad.ckpt")


STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
cases("ckpt zip", {
    "a pickle of 10 MB in 10 kB": {"x/data.pkl": (b"\x80\x02" + b"}0" * 5_000_000, DEFLATED)},
    "no pickle": {"readme.txt": (b"hello", STORED)},
    "two pickles": {"x/data.pkl": (b"\x80\x02}.", STORED), "y/data.pkl": (b"\x80\x02}.", STORED)},
    "big-endian": {"x/data.pkl": (b"\x80\x02}.", STORED), "x/byteorder": (b"big", STORED)},
}, archive, heavy=False)  # fmt: skip


@case("ckpt zip: a directory of 2 GB")
def _(folder: Path) -> list[str]:
    line = archive(folder, {"x/data.pkl": (b"\x80\x02}.", STORED)})
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, 2**31, 0, 0)
    (folder / "bad.ckpt").write_bytes((folder / "bad.ckpt").read_bytes()[:-22] + end)
    return line


@case("ckpt zip: 60,000 members", heavy=True)
def _(folder: Path) -> list[str]:
    return archive(folder, {f"x/data/{i}" + "n" * 60: (b"", STORED) for i in range(60_000)})

"""Files and folders as a hostile stranger would write them, each with the command line that reads it.

A case is a function that writes its files below a folder and returns the command line; CASES has them by name. Code in
them would write the file CANARY. `python hostile.py FOLDER` runs every case in a process of its own and prints what
each took, as JSON lines (test_hostile_files.py reads them).
"""

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exports import export
from runs import overrides
from safetensors.torch import save_file

from adlm import cli
from adlm.compat.checkpoints import export_release
from adlm.data.tokenizers import raw_bytes
from adlm.training.checkpoint import seal

CANARY = "the-canary-was-here"
GOLDEN_RUN = Path(__file__).parents[1] / "golden" / "run_v1"
Case = Callable[[Path], list[str]]
CASES: dict[str, Case] = {}
HEAVY: set[str] = set()
"""Cases that take a second or more."""


class Base:
    """Valid files, made once, that cases copy and spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.export = export(folder / "export")
        self.release = export_release(self.export, folder / "release.ckpt")
        self.release_members = {}
        with zipfile.ZipFile(self.release) as archive:
            self.release_members = {m.filename: archive.read(m) for m in archive.infolist()}
        self.prepared: Path | None = None

    def prepare(self) -> Path:
        """A folder of `adlm data prepare`; padded, so that it has lengths too."""
        if self.prepared is None:
            line = [*overrides(self.folder, data__wrap="false"), "data.max_sequences=8"]
            line = [word for word in line if word.startswith(("data", "model.length="))]
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(["data", "prepare", "train", *line]) == 0
            self.prepared = next(p.parent for p in (self.folder / "cache").glob("*/manifest.json"))
        return self.prepared


BASE: Base | None = None


def base() -> Base:
    assert BASE is not None
    return BASE


def start(folder: Path) -> None:
    """Make the valid files."""
    global BASE
    BASE = Base(folder)


def case(name: str, heavy: bool = False) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        if heavy:
            HEAVY.add(name)
        return function

    return add


def cases(kind: str, variants: dict[str, Any], build: Callable[[Path, Any], list[str]], heavy: bool = False) -> None:
    """One case for each variant."""
    for name, variant in variants.items():
        case(f"{kind}: {name}", heavy)(lambda folder, variant=variant: build(folder, variant))


# ---- pickles --------------------------------------------------------------------------------------------------------


class Call:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def touch(folder: Path) -> str:
    return f"touch {folder / CANARY}"


def sample(path: Path) -> list[str]:
    return ["sample", str(path), "sampling.steps=1", "sampling.length=8", "train.device=cpu"]


def release_with(folder: Path, data: bytes, **members: bytes) -> list[str]:
    """The valid release checkpoint with another pickle."""
    path = folder / "bad.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in (base().release_members | {f"release/{k}": v for k, v in members.items()}).items():
            new.writestr(name, data if name.endswith("data.pkl") else content)
    return sample(path)


def calls(folder: Path) -> dict[str, bytes]:
    """Pickles that call something, in every way the pickle machine knows. The canary's place is known when written."""
    import importlib
    import runpy
    import subprocess

    order, mark = touch(folder), str(folder / CANARY)
    script = f"open({mark!r}, 'w')"
    tree = lambda value, protocol=2: pickle.dumps({"state_dict": {}, "hyper_parameters": value}, protocol)  # noqa: E731
    text = lambda s: b"X" + struct.pack("<I", len(s)) + s.encode()  # noqa: E731
    return {
        "os.system": tree(Call(os.system, order)),
        "os.system, protocol 0": tree(Call(os.system, order), 0),
        "os.system, protocol 5": tree(Call(os.system, order), 5),
        "eval": tree(Call(eval, script)),
        "exec": tree(Call(exec, script)),
        "compile": tree(Call(compile, script, "x", "exec")),
        "getattr": tree(Call(getattr, "x", "upper")),
        "__import__": tree(Call(__import__, "antigravity")),
        "importlib": tree(Call(importlib.import_module, "this")),
        "runpy": tree(Call(runpy.run_path, "x.py")),
        "subprocess": tree(Call(subprocess.Popen, ["touch", mark])),
        "open": tree(Call(open, mark, "w")),
        "rmtree": tree(Call(shutil.rmtree, str(folder / "nothing"))),
        "map over os.system": tree(Call(map, os.system, [order])),
        "os.system by INST": b"(" + text(order) + b"ios\nsystem\n.",
        "os.system by OBJ": b"(cos\nsystem\n" + text(order) + b"o.",
        "os.system by STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93" + text(order) + b"\x85R.",
        "os.system by dotted name": b"\x80\x04" + text("torch") + text("os.system") + b"\x93" + text(order) + b"\x85R.",
        "builtins under a torch name": b"ctorch.serialization\nos.system\n" + text(order) + b"\x85R.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + text(order) + b"\x85\x81.",
        "BUILD": b"\x80\x02ctorch.nn\nModule\n)\x81}" + text("__reduce__") + text(order) + b"sb.",
        "BUILD on a class": b"\x80\x02c__builtin__\ndict\n}b.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pstorage\n.",
        "torch.load, remembered only": tree(Call(torch.load, mark)),
        "torch.hub, remembered only": tree(Call(torch.hub.load, "nobody/nothing", "model")),
    }


CALLS = (
    "os.system", "os.system, protocol 0", "os.system, protocol 5", "eval", "exec", "compile", "getattr", "__import__",
    "importlib", "runpy", "subprocess", "open", "rmtree", "map over os.system", "os.system by INST", "os.system by OBJ",
    "os.system by STACK_GLOBAL", "os.system by dotted name", "builtins under a torch name", "NEWOBJ", "BUILD",
    "BUILD on a class", "EXT1", "PERSID", "torch.load, remembered only", "torch.hub, remembered only",
)  # fmt: skip
cases("ckpt", {n: n for n in CALLS}, lambda folder, name: release_with(folder, calls(folder)[name]))


def laughs(levels: int) -> bytes:
    """x, then (x, x), then ((x, x), (x, x)): exponential for whoever walks, hashes or prints it."""
    return b"\x80\x02K\x01" + b"2\x86" * levels


def tree_of(value: Any) -> bytes:
    return pickle.dumps({"state_dict": {}, "hyper_parameters": {"config": value}}, 2)


def deep_pickle(levels: int) -> bytes:
    head = b"\x80\x02}(X\x0a\x00\x00\x00state_dict}X\x10\x00\x00\x00hyper_parameters}X\x06\x00\x00\x00config"
    return head + b"]" * levels + b"a" * (levels - 1) + b"su."


def names(count: int) -> bytes:
    return b"\x80\x02" + b"".join(b"ctorch\nN%d\n0" % i for i in range(count)) + b"}."


MALFORMED: dict[str, bytes] = {
    "empty pickle": b"",
    "text for a pickle": b"not a pickle",
    "pickle without end": b"\x80\x02}",
    "pickle of a list": b"\x80\x02].",
    "pickle of a number": b"\x80\x02K\x05.",
    "unknown operation": b"\x80\x02\xff.",
    "protocol 200": b"\x80\xc8}.",
    "memo of 32 GB": b"\x80\x02}r\xff\xff\xff\x7f.",
    "memo index of 4,000 digits": b"}p" + b"9" * 4000 + b"\n.",
    "text of 2 GB": b"\x80\x02(X\xff\xff\xff\x7fab.",
    "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "bytearray of 400 GB": b"\x80\x05\x96" + struct.pack("<Q", 400 * 10**9) + b"x.",
    "frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",
    "integer of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "integer of 10,000 digits": b"I" + b"7" * 10_000 + b"\n.",
    "deep lists": deep_pickle(10_000),
    "hash of shared tuples": b"\x80\x02}" + laughs(60)[2:] + b"K\x01s.",
    "set of shared tuples": b"\x80\x04\x8f(" + laughs(60)[2:] + b"\x90.",
    "frozenset of shared tuples": b"\x80\x04(" + laughs(60)[2:] + b"\x91.",
    "shared tuples as a storage": b"\x80\x02(" + laughs(60)[2:] + b"NNNNtQ.",
    "shared tuples as an encoding": b"\x80\x02c_codecs\nencode\nU\x01a" + laughs(60)[2:] + b"\x86R.",
    "keys that collide": b"\x80\x02}(" + b"".join(
        b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in range(1, 50)) + b"u.",
    "more names than a file has": names(1200),
    "calls that copy their arguments": b"\x80\x02ctorch\nN\n(" + b"N" * 2000 + b"tq\x00" + b"h\x00R" * 1000 + b".",
    "sizes that copy": b"\x80\x02ctorch\nSize\n(" + b"N" * 2000 + b"tR.",
}  # fmt: skip
cases("ckpt", MALFORMED, release_with)


@case("ckpt: a million empty sets", heavy=True)
def _(folder: Path) -> list[str]:
    return release_with(folder, b"\x80\x04" + b"\x8f" * 4_000_000 + b".")


@case("ckpt: 16 MB of lists in lists", heavy=True)
def _(folder: Path) -> list[str]:
    return release_with(folder, b"\x80\x04" + b"]\x94" * 8_000_000 + b".")


@case("ckpt: bytes made again and again", heavy=True)
def _(folder: Path) -> list[str]:
    text = b"X" + struct.pack("<I", 4_000_000) + b"a" * 4_000_000 + b"q\x00"
    head = b"\x80\x02c_codecs\nencode\nq\x01X\x06\x00\x00\x00latin1q\x02" + text
    return release_with(folder, head + b"h\x01h\x00h\x02\x86R" * 100_000 + b".")


@case("ckpt: settings of shared branches", heavy=True)
def _(folder: Path) -> list[str]:
    found = ["ha"]
    for _ in range(60):
        found = [found, found]
    return release_with(folder, tree_of(found))


@case("ckpt: a tokenizer that explodes")
def _(folder: Path) -> list[str]:
    tree = torch.load(base().release, weights_only=True)
    path = folder / "bad.ckpt"
    torch.save(tree, path)
    return [*sample(path), f"data.tokenizer={tokenizer_file(folder, normalizer=replacing('a', 'a' * 1000))}"]


# ---- archives and their tensors -------------------------------------------------------------------------------------


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


# ---- run folders ----------------------------------------------------------------------------------------------------


def run_folder(folder: Path) -> tuple[Path, Path]:
    """A copy of a run that is still training, and its checkpoint."""
    shutil.copytree(GOLDEN_RUN, folder / "run")
    return folder / "run", next((folder / "run" / "checkpoints").iterdir())


def metadata_with(folder: Path, data: bytes) -> list[str]:
    run, checkpoint = run_folder(folder)
    (checkpoint / ".metadata").write_bytes(data)
    seal(checkpoint)
    return sample(run)


def redescribed(folder: Path, change: Callable[[Any], Any]) -> list[str]:
    """Another description of the tensors, in a valid pickle."""
    run, checkpoint = run_folder(folder)
    found = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(found)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    seal(checkpoint)
    return sample(run)


METADATA_CALLS = ("os.system", "os.system, protocol 5", "eval", "subprocess", "os.system by INST", "os.system by OBJ",
                  "os.system by STACK_GLOBAL", "os.system by dotted name", "NEWOBJ", "__import__", "getattr",
                  "torch.load, remembered only", "BUILD")  # fmt: skip
cases("metadata", {n: n for n in METADATA_CALLS}, lambda folder, name: metadata_with(folder, calls(folder)[name]))
cases(
    "metadata",
    {k: MALFORMED[k] for k in ("empty pickle", "pickle of a list", "bytearray of 400 GB", "hash of shared tuples",
                               "memo of 32 GB", "deep lists", "sizes that copy")},
    metadata_with,
)  # fmt: skip


def all_places(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def apply(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            change(info)

    return apply


def all_tensors(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def apply(metadata: Any) -> None:
        for tensor in metadata.state_dict_metadata.values():
            change(tensor)

    return apply


def same_place(metadata: Any) -> None:
    first = next(iter(metadata.storage_data.values()))
    metadata.storage_data = dict.fromkeys(metadata.storage_data, first)


def enormous(tensor: Any) -> None:
    tensor.size = torch.Size([10**6, 10**6])
    tensor.chunks[0].sizes = tensor.size
    tensor.chunks[0].offsets = torch.Size([0, 0])


def twice(metadata: Any) -> None:
    for tensor in metadata.state_dict_metadata.values():
        tensor.chunks = tensor.chunks * 50


cases("metadata", {
    "a file outside": all_places(lambda info: setattr(info, "relative_path", "../../../secret.distcp")),
    "a device": all_places(lambda info: setattr(info, "relative_path", "/dev/zero")),
    "a missing file": all_places(lambda info: setattr(info, "relative_path", "nothing.distcp")),
    "a place behind the end": all_places(lambda info: setattr(info, "offset", 10**15)),
    "a length of 10^15": all_places(lambda info: setattr(info, "length", 10**15)),
    "a negative offset": all_places(lambda info: setattr(info, "offset", -5)),
    "a packed tensor": all_places(lambda info: setattr(info, "transform_descriptors", ["zstd"])),
    "one place for all": same_place,
    "sizes of 4 TB": all_tensors(enormous),
    "fifty parts of each": twice,
    "no chunks": all_tensors(lambda tensor: setattr(tensor, "chunks", [])),
    "no tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "no places": lambda metadata: setattr(metadata, "storage_data", {}),
    "no weights": lambda metadata: metadata.state_dict_metadata.clear(),
}, redescribed)  # fmt: skip


@case("metadata: objects that torch would unpickle")
def _(folder: Path) -> list[str]:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())

    line = redescribed(folder, change)
    part = io.BytesIO()
    torch.save(Call(os.system, touch(folder)), part)
    shard = next((folder / "run").rglob("*.distcp"))
    shard.write_bytes(part.getvalue() + shard.read_bytes())
    seal(shard.parent)
    return line


def part_with(folder: Path, members: dict[str, tuple[bytes, int]]) -> list[str]:
    """A tensor's own archive is replaced by another one of the same length."""
    run, checkpoint = run_folder(folder)
    archive(folder, members)
    data = (folder / "bad.ckpt").read_bytes()
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(data)
    size = (checkpoint / "__0_0.distcp").stat().st_size + len(data) * len(metadata.storage_data)
    (checkpoint / "__0_0.distcp").write_bytes(data + bytes(size))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(checkpoint)
    return sample(run)


PADDING = {"x/pad": (bytes(4000), STORED)}
case("part: code for a tensor")(
    lambda folder: part_with(folder, {"x/data.pkl": (calls(folder)["os.system"], STORED)} | PADDING)
)
cases("part", {
    "a packed pickle": {"x/data.pkl": (b"\x80\x02" + b"}0" * 1_000_000, DEFLATED)} | PADDING,
    "a number for a tensor": {"x/data.pkl": (b"\x80\x02K\x01.", STORED)} | PADDING,
    "no archive": PADDING,
}, part_with)  # fmt: skip


def manifest_with(folder: Path, text: str) -> list[str]:
    run, checkpoint = run_folder(folder)
    (checkpoint / "manifest.json").write_text(text)
    return sample(run)


MANIFESTS = {
    "{}": "{}",
    "a list": "[1]",
    "null": "null",
    "a text": '"x"',
    "deep": "[" * 100_000,
    "not JSON": '{".metadata"',
    "entries that are numbers": '{".metadata": 1, "state.json": 2}',
    "entries without sizes": '{".metadata": {}, "state.json": {}}',
    "sizes that are texts": '{".metadata": {"bytes": "1", "sha256": 5}, "state.json": {"bytes": null, "sha256": []}}',
    "no state": '{".metadata": {"bytes": 1, "sha256": "x"}}',
    "a file outside": json.dumps({n: {"bytes": 1, "sha256": "x"} for n in (".metadata", "state.json", "../x")}),
    "5 MB": '{"a": "' + "x" * 5_000_000 + '"}',
}
cases("manifest", MANIFESTS, manifest_with)


@case("manifest: a link to what never ends")
def _(folder: Path) -> list[str]:
    run, checkpoint = run_folder(folder)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["__0_0.distcp"] = {"bytes": 0, "sha256": "x"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "__0_0.distcp").unlink()
    (checkpoint / "__0_0.distcp").symlink_to("/proc/kmsg")
    return sample(run)


def state_with(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    run, checkpoint = run_folder(folder)
    state = json.loads((checkpoint / "state.json").read_text())
    found = change(state)
    (checkpoint / "state.json").write_text(found if isinstance(found, str) else json.dumps(state))
    seal(checkpoint)
    return sample(run)


cases("state", {
    "a list": lambda state: "[1]",
    "empty": lambda state: "",
    "{}": lambda state: "{}",
    "deep": lambda state: '{"a":' * 50_000,
    "no config": lambda state: state.pop("config"),
    "a config that is a list": lambda state: state.update(config=[1]),
    "no model": lambda state: state["config"].pop("model"),
    "a model that is a text": lambda state: state["config"].update(model="x"),
    "a width of 40,000": lambda state: state["config"]["model"].update(hidden_size=40_000),
    "a width that is a text": lambda state: state["config"]["model"].update(hidden_size="8"),
    "a million blocks": lambda state: state["config"]["model"].update(n_blocks=10**6),
    "a length of 10^12": lambda state: state["config"]["model"].update(length=10**12),
    "another step": lambda state: state.update(step=10**9),
    "a step that is a text": lambda state: state.update(step="6"),
    "an unknown corpus": lambda state: state["config"]["data"].update(name="../x"),
    "a tokenizer that is a device": lambda state: state["config"]["data"].update(tokenizer="/dev/zero"),
    "another tokenizer": lambda state: state.update(tokenizer="0"),
}, state_with)  # fmt: skip


# ---- exported folders -----------------------------------------------------------------------------------------------


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


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def tokenizer_json(**changes: Any) -> str:
    return json.dumps(json.loads(raw_bytes().backend.to_str()) | changes)


def tokenizer_file(folder: Path, **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer_json(**changes))
    return folder / "tokenizer.json"


def tokenizer_with(folder: Path, changes: dict[str, Any] | str) -> list[str]:
    model = exported(folder)
    (model / "tokenizer.json").write_text(changes if isinstance(changes, str) else tokenizer_json(**changes))
    return [*sample(model), "sampling.prompt=aaaa aaaa"]


def replacing(pattern: Any, content: Any) -> dict[str, Any]:
    pattern = {"String": pattern} if isinstance(pattern, str) else pattern
    return {"type": "Replace", "pattern": pattern, "content": content}


def split_at(regex: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}}


def all_of(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def deep_normalizer(levels: int) -> Any:
    found: Any = {"type": "NFC"}
    for _ in range(levels):
        found = all_of(found)
    return found


VOCAB = {chr(97 + i): i for i in range(26)}
A = {"Sequence": {"id": "A", "type_id": 0}}
TOKENIZERS: dict[str, Any] = {
    "a list": "[]",
    "{}": "{}",
    "empty": "",
    "deep": "[" * 100_000,
    "a normalizer that is a list": {"normalizer": [1]},
    "a replacement of 100 kB": {"normalizer": replacing("a", "a" * 100_000)},
    "40 doublings": {"normalizer": all_of(*[replacing("a", "aa")] * 40)},
    "a thousand replacements": {"normalizer": all_of(*[replacing("a", "b")] * 1000)},
    "a replacement of nothing": {"normalizer": replacing("", "x")},
    "a replacement by a number": {"normalizer": replacing("a", 5)},
    "a replacement of any place": {"normalizer": replacing({"Regex": ""}, "x" * 10)},
    "a prefix of 1 MB": {"normalizer": {"type": "Prepend", "prepend": "x" * 2**20}},
    "normalizers 90 deep": {"normalizer": deep_normalizer(90)},
    "a precompiled map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "a regex that does not end": split_at("(a+)+$"),
    "a regex of references": split_at(r"(a*)\1*b"),
    "a regex of many repetitions": split_at("a*a*a*a*a*a*b"),
    "a regex that is broken": split_at("(("),
    "a regex that is a list": split_at([1]),
    "a regex of 1 MB": split_at("a" * 2**20),
    "windows of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an unknown pre-tokenizer": {"pre_tokenizer": {"type": "os.system"}},
    "a text given a thousand times": {
        "post_processor": {"type": "TemplateProcessing", "single": [A] * 1000, "pair": [A, A], "special_tokens": {}}
    },
    "a text given never": {
        "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [A, A], "special_tokens": {}}
    },
    "a decoder that strips 10^9": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
    "a decoder that grows": {"decoder": replacing("a", "a" * 1000)},
    "a decoder for speech": {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
    "added tokens that are a number": {"added_tokens": 5},
    "added tokens that are numbers": {"added_tokens": [1, 2]},
    "an added token of 10 kB": {"added_tokens": [{"id": 256, "content": "x" * 10_000}]},
    "no model": {"model": None},
    "a second normalizer": tokenizer_json(normalizer=None)
    .replace('"normalizer": null', '"normalizer": {"type": "Prepend", "prepend": "' + "x" * 1000 + '"}')
    .replace("{", '{"normalizer": {"type": "NFC"}, ', 1),
    "a replacement under another name": {"normalizer": replacing("a", "a" * 1000) | {"type": "NFC"}},
    "words of any length": {"model": {"type": "WordPiece", "vocab": VOCAB, "max_input_chars_per_word": 10**9}},
    "an unknown model": {"model": {"type": "Pickle", "vocab": {}}},
    "a merge of nothing": {"model": {"type": "BPE", "vocab": VOCAB, "merges": [["q", "zz"]]}},
    "an id of 4 billion": {"model": {"type": "BPE", "vocab": VOCAB | {"zz": 2**32 - 5}, "merges": []}},
    "an id of -1": {"model": {"type": "BPE", "vocab": VOCAB | {"zz": -1}, "merges": []}},
    "an unknown token that is unknown": {"model": {"type": "WordLevel", "vocab": VOCAB, "unk_token": "[UNK]"}},
    "another vocabulary": {"model": {"type": "BPE", "vocab": VOCAB, "merges": []}},
}
cases("tokenizer", TOKENIZERS, tokenizer_with)


@case("tokenizer: three million values", heavy=True)
def _(folder: Path) -> list[str]:
    return tokenizer_with(folder, "[" + "[]," * 3_000_000 + "0]")


@case("tokenizer: 70 MB", heavy=True)
def _(folder: Path) -> list[str]:
    return tokenizer_with(folder, '{"a": "' + "x" * 70_000_000 + '"}')


# ---- prepared data --------------------------------------------------------------------------------------------------


def prepared(folder: Path) -> tuple[Path, list[str]]:
    place = shutil.copytree(base().prepare(), folder / "prepared")
    data = {"data": "prepared", "data.path": place, "data.valid_path": place, "out": folder / "run"}
    line = [word for word in overrides(base().folder) if not word.startswith(("data", "out="))]
    return place, ["train", *line, *(f"{key}={value}" for key, value in data.items()), "train.device=cpu"]


def prepared_with(folder: Path, change: Callable[[dict[str, Any], Path], Any]) -> list[str]:
    place, line = prepared(folder)
    manifest = json.loads((place / "manifest.json").read_text())
    found = change(manifest, place)
    (place / "manifest.json").write_text(found if isinstance(found, str) else json.dumps(manifest))
    return line


def lengths(data: bytes) -> Callable[[dict[str, Any], Path], None]:
    def change(manifest: dict[str, Any], place: Path) -> None:
        (place / "lengths.npy").write_bytes(data)
        manifest["small_files"]["lengths.npy"] = zlib.crc32(data)

    return change


def beyond(manifest: dict[str, Any], place: Path) -> None:
    rows = np.fromfile(place / "rows.bin", dtype=np.uint16)
    rows[7] = 60_000
    rows.tofile(place / "rows.bin")
    manifest["crc32"] = [zlib.crc32(rows.tobytes())]


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def lying_npy(shape: str) -> bytes:
    text = f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({shape},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def update(**values: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda manifest, place: manifest.update(values)


def without(key: str) -> Callable[[dict[str, Any], Path], Any]:
    return lambda manifest, place: manifest.pop(key)


cases("prepared", {
    "a list": lambda manifest, place: "[1]",
    "deep": lambda manifest, place: "[" * 100_000,
    "not JSON": lambda manifest, place: "{",
    "5 MB": lambda manifest, place: " " * 5_000_000,
    **{f"no {key}": without(key) for key in ("rows", "dtype", "bytes", "crc32", "small_files", "tokenizer", "padded")},
    "rows -1": update(rows=-1),
    "rows 10^15": update(rows=10**15),
    "rows as a text": update(rows="8"),
    "length 0": update(length=0),
    "crop 10^9": update(crop=10**9),
    "dtype object": update(dtype="object"),
    "dtype O8 of a pickle": update(dtype="|O"),
    "bytes 0": update(bytes=0),
    "no checksums": update(crc32=[]),
    "checksums that are texts": update(crc32=["x"]),
    "a small file outside": update(small_files={"../../x": 1}),
    "small files as a list": update(small_files=[1]),
    "a vocabulary of 10": update(vocab_size=10),
    "a vocabulary of 10^12": update(vocab_size=10**12),
    "bos_id -1": update(bos_id=-1),
    "a tokenizer that is a text": update(tokenizer="bytes"),
    "another tokenizer": update(tokenizer={"name": "x", "fingerprint": "y"}),
    "ids beyond the vocabulary": beyond,
    "lengths with a pickle": lambda manifest, place: lengths(
        npy(np.array([Call(os.system, touch(place.parent))] * 8, dtype=object), allow_pickle=True))(manifest, place),
    "lengths that claim 4 TB": lengths(lying_npy("10**12".replace("10**12", str(10**12)))),
    "lengths of code": lengths(lying_npy("__import__('os').getcwd()")),
    "lengths beyond the sequence": lengths(npy(np.full(8, 10**6, dtype=np.uint32))),
    "lengths of one sequence": lengths(npy(np.zeros(1, dtype=np.uint32))),
    "lengths that are numbers with a point": lengths(npy(np.zeros(8))),
    "no lengths": lambda manifest, place: (place / "lengths.npy").unlink(),
    "a tokenizer.json of 40 doublings": lambda manifest, place: (place / "tokenizer.json").write_text(
        tokenizer_json(**TOKENIZERS["40 doublings"])) and None,
    "a tokenizer.json of 4 billion ids": lambda manifest, place: (place / "tokenizer.json").write_text(
        tokenizer_json(**TOKENIZERS["an id of 4 billion"])) and None,
}, prepared_with)  # fmt: skip


# ---- other commands, other files -------------------------------------------------------------------------------------


def other(command: str, *words: str) -> Callable[[list[str]], list[str]]:
    """The same folder, given to another command."""
    return lambda line: [command, line[1], *words, "train.device=cpu"]


OTHERS = {
    "ppl": other("ppl"),
    "anchors": other("anchors", "some words"),
    "raw weights": lambda line: [*line, "eval.ema=false"],
    "evaluate": other("evaluate"),
    "zeroshot": other("zeroshot"),
    "serve": lambda line: ["serve", line[1], "port=0"],
    "export": lambda line: ["convert", line[1], line[1] + "/out.ckpt"],
    "import": lambda line: ["import", line[1], line[1] + "-out"],
}
for _name, _other in OTHERS.items():
    for _of in ("metadata: os.system", "config: []", "ckpt: os.system", "tokenizer: 40 doublings"):
        if (_name == "import") == _of.startswith("ckpt") or _name not in ("import", "export"):
            # The first look at some commands imports a second's worth of packages.
            case(f"{_name} of {_of}", heavy=_name in ("serve", "evaluate", "zeroshot"))(
                lambda folder, o=_other, of=_of: o(CASES[of](folder))
            )


def initialised(folder: Path, of: str) -> list[str]:
    line = CASES[of](folder)
    train = [word for word in overrides(base().folder) if not word.startswith("out=")]
    return ["train", *train, f"checkpoint.init_from={line[1]}", f"out={folder / 'new'}", "train.device=cpu"]


cases("init_from", {of: of for of in ("config: []", "config: a million blocks", "weights: a header of 2^60 bytes",
                                      "tokenizer: 40 doublings", "metadata: os.system", "ckpt: os.system")},
      initialised)  # fmt: skip


def reason_with(folder: Path, text: str) -> list[str]:
    model = exported(folder)
    (model / "reason.json").write_text(text)
    return ["reason", "eval", str(model), "train.device=cpu"]


REASON = {"reason": {"task": "prosqa", "method": "cot"}, "seed": 1, "stage": 0, "max_new_tokens": 4}
cases("reason", {
    "a list": "[1]",
    "{}": "{}",
    "deep": "[" * 100_000,
    "no seed": json.dumps({k: v for k, v in REASON.items() if k != "seed"}),
    "stage -5": json.dumps(REASON | {"stage": -5}),
    "stage 10^9": json.dumps(REASON | {"stage": 10**9}),
    "an unknown method": json.dumps(REASON | {"reason": {"method": "os.system"}}),
    "a reason that is a text": json.dumps(REASON | {"reason": "x"}),
}, reason_with)  # fmt: skip


def results_with(folder: Path, text: str) -> list[str]:
    (folder / "results.json").write_text(text)
    return ["reason", "table", str(folder)]


cases("results", {"a list": "[1]", "{}": "{}", "no scores": '{"tests": {"a": 1}}', "deep": "[" * 100_000}, results_with)


def corpus_with(folder: Path, data: bytes) -> list[str]:
    (folder / "data.jsonl").write_bytes(data)
    return ["data", "prepare", "train", "data=file", f"data.path={folder / 'data.jsonl'}", "data.tokenizer=bytes",
            f"data.cache_dir={folder / 'cache'}", "model.length=32"]  # fmt: skip


cases("jsonl", {
    "empty": b"",
    "not JSON": b"{{{\n",
    "lists": b"[1]\n[2]\n",
    "numbers for texts": b'{"text": 5}\n',
    "no text": b'{"x": "y"}\n',
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "a pickle": pickle.dumps({"a": 1}),
}, corpus_with)  # fmt: skip


# ---- GGUF -----------------------------------------------------------------------------------------------------------

NUMBER, TEXT, LIST, WHOLE = 0, 8, 9, 4


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_value(name: bytes, kind: int, value: bytes) -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + value


def gguf_list(name: bytes, kind: int, number: int, items: bytes) -> bytes:
    return gguf_value(b"tokenizer.ggml." + name, LIST, struct.pack("<IQ", kind, number) + items)


def gguf_file(values: list[bytes], tensors: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    about = [
        gguf_value(b"general.architecture", TEXT, gguf_text(b"llama")),
        gguf_value(b"tokenizer.ggml.model", TEXT, gguf_text(b"gpt2")),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(about) + len(values))
    head += b"".join([*about, *values, *tensors])
    return head + bytes(-len(head) % 32) + data


def gguf_tensor(name: bytes, size: int, offset: int) -> bytes:
    return gguf_text(name) + struct.pack("<IQIQ", 1, size, 0, offset)


def gguf_with(folder: Path, data: bytes) -> list[str]:
    (folder / "model.gguf").write_bytes(data)
    return sample(folder / "model.gguf")


TOKENS = gguf_list(b"tokens", TEXT, 2, gguf_text(b"a") + gguf_text(b"b"))
cases("gguf", {
    "empty": b"",
    "another magic": b"GGML" + bytes(60),
    "values without an end": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "a list without an end": gguf_file([gguf_list(b"scores", NUMBER, 2**45, b"")]),
    "a list of texts without an end": gguf_file([gguf_list(b"tokens", TEXT, 2**45, gguf_text(b"a"))]),
    "a text of 2^63 bytes": gguf_file([gguf_value(b"a", TEXT, struct.pack("<Q", 2**63))]),
    "lists in lists": gguf_file([gguf_value(b"a", LIST, struct.pack("<IQ", LIST, 1) * 5000)]),
    "more types than tokens": gguf_file([TOKENS, gguf_list(b"token_type", WHOLE, 3, struct.pack("<3I", 1, 1, 3))]),
    "tokens that are numbers": gguf_file([gguf_list(b"tokens", WHOLE, 2, bytes(8))]),
    "tokens that are one number": gguf_file([gguf_value(b"tokenizer.ggml.tokens", WHOLE, bytes(4))]),
    "merges that are numbers": gguf_file([TOKENS, gguf_list(b"merges", WHOLE, 2, bytes(8))]),
    "one place for two": gguf_file(
        [TOKENS], [gguf_tensor(b"output.weight", 9000, 0), gguf_tensor(b"output_norm.weight", 9000, 0)], bytes(36_000)
    ),
}, gguf_with)  # fmt: skip
cases("gguf", {"ten million numbers": gguf_file([gguf_list(b"scores", NUMBER, 10**7, bytes(10**7))])}, gguf_with, True)


# ---- running --------------------------------------------------------------------------------------------------------


def build(name: str, folder: Path) -> list[str]:
    """Write the files of a case below `folder`, made for it; returns the command line."""
    folder.mkdir(parents=True)
    return CASES[name](folder)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a case here: exit status and what was said."""
    line = build(name, folder)
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            status: Any = cli.main(line)
        except BaseException as error:  # what a user would see as a traceback
            status = f"{type(error).__name__}: {error}"
    return {"status": status, "said": said.getvalue(), "ran": (folder / CANARY).exists()}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a case in a child of this process; what it took is what the child used beyond this process."""
    line = build(name, folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        signal.alarm(300)  # a read that waits for a device takes no CPU time
        for number, file in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(folder / file, os.O_CREAT | os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        (folder / "statm").write_text(Path("/proc/self/statm").read_text())
        try:
            status = cli.main(line)
        except BaseException as error:
            print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
            status = 99
        sys.stderr.flush()
        os._exit(status)
    _, status, used = os.wait4(child, 0)
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "name": name,
        "status": os.waitstatus_to_exitcode(status),
        "said": (folder / "err.txt").read_text(errors="replace"),
        "ran": (folder / CANARY).exists(),
        "file_mb": round(size / 1e6, 2),
        "memory_mb": round((used.ru_maxrss * 1024 - resident) / 2**20, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def main(folder: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    start(folder / "base")
    base().prepare()
    for number, name in enumerate(chosen or CASES):
        place = folder / f"{number:03}"
        print(json.dumps(measure(name, place)), flush=True)
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

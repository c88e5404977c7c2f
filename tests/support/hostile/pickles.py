"""Release checkpoints whose pickle calls something, never ends, or is no pickle."""

import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from hostile.cases import CANARY, Call, base, case, cases, sample, touch


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

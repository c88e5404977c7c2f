"""Folders of a run: what describes its tensors, their parts, the manifest and the state."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adlm.training.checkpoint import seal
from hostile.archives import DEFLATED, STORED, archive
from hostile.cases import GOLDEN_RUN, Call, case, cases, sample, touch
from hostile.pickles import MALFORMED, calls


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

"""Weights in files of other projects, by name: safetensors, whole or in shards, and pickles of torch, read as data.

Names and shapes are known before a number is read; a tensor is read when it is asked for, one at a time.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from adlm.compat.pickles import Checkpoint, TensorRef, is_shape
from adlm.errors import require
from adlm.io.paths import check_object, read_json

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
AGAIN = "download it again"
LARGEST_INDEX = 64 * 2**20


class Tensors(NamedTuple):
    """The tensors of a model: shapes by name, and how to read one."""

    source: str
    """What messages call the place."""
    shapes: dict[str, tuple[int, ...]]
    read: "Callable[[str], Tensor]"


def open_folder(folder: Path) -> Tensors:
    """The weights of a folder of the hub."""
    for name in (SAFETENSORS, PICKLE):
        opened = open_safetensors if name == SAFETENSORS else open_pickle
        if (folder / (name + INDEX)).is_file():
            return join([opened(file) for file in shards(folder, name + INDEX)], str(folder), name + INDEX)
        if (folder / name).is_file():
            return opened(folder / name)
    parts = sorted(p.name for p in folder.glob("model-*-of-*.safetensors"))
    require(not parts, f"{folder} holds {parts[:1]} without {SAFETENSORS}{INDEX}, which names the others: {AGAIN}")
    raise ValueError(f"{folder} holds no weights: neither {SAFETENSORS} nor {PICKLE}, in one file or with an index")


def shards(folder: Path, index: str) -> list[Path]:
    """The files that an index names; all must be there."""
    found = check_object(read_json(folder / index, LARGEST_INDEX), {"weight_map": dict}, {}, str(folder / index))
    names = sorted({str(name) for name in found["weight_map"].values()})
    plain = all(re.fullmatch(r"[\w.-]{1,200}", name) and not name.startswith(".") for name in names)
    require(bool(names) and plain, f"{folder / index} does not name files of its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    require(
        not missing,
        f"{folder} lacks {''.join(missing[:1])}{more} of the {len(names)} files that {index} names: {AGAIN}",
    )
    return [folder / name for name in names]


def join(parts: list[Tensors], source: str, index: str) -> Tensors:
    """Shards as one."""
    place = {name: part for part in parts for name in part.shapes}
    require(len(place) == sum(len(part.shapes) for part in parts), f"{source}: a tensor is in two files of {index}")
    shapes = {name: part.shapes[name] for name, part in place.items()}
    return Tensors(source, shapes, lambda name: place[name].read(name))


def open_safetensors(path: Path) -> Tensors:
    from safetensors import safe_open

    from adlm.io.export import read_shapes

    shapes = read_shapes(path)
    file = safe_open(path, "pt")  # maps the file: nothing is read yet
    return Tensors(str(path), shapes, file.get_tensor)


def open_pickle(path: Path) -> Tensors:
    file = Checkpoint(path)
    tree = file.tree.get("state_dict", file.tree) if isinstance(file.tree, dict) else {}
    refs = {name: ref for name, ref in tree.items() if isinstance(ref, TensorRef)} if isinstance(tree, dict) else {}
    require(bool(refs), f"{path} holds no tensors by name")
    wrong = [name for name, ref in refs.items() if not is_shape(ref.size)]
    require(not wrong, f"{path}: {wrong[:1]} has no usable shape")
    return Tensors(str(path), {name: tuple(ref.size) for name, ref in refs.items()}, lambda n: file.tensor(refs[n], n))

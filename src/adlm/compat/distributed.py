"""Read a folder of `torch.distributed.checkpoint` as data: torch's own reader never sees its pickles.

Its `.metadata` says which tensors there are and where their parts lie; torch unpickles it with the ordinary machine,
which runs whatever the file says, and does the same to every entry that is not a tensor. Here it is read by
`pickles.unpickle`, and every number is held against the files before anything is allocated.
"""

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adlm.compat.pickles import LARGEST_PICKLE, WIDTHS, Checkpoint, Inert, is_shape, named_by_distributed, unpickle
from adlm.errors import require
from adlm.io.paths import read_regular

if TYPE_CHECKING:
    from torch import Tensor


class Shard(NamedTuple):
    """A part of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class SavedTensor(NamedTuple):
    """A tensor of a distributed checkpoint, not yet read."""

    dtype: str
    size: tuple[int, ...]
    shards: list[Shard]


class SavedTensors:
    """The tensors in a folder of `torch.distributed.checkpoint`, by name. torch's own reader never sees its pickles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / ".metadata"
        tree = unpickle(read_regular(self.source, LARGEST_PICKLE), named_by_distributed, self.source)
        described, places = (_state(tree).get(key) for key in ("state_dict_metadata", "storage_data"))
        require(isinstance(described, dict) and isinstance(places, dict), self._wrong("it describes no tensors"))
        assert isinstance(described, dict) and isinstance(places, dict)
        where = {_place(index): info for index, info in places.items()}
        self.sizes: dict[str, int] = {}
        """Bytes of the files that hold tensors."""
        self.tensors = {name: self._describe(name, entry, where) for name, entry in described.items()}
        used = sum(shard.length for tensor in self.tensors.values() for shard in tensor.shards)
        require(used <= sum(self.sizes.values()), self._wrong("its tensors share their bytes"))

    def _wrong(self, reason: str) -> str:
        return f"{self.source} is damaged: {reason}"

    def _describe(self, name: Any, entry: Any, where: dict[Any, Any]) -> SavedTensor:
        """Check what is said about one tensor against the files."""
        state = _state(entry)
        require(isinstance(name, str) and "chunks" in state, self._wrong(f"{name!r:.60} is not a tensor"))
        properties = _state(state.get("properties"), "dtype")
        dtype = getattr(properties.get("dtype"), "origin", "").removeprefix("torch.")
        size: Any = state.get("size")
        chunks = state["chunks"]
        require(dtype in WIDTHS, self._wrong(f"{name:.60} has an unknown dtype"))
        require(is_shape(size) and isinstance(chunks, list), self._wrong(f"{name:.60} has no usable size"))
        shards = [self._shard(name, _state(chunk), where) for chunk in chunks]
        fits = all(
            len(s.sizes) == len(s.offsets) == len(size)
            and all(o + n <= whole for o, n, whole in zip(s.offsets, s.sizes, size))
            and math.prod(s.sizes) * WIDTHS[dtype] <= s.length
            for s in shards
        )
        whole = sum(math.prod(s.sizes) for s in shards) == math.prod(size)
        require(fits and whole, self._wrong(f"the parts of {name:.60} do not make a tensor of its size"))
        return SavedTensor(dtype, size, shards)

    def _shard(self, name: str, chunk: dict[str, Any], where: dict[Any, Any]) -> Shard:
        offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
        require(is_shape(offsets) and is_shape(sizes), self._wrong(f"{name:.60} has a part without a size"))
        assert isinstance(offsets, tuple) and isinstance(sizes, tuple)
        info = _state(where.get((name, offsets)))
        file, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        plain_name = isinstance(file, str) and re.fullmatch(r"[\w-]{1,60}\.distcp", file) is not None
        require(plain_name and is_shape((start, length)), self._wrong(f"{name:.60} has a part that lies nowhere"))
        require(not info.get("transform_descriptors"), self._wrong(f"{name:.60} is packed"))
        assert isinstance(file, str) and isinstance(start, int) and isinstance(length, int)
        if file not in self.sizes:
            require((self.folder / file).is_file(), f"{self.folder / file} is missing")
            self.sizes[file] = os.path.getsize(self.folder / file)
        require(start + length <= self.sizes[file], self._wrong(f"{name:.60} lies behind the end of {file}"))
        return Shard(offsets, sizes, file, start, length)

    def read(self, shard: Shard) -> "Tensor":
        """One part of a tensor."""
        path = self.folder / shard.file
        with path.open("rb") as file:
            file.seek(shard.start)
            data = file.read(shard.length)
        with Checkpoint(path, data) as part:
            found = part.tensor(part.tree, f"the tensor at byte {shard.start}")
        require(tuple(found.shape) == shard.sizes, f"{path}: the tensor at byte {shard.start} has another shape")
        return found

    def tensor(self, name: str) -> "Tensor":
        """The whole tensor of this name."""
        import torch

        saved = self.tensors[name]
        whole = torch.empty(saved.size, dtype=getattr(torch, saved.dtype))
        for shard in saved.shards:
            whole[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes))] = self.read(shard)
        return whole


def _state(value: Any, *names: str) -> dict[str, Any]:
    """The fields of an object of a data class; `names`: of those that are stored as a tuple, in its order."""
    state = value.state if isinstance(value, Inert) else None
    if isinstance(state, tuple):
        return dict(zip(names, state))
    return state if isinstance(state, dict) else {}


def _place(index: Any) -> tuple[Any, Any]:
    """(name, offsets) of a MetadataIndex; what cannot be hashed quickly is nobody's place."""
    state = _state(index)
    name, offsets = state.get("fqn"), state.get("offset")
    return (name, offsets) if isinstance(name, str) and is_shape(offsets) else (None, None)

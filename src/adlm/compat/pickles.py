"""Read a `torch.save` file as data: nothing in it is executed, whatever it says.

The release's checkpoints are pickles that name classes of omegaconf, transformers and lightning, so `weights_only=True`
refuses them and `weights_only=False` would run code of whoever wrote the file. Here the pickle machine runs with a
`find_class` that never returns anything foreign: tensors become references into the zip file, containers become plain
containers, known passive classes become `Inert` objects that only remember what they were given, and any other name
ends the reading. Tensors are read one by one, only when asked for, after their sizes were checked.
"""

import io
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adlm.errors import require

if TYPE_CHECKING:
    from torch import Tensor

# Packages whose objects Lightning checkpoints of the release hold. They are never imported, only remembered by name.
PASSIVE_PACKAGES = frozenset({
    "collections", "copy_reg", "copyreg", "dataloader", "datetime", "enum", "lightning", "lightning_fabric", "numpy",
    "omegaconf", "pathlib", "pytorch_lightning", "tokenizers", "torch", "torchmetrics", "transformers", "typing",
})  # fmt: skip
PASSIVE_BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "long", "object", "set",
    "str", "tuple", "unicode",
})  # fmt: skip
# Storage class -> name of the torch dtype and bytes per element.
STORAGES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1),
}  # fmt: skip
# The pickle itself: names, shapes and settings. The release's is below 1 MB; a tokenizer's merges add a few.
LARGEST_PICKLE = 256 * 2**20


class StorageRef(NamedTuple):
    kind: Any
    key: Any
    numel: Any


class TensorRef(NamedTuple):
    """A tensor of the file, not yet read; fields are unchecked until `Checkpoint.tensor`."""

    storage: Any
    offset: Any
    size: Any
    stride: Any


class Inert:
    """An object of a class that is not here: its class by name, and its state as data. It does nothing."""

    origin = ""
    args: tuple
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # What the pickle machine calls on subclasses of list, dict and set.
    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Mapping(dict):
    """OrderedDict and defaultdict: a dict that ignores what else it is told."""

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    return TensorRef(storage, offset, size, stride)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    require(encoding == "latin1", f"bytes written as {encoding!r}")
    return text.encode("latin1")


KNOWN = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): _Mapping,
    ("collections", "defaultdict"): _Mapping,
    ("_codecs", "encode"): _encode,
}


class Forbidden(ValueError):
    """The pickle names something that a checkpoint has no reason to name."""


# The pure-Python machine: its memo is a dict, so that a forged memo index cannot ask for gigabytes.
class _Reader(pickle._Unpickler):  # type: ignore[name-defined]
    def find_class(self, module: str, name: str) -> Any:
        if (known := KNOWN.get((module, name))) is not None:
            # A function is wrapped: the machine can set attributes on what it is handed.
            return known if isinstance(known, type) else lambda *args: known(*args)
        if module == "torch" and name in STORAGES:
            return name
        builtin = module in ("builtins", "__builtin__")
        if (builtin and name in PASSIVE_BUILTINS) or (not builtin and module.split(".")[0] in PASSIVE_PACKAGES):
            return type("Inert", (Inert,), {"origin": f"{module}.{name}"})
        raise Forbidden(f"names {module}.{name}, which a checkpoint has no reason to")

    def persistent_load(self, pid: Any) -> StorageRef:
        what, kind, key, _, numel, *_ = pid
        require(what == "storage", f"has an unknown kind of storage: {what!r}")
        return StorageRef(kind, key, numel)


class Checkpoint:
    """An open checkpoint: `tree` is what was pickled, as data; `tensor` reads one tensor of it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        require(self.path.is_file(), f"{path} is not a file")
        try:
            self.zip = zipfile.ZipFile(self.path)
        except zipfile.BadZipFile:
            raise ValueError(
                f"{path} is not a complete torch checkpoint: truncated, or a pickle of the old kind, which is not read"
            ) from None
        try:
            self.root = self._check_members()
            self.tree = self._unpickle()
        except BaseException:
            self.zip.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *details: object) -> None:
        self.zip.close()

    def _check_members(self) -> str:
        """The archive's top folder. torch stores members as they are: anything packed is a forgery (a zip bomb)."""
        members = self.zip.infolist()
        packed = next((m.filename for m in members if m.compress_type != zipfile.ZIP_STORED), None)
        require(packed is None, f"{self.path}: member {packed!r} is compressed, which torch never does: refused")
        total = sum(m.file_size for m in members)
        require(
            total <= os.path.getsize(self.path),
            f"{self.path}: its members claim {total} bytes, more than the file has: refused",
        )
        roots = [m.filename.removesuffix("/data.pkl") for m in members if m.filename.endswith("/data.pkl")]
        require(len(roots) == 1, f"{self.path} is not a torch checkpoint: it has no data.pkl")
        root = roots[0]
        if f"{root}/byteorder" in self.zip.namelist():
            require(self._read(f"{root}/byteorder") == b"little", f"{self.path} is not in little-endian byte order")
        size = self.zip.getinfo(f"{root}/data.pkl").file_size
        require(size <= LARGEST_PICKLE, f"{self.path}: data.pkl has {size} bytes, at most {LARGEST_PICKLE} are read")
        return root

    def _read(self, name: str) -> bytes:
        try:
            return self.zip.read(name)
        except KeyError:
            raise ValueError(f"{self.path} lacks its member {name!r}") from None
        except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{self.path} is damaged: {error}") from None

    def _unpickle(self) -> dict[str, Any]:
        data = self._read(f"{self.root}/data.pkl")
        try:
            tree = _Reader(io.BytesIO(data), encoding="utf-8").load()
        except Forbidden as error:
            raise ValueError(f"{self.path} {error}: refused, nothing of it was run") from None
        except Exception as error:  # a malformed pickle fails in as many ways as there are operations
            raise ValueError(f"{self.path} is damaged: {type(error).__name__}: {error}") from None
        require(isinstance(tree, dict), f"{self.path} is not a checkpoint: it holds no dictionary")
        return tree

    def tensor(self, ref: Any, what: str) -> "Tensor":
        """Read one tensor; every number in the reference is checked before a byte is allocated."""
        import torch

        wrong = f"{self.path}: {what} is not a whole tensor of the file"
        if not (isinstance(ref, TensorRef) and isinstance(ref.storage, StorageRef)):
            raise ValueError(wrong)
        storage = ref.storage
        require(isinstance(storage.kind, str) and storage.kind in STORAGES, wrong)
        require(isinstance(storage.key, str) and storage.key.isdigit(), wrong)
        require(
            isinstance(ref.size, tuple) and isinstance(ref.stride, tuple) and len(ref.size) == len(ref.stride), wrong
        )
        numbers = (storage.numel, ref.offset, *ref.size, *ref.stride)
        require(all(type(n) is int and n >= 0 for n in numbers), wrong)
        dtype, width = STORAGES[storage.kind]
        count = math.prod(ref.size)
        last = ref.offset + sum((n - 1) * step for n, step in zip(ref.size, ref.stride))
        require(count == 0 or (count <= storage.numel and last < storage.numel), wrong)
        raw = self._read(f"{self.root}/data/{storage.key}")
        require(
            len(raw) == storage.numel * width, f"{self.path}: {what} has {len(raw)} bytes, not {storage.numel * width}"
        )
        if count == 0:
            return torch.empty(ref.size, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
        return flat.as_strided(ref.size, ref.stride, ref.offset).clone(memory_format=torch.contiguous_format)


def plain(value: Any, budget: list[int] | None = None) -> Any:
    """An omegaconf tree, or any tree of plain containers, as dicts, lists and scalars; other objects become None.

    Interpolations such as ${.name} stay as text. `budget` bounds the work: shared branches can make a small pickle an
    exponentially large tree.
    """
    budget = [200_000] if budget is None else budget
    budget[0] -= 1
    require(budget[0] >= 0, "the checkpoint's settings are too large to be settings")
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        if not value.origin.startswith("omegaconf."):
            return None
        return plain(state.get("_content", state.get("_val")), budget)
    if isinstance(value, dict):
        return {str(k): plain(v, budget) for k, v in value.items() if isinstance(k, str | int)}
    if isinstance(value, list | tuple) and not isinstance(value, TensorRef | StorageRef):
        return [plain(v, budget) for v in value]
    return value if isinstance(value, str | int | float | bool) else None

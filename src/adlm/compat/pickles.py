"""Read files of `torch.save` and `torch.distributed.checkpoint` as data: nothing in them is executed.

The release's checkpoints are pickles that name classes of omegaconf, transformers and lightning, so `weights_only=True`
refuses them, and `weights_only=False` would run code chosen by the author of the file. The `.metadata` of our own
checkpoints is a pickle, too, which torch reads with the ordinary unpickler. Here the unpickler has a `find_class` that
never returns foreign objects: tensors become references into the zip file, containers become plain containers, known
passive classes become `Inert` objects that only store their arguments, and any other name ends the reading.

A small file cannot use much memory or time, either: operations are counted, sizes are checked against the file before a
byte is allocated, and the tensors of a file together have no more bytes than the file.
"""

import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from adlm.errors import require

if TYPE_CHECKING:
    from torch import Tensor

# Packages whose objects are in the release's Lightning checkpoints. They are never imported, only stored by name.
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
WIDTHS = dict(STORAGES.values())
# Bytes of the pickle itself: names, shapes and settings. The release's has less than 1 MB; a tokenizer's merges add a
# few.
LARGEST_PICKLE = 64 * 2**20
# A slow tokenizer of 50,000 entries takes 600,000 operations. An operation makes an object of at most 250 bytes.
MOST_OPERATIONS = 1_500_000
# Every name becomes a class of about a kilobyte.
MOST_NAMES = 1000
# Bytes of the archive's table of contents; in Python, 46 bytes of it become a kilobyte. 2,000 tensors take 200 kB.
LARGEST_DIRECTORY = 4 * 2**20
MOST_DIMENSIONS = 16


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
    """An object of a foreign class: the name of its class, and its state as data. It does nothing."""

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

    # The unpickler calls these on subclasses of list, dict and set.
    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Mapping(dict):
    """OrderedDict and defaultdict: a dict that ignores all other arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    return TensorRef(storage, offset, size, stride)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


def _size(sizes: Any) -> tuple[Any, ...]:
    require(isinstance(sizes, tuple | list) and len(sizes) <= MOST_DIMENSIONS, "a size of too many dimensions")
    return tuple(sizes)


KNOWN = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _Mapping,
    ("collections", "defaultdict"): _Mapping,
}
# Names in the `.metadata` of a distributed checkpoint, besides KNOWN and the dtypes.
DISTRIBUTED_PACKAGES = ("torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor", "pathlib")
DISTRIBUTED_NAMES = frozenset({("torch.serialization", "_get_layout"), *(("torch", dtype) for dtype in WIDTHS)})


def named_by_lightning(module: str, name: str) -> bool:
    """Whether a checkpoint of the release may name this."""
    if module in ("builtins", "__builtin__"):
        return name in PASSIVE_BUILTINS
    return module.split(".")[0] in PASSIVE_PACKAGES


def named_by_distributed(module: str, name: str) -> bool:
    """Whether the `.metadata` of a distributed checkpoint may name this."""
    return (module, name) in DISTRIBUTED_NAMES or module.startswith(DISTRIBUTED_PACKAGES)


class _Function:
    """A function that the unpickler can call, but on which it cannot set attributes."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Forbidden(ValueError):
    """The pickle names something that a checkpoint may not name."""


class _Operations(dict[int, Any]):
    """The unpickler's table of operations, which counts the lookups."""

    left = MOST_OPERATIONS

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        require(self.left >= 0, f"the pickle has more than {MOST_OPERATIONS:,} operations")
        return super().__getitem__(code)


def _check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that may be slow to hash: nested tuples can share branches and take exponential time, and large
    integers and floats can be chosen to collide. An `Inert` object is hashed by its identity."""
    for key in keys:
        plain_key = isinstance(key, str | bytes | bool | Inert | type) or key is None
        small = type(key) is int and abs(key) < 2**53
        names = type(key) is tuple and len(key) <= 4 and all(type(part) is str for part in key)
        require(plain_key or small or names, "a dictionary or set has a key that is no name and no number")


# The pure-Python unpickler: its memo is a dict, so that a forged memo index cannot allocate gigabytes.
class _Reader(pickle._Unpickler):  # type: ignore[name-defined]
    stack: list[Any]
    memo: dict[int, Any]

    def __init__(self, data: bytes | bytearray, may_name: Callable[[str, str], bool]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.may_name = may_name
        self.names: dict[tuple[str, str], type[Inert]] = {}
        self.characters = len(data)
        """How many characters may still be encoded as bytes."""
        self.dispatch = _Operations(pickle._Unpickler.dispatch | GUARDED)  # type: ignore[attr-defined]

    def encode(self, text: Any, encoding: Any) -> bytes:
        """Decode bytes as protocol 2 writes them."""
        require(isinstance(text, str) and encoding in ("latin1", "latin-1"), "bytes that are not latin1")
        self.characters -= len(text)
        require(self.characters >= 0, "more bytes than the pickle has")
        return text.encode("latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (known := KNOWN.get((module, name))) is not None:
            return known if isinstance(known, type) else _Function(known)
        if (module, name) == ("_codecs", "encode"):
            return _Function(self.encode)
        if module == "torch" and name in STORAGES:
            return name
        if not self.may_name(module, name):
            raise Forbidden(f"names {module:.60}.{name:.60}, which a checkpoint has no reason to")
        if (module, name) not in self.names:
            require(len(self.names) < MOST_NAMES, f"the pickle names more than {MOST_NAMES} classes")
            self.names[module, name] = type("Inert", (Inert,), {"origin": f"{module}.{name}"})
        return self.names[module, name]

    def persistent_load(self, pid: Any) -> StorageRef:
        require(type(pid) is tuple and len(pid) <= 8, "an unknown kind of storage")
        what, kind, key, _, numel, *_ = pid
        require(isinstance(what, str) and what == "storage", "an unknown kind of storage")
        return StorageRef(kind, key, numel)

    # Operations whose work the file's size does not bound: they hash or copy values, or allocate before they read.

    def load_put(self) -> None:
        start = self._unframer.readline()  # type: ignore[attr-defined]
        require(len(start) <= 12, "a large index")
        self.memo[int(start)] = self.stack[-1]

    def load_bytearray8(self) -> None:
        raise ValueError("a bytearray, which no checkpoint holds")


def _guard(operation: bytes, check: Callable[[_Reader], None]) -> tuple[int, Callable[[_Reader], None]]:
    """An operation of the unpickler that first checks its operands."""
    act: Callable[[_Reader], None] = pickle._Unpickler.dispatch[operation[0]]  # type: ignore[assignment]

    def checked(reader: _Reader) -> None:
        check(reader)
        act(reader)

    return operation[0], checked


def _few(*arguments: Any) -> None:
    """Refuse calls with many arguments: each call would copy them."""
    require(all(isinstance(a, tuple | dict) and len(a) <= 64 for a in arguments), "a call with too many arguments")


GUARDED = dict([
    _guard(pickle.SETITEM, lambda reader: _check_keys(reader.stack[-2:-1])),
    _guard(pickle.SETITEMS, lambda reader: _check_keys(reader.stack[::2])),
    _guard(pickle.DICT, lambda reader: _check_keys(reader.stack[::2])),
    _guard(pickle.ADDITEMS, lambda reader: _check_keys(reader.stack)),
    _guard(pickle.FROZENSET, lambda reader: _check_keys(reader.stack)),
    _guard(pickle.REDUCE, lambda reader: _few(reader.stack[-1])),
    _guard(pickle.NEWOBJ, lambda reader: _few(reader.stack[-1])),
    _guard(pickle.NEWOBJ_EX, lambda reader: _few(*reader.stack[-2:])),
    (pickle.PUT[0], _Reader.load_put),
    (pickle.BYTEARRAY8[0], _Reader.load_bytearray8),
])  # fmt: skip


def unpickle(data: bytes | bytearray, may_name: Callable[[str, str], bool], source: str | Path) -> Any:
    """The pickled value as data; `may_name` says which classes may be named (they are only stored by name)."""
    require(len(data) <= LARGEST_PICKLE, f"{source}: a pickle of {len(data)} bytes, at most {LARGEST_PICKLE} are read")
    try:
        return _Reader(data, may_name).load()
    except Forbidden as error:
        raise ValueError(f"{source} {error}: refused, nothing of it was run") from None
    except Exception as error:  # a malformed pickle fails in as many ways as there are operations
        raise ValueError(f"{source} is damaged: {type(error).__name__}: {str(error)[:200]}") from None


class Checkpoint:
    """An open file of `torch.save`: `tree` is the pickled value as data; `tensor` reads one of its tensors."""

    def __init__(self, path: str | Path, data: bytes | None = None) -> None:
        """`data`: the bytes of the archive, if it is only a part of the file."""
        self.path = Path(path)
        require(data is not None or self.path.is_file(), f"{path} is not a file")
        file: BinaryIO = self.path.open("rb") if data is None else io.BytesIO(data)
        try:
            self.bytes = os.path.getsize(self.path) if data is None else len(data)
            self.left = self.bytes
            """How many bytes of tensors may still be read."""
            self.zip = self._open(file)
            self.root = self._check_members()
            self.tree = unpickle(self._read(f"{self.root}/data.pkl"), named_by_lightning, self.path)
        except BaseException:
            file.close()
            raise
        self.file = file

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *details: object) -> None:
        self.zip.close()
        self.file.close()

    def _open(self, file: BinaryIO) -> zipfile.ZipFile:
        """Open the archive after checking that its table of contents is small."""
        try:
            end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
            if end is not None:
                directory = end[5]
                large = (
                    f"{self.path}: its table of contents has {directory} bytes, at most {LARGEST_DIRECTORY} are read"
                )
                require(directory <= LARGEST_DIRECTORY, large)
            return zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError):
            raise ValueError(
                f"{self.path} is not a complete torch checkpoint: truncated, or a pickle of the old kind, which is not"
                " read"
            ) from None

    def _check_members(self) -> str:
        """The archive's top folder. torch stores members uncompressed: a compressed one is a forgery (a zip bomb)."""
        members = self.zip.infolist()
        packed = next((m.filename for m in members if m.compress_type != zipfile.ZIP_STORED), None)
        require(packed is None, f"{self.path}: member {packed!r:.60} is compressed, which torch never does: refused")
        total = sum(m.file_size for m in members)
        require(total <= self.bytes, f"{self.path}: its members claim {total} bytes, more than the file has: refused")
        roots = [m.filename.removesuffix("/data.pkl") for m in members if m.filename.endswith("/data.pkl")]
        require(len(roots) == 1, f"{self.path} is not a torch checkpoint: it has no data.pkl")
        root = roots[0]
        if f"{root}/byteorder" in self.zip.namelist():
            require(self._read(f"{root}/byteorder") == b"little", f"{self.path} is not in little-endian byte order")
        size = self.zip.getinfo(f"{root}/data.pkl").file_size
        require(size <= LARGEST_PICKLE, f"{self.path}: data.pkl has {size} bytes, at most {LARGEST_PICKLE} are read")
        return root

    def _read(self, name: str) -> bytearray:
        try:
            content = bytearray(self.zip.getinfo(name).file_size)
            with self.zip.open(name) as member:
                read, view = 0, memoryview(content)
                while read < len(content) and (n := cast(io.BufferedIOBase, member).readinto(view[read:])):
                    read += n
            require(read == len(content), f"{self.path} is damaged: {name!r:.60} is cut short")
            return content
        except KeyError:
            raise ValueError(f"{self.path} lacks its member {name!r:.60}") from None
        except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError) as error:
            raise ValueError(f"{self.path} is damaged: {str(error)[:200]}") from None

    def tensor(self, ref: Any, what: str) -> "Tensor":
        """Read one tensor; every number in the reference is checked before a byte is allocated."""
        import torch

        wrong = f"{self.path}: {what} is not a whole tensor of the file"
        if not (isinstance(ref, TensorRef) and isinstance(ref.storage, StorageRef)):
            raise ValueError(wrong)
        storage = ref.storage
        require(isinstance(storage.kind, str) and storage.kind in STORAGES, wrong)
        require(isinstance(storage.key, str) and re.fullmatch(r"[0-9]{1,18}", storage.key) is not None, wrong)
        require(is_shape(ref.size) and is_shape(ref.stride) and len(ref.size) == len(ref.stride), wrong)
        require(is_shape((storage.numel, ref.offset)), wrong)
        dtype, width = STORAGES[storage.kind]
        count = math.prod(ref.size)
        last = ref.offset + sum((n - 1) * step for n, step in zip(ref.size, ref.stride))
        require(count == 0 or (count <= storage.numel and last < storage.numel), wrong)
        self.left -= count * width
        require(self.left >= 0, f"{self.path}: its tensors share their bytes: together they are larger than the file")
        if count == 0:
            return torch.empty(ref.size, dtype=getattr(torch, dtype))
        raw = self._read(f"{self.root}/data/{storage.key}")
        require(
            len(raw) == storage.numel * width, f"{self.path}: {what} has {len(raw)} bytes, not {storage.numel * width}"
        )
        flat = torch.frombuffer(raw, dtype=getattr(torch, dtype))
        view = flat.as_strided(ref.size, ref.stride, ref.offset)
        # A part of a storage is copied, so that the rest does not stay in memory.
        return view if count == storage.numel and view.is_contiguous() else view.contiguous().clone()


def is_shape(sizes: Any) -> bool:
    """Whether this is a tuple of a few integers that could be a tensor's sizes, strides or offsets."""
    return (
        isinstance(sizes, tuple)
        and len(sizes) <= MOST_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**48 for n in sizes)
    )


def plain(value: Any, budget: list[int] | None = None, depth: int = 0) -> Any:
    """An omegaconf tree, or any tree of plain containers, as dicts, lists and scalars; other objects become None.

    Interpolations such as ${.name} stay text. `budget` and `depth` bound the work: with shared branches a small pickle
    can be an exponentially large tree.
    """
    budget = [200_000] if budget is None else budget
    budget[0] -= 1
    require(budget[0] >= 0 and depth < 100, "the checkpoint's settings are too large to be settings")
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        if not value.origin.startswith("omegaconf."):
            return None
        return plain(state.get("_content", state.get("_val")), budget, depth + 1)
    if isinstance(value, dict):
        return {str(k): plain(v, budget, depth + 1) for k, v in value.items() if isinstance(k, str | int)}
    if isinstance(value, list | tuple) and not isinstance(value, TensorRef | StorageRef):
        return [plain(v, budget, depth + 1) for v in value]
    return value if isinstance(value, str | int | float | bool) else None

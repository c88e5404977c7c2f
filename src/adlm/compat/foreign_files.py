"""Files of other projects, read as data: sharded checkpoints of torch, tensors by name, vocabularies, GGUF."""

import json
import math
import mmap
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adlm.compat.pickles import (
    LARGEST_PICKLE,
    WIDTHS,
    Checkpoint,
    Inert,
    TensorRef,
    is_shape,
    named_by_distributed,
    unpickle,
)
from adlm.data.tokenizers import LARGEST_FILE, Tokenizer, tokenizer_from
from adlm.errors import choose, require
from adlm.io.paths import check_object, read_json, read_regular

if TYPE_CHECKING:
    from torch import Tensor


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------
# A folder of `torch.distributed.checkpoint` is read as data; torch's own reader never sees its pickles.
#
# The file `.metadata` lists the tensors and where their parts are. torch loads it, and every entry that is not a
# tensor, with the ordinary unpickler, which executes whatever the file says. Here `pickles.unpickle` reads it, and
# every number is checked against the files before anything is allocated.


class Shard(NamedTuple):
    """A part of a tensor, and where its bytes are."""

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
        """Sizes in bytes of the files with tensors."""
        self.tensors = {name: self._describe(name, entry, where) for name, entry in described.items()}
        used = sum(shard.length for tensor in self.tensors.values() for shard in tensor.shards)
        require(used <= sum(self.sizes.values()), self._wrong("its tensors share their bytes"))

    def _wrong(self, reason: str) -> str:
        return f"{self.source} is damaged: {reason}"

    def _describe(self, name: Any, entry: Any, where: dict[Any, Any]) -> SavedTensor:
        """Check the description of one tensor against the files."""
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
        """Read one part of a tensor."""
        path = self.folder / shard.file
        with path.open("rb") as file:
            file.seek(shard.start)
            data = file.read(shard.length)
        with Checkpoint(path, data) as part:
            found = part.tensor(part.tree, f"the tensor at byte {shard.start}")
        require(tuple(found.shape) == shard.sizes, f"{path}: the tensor at byte {shard.start} has another shape")
        return found

    def tensor(self, name: str) -> "Tensor":
        """Read the whole tensor of this name."""
        import torch

        saved = self.tensors[name]
        whole = torch.empty(saved.size, dtype=getattr(torch, saved.dtype))
        for shard in saved.shards:
            whole[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes))] = self.read(shard)
        return whole


def _state(value: Any, *names: str) -> dict[str, Any]:
    """The fields of a pickled dataclass object; `names`: the order of the fields if they are stored as a tuple."""
    state = value.state if isinstance(value, Inert) else None
    if isinstance(state, tuple):
        return dict(zip(names, state))
    return state if isinstance(state, dict) else {}


def _place(index: Any) -> tuple[Any, Any]:
    """(name, offsets) of a MetadataIndex; (None, None) for values that could be slow to hash."""
    state = _state(index)
    name, offsets = state.get("fqn"), state.get("offset")
    return (name, offsets) if isinstance(name, str) and is_shape(offsets) else (None, None)


# ---- tensors by name -------------------------------------------------------------------------------------------------
# Weights of other projects, by name: safetensors, in one file or in shards, and pickles of torch, read as data.
#
# Names and shapes are known before any tensor is read; tensors are read on demand, one at a time.

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
AGAIN = "download it again"
LARGEST_INDEX = 64 * 2**20


class Tensors(NamedTuple):
    """The tensors of a model: shapes by name, and how to read one."""

    source: str
    """Name of the place in messages."""
    shapes: dict[str, tuple[int, ...]]
    read: "Callable[[str], Tensor]"


def open_folder(folder: Path) -> Tensors:
    """The weights of a folder from the hub."""
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
    """The files that an index names; all must exist."""
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
    """The shards of a model as one set of tensors."""
    place = {name: part for part in parts for name in part.shapes}
    require(len(place) == sum(len(part.shapes) for part in parts), f"{source}: a tensor is in two files of {index}")
    shapes = {name: part.shapes[name] for name, part in place.items()}
    return Tensors(source, shapes, lambda name: place[name].read(name))


def open_safetensors(path: Path) -> Tensors:
    from safetensors import safe_open

    from adlm.io.export import read_shapes

    shapes = read_shapes(path)
    file = safe_open(path, "pt")  # only maps the file
    return Tensors(str(path), shapes, file.get_tensor)


def open_pickle(path: Path) -> Tensors:
    file = Checkpoint(path)
    tree = file.tree.get("state_dict", file.tree) if isinstance(file.tree, dict) else {}
    refs = {name: ref for name, ref in tree.items() if isinstance(ref, TensorRef)} if isinstance(tree, dict) else {}
    require(bool(refs), f"{path} holds no tensors by name")
    wrong = [name for name, ref in refs.items() if not is_shape(ref.size)]
    require(not wrong, f"{path}: {wrong[:1]} has no usable shape")
    return Tensors(str(path), {name: tuple(ref.size) for name, ref in refs.items()}, lambda n: file.tensor(refs[n], n))


# ---- vocabularies ----------------------------------------------------------------------------------------------------
# Byte-level BPE of released models without a tokenizer.json: from a GGUF file, or from vocab.json, merges.txt and
# tokenizer_config.json (Dream). They differ in how a text is divided into words.

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def words(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "default": [BYTES],
    "gpt-2": [BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "llama-bpe": words(LLAMA3_WORDS),
    "qwen2": words(QWEN2_WORDS),
}
"""llama.cpp's name of a pre-tokenizer -> how it divides a text into words."""


def byte_level_bpe(
    vocab: dict[str, int], merges: list[list[str]], special: dict[int, str], pre: str, name: str, source: str
) -> Tokenizer:
    """A tokenizer from its parts. `special`: id -> token that text never encodes to; `pre`: one of PRE_TOKENIZERS."""
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    described = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **plain} for i, token in sorted(special.items())],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return tokenizer_from(json.dumps(described).encode(), name, source)


def tokenizer_of_files(folder: Path, pre: str) -> Tokenizer:
    """The tokenizer of vocab.json and merges.txt, with the special tokens of tokenizer_config.json."""
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        require((folder / file).is_file(), f"{folder} holds neither tokenizer.json nor {file}: put one of them there")
    vocab = check_object(read_json(folder / "vocab.json", LARGEST_FILE), {}, {}, str(folder / "vocab.json"))
    lines = read_regular(folder / "merges.txt", LARGEST_FILE).decode("utf-8", "replace").split("\n")
    merges = [line.split(" ", 1) for line in lines if line and not line.startswith("#version")]
    source = str(folder / "tokenizer_config.json")
    config = check_object(read_json(folder / "tokenizer_config.json"), {"added_tokens_decoder": dict}, {}, source)
    special = {
        int(i): str(token["content"])
        for i, token in config["added_tokens_decoder"].items()
        if str(i).isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    return byte_level_bpe(vocab, merges, special, pre, folder.name, f"the tokenizer in {folder}")


# ---- GGUF ------------------------------------------------------------------------------------------------------------
# GGUF files of llama.cpp: settings, tokenizer and weights, with the names of a Hugging Face folder.
#
# llama.cpp stores the rows of q and k of a Llama for interleaved rotary pairs: within a head, row 2i + j in GGUF is row
# j H/2 + i in a Hugging Face file. Qwen's rows are stored unchanged. Quantised weights become float32.

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PERMUTED = ("llama",)
SETTINGS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""Type of a token that text never encodes to."""
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value -> its bytes."""
GGUF_TEXT, GGUF_LIST = 8, 9
MOST_ITEMS = 2_000_000
"""Most items of all lists together. A vocabulary of 256,000 tokens has 1.3 million: texts, types, scores and merges."""


class GgufModel(NamedTuple):
    config: dict[str, Any]
    """Settings in the form of a config.json."""
    tensors: Tensors
    tokenizer: Tokenizer


def check_gguf_header(path: Path) -> None:
    """Refuse files for which the gguf package would never finish, or would use far more memory than the file has bytes:
    it trusts the stored length of a list, and takes a few hundred bytes per item."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        require(data[:4] == b"GGUF", "no GGUF magic")
        order = ">" if int.from_bytes(data[4:8], "little") & 0xFFFF == 0 else "<"
        (count,), at, items = struct.unpack_from(order + "Q", data, 16), 24, 0
        for _ in range(count):
            (size,) = struct.unpack_from(order + "Q", data, at)  # length of a name
            (kind,), at = struct.unpack_from(order + "I", data, at + 8 + size), at + 12 + size
            number = 1
            if kind == GGUF_LIST:
                (kind, number), at = struct.unpack_from(order + "IQ", data, at), at + 12
            items += number
            require(items <= MOST_ITEMS, f"its lists have {items} items or more, allowed are {MOST_ITEMS}")
            if kind == GGUF_TEXT:
                for _ in range(number):
                    at += 8 + struct.unpack_from(order + "Q", data, at)[0]
            else:
                require(kind in GGUF_SIZES, f"it has a value of type {kind}")
                at += number * GGUF_SIZES[kind]
            require(at <= len(data), "it ends inside a value")


def open_gguf(path: Path) -> GgufModel:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{path.name} needs the gguf package (pip install 'adlm[eval]')") from None
    try:
        check_gguf_header(path)
        reader = GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        found = {t.name: t for t in reader.tensors}
        require(sum(int(t.n_bytes) for t in found.values()) <= path.stat().st_size, "its tensors share their bytes")
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError, struct.error) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a complete GGUF file ({problem:.120}): download it again") from None
    kind = choose(f"{path}: general.architecture", str(facts.get("general.architecture")), ARCHITECTURES)
    config: dict[str, Any] = {"model_type": kind}
    for theirs, name in SETTINGS.items():
        value = facts.get(f"{kind}.{theirs}")
        if value is not None:
            config[name] = float(f"{value:.6g}") if isinstance(value, float) else value  # the file has float32
    scaling = facts.get(f"{kind}.rope.scaling.type", "none")
    config |= {"tie_word_embeddings": "output.weight" not in found, "hidden_act": "silu"}
    if scaling != "none" or "rope_freqs.weight" in found:
        config["rope_scaling"] = {"rope_type": scaling}
    theirs = {hugging_face_name(name, path): name for name in found if name != "rope_freqs.weight"}
    shapes = {ours: tuple(int(n) for n in reversed(found[name].shape)) for ours, name in theirs.items()}
    rows = shapes.get("model.embed_tokens.weight", (0,))[0]
    config["vocab_size"] = rows

    def read(name: str) -> "Tensor":
        import torch
        from gguf.quants import dequantize

        stored = found[theirs[name]]
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).view(shapes[name])
        part = re.search(r"self_attn\.([qk])_proj\.", name) if kind in PERMUTED else None
        if part is None:
            return values
        heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
        return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return GgufModel(config, Tensors(str(path), shapes, read), tokenizer_of_gguf(facts, path))


def hugging_face_name(name: str, path: Path) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise ValueError(f"{path}: its tensor {name!r:.60} belongs to no architecture that is read")
    return f"{'' if match[1] is None else f'model.layers.{match[1]}.'}{NAMES[match[2]]}.{match[3]}"


def tokenizer_of_gguf(facts: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in the file, which must be byte-level BPE."""
    kind = str(facts.get("tokenizer.ggml.model"))
    require(
        kind == "gpt2",
        f"{path}: its tokenizer is of the kind {kind!r:.40}, and only byte-level BPE (gpt2) is read from GGUF files;"
        " use the model's Hugging Face folder",
    )
    pre = choose(f"{path}: tokenizer.ggml.pre", str(facts.get("tokenizer.ggml.pre", "default")), PRE_TOKENIZERS)
    tokens, merged, types = (facts.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "merges", "token_type"))
    lists = isinstance(types, list) and all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in (tokens, merged)
    )
    require(lists and len(types) <= len(tokens), f"{path}: its tokenizer is damaged: download it again")
    special = [i for i, t in enumerate(types) if t == CONTROL]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ", 1) for merge in merged]
    name = str(facts.get("general.basename") or path.stem)
    return byte_level_bpe(vocab, merges, {i: tokens[i] for i in special}, pre, name, f"{path}: its tokenizer")

"""Tokenizers: one wrapper around `tokenizers.Tokenizer` for every source of vocabularies.

Every vocabulary (GPT-2, BERT, text8, bytes, a tokenizer.json, a BPE trained on the spot) becomes one backend object,
so saving, loading and fingerprinting are the same for all. Unlike the public release, this module keeps two rules:
text never encodes to a special token (a document that contains the characters "[MASK]" must not contain a mask), and
the padding token is never the mask.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from adlm.data import remote
from adlm.data.tokenizer_checks import PARTS, check_part
from adlm.errors import choose, require
from adlm.io.paths import check_object, parse_json, path_of, read_regular
from adlm.schema_commands import GPT2_VOCABULARY
from adlm.tables import TOKENIZERS

MASK = "[MASK]"
# The most characters a bpe-N tokenizer is trained on: enough for any N in use, and training fits in memory.
BPE_TRAINING_CHARACTERS = 100_000_000
# A text with more characters is tokenised in pieces: the library takes some 140 bytes per character.
LONGEST_TEXT = 1 << 20
# Names that other libraries' tokenizer.json files use for the special tokens; the first match wins.
ROLES = {
    "mask": (MASK, "<mask>", "<|mask|>", "<|mdm_mask|>"),
    "bos": ("[BOS]", "<s>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]", "<|endoftext|>"),
    "eos": ("[EOS]", "</s>", "<|end_of_text|>", "[SEP]", "<|endoftext|>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
}
THREADS = "RAYON_NUM_THREADS"


def limit_threads(n: int) -> None:
    """Tokenise with n threads in this process (0: all cores). The library reads the number when it tokenises its first
    text; after that, changes have no effect."""
    if n:
        os.environ.setdefault(THREADS, str(n))


def threads() -> int:
    """How many threads tokenise; 0: one for each core."""
    found = os.environ.get(THREADS, "")
    return int(found) if found.isdigit() else 0


class Tokenizer:
    """Text to ids and back, with the ids of the special tokens. `vocab_size` counts the mask."""

    def __init__(self, backend: Backend, name: str) -> None:
        # Truncation or padding stored in a tokenizer.json would silently shorten documents.
        backend.no_truncation()
        backend.no_padding()
        known = backend.get_vocab(with_added_tokens=True)
        if not any(token in known for token in ROLES["mask"]):
            backend.add_special_tokens([MASK])
            known = backend.get_vocab(with_added_tokens=True)
        found = {role: next((known[t] for t in tokens if t in known), None) for role, tokens in ROLES.items()}
        if found["mask"] is None or found["eos"] is None:
            raise ValueError(
                f"data.tokenizer={name!r} has no end-of-text token; it needs one of {', '.join(ROLES['eos'])}"
            )
        self.backend = backend
        self.name = name
        self.mask_id: int = found["mask"]
        self.eos_id: int = found["eos"]
        self.bos_id: int = found["bos"] if found["bos"] is not None else found["eos"]
        self.pad_id: int | None = found["pad"]
        self.vocab_size: int = max(known.values()) + 1
        require(
            self.vocab_size <= 2 * len(known) + 1024,
            f"data.tokenizer={name!r} has {len(known)} entries with ids up to {self.vocab_size - 1}: a model would have"
            " a row for each of these numbers",
        )
        self.silent_ids = frozenset(i for i in (self.eos_id, self.bos_id, self.pad_id) if i is not None)
        """Tokens that do not show in a text; other special tokens show by name."""
        self.special_ids: frozenset[int] = self.silent_ids | {
            self.mask_id, *(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        }  # fmt: skip
        # The characters of a special token are encoded as ordinary text. The JSON does not store this setting.
        backend.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no BOS or EOS is added, and no id is that of a special token."""
        with panics(self.name):
            return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` for several texts, on all cores or as many as `limit_threads` allows."""
        with panics(self.name):
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids; special tokens are shown by name unless skipped."""
        with panics(self.name):
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def count_bytes(self, ids: Iterable[int]) -> int:
        """Bytes of the text of the ids, without special tokens. Byte-level vocabularies have one character per byte, so
        the count is exact even for a sequence that begins or ends inside a character; after decoding, each incomplete
        byte would count as the three bytes of U+FFFD."""
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return sum(self._sizes.get(int(i), 0) for i in ids)
        return len(self.decode(ids, skip_special=True).encode())

    @functools.cached_property
    def _sizes(self) -> dict[int, int]:
        """Bytes of every token of a byte-level vocabulary except the special ones; added tokens are literal text."""
        sizes = {i: len(token) for token, i in self.backend.get_vocab(with_added_tokens=False).items()}
        sizes |= {i: len(token.content.encode()) for i, token in self.backend.get_added_tokens_decoder().items()}
        return {i: n for i, n in sizes.items() if i not in self.special_ids}

    def token(self, i: int) -> str:
        """The text of the single id `i`."""
        return self.decode([i])

    def release_ends(self) -> tuple[int, int]:
        """(BOS, EOS) as the public release computes them: the first id of the encoded special token.

        BERT's encoder prepends [CLS] to everything, so both come out as [CLS]: only packing=release uses this.
        """
        with panics(self.name):
            prefix = self.backend.encode("", add_special_tokens=True).ids
        return (prefix[0], prefix[0]) if prefix else (self.bos_id, self.eos_id)

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which ids a text gets and which ids are special."""
        behaviour = json.loads(self.backend.to_str())
        behaviour.pop("version", None)
        behaviour["special"] = [self.mask_id, self.bos_id, self.eos_id, self.pad_id, self.vocab_size]
        return hashlib.sha256(json.dumps(behaviour, sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json that `load_tokenizer` (and the `tokenizers` library) reads back."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.backend.to_str(), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, mask_id={self.mask_id})"


def text_pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most LONGEST_TEXT characters, cut before a single space between two words, else before
    such a line break, else anywhere. Byte-level BPE, WordPiece and bytes always begin a word at the first two, so the
    tokens are those of the whole text unless it has no such place."""
    start, size = 0, LONGEST_TEXT
    while len(text) - start > size:
        at = start + size
        for mark in (" ", "\n"):
            found = text.rfind(mark, start + size // 2, at - 1)
            while found > 0 and (text[found - 1].isspace() or text[found + 1].isspace()):
                found = text.rfind(mark, start + size // 2, found)
            if found > 0:
                at = found
                break
        yield text[start:at]
        start = at
    yield text[start:]


def load_tokenizer(name: str, documents: Iterable[str] | None = None, root: str | Path = "") -> Tokenizer:
    """The tokenizer called `name`: one of tables.TOKENIZERS, bpe-N, a tokenizer.json, a vocabulary file, or a folder.

    `documents` are what a `bpe-N` is trained on. `root` is a folder searched for the vocabulary files of gpt2 and
    bert-base-uncased before the hub is asked.
    """
    if match := re.fullmatch(r"bpe-(\d+)", name):
        require(documents is not None, f"data.tokenizer={name!r} is trained on a corpus, and no documents were given")
        return train_bpe(documents or (), int(match[1]))
    if name in TOKENIZERS:
        return TOKENIZERS.load(name)(root)
    path = path_of(name)
    if path.exists():
        return _from_path(path, name)
    names = [*TOKENIZERS, "bpe-N"]
    if "/" in name or "\\" in name or name.endswith((".json", ".txt", ".bpe")):
        raise ValueError(
            f"data.tokenizer={name!r} does not exist; give a tokenizer.json, a folder with vocabulary files, "
            f"or one of {', '.join(names)}"
        )
    choose("data.tokenizer", name, names)
    raise ValueError("data.tokenizer=bpe-N: N is a number of entries, as in bpe-4096")


def vocabulary_size(name: str) -> int:
    """Entries, mask included, of the tokenizer called `name`, without reading a file; an empty name is GPT-2's."""
    if match := re.fullmatch(r"bpe-(\d+)", name):
        return int(match[1])
    sizes = {"": GPT2_VOCABULARY, "gpt2": GPT2_VOCABULARY, "bert-base-uncased": 30522, "text8": 35, "bytes": 260}
    require(name in sizes, f"data.tokenizer={name!r}: its size is not known without reading it; give bpe-N, N entries")
    return sizes[name]


# ---- vocabularies that need no files --------------------------------------------------------------------------------


def text8_characters(root: str | Path = "") -> Tokenizer:
    """a-z and space, laid out as MDLM and its successors do: eight special ids, mask 4, 35 in all."""
    special = ["[CLS]", "[SEP]", "[BOS]", "[EOS]", MASK, "[PAD]", "[RESERVED]", "[UNK]"]
    vocab = {token: i for i, token in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz "])}
    backend = Backend(models.BPE(vocab, [], unk_token="[UNK]", fuse_unk=False))
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(special)
    return Tokenizer(backend, "text8")


def raw_bytes(root: str | Path = "") -> Tokenizer:
    """UTF-8 bytes: id = byte value, then [BOS] 256, [EOS] 257, [PAD] 258, [MASK] 259."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["[BOS]", "[EOS]", "[PAD]", MASK])
    return Tokenizer(backend, "bytes")


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value, as GPT-2's vocabulary does."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def train_bpe(documents: Iterable[str], size: int, prefix_space: bool = False) -> Tokenizer:
    """Byte-level BPE with at most `size` entries, [BOS] [EOS] [PAD] [MASK] = 0..3 included; same text, same result.

    With `prefix_space` the first word of a text gets the same token as anywhere else.
    """
    require(size >= 260, f"data.tokenizer=bpe-{size} is too small; byte-level BPE needs at least 260 entries")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["[BOS]", "[EOS]", "[PAD]", MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_characters(documents, BPE_TRAINING_CHARACTERS), trainer)
    return Tokenizer(backend, f"bpe-{size}")


def _first_characters(documents: Iterable[str], limit: int) -> Iterator[str]:
    seen = 0
    for piece in (piece for document in documents for piece in text_pieces(document)):
        yield piece
        seen += len(piece)
        if seen >= limit:
            return


# ---- vocabularies in files ------------------------------------------------------------------------------------------

LARGEST_FILE = 64 * 2**20
"""The most bytes of a tokenizer.json or vocabulary; the largest in use have 34 million."""


@contextlib.contextmanager
def panics(name: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library into one line. It raises bare Exceptions, and panics that are not even
    Exceptions."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if not (type(error) is Exception or type(error).__name__ == "PanicException"):
            raise
        raise ValueError(f"data.tokenizer={name!r} cannot be used: {str(error)[:200]}") from None


def tokenizer_from(data: bytes, name: str, source: str, without: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of an untrusted tokenizer.json; `without`: leave out an added token with these fields."""
    not_one = f"{source} is not a tokenizer.json: it"
    found = check_object(parse_json(data, source), {"model": dict}, {"added_tokens": list}, not_one)
    added = found.get("added_tokens") or []
    every = [token.get("content") for token in added if isinstance(token, dict)]
    contents = [content for content in every if isinstance(content, str)]
    fits = len(contents) == len(added) <= 20_000 and all(len(content) <= 1000 for content in contents)
    require(fits and sum(map(len, contents)) <= 2**20, f"{source}: added_tokens is not a list of tokens")
    for part in PARTS:
        check_part(found.get(part), part, source)
    longest = found["model"].get("max_input_chars_per_word", 100)
    require(isinstance(longest, int) and longest <= 1000, f"{source}: max_input_chars_per_word must be at most 1000")
    if without:
        found["added_tokens"] = [token for token in added if any(token.get(k) != v for k, v in without.items())]
    try:
        with panics(name):  # serialised again: of a duplicate key the library may read the other value
            return Tokenizer(Backend.from_str(json.dumps(found)), name)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not a tokenizer.json that can be used ({str(error)[:300]})") from None


# Published names of the two GPT-2 files, and of BERT's one file.
BPE_FILES = (
    ("encoder.json", "vocab.bpe"),
    ("gpt2-encoder.json", "gpt2-vocab.bpe"),
    ("vocab.json", "merges.txt"),
    ("gpt2-vocab.json", "gpt2-merges.txt"),
)
BERT_FILES = ("bert-base-uncased-vocab.txt", "vocab.txt")


def gpt2(root: str | Path = "") -> Tokenizer:
    """GPT-2's tokenizer: from a folder of that name, from vocabulary files under `root`, else from the hub."""
    described = "vocab.json and merges.txt (or encoder.json and vocab.bpe)"
    return _published("gpt2", root, "openai-community/gpt2", ("vocab.json", "merges.txt"), described)


def bert_base_uncased(root: str | Path = "") -> Tokenizer:
    """BERT's lower-cased tokenizer: from a folder of that name, vocabulary files under `root`, else from the hub."""
    return _published("bert-base-uncased", root, "google-bert/bert-base-uncased", ("vocab.txt",), "vocab.txt")


def _published(name: str, root: str | Path, repository: str, files: tuple[str, ...], described: str) -> Tokenizer:
    """From the published vocabulary files, not the hub's tokenizer.json, so that all sources have one fingerprint."""
    if Path(name).exists():
        return _from_path(Path(name), name)
    if root and (folder := _find_vocabulary(path_of(root), name)):
        return _from_path(folder, name)
    advice = f"give the folder that holds {described} as data.tokenizer"
    return _from_path(remote.fetch(repository, files, f"data.tokenizer={name!r}", advice) / files[0], name)


def byte_level_bpe(vocab_file: Path, merges_file: Path, name: str = "gpt2") -> Tokenizer:
    """GPT-2's tokenizer from its two published files: V = 50258 with the mask at 50257."""
    try:
        vocab = parse_json(read_regular(vocab_file, LARGEST_FILE), str(vocab_file))
        lines = read_regular(merges_file, LARGEST_FILE).decode("utf-8").split("\n")
        merges = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        backend = Backend(models.BPE(vocab, merges))
    except Exception as error:  # the library raises bare Exception for a merge that is not in the vocabulary
        raise ValueError(f"data.tokenizer: {vocab_file} and {merges_file} are not a byte-level BPE ({error})") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(backend, name)


def word_piece(vocab_file: Path, name: str = "bert-base-uncased") -> Tokenizer:
    """bert-base-uncased from its vocab.txt: lower-cased, accents stripped, [CLS] text [SEP]; mask 103, V = 30522."""
    lines = read_regular(vocab_file, LARGEST_FILE).decode("utf-8").removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK]
    missing = [token for token in special if token not in vocab]
    require(not missing, f"data.tokenizer: {vocab_file} is not a BERT vocabulary (no {', '.join(missing)})")
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.WordPiece(prefix="##")  # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    backend.add_special_tokens(special)
    return Tokenizer(backend, name)


def _from_path(path: Path, name: str) -> Tokenizer:
    """A tokenizer.json, one of a pair of BPE files, a vocab.txt, or a folder that holds such files."""
    folder, own = (path, None) if path.is_dir() else (path.parent, path.name)
    json_file = folder / "tokenizer.json" if own is None else path
    if json_file.is_file() and (own is None or (path.suffix == ".json" and path.name not in dict(BPE_FILES))):
        return tokenizer_from(read_regular(json_file, LARGEST_FILE), name, f"data.tokenizer: {json_file}")
    short = name if name in TOKENIZERS else ""
    pairs = [pair for pair in BPE_FILES if own is None or own in pair]
    for vocab, merges in pairs if short != "bert-base-uncased" else ():
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return byte_level_bpe(folder / vocab, folder / merges, short or "gpt2")
    if own is not None and pairs:
        raise ValueError(f"data.tokenizer={name!r} needs both {pairs[0][0]} and {pairs[0][1]} in {folder}")
    listed = [*BERT_FILES, *sorted(p.name for p in folder.glob("*-vocab.txt"))]
    words = [own] if own and own.endswith(".txt") else [] if own else listed
    for vocab in words:
        if (folder / vocab).is_file():
            return word_piece(folder / vocab, short or "bert-base-uncased")
    wanted = "tokenizer.json; vocab.json and merges.txt; encoder.json and vocab.bpe; vocab.txt"
    raise ValueError(f"data.tokenizer={name!r} holds no vocabulary; expected one of: {wanted}")


def _find_vocabulary(root: Path, name: str) -> Path | None:
    """A folder at or below `root` (two levels) with the vocabulary files of gpt2 or bert-base-uncased."""
    require(root.is_dir(), f"data.root={str(root)!r} is not a folder")
    wanted = BPE_FILES if name == "gpt2" else [(file,) for file in BERT_FILES]
    folders = [root, root / "tokenizers", root.parent / "tokenizers", *sorted(p for p in root.glob("*") if p.is_dir())]
    for files in wanted:
        for folder in folders:
            if all((folder / file).is_file() for file in files):
                return folder if name == "gpt2" else folder / files[0]
    return None

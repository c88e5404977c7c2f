"""The documents of a split: local files, the embedded corpus or the hub, and what is held out for validation.

The end of the module tokenises the same documents on a Ray cluster.
"""

import functools
import importlib
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data import corpora, formats, remote
from adlm.data.blocks import cache_folder
from adlm.data.corpora import SPLITS, Corpus, find_local, get_corpus, is_called, matching
from adlm.data.packing import Progress, Shards, Tokens, encoded, grouped, load_shard, save_shard
from adlm.data.pairs import Pair, are_pairs
from adlm.data.pairs import read as read_pairs
from adlm.data.remote import fetch_file, local_copy, url_of
from adlm.data.tokenizers import Tokenizer, limit_threads, threads
from adlm.errors import choose, require
from adlm.schema import DataConfig
from adlm.tables import DETOKENIZERS

# The last document of a user's own text is cut, to hold out its end, only if it has more characters than this.
LONG_DOCUMENT = 1024


@dataclass(frozen=True)
class Source:
    """Where one split's documents come from. `part` is train or valid if the split is a part of unsplit documents."""

    name: str
    corpus: Corpus
    split: str
    files: tuple[Path, ...] = ()
    part: str = "whole"
    valid_fraction: float = 0.0
    text_key: str = "text"

    @functools.cached_property
    def holds_pairs(self) -> bool:
        """Whether these are prompts with answers: a user's own files, recognised by the fields of the first record."""
        return self.corpus.form == "auto" and bool(self.files) and are_pairs(self.files[0], self.text_key)

    def pairs(self) -> Iterator[Pair]:
        """The prompts and answers of the split, in order."""
        every = self.every_pair()
        if self.part == "whole":
            return every
        total = sum(1 for _ in self.every_pair())
        learned = total - self.held_out(total)
        return itertools.islice(every, learned) if self.part == "train" else itertools.islice(every, learned, None)

    def every_pair(self) -> Iterator[Pair]:
        """The pairs of all files, whatever the split."""
        return itertools.chain.from_iterable(map(read_pairs, self.files))

    def documents(self, length: int) -> Iterator[str]:
        """The detokenized documents of the split, in order. Only text8 uses `length` (of a stored sequence)."""
        if self.corpus.form == "text8":
            return self._text8(length)
        if self.holds_pairs:
            return (pair.text for pair in self.pairs())
        documents = self._raw() if self.part == "whole" else self._part()
        return map(DETOKENIZERS.load(self.corpus.detokenizer), documents)

    def _part(self) -> Iterator[str]:
        """The training or validation part of unsplit documents: the last ones, or the end of the last, are held out."""
        # Count in a first pass: reading is far cheaper than tokenising.
        total = characters = last = 0
        for document in self._raw():
            total, last = total + 1, len(document)
            characters += last
        bounds = self.bounds(total, characters, last)
        if bounds is not None:
            yield from itertools.islice(self._raw(), *bounds)
            return
        wanted, documents = self.wanted(characters), self._raw()
        before = itertools.islice(documents, total - 1)
        yield from before if self.part == "train" else itertools.islice(before, total - 1, None)
        for document in documents:
            at = max(document.rfind(space, 0, last - wanted + 1) for space in " \n")
            at = at if at > 0 else last - wanted
            yield from filter(None, [document[:at].rstrip() if self.part == "train" else document[at:].lstrip()])

    def bounds(self, total: int, characters: int, last: int) -> tuple[int, int] | None:
        """First and last (excluded) of the `total` documents that belong to this part; None if the last document, of
        `last` characters, must be cut."""
        held = self.held_out(total)
        is_too_much = total == 1 or (held == 1 and last > max(LONG_DOCUMENT, 2 * self.wanted(characters)))
        if self.corpus.any_size and self.valid_fraction and is_too_much:
            return None
        return (0, total - held) if self.part == "train" else (total - held, total)

    def wanted(self, characters: int) -> int:
        """Characters to hold out if a document is cut."""
        return max(1, round(self.valid_fraction * characters))

    def held_out(self, total: int) -> int:
        """How many of `total` documents, from the end, are the validation split; training always keeps the first."""
        if 0 < self.corpus.valid_documents < total / 2:
            return self.corpus.valid_documents
        return min(max(1, round(self.valid_fraction * total)), total - 1) if self.valid_fraction and total else 0

    def _raw(self) -> Iterator[str]:
        corpus = self.corpus
        if corpus.module:
            return iter(importlib.import_module(corpus.module).documents())
        if self.files:
            return itertools.chain.from_iterable(formats.read(f, corpus.form, self.text_key) for f in self.files)
        advice = f"give its files as data.path, or their folder as data.root (data.name={self.name})"
        split = corpus.splits[self.split]
        return remote.documents(corpus.hub, corpus.config, corpus.revision, split, corpus.text_key, advice)

    def _text8(self, length: int) -> Iterator[str]:
        """This split's part of the characters, in chunks of one stored sequence; an incomplete last one is dropped."""
        text = "".join(map(formats.characters, self.files)) if self.files else "".join(self._raw())
        text = text.strip("\n")
        # 90/5/5 million; MDLM and its relatives validate on the last part.
        start, stop = (len(text) * bound // 100 for bound in ((0, 90) if self.split == "train" else (95, 100)))
        for at in range(start, stop - length + 1, length):
            yield text[at : at + length]

    def stored_length(self, length: int) -> int:
        """Tokens of a stored sequence: twice `length` if training takes a random window of it."""
        return 2 * length if self.corpus.crop and self.split == "train" else length

    def describe(self) -> str:
        """The split and its corpus, for messages."""
        what = f"the {self.split} split of data.name={self.name}"
        if not self.files:
            return what
        return f"{what} ({self.files[0]}" + (f" and {len(self.files) - 1} more)" if len(self.files) > 1 else ")")


def readable_corpus(name: str) -> tuple[str, Corpus]:
    """`get_corpus` of a name, refusing `checkpoint`, which names no corpus."""
    require(name != "checkpoint", "data.name=checkpoint is for evaluating a checkpoint; name a corpus here")
    return get_corpus(name)


def resolve(cfg: DataConfig, split: str) -> Source:
    """The source of `split`: data.path / data.valid_path, else data.root, else the embedded corpus or the hub."""
    choose("split", split, SPLITS)
    if split != "train" and cfg.valid_name and cfg.valid_name != cfg.name:
        # Validation on another corpus: only valid_path and root can hold its files.
        cfg = replace(cfg, name=cfg.valid_name, valid_name="", path="")
    name, corpus = readable_corpus(cfg.name)
    fraction = corpus.valid_fraction or cfg.valid_fraction
    text_key = cfg.text_key if name == "file" else corpus.text_key
    source = Source(name, corpus, corpus.only or split, valid_fraction=fraction, text_key=text_key)
    if corpus.module:
        return _held_out(source)
    corpora.check(cfg)
    if split == "train" and cfg.valid_path and not cfg.path:
        raise ValueError("data.valid_path is given without data.path")
    # If validation data comes from elsewhere, all documents are for training.
    all_of_it = split == "train" and not corpus.only and bool(cfg.valid_path or cfg.valid_name not in ("", cfg.name))
    if split != "train" and cfg.valid_path:
        place = local_copy(cfg.valid_path, cache_folder(cfg), "data.valid_path")
        return _at(place, source, "data.valid_path", whole=True)
    if cfg.path:
        return _at(local_copy(cfg.path, cache_folder(cfg), "data.path"), source, "data.path", whole=all_of_it)
    if cfg.root:
        if files := find_local(cfg.root, name, source.split):
            return replace(source, files=tuple(files))
        if files := find_local(cfg.root, name, "any"):
            source = replace(source, files=tuple(files))
            return source if all_of_it else _held_out(source)
    require(source.split in corpus.splits, f"data.name={name} has no {split} split")
    if all_of_it:
        unsliced = corpus.splits["train"].partition("[")[0]
        return replace(source, corpus=replace(corpus, splits={"train": unsliced}))
    return source


def _at(path: Path, source: Source, key: str, whole: bool) -> Source:
    """The files of a split at `path`: those with the split's published names, else all files."""
    named = source.corpus.files.get(source.split, ())
    if path.is_file():
        files = [path]
        whole = whole or any(is_called(path, pattern) for pattern in named)
    elif files := matching(path, named):
        whole = True
    else:
        files = matching(path, source.corpus.files.get("any", ())) or formats.files_under(path, key)
    source = replace(source, files=tuple(files))
    return source if whole or source.corpus.only == "test" else _held_out(source)


def _held_out(source: Source) -> Source:
    """The training or validation part of unsplit documents; text8 is cut by characters instead."""
    if source.corpus.form == "text8":
        return source
    return replace(source, part="train" if source.split == "train" else "valid")


# ---- documents on a cluster ------------------------------------------------------------------------------------------
# Tokenising on a Ray cluster (data.engine=ray): the workers read and tokenise the files, and the result is the same as
# on one machine.
#
# Ray Data reads the files of a corpus in groups of documents and tokenises the groups on all its workers; they come
# back in the order of the documents and are packed here. Where sequences begin depends on the documents alone, so the
# prepared folder is the same, byte for byte. Every group that has arrived is a shard on disk, from which a killed run
# resumes. If a worker dies, Ray runs its tasks again elsewhere.
#
# Without RAY_ADDRESS, Ray is started on this machine for one command; with it, the command uses that cluster. Workers
# read a file at its path, on a disk that all nodes share, or fetch it from the URL in data.path.

Row = dict[str, Any]


class RayShards(Shards):
    """Shards made by the workers of a cluster."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, progress: Progress, cfg: DataConfig):
        super().__init__(folder, tokenizer, progress)
        self.cfg = cfg

    def of_source(self, source: Source, length: int) -> Iterator[Tokens]:
        """The tokenised documents of a split, in order. A source that is not a list of files is read here, as without
        Ray: a corpus inside the package or on the hub, and a text so small that its last document is cut."""
        if not source.files or source.corpus.form == "text8":
            return super().of_source(source, length)
        start_ray(threads())
        ranges = self.parts(source)
        return super().of_source(source, length) if ranges is None else self.from_cluster(source, ranges)

    def files(self, source: Source) -> list[Row]:
        cache = cache_folder(self.cfg)
        return [{"file": i, "url": url_of(path, cache)} for i, path in enumerate(source.files)]

    def parts(self, source: Source) -> list[tuple[int, int | None]] | None:
        """The range of documents of each file that belongs to this split; None if a document must be cut."""
        if source.part == "whole":
            return [(0, None) for _ in source.files]
        import ray

        count = functools.partial(count_documents, source=source)
        found = dataset(ray, self.files(source)).map(count).take_all()
        counts = [row["documents"] for row in sorted(found, key=lambda row: row["file"])]
        last = next((row["last"] for row in sorted(found, key=lambda row: -row["file"]) if row["documents"]), 0)
        bounds = source.bounds(sum(counts), sum(row["characters"] for row in found), last)
        if bounds is None:
            return None
        ends = list(itertools.accumulate(counts))
        return [(max(0, bounds[0] - (end - n)), max(0, min(n, bounds[1] - (end - n)))) for n, end in zip(counts, ends)]

    def from_cluster(self, source: Source, ranges: list[tuple[int, int | None]]) -> Iterator[Tokens]:
        import ray

        kept = {path.name for path in self.folder.glob("*.npz") if load_shard(path) is not None}
        files = [row | {"start": a, "stop": b} for row, (a, b) in zip(self.files(source), ranges)]
        read = functools.partial(read_groups, source=source, kept=kept)
        encode = functools.partial(encode_group, tokenizer=self.tokenizer)
        groups = dataset(ray, files).flat_map(read).map(encode)
        for row in groups.iter_rows():
            path = self.folder / row["shard"]
            batch = load_shard(path) if row["shard"] in kept else None
            if batch is None:
                batch = Tokens(np.frombuffer(row["flat"], self.dtype), np.frombuffer(row["lengths"], np.int64))
                save_shard(path, batch)
            require(len(batch.lengths) == row["documents"], f"{path} holds other documents; remove it")
            yield self.counted(batch)


def start_ray(workers: int) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine that ends with this process."""
    import ray

    if not ray.is_initialized():
        here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers or None, "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **here)
        except Exception as error:  # Ray has no class for this error
            where = os.environ.get("RAY_ADDRESS") or "this machine"
            raise ValueError(f"data.engine=ray: no Ray at {where}: {str(error).splitlines()[0][:200]}") from None
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False


def dataset(ray: Any, rows: list[Row]) -> Any:
    """A Ray data set with one task for each row."""
    return ray.data.from_items(rows, override_num_blocks=len(rows))


# Functions that run on the workers


def documents_of(source: Source, row: Row) -> Iterator[str]:
    """The documents of one file, as published. If this node does not have the file, a temporary copy is fetched and
    removed after reading."""
    path = source.files[row["file"]]
    if path.is_file() or not row["url"]:
        yield from formats.read(path, source.corpus.form, source.text_key)
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch_file(row["url"], Path(folder) / path.name)
        yield from formats.read(Path(folder) / path.name, source.corpus.form, source.text_key)


def count_documents(row: Row, source: Source) -> Row:
    documents = characters = last = 0
    for document in documents_of(source, row):
        documents, last = documents + 1, len(document)
        characters += last
    return {**row, "documents": documents, "characters": characters, "last": last}


def read_groups(row: Row, source: Source, kept: set[str]) -> Iterator[Row]:
    """Groups of documents of a file; for groups that are already tokenised, only the number of documents."""
    detokenize = DETOKENIZERS.load(source.corpus.detokenizer)
    chosen = itertools.islice(documents_of(source, row), row["start"], row["stop"])
    for number, texts in enumerate(grouped(map(detokenize, chosen))):
        shard = f"{row['file']:06d}-{number:06d}.npz"
        yield {"shard": shard, "documents": len(texts), "texts": [] if shard in kept else texts}


def encode_group(row: Row, tokenizer: Tokenizer) -> Row:
    limit_threads(1)  # Ray has a process for each core
    texts = [str(text) for text in row["texts"]]
    found = {"shard": row["shard"], "documents": row["documents"], "flat": b"", "lengths": b""}
    if texts:
        flat, lengths = encoded(texts, tokenizer)
        found |= {"flat": flat.tobytes(), "lengths": lengths.astype(np.int64).tobytes()}
    return found

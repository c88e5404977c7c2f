"""Tokenising on a Ray cluster (data.engine=ray): files are read and tokenised where there is room, the result is that
of one machine.

Ray Data reads the files of a corpus, in groups of documents, and tokenises the groups on all its workers; they come
back in the order of the documents, and are packed here. Where sequences begin depends on the documents alone, so the
prepared folder is the same, byte for byte. Every group that has arrived is a shard on disk: a run that is killed
continues there. A worker that dies is Ray's business, which runs its tasks again elsewhere.

One command locally, where Ray is started for it; with RAY_ADDRESS set, the same on that cluster. Workers find a file at
its path, on a disk that all nodes share, or fetch it from the URL in data.path.
"""

import functools
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data import formats
from adlm.data.blocks import cache_folder
from adlm.data.packing import Progress, Shards, Tokens, encoded, grouped, load_shard, save_shard
from adlm.data.sources import Source
from adlm.data.tokenizers import Tokenizer, limit_threads, threads
from adlm.data.urls import fetch_file, url_of
from adlm.errors import require
from adlm.schema import DataConfig
from adlm.tables import DETOKENIZERS

Row = dict[str, Any]


class RayShards(Shards):
    """Shards made by the workers of a cluster."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, progress: Progress, cfg: DataConfig):
        super().__init__(folder, tokenizer, progress)
        self.cfg = cfg

    def of_source(self, source: Source, length: int) -> Iterator[Tokens]:
        """The tokenised documents of a split, in order. What is no list of files is read here, as without Ray: a
        corpus inside the package or on the hub, and a text so small that its last document is cut."""
        if not source.files or source.corpus.form == "text8":
            return super().of_source(source, length)
        start_ray(threads())
        ranges = self.parts(source)
        return super().of_source(source, length) if ranges is None else self.from_cluster(source, ranges)

    def files(self, source: Source) -> list[Row]:
        cache = cache_folder(self.cfg)
        return [{"file": i, "url": url_of(path, cache)} for i, path in enumerate(source.files)]

    def parts(self, source: Source) -> list[tuple[int, int | None]] | None:
        """Of each file the documents that belong to this split; None: a document has to be cut."""
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
    """Join the cluster of RAY_ADDRESS, or start one on this machine for as long as this process lives."""
    import ray

    if not ray.is_initialized():
        here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers or None, "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **here)
        except Exception as error:  # Ray has no class for it
            where = os.environ.get("RAY_ADDRESS") or "this machine"
            raise ValueError(f"data.engine=ray: no Ray at {where}: {str(error).splitlines()[0][:200]}") from None
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False


def dataset(ray: Any, rows: list[Row]) -> Any:
    """One task for each row."""
    return ray.data.from_items(rows, override_num_blocks=len(rows))


# What workers do


def documents_of(source: Source, row: Row) -> Iterator[str]:
    """The documents of one file, as they were published; where this node does not have it, of a copy that lives as
    long as it is read."""
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
    """Groups of documents of a file; of those that are tokenised already only their number."""
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

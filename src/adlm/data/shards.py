"""Tokenised documents on disk, some million characters at a time: a killed preparation goes on where it was."""

import zipfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from adlm.data.blocks import row_dtype
from adlm.data.packing import Tokens, flatten
from adlm.data.progress import Progress
from adlm.data.tokenizers import Tokenizer
from adlm.io.paths import write_atomically

# A shard is what a kill can lose: a few seconds of one core, and a few hundred MB of memory while it is tokenised.
CHARACTERS = 4_000_000
DOCUMENTS = 20_000


class Shards:
    """Tokenised batches of documents, in order: read back where a killed run left them, else made and kept."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, progress: Progress) -> None:
        self.folder, self.tokenizer, self.progress = folder, tokenizer, progress
        self.documents = self.tokens = 0
        self.dtype = row_dtype(tokenizer.vocab_size)

    def of(self, documents: Iterator[str]) -> Iterator[Tokens]:
        """One batch is tokenised (by the library's threads) while the next is read."""
        waiting: deque[Future[Tokens]] = deque()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise") as worker:
            try:
                for number, texts in enumerate(batches(documents)):
                    waiting.append(worker.submit(self._shard, number, texts))
                    if len(waiting) > 1:
                        yield self._counted(waiting.popleft().result())
                while waiting:
                    yield self._counted(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def _counted(self, batch: Tokens) -> Tokens:
        self.documents += len(batch.lengths)
        self.tokens += len(batch.flat)
        self.progress.update(self.documents, self.tokens)
        return batch

    def _shard(self, number: int, texts: list[str]) -> Tokens:
        path = self.folder / f"{number:06d}.npz"
        if kept := _load_shard(path, len(texts)):
            return kept
        batch = flatten(self.tokenizer.encode_batch(texts), self.dtype)
        write_atomically(path, lambda file: np.savez(file, flat=batch.flat, lengths=batch.lengths))
        return batch


def _load_shard(path: Path, documents: int) -> Tokens | None:
    """A shard of an earlier run; None if it is missing, or damaged (npz carries checksums), or of other documents."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:
            batch = Tokens(file["flat"], file["lengths"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return batch if len(batch.lengths) == documents and int(batch.lengths.sum()) == len(batch.flat) else None


def batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Groups of a size that depends on the documents alone, so that a resumed run finds the same shards."""
    held: list[str] = []
    characters = 0
    for document in documents:
        held.append(document)
        characters += len(document)
        if characters >= CHARACTERS or len(held) >= DOCUMENTS:
            yield held
            held, characters = [], 0
    if held:
        yield held

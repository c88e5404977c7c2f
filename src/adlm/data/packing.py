"""From documents to token sequences of one length: tokenise, in shards so that a killed run can resume, then pack.

A batch of documents is `Tokens(flat, lengths)`: all ids in one array, and the number of ids of each document.
There are three ways to pack them into sequences of length L, all pure functions on flat arrays:
  stream     the default. Every document is followed by EOS; the whole split is one stream, cut into pieces of L-2, each
             stored as [BOS] piece [EOS]. Only the last incomplete piece of the split is dropped (fewer than L-2
             tokens in all). Where sequences begin depends on the documents alone, not on batches or resuming.
  release    as the public release does with one process: the same, but the stream ends (and its incomplete piece is
             dropped) after every 1000 documents.
  unwrapped  one document per sequence: [BOS] document [EOS], truncated to L or padded on the right; its length is
             stored.
"""

import sys
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from adlm.data.tokenizers import Tokenizer, text_pieces
from adlm.errors import require
from adlm.io.paths import write_atomically

RELEASE_BATCH = 1000
# A killed run loses at most one shard in work: a few seconds of one core. Tokenising it takes a few hundred MB.
SHARD_CHARACTERS = 4_000_000
SHARD_DOCUMENTS = 20_000


class Tokens(NamedTuple):
    """A batch of tokenised documents: their ids one after the other, and the number of ids of each."""

    flat: np.ndarray
    lengths: np.ndarray


class PackedSequences(NamedTuple):
    """Finished sequences [n, L]. `lengths`: the number of real tokens of each, None when all are full. `starts`: where
    the answer of each begins, None when there are no prompts."""

    tokens: np.ndarray
    lengths: np.ndarray | None
    starts: np.ndarray | None = None


def flatten(documents: list[list[int]], dtype: np.dtype) -> Tokens:
    """Join lists of ids into one batch."""
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    flat = np.empty(int(lengths.sum()), dtype=dtype)
    at = 0
    for ids in documents:
        flat[at : at + len(ids)] = ids
        at += len(ids)
    return Tokens(flat, lengths)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest storage for ids below vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def payload(length: int) -> int:
    """Tokens of text in a sequence: all but [BOS] and [EOS]."""
    require(length >= 3, f"model.length={length} is too short for a sequence; [BOS] token [EOS] needs at least 3")
    return length - 2


def stream(
    batches: Iterable[Tokens], length: int, bos: int, eos: int, pad: int | None = None
) -> Iterator[PackedSequences]:
    """Sequences of the whole stream, yielded as batches arrive; less than one sequence is held back between them. With
    `pad`, a stream too short for one sequence becomes one sequence, padded on the right."""
    rest: np.ndarray | None = None
    filled = False
    for batch in batches:
        ids = _with_eos(batch, eos)
        ids = ids if rest is None else np.concatenate([rest, ids])
        rows, rest = _cut(ids, length, bos, eos)
        if len(rows.tokens):
            filled = True
            yield rows
    if rest is not None and pad is not None and not filled:
        yield from unwrapped([Tokens(rest, np.array([len(rest)]))], length, bos, eos, pad)


def release(
    batches: Iterable[Tokens], length: int, bos: int, eos: int, group: int = RELEASE_BATCH
) -> Iterator[PackedSequences]:
    """Sequences of each `group` documents; the rest of a group is dropped, as in the release."""
    for batch in regroup(batches, group):
        rows, _ = _cut(_with_eos(batch, eos), length, bos, eos)
        if len(rows.tokens):
            yield rows


def unwrapped(batches: Iterable[Tokens], length: int, bos: int, eos: int, pad: int) -> Iterator[PackedSequences]:
    """One document per sequence. An empty document is [BOS] [EOS]."""
    room = payload(length)
    for flat, lengths in batches:
        kept = np.minimum(lengths, room)
        column = np.arange(room)
        rows = np.full((len(lengths), length), pad, dtype=flat.dtype)
        rows[:, 0] = bos
        starts = np.cumsum(lengths) - lengths
        inside = column[None, :] < kept[:, None]
        rows[:, 1:-1][inside] = flat[(starts[:, None] + column[None, :])[inside]]
        rows[np.arange(len(rows)), kept + 1] = eos
        if len(rows):
            yield PackedSequences(rows, kept + 2)


def regroup(batches: Iterable[Tokens], group: int) -> Iterator[Tokens]:
    """The same documents in batches of exactly `group` (the last may be smaller)."""
    held: list[Tokens] = []
    count = 0
    for batch in batches:
        at = 0
        while len(batch.lengths) - at >= group - count:
            take = group - count
            yield _join([*held, _documents(batch, at, at + take)])
            held, count, at = [], 0, at + take
        if at < len(batch.lengths):
            held.append(_documents(batch, at, len(batch.lengths)))
            count += len(batch.lengths) - at
    if held:
        yield _join(held)


def _documents(batch: Tokens, start: int, stop: int) -> Tokens:
    ends = np.concatenate([[0], np.cumsum(batch.lengths)])
    return Tokens(batch.flat[ends[start] : ends[stop]], batch.lengths[start:stop])


def _join(batches: list[Tokens]) -> Tokens:
    return Tokens(np.concatenate([b.flat for b in batches]), np.concatenate([b.lengths for b in batches]))


def _with_eos(batch: Tokens, eos: int) -> np.ndarray:
    return np.insert(batch.flat, np.cumsum(batch.lengths), eos)


def _cut(ids: np.ndarray, length: int, bos: int, eos: int) -> tuple[PackedSequences, np.ndarray]:
    """As many full sequences as `ids` fills, and the ids that are left."""
    room = payload(length)
    n = len(ids) // room
    rows = np.empty((n, length), dtype=ids.dtype)
    rows[:, 0], rows[:, -1] = bos, eos
    rows[:, 1:-1] = ids[: n * room].reshape(n, room)
    return PackedSequences(rows, None), ids[n * room :]


# ---- tokenising -----------------------------------------------------------------------------------------------------


class Progress:
    """One line on a terminal: documents, tokens, tokens per second. Silent if stderr is not a terminal."""

    def __init__(self, title: str) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[documents]:,} documents  {task.completed:,.0f} tokens"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task = self.bar.add_task(title, total=None, documents=0, rate=0.0)

    def update(self, documents: int, tokens: int) -> None:
        """Show the totals so far."""
        elapsed = self.bar.tasks[0].elapsed or 0.0
        rate = tokens / elapsed if elapsed else 0.0
        self.bar.update(self.task, completed=tokens, documents=documents, rate=rate)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()


class Shards:
    """Tokenised batches of documents, in order: read from the shards of a killed run if they exist, else computed and
    stored."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, progress: Progress) -> None:
        self.folder, self.tokenizer, self.progress = folder, tokenizer, progress
        self.documents = self.tokens = 0
        self.dtype = token_dtype(tokenizer.vocab_size)

    def of(self, documents: Iterator[str]) -> Iterator[Tokens]:
        """Tokenise one batch (in the library's threads) while the next is read."""
        waiting: deque[Future[Tokens]] = deque()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise") as worker:
            try:
                for number, texts in enumerate(grouped(documents)):
                    waiting.append(worker.submit(self._shard, number, texts))
                    if len(waiting) > 1:
                        yield self.counted(waiting.popleft().result())
                while waiting:
                    yield self.counted(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def of_source(self, source: Any, length: int) -> Iterator[Tokens]:
        """The tokenised documents of a split (a `Source`) whose stored sequences have `length` tokens."""
        return self.of(source.documents(length))

    def counted(self, batch: Tokens) -> Tokens:
        self.count(len(batch.lengths), len(batch.flat))
        return batch

    def count(self, documents: int, tokens: int) -> None:
        """Add to the totals."""
        self.documents += documents
        self.tokens += tokens
        self.progress.update(self.documents, self.tokens)

    def _shard(self, number: int, texts: list[str]) -> Tokens:
        path = self.folder / f"{number:06d}.npz"
        kept = load_shard(path)
        if kept is not None and len(kept.lengths) == len(texts):
            return kept
        batch = encoded(texts, self.tokenizer)
        save_shard(path, batch)
        return batch


def encoded(texts: list[str], tokenizer: Tokenizer) -> Tokens:
    """The tokens of documents; long ones are tokenised in pieces (`text_pieces`), so that memory stays bounded."""
    dtype = token_dtype(tokenizer.vocab_size)
    pieces = [list(text_pieces(text)) for text in texts]
    groups = grouped(piece for document in pieces for piece in document)
    flat, lengths = _join([flatten(tokenizer.encode_batch(group), dtype) for group in groups])
    counts = np.array([len(document) for document in pieces])
    return Tokens(flat, np.add.reduceat(lengths, np.cumsum(counts) - counts))


def save_shard(path: Path, batch: Tokens) -> None:
    write_atomically(path, lambda file: np.savez(file, flat=batch.flat, lengths=batch.lengths))


def load_shard(path: Path) -> Tokens | None:
    """A shard of an earlier run; None if it is missing or corrupt (npz carries checksums)."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:
            batch = Tokens(file["flat"], file["lengths"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return batch if int(batch.lengths.sum()) == len(batch.flat) else None


def grouped(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups of documents. Their sizes depend on the documents alone, so that a resumed run finds the same shards."""
    held: list[str] = []
    characters = 0
    for document in documents:
        held.append(document)
        characters += len(document)
        if characters >= SHARD_CHARACTERS or len(held) >= SHARD_DOCUMENTS:
            yield held
            held, characters = [], 0
    if held:
        yield held

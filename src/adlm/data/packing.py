"""From tokenised documents to rows of one length: pure functions on flat arrays.

Documents travel as `Tokens(flat, lengths)`: all ids of a batch of documents in one array, and how many belong to each.
Three ways to cut (L is the row length):
  stream     the default. Every document is followed by EOS; the whole split is one stream, cut into pieces of L-2, each
             stored as [BOS] piece [EOS]. Only the last incomplete piece of the split is dropped (fewer than L-2
             tokens in all). Where rows begin depends on the documents alone, not on batches, processes or resuming.
  release    as the public release with one process: the same, but the stream ends (and its incomplete piece is
             dropped) after every 1000 documents.
  unwrapped  one document a row: [BOS] document [EOS], cut to L, padded on the right; the true length is kept.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from adlm.errors import require

RELEASE_BATCH = 1000


class Tokens(NamedTuple):
    """A batch of tokenised documents: their ids one after the other, and the number of ids of each."""

    flat: np.ndarray
    lengths: np.ndarray


class Rows(NamedTuple):
    """Finished rows [n, L]; `lengths` is the number of real tokens of each row, None when all are full."""

    tokens: np.ndarray
    lengths: np.ndarray | None


def flatten(documents: list[list[int]], dtype: np.dtype) -> Tokens:
    """Lists of ids as one batch."""
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    flat = np.empty(int(lengths.sum()), dtype=dtype)
    at = 0
    for ids in documents:
        flat[at : at + len(ids)] = ids
        at += len(ids)
    return Tokens(flat, lengths)


def payload(length: int) -> int:
    """Tokens of text in a row: all but [BOS] and [EOS]."""
    require(length >= 3, f"model.length={length} is too short for a row; [BOS] token [EOS] needs at least 3")
    return length - 2


def stream(batches: Iterable[Tokens], length: int, bos: int, eos: int) -> Iterator[Rows]:
    """Rows of the whole stream; yields as batches arrive, holding back less than one row between them."""
    rest: np.ndarray | None = None
    for batch in batches:
        ids = _with_eos(batch, eos)
        ids = ids if rest is None else np.concatenate([rest, ids])
        rows, rest = _cut(ids, length, bos, eos)
        if len(rows.tokens):
            yield rows


def release(batches: Iterable[Tokens], length: int, bos: int, eos: int, group: int = RELEASE_BATCH) -> Iterator[Rows]:
    """Rows of each `group` documents; what is left of a group is dropped, as the release does."""
    for batch in regroup(batches, group):
        rows, _ = _cut(_with_eos(batch, eos), length, bos, eos)
        if len(rows.tokens):
            yield rows


def unwrapped(batches: Iterable[Tokens], length: int, bos: int, eos: int, pad: int) -> Iterator[Rows]:
    """One document a row. An empty document is [BOS] [EOS]."""
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
            yield Rows(rows, kept + 2)


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


def _cut(ids: np.ndarray, length: int, bos: int, eos: int) -> tuple[Rows, np.ndarray]:
    """As many full rows as `ids` gives, and the ids that are left."""
    room = payload(length)
    n = len(ids) // room
    rows = np.empty((n, length), dtype=ids.dtype)
    rows[:, 0], rows[:, -1] = bos, eos
    rows[:, 1:-1] = ids[: n * room].reshape(n, room)
    return Rows(rows, None), ids[n * room :]

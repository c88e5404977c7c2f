"""The order of training sequences: a pure function of (seed, example number), so that a loader's state is one integer.

Example e of a run is sequence `order[e]`; a global batch of G sequences is the next G examples, and each rank takes a
contiguous part of it. Resuming, or changing the number of ranks, therefore needs only the number of examples consumed.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from adlm.data.blocks import Blocks
from adlm.errors import require

ROUNDS = 8


class SequenceOrder:
    """A different permutation of the sequences in every epoch, computed on demand and never stored.

    A Feistel network permutes the smallest power of four that is large enough; a number that falls outside is sent
    through again until it falls inside ("cycle walking", fewer than four times on average). Unlike a library's
    shuffle it cannot change with a version, and every sequence costs the same, the first or the billionth.
    """

    def __init__(self, n_sequences: int, seed: int, shuffle: bool = True) -> None:
        require(n_sequences > 0, "there are no sequences to order")
        self.n_sequences, self.seed, self.shuffle = n_sequences, seed, shuffle
        self._half = np.uint64(max(1, ((n_sequences - 1).bit_length() + 1) // 2))

    def __getitem__(self, examples: int | np.ndarray) -> np.ndarray:
        """Sequence numbers of example numbers, any shape."""
        e = np.asarray(examples, dtype=np.int64)
        epoch, at = np.divmod(e, self.n_sequences)
        if not self.shuffle:
            return at
        key = mix(np.uint64(self.seed % (1 << 64)), epoch.astype(np.uint64))
        index = self._permute(at.astype(np.uint64), key)
        while (outside := index >= self.n_sequences).any():
            index = np.where(outside, self._permute(index, key), index)
        return index.astype(np.int64)

    def _permute(self, x: np.ndarray, key: np.ndarray) -> np.ndarray:
        half, low = self._half, (np.uint64(1) << self._half) - np.uint64(1)
        left, right = x >> half, x & low
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(key + np.uint64(number), right) & low)
        return (left << half) | right


def mix(key: np.ndarray | np.uint64, value: np.ndarray | np.uint64) -> np.ndarray:
    """64 well-mixed bits of two numbers (the finaliser of SplitMix64, twice)."""
    z = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in (key, value):
            z = z + np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return z


class Batch(NamedTuple):
    """One rank's part of a global batch."""

    tokens: np.ndarray
    """[b, L] int64."""
    attention_mask: np.ndarray | None
    """[b, L], True at real tokens; None when no sequence is padded."""
    examples: np.ndarray
    """[b] int64: example numbers, from which the noise is drawn."""
    prompts: np.ndarray | None = None
    """[b, L], True at the positions before an answer; None when sequences are learned as a whole."""


class Batches:
    """An endless iterator of Batch. Its whole state is `consumed`. A thread reads ahead."""

    def __init__(
        self,
        blocks: Blocks,
        seed: int,
        global_batch_size: int | Callable[[int], int],
        rank: int = 0,
        world: int = 1,
        consumed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
    ) -> None:
        """`global_batch_size`: a number, or a function of the first example of the batch."""
        require(0 <= rank < world, f"rank {rank} is not one of {world} processes")
        self.blocks, self.seed, self.rank, self.world = blocks, seed, rank, world
        self.size = global_batch_size if callable(global_batch_size) else lambda first: global_batch_size
        self.order = SequenceOrder(len(blocks), seed, shuffle)
        self.part(consumed)  # raise errors here, not in the thread
        self.consumed = consumed
        """Examples handed out so far, on all ranks together."""
        self.prefetch = prefetch

    def part(self, first: int) -> range:
        """This rank's examples of the global batch that begins with example `first`: a contiguous part. The sizes of
        two ranks' parts differ by at most one."""
        size = self.size(first)
        if size <= 0:
            raise ValueError(f"train.global_batch_size={size} must be positive")
        if size < self.world:
            raise ValueError(f"train.global_batch_size={size} leaves nothing to do for some of {self.world} processes")
        return range(first + size * self.rank // self.world, first + size * (self.rank + 1) // self.world)

    def read(self, first: int) -> Batch:
        """This rank's part of the global batch that begins with example `first`."""
        part = self.part(first)
        examples = np.arange(part.start, part.stop, dtype=np.int64)
        indices = self.order[examples]
        tokens, masks = self.blocks.rows(indices), self.blocks.attention_masks(indices)
        if self.blocks.crop:
            tokens = self._windows(tokens, examples)
        return Batch(tokens, masks, examples, self.blocks.prompts(indices))

    def _windows(self, tokens: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """A random window of each sequence, beginning with BOS (text8-crop)."""
        length = self.blocks.crop
        starts = mix(np.uint64(~self.seed % (1 << 64)), examples.astype(np.uint64)) % np.uint64(length + 1)
        columns = starts.astype(np.int64)[:, None] + np.arange(length)[None, :]
        windows = np.take_along_axis(tokens, columns, axis=1)
        windows[:, 0] = self.blocks.bos_id
        return windows

    def __iter__(self) -> Iterator[Batch]:
        for batch in read_ahead(map(self.read, self.starts()), self.prefetch):
            self.consumed += self.size(self.consumed)
            yield batch

    def starts(self) -> Iterator[int]:
        first = self.consumed
        while True:
            yield first
            first += self.size(first)


Item = TypeVar("Item")


def read_ahead(items: Iterator[Item], depth: int = 2) -> Iterator[Item]:
    """The same items, produced by a thread up to `depth` items ahead of the consumer.

    A consumer that stops waits for the item in production: if the thread were still inside torch when the process
    ends, Python would abort the process.
    """
    ahead: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=max(1, depth))
    stopped = threading.Event()

    def put(item: Item | None, end: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ahead.put((item, end), timeout=0.1)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # the consumer raises it
            put(None, error)

    maker = threading.Thread(target=make, daemon=True, name="read ahead")
    maker.start()
    try:
        while True:
            item, end = ahead.get()
            if isinstance(end, StopIteration):
                return
            if end is not None:
                raise end
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        maker.join()

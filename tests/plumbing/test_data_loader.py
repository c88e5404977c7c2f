"""The order of rows: a permutation per epoch, the same for any number of ranks, after any resume."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from scipy import stats

from adlm.data.loader import Batches, SequenceOrder, read_ahead
from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes, text8_characters
from adlm.schema import DataConfig


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{i:08d} some text"}}\n' for i in range(200)))
    cfg = DataConfig(name="file", path=str(folder / "a.jsonl"), cache_dir=str(folder / "cache"))
    return prepare(cfg, raw_bytes(), 32, "train")


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{"x" * (i % 20)}"}}\n' for i in range(50)))
    cfg = DataConfig(name="file", path=str(folder / "a.jsonl"), cache_dir=str(folder / "cache"), packing="documents")
    return prepare(cfg, raw_bytes(), 16, "train")


def take(batches, n):
    return list(itertools.islice(iter(batches), n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4097])
def test_every_epoch_is_a_permutation(n):
    order = SequenceOrder(n, seed=7)
    for epoch in (0, 1, 5):
        assert sorted(order[np.arange(n) + epoch * n].tolist()) == list(range(n))


def test_one_at_a_time_is_the_same_as_all_at_once():
    order = SequenceOrder(1000, seed=3)
    assert [int(order[e]) for e in range(500, 1500)] == order[np.arange(500, 1500)].tolist()


def test_epochs_and_seeds_differ_and_nothing_else_matters():
    n = 1000
    a, b = SequenceOrder(n, 1), SequenceOrder(n, 2)
    first, second, other = a[np.arange(n)], a[np.arange(n, 2 * n)], b[np.arange(n)]
    for x, y in itertools.combinations([first, second, other, np.arange(n)], 2):
        assert (x == y).mean() < 0.01
        assert abs(stats.spearmanr(x, y).statistic) < 0.15
    assert SequenceOrder(n, 1)[np.arange(n)].tolist() == first.tolist()


def test_order_never_changes_between_versions():
    """Runs are resumed with later versions of the package and of numpy: these numbers are a promise."""
    two_epochs = [6, 1, 9, 0, 3, 7, 8, 4, 5, 2, 6, 2, 1, 0, 5, 3, 7, 4, 9, 8]
    assert SequenceOrder(10, seed=1)[np.arange(20)].tolist() == two_epochs
    large = SequenceOrder(1_000_000, seed=123)[np.array([0, 1, 999_999, 10**12])]
    assert large.tolist() == [224536, 43296, 282543, 203745]


def test_positions_are_uniform():
    """Over many seeds, each row is first, and each pair of rows is adjacent, equally often."""
    n, seeds = 7, 1400
    orders = np.stack([SequenceOrder(n, seed)[np.arange(n)] for seed in range(seeds)])
    for position in (0, 3, 6):
        assert stats.chisquare(np.bincount(orders[:, position], minlength=n)).pvalue > 1e-4
    pairs = np.bincount(orders[:, 0] * n + orders[:, 1], minlength=n * n).reshape(n, n)
    assert stats.chisquare(pairs[~np.eye(n, dtype=bool)]).pvalue > 1e-4


def test_without_shuffling_rows_come_in_order():
    assert SequenceOrder(5, 1, shuffle=False)[np.arange(12)].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_huge_example_numbers():
    order = SequenceOrder(9_000_000, 1)
    assert 0 <= int(order[10**15]) < 9_000_000


def test_batches_are_the_order(blocks):
    order = SequenceOrder(len(blocks), 5)
    batches = Batches(blocks, seed=5, global_batch_size=6)
    for g, batch in enumerate(take(batches, 50)):
        assert batch.examples.tolist() == list(range(6 * g, 6 * g + 6))
        assert np.array_equal(batch.tokens, blocks.rows(order[batch.examples]))
        assert batch.tokens.dtype == np.int64
        assert batch.attention_mask is None
    assert batches.consumed == 300, "what was handed out, not what was read ahead"


def growing(first):
    return 12 if first < 60 else 24


@pytest.mark.parametrize("size", [12, growing])
@pytest.mark.parametrize("world", [2, 3, 4, 5, 7])
def test_any_number_of_ranks_sees_the_same_global_batches(blocks, world, size):
    alone = take(Batches(blocks, 5, size), 10)
    ranks = [take(Batches(blocks, 5, size, rank, world), 10) for rank in range(world)]
    assert [len(batch.tokens) for batch in alone] == 5 * [12] + 5 * [12 if size == 12 else 24]
    for g, batch in enumerate(alone):
        assert np.array_equal(np.concatenate([r[g].tokens for r in ranks]), batch.tokens)
        assert np.array_equal(np.concatenate([r[g].examples for r in ranks]), batch.examples)


@pytest.mark.parametrize("size", [4, growing])
@pytest.mark.parametrize("stop", [3, 5, 25])
def test_resume_needs_one_number(blocks, size, stop):
    straight = take(Batches(blocks, 5, size), 60)
    first = Batches(blocks, 5, size)
    head = take(first, stop)
    tail = take(Batches(blocks, 5, size, consumed=first.consumed), 60 - stop)
    assert np.array_equal(
        np.concatenate([b.examples for b in straight]), np.arange(sum(len(b.tokens) for b in straight))
    )
    for a, b in zip(straight, head + tail, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.examples, b.examples)


def test_masks_travel_with_rows(padded):
    for batch in take(Batches(padded, 1, 7), 10):
        assert batch.attention_mask is not None
        assert np.array_equal(batch.attention_mask, batch.tokens != raw_bytes().pad_id)


def test_crop_windows(tmp_path):
    text = "".join("abcdefghijklmnopqrstuvwxyz"[i * i % 26] for i in range(4000))
    (tmp_path / "text8").write_text(text)
    tok = text8_characters()
    cfg = DataConfig(name="text8-crop", root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    rows = prepare(cfg, tok, 16, "train")
    order = SequenceOrder(len(rows), 3)
    starts = set()
    for batch in take(Batches(rows, 3, 8), 40):
        assert batch.tokens.shape == (8, 16)
        assert (batch.tokens[:, 0] == tok.bos_id).all()
        for window, row in zip(batch.tokens, rows.rows(order[batch.examples])):
            at = [s for s in range(17) if np.array_equal(window[1:], row[s + 1 : s + 16])]
            assert at
            starts.add(at[0])
    assert starts == set(range(17)), "from the first to the last that fits"
    again = Batches(rows, 3, 4, consumed=8)
    assert np.array_equal(take(again, 1)[0].tokens, take(Batches(rows, 3, 8, consumed=8), 1)[0].tokens[:4])


def test_reader_thread_ends_and_errors_arrive(blocks, monkeypatch):
    before = set(threading.enumerate())
    iterator = iter(Batches(blocks, 1, 2))
    next(iterator)
    # by identity, not by number: threads of other tests may end meanwhile
    readers = [t for t in set(threading.enumerate()) - before if t.name == "read ahead"]
    assert len(readers) == 1
    iterator.close()  # type: ignore[attr-defined]
    assert not readers[0].is_alive()
    broken = Batches(blocks, 1, 2)
    monkeypatch.setattr(broken, "read", lambda first: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(broken))


def test_reading_ahead_changes_nothing_and_ends_with_its_reader():
    assert list(read_ahead(iter(range(5)), 2)) == list(range(5))
    made = []
    before = set(threading.enumerate())
    chain = read_ahead(map(str, read_ahead((made.append(i) or i for i in itertools.count()), 2)), 3)
    assert [next(chain) for _ in range(4)] == list("0123")
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    chain.close()  # type: ignore[attr-defined]
    assert not any(thread.is_alive() for thread in threads)
    assert len(made) <= 4 + 3 + 1 + 2 + 1 + 1, "what fits into both queues and both hands"


def test_a_process_that_stops_reading_ends_as_it_should():
    """A thread that was inside torch at the end of the process used to take it down: exit status 134."""
    code = """
import itertools, torch
from adlm.data.loader import read_ahead
for _ in read_ahead(torch.rand(512, 1024).sort().values for _ in itertools.count()):
    break
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_bad_sizes(blocks):
    with pytest.raises(ValueError, match="global_batch_size=3 leaves nothing to do for some of 4 processes"):
        Batches(blocks, 1, 3, 0, 4)
    with pytest.raises(ValueError, match="global_batch_size=0 must be positive"):
        Batches(blocks, 1, 0)
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        Batches(blocks, 1, 8, 4, 4)
    with pytest.raises(ValueError, match="no sequences"):
        SequenceOrder(0, 1)

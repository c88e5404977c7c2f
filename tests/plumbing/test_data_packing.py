"""Packing: vectorised cuts against obvious loops, however the documents are batched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm.data import packing
from adlm.data.packing import Tokens, flatten

BOS, EOS, PAD = 100, 101, 102
U16 = np.dtype(np.uint16)

documents_lists = st.lists(st.lists(st.integers(0, 50), max_size=12), max_size=12)
lengths = st.integers(3, 9)


def slow_stream(documents, length):
    """The definition, one token at a time."""
    ids = [i for document in documents for i in [*document, EOS]]
    room = length - 2
    return [[BOS, *ids[at : at + room], EOS] for at in range(0, len(ids) - room + 1, room)]


def slow_unwrapped(documents, length):
    rows = []
    for document in documents:
        real = [BOS, *document[: length - 2], EOS]
        rows.append((real + [PAD] * (length - len(real)), len(real)))
    return rows


def batched(documents, size):
    return [flatten(documents[at : at + size], U16) for at in range(0, len(documents), size)]


def all_rows(rows):
    return [row for block in rows for row in block.tokens.tolist()]


@settings(max_examples=300, deadline=None)
@given(documents_lists, lengths, st.integers(1, 5))
def test_stream(documents, length, size):
    assert all_rows(packing.stream(batched(documents, size), length, BOS, EOS)) == slow_stream(documents, length)


@settings(max_examples=300, deadline=None)
@given(documents_lists, lengths, st.integers(1, 5), st.integers(1, 4))
def test_release_is_a_stream_per_group(documents, length, size, group):
    expected = [
        row for at in range(0, len(documents), group) for row in slow_stream(documents[at : at + group], length)
    ]
    assert all_rows(packing.release(batched(documents, size), length, BOS, EOS, group)) == expected


@settings(max_examples=300, deadline=None)
@given(documents_lists, lengths, st.integers(1, 5))
def test_unwrapped(documents, length, size):
    found = list(packing.unwrapped(batched(documents, size), length, BOS, EOS, PAD))
    assert all_rows(found) == [row for row, _ in slow_unwrapped(documents, length)]
    real = [n for block in found if block.lengths is not None for n in block.lengths.tolist()]
    assert real == [n for _, n in slow_unwrapped(documents, length)]


@settings(max_examples=200, deadline=None)
@given(documents_lists, st.integers(1, 5), st.integers(1, 5))
def test_regroup_keeps_documents(documents, size, group):
    groups = list(packing.regroup(batched(documents, size), group))
    assert [len(g.lengths) for g in groups[:-1]] == [group] * max(0, len(groups) - 1)
    back = []
    for flat, counts in groups:
        ends = np.cumsum(counts)
        back += [flat[end - n : end].tolist() for end, n in zip(ends, counts)]
    assert back == documents


def test_by_hand():
    documents = [[1, 2, 3], [], [4, 5]]
    # stream: 1 2 3 E E 4 5 E, payload 3
    rows = all_rows(packing.stream([flatten(documents, U16)], 5, BOS, EOS))
    assert rows == [[BOS, 1, 2, 3, EOS], [BOS, EOS, EOS, 4, EOS]]
    # in groups of two documents: 1 2 3 E E | 4 5 E
    rows = all_rows(packing.release([flatten(documents, U16)], 5, BOS, EOS, group=2))
    assert rows == [[BOS, 1, 2, 3, EOS], [BOS, 4, 5, EOS, EOS]]
    found = list(packing.unwrapped([flatten(documents, U16)], 4, BOS, EOS, PAD))
    assert found[0].tokens.tolist() == [[BOS, 1, 2, EOS], [BOS, EOS, PAD, PAD], [BOS, 4, 5, EOS]]
    assert found[0].lengths is not None
    assert found[0].lengths.tolist() == [4, 2, 4]


def test_release_drops_a_remainder_every_thousand_documents():
    documents = [[1]] * 2500
    # 2 tokens a document: 2000 per thousand, payload 62
    kept = len(all_rows(packing.release([flatten(documents, U16)], 64, BOS, EOS)))
    assert kept == 2 * (2000 // 62) + 1000 // 62
    assert len(all_rows(packing.stream([flatten(documents, U16)], 64, BOS, EOS))) == 5000 // 62


def test_dtype_is_kept():
    batch = Tokens(np.arange(10, dtype=np.uint32) + 70_000, np.array([10]))
    (rows,) = packing.stream([batch], 6, 1, 2)
    assert rows.tokens.dtype == np.uint32
    assert rows.tokens[0].tolist() == [1, 70000, 70001, 70002, 70003, 2]


def test_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match=r"model\.length=2 is too short"):
        list(packing.stream([flatten([[1]], U16)], 2, BOS, EOS))

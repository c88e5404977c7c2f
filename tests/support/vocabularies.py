"""A vocabulary of real words, made when it is asked for."""

import functools
from pathlib import Path

from adlm.data.tokenizers import Tokenizer, train_bpe


@functools.cache
def words(size: int = 4000) -> Tokenizer:
    """A byte-level BPE of our own pages: words, pieces of words, and single bytes of characters."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return train_bpe((page.read_text(encoding="utf-8") for page in pages), size)

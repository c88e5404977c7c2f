"""Which documents a split is: local files, the embedded corpus or the hub, and what is held out for validation."""

import functools
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from adlm.data import corpora, formats, hub
from adlm.data.blocks import cache_folder
from adlm.data.corpora import SPLITS, Corpus, find_local, get_corpus, is_called, matching
from adlm.data.pairs import Pair, are_pairs
from adlm.data.pairs import read as read_pairs
from adlm.data.urls import local_copy
from adlm.errors import choose, require
from adlm.schema import DataConfig
from adlm.tables import DETOKENIZERS

# The last document of one's own text is cut to hold out its end only if it has more characters.
LONG_DOCUMENT = 1024


@dataclass(frozen=True)
class Source:
    """Where one split's documents come from. `part` is train or valid when it is cut out of unsplit documents."""

    name: str
    corpus: Corpus
    split: str
    files: tuple[Path, ...] = ()
    part: str = "whole"
    valid_fraction: float = 0.0
    text_key: str = "text"

    @functools.cached_property
    def holds_pairs(self) -> bool:
        """Whether these are prompts with answers: files of one's own, recognised by the fields of the first one."""
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
        """Those of the files, whatever the split."""
        return itertools.chain.from_iterable(map(read_pairs, self.files))

    def documents(self, length: int) -> Iterator[str]:
        """The detokenized documents of the split, in order. `length` (of a stored sequence) only matters to text8."""
        if self.corpus.form == "text8":
            return self._text8(length)
        if self.holds_pairs:
            return (pair.text for pair in self.pairs())
        documents = self._raw() if self.part == "whole" else self._part()
        return map(DETOKENIZERS.load(self.corpus.detokenizer), documents)

    def _part(self) -> Iterator[str]:
        """The training or the validation documents of unsplit ones: the last are held out, or the end of the last."""
        # A first pass to count: reading is far cheaper than tokenising.
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
        """First and last (excluded) of `total` documents that belong to this part; None: the last one, of `last`
        characters, is to be cut."""
        held = self.held_out(total)
        is_too_much = total == 1 or (held == 1 and last > max(LONG_DOCUMENT, 2 * self.wanted(characters)))
        if self.corpus.any_size and self.valid_fraction and is_too_much:
            return None
        return (0, total - held) if self.part == "train" else (total - held, total)

    def wanted(self, characters: int) -> int:
        """Characters to hold out where a document is cut."""
        return max(1, round(self.valid_fraction * characters))

    def held_out(self, total: int) -> int:
        """Documents at the end of `total` that are the validation split; the first is always left for training."""
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
        return hub.documents(corpus.hub, corpus.config, corpus.revision, split, corpus.text_key, advice)

    def _text8(self, length: int) -> Iterator[str]:
        """Chunks of one stored sequence of this split's part of the characters; an incomplete last one is dropped."""
        text = "".join(map(formats.characters, self.files)) if self.files else "".join(self._raw())
        text = text.strip("\n")
        # 90/5/5 million; the lineage validates on the last part.
        start, stop = (len(text) * bound // 100 for bound in ((0, 90) if self.split == "train" else (95, 100)))
        for at in range(start, stop - length + 1, length):
            yield text[at : at + length]

    def stored_length(self, length: int) -> int:
        """Tokens of a stored sequence: twice as many where training takes a random window of it."""
        return 2 * length if self.corpus.crop and self.split == "train" else length

    def describe(self) -> str:
        """For messages: which split of what."""
        what = f"the {self.split} split of data.name={self.name}"
        if not self.files:
            return what
        return f"{what} ({self.files[0]}" + (f" and {len(self.files) - 1} more)" if len(self.files) > 1 else ")")


def readable_corpus(name: str) -> tuple[str, Corpus]:
    """`get_corpus` of a name that stands for a corpus of its own."""
    require(name != "checkpoint", "data.name=checkpoint is for evaluating a checkpoint; name a corpus here")
    return get_corpus(name)


def resolve(cfg: DataConfig, split: str) -> Source:
    """Which documents `split` is: data.path / data.valid_path, else data.root, else the embedded corpus or the hub."""
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
    # Nothing is held out of the training documents when validation is elsewhere.
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
    """The files of a split at `path`: those whose published names say so, else everything there is."""
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
    """The training or validation part of unsplit documents; text8 cuts by characters instead."""
    if source.corpus.form == "text8":
        return source
    return replace(source, part="train" if source.split == "train" else "valid")

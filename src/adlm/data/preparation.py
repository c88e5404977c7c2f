"""From a corpus to prepared sequences (`adlm data`): tokenise on all cores, pack, and keep the result in the cache.

The name of the prepared folder ends in a fingerprint of everything the sequences depend on (contents of the source,
split, reader, detokenizer, tokenizer, packing, length), so a changed tokenizer never reads an old cache. Work goes to a
`.partial` folder: every few million characters become one shard file, renamed into place when complete, so that a
killed run resumes where it was. The finished folder is renamed last, under a lock, so that several processes can
prepare the same data at once. Documents stream through two batches at a time; memory does not grow with the corpus.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.data import blocks as storage
from adlm.data import formats, packing
from adlm.data.blocks import Blocks, BlockWriter, Corrupt, cache_errors, cache_folder, locked, sha256
from adlm.data.corpora import ALIASES
from adlm.data.packing import PackedSequences, Progress, Shards
from adlm.data.pairs import pack as pack_pairs
from adlm.data.pairs import packing_name, padded_length
from adlm.data.sources import Source, readable_corpus, resolve
from adlm.data.tokenizers import Tokenizer, limit_threads, load_tokenizer
from adlm.errors import choose, require
from adlm.io.paths import path_of, write_atomically
from adlm.schema import Config, DataConfig
from adlm.tables import CORPORA

FIRST_NAMES = {"documents": "unwrapped"}
"""data.packing -> its older name in fingerprints, where they differ: prepared data stays valid."""


def prepare(cfg: DataConfig, tokenizer: Tokenizer, length: int, split: str = "train") -> Blocks:
    """The sequences of one split, from the cache if it holds them and they are valid, else built now."""
    if folder := prepared_folder(cfg, split):
        return _open_prepared(folder, tokenizer, length)
    source = resolve(cfg, split)
    require(
        cfg.packing != "documents" or not source.corpus.crop,
        f"data.name={source.name} takes windows of full sequences: it needs data.packing=stream",
    )
    packing.payload(length)
    cache = cache_folder(cfg)
    with cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        how = packing_name(tokenizer) if source.holds_pairs else FIRST_NAMES.get(cfg.packing, cfg.packing)
        stored = source.stored_length(length)
        recipe = {
            "format": storage.FORMAT,
            "corpus": source.name,
            "origin": _origin(cfg, source),
            "tokenizer": tokenizer.fingerprint,
            "packing": how,
            "length": stored,
            "crop": length if stored != length else 0,
            "max_sequences": cfg.max_sequences,
        }
        fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        folder = cache / f"{source.name}-{split}-{length}-{how}-{fingerprint[:16]}"
        if found := _open_valid(folder):
            return found
        with locked(folder) as alone:
            # Another process may have built it while this one waited.
            if found := _open_valid(folder):
                return found
            # Without a lock the folder is private: a killed run loses it, but it never mixes with another's.
            partial = folder.with_name(folder.name + (".partial" if alone else f".partial-{uuid.uuid4().hex[:8]}"))
            _build(cfg, source, tokenizer, length, partial, recipe | {"fingerprint": fingerprint})
            return _publish(partial, folder)


def tokenizer_for(cfg: DataConfig) -> Tokenizer:
    """The tokenizer that cfg names, or the corpus' default; a bpe-N is trained once on the training split and kept."""
    if folder := prepared_folder(cfg, "train"):
        own = folder / "tokenizer.json"
        return load_tokenizer(cfg.tokenizer or str(own), root=cfg.root)
    _, corpus = readable_corpus(cfg.name)
    name = cfg.tokenizer or corpus.tokenizer
    if not name.startswith("bpe-"):
        return load_tokenizer(name, root=cfg.root)
    source = resolve(cfg, "train")
    with cache_errors(cache_folder(cfg)):
        identity = hashlib.sha256(json.dumps(_origin(cfg, source), sort_keys=True).encode()).hexdigest()
        kept = cache_folder(cfg) / "tokenizers" / f"{name}-{source.name}-{identity[:16]}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        with locked(kept):
            if kept.is_file():
                with contextlib.suppress(ValueError):
                    return _named(load_tokenizer(str(kept)), name)
            trained = load_tokenizer(name, documents=source.documents(corpus.length))
            write_atomically(kept, trained.backend.to_str())
            return trained


def prepared_folder(cfg: DataConfig, split: str) -> Path | None:
    """The prepared folder that data.name=prepared points at for this split; None for any other corpus."""
    name = cfg.name if split == "train" else cfg.valid_name or cfg.name
    if name != "prepared":
        return None
    path = cfg.path if split == "train" else cfg.valid_path
    key = "data.path" if split == "train" else "data.valid_path"
    require(bool(path), f"data.name=prepared needs {key}, a folder written by `adlm data prepare`")
    folder = path_of(path)
    require(storage.is_prepared(folder), f"{key}={path!r} holds no {storage.MANIFEST}; it must be a prepared folder")
    return folder


def _named(tokenizer: Tokenizer, name: str) -> Tokenizer:
    tokenizer.name = name
    return tokenizer


# ---- identity -------------------------------------------------------------------------------------------------------


def _origin(cfg: DataConfig, source: Source) -> dict[str, Any]:
    """What identifies the documents: contents of files (not their names), a hub revision, or a Python version."""
    if source.files:
        digests = sha256(source.files, cache_folder(cfg))
        contents: Any = [[path.stat().st_size, digest] for path, digest in zip(source.files, digests)]
    elif source.corpus.module:
        contents = importlib.import_module(source.corpus.module).identity()
    else:
        corpus = source.corpus
        contents = [corpus.hub, corpus.config, corpus.revision, corpus.splits[source.split]]
    held_out: list[Any] | None = None
    if source.part != "whole":
        held_out = [source.part, source.valid_fraction, source.corpus.valid_documents]
        held_out += ["any size"] if source.corpus.any_size else []
    return {
        "contents": contents,
        "split": source.split if source.corpus.form == "text8" else None,
        "held_out": held_out,
        "reader": [source.corpus.form, source.text_key, formats.READERS_VERSION],
        "detokenizer": [source.corpus.detokenizer, formats.DETOKENIZERS_VERSION],
    }


# ---- building -------------------------------------------------------------------------------------------------------


def _build(
    cfg: DataConfig, source: Source, tokenizer: Tokenizer, length: int, partial: Path, recipe: dict[str, Any]
) -> None:
    """Fill the folder `partial` with sequences and manifest, reusing the shards that are already there."""
    (partial / "shards").mkdir(parents=True, exist_ok=True)
    stored = source.stored_length(length)
    if source.holds_pairs:
        stored = padded_length(source.every_pair(), tokenizer, length)
    began = time.monotonic()
    writer = BlockWriter(partial, stored, tokenizer.vocab_size, cfg.max_sequences)
    with contextlib.closing(writer), Progress(f"preparing {source.name} {source.split}") as progress:
        shards = _shards(cfg, partial / "shards", tokenizer, progress)
        for packed in _pack(shards, cfg, source, tokenizer, stored):
            writer.write(packed)
            if writer.full:
                break
        if not writer.written:
            writer.close()  # Windows cannot remove an open file
            shutil.rmtree(partial)
            raise ValueError(_too_short(source, shards, length))
        tokenizer.save(partial / "tokenizer.json")
        bos, eos = _ends(cfg, tokenizer)
        writer.finish(
            recipe
            | {
                "split": source.split,
                "bos_id": bos,
                "eos_id": eos,
                "mask_id": tokenizer.mask_id,
                "vocab_size": tokenizer.vocab_size,
                "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
                "files": [path.name for path in source.files],
                "documents": shards.documents,
                "tokens": shards.tokens,
                "seconds": round(time.monotonic() - began, 3),
            }
        )
    shutil.rmtree(partial / "shards")


def _shards(cfg: DataConfig, folder: Path, tokenizer: Tokenizer, progress: Progress) -> Shards:
    """The shards made by threads of this machine, or by a cluster."""
    if cfg.engine == "threads":
        return Shards(folder, tokenizer, progress)
    from adlm.data.sources import RayShards

    return RayShards(folder, tokenizer, progress, cfg)


def _publish(partial: Path, folder: Path) -> Blocks:
    """Rename the finished folder into place."""
    if found := _open_valid(folder):  # only without locks: another process was faster
        shutil.rmtree(partial)
        return found
    if folder.exists():  # corrupt
        shutil.rmtree(folder)
    os.replace(partial, folder)
    return Blocks(folder)


def _ends(cfg: DataConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    return tokenizer.release_ends() if cfg.packing == "release" else (tokenizer.bos_id, tokenizer.eos_id)


def _pack(
    shards: Shards, cfg: DataConfig, source: Source, tokenizer: Tokenizer, length: int
) -> Iterator[PackedSequences]:
    bos, eos = _ends(cfg, tokenizer)
    # Never the mask: padding is not noise. A vocabulary without padding token uses EOS.
    pad = eos if tokenizer.pad_id is None else tokenizer.pad_id
    if source.holds_pairs:
        return _pack_pairs(shards, source, tokenizer, length, pad)
    batches = shards.of_source(source, length)
    if cfg.packing == "documents":
        return packing.unwrapped(batches, length, bos, eos, pad)
    if cfg.packing == "release":
        return packing.release(batches, length, bos, eos)
    short = source.corpus.any_size and source.split != "train"
    return packing.stream(batches, length, bos, eos, pad if short else None)


def _pack_pairs(
    shards: Shards, source: Source, tokenizer: Tokenizer, length: int, pad: int
) -> Iterator[PackedSequences]:
    for packed in pack_pairs(source.pairs(), tokenizer, length, pad):
        assert packed.lengths is not None
        shards.count(len(packed.tokens), int(packed.lengths.sum()))
        yield packed


def _too_short(source: Source, shards: Shards, length: int) -> str:
    """Why there is not even one sequence, and what to change."""
    what = source.describe()
    if not shards.documents:
        held = f"; nothing is held out by data.valid_fraction={source.valid_fraction}: give data.valid_path"
        return f"{what} holds no documents" + (held if source.part == "valid" else "")
    tokens = shards.tokens + shards.documents  # each document is followed by EOS
    needs = source.stored_length(length) - 2
    have = f"{what} has {tokens} tokens in {shards.documents} document{'s' * (shards.documents > 1)}"
    if tokens >= needs:
        return f"{have}, but data.packing=release drops the rest of every 1000 documents; use data.packing=stream"
    fits = f"model.length={max(3, tokens + 2)} would fit one"
    if source.part == "valid" and not source.corpus.valid_fraction:
        fits += f"; or hold out more than data.valid_fraction={source.valid_fraction}, or give data.valid_path"
    return f"{have}, but one sequence of model.length={length} needs {needs}; {fits}"


# ---- the cache ------------------------------------------------------------------------------------------------------


def _open_valid(folder: Path) -> Blocks | None:
    """The prepared sequences if they exist and are valid."""
    if not folder.exists():
        return None
    try:
        return Blocks(folder)
    except Corrupt as problem:
        warnings.warn(f"{problem}; preparing it again", stacklevel=3)
        return None


def _open_prepared(folder: Path, tokenizer: Tokenizer, length: int) -> Blocks:
    try:
        found = Blocks(folder)
    except Corrupt as problem:
        raise ValueError(f"{problem}; prepare it again") from None
    made_with = found.manifest["tokenizer"]
    require(
        made_with["fingerprint"] == tokenizer.fingerprint,
        f"{folder} was prepared with tokenizer {made_with['name']!r}, not with {tokenizer.name!r} (data.tokenizer)",
    )
    require(
        found.manifest["vocab_size"] == tokenizer.vocab_size,
        f"{folder} was prepared with {found.manifest['vocab_size']} entries, its tokenizer has {tokenizer.vocab_size}",
    )
    usable = found.crop or found.length
    fits = usable == length or (found.starts is not None and usable <= length)
    require(fits, f"{folder} has sequences of {usable} tokens, but model.length={length}")
    return found


# ---- adlm data ------------------------------------------------------------------------------------------------------


def run_data(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm data [list | prepare [split ...]]`; returns what it prints."""
    action = choose("adlm data", args[0] if args else "list", ("list", "prepare"))
    if action == "list":
        require(len(args) <= 1, f"adlm data list takes no further word, got {args[1:]}")
        return list_corpora()
    limit_threads(cfg.train.num_threads)
    return prepare_splits(cfg, list(args[1:]) or ["train", "valid"])


def list_corpora() -> dict[str, Any]:
    """Print and return the table of corpora."""
    table = Table("name", "tokenizer", "length", "packing", "what", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    corpora = {name: CORPORA.load(name) for name in CORPORA}
    for name, corpus in corpora.items():
        table.add_row(name, corpus.tokenizer, str(corpus.length), corpus.packing, corpus.about)
    console = Console()
    # A pipe has no width: do not wrap lines that a program reads.
    (console if console.is_terminal else Console(width=200)).print(table)
    return {
        "corpora": {
            name: {
                "about": c.about,
                "hub": f"{c.hub} {c.config}".strip(),
                "tokenizer": c.tokenizer,
                "length": c.length,
                "packing": c.packing,
                "detokenizer": c.detokenizer,
            }
            for name, c in corpora.items()
        },
        "aliases": ALIASES,
    }


def prepare_splits(cfg: Config, splits: list[str]) -> dict[str, Any]:
    """Prepare (or find) the sequences of each split, check every byte, and print where they are."""
    tokenizer = tokenizer_for(cfg.data)
    result: dict[str, Any] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    for split in splits:
        blocks = prepare(cfg.data, tokenizer, cfg.model.length, split)
        try:
            blocks = Blocks(blocks.folder, check_all=True)
        except Corrupt as problem:
            raise ValueError(f"{problem}; remove the folder and prepare again") from None
        facts = {key: blocks.manifest[key] for key in ("documents", "tokens", "rows", "length", "bytes", "seconds")}
        result[split] = {"folder": str(blocks.folder), **facts}
        rate = facts["tokens"] / max(facts["seconds"], 1e-9)
        print(
            f"{split}: {facts['rows']:,} sequences of {facts['length']} from {facts['tokens']:,} tokens of "
            f"{facts['documents']:,} documents ({rate:,.0f} tokens/s when made), {facts['bytes'] / 1e6:,.1f} MB"
        )
        print(f"  {blocks.folder}")
    return result

"""From a corpus to prepared rows: tokenise on all cores, pack, and keep the result under a name that says what it is.

The cache folder's name ends in a fingerprint of everything the rows depend on (contents of the source, split, reader,
detokenizer, tokenizer, packing, length), so a changed tokenizer cannot meet an old cache. Work goes to a `.partial`
folder: every few million characters become one shard file, renamed into place when complete, so a killed run goes on
where it was; the finished folder is renamed last, under a lock that lets several processes ask at once.
Documents stream through, two batches at a time; memory does not grow with the corpus.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adlm.data import blocks as storage
from adlm.data import detokenizers, formats, packing, pydocs
from adlm.data.blocks import Blocks, Damaged, RowWriter
from adlm.data.cache import cache_folder, explained, locked, sha256
from adlm.data.packing import Tokens
from adlm.data.progress import Progress
from adlm.data.shards import Shards
from adlm.data.sources import Source, readable_corpus, resolve
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.errors import choose, require
from adlm.io.paths import path_of, write_atomically
from adlm.schema import DataConfig

PACKINGS = ("stream", "release")


def prepare(cfg: DataConfig, tokenizer: Tokenizer, length: int, split: str = "train") -> Blocks:
    """The rows of one split, from the cache if they are there and sound, else built now."""
    choose("data.packing", cfg.packing, PACKINGS)
    if prepared_folder(cfg, split):
        return _open_prepared(cfg, tokenizer, length, split)
    source = resolve(cfg, split)
    require(
        cfg.wrap or not source.corpus.crop,
        f"data.name={source.name} cuts windows out of full rows: it needs data.wrap=true",
    )
    packing.payload(length)
    with explained(cache_folder(cfg)):
        cache = cache_folder(cfg)
        cache.mkdir(parents=True, exist_ok=True)
        recipe = _recipe(cfg, source, tokenizer, length)
        fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        how = cfg.packing if cfg.wrap else "unwrapped"
        folder = cache / f"{source.name}-{split}-{length}-{how}-{fingerprint[:16]}"
        if found := _open_sound(folder):
            return found
        with locked(folder) as alone:
            # Another process may have built it while this one waited.
            if found := _open_sound(folder):
                return found
            # Without a lock the work is private, hence lost if killed, but never mixed with another's.
            partial = folder.with_name(folder.name + (".partial" if alone else f".partial-{uuid.uuid4().hex[:8]}"))
            _build(cfg, source, tokenizer, length, partial, recipe | {"fingerprint": fingerprint})
            return _publish(partial, folder)


def tokenizer_for(cfg: DataConfig) -> Tokenizer:
    """The tokenizer that cfg names, or the corpus' default; a bpe-N is trained on the training split once and kept."""
    if folder := prepared_folder(cfg, "train"):
        own = folder / "tokenizer.json"
        return load_tokenizer(cfg.tokenizer or str(own), root=cfg.root)
    _, corpus = readable_corpus(cfg.name)
    name = cfg.tokenizer or corpus.tokenizer
    if not name.startswith("bpe-"):
        return load_tokenizer(name, root=cfg.root)
    source = resolve(cfg, "train")
    with explained(cache_folder(cfg)):
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
    """The folder of rows that data.name=prepared points at for this split; None for any other corpus."""
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
    """What the documents are: contents of files (not their names), or a hub revision, or a Python version."""
    if source.files:
        contents: Any = [[path.stat().st_size, sha256(path, cache_folder(cfg))] for path in source.files]
    elif source.name == "pydocs":
        contents = pydocs.identity()
    else:
        corpus = source.corpus
        contents = [corpus.hub, corpus.config, corpus.revision, corpus.splits[source.split]]
    held_out = [source.part, source.share, source.corpus.valid_documents] if source.part != "whole" else None
    return {
        "contents": contents,
        "split": source.split if source.corpus.form == "text8" else None,
        "held_out": held_out,
        "reader": [source.corpus.form, source.text_key, formats.VERSION],
        "detokenizer": [source.corpus.detokenizer, detokenizers.VERSION],
    }


def _recipe(cfg: DataConfig, source: Source, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    return {
        "format": storage.FORMAT,
        "corpus": source.name,
        "origin": _origin(cfg, source),
        "tokenizer": tokenizer.fingerprint,
        "packing": cfg.packing if cfg.wrap else "unwrapped",
        "length": source.row_length(length),
        "crop": length if source.row_length(length) != length else 0,
        "max_sequences": cfg.max_sequences,
    }


# ---- building -------------------------------------------------------------------------------------------------------


def _build(
    cfg: DataConfig, source: Source, tokenizer: Tokenizer, length: int, partial: Path, recipe: dict[str, Any]
) -> None:
    """Fill the folder `partial` with rows and manifest, going on from the shards that are already there."""
    (partial / "shards").mkdir(parents=True, exist_ok=True)
    stored = source.row_length(length)
    began = time.monotonic()
    if cfg.num_proc:
        # Read by the library's thread pool when it first starts; an earlier choice in this process stands.
        os.environ.setdefault("RAYON_NUM_THREADS", str(cfg.num_proc))
    writer = RowWriter(partial, stored, tokenizer.vocab_size, cfg.max_sequences)
    with contextlib.closing(writer), Progress(f"preparing {source.name} {source.split}") as progress:
        shards = Shards(partial / "shards", tokenizer, progress)
        for rows in _pack(shards.of(source.documents(stored)), cfg, tokenizer, stored):
            writer.write(rows)
            if writer.full:
                break
        if not writer.rows:
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


def _publish(partial: Path, folder: Path) -> Blocks:
    """Give the finished folder its name."""
    if found := _open_sound(folder):  # only where there is no lock: someone else was faster
        shutil.rmtree(partial)
        return found
    if folder.exists():  # damaged
        shutil.rmtree(folder)
    os.replace(partial, folder)
    return Blocks(folder)


def _ends(cfg: DataConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    wants_release = cfg.wrap and cfg.packing == "release"
    return tokenizer.release_ends() if wants_release else (tokenizer.bos_id, tokenizer.eos_id)


def _pack(batches: Iterable[Tokens], cfg: DataConfig, tokenizer: Tokenizer, length: int) -> Iterator[packing.Rows]:
    bos, eos = _ends(cfg, tokenizer)
    if not cfg.wrap:
        # Never the mask: padding is not noise. EOS stands in where a vocabulary has no padding token.
        pad = eos if tokenizer.pad_id is None else tokenizer.pad_id
        return packing.unwrapped(batches, length, bos, eos, pad)
    return (packing.release if cfg.packing == "release" else packing.stream)(batches, length, bos, eos)


def _too_short(source: Source, shards: Shards, length: int) -> str:
    """Why not one row came out, and what would help."""
    what = source.describe()
    if not shards.documents:
        held = f"; nothing is held out by data.valid_fraction={source.share}: give data.valid_path"
        return f"{what} holds no documents" + (held if source.part == "valid" else "")
    tokens = shards.tokens + shards.documents  # each document is followed by EOS
    needs = source.row_length(length) - 2
    have = f"{what} has {tokens} tokens in {shards.documents} document{'s' * (shards.documents > 1)}"
    if tokens >= needs:
        return f"{have}, but data.packing=release drops the rest of every 1000 documents; use data.packing=stream"
    fits = f"model.length={max(3, tokens + 2)} would fit one"
    if source.part == "valid" and not source.corpus.valid_fraction:
        fits += f"; or hold out more than data.valid_fraction={source.share}, or give data.valid_path"
    return f"{have}, but one row of model.length={length} needs {needs}; {fits}"


# ---- the cache ------------------------------------------------------------------------------------------------------


def _open_sound(folder: Path) -> Blocks | None:
    """The prepared rows if they are there and undamaged."""
    if not folder.exists():
        return None
    try:
        return Blocks(folder)
    except Damaged as damage:
        warnings.warn(f"{damage}; preparing it again", stacklevel=3)
        return None


def _open_prepared(cfg: DataConfig, tokenizer: Tokenizer, length: int, split: str) -> Blocks:
    folder = prepared_folder(cfg, split)
    assert folder is not None
    try:
        found = Blocks(folder)
    except Damaged as damage:
        raise ValueError(f"{damage}; prepare it again") from None
    made_with = found.manifest["tokenizer"]
    require(
        made_with["fingerprint"] == tokenizer.fingerprint,
        f"{folder} was prepared with tokenizer {made_with['name']!r}, not with {tokenizer.name!r} (data.tokenizer)",
    )
    usable = found.crop or found.length
    require(usable == length, f"{folder} has rows of {usable} tokens, but model.length={length}")
    return found

"""Prepared rows where something fails: no kill, damage, crowd or full disk can spoil them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus, refusal, texts

from adlm.data import blocks as storage
from adlm.data import packing
from adlm.data import preparation as module
from adlm.data.blocks import Blocks, Corrupt
from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes
from adlm.schema import DataConfig

BYTES = raw_bytes()


@pytest.fixture
def cfg(tmp_path) -> DataConfig:
    path = corpus(tmp_path / "a.jsonl")
    return DataConfig(name="file", path=str(path), valid_fraction=0.1, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("harm", ["truncate", "flip", "manifest", "lengths", "remove"])
def test_damage_is_noticed_and_repaired(cfg, harm):
    cfg = replace(cfg, packing="documents" if harm == "lengths" else "stream")
    first = prepare(cfg, BYTES, 32, "train")
    good = np.array(first.tokens)
    rows, folder = first.folder / "rows.bin", first.folder
    del first
    if harm == "truncate":
        os.truncate(rows, rows.stat().st_size - 1)
    elif harm == "flip":
        data = bytearray(rows.read_bytes())
        data[len(data) // 2] ^= 1
        rows.write_bytes(data)
    elif harm == "manifest":
        (folder / "manifest.json").write_text("{")
    elif harm == "lengths":
        (folder / "lengths.npy").write_bytes(b"nonsense")
    else:
        rows.unlink()
    with pytest.raises(Corrupt):
        Blocks(folder)
    with pytest.warns(UserWarning, match="preparing it again"):
        again = prepare(cfg, BYTES, 32, "train")
    assert np.array_equal(again.tokens, good)
    Blocks(folder, check_all=True)


def test_every_piece_is_checked_when_asked(cfg, monkeypatch):
    monkeypatch.setattr(storage, "PIECE_BYTES", 64)
    rows = prepare(cfg, BYTES, 32, "train")
    assert len(rows.manifest["crc32"]) == -(-rows.manifest["bytes"] // 64) > 10
    monkeypatch.setattr(storage, "CHECKED_BYTES", 128)  # a "large" file: only every so-manieth piece on opening
    data = bytearray((rows.folder / "rows.bin").read_bytes())
    data[70] ^= 1
    (rows.folder / "rows.bin").write_bytes(data)
    Blocks(rows.folder)
    with pytest.raises(Corrupt, match="corrupt between bytes 64 and 128"):
        Blocks(rows.folder, check_all=True)


def test_goes_on_after_an_interruption(cfg, monkeypatch):
    monkeypatch.setattr(packing, "SHARD_CHARACTERS", 50)
    whole = np.array(prepare(replace(cfg, cache_dir=cfg.cache_dir + "2"), BYTES, 32, "train").tokens)
    encoded, allowed = [], 5
    real = type(BYTES).encode_batch

    def encode(self, batch):
        if len(encoded) == allowed:
            raise KeyboardInterrupt
        encoded.append(batch)
        return real(self, batch)

    monkeypatch.setattr(type(BYTES), "encode_batch", encode)
    with pytest.raises(KeyboardInterrupt):
        prepare(cfg, BYTES, 32, "train")
    (folder,) = Path(cfg.cache_dir).glob("*.partial/shards")
    assert len(list(folder.glob("*.npz"))) == 5
    # One shard is damaged as well: it is made again, the other four are not.
    damaged = sorted(folder.glob("*.npz"))[2]
    damaged.write_bytes(damaged.read_bytes()[:-30])
    allowed = 1000
    assert np.array_equal(prepare(cfg, BYTES, 32, "train").tokens, whole)
    total = sum(1 for _ in packing.grouped(iter(texts(cfg)[:36])))
    assert total > 10
    assert len(encoded) == 5 + total - 4
    assert not list(Path(cfg.cache_dir).glob("*.partial"))


KILLED = """
import sys
from adlm.data import packing, tokenizers
from adlm.data.preparation import prepare
from adlm.data.tokenizers import load_tokenizer
from adlm.schema import DataConfig
packing.SHARD_CHARACTERS = 2000
path, cache = sys.argv[1:]
print("ready", flush=True)
prepare(DataConfig(name="file", path=path, cache_dir=cache), load_tokenizer("bytes"), 64, "train")
"""


def test_kill_9_at_any_moment(tmp_path):
    path = corpus(tmp_path / "a.jsonl", 20_000)
    cfg = DataConfig(name="file", path=str(path), cache_dir=str(tmp_path / "cache"))
    for delay in (0.0, 0.05, 0.15, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), cfg.cache_dir], stdout=subprocess.PIPE
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that has its final name may be damaged
        found = prepare(cfg, BYTES, 64, "train")
    clean = prepare(replace(cfg, cache_dir=str(tmp_path / "clean")), BYTES, 64, "train")
    assert np.array_equal(found.tokens, clean.tokens)
    assert found.manifest["tokens"] == clean.manifest["tokens"]


def _prepare_in_child(cfg, queue):
    queue.put(prepare(cfg, raw_bytes(), 32, "train").tokens.tolist())


def test_several_processes_at_once(cfg):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=_prepare_in_child, args=(cfg, queue)) for _ in range(3)]
    for child in children:
        child.start()
    found = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert found[0] == found[1] == found[2] == prepare(cfg, BYTES, 32, "train").tokens.tolist()
    assert len([p for p in Path(cfg.cache_dir).iterdir() if p.is_dir()]) == 1


def test_without_locks_work_is_private(cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    seen = []
    real = module._build
    monkeypatch.setattr(module, "_build", lambda *a: seen.append(a[4].name) or real(*a))
    prepare(cfg, BYTES, 32, "train")
    assert ".partial-" in seen[0]
    assert not list(Path(cfg.cache_dir).glob("*.partial*"))


def test_unwritable_cache(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(replace(cfg, cache_dir=str(tmp_path / "file" / "cache")))
    assert "cannot write prepared data under" in message
    assert "choose data.cache_dir" in message


def test_a_source_that_cannot_be_read_is_not_blamed_on_the_cache(cfg, monkeypatch):
    def failing(file, algorithm):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("adlm.data.blocks.hashlib.file_digest", failing)
    assert refusal(cfg) == f"cannot read {cfg.path} (Input/output error)"


def test_digests_of_a_folder_are_read_and_written_once_a_pass(cfg, tmp_path, monkeypatch):
    (tmp_path / "many").mkdir()
    for i in range(30):
        (tmp_path / "many" / f"{i:02}.txt").write_text(f"Text number {i} of a folder.")
    written = []
    real = storage.write_atomically
    monkeypatch.setattr(
        storage, "write_atomically", lambda path, content: (written.append(path.name), real(path, content))
    )
    many = replace(cfg, path=str(tmp_path / "many"))
    first = prepare(many, BYTES, 32, "train")
    assert written.count("sources.json") == 1
    assert len(json.loads((Path(cfg.cache_dir) / "sources.json").read_text())) == 30
    (tmp_path / "many" / "07.txt").write_text("Another text.")
    assert prepare(many, BYTES, 32, "train").fingerprint != first.fingerprint
    (Path(cfg.cache_dir) / "sources.json").write_text("[1]")  # not ours: written anew
    prepare(many, BYTES, 32, "valid")


def test_a_corrupt_source_is_not_blamed_on_the_cache(cfg, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"some words {i}" for i in range(2000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[40:400] = b"\xff" * 360
    path.write_bytes(data)
    assert f"{path} is corrupt" in refusal(replace(cfg, path=str(path)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(cfg, monkeypatch):
    prepare(cfg, BYTES, 32, "train")
    real = storage.BlockWriter.__init__

    def on_full_disk(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self._file.close()
        self._file = open("/dev/full", "wb")  # noqa: SIM115

    monkeypatch.setattr(storage.BlockWriter, "__init__", on_full_disk)
    assert "No space left on device" in refusal(cfg, length=16)

"""data.engine=ray: the prepared folder of one machine, byte for byte; files of all formats, and at URLs."""

import csv
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from runs import WORDS

from adlm.data import packing
from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes
from adlm.schema import DataConfig

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two workers on this machine, with little memory."""
    ray.init(
        num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Documents in files of every format, in folders."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("cluster") / "corpus"
    (folder / "more").mkdir(parents=True)
    rng = random.Random(0)

    def texts(n: int) -> list[str]:
        return [" ".join(rng.choices(WORDS, k=rng.randint(5, 40))) for _ in range(n)]

    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(40)))
    with (folder / "b.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([t] for t in texts(30))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts(50)}), folder / "more" / "c.parquet")
    (folder / "more" / "d.txt").write_text("<|endoftext|>".join(texts(20)))
    return folder


def contents(folder: Path) -> dict[str, object]:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seconds")
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"} | {"manifest": manifest}


@pytest.mark.parametrize("packing_rule", ["stream", "release"])
def test_a_cluster_prepares_the_bytes_of_one_machine(corpus, tmp_path, packing_rule):
    plain = DataConfig(
        name="file", path=str(corpus), cache_dir=str(tmp_path / "plain"), valid_fraction=0.1, packing=packing_rule
    )
    there = replace(plain, cache_dir=str(tmp_path / "ray"), engine="ray")
    for split in ("train", "valid"):
        one, two = (prepare(cfg, raw_bytes(), 32, split).folder for cfg in (plain, there))
        assert one != two and contents(one) == contents(two), split


def test_shards_of_a_killed_run_are_not_made_again(corpus, tmp_path, monkeypatch):
    plain = DataConfig(name="file", path=str(corpus), cache_dir=str(tmp_path / "plain"), valid_path=str(corpus))
    there = replace(plain, cache_dir=str(tmp_path / "ray"), engine="ray")
    saved = packing.save_shard
    from adlm.data import sources as engine

    def dies_at_the_third(path: Path, batch: packing.Tokens) -> None:
        if len(list(path.parent.glob("*.npz"))) == 2:
            raise KeyboardInterrupt
        saved(path, batch)

    monkeypatch.setattr(engine, "save_shard", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(there, raw_bytes(), 32, "train")
    made = []
    monkeypatch.setattr(engine, "save_shard", lambda path, batch: (made.append(path.name), saved(path, batch)))
    found = prepare(there, raw_bytes(), 32, "train").folder
    assert sorted(made) == ["000002-000000.npz", "000003-000000.npz"], "two of four were there"
    assert contents(found) == contents(prepare(plain, raw_bytes(), 32, "train").folder)


@pytest.mark.parametrize("engine", ["threads", "ray"])
def test_a_corpus_at_a_url(corpus, tmp_path, engine):
    plain = DataConfig(name="file", path=str(corpus), cache_dir=str(tmp_path / "plain"), valid_fraction=0.1)
    there = replace(plain, path=corpus.as_uri(), cache_dir=str(tmp_path / "url"), engine=engine)
    one, two = (prepare(cfg, raw_bytes(), 32, "train").folder for cfg in (plain, there))
    assert contents(one) == contents(two)


def test_a_url_in_memory_and_one_that_is_not_there(tmp_path):
    files = fsspec.filesystem("memory")
    files.pipe("/texts/a.txt", ("one two three " * 50).encode())
    cfg = DataConfig(name="file", path="memory://texts", cache_dir=str(tmp_path), valid_path="memory://texts/a.txt")
    assert len(prepare(cfg, raw_bytes(), 32, "train")) == len(prepare(cfg, raw_bytes(), 32, "valid")) > 10
    with pytest.raises(ValueError, match=r"data\.path='memory://nothing' holds no file"):
        prepare(replace(cfg, path="memory://nothing"), raw_bytes(), 32, "train")


def test_a_text_too_small_to_be_divided_is_read_here(tmp_path):
    (tmp_path / "one.txt").write_text("word " * 400)
    cfg = DataConfig(name="file", path=str(tmp_path / "one.txt"), cache_dir=str(tmp_path / "a"), valid_fraction=0.1)
    one, two = (
        prepare(c, raw_bytes(), 32, "train") for c in (cfg, replace(cfg, engine="ray", cache_dir=str(tmp_path / "b")))
    )
    assert np.array_equal(one.tokens, two.tokens)


@pytest.mark.slow
def test_workers_and_commands_that_are_killed():
    script = Path(__file__).parents[2] / "benchmarks" / "ray_data.py"
    done = subprocess.run(
        [sys.executable, str(script), "--megabytes", "8", "--workers", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]

"""Prepare a corpus with the threads of this machine and with Ray: the same bytes, tokens per second, and two kills.

    python benchmarks/ray_data.py --megabytes 40 --workers 1 2

First without Ray; then Ray with each number of workers; then Ray with a worker killed in the middle, from which Ray
recovers; then the whole command killed in the middle, and a rerun that resumes. Fails if a prepared folder differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "ei", "o", "u") for c in ("", "n", "r", "st", "ly")]


def write_corpus(folder: Path, megabytes: float, files: int) -> Path:
    rng = random.Random(0)
    for number in range(files):
        with (folder / f"part-{number:03d}.jsonl").open("w") as file:
            while file.tell() < 1e6 * megabytes / files:
                file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=300)) + "."}) + "\n")
    return folder


def command(corpus: Path, cache: Path, *more: str) -> list[str]:
    keys = [
        "data=file",
        f"data.path={corpus}",
        f"data.cache_dir={cache}",
        "data.tokenizer=bpe-2000",
        "model.length=512",
    ]
    return [sys.executable, "-m", "adlm", "data", "prepare", "train", *keys, "model.length=512", *more, "--json"]


def prepare(line: list[str]) -> tuple[Path, dict]:
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])["train"]
    return Path(facts["folder"]), facts


def contents(folder: Path) -> dict[str, object]:
    """The contents of a prepared folder, except for the time it took."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seconds")
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"} | {"manifest": manifest}


def kept_shards(cache: Path) -> int:
    return len(list(cache.glob("*.partial/shards/*.npz")))


def wait_for_shards(cache: Path, n: int, process: subprocess.Popen) -> None:
    while kept_shards(cache) < n and process.poll() is None:
        time.sleep(0.05)


def kill_one_worker(process: subprocess.Popen) -> str:
    """Kill a worker of the Ray that this process has started: a grandchild process, named after its task."""
    import psutil

    found = psutil.Process(process.pid).children(recursive=True)
    able = [p for p in found if p.name().startswith("ray::") and "encode" in " ".join(p.cmdline())]
    able = able or [p for p in found if " ".join(p.cmdline()).startswith("ray::")]
    assert able, [p.name() for p in found]
    able[0].kill()
    return able[0].name()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    result: dict[str, object] = {"benchmark": "ray data", "megabytes": args.megabytes}
    os.environ.setdefault("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(200 << 20))
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        (home / "corpus").mkdir()
        corpus = write_corpus(home / "corpus", args.megabytes, args.files)
        folder, facts = prepare(command(corpus, home / "plain", "train.num_threads=1"))
        expected = contents(folder)
        result["threads, 1"] = round(facts["tokens"] / facts["seconds"])
        same = []
        for n in args.workers:
            cache = home / f"ray-{n}"
            folder, facts = prepare(command(corpus, cache, "data.engine=ray", f"train.num_threads={n}"))
            same.append(contents(folder) == expected)
            result[f"ray, {n}"] = round(facts["tokens"] / facts["seconds"])
        cache = home / "worker-killed"
        line = command(corpus, cache, "data.engine=ray", "train.num_threads=2")
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        wait_for_shards(cache, 2, process)
        result["killed"] = kill_one_worker(process)
        out = process.communicate()[0]
        folder = Path(json.loads(out.splitlines()[-1])["train"]["folder"])
        same.append(process.returncode == 0 and contents(folder) == expected)
        cache = home / "command-killed"
        line = command(corpus, cache, "data.engine=ray", "train.num_threads=2")
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_shards(cache, 3, process)
        process.kill()
        process.wait()
        result["shards kept when killed"] = kept = kept_shards(cache)
        times = {p.name: p.stat().st_mtime_ns for p in cache.glob("*.partial/shards/*.npz")}
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        wait_for_shards(cache, kept + 1, process)
        now = {p.name: p.stat().st_mtime_ns for p in cache.glob("*.partial/shards/*.npz")}
        result["shards not made again"] = sum(now.get(name) == at for name, at in times.items())
        out = process.communicate()[0]
        folder = Path(json.loads(out.splitlines()[-1])["train"]["folder"])
        same.append(process.returncode == 0 and contents(folder) == expected)
    result["equal to the plain path"] = same
    print(json.dumps(result))
    return 0 if all(same) and 0 < kept < args.files else 1


if __name__ == "__main__":
    sys.exit(main())

"""Two replicas behind HAProxy under load, on loopback: one is killed with SIGKILL, one drained with SIGTERM.

    python benchmarks/replicas.py --clients 16 --seconds 60

Clients request texts with known seeds and compare every answer, as in benchmarks/serving.py. After a quarter of the
time one replica is killed and started again; when it is back, the other one gets SIGTERM. Fails if an answer is wrong,
if a request got no answer, if more requests failed than the killed replica was working on, or if the drained replica
did not end with status 0. HAProxy's configuration is deploy/haproxy.cfg.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from serving import ROOT, Client, expected, make_model, make_pool, ready  # noqa: E402

from adlm.api import load  # noqa: E402


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(path: Path, port: int, slots: int) -> subprocess.Popen:
    line = [
        "serve",
        str(path),
        f"port={port}",
        f"sampling.batch_size={slots}",
        "queue=1000",
        "train.device=cpu",
        "workers=1",
        "grace=120",
    ]
    return subprocess.Popen([sys.executable, "-m", "adlm", *line], stdout=subprocess.DEVNULL, cwd=ROOT / "src")


def in_hand(port: int) -> int:
    """Sequences that a replica is working on or has in its queue."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return sum(int(float(v)) for v in re.findall(r"^adlm_(?:slots_in_use|queue_depth)\{.*\} (\S+)", text, re.MULTILINE))


class Load:
    """Clients that send requests until told to stop."""

    def __init__(self, port: int, pool: list[dict], texts: list[list[int]]):
        self.port, self.pool, self.texts = port, pool, texts
        self.statuses: dict[int, int] = {}
        self.seconds: list[float] = []
        self.wrong = self.unanswered = 0
        self.over = False

    async def client(self, number: int) -> None:
        rng, client = random.Random(number), Client(self.port)
        while not self.over:
            i, began = rng.randrange(len(self.pool)), time.perf_counter()
            try:
                status, answer = await client.ask(self.pool[i])
            except (OSError, EOFError, ValueError, StopIteration, asyncio.IncompleteReadError):
                self.unanswered += 1
                client = Client(self.port)
                continue
            self.seconds.append(time.perf_counter() - began)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status == 200:
                self.wrong += answer["choices"][0]["tokens"] != self.texts[i]
            else:
                client = Client(self.port)
        client.close()


async def wait_ready(port: int) -> None:
    while not await asyncio.to_thread(ready, port):
        await asyncio.sleep(0.1)


async def scene(args: argparse.Namespace, path: Path, load: Load, ports: list[int], replicas: list) -> dict:
    events: dict[str, object] = {}
    clients = [asyncio.create_task(load.client(i)) for i in range(args.clients)]
    await asyncio.sleep(args.seconds / 4)
    events["answers before the kill"] = sum(load.statuses.values())
    # this count is taken just before the kill; by then the replica may have up to one sequence per client
    events["in hand of the killed"] = await asyncio.to_thread(in_hand, ports[0])
    replicas[0].send_signal(signal.SIGKILL)
    replicas[0].wait()
    await asyncio.sleep(args.seconds / 8)
    events["failed after the kill"] = sum(n for status, n in load.statuses.items() if status != 200) + load.unanswered
    began = time.perf_counter()
    replicas[0] = start(path, ports[0], args.slots)
    await wait_ready(ports[0])
    events["seconds until it was back"] = round(time.perf_counter() - began, 1)
    await asyncio.sleep(args.seconds / 8)
    before = sum(n for status, n in load.statuses.items() if status != 200) + load.unanswered
    replicas[1].send_signal(signal.SIGTERM)
    began = time.perf_counter()
    events["status of the drained"] = await asyncio.to_thread(replicas[1].wait)
    events["seconds it drained"] = round(time.perf_counter() - began, 1)
    await asyncio.sleep(args.seconds / 4)
    load.over = True
    await asyncio.gather(*clients)
    after = sum(n for status, n in load.statuses.items() if status != 200) + load.unanswered
    return events | {"failed while draining": after - before}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--clients", type=int, default=16)
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--slots", type=int, default=64)
    args = p.parse_args()
    shape = argparse.Namespace(
        model="short", causal=False, lengths=[8, 12, 16], steps=[16, 32, 64], pool=60, device="cpu"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder) / "model")
        pool = make_pool(shape)
        front, *ports = (free_port() for _ in range(3))
        load_ = Load(front, pool, expected(load(path, "cpu"), pool))
        replicas = [start(path, port, args.slots) for port in ports]
        places = {"ADLM_BIND": f"127.0.0.1:{front}"} | {f"ADLM_{i + 1}": f"127.0.0.1:{p}" for i, p in enumerate(ports)}
        line = ["haproxy", "-f", str(ROOT / "deploy" / "haproxy.cfg")]
        proxy = subprocess.Popen(line, env=os.environ | places, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for port in (*ports, front):
                asyncio.run(wait_ready(port))
            events = asyncio.run(scene(args, path, load_, ports, replicas))
        finally:
            for process in (*replicas, proxy):
                if process.poll() is None:
                    process.kill()
    cuts = statistics.quantiles(load_.seconds, n=100)
    result = {
        "benchmark": "replicas", **vars(args), **events, "answers": len(load_.seconds), "statuses": load_.statuses,
        "wrong": load_.wrong, "unanswered": load_.unanswered, "p50_s": round(cuts[49], 3), "p99_s": round(cuts[98], 3),
    }  # fmt: skip
    sound = not load_.wrong and not load_.unanswered and not result["failed while draining"]
    sound = sound and result["failed after the kill"] <= args.clients and result["status of the drained"] == 0
    print(json.dumps(result | {"sound": sound}))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())

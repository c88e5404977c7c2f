"""Load test of a server over loopback: throughput, latency, memory, every answer checked; one JSON line at the end.

    python benchmarks/serving.py                                        # CPU: a small model, short sequences
    python benchmarks/serving.py --model wide --causal --lengths 24 32  # CPU: bound by reading weights
    python benchmarks/serving.py --model small --device cuda --lengths 512 1024 --steps 64 128 --slots 64
    python benchmarks/serving.py --checkpoint src/adlm/box --hostile    # ordinary clients beside hostile ones

A server is started as its own process. Clients (standard library only) draw from a fixed pool of requests of mixed
lengths, steps and samplers, first one at a time, then `--concurrency` at once, for `--seconds` each. The pool's texts
are computed with `lm.generate` before, and every answer is compared. Finally `--requests` more are sent while the
server's memory is watched. Weights are random. Fails if an answer is wrong, lost or not 200.

With `--hostile` it measures the latency of `--ordinary` clients instead: alone, then beside hostile ones, then alone
again, in one run. The hostile requests are those of HOSTILE; each is sent again as soon as it is answered.

On a GPU bf16 rounds differently in batches of different sizes, so that a draw sometimes gives another token: there an
answer is wrong if less than half of its tokens are the expected ones (for two different requests about one in twenty
agrees), and the fraction of equal tokens is reported.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from adlm.api import LanguageModel, load  # noqa: E402
from adlm.data.tokenizers import raw_bytes  # noqa: E402
from adlm.io.export import describe, save_folder  # noqa: E402
from adlm.models import build_model  # noqa: E402
from adlm.schema import Config, DataConfig, ModelConfig  # noqa: E402

MODELS = {
    # So small that a step's fixed cost (dispatch, Python) outweighs its arithmetic: more sequences are nearly free.
    "short": {"hidden_size": 64, "n_heads": 2, "n_blocks": 2, "n_denoiser_blocks": 1, "cond_dim": 16},
    # So large that a step of a few tokens takes the time of reading the weights.
    "wide": {"hidden_size": 1024, "n_heads": 8, "n_blocks": 4, "n_denoiser_blocks": 2, "cond_dim": 16},
    "small": {},
}
# Requests by which one client may slow down others: the most texts and steps, the longest score, the largest body
HOSTILE = {
    "infill": ("/v1/infill", {"n": 16, "steps": 4096, "sampler": "forward-backward"}),
    "infill, the most that is allowed": ("/v1/infill", {"n": 16, "steps": 256, "sampler": "forward-backward"}),
    "score": ("/v1/score", {"draws": 256}),
    "tokenize": ("/v1/tokenize", {"text": "word " * 198_000}),
}
SAMPLERS = ("mdlm", "remdm-cap", "remdm-loop", "first-hitting", "confidence")


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """An exported folder with random weights that draws letters."""
    torch.manual_seed(0)
    tokenizer = raw_bytes()
    plain = {"causal": True, "anchored": False} if args.causal else {}
    cfg = ModelConfig(**MODELS[args.model], length=max(args.lengths), dropout=0.0, **plain)
    model = build_model(cfg, tokenizer.vocab_size, tokenizer.mask_id)
    with torch.no_grad():
        torch.nn.init.normal_(model.head.weight, std=0.5 / cfg.hidden_size**0.5)
        model.head.bias[[tokenizer.encode(c)[0] for c in "abcdefghijklmnopqrstuvwxyz "]] += 8.0
    whole = Config(algo="benchmark", model=cfg, data=DataConfig(name="none", tokenizer="bytes"))
    if args.causal:
        whole.objective.name = "autoregressive"
    save_folder(folder, model.state_dict(), tokenizer, describe(whole, tokenizer, step=0))
    return folder


def make_pool(args: argparse.Namespace) -> list[dict]:
    """Bodies of /v1/infill, all different."""
    rng = random.Random(0)
    pool = []
    for seed in range(args.pool):
        body = {"prompt": "the cat"[: rng.randrange(4)], "length": rng.choice(args.lengths), "seed": seed}
        if not args.causal:
            # with an order by confidence, a rounding error changes the text
            samplers = SAMPLERS[:-1] if args.device.startswith("cuda") else SAMPLERS
            body |= {"sampler": rng.choice(samplers), "steps": rng.choice(args.steps), "eta": 0.05}
            body |= {"top_p": rng.choice([1.0, 0.9])}
        pool.append(body)
    return pool


def expected(lm: LanguageModel, pool: list[dict]) -> list[list[int]]:
    return [lm.generate(**{k: v for k, v in body.items() if v != ""})[0].tokens for body in pool]


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int):
        self.port, self.reader, self.writer = port, None, None

    async def ask(self, body: dict, path: str = "/v1/infill") -> tuple[int, dict]:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        head += f"\r\nContent-Length: {len(text)}"
        self.writer.write(head.encode() + b"\r\n\r\n" + text)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        return int(head.split()[1]), json.loads(await self.reader.readexactly(size))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Tally:
    def __init__(self, agreement: float) -> None:
        self.agreement = agreement
        """Fraction of an answer's tokens that must be as expected."""
        self.seconds: list[float] = []
        self.statuses: dict[int, int] = {}
        self.wrong = 0
        self.tokens = 0
        self.compared = 0
        self.equal = 0
        """How many of the compared tokens were as expected."""
        self.began = time.perf_counter()

    def add(self, status: int, answer: dict, tokens: list[int], seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.seconds.append(seconds)
        if status == 200:
            got = answer["choices"][0]["tokens"]
            equal = sum(a == b for a, b in zip(got, tokens))
            self.wrong += len(got) != len(tokens) or equal < self.agreement * len(tokens)
            self.tokens += answer["usage"]["completion_tokens"]
            self.compared += len(got)
            self.equal += equal

    def summary(self, clients: int) -> dict:
        elapsed, n = time.perf_counter() - self.began, len(self.seconds)
        cuts = statistics.quantiles(self.seconds, n=100) if n > 1 else self.seconds * 99
        return {
            "clients": clients,
            "seconds": round(elapsed, 1),
            "answers": n,
            "statuses": self.statuses,
            "wrong": self.wrong,
            "tokens_equal": round(self.equal / max(1, self.compared), 4),
            "requests_per_s": round(n / elapsed, 2),
            "tokens_per_s": round(self.tokens / elapsed, 1),
            "p50_ms": round(1000 * cuts[49], 1),
            "p99_ms": round(1000 * cuts[98], 1),
        }


async def load_with(
    port: int,
    pool: list[dict],
    texts: list[list[int]],
    clients: int,
    seconds: float,
    most: int = 0,
    agreement: float = 1,
) -> dict:
    """Run `clients` clients until the time is over or `most` requests are sent; wait for all answers."""
    tally, sent = Tally(agreement), 0

    async def one(number: int) -> None:
        nonlocal sent
        client, rng = Client(port), random.Random(number)
        while time.perf_counter() - tally.began < seconds and (not most or sent < most):
            sent += 1
            i = rng.randrange(len(pool))
            began = time.perf_counter()
            status, answer = await client.ask(pool[i])
            tally.add(status, answer, texts[i], time.perf_counter() - began)
        client.close()

    await asyncio.gather(*(one(i) for i in range(clients)))
    assert len(tally.seconds) == sent, "an answer was lost"
    return tally.summary(clients)


async def beside_hostile(
    port: int, pool: list[dict], texts: list[list[int]], args: argparse.Namespace, length: int
) -> dict:
    """Run ordinary clients alone, beside two hostile clients of each kind, and alone again."""
    answered: dict[str, dict[int, int]] = {name: {} for name in HOSTILE}

    async def hostile(name: str) -> None:
        client, (path, body) = Client(port), HOSTILE[name]
        more = {"/v1/infill": {"length": length}, "/v1/score": {"text": "a b " * (length // 3)}}.get(path, {})
        try:
            while True:
                status, _ = await client.ask(body | more, path)
                answered[name][status] = answered[name].get(status, 0) + 1
                await asyncio.sleep(0.1 if status != 200 else 0)  # refusals are quick; do not flood the server
        finally:
            client.close()

    load = functools.partial(load_with, port, pool, texts, args.ordinary, args.seconds)
    found = {"alone": await load()}
    tasks = [asyncio.create_task(hostile(name)) for name in HOSTILE for _ in range(2)]
    await asyncio.sleep(2)
    found["beside hostile"] = await load()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1)
    found["alone again"] = await load()
    alone = {q: (found["alone"][q] + found["alone again"][q]) / 2 for q in ("p50_ms", "p99_ms")}
    ratio = {q: round(found["beside hostile"][q] / alone[q], 2) for q in alone}
    return {"runs": found, "ratio": ratio, "hostile_statuses": answered}


def ready(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").status == 200
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """CPU time of a process: all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024, 1)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="", help="serve this instead of random weights")
    p.add_argument("--model", choices=MODELS, default="short")
    p.add_argument("--causal", action="store_true", help="an autoregressive model of that size")
    p.add_argument("--device", default="cpu")
    p.add_argument("--lengths", type=int, nargs="+", default=[8, 12, 16])
    p.add_argument("--steps", type=int, nargs="+", default=[16, 32, 64])
    p.add_argument("--slots", type=int, default=64)
    p.add_argument("--pool", type=int, default=200, help="different requests")
    p.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--hostile", action="store_true", help="measure ordinary clients beside hostile ones, nothing else")
    p.add_argument("--ordinary", type=int, default=1, help="ordinary clients of --hostile")
    p.add_argument("--requests", type=int, default=2000, help="sent while memory is watched (0: none)")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(args.checkpoint).resolve() if args.checkpoint else make_model(args, Path(folder) / "model"))
        result = run(args, path)
    print(json.dumps(result))
    return 0 if result["sound"] else 1


def run(args: argparse.Namespace, path: str) -> dict:
    loaded = functools.partial(load_with, agreement=0.5 if args.device.startswith("cuda") else 1)
    lm = load(path, args.device)
    pool = make_pool(args)
    texts = expected(lm, pool)
    print(f"{lm!r}: {len(pool)} different requests", file=sys.stderr)
    line = ["serve", path, "port=0", f"sampling.batch_size={args.slots}", "queue=1000", f"train.device={args.device}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "adlm", *line], stdout=subprocess.PIPE, text=True, cwd=ROOT / "src"
    )
    try:
        assert server.stdout is not None
        port = int(next(x for x in server.stdout if x.startswith("adlm serves on")).split()[3].rsplit(":", 1)[1])
        while not ready(port):
            time.sleep(0.1)
        if args.hostile:
            found = asyncio.run(beside_hostile(port, pool, texts, args, lm.length))
            right = all(r["wrong"] == 0 and set(r["statuses"]) == {200} for r in found["runs"].values())
            return {"benchmark": "serving, hostile", "model": path, **found, "sound": right}
        asyncio.run(loaded(port, pool, texts, min(args.concurrency), 600, most=max(args.concurrency)))  # warm-up
        runs = []
        for n in (1, *args.concurrency):
            before = cpu_seconds(server.pid)
            runs.append(asyncio.run(loaded(port, pool, texts, n, args.seconds)))
            # unlike elapsed time, this does not depend on other programs on the same cores
            runs[-1]["cpu_ms_per_request"] = round(1000 * (cpu_seconds(server.pid) - before) / runs[-1]["answers"], 2)
            print(json.dumps(runs[-1]), file=sys.stderr)
        memory = [memory_mib(server.pid)]
        for _ in range(4 if args.requests else 0):
            part = loaded(port, pool, texts, min(args.concurrency), 3600, most=args.requests // 4)
            runs.append(asyncio.run(part))
            memory.append(memory_mib(server.pid))
    finally:
        server.terminate()
        status = server.wait(60)
    one = runs[0]["requests_per_s"]
    return {
        "benchmark": "serving",
        "model": {"name": args.checkpoint or args.model, "parameters": sum(p.numel() for p in lm.model.parameters())},
        "settings": {k: v for k, v in vars(args).items() if k not in ("checkpoint", "model")},
        "config": asdict(lm.model.config),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else f"cpu, {torch.get_num_threads()}",
        "torch": torch.__version__,
        "runs": runs[: 1 + len(args.concurrency)],
        "cpu_speedup": [
            round(runs[0]["cpu_ms_per_request"] / r["cpu_ms_per_request"], 2)
            for r in runs[1 : 1 + len(args.concurrency)]
        ],
        "speedup": [round(r["requests_per_s"] / one, 2) for r in runs[1 : 1 + len(args.concurrency)]],
        "memory_mib": memory,
        "exit_status": status,
        "sound": status == 0 and all(r["wrong"] == 0 and set(r["statuses"]) == {200} for r in runs),
    }


if __name__ == "__main__":
    sys.exit(main())

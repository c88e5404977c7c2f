"""`adlm serve workers=2`: two processes on a CPU stand for two GPUs. Answers are exact, a worker that is killed comes
back, and the requests it had in hand are answered."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from served import LONG, readable_model, wait_until

from adlm.api import load
from adlm.schema import Config, ServeConfig
from adlm.serving.bodies import Problem
from adlm.serving.front import AnswerHead, Front, WorkerGone, WorkerProcess, guarded, sequences_of
from adlm.serving.jobs import merged

pytestmark = pytest.mark.timeout(900)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ADLM_API_KEY": ""}


@contextlib.contextmanager
def served(folder: Path, *settings: str):
    """The command with two workers: (process, url, lines of its log)."""
    own = ["port=0", "workers=2", "sampling.batch_size=4", *settings]
    line = [sys.executable, "-m", "adlm", "serve", str(folder), *own]
    process = subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reader.start()
    try:
        url = next(m[0] for text in process.stdout if (m := re.search(r"http://[\d.:]+", text)))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        wait_until(lambda: workers_ready(url) == 2, 300)
        yield process, url, said
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def workers_ready(url: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        found = re.search(r"^adlm_workers_ready (\d+)", httpx.get(f"{url}/metrics", timeout=30).text, re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def children(process: subprocess.Popen) -> list[int]:
    """The workers, by their command: Python's resource tracker is a child, too."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    found = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return readable_model(tmp_path_factory.mktemp("front") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as found:
        yield found


def infill(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/infill", json=body, timeout=300)


def test_answers_are_those_of_the_library_and_both_workers_give_them(server, folder):
    _, url, _ = server
    lm = load(folder, "cpu")
    expected = {seed: lm.generate(length=24, steps=8, seed=seed)[0].tokens for seed in range(12)}
    with ThreadPoolExecutor(12) as pool:
        answers = dict(zip(expected, pool.map(lambda s: infill(url, length=24, steps=8, seed=s), expected)))
    for seed, answer in answers.items():
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["tokens"] == expected[seed]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/", timeout=30).text.startswith("<!doctype html>")
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    assert "adlm_workers 2" in metrics and re.search(
        r'adlm_rows_total\{model="tiny",outcome="finished"\} 1[2-9]', metrics
    )
    assert metrics.count("# TYPE adlm_requests_total") == 1


def test_problems_have_the_shape_of_one_server(server):
    _, url, _ = server
    assert infill(url, length=10**6).status_code == 400
    assert infill(url, nothing=1).status_code == 422
    assert httpx.get(f"{url}/v1/nothing").status_code == 404
    wrong = httpx.get(f"{url}/v1/models", headers={"Host": "elsewhere.example"})
    assert wrong.status_code == 403 and wrong.json()["error"]["code"] == "wrong_host"


def test_streams_pass_through(server):
    _, url, _ = server
    with httpx.stream("POST", f"{url}/v1/frames", json={"length": 16, "steps": 6, "seed": 1}, timeout=60) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("event:")]
    assert events[0] == "event: start" and events[-1] == "event: end" and len(events) > 3


def test_a_worker_that_dies_comes_back_and_its_requests_are_answered(server, folder):
    """Requests that are running, several on each worker, and a stream. One worker is killed with -9."""
    process, url, said = server
    lm = load(folder, "cpu")
    expected = {seed: lm.generate(length=32, seed=seed, **LONG | {"steps": 100})[0].tokens for seed in range(6)}
    ended: list[str] = []

    def watch() -> None:
        body = {"length": 32, "seed": 99, **LONG | {"steps": 1500}}
        with httpx.stream("POST", f"{url}/v1/frames", json=body, timeout=300) as answer:
            ended.extend(line for line in answer.iter_lines() if line.startswith(("event: end", "event: error")))

    before = children(process)
    assert len(before) == 2
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(watch) for _ in range(2)]
        time.sleep(0.5)  # each worker has one of the streams
        answers = {s: pool.submit(infill, url, length=32, seed=s, **LONG | {"steps": 100}) for s in expected}
        time.sleep(1.0)
        began = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        for seed, answer in answers.items():
            found = answer.result()
            assert found.status_code in (200, 503), found.text
            if found.status_code == 503:
                assert found.headers["Retry-After"] == "1" and found.json()["error"]["code"] == "worker_died"
            else:
                assert found.json()["choices"][0]["tokens"] == expected[seed], "seeds stay exact"
        for stream in streams:
            stream.result()
    assert sorted(ended) == ["event: end", "event: error"], "one stream had begun on the worker that died"
    wait_until(lambda: workers_ready(url) == 2, 300)
    print(f"two workers again {time.monotonic() - began:.1f} s after the kill")
    assert any("killed by signal 9; starting it again" in text for text in said)
    assert [f.result().status_code for f in answers.values()].count(200) == 6, "all could be sent to the other worker"
    assert infill(url, length=32, seed=3, **LONG | {"steps": 100}).json()["choices"][0]["tokens"] == expected[3]


def test_drained_by_sigterm(folder):
    with served(folder, "grace=60") as (process, url, said), ThreadPoolExecutor(8) as pool:
        running = [pool.submit(infill, url, length=32, seed=s, **LONG | {"steps": 400}) for s in range(6)]
        wait_until(lambda: 'adlm_slots_in_use{model="tiny"} 6\n' in httpx.get(f"{url}/metrics", timeout=60).text)
        workers = children(process)
        process.terminate()
        wait_until(lambda: infill(url, length=8).status_code == 503)
        assert [f.result().status_code for f in running] == [200] * 6
        assert process.wait(60) == 0
        assert not any("Traceback" in text for text in said), "".join(said)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30)


# The queue, without processes


class Idle:
    """A worker that takes what it is given."""

    def __init__(self, number: int):
        self.number, self.load, self.ready, self.restarts, self.socket = number, 0, True, 0, "a socket"


def test_the_queue_is_one_for_all():
    async def scene() -> None:
        first, second = Idle(0), Idle(1)
        front = Front(ServeConfig(queue=3), 2, [first, second])  # type: ignore[list-item]
        taken = [await front.acquire(1, again=False) for _ in range(4)]
        assert (first.load, second.load) == (2, 2) and {w.number for w in taken} == {0, 1}
        waiting = [asyncio.create_task(front.acquire(1, again=False)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="queue is full") as full:
            await front.acquire(1, again=False)
        assert full.value.status == 429
        urgent = asyncio.create_task(front.acquire(1, again=True))
        await asyncio.sleep(0)
        front.release(second, 1)
        assert await urgent is second, "who has lost a worker is first, and is not refused"
        waiting[0].cancel()
        await asyncio.sleep(0)
        front.release(first, 1)
        assert await waiting[1] is first, "who has left is not waited for"
        first.ready = second.ready = False
        with pytest.raises(Problem) as gone:
            await front.acquire(1, again=True)
        assert gone.value.status == 503 and gone.value.headers["Retry-After"] == "1"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("body", "n"),
    [
        (b"", 1),
        (b"[]", 1),
        (b'{"n": 3}', 3),
        (b'{"prompt": ["a", "b"], "n": 2}', 4),
        (b'{"prompt": [1, 2]}', 1),
        (b'{"n": 1e999}', 1),
    ],
)
def test_sequences_of_a_body(body, n):
    assert sequences_of(body) == n


def test_metrics_of_workers_are_summed():
    own = "# TYPE adlm_requests_total counter\nadlm_requests_total 3\n# TYPE adlm_tokens_total counter\n"
    other = "# TYPE adlm_requests_total counter\nadlm_requests_total 2\n# TYPE adlm_tokens_total counter\n"
    both = merged(own, [other + 'adlm_tokens_total{model="a"} 5\n', other + 'adlm_tokens_total{model="a"} 6\n'])
    assert both.count("# TYPE adlm_tokens_total") == 1
    assert "adlm_requests_total 3\n" in both and 'adlm_tokens_total{model="a"} 11\n' in both


def test_all_that_is_said_of_a_metric_stands_together():
    """The format asks for it. A worker may say what another one has had no reason to."""
    rows = "# TYPE adlm_rows_total counter\n"
    seconds = "# TYPE adlm_seconds histogram\n" + "adlm_seconds_sum 2\nadlm_seconds_count 1\n"
    mine = "# TYPE adlm_workers gauge\nadlm_workers 2\n"
    finished = 'adlm_rows_total{outcome="finished"} 2\n'
    cancelled = 'adlm_rows_total{outcome="cancelled"} 1\n'
    both = merged(rows + mine, [rows + finished + seconds, rows + finished + cancelled + seconds])
    twice = seconds.replace(" 2", " 4").replace(" 1", " 2")
    assert both == rows + finished.replace(" 2", " 4") + cancelled + mine + twice


def test_a_request_is_not_sent_again_to_a_worker_that_lost_it(monkeypatch):
    """A process that is killed closes its connections before it counts as dead, and has the least to do by then."""
    dying, other = (
        SimpleNamespace(
            number=i, socket=i, ready=True, load=2 * i, restarts=0, process=SimpleNamespace(is_alive=lambda: True)
        )
        for i in range(2)
    )
    asked, sent = [], []

    async def exchange(place, *rest):
        asked.append(place)
        if place == dying.socket:
            raise WorkerGone("it closed the connection")
        yield AnswerHead(200, [])
        yield b"text"

    async def send(message):
        sent.append(message)

    monkeypatch.setattr("adlm.serving.front.exchange", exchange)
    front = Front(ServeConfig(), 8, [dying, other])
    asyncio.run(front.forward(SCOPE, b"{}", send))
    assert asked == [dying.socket, other.socket] and sent[0]["status"] == 200
    assert (dying.load, other.load, dying.ready) == (0, 2, False)


SCOPE = {
    "raw_path": b"/v1/completions",
    "path": "/v1/completions",
    "query_string": b"",
    "method": "POST",
    "headers": [],
}


@pytest.mark.parametrize("began", [False, True])
def test_a_worker_that_hangs_is_not_waited_for_longer_than_a_request_may_take(monkeypatch, began):
    """Stopped by a debugger, or inside a driver: its process lives and its connections stay open."""
    worker, sent = Idle(0), []

    async def exchange(place, *rest):
        if began:
            yield AnswerHead(200, [(b"content-type", b"text/event-stream")])
            yield b"data: a\n\n"
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    monkeypatch.setattr("adlm.serving.front.exchange", exchange)
    monkeypatch.setattr("adlm.serving.front.LATE", 0.1)
    front = Front(ServeConfig(timeout=0.1), 8, [worker])  # type: ignore[list-item]
    if began:
        asyncio.run(front.forward(SCOPE, b"{}", send))
        assert b"event: error" in sent[-1]["body"] and b"serve.timeout" in sent[-1]["body"]
        assert not sent[-1]["more_body"]
    else:
        with pytest.raises(Problem, match=r"serve\.timeout") as late:
            asyncio.run(front.forward(SCOPE, b"{}", send))
        assert late.value.status == 504 and not sent
    assert not worker.ready and worker.load == 0


def test_metrics_do_not_wait_for_a_worker_that_hangs(monkeypatch):
    async def exchange(place, *rest):
        if place:
            await asyncio.sleep(60)
        yield AnswerHead(200, [])
        yield b"# TYPE adlm_rows_total counter\nadlm_rows_total 3\n"

    monkeypatch.setattr("adlm.serving.front.exchange", exchange)
    monkeypatch.setattr("adlm.serving.front.SOON_ENOUGH", 0.1)
    workers = [SimpleNamespace(socket=i, ready=True, restarts=0, load=0) for i in range(2)]
    front = Front(ServeConfig(), 8, workers)  # type: ignore[arg-type]
    assert "adlm_rows_total 3\n" in asyncio.run(asyncio.wait_for(front.all_metrics(SCOPE), 5))


def test_what_draws_nothing_does_not_wait_for_those_that_draw():
    async def scene() -> None:
        worker = Idle(0)
        front = Front(ServeConfig(queue=3), 2, [worker])  # type: ignore[list-item]
        await front.acquire(5, again=False)
        waiting = asyncio.create_task(front.acquire(1, again=False))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(front.acquire(0, again=False), 1) is worker
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scene())


def test_other_origins_are_answered_as_by_one_process():
    """A browser asks without a key whether it may send one, and may read refusals."""
    front = Front(ServeConfig(cors="https://a.example"), 2, [])
    transport = httpx.ASGITransport(guarded(front, "secret"))  # type: ignore[arg-type]
    ours = {"Origin": "https://a.example"}
    asked = ours | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def scene() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            allowed = await http.options("/v1/infill", headers=asked)
            assert allowed.status_code == 200, allowed.text
            assert (await http.options("/v1/infill", headers=asked | {"Origin": "https://b"})).status_code == 400
            for headers, status in ((ours, 401), (ours | {"Authorization": "Bearer secret"}, 503)):
                refused = await http.post("/v1/infill", json={}, headers=headers)
                assert refused.status_code == status
                assert refused.headers["access-control-allow-origin"] == "https://a.example"
            assert (await http.get("/v1/models/a", headers={"Authorization": "Bearer secret"})).status_code == 503

    asyncio.run(scene())
    text = front.metrics.text()
    for path in ("/v1/infill", "/v1/models/{id}"):
        assert f'adlm_requests_total{{path="{path}",status="503"}} 1' in text, text
    assert 'path="other"' not in text


def test_a_worker_is_told_to_end_once(monkeypatch, tmp_path):
    """By a second SIGTERM a server ends out of order, with a traceback in the log."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    worker = WorkerProcess(0, Config(), [], tmp_path)
    worker.stop()
    worker.process = SimpleNamespace(is_alive=lambda: True, pid=7)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        worker.stop(number)
    assert told == [(7, signal.SIGTERM), (7, signal.SIGKILL)]

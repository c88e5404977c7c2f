"""What the server does when its engine fails and when it is told to end; docs/serving.md has the table."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import weakref

import httpx
import pytest
from marks import slow
from served import LONG, idle, load_tiny, readable_model, serving, wait_until, worker

from adlm.api import LanguageModel
from adlm.serving.jobs import in_one_part


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("faults") / "tiny")


def test_an_engine_that_fails_answers_500_and_goes_on(lm, monkeypatch, caplog):
    with serving({"tiny": LanguageModel(lm.loaded)}) as running:
        engine = worker(running).engine

        def fail(*slots):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine, "evaluate", fail)
        failed = httpx.post(running.url + "/v1/infill", json={"length": 8, "n": 3}, timeout=30)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_failed"
        assert "out of memory" in caplog.text and "out of memory" not in failed.text
        again = httpx.post(running.url + "/v1/infill", json={"length": 8, "seed": 1}, timeout=30)
        assert again.json()["choices"][0]["tokens"] == lm.generate(length=8, seed=1, steps=8)[0].tokens
        wait_until(idle(running), 10)


def test_a_failed_engine_is_freed_before_its_successor_is_built(lm, monkeypatch):
    """Right after an out-of-memory there is no room for two."""
    import adlm.api.language_model as module

    monkeypatch.setattr("adlm.serving.worker.log.exception", lambda *args: None)  # pytest keeps tracebacks
    with serving({"tiny": LanguageModel(lm.loaded)}) as running:
        engine, before, build = worker(running).engine, [], module.Engine
        old = weakref.ref(engine)

        def fail(*slots):
            raise RuntimeError("out of memory")

        engine.evaluate = fail
        del engine
        monkeypatch.setattr(module, "Engine", lambda *a, **kw: before.append(old()) or build(*a, **kw))
        assert httpx.post(running.url + "/v1/infill", json={"length": 8}, timeout=30).status_code == 500
        assert httpx.post(running.url + "/v1/infill", json={"length": 8}, timeout=30).status_code == 200
    assert before == [None]


def test_guesses_that_fail_leave_frames_without_them(lm, monkeypatch, caplog):
    with serving({"tiny": LanguageModel(lm.loaded)}) as running:

        def fail(*args):
            raise RuntimeError("out of memory")

        monkeypatch.setattr("adlm.serving.frames.likeliest", fail)
        for _ in range(2):
            film = httpx.post(running.url + "/v1/frames", json={"length": 8, "seed": 1}, timeout=30).text
            end = json.loads(film.split("event: end\ndata: ")[1])
            assert end["tokens"] == lm.generate(length=8, seed=1, steps=8)[0].tokens
        assert "guesses failed" in caplog.text


def test_before_the_engine_is_ready_the_server_says_so(lm, monkeypatch):
    from adlm.serving.worker import Worker

    go, warm_up = threading.Event(), Worker.warm_up
    monkeypatch.setattr(Worker, "warm_up", lambda self: go.wait(30) and warm_up(self))
    with serving({"tiny": LanguageModel(lm.loaded)}, wait=False) as running:
        for path, body in (("/v1/infill", {}), ("/v1/score", {"text": "a"}), ("/v1/completions", {"stream": True})):
            refused = httpx.post(running.url + path, json=body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        assert [httpx.get(running.url + p).status_code for p in ("/readyz", "/healthz", "/v1/models")] == [
            503,
            200,
            200,
        ]
        go.set()
        wait_until(lambda: httpx.get(running.url + "/readyz").status_code == 200)


def test_a_bug_in_a_route_is_answered_in_the_one_shape(lm, monkeypatch):
    with serving({"tiny": LanguageModel(lm.loaded)}) as running:
        monkeypatch.setattr(running.service.models["tiny"], "card", lambda: 1 / 0)
        response = httpx.get(running.url + "/v1/models")
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert "division" not in response.text
        assert 'adlm_requests_total{path="/v1/models",status="500"} 1' in running.service.metrics.text()


@pytest.mark.parametrize("grace", [60.0, 0.05])
def test_a_drain_finishes_or_cancels_and_refuses_what_is_new(lm, grace):
    with serving({"tiny": LanguageModel(lm.loaded)}, grace=grace) as running:

        async def drain():
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                body = {**LONG, "length": 32, "steps": 120}
                under_way = [asyncio.create_task(client.post("/v1/infill", json=body | {"seed": i})) for i in range(6)]
                while worker(running).taken < 6:
                    await asyncio.sleep(0.01)
                running.server.handle_exit(signal.SIGTERM, None)
                refused = await client.post("/v1/infill", json={"length": 8})
                ready = await client.get("/readyz")
                return await asyncio.gather(*under_way), refused, ready

        answers, refused, ready = asyncio.run(drain())
        running.thread.join(60)
        assert not running.thread.is_alive()
    assert (refused.status_code, ready.status_code) == (503, 503)
    assert refused.json()["error"]["code"] == "shutting_down" and "retry-after" in refused.headers
    expected = lm.generate(length=32, n=6, **{**LONG, "steps": 120})
    for i, answer in enumerate(answers):
        assert answer.status_code == (200 if grace > 1 else answer.status_code)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["tokens"] == expected[i].tokens
        else:
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
    assert grace > 1 or any(a.status_code == 503 for a in answers)


# `adlm serve` whose engine, from its first step or from the first after the warm-up, stays inside torch for minutes.
STUCK = """
import sys, torch
from adlm import cli
from adlm.engine import Engine
from adlm.serving.worker import Worker
step, warm_up = Engine.step, Worker.warm_up
def stuck(self, *only):
    print("stuck", flush=True)
    while True:
        torch.rand(256, 1024).sort()
def then_stuck(self):
    engine = warm_up(self)
    Engine.step = stuck
    return engine
if sys.argv[1] == "starting":
    Engine.step = stuck
else:
    Worker.warm_up = then_stuck
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("when", "signals"), [slow("starting", 1), ("working", 1), slow("working", 2)])
def test_a_signal_in_a_long_step_ends_the_server_all_the_same(tmp_path, when, signals):
    """Python ends a thread that is inside torch by aborting the process: status 134 instead of 0."""
    folder = readable_model(tmp_path / "tiny")
    command = [sys.executable, "-c", STUCK, when, "serve", str(folder), "port=0", "grace=0.2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line for line in process.stdout if line.startswith("adlm serves on")).split()[3]
        answers = []
        clients = [threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/infill", json={}, timeout=60)))]
        if when == "working":
            wait_until(lambda: httpx.get(url + "/readyz").status_code == 200)
            clients[0].start()
        assert "stuck" in next(process.stdout)
        begin = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    left = "tiny, starting" if when == "starting" else "tiny, 1 sequences or scores"
    assert process.returncode == 0 and time.monotonic() - begin < 10, errors
    assert errors.count("left undone") == 1 and errors.strip().endswith(f"left undone, inside a step: {left}")
    assert "requests" in json.loads(said.splitlines()[-1]), "what the command says at its end is not lost"
    if when == "working" and signals == 1:
        clients[0].join()
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


def test_a_score_under_way_is_told_that_the_server_goes(lm, monkeypatch):
    own, go = LanguageModel(lm.loaded), threading.Event()
    monkeypatch.setattr(own, "score_in_parts", lambda *args, **named: in_one_part(lambda: go.wait(60)))
    with serving({"tiny": own}, grace=0.05) as running:
        answers = []
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(running.url + "/v1/score", json={"text": "a b"}, timeout=60))
        )
        ask.start()
        wait_until(lambda: worker(running).taken == 1)
        running.server.handle_exit(signal.SIGTERM, None)
        ask.join()
        go.set()
        running.thread.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_kill_term_under_load(lm, tmp_path):
    """The real command, the real signal: every client gets its whole answer or a clear refusal, and the exit is 0."""
    folder = readable_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "adlm", "serve", str(folder), "port=0", "sampling.batch_size=4", "grace=120"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("adlm serves on"))
    url = line.split()[3]

    async def load():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)

            async def one(i):
                try:
                    return i, await client.post("/v1/infill", json={**LONG, "steps": 150, "length": 32, "seed": i})
                except httpx.TransportError as error:
                    return i, error

            tasks = [asyncio.create_task(one(i)) for i in range(40)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            process.send_signal(signal.SIGTERM)
            late = [asyncio.create_task(one(1000 + i)) for i in range(5)]
            return await asyncio.gather(*tasks), await asyncio.gather(*late)

    answers, late = asyncio.run(load())
    assert process.wait(60) == 0
    assert all(isinstance(r, httpx.Response) and r.status_code == 200 for _, r in answers)
    expected = {g.seed: g.tokens for g in lm.generate(length=32, n=40, **{**LONG, "steps": 150})}
    assert all(r.json()["choices"][0]["tokens"] == expected[i] for i, r in answers)
    assert all(isinstance(r, httpx.Response) and r.status_code == 503 for _, r in late)

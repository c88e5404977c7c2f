"""What the server does when clients or the engine misbehave; docs/serving.md has the table."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import httpx
import pytest
from marks import slow
from served import LONG, load_tiny, readable_model, serving, wait_until

from adlm.api import LanguageModel
from adlm.serving.jobs import in_one_part


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture(scope="module")
def server(lm):
    settings = {"slots": 2, "queue": 3, "max_n": 4, "max_steps": 16000}
    with pytest.MonkeyPatch.context() as patch, serving({"tiny": LanguageModel(lm.loaded)}, **settings) as running:
        patch.setattr("adlm.serving.server.READ_TIMEOUT", 0.5)
        patch.setattr("adlm.serving.server.MAX_BODY", 200_000)
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def worker(server):
    return server.service.models["tiny"].worker


def idle(server):
    return lambda: worker(server).taken == 0 and worker(server).in_use == 0 and not server.service.jobs


def send(server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


def post(path: str, body: dict) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


# ---- Requests that cannot be answered

REFUSED = [
    # path, body, status, what the message names
    ("/v1/completions", {"prompt": "x" * 10_000}, 400, "the prompt has 10000 characters, allowed are 4096"),
    ("/v1/completions", {"prompt": "x" * 1000}, 400, "the prompt has 1001 tokens, allowed are 32"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**15}, 400, "allowed are 32 (the model's length)"),
    ("/v1/completions", {"prompt": "x", "n": 5}, 400, "serve.max_n"),
    ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 2}, 400, "6 texts are asked for, allowed are 4 (serve.max_n)"),
    ("/v1/completions", {"prompt": "x", "steps": 16001}, 400, "serve.max_steps"),
    ("/v1/completions", {"prompt": "x", "sampler": "mldm"}, 400, "did you mean 'mdlm'?"),
    ("/v1/completions", {"prompt": "x", "stop": ["a", ""]}, 400, "empty"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of=3"),
    ("/v1/completions", {"prompt": "x", "logprobs": 1, "stream": True}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "x", "sampler": "remdm-loop", "t_on": 0.1, "t_off": 0.2}, 400, "sampling.t_off"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 1}, 422, "presence_penalty"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1}}, 422, "logit_bias"),
    ("/v1/completions", {"promt": "x"}, 422, "promt: Unknown field (did you mean 'prompt'?)"),
    ("/v1/completions", {"xyz": 1}, 422, "xyz: Unknown field"),
    ("/v1/completions", {"stream_options": {"usage": True}}, 422, "stream_options.usage: Unknown field"),
    ("/v1/infill", {"length": 8, "stepz": 3}, 422, "stepz: Unknown field (did you mean 'steps'?)"),
    ("/v1/infill", {"length": 8, "batch_size": 3}, 422, "batch_size: Unknown field"),
    ("/v1/infill", {"length": 8, "parity": "releese"}, 400, "did you mean 'release'?"),
    ("/v1/infill", {"length": 8, "eta": 1.5}, 422, "eta: Input should be less than or equal to 1"),
    ("/v1/infill", {"length": 8, "t_on": 0}, 422, "t_on: Input should be greater than 0"),
    ("/v1/infill", {"length": 8, "top_k": 10**30}, 422, "top_k: "),
    ("/v1/completions", {"prompt": 5}, 422, "prompt: Input should be a valid string"),
    ("/v1/completions", {"prompt": ["a", 5]}, 422, "prompt.1: Input should be a valid string"),
    ("/v1/completions", {"stop": 5}, 422, "stop: Input should be a valid boolean or Input should be a valid string"),
    ("/v1/infill", {"tokens": [1, "a"]}, 422, "tokens.1: "),
    ("/v1/score", {}, 422, "text: "),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "there is tiny"),
    ("/v1/completions", [1], 422, "body"),
    ("/v1/infill", {"template": "[MASK:999999999999]"}, 400, "allowed are 32"),
    ("/v1/infill", {"template": "[MASK]" * 40}, 400, "the template has 40 tokens, allowed are 32"),
    ("/v1/infill", {"template": f"[MASK:{'9' * 4000}]"}, 400, "is no hole"),
    ("/v1/infill", {"template": "[MASK] [mask:2]"}, 400, "'[mask:2]' is no hole"),
    ("/v1/infill", {"required": ["is"], "banned": ["is"]}, 400, "both name 'is'"),
    ("/v1/completions", {"prompt": "x", "required": ["is"], "banned": ["is"]}, 400, "both name 'is'"),
    ("/v1/infill", {"template": "no holes"}, 400, "at least one hole"),
    ("/v1/infill", {"template": "[MASK]", "prompt": "x"}, 400, "prompt and template"),
    ("/v1/infill", {"template": "[MASK]", "length": 4}, 400, "length has no meaning"),
    ("/v1/infill", {"tokens": [1, 2, 3]}, 400, "nothing to fill"),
    ("/v1/infill", {"tokens": [None, 99999]}, 400, "outside the vocabulary"),
    ("/v1/infill", {"tokens": [None, -1]}, 400, "outside the vocabulary"),
    ("/v1/infill", {"length": 10**15}, 400, "allowed are 32"),
    ("/v1/infill", {"length": 8, "banned": [" "]}, 400, "is empty"),
    ("/v1/infill", {"length": 4, "required": ["longer"]}, 400, "does not fit"),
    ("/v1/infill", {"tokens": [None, None], "required": ["a", "b", "c"]}, 400, "does not fit"),
    ("/v1/infill", {"length": 8, "seed": -1}, 422, "seed"),
    ("/v1/infill", {"length": 8, "seed": 2**64}, 422, "seed"),
    ("/v1/frames", {"length": 8, "top_p": 0}, 422, "top_p"),
    ("/v1/frames", {"length": 0}, 422, "length"),
    ("/v1/score", {"text": "x" * 33}, 400, "the text has 33 tokens, allowed are 32"),
    ("/v1/score", {"text": "x", "draws": 10**9}, 422, "draws"),
    ("/v1/anchors", {}, 400, "give text or tokens"),
    ("/v1/anchors", {"tokens": [10**9]}, 400, "outside the vocabulary"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals_name_what_is_wrong(http, path, body, status, says):
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, says in error["message"]) == (status, True), error
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert status != 422 or error["message"].startswith(f"{error['param'] or 'body'}: ")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 422),
        (b"\xff\xfe{}", 400),
        (b"[" * 100_000, 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"text": "\\ud800"}', 422),
        (b'{"length": 8, "temperature": NaN}', 422),
        (b'{"length": 8, "temperature": 1e999}', 422),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_bodies_that_are_not_what_they_should_be(http, body, status):
    response = http.post("/v1/infill", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_a_body_of_ten_megabytes(server, http):
    assert http.post("/v1/tokenize", json={"text": "x" * 10_000_000}).status_code == 413
    # Without a declared length it is cut off where it grows too large.
    chunked = http.post("/v1/tokenize", content=(b"x" * 50_000 for _ in range(200)))
    assert chunked.status_code == 413
    assert "the body is larger than 200000 bytes" in chunked.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/infill", {"prompt": "a\ud83d"}, "prompt: Text holds half of a character"),
        ("/v1/infill", {"template": "\ude42[MASK]"}, "template: "),
        ("/v1/infill", {"length": 8, "banned": ["a", "\ud83d"]}, "banned.1: "),
        ("/v1/frames", {"prompt": "a\ud83d"}, "prompt: "),
        ("/v1/tokenize", {"text": "\ud83d"}, "text: "),
        ("/v1/score", {"text": "\ud83d"}, "text: "),
        ("/v1/anchors", {"text": "\ud83d"}, "text: "),
        ("/v1/completions", {"prompt": "\ud83d"}, "prompt: "),
        ("/v1/completions", {"prompt": ["a", "\ud83d"]}, "prompt: "),
        ("/v1/completions", {"suffix": "\ud83d"}, "suffix: "),
        ("/v1/completions", {"stop": ["\ud83d"]}, "stop"),
        ("/v1/completions", {"logit_bias": {"\ud83d": 1}}, ""),
        ("/v1/completions", {"\ud83d": 1}, ""),
    ],
    ids=lambda v: ascii(v)[:40],
)
def test_half_a_character_is_refused(http, path, body, says):
    """A client that cuts its text between the two halves of an emoji sends such bodies."""
    response = http.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert response.status_code == 422, response.text
    assert response.json()["error"]["message"].startswith(says)
    whole = json.dumps({"text": "a\U0001f642"}).encode()
    assert http.post("/v1/tokenize", content=whole, headers={"Content-Type": "application/json"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/....//app.py", "/static//etc/passwd",
     "/static/..%5capp.py", "/static/%00", "/static/", "/static/..", "/app.py", "//etc/passwd"],
)  # fmt: skip
def test_nothing_outside_the_static_folder_is_served(server, path):
    with send(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 404"), answer[:200]
    assert b"import" not in answer and b"root:" not in answer


# ---- Clients that behave badly


def test_a_client_that_leaves_in_mid_stream_frees_its_slot(server, http):
    for path, body in (
        ("/v1/frames", {**LONG, "length": 32}),
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/completions", LONG),
        ("/v1/infill", {**LONG, "length": 32, "n": 4}),
    ):
        with send(server, post(path, body)):
            wait_until(lambda: worker(server).in_use >= 1)
        wait_until(idle(server), 10)
    assert 'status="499"' in server.service.metrics.text()
    assert http.post("/v1/infill", json={"length": 8}).status_code == 200


def test_a_full_queue_answers_429_and_recovers(server, http):
    with send(server, post("/v1/infill", {**LONG, "length": 32, "n": 4})):
        wait_until(lambda: worker(server).taken == 4)
        full = http.post("/v1/infill", json={"length": 8, "n": 2})
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"
        assert "serve.queue=3" in full.json()["error"]["message"]
        assert http.get("/healthz").status_code == 200
    wait_until(idle(server), 10)
    assert http.post("/v1/infill", json={"length": 8, "n": 2}).status_code == 200


def test_slow_clients_are_cut_off(server, http):
    began = time.monotonic()
    silent = send(server, b"")
    headers = send(server, b"POST /v1/infill HTTP/1.1\r\nHost: localhost\r\n")
    body = send(server, post("/v1/infill", {"length": 8})[:-3])
    dripping = send(server, b"GET / HTTP/1.1\r\n")
    for _ in range(4):  # a byte now and then does not buy more time
        time.sleep(0.1)
        dripping.sendall(b"X")
    assert http.get("/healthz").status_code == 200
    assert read_all(silent) == b"" and read_all(headers) == b"" and read_all(dripping) == b""
    assert read_all(body).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 10
    for connection in (silent, headers, body, dripping):
        connection.close()


def test_frames_for_a_reader_that_does_not_read_are_left_out_and_nothing_is_lost(server, lm):
    from adlm.engine import Frame
    from adlm.serving.frames import film
    from adlm.serving.jobs import Job, Update
    from adlm.serving.worker import BACKLOG, Worker

    request = lm.request(length=16, seed=1, sampler="remdm-cap", steps=300, eta=0.5)
    updates = list(lm.engine(1).stream(replace(request, watch=True)))
    assert len(updates) > 2 * BACKLOG

    async def read_late():
        job = Job([request], 60.0)
        deliver = Worker("tiny", lm, 1, 1, server.service.metrics).deliver
        for u in updates:
            deliver([(job, Update(0, frame=u) if isinstance(u, Frame) else Update(0, result=u))])
        assert job.updates.qsize() <= BACKLOG + 1
        return [text async for text in film(server.service.models["tiny"], job)]

    blocks = [json.loads(text.split("data: ")[1]) for text in asyncio.run(read_late())]
    canvas = blocks[0]["tokens"]
    for frame in blocks[1:-1]:
        for position, token, _ in frame["set"]:
            canvas[position] = token
        for position in frame["unset"]:
            canvas[position] = None
    assert canvas == blocks[-1]["tokens"] == updates[-1].tokens


@pytest.mark.parametrize("steps", [31, 32, 33, 63, 64, 65, 200])
def test_only_so_many_frames_carry_guesses(lm, steps):
    from adlm.serving.frames import GUESSED_FRAMES, FrameGuesses

    mine, request = FrameGuesses(lm), lm.request(length=8, sampler="remdm-cap", steps=steps)
    guessed = sum(mine.due(0, request) for _ in range(steps))
    assert GUESSED_FRAMES / 2 <= guessed <= GUESSED_FRAMES


# ---- Time, keys, origins


def test_a_request_out_of_time_is_told_and_leaves(lm):
    with serving({"tiny": LanguageModel(lm.loaded)}, timeout=0.3) as running:
        late = httpx.post(running.url + "/v1/infill", json={**LONG, "length": 32}, timeout=30)
        assert late.status_code == 504 and "serve.timeout" in late.json()["error"]["message"]
        stream = httpx.post(running.url + "/v1/frames", json={**LONG, "length": 32}, timeout=30)
        assert stream.status_code == 200 and "event: error" in stream.text and "serve.timeout" in stream.text
        wait_until(idle(running), 10)


def test_logprobs_have_the_time_of_their_request(lm, monkeypatch):
    with serving({"tiny": LanguageModel(lm.loaded)}, timeout=1.0) as running:
        served = running.service.models["tiny"]
        monkeypatch.setattr(served.lm, "score_in_parts", lambda *args, **more: in_one_part(lambda: time.sleep(3)))
        began = time.monotonic()
        late = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "logprobs": 1, "n": 4}, timeout=30)
        assert late.status_code == 504 and time.monotonic() - began < 2.5
        wait_until(idle(running), 10)


def test_a_queue_that_is_full_meanwhile_does_not_refuse_the_logprobs_of_a_finished_text(lm, monkeypatch):
    with serving({"tiny": LanguageModel(lm.loaded)}) as running:
        mine, reserve, asked = worker(running), worker(running).reserve, []

        def full_after_the_first(*request):
            asked.append(request)
            if len(asked) > 1:
                mine.waiting = -mine.slots
            reserve(*request)

        monkeypatch.setattr(mine, "reserve", full_after_the_first)
        body = {"prompt": "a", "max_tokens": 4, "logprobs": 1, "stop": False}
        assert httpx.post(running.url + "/v1/completions", json=body, timeout=30).status_code == 200
        assert httpx.post(running.url + "/v1/completions", json=body, timeout=30).status_code == 429
        wait_until(idle(running), 10)


def test_a_key_is_asked_for_and_other_origins_are_named(lm):
    with serving({"tiny": LanguageModel(lm.loaded)}, key="secret", cors="https://a.example") as running:
        client = httpx.Client(base_url=running.url)
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer"},
        ):
            refused = client.get("/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert [client.get(p).status_code for p in ("/", "/healthz", "/readyz", "/static/style.css")] == [200] * 4
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/infill", headers=asked).headers["access-control-allow-origin"] == "https://a.example"
        assert client.options("/v1/infill", headers=asked | {"Origin": "https://b.example"}).status_code == 400


def test_no_other_origin_by_default(http):
    response = http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


# ---- Engine failures and the end


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

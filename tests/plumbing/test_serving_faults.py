"""What the server does when clients misbehave; docs/serving.md has the table."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import httpx
import pytest
from served import LONG, idle, load_tiny, serving, wait_until, worker

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

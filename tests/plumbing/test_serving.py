"""The server: every answer is what the library says, whoever else is served at the same time."""

import asyncio
import dataclasses
import json

import httpx
import pytest
import torch
from served import load_tiny, serving

from adlm.tables import SAMPLERS

openai = pytest.importorskip("openai", reason="the official client (extra 'test')")
MIXED = [
    ("mdlm", {}), ("remdm-cap", {"eta": 0.1}), ("remdm-loop", {}), ("first-hitting", {}), ("confidence", {}),
    ("anchor-first", {}), ("autoregressive", {}), ("remdm-conf", {}), ("entropy", {"threshold": 0.5}), ("dfm", {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("serving") / "tiny")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("serving") / "causal", causal=True, anchored=False, conditioning="none")


@pytest.fixture(scope="module")
def server(lm, causal):
    # The server's thread and the tests do not share engines.
    from adlm.api import LanguageModel

    with serving({"tiny": LanguageModel(lm.loaded), "left": LanguageModel(causal.loaded)}, max_n=8) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def events(http, **body):
    """(name, data) of each server-sent event of /v1/frames."""
    with http.stream("POST", "/v1/frames", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    return [
        (b.split("\n")[0].removeprefix("event: "), json.loads(b.split("\n")[1].removeprefix("data: "))) for b in blocks
    ]


def completion_of(lm, prompt, max_tokens, **arguments):
    """The library's completion: the text after the prompt, up to an end of text."""
    length = 1 + len(lm.tokenizer.encode(prompt)) + max_tokens
    return lm.generate(prompt=prompt, length=length, stop=True, **arguments)[0].text.removeprefix(prompt)


# ---- OpenAI's client


def test_the_official_client_lists_completes_and_streams(client, lm):
    assert [m.id for m in client.models.list()] == ["tiny", "left"]
    assert client.models.retrieve("tiny").owned_by == "adlm"
    asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "seed": 5}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion" and whole.usage.prompt_tokens == 8
    assert whole.choices[0].text == completion_of(lm, "the cat", 12, seed=5, steps=8)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) <= {None}
    assert chunks[-1].usage == whole.usage
    extra = client.completions.create(**asked, extra_body={"sampler": "remdm-cap", "steps": 20, "eta": 0.3})
    assert extra.choices[0].text == completion_of(lm, "the cat", 12, seed=5, sampler="remdm-cap", steps=20, eta=0.3)


def test_the_official_client_understands_refusals(client):
    with pytest.raises(openai.NotFoundError, match="is not served; there is tiny, left"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"serve\.max_n"):
        client.completions.create(model="tiny", prompt="x", n=9)


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"score"}))
def test_streamed_or_not_the_text_is_the_librarys(client, lm, sampler):
    asked = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 20,
        "seed": 3,
        "extra_body": {"sampler": sampler, "steps": 9},
    }
    expected = completion_of(lm, "a", 20, seed=3, sampler=sampler, steps=9)
    assert client.completions.create(**asked).choices[0].text == expected
    parts = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
    assert "".join(parts) == expected


@pytest.mark.parametrize("sampler", ["anchor-first", "confidence", "entropy", "mdlm"])
def test_streamed_or_not_what_stands_behind_the_end_is_not_counted(http, sampler):
    asked = {"prompt": "a", "max_tokens": 20, "seed": 3, "sampler": sampler, "steps": 9, "regex": "[a-z]{2}"}
    whole = ok(http.post("/v1/completions", json=asked))
    assert whole["usage"]["completion_tokens"] == 3, "two letters and the end of text"
    streamed = http.post("/v1/completions", json=asked | {"stream": True, "stream_options": {"include_usage": True}})
    told = [json.loads(line[6:]).get("usage") for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert told[-1] == whole["usage"]


def test_a_sampler_that_keeps_what_it_drew_streams_early_and_one_that_remasks_does_not(client):
    def parts(sampler):
        asked = {"model": "tiny", "prompt": "a", "seed": 3, "max_tokens": 24, "stop": False}
        stream = client.completions.create(**asked, stream=True, extra_body={"sampler": sampler, "steps": 24})
        return [c.choices[0].text for c in stream if c.choices[0].text]

    assert len(parts("autoregressive")) > 10
    assert len(parts("mdlm")) > 1
    assert len(parts("remdm-cap")) == 1


def test_a_causal_model_is_served_too(client, causal):
    whole = client.completions.create(model="left", prompt="ab", max_tokens=10, seed=1)
    assert whole.choices[0].text == completion_of(causal, "ab", 10, seed=1)
    chunks = client.completions.create(model="left", prompt="ab", max_tokens=10, seed=1, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_several_prompts_and_several_completions(http, lm):
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 6, "seed": 7}
    answer = ok(http.post("/v1/completions", json=body))
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["seed"] for c in answer["choices"]] == [7, 8, 7, 8]
    expected = [completion_of(lm, p, 6, seed=s, steps=8) for p in ("one", "three") for s in (7, 8)]
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 4 + 6


def test_echo_suffix_and_the_rest_of_the_row(http, lm):
    echoed = ok(http.post("/v1/completions", json={"prompt": "ab", "seed": 1, "echo": True}))["choices"][0]["text"]
    assert echoed == lm.generate(prompt="ab", seed=1, steps=8, stop=True)[0].text
    middle = ok(http.post("/v1/completions", json={"prompt": "ab", "suffix": "yz", "max_tokens": 5, "seed": 1}))
    row = lm.request(steps=8, seed=1)
    tokens = [lm.tokenizer.bos_id, *lm.tokenizer.encode("ab"), *[lm.tokenizer.mask_id] * 5, *lm.tokenizer.encode("yz")]
    (result,) = lm.engine(1).run([dataclasses.replace(row, tokens=tokens)])
    assert middle["choices"][0]["text"] == lm.text(result.tokens)[2:-2]
    assert middle["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


@pytest.mark.parametrize("sampler", ["autoregressive", "mdlm", "remdm-cap"])
def test_a_stop_ends_the_text_and_the_work(http, lm, sampler):
    asked = {"prompt": "a", "seed": 2, "sampler": sampler, "steps": 24, "max_tokens": 28}
    whole = completion_of(lm, "a", 28, seed=2, sampler=sampler, steps=24)
    stop = whole[3:5]
    assert stop
    for stream in (False, True):
        response = http.post("/v1/completions", json={**asked, "stop": [stop, "@"], "stream": stream})
        if stream:
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            choices = [c["choices"][0] for c in chunks]
            text, reason, nfe = "".join(c["text"] for c in choices), choices[-1]["finish_reason"], choices[-1]["nfe"]
        else:
            choice = ok(response)["choices"][0]
            text, reason, nfe = choice["text"], choice["finish_reason"], choice["nfe"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
        if sampler == "autoregressive":
            assert nfe <= whole.index(stop) + 2


def test_stop_false_runs_past_the_end_of_text(http, lm):
    answer = ok(http.post("/v1/completions", json={"prompt": "a", "seed": 2, "stop": False, "max_tokens": 20}))
    assert answer["choices"][0]["text"] == lm.generate(prompt="a", seed=2, steps=8, length=22)[0].text[1:]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_the_shares_of_the_bound(http, lm):
    body = {"prompt": "ab", "max_tokens": 8, "seed": 4, "logprobs": 1, "stop": False}
    choice = ok(http.post("/v1/completions", json=body))["choices"][0]
    drawn = lm.generate(prompt="ab", length=11, seed=4, steps=8)[0].tokens[3:]
    score = lm.score(drawn, 16, context="ab")
    shown = choice["logprobs"]
    assert shown["token_logprobs"] == pytest.approx([-x for x in score.per_token][: len(shown["tokens"])])
    assert "".join(shown["tokens"]) == choice["text"]
    assert all(choice["text"][o:].startswith(t) for o, t in zip(shown["text_offset"], shown["tokens"]))


# ---- Our own routes


@pytest.mark.parametrize("sampler", ["mdlm", "remdm-cap", "confidence", "first-hitting"])
def test_frames_replay_to_the_finished_row(http, lm, sampler):
    (_, start), *frames, (last, end) = events(
        http, prompt="the ", length=24, seed=9, sampler=sampler, steps=12, eta=0.2
    )
    assert last == "end" and {name for name, _ in frames} == {"frame"}
    expected = lm.generate(prompt="the ", length=24, seed=9, sampler=sampler, steps=12, eta=0.2)[0]
    canvas = list(start["tokens"])
    assert canvas.count(None) == 19 and start["fixed"] == [0, 1, 2, 3, 4]
    assert (start["steps_matter"], start["writes_once"]) == (sampler != "first-hitting", sampler != "remdm-cap")
    texts = list(start["texts"])
    for _, frame in frames:
        assert {a[0] for a in frame["anchors"]} <= {l for l, t in enumerate(canvas) if t is None}, "as the pass saw it"
        for position, token, text in frame["set"]:
            canvas[position], texts[position] = token, text
        for position in frame["unset"]:
            canvas[position] = None
        assert frame["masked"] == pytest.approx(canvas.count(None) / 19, abs=1e-3)
    assert "".join(texts) == "".join(end["texts"]) == end["text"]
    assert canvas == end["tokens"] == expected.tokens
    assert (end["text"], end["nfe"], end["finished"]) == (expected.text, expected.nfe, True)
    assert frames[-1][1]["masked"] == 0 and frames[-1][1]["nfe"] == expected.nfe
    assert any(frame["anchors"] for _, frame in frames)
    assert end["counts"] == [end["tokens"].count(t) for t in end["tokens"]] and end["tau"] == 5
    if sampler == "remdm-cap":
        assert any(frame["unset"] for _, frame in frames)


def test_frames_without_anchors_and_with_a_random_seed(http, lm):
    (_, start), *frames, (_, end) = events(http, length=16, anchors=False)
    assert not any(frame["anchors"] for _, frame in frames)
    assert end["tokens"] == lm.generate(length=16, seed=start["seed"], steps=8)[0].tokens


def test_rows_longer_than_the_model_come_window_by_window(lm):
    from adlm.api import LanguageModel

    asked = {"length": 56, "seed": 4, "stride": 12, "steps": 6}
    expected = lm.generate(prompt="ab", **asked)[0]
    with (
        serving({"tiny": LanguageModel(lm.loaded)}, max_length=64) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        (_, start), *frames, (_, end) = events(http, prompt="ab", **asked)
        canvas = list(start["tokens"])
        for _, frame in frames:
            for position, token, _ in frame["set"]:
                canvas[position] = token
            for position in frame["unset"]:
                canvas[position] = None
        assert canvas == end["tokens"] == expected.tokens
        body = {"prompt": "ab", "max_tokens": 53, "seed": 4, "stride": 12, "steps": 6, "stop": False}
        whole = ok(http.post("/v1/completions", json=body))["choices"][0]["text"]
        assert whole == expected.text[2:]
        lines = http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert "".join(c["text"] for c in chunks) == whole and len(chunks) > 2


def test_what_is_left_out_is_within_the_limits(lm):
    """A row has the model's length unless less is allowed; more only with a stride."""
    from adlm.api import LanguageModel

    for allowed in (16, 64):
        with (
            serving({"tiny": LanguageModel(lm.loaded)}, max_length=allowed) as running,
            httpx.Client(base_url=running.url) as http,
        ):
            length = min(allowed, lm.length)
            infilled = ok(http.post("/v1/infill", json={"prompt": "ab", "seed": 1}))["choices"][0]["tokens"]
            assert infilled == lm.generate(prompt="ab", length=length, seed=1, steps=8)[0].tokens
            body = {"prompt": "ab", "seed": 1, "stop": False}
            completed = ok(http.post("/v1/completions", json=body))
            assert completed["usage"]["total_tokens"] == length
            by_windows = ok(http.post("/v1/completions", json={**body, "stride": 8}))
            assert by_windows["usage"]["total_tokens"] == allowed
            too_long = http.post("/v1/completions", json={"prompt": "x" * length})
            assert too_long.status_code == 400 and str(length) in too_long.json()["error"]["message"]


def test_infill_templates_tokens_and_words(http, lm):
    body = {"template": "the [MASK:4] sat[MASK:2].", "seed": 3, "n": 3, "banned": ["a"], "required": ["zz"]}
    answer = ok(http.post("/v1/infill", json=body))
    expected = lm.generate(body["template"], seed=3, n=3, steps=8, banned=["a"], required=["zz"])
    assert [c["text"] for c in answer["choices"]] == [g.text for g in expected]
    assert [c["tokens"] for c in answer["choices"]] == [g.tokens for g in expected]
    assert [c["nfe"] for c in answer["choices"]] == [g.nfe for g in expected]
    row = lm.request(body["template"]).tokens
    holes = [None if t == lm.tokenizer.mask_id else t for t in row]
    by_ids = ok(http.post("/v1/infill", json={"tokens": holes, "seed": 3}))
    assert by_ids["choices"][0]["tokens"] == lm.generate(body["template"], seed=3, steps=8)[0].tokens
    assert by_ids["usage"]["completion_tokens"] == 6


def test_score_is_the_librarys(http, lm, causal):
    found = ok(http.post("/v1/score", json={"text": "the cat", "draws": 32}))
    expected = lm.score("the cat", 32)
    assert (found["nll"], found["stderr"]) == pytest.approx((expected.nll, expected.stderr))
    assert found["per_token"] == pytest.approx(expected.per_token)
    assert (found["exact"], "".join(found["texts"])) == (False, "the cat")
    exact = ok(http.post("/v1/score", json={"text": "the cat", "model": "left"}))
    assert exact["exact"] and exact["nll"] == pytest.approx(causal.score("the cat").nll)


def test_anchors_counts_and_guesses(http, lm):
    plain = ok(http.post("/v1/anchors", json={"text": "banana split aaaa"}))
    assert plain["count"][1] == 7 and plain["anchor"][1] is False and plain["anchor"][0] is True
    assert plain["guesses"] == []
    meant = http.post("/v1/anchors", json={"text": "the [mask] sat"})
    assert meant.status_code == 400 and "'[mask]' is no hole" in meant.json()["error"]["message"], "as the library says"
    holed = ok(http.post("/v1/anchors", json={"text": "the [MASK:2] sat", "top": 3}))
    assert [g["position"] for g in holed["guesses"]] == [i for i, t in enumerate(holed["tokens"]) if t is None]
    row = torch.tensor([lm.request("the [MASK:2] sat").tokens])
    logits = lm.anchor_logits(row)[0]
    logits[:, lm.tokenizer.mask_id] = -torch.inf
    p = logits.softmax(-1)
    for guess in holed["guesses"]:
        best = p[guess["position"]].topk(3)
        assert [c["id"] for c in guess["candidates"]] == best.indices.tolist()
        assert [c["probability"] for c in guess["candidates"]] == pytest.approx(best.values.tolist(), rel=1e-5)


def test_tokenize_models_health_and_the_page(http, lm):
    found = ok(http.post("/v1/tokenize", json={"text": "the cat"}))
    assert found["tokens"] == lm.tokenizer.encode("the cat") and "".join(found["texts"]) == "the cat"
    tiny, left = ok(http.get("/v1/models"))["data"]
    assert (tiny["anchored"], tiny["causal"], tiny["length"], tiny["mask"]) == (True, False, 32, 259)
    assert (left["causal"], left["samplers"], left["default"]["sampler"]) == (
        True,
        ["autoregressive"],
        "autoregressive",
    )
    assert "anchor-first" in tiny["samplers"] and tiny["default"]["steps"] == 8
    assert http.get("/healthz").text == "ok\n" and http.get("/readyz").text == "ready\n"
    assert http.get("/").status_code == 200 and "adlm" in http.get("/").text
    assert http.get("/static/style.css").headers["content-type"].startswith("text/css")


# ---- Many at once


def test_requests_of_any_mixture_share_calls_and_get_their_own_answers(server, lm):
    bodies = []
    for i in range(60):
        sampler, extra = MIXED[i % len(MIXED)]
        body = {"prompt": "ab"[: i % 3], "max_tokens": (8, 12, 20)[i % 3], "steps": 3 + i % 7}
        bodies.append(body | {"sampler": sampler, "seed": 1000 + i, **extra})
    before = counter(server, "adlm_steps_total")

    async def ask():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))

    evaluations = 0
    for body, response in zip(bodies, asyncio.run(ask())):
        choice = ok(response)["choices"][0]
        settings = {k: v for k, v in body.items() if k not in ("prompt", "max_tokens")}
        # an empty prompt still begins with the begin token, as it does wherever texts end at an end of text
        assert choice["text"] == completion_of(lm, body["prompt"], body["max_tokens"], **settings), body
        evaluations += choice["nfe"]
    assert counter(server, "adlm_steps_total") - before < evaluations / 2


def counter(server, name):
    """Sum of a metric over its labels."""
    lines = server.service.metrics.text().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_metrics_speak_prometheus(http, server):
    ok(http.post("/v1/infill", json={"length": 8, "seed": 1}))
    http.get("/nowhere/at/all")
    text = http.get("/metrics").text
    assert 'adlm_requests_total{path="/v1/infill",status="200"}' in text
    assert 'adlm_requests_total{path="other",status="404"}' in text
    assert 'adlm_slots{model="tiny"} 4' in text and 'adlm_slots_in_use{model="tiny"} 0' in text
    assert 'adlm_queue_depth{model="tiny"} 0' in text
    assert counter(server, "adlm_tokens_total") > 0 and counter(server, "adlm_evaluations_total") > 0
    buckets = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines() if line.startswith('adlm_request_seconds_bucket{path="/v1/infill"')
    ]  # fmt: skip
    assert buckets == sorted(buckets) and 'le="+Inf"' in text
    assert f'adlm_request_seconds_count{{path="/v1/infill"}} {buckets[-1]:g}' in text


@pytest.mark.parametrize("sampler", ["mdlm", "autoregressive"])
def test_an_early_end_never_hides_a_required_word_streamed_or_not(http, lm, sampler):
    """An end of text before the last required word is drawn again, so it does not settle what is streamed."""
    for seed in range(10):
        body = {"prompt": "a", "max_tokens": 28, "sampler": sampler, "steps": 28, "seed": seed, "required": ["zqz"]}
        said = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert "zqz" in said
        chunks = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        texts = [json.loads(c[6:])["choices"][0]["text"] for c in chunks if c.startswith("data: {")]
        assert "".join(texts) == said

"""Constraints and slot reads over HTTP: the library's texts, OpenAI's forms, refusals before the first step."""

import json
import re

import httpx
import openai
import pytest
from served import load_tiny, serving

pytest.importorskip("outlines_core", reason="needs the extra `constrain` (outlines-core)")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("constrained") / "tiny")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("constrained") / "causal", causal=True, anchored=False)


@pytest.fixture(scope="module")
def server(lm, causal):
    with serving({"tiny": lm, "causal": causal}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_completions_and_infill_keep_to_what_is_asked(http, lm):
    asked = {"prompt": "ab", "max_tokens": 12, "seed": 3, "n": 2}
    for more, matches in [
        ({"regex": "[a-c]{2,4}x?"}, lambda t: re.fullmatch("[a-c]{2,4}x?", t)),
        ({"choices": ["yes", "no way"]}, lambda t: t in ("yes", "no way")),
        ({"response_format": FORMAT}, lambda t: 0 <= json.loads(t)["n"] <= 99),
    ]:
        for choice in ok(http.post("/v1/completions", json=asked | more))["choices"]:
            assert matches(choice["text"]), choice
        for model in ("tiny", "causal"):
            body = {"model": model, "prompt": "ab", "length": 20, "seed": 4, **more}
            (choice,) = ok(http.post("/v1/infill", json=body))["choices"]
            assert matches(choice["text"].removeprefix("ab")), choice
    (choice,) = ok(http.post("/v1/infill", json={"template": "a[MASK:3]z[MASK:3]q", "regex": "xyzz(a|b)*", "seed": 1}))[
        "choices"
    ]
    assert re.fullmatch("axyzz(a|b)*q", choice["text"])
    (mine,) = lm.generate(prompt="ab", length=20, seed=4, steps=8, choices=["yes", "no way"])
    body = {"prompt": "ab", "length": 20, "seed": 4, "choices": ["yes", "no way"]}
    assert ok(http.post("/v1/infill", json=body))["choices"][0]["tokens"] == mine.tokens


def test_openais_client_asks_for_json(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "n"}], max_tokens=12, response_format=FORMAT
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 99
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "n"}],
        max_tokens=10,
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"regex": "a{40}"}, "regex: no text of 8 tokens or fewer matches"),
        ({"regex": "("}, "not a regular expression that can be used"),
        ({"regex": "(a|b)*a(a|b){60}"}, "is too large"),
        ({"regex": "a", "choices": ["b"]}, "give only one of"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not is not supported"),
        ({"choices": ["a"], "required": ["b"]}, "which says itself what must appear"),
    ],
)
def test_what_cannot_match_is_answered_before_the_first_step(server, http, more, says):
    worker = server.service.models["tiny"].worker
    steps = server.service.metrics.text().count("adlm_steps_total")
    answer = http.post("/v1/completions", json={"max_tokens": 8, **more})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert worker.taken == 0 and server.service.metrics.text().count("adlm_steps_total") == steps


def test_slots_are_the_librarys(http, lm):
    found = ok(http.post("/v1/slots", json={"template": "ab[MASK]c[MASK:2]", "top": 3, "draws": 4}))
    mine = lm.fill_distribution("ab[MASK]c[MASK:2]", top=3, draws=4)
    assert [s["position"] for s in found["slots"]] == [s.position for s in mine] == [3, 5, 6]
    for slot, own in zip(found["slots"], mine):
        assert [c["probability"] for c in slot["candidates"]] == own.probabilities
        assert [c["stderr"] for c in slot["candidates"]] == own.stderr and all(e >= 0 for e in own.stderr or [])
        p = lm.log_probs("ab[MASK]c[MASK:2]")[0, own.position].exp()
        assert own.probabilities == pytest.approx(sorted(p.tolist(), reverse=True)[:3], rel=1e-5)
        assert own.entropy == pytest.approx(float(-(p * p.clamp(min=1e-30).log()).sum()), rel=1e-4)
    assert ok(http.post("/v1/slots", json={"tokens": [97, None]}))["slots"][0]["candidates"][0]["stderr"] is None
    for body, says in [
        ({"template": "abc"}, "a template needs at least one hole"),
        ({"tokens": [97]}, "there is no hole to read"),
        ({}, "give template or tokens"),
        ({"template": "[MASK]", "model": "causal"}, "a causal model predicts no hole"),
    ]:
        answer = http.post("/v1/slots", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text

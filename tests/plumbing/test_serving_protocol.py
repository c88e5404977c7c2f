"""What clients of other makers send: OpenAI's, lm-eval's, browsers, curl, probes."""

import json
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from exports import export
from served import LONG, load_tiny, serving, wait_until
from tokenizers import AddedToken

from adlm import cli
from adlm.api import LanguageModel, load, scoring
from adlm.data.tokenizers import Tokenizer, raw_bytes
from adlm.io.load import default_checkpoint
from adlm.serving import names

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("protocol") / "tiny", length=64)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("protocol") / "left", causal=True, anchored=False, conditioning="none")


@pytest.fixture(scope="module")
def server(lm, causal):
    models = {"tiny": LanguageModel(lm.loaded), "left": LanguageModel(causal.loaded)}
    with serving(models, cors="https://a.example") as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


# ---- Metrics, origins, names


def counted(server, path, status):
    line = f'adlm_requests_total{{path="{path}",status="{status}"}} '
    found = [x for x in server.service.metrics.text().splitlines() if x.startswith(line)]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0


def test_a_file_that_was_sent_is_counted_as_sent(server):
    before = counted(server, "/", 200), counted(server, "/static/{name}", 200)
    for _ in range(5):
        assert httpx.get(server.url + "/").status_code == httpx.get(server.url + "/static/page.css").status_code == 200
    wait_until(
        lambda: (counted(server, "/", 200), counted(server, "/static/{name}", 200)) == tuple(b + 5 for b in before)
    )
    assert counted(server, "/", 499) == counted(server, "/static/{name}", 499) == 0


def test_a_refused_request_is_counted_at_its_route(lm, monkeypatch):
    monkeypatch.setattr("adlm.serving.server.MAX_BODY", 1000)
    monkeypatch.setattr("adlm.serving.server.READ_TIMEOUT", 0.2)
    with serving({"tiny": LanguageModel(lm.loaded)}, key="secret") as running:
        right = {"Authorization": "Bearer secret"}
        assert httpx.get(running.url + "/v1/models/tiny").status_code == 401
        assert httpx.post(running.url + "/v1/score", json={"text": "x" * 2000}, headers=right).status_code == 413

        def dripping():
            yield b"{"
            time.sleep(0.5)
            yield b"}"

        assert httpx.post(running.url + "/v1/infill", content=dripping(), headers=right).status_code == 408
        found = [
            counted(running, *which) for which in (("/v1/models/{id}", 401), ("/v1/score", 413), ("/v1/infill", 408))
        ]
        assert found == [1, 1, 1] and 'path="other"' not in running.service.metrics.text()


def test_a_browser_may_send_the_headers_of_openais_client(http):
    asked = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-stainless-package-version",
    }
    allowed = http.options("/v1/completions", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    assert http.options("/v1/completions", headers=asked | {"Origin": "https://b.example"}).status_code == 400


def test_the_example_of_the_docs_runs(tmp_path, capsys):
    """With the name that plain `adlm serve` gives the model in the box."""
    (name,) = names([str(default_checkpoint())])
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    with serving({name: load_tiny(tmp_path / "long", length=96)}) as running:
        exec(code.replace("http://127.0.0.1:8000", running.url), {})
    assert len(capsys.readouterr().out) > 5


def test_an_unknown_model_says_how_to_name_one(http):
    refused = http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 404 and "'demo' is not served; there is tiny, left" in message
    assert "named after their folders" in message and "without `model` gets tiny" in message


def test_another_name_for_this_machine_is_refused_on_loopback(server, http, lm):
    """A page of another site can point its own name at 127.0.0.1 and call from there (DNS rebinding)."""
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", f"127.0.0.1:{server.port}", "[::1]:80"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "localhost.evil", "", "x:y"):
        for path in ("/v1/models", "/", "/metrics"):
            refused = http.get(path, headers={"Host": host})
            assert refused.status_code == 403 and "Host" in refused.json()["error"]["message"], host
    with serving({"tiny": LanguageModel(lm.loaded)}, key="secret") as running:  # the page cannot know the key
        headers = {"Host": "box.example", "Authorization": "Bearer secret"}
        assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 200
    with serving({"tiny": LanguageModel(lm.loaded)}, host="0.0.0.0") as running:
        assert httpx.get(running.url + "/v1/models", headers={"Host": "box.example"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)]
)
def test_the_start_is_not_silent_and_warns_of_an_open_door(lm, monkeypatch, capsys, caplog, host, key, warns):
    said = {}

    def load(*args):
        said["at loading"] = capsys.readouterr().out
        return lm.loaded

    class Nothing:
        server_state = type("State", (), {"total_requests": 0})

        def run(self, sockets):
            sockets[0].close()

    monkeypatch.setattr("adlm.api.language_model.load_any", load)
    monkeypatch.setattr("adlm.serving.server.make_server", lambda *args: Nothing())
    monkeypatch.setattr("adlm.serving.worker.Worker.stop", lambda self: None)
    monkeypatch.setattr("threading.Thread.join", lambda self, timeout=None: None)
    monkeypatch.setenv("ADLM_API_KEY", key)
    assert cli.main(["serve", "runs/mine", f"host={host}", "port=0"]) == 0
    assert "loading PyTorch" in said["at loading"] and "mine: loading runs/mine" in said["at loading"]
    assert "adlm serves on http://" in capsys.readouterr().out
    assert ("set ADLM_API_KEY" in caplog.text) == warns


def test_a_model_says_when_it_is_ready(lm, caplog):
    caplog.set_level("INFO", "adlm.serving")
    with serving({"tiny": LanguageModel(lm.loaded)}):
        pass
    assert "tiny: warming up" in caplog.text and re.search(r"tiny: ready after [\d.]+ s", caplog.text)


# ---- OpenAI's other shapes


def test_prompts_may_be_tokens(http, lm):
    tokens = lm.tokenizer.encode("the cat")
    asked = {"max_tokens": 9, "seed": 3}
    text = ok(http.post("/v1/completions", json=asked | {"prompt": "the cat"}))
    for prompt in (tokens, [tokens], [lm.tokenizer.bos_id, *tokens]):
        same = ok(http.post("/v1/completions", json=asked | {"prompt": prompt}))
        assert (same["choices"], same["usage"]) == (text["choices"], text["usage"])
    two = ok(http.post("/v1/completions", json=asked | {"prompt": [tokens, [97]], "echo": True}))["choices"]
    assert [c["text"][:7] for c in two] == ["the cat", two[1]["text"][:7]] and two[1]["text"][0] == "a"
    for bad in (lm.tokenizer.mask_id, -1, lm.model.vocab_size):
        refused = http.post("/v1/completions", json={"prompt": [97, bad]})
        assert refused.status_code == 400 and f"holds token {bad}" in refused.json()["error"]["message"]


def test_no_tokens_may_be_asked_for(http, lm):
    whole = ok(http.post("/v1/completions", json={"prompt": ["ab", "c"], "max_tokens": 0, "echo": True}))
    assert [(c["text"], c["finish_reason"], c["nfe"]) for c in whole["choices"]] == [
        ("ab", "length", 0),
        ("c", "length", 0),
    ]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    assert ok(http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 0}))["choices"][0]["text"] == ""
    lines = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 0, "stream": True}).text
    assert '"finish_reason":"length"' in lines and lines.endswith("data: [DONE]\n\n")


def by_hand(lm, tokens):
    """log p(token | tokens before it), one canvas at a time."""
    row, found = [lm.tokenizer.bos_id, *tokens], []
    for at in range(1, len(row)):
        if lm.model.config.causal:
            log_p = lm.log_probs(torch.tensor([row[:at]]))[0, -1]
        else:
            log_p = lm.log_probs(torch.tensor([row[:at] + [lm.tokenizer.mask_id] * (len(row) - at)]))[0, at]
        found.append((float(log_p[row[at]]), float(log_p.max())))
    return found


@pytest.mark.parametrize("model", ["tiny", "left"])
def test_echo_and_logprobs_are_what_lm_eval_sends_and_reads(http, lm, causal, model, monkeypatch):
    """Its request for the likelihood of a continuation, and its way to read the answer."""
    own = {"tiny": lm, "left": causal}[model]
    monkeypatch.setitem(scoring.TOKENS_AT_ONCE, "cpu", 64)  # several passes
    context, continuation = own.tokenizer.encode("the "), own.tokenizer.encode("cat sat")
    asked = {"model": model, "prompt": [context + continuation], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    (choice,) = ok(http.post("/v1/completions", json=asked | {"seed": 1234, "echo": True}))["choices"]
    shown = choice["logprobs"]
    assert len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == len(context + continuation) + 1
    expected = by_hand(own, context + continuation)
    assert shown["token_logprobs"][:-1] == pytest.approx([p for p, _ in expected], rel=1e-4)
    assert [max(top.values()) for top in shown["top_logprobs"][:-1]] == pytest.approx(
        [b for _, b in expected], rel=1e-4
    )
    total, greedy = lm_eval_reads(choice, len(context))
    assert total == pytest.approx(sum(p for p, _ in expected[len(context) :]), rel=1e-4)
    assert greedy == all(p == b for p, b in expected[len(context) :])
    # a drawn token at temperature 0 is the likeliest
    assert shown["token_logprobs"][-1] == max(shown["top_logprobs"][-1].values())
    assert "".join(shown["tokens"]) == choice["text"]
    assert all(choice["text"][o:].startswith(t) for o, t in zip(shown["text_offset"], shown["tokens"]))
    # without a token drawn the prompt's are the same, and a begin token of its own has no log-probability
    tokens = [own.tokenizer.bos_id, *context, *continuation]
    (none,) = ok(http.post("/v1/completions", json=asked | {"prompt": tokens, "max_tokens": 0, "echo": True}))[
        "choices"
    ]
    assert none["logprobs"]["token_logprobs"] == [None, *shown["token_logprobs"][:-1]]


def lm_eval_reads(choice, context):
    """By its own code if it is installed with its extra, else as that does."""
    try:
        from lm_eval.models.openai_completions import LocalCompletionsAPI
    except Exception:
        logprobs, top = (choice["logprobs"][k][context:-1] for k in ("token_logprobs", "top_logprobs"))
        return sum(logprobs), all(p == max(t.values()) for p, t in zip(logprobs, top))
    return LocalCompletionsAPI.parse_logprobs({"choices": [choice]}, ctxlens=[context])[0]


def test_generation_as_lm_eval_asks_for_it(http):
    stops = ["\n\n", "Question:", "</s>", "<|im_end|>", "<|endoftext|>"]
    asked = {"prompt": [[97, 98]], "model": "tiny", "max_tokens": 8, "temperature": 0, "stop": stops, "seed": 1234}
    assert len(ok(http.post("/v1/completions", json=asked))["choices"][0]["text"]) <= 8


def test_chat_is_the_completion_of_the_written_conversation(server, http):
    openai = pytest.importorskip("openai", reason="the official client (extra 'test')")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = "System: be\nUser: hi\nAssistant:"
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, seed=4, stop="\nUser:")
    asked = {"model": "tiny", "messages": messages, "seed": 4, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == plain.choices[0].text.lstrip()
    assert whole.choices[0].finish_reason == plain.choices[0].finish_reason and whole.usage == plain.usage
    chunks = list(client.chat.completions.create(**asked, n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].object == "chat.completion.chunk" and chunks[0].choices[0].delta.role == "assistant"
    said = [c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == 0]
    assert "".join(said) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] and chunks[-1].usage.prompt_tokens
    user = http.post("/v1/chat/completions", json={"messages": [{"role": "robot", "content": "x"}]})
    assert user.status_code == 422 and "messages.0.role" in user.json()["error"]["message"]


def test_an_answer_ends_with_the_mark_of_its_template(tmp_path):
    """Also where the vocabulary's end of text is another token, as in SmolLM2's."""
    tok = raw_bytes()
    tok.backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    lm = load(export(tmp_path / "model", Tokenizer(tok.backend, "marked"), length=96), "cpu")
    end = tok.backend.token_to_id("<|im_end|>")
    assert end != lm.tokenizer.eos_id
    with torch.no_grad():
        lm.model.head.bias[end] += 50
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 4}
    with serving({"marked": lm}) as running:
        answer = ok(httpx.post(running.url + "/v1/chat/completions", json=asked, timeout=60))["choices"][0]
        filled = ok(httpx.post(running.url + "/v1/infill", json={"template": "a[MASK]", "seed": 4}, timeout=60))
    assert (answer["message"]["content"], answer["finish_reason"]) == ("", "stop")
    assert filled["choices"][0]["text"] == "".join(filled["choices"][0]["texts"]) == "a<|im_end|>"


# ---- Small things


def test_an_empty_template_is_refused(http):
    for path in ("/v1/infill", "/v1/frames"):
        refused = http.post(path, json={"template": ""})
        assert refused.status_code == 422 and refused.json()["error"]["message"].startswith("template: ")


def test_what_curl_sends_by_itself_is_answered_with_the_header_it_lacks(http):
    body = json.dumps({"prompt": "a"})
    for headers in ({"Content-Type": "application/x-www-form-urlencoded"}, {}):
        refused = http.post("/v1/completions", content=body, headers=headers)
        assert refused.status_code == 415
        assert "Content-Type must be application/json" in refused.json()["error"]["message"]
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert http.post("/v1/tokenize", content='{"text": "a"}', headers={"Content-Type": kind}).status_code == 200


def test_head_is_get_without_the_body(http):
    for path in ("/", "/healthz", "/readyz", "/docs", "/static/page.css"):
        got, asked = http.get(path), http.head(path)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-length"] == got.headers["content-length"]


def test_docs_list_the_routes_and_point_to_the_document(http):
    page = http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert 'href="/openapi.json"' in page.text and "<script" not in page.text
    assert all(path in page.text for path in ("/v1/completions", "/v1/chat/completions", "/v1/models/{id}"))


def test_retry_after_follows_the_queue(lm):
    """The longer sequences take to end, and the more must end, the later one should come back."""
    with serving({"tiny": LanguageModel(lm.loaded)}, slots=1, queue=16, max_n=17, max_steps=100_000) as running:
        mine = running.service.models["tiny"].worker
        stop = threading.Event()

        def occupy():
            with httpx.stream("POST", running.url + "/v1/frames", json={**LONG, "length": 32}, timeout=60) as response:
                for _ in response.iter_raw():
                    if stop.is_set():
                        return

        thread = threading.Thread(target=occupy)
        thread.start()
        wait_until(lambda: mine.taken == 1)

        def told(n):
            full = httpx.post(running.url + "/v1/infill", json={"length": 2, "steps": 1, "n": n})
            assert full.status_code == 429
            return int(full.headers["retry-after"])

        now = time.monotonic()
        mine.ends.clear()
        mine.ends.extend([now - 20, now - 15, now - 10, now - 5, now])  # one in five seconds
        assert told(17) in (5, 6)
        mine.taken += 3
        assert told(17) in range(20, 23)
        mine.taken -= 3
        mine.ends.clear()
        mine.ends.append(now - 1000)  # none for long
        assert told(17) == 60
        stop.set()
        thread.join()


# ---- lm-eval itself, over HTTP and in process

TASK = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.mark.parametrize("model", ["tiny", "left"])
def test_lm_eval_over_http_and_in_process_give_the_same_numbers(server, lm, causal, model, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `harness` (lm-eval)")
    pytest.importorskip("tenacity", reason="needs the extra `harness` (lm-eval)")
    from lm_eval.tasks import TaskManager

    from adlm.evaluation.harness import Harness

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked = [
        {"question": q, "choices": [" cat", " dog", " a b"], "label": i % 3}
        for i, q in enumerate(["the", "on a", "so", "we saw", "it is"])
    ]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, asked)))
    (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.json")))
    (tmp_path / "model").mkdir()
    own = {"tiny": lm, "left": causal}[model]
    own.save(tmp_path / "model")
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]", "bos_token": "[BOS]"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(facts))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def numbers(**who):
        found = lm_eval.simple_evaluate(tasks=["local_choice"], task_manager=tasks, log_samples=True, **who)
        answers = [[float(r[0]) for r in s["filtered_resps"]] for s in found["samples"]["local_choice"]]
        return answers, {k: v for k, v in found["results"]["local_choice"].items() if "acc" in k}

    there = (
        f"model={model},base_url={server.url}/v1/completions,tokenizer={tmp_path / 'model'},max_length={own.length - 1}"
    )
    over_http = numbers(model="local-completions", model_args=there)
    in_process = numbers(model=Harness(path=str(tmp_path / "model"), device="cpu", likelihood="left-to-right"))
    for a, b in zip(over_http[0], in_process[0]):
        assert a == pytest.approx(b, rel=1e-4)
    assert over_http[1] == pytest.approx(in_process[1]), "the task's numbers"

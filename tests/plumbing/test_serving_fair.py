"""No client keeps the others waiting: scores come in parts, slots and time are shared, costs and texts are bounded."""

import random
import threading
import time

import httpx
import pytest
from exports import export
from served import load_tiny, serving, wait_until, worker
from vocabularies import words

from adlm import api
from adlm.api import LanguageModel, scoring
from adlm.engine.request import Limit
from adlm.serving.jobs import TURN, Share, next_seat, take_part, whose_turn
from adlm.serving.service import MOST_TURNS
from adlm.tables import SAMPLERS

TEXT = "the cat sat on the mat and ate"


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("fair") / "tiny")


@pytest.fixture(scope="module")
def server(lm):
    with serving({"tiny": LanguageModel(lm.loaded)}, max_n=16, max_steps=4000) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


class InThread:
    """A POST that runs meanwhile."""

    def __init__(self, server, path, body):
        self.response: httpx.Response | None = None
        self.thread = threading.Thread(target=self.run, args=(server.url + path, body))
        self.thread.start()

    def run(self, url, body):
        self.response = httpx.post(url, json=body, timeout=60)

    def answer(self) -> httpx.Response:
        self.thread.join()
        assert self.response is not None
        return self.response


# ---- Scores


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"text": TEXT, "draws": 256}),
        ("/v1/completions", {"prompt": "", "max_tokens": 31, "logprobs": 1, "seed": 1, "stop": False, "n": 4}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "logprobs": 1, "echo": True, "n": 8}),
    ],
)
def test_a_long_score_does_not_stop_anothers_text(server, http, lm, monkeypatch, path, body):
    """Every sequence that the network scores takes 3 ms here; another client's text comes in between."""
    began, forward = threading.Event(), type(lm.model).forward

    def slow(self, tokens, *more, **named):
        if threading.current_thread().name == "adlm-tiny" and tokens.shape[1] > 16:
            began.set()
            time.sleep(0.003 * len(tokens))
        return forward(self, tokens, *more, **named)

    monkeypatch.setattr(type(lm.model), "forward", slow)
    monkeypatch.setattr("adlm.serving.openai.LOGPROB_DRAWS", 64)
    monkeypatch.setitem(scoring.TOKENS_AT_ONCE, "cpu", 128)
    scored = InThread(server, path, body)
    assert began.wait(30)
    while path == "/v1/completions" and "max_tokens" in body and body["max_tokens"] and worker(server).in_use:
        time.sleep(0.01)  # its own texts are drawn first
    text = http.post("/v1/infill", json={"length": 8, "seed": 1}).json()["choices"][0]["tokens"]
    assert scored.response is None, "the text waited for the whole score"
    assert text == lm.generate(length=8, seed=1, steps=8)[0].tokens
    assert scored.answer().status_code == 200


def test_a_score_in_parts_is_the_score(http, lm):
    """To the last bit: both run the same passes."""
    found, expected = http.post("/v1/score", json={"text": TEXT, "draws": 100}).json(), lm.score(TEXT, 100)
    assert (found["nll"], found["stderr"], found["per_token"]) == (expected.nll, expected.stderr, expected.per_token)
    parts = sum(1 for _ in lm.score_in_parts(TEXT, 100))
    assert parts == -(-100 // (scoring.TOKENS_AT_ONCE["cpu"] // 31))


def test_a_score_that_nobody_waits_for_is_given_up(server, lm, monkeypatch):
    passes = []
    monkeypatch.setattr(server.service.cfg, "timeout", 0.2)

    def endless(*args):
        while len(passes) < 1000:
            passes.append(time.sleep(0.02))
            yield

    monkeypatch.setattr(server.service.models["tiny"].lm, "score_in_parts", endless)
    assert httpx.post(server.url + "/v1/score", json={"text": "a"}).status_code == 504
    wait_until(lambda: worker(server).taken == 0, 10)
    assert len(passes) < 100


# ---- Slots and time


def test_an_ordinary_request_beside_two_that_want_everything(server, http, lm):
    hostile = {"length": 32, "n": 8, "steps": 150, "sampler": "forward-backward"}
    mine = worker(server)
    expected = lm.generate(**hostile | {"n": 2, "seed": 5})
    with httpx.Client(base_url=server.url, timeout=60) as one, httpx.Client(base_url=server.url, timeout=60) as two:
        threads = [
            threading.Thread(target=lambda c=c, s=s: answers.append(c.post("/v1/infill", json=hostile | {"seed": s})))
            for c, s in ((one, 5), (two, 50))
        ]
        answers: list[httpx.Response] = []
        for thread in threads:
            thread.start()
        wait_until(lambda: mine.taken == 16)
        for seed in range(3):
            text = http.post("/v1/infill", json={"length": 8, "seed": seed}).json()["choices"][0]["tokens"]
            assert text == lm.generate(length=8, seed=seed, steps=8)[0].tokens
        assert mine.taken > 10, "it waited for the others to end"
        for thread in threads:
            thread.join()
    # paused and resumed, they are what they would have been
    first = next(a for a in answers if a.json()["choices"][0]["seed"] == 5)
    assert [c["tokens"] for c in first.json()["choices"][:2]] == [g.tokens for g in expected]


def test_not_even_the_first_step_of_many_takes_long(server, http, monkeypatch):
    """No more tokens are evaluated at once than others may wait for, also when all of them have just come."""
    mine, sizes = worker(server), []
    evaluate = mine.engine.evaluate
    monkeypatch.setattr(mine.engine, "evaluate", lambda chosen: sizes.append(len(chosen)) or evaluate(chosen))
    monkeypatch.setattr(mine, "budget", 64)
    assert http.post("/v1/infill", json={"length": 32, "n": 8, "steps": 4}).status_code == 200
    assert max(sizes) == 2


def test_texts_and_scores_that_come_together_all_end(server, http, lm):
    """Also where it is a score's turn before the texts that have just got slots are admitted."""
    many = {"length": 32, "n": 8, "steps": 30, "sampler": "forward-backward"}
    asked = [InThread(server, "/v1/score", {"text": TEXT, "draws": 256}) for _ in range(2)]
    asked += [InThread(server, "/v1/infill", many | {"seed": seed}) for seed in (1, 2)]
    assert http.post("/v1/infill", json={"length": 8, "seed": 1}).status_code == 200
    assert [a.answer().status_code for a in asked] == [200] * 4
    wait_until(lambda: worker(server).taken == 0)


def test_a_cost_beyond_what_anybody_may_have_is_refused(http):
    refused = http.post("/v1/infill", json={"length": 32, "n": 16, "steps": 4000, "sampler": "forward-backward"})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert f"the cost n x length x steps is {16 * 32 * 4000}, allowed are {32 * 4000}" in message
    assert "serve.max_steps=4000" in message and "serve.max_n=16" in message
    prompts = {"prompt": ["a"] * 16, "steps": 4000, "sampler": "forward-backward", "max_tokens": 20}
    assert "the cost" in http.post("/v1/completions", json=prompts).json()["error"]["message"]
    # steps that draw nothing cost nothing
    assert http.post("/v1/infill", json={"length": 8, "n": 16, "steps": 4000, "sampler": "mdlm"}).status_code == 200


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"score"}))
def test_no_sequence_costs_more_than_is_counted(lm, sampler):
    from adlm.serving.service import cost_of

    for settings in ({"steps": 5}, {"steps": 30}):
        request = lm.request(prompt="ab", length=12, sampler=sampler, eta=0.1, **settings)
        (result,) = lm.engine(1).run([request])
        assert result.nfe * 12 <= cost_of(request, lm)


def share(had=0.0, seated=(), waiting=0, use=None):
    found = Share(use=use)
    found.had, found.seated = had, list(seated)
    found.fresh.extend(range(waiting))
    return found


def test_slots_go_to_who_holds_fewest():
    many, none, one = share(seated=[1, 2, 3], waiting=5), share(waiting=1), share(seated=[4], waiting=1)
    assert next_seat([many, none, one], free=1) == (none, None)
    assert next_seat([many, none, one], free=0) == (none, many)
    assert next_seat([many, one], free=0) == (one, many)
    assert next_seat([share(seated=[1, 2], waiting=9), one], free=0) is None
    assert next_seat([many], free=0) is None and next_seat([share(seated=[1])], free=3) is None
    # where each holds one, who has had more than a turn makes room
    late = share(waiting=1)
    assert next_seat([share(TURN / 2, [1]), late], free=0) is None
    assert next_seat([first := share(2 * TURN, [1]), late], free=0) == (late, first)


def test_slots_are_given_out_to_the_end():
    """Whatever comes and however long it takes: everybody ends, and nobody holds two slots more than one who waits."""
    chance = random.Random(0)
    shares = [share(waiting=chance.randrange(1, 9)) for _ in range(12)]
    slots, step = 4, 0
    while any(s.waiting or s.seated for s in shares):
        while (seat := next_seat(shares, slots - sum(len(s.seated) for s in shares))) is not None:
            taker, holder = seat
            if holder is not None:
                holder.seated.pop()
                holder.paused.append(0)
            taker.seated.append(0)
            (taker.paused or taker.fresh).popleft()
        waits = [len(s.seated) for s in shares if s.waiting]
        assert sum(len(s.seated) for s in shares) <= slots
        assert not waits or max(len(s.seated) for s in shares) <= min(waits) + 1
        for s in [s for s in shares if s.seated]:
            s.had += 0.1 * len(s.seated)
            if chance.random() < 0.1:
                s.seated.pop()
        step += 1
        assert step < 10_000


def test_it_is_the_turn_of_who_has_had_least_and_now_and_then_of_who_waited_longest():
    small, big, score = share(seated=[1]), share(0.5, seated=[2]), share(1.0, use=(_ for _ in ()))
    small.last, big.last, score.last = 3, 1, 2
    everybody = [big, share(waiting=1), score, small]
    assert whose_turn(everybody, spared=False) is small and whose_turn(everybody, spared=True) is big
    assert whose_turn([share(waiting=1)], spared=False) is None and whose_turn([], spared=True) is None


def test_a_long_step_is_for_whose_turn_it_is():
    small, big, ahead = share(seated=[1]), share(seated=[2, 3, 4]), share(1.0, seated=[5])
    sizes = {1: 8, 2: 256, 3: 256, 4: 256, 5: 256}.__getitem__
    everybody = [small, big, ahead]
    assert take_part(everybody, small, sizes, budget=2000) == [1, 2, 3, 4, 5], "nobody waits for anybody"
    assert take_part(everybody, small, sizes, budget=600) == [1, 2, 3]
    assert take_part([big, ahead], big, sizes, budget=100) == [2], "at least one"
    big.had = TURN
    assert take_part(everybody, small, sizes, budget=600) == [1]
    assert take_part(everybody, ahead, sizes, budget=600) == [5, 1], "who has waited longest, and the small one"
    # beside a score everybody takes turns
    score = share(use=(_ for _ in ()))
    assert take_part([*everybody, score], small, sizes, budget=2000) == [1]


# ---- Texts


def test_a_text_that_is_too_long_is_not_even_tokenised(server, http, monkeypatch):
    tokenizer = server.service.models["tiny"].lm.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text: encode(text) if len(text) < 5000 else pytest.fail("tokenised")
    )
    text = "x" * 900_000
    for path, body in (
        ("/v1/tokenize", {"text": text}),
        ("/v1/score", {"text": text}),
        ("/v1/anchors", {"text": text}),
        ("/v1/anchors", {"text": "[MASK]" + text}),
        ("/v1/infill", {"prompt": text}),
        ("/v1/infill", {"template": "[MASK]" + text}),
        ("/v1/frames", {"prompt": text}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/completions", {"prompt": "a", "suffix": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400 and "characters, allowed are 4096" in refused.json()["error"]["message"], path
    assert http.post("/v1/completions", json={"stop": text}).status_code == 422
    assert http.post("/v1/completions", json={"prompt": [1] * 200_000}).status_code == 422


def test_no_text_that_fits_is_taken_for_too_long(tmp_path, monkeypatch):
    """The bound is sound: so many tokens of a vocabulary of words never have more characters."""
    from adlm.schema import SamplingConfig, ServeConfig
    from adlm.serving.jobs import ServerMetrics
    from adlm.serving.service import Served

    lm = api.load(export(tmp_path / "model", words()), device="cpu")
    served = Served("words", lm, ServeConfig(), SamplingConfig(), ServerMetrics())
    monkeypatch.setattr("adlm.serving.service.SHORT_TEXT", 1)
    tok, chance = served.lm.tokenizer, random.Random(0)
    for size in (1, 5, 50):
        served.limit = Limit(size)
        for _ in range(50):
            text = tok.decode([t for t in chance.choices(range(tok.vocab_size), k=size) if t not in tok.special_ids])
            if len(tok.encode(text)) <= size:
                served.check_text(text, "the text")
        longest = max(tok.backend.get_vocab(), key=len)
        served.check_text(tok.decode([tok.backend.token_to_id(longest)] * size), "the text")
        with pytest.raises(ValueError, match="characters, allowed are"):
            served.check_text("x" * (size * served.longest_token + 1), "the text")


def test_texts_are_read_one_at_a_time_off_the_loop(server, http, monkeypatch):
    go, threads = threading.Event(), []
    tokenizer = server.service.models["tiny"].lm.tokenizer
    encode = tokenizer.encode

    def slow(text):
        threads.append(threading.current_thread().name)
        assert go.wait(30)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr(server.service.cfg, "queue", 3)
    asked = [InThread(server, "/v1/tokenize", {"text": "ab"}) for _ in range(3)]
    wait_until(lambda: server.service.reader.waiting == 3)
    assert http.get("/healthz").status_code == 200
    full = http.post("/v1/tokenize", json={"text": "ab"})
    assert full.status_code == 429 and "serve.queue" in full.json()["error"]["message"]
    assert len(threads) == 1
    go.set()
    assert [a.answer().json()["texts"] for a in asked] == [["a", "b"]] * 3
    assert len(set(threads)) == 1 and threads[0].startswith("adlm-reader")


def test_an_automaton_that_takes_long_to_make_keeps_only_constrained_requests_waiting(server, http, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr("adlm.api.language_model.make_constraint", lambda *given: go.wait(30) and None)
    monkeypatch.setattr(server.service.cfg, "queue", 2)
    asked = [InThread(server, "/v1/infill", {"length": 8, "regex": "a*", "seed": 1}) for _ in range(2)]
    wait_until(lambda: server.service.matcher.waiting == 2)
    full = http.post("/v1/completions", json={"max_tokens": 4, "choices": ["a"]})
    assert full.status_code == 429 and "serve.queue" in full.json()["error"]["message"]
    monkeypatch.undo()  # what waits is inside of it already
    assert http.post("/v1/infill", json={"length": 8, "seed": 1}, timeout=10).status_code == 200
    go.set()
    assert [a.answer().status_code for a in asked] == [200, 200]


def test_the_work_of_a_constraint_counts(server, http, monkeypatch):
    """A step looks at every edge of the automaton in every position: too many are refused, many have their own step."""
    pytest.importorskip("outlines_core", reason="needs the extra `constrain` (outlines-core)")
    body = {"length": 8, "regex": "[ab]{3,9}", "seed": 1, "n": 3}
    together, calls = worker(server), []
    edges = len(together.lm.request(regex="[ab]{3,9}").constraint.automaton.source_E)
    step = together.step
    monkeypatch.setattr(together, "step", lambda ids: (calls.append(len(ids)), step(ids)))
    assert http.post("/v1/infill", json=body).status_code == 200
    assert max(calls) == 3
    monkeypatch.setattr("adlm.serving.worker.MATCHED", edges * 8)
    calls.clear()
    assert http.post("/v1/infill", json=body).status_code == 200
    assert max(calls) == 1
    monkeypatch.setattr("adlm.serving.service.MATCHED", 8 * (edges - 1) / MOST_TURNS)
    refused = http.post("/v1/infill", json=body)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and f"edges of its automaton x length is {8 * edges}" in message, message
    assert http.post("/v1/completions", json={"max_tokens": 6, "regex": "[ab]{3}"}).status_code == 200


# ---- All of it in simulated time: what is shared is counted, not measured

TOKENS_PER_SECOND, FIXED, BUDGET = 6000, 0.004, 600


class Client:
    """One client that asks again as soon as it is answered."""

    def __init__(self, n: int, size: int, steps: int, score: bool = False):
        self.n, self.size, self.steps, self.score = n, size, steps, score
        self.latencies: list[float] = []
        self.evaluated = 0
        """Tokens that the network has read for it."""

    def ask(self, now: float) -> None:
        self.began, self.left = now, {i: self.steps for i in range(self.n)}
        self.share = share(waiting=0 if self.score else self.n, use=(_ for _ in ()) if self.score else None)
        self.share.last = now


def simulated(clients: list[Client], slots: int, seconds: float) -> None:
    """The worker's loop with a clock of its own: a step costs a fixed time and some for each token it reads."""
    now, spared_at, ids = 0.0, 0.0, {}
    for client in clients:
        client.ask(now)
    while now < seconds:
        shares = [c.share for c in clients]
        while (seat := next_seat(shares, slots - sum(len(s.seated) for s in shares))) is not None:
            taker, holder = seat
            if holder is not None:
                holder.paused.append(holder.seated.pop())
            owner = next(c for c in clients if c.share is taker)
            if taker.paused:
                taker.seated.append(taker.paused.popleft())
            else:
                ids[len(ids)] = owner, taker.fresh.popleft()
                taker.seated.append(len(ids) - 1)
        spared = now > spared_at + 1.0
        first = whose_turn(shares, spared)
        spared_at = now if spared else spared_at
        assert first is not None
        if first.use is not None:
            taken = [(next(c for c in clients if c.share is first), None)]
        else:
            taken = [(*ids[i], i) for i in take_part(shares, first, lambda i: ids[i][0].size, BUDGET)]
        read = sum(c.size for c, *_ in taken)
        spent = FIXED + read / TOKENS_PER_SECOND
        now += spent
        for client, index, *id in taken:
            client.evaluated += client.size
            client.share.had += spent * client.size / read
            client.share.last = now
            number = index if index is not None else 0
            client.left[number] -= 1
            if not client.left[number]:
                del client.left[number]
                for i in id:
                    client.share.forget(i)
                if not client.left:
                    client.latencies.append(now - client.began)
                    client.ask(now)


def p99(clients: list[Client]) -> float:
    found = sorted(x for c in clients for x in c.latencies)
    assert len(found) > 300, len(found)
    return found[int(0.99 * len(found))]


def test_hostile_clients_at_most_double_the_p99_of_thirty_two_ordinary_ones():
    """Beside two that want sixteen long texts of 4096 steps and two that want scores of 256 draws."""

    def ordinary() -> list[Client]:
        return [Client(1, size, steps) for size, steps in [(8, 12), (12, 16), (16, 24), (12, 30)] * 8]

    alone, beside = ordinary(), ordinary()
    hostile = [Client(16, 256, 4096), Client(16, 256, 4096), Client(1, 512, 128, True), Client(1, 512, 128, True)]
    simulated(alone, 64, 40)
    simulated([*hostile, *beside], 64, 40)
    ratio = p99(beside) / p99(alone)
    of_hostile = sum(c.evaluated for c in hostile) / sum(c.evaluated for c in [*hostile, *beside])
    assert ratio <= 2, (ratio, of_hostile)
    assert min(c.evaluated for c in hostile) > 0, "nobody starves"
    assert of_hostile < 0.5, "two hostile kinds of client get less than half of the network"

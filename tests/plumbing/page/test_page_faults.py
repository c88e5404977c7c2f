"""The page in a real browser when something goes wrong: stops, errors, keys, servers that die, queues."""

import contextlib
import json

from in_browser import (
    finished,
    generate,
    last_frame,
    needs_chromium,
    same,
    scrub,
    serving,
    settings,
    wait_until,
    written,
)

pytestmark = needs_chromium


def test_a_run_that_is_stopped_frees_its_slot(visit, server):
    page = visit()
    settings(page, sampler="dfm", steps=4000, seed=1)
    page.click("#generate")
    page.wait_for_selector("#stop:not([hidden])")
    page.wait_for_function("() => Number(document.getElementById('slider').value) > 3")
    page.click("#stop")
    wait_until(lambda: server.service.models["tiny"].worker.taken == 0, 10)
    assert page.locator("#generate").is_visible() and page.locator("#notice").is_hidden()
    scrub(page, 0)
    assert set(written(page)) == {"_"}, "what was written so far can be looked at"
    page.keyboard.press("End")
    half = written(page)
    page.keyboard.press("h")  # the masks that are left are holes: another sampler goes on from here
    page.wait_for_selector("#holes:not([hidden])")
    settings(page, sampler="mdlm", steps=16)
    page.click("#infill")
    page.wait_for_selector("#holes", state="hidden")
    finished(page)
    assert len(written(page)) == 32 and all(a in ("_", b) for a, b in zip(half, written(page)))


def test_errors_are_one_line_where_the_reader_looks(visit, server):
    page = visit(expect=["429", "400"])
    generate(page, seed=1, length=32)
    before = written(page)
    settings(page, steps=99999)
    page.click("#generate")
    page.wait_for_selector("#notice:not([hidden])")
    said = page.locator("#notice").inner_text()
    assert "\n" not in said and "99999" in said and "serve." not in said, (
        "names of settings are for who runs the server"
    )
    assert written(page) == before and last_frame(page) > 5, "the text before it can still be scrubbed"
    settings(page, steps=16)

    full = {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": None}}
    page.route("**/v1/frames", lambda r: r.fulfill(status=429, headers={"Retry-After": "1"}, body=json.dumps(full)))
    page.click("#generate")
    page.wait_for_selector("text=There should be room in 1 s")
    page.unroute("**/v1/frames")
    page.wait_for_selector("#notice button:enabled")
    page.click("#notice button")
    finished(page)
    assert page.locator("#notice").is_hidden()


def test_a_wrong_key_is_said_and_a_right_one_is_not_kept_in_the_page(visit, folder):
    from adlm.api import load

    with serving({"tiny": load(folder, "cpu")}, key="sesame") as locked:
        page = visit(url=locked.url, ready=False, expect=["401"])
        page.wait_for_selector("text=This server asks for a key.")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("text=The server does not accept that key.")
        assert page.locator("#key").input_value() == "wrong", "to be mended"
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        page.wait_for_selector("#generate:enabled")
        generate(page, seed=1, length=16)
        assert page.locator("#key").input_value() == "" and "sesame" not in page.url
        page.click("#code")
        assert "ADLM_API_KEY" in page.locator("#snippet").inner_text() and "sesame" not in page.content()


def test_a_server_that_dies_is_looked_for_and_the_run_repeated(visit, folder, server):
    from adlm.api import load

    models = {"tiny": load(folder, "cpu")}
    with serving(models) as first:
        page = visit(url=first.url, expect=["ERR_", "Failed to load"])
        settings(page, sampler="dfm", steps=4000, seed=3, length=32)
        page.click("#generate")
        page.wait_for_function("() => Number(document.getElementById('slider').value) > 3")
    page.wait_for_selector("text=The server went away before the text was finished.")
    assert "_" in written(page) or len(written(page)) > 3, "what was written stays"
    with serving({"tiny": load(folder, "cpu")}, port=first.port):
        page.wait_for_selector("text=The server is back.")
        page.route(
            "**/v1/frames", lambda route: route.continue_(post_data={**route.request.post_data_json, "steps": 16})
        )
        page.click("#notice button")
        finished(page)
        (expected,) = server.lm.generate(seed=3, sampler="dfm", steps=16, top_p=0.9, length=32)
        assert same(written(page), expected.text) and page.locator("#notice").is_hidden()


def test_a_run_that_waits_is_told_its_place_in_the_queue(visit, folder, monkeypatch):
    import httpx

    from adlm.api import load

    monkeypatch.setattr("adlm.serving.jobs.TURN", 1e9)  # nobody makes room
    with serving({"tiny": load(folder, "cpu")}, slots=1) as small, contextlib.ExitStack() as streams:
        page = visit(url=small.url)
        page.evaluate("""() => {
            window.seen = [];
            new MutationObserver(() => seen.push(document.getElementById("said").textContent))
                .observe(document.getElementById("said"), { childList: true });
        }""")
        settings(page, seed=1, length=16)
        long = {"length": 32, "steps": 4000, "sampler": "dfm"}
        lines = []  # kept: a stream whose lines nobody holds is closed
        for _ in range(3):
            stream = streams.enter_context(httpx.stream("POST", small.url + "/v1/frames", json=long, timeout=30))
            lines.append(stream.iter_lines())
            next(lines[-1])
        page.click("#generate")
        page.wait_for_function("() => seen.some(text => /^Number [1-9] in the queue/.test(text))")
        streams.close()
        finished(page)

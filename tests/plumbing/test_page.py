"""The page in a real browser, against the real server with a tiny model: what people do with it, end to end.

Every test also fails on an error in the console, a blocked resource or a request to another host.
"""

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

pytest.importorskip("fastapi", reason="the server needs the extra 'serve'")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra 'test')")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)")
TEXT = "the old cat sat on the mat"


def readable_model(folder):
    """A tiny untrained model over bytes that draws small letters and spaces only, as an exported folder."""
    from adlm.data.tokenizers import raw_bytes
    from adlm.io.export import describe, save_folder
    from adlm.schema import Config, DataConfig

    tokenizer = raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, length=32)
    letters = [tokenizer.encode(c)[0] for c in "abcdefghijklmnopqrstuvwxyz "]
    with torch.no_grad():
        for head in (model.head, model.anchor_head):
            likely = head.bias[letters] + 30.0
            head.bias[letters] = likely
        model.head.bias[letters[-1]] += 2.0
    cfg = Config(algo="test", model=model.config, data=DataConfig(name="none", tokenizer="bytes"))
    save_folder(folder, model.state_dict(), tokenizer, describe(cfg, tokenizer, step=3))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A tiny model under two names, served from a thread; `.lm` is the library's view of it."""
    from adlm.api import load
    from adlm.schema import SamplingConfig, ServeConfig
    from adlm.serving.app import make_app
    from adlm.serving.server import make_server
    from adlm.serving.service import Service

    folder = readable_model(tmp_path_factory.mktemp("page") / "export")
    models = {name: load(folder, "cpu") for name in ("tiny", "other")}
    service = Service(models, ServeConfig(port=0, slots=4), SamplingConfig(steps=16, top_p=0.9))
    uvicorn = make_server(make_app(service), service)
    thread = threading.Thread(target=uvicorn.run, daemon=True)
    thread.start()
    wait_until(lambda: uvicorn.started and service.ready)
    port = uvicorn.servers[0].sockets[0].getsockname()[1]
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", lm=load(folder, "cpu"), service=service)
    uvicorn.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, server):
    """Open the page: visit(fragment, **options of the browser context). Says at the end whether anything was amiss."""
    amiss, contexts = [], []

    def open_page(fragment="", expect=(), **options):
        context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)

        def console(message):
            if message.type in ("error", "warning") and not any(text in message.text for text in expect):
                amiss.append(message.text)

        page.on("console", console)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("request", lambda request: request.url.startswith(server.url) or amiss.append(request.url))
        page.goto(server.url + "/" + fragment)
        page.wait_for_selector("select[name=model] option", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not amiss


def script(name):
    return (Path(__file__).parents[1] / "support" / "page" / name).read_text()


def wait_until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def settings(page, **values):
    """Fill in the form; a seed that is given stays."""
    page.locator("#settings").evaluate("box => { box.open = true; }")
    if "seed" in values:
        page.uncheck("#vary")
    for name, value in values.items():
        field = page.locator(f"[name={name}]")
        if field.evaluate("f => f.tagName") == "SELECT":
            field.select_option(value)
        elif isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(str(value))


def finished(page, lanes=1):
    """The run has ended and the playhead stands at its last frame."""
    page.wait_for_function("n => document.querySelectorAll('.copy:not([hidden])').length === n", arg=lanes)
    page.keyboard.press("Escape")
    page.locator("#last").evaluate("button => button.click()")
    page.wait_for_function("() => { const s = document.getElementById('slider'); return s.value === s.max; }")


def written(page, lane=0):
    """What stands on the canvas, without begin and end tokens; a mask is one underscore."""
    read = """canvas => [...canvas.children].map(s =>
        s.querySelector(".hole") ? "_" : s.querySelector(".special") ? "" : s.textContent).join("")"""
    return page.locator(f".lane{lane} .canvas").evaluate(read)


def scrub(page, k):
    page.locator("#slider").evaluate(
        "(s, k) => { s.value = k; s.dispatchEvent(new Event('input', { bubbles: true })); }", k
    )


def last_frame(page):
    return int(page.locator("#slider").get_attribute("max"))


def generate(page, **values):
    settings(page, **values)
    page.click("#generate")
    finished(page, 2 if values.get("compare") else 1)


def test_text_appears_from_masks_and_is_the_library_s(visit, server):
    page = visit()
    assert set(written(page)) == {"_"}
    page.evaluate("""() => {
        window.seen = [];
        const note = () => seen.push(document.querySelectorAll(".canvas .hole").length);
        new MutationObserver(note).observe(document.getElementById("lanes"), { subtree: true, childList: true });
    }""")
    settings(page, seed=5, steps=16, length=32)
    page.click("#generate")
    page.wait_for_selector(".copy:not([hidden])")
    page.wait_for_selector("#play:not(.playing)")  # the playhead has caught up by itself
    masks = page.evaluate("() => seen")
    assert masks[0] == 32 and masks[-1] == 0 and len(set(masks)) > 5
    (expected,) = server.lm.generate(seed=5, steps=16, top_p=0.9, length=32)
    assert written(page) == expected.text
    assert "16" in page.locator(".status").inner_text() and "0 % masked" in page.locator(".status").inner_text()


def test_scrubbing_by_slider_keys_and_plot(visit):
    page = visit()
    generate(page, seed=1, steps=16, sampler="remdm-cap")
    whole, n = written(page), last_frame(page)
    scrub(page, 0)
    assert set(written(page)) == {"_"} and len(written(page)) == 32
    page.locator("#stage").focus()
    page.keyboard.press("ArrowRight")
    first = written(page)
    assert 0 < first.count("_") < 32
    assert page.locator(".canvas .new").count() == 32 - first.count("_")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert written(page) == first, "a step back undoes a step forward"
    page.keyboard.press("End")
    assert written(page) == whole
    page.keyboard.press("Home")
    assert set(written(page)) == {"_"}
    page.locator("#speed").select_option("4")
    page.locator("#stage").focus()
    page.keyboard.press("Space")
    page.wait_for_function("n => Number(document.getElementById('slider').value) === n", arg=n)
    assert written(page) == whole
    box = page.locator("#plot-masked svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    assert 0 < int(page.locator("#slider").input_value()) < n
    assert page.locator("#plot-nfe polyline").count() == 1


def test_a_word_masked_again_is_shown_so(visit):
    page = visit()
    generate(page, seed=2, steps=32, sampler="forward-backward")
    seen = 0
    for k in range(last_frame(page) + 1):
        scrub(page, k)
        gone = page.locator(".canvas .gone").count()
        seen += gone
        assert gone <= page.locator(".canvas .hole").count()
    assert seen > 0


def test_anchor_guesses_stand_in_the_holes(visit):
    page = visit()
    generate(page, seed=3, steps=16)
    scrub(page, 2)
    guesses = page.locator(".canvas .guess")
    assert guesses.count() > 5
    assert all(text for text in guesses.all_inner_texts())
    shades = {c for cs in guesses.evaluate_all("all => all.map(g => g.className)") for c in cs.split() if c[0] == "p"}
    assert shades <= {f"p{i}" for i in range(10)} and shades


def test_click_a_word_into_a_hole_and_infill(visit, server):
    page = visit()
    page.fill("#text", TEXT)
    page.click("#cut")
    page.wait_for_selector(".editor .word")
    words = page.locator(".editor .word")
    assert [w.strip() for w in words.all_inner_texts()] == TEXT.split()
    words.nth(2).click()
    assert page.locator("#holecount").inner_text() == "1 hole, 4 masks to fill."  # " cat" is four bytes
    page.locator(".cutbox input").fill("6")
    page.locator(".cutbox input").press("Tab")
    assert "6 masks" in page.locator("#holecount").inner_text()
    settings(page, seed=7)
    page.click("#infill")
    page.wait_for_selector(".canvas .given")
    finished(page)
    (expected,) = server.lm.generate("the old[MASK:6] sat on the mat", seed=7, steps=16, top_p=0.9)
    assert written(page) == expected.text
    scrub(page, 0)
    assert written(page) == "the old______ sat on the mat"
    assert page.locator("#text").input_value() == "the old[MASK:6] sat on the mat"


def test_holes_cut_into_a_canvas_leave_every_other_token_alone(visit):
    page = visit()
    page.fill("#text", TEXT)
    generate(page, seed=4, length=32)
    before = written(page)
    page.locator(".canvas span", has_text="c").first.click()  # of "cat"
    assert page.locator(".editor .cut").count() == 1
    settings(page, seed=11)
    page.click("#infill")
    page.wait_for_selector("#holes", state="hidden")
    finished(page)
    after = written(page)
    assert after.startswith("the old") and after[len("the old ") + 3 :] == before[len("the old ") + 3 :]
    scrub(page, 0)
    assert written(page) == before.replace(" cat", "____", 1)


def test_holes_by_keyboard_alone(visit):
    page = visit()
    page.fill("#text", "red bird flew")
    page.locator("#stage").focus()
    page.keyboard.press("h")
    page.wait_for_selector(".editor .word:focus")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert page.locator("#holecount").inner_text() == "1 hole, 7 masks to fill."
    page.keyboard.press("-")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#holes", state="hidden")
    finished(page)
    assert written(page).startswith("red") and written(page).endswith(" flew")
    page.keyboard.press("h")
    page.wait_for_selector(".editor .word:focus")
    page.keyboard.press("Escape")
    assert page.locator("#holes").is_hidden() and page.locator(".editor").is_hidden()


def test_dragging_changes_a_hole_s_length(visit):
    page = visit()
    page.fill("#text", "red bird flew")
    page.click("#cut")
    page.locator(".editor .word").nth(1).click()
    box = page.locator(".grip").bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 4 + 45, box["y"] + 8)
    page.mouse.up()
    assert page.locator("#holecount").inner_text() == "1 hole, 8 masks to fill."


def test_comparison_of_samplers_and_models_shares_seed_and_slider(visit, server):
    page = visit()
    generate(page, compare=True, model2="other", sampler="mdlm", sampler2="confidence", seed=9, steps=16, steps2=8)
    (a,) = server.lm.generate(seed=9, sampler="mdlm", steps=16, top_p=0.9)
    (b,) = server.lm.generate(seed=9, sampler="confidence", steps=8, top_p=0.9)
    assert (written(page, 0), written(page, 1)) == (a.text, b.text)
    assert page.locator(".lane h2").all_inner_texts() == ["mdlm · tiny", "confidence · other"]
    assert page.locator("#plot-masked polyline").count() == page.locator("#plot-nfe polyline").count() == 2
    scrub(page, 0)
    assert set(written(page, 0)) == set(written(page, 1)) == {"_"}
    settings(page, compare=False)
    assert page.locator(".lane").count() == 1


def test_required_and_banned_words_are_sent(visit):
    page = visit()
    generate(page, seed=1, required="bird, mat", banned="dog", length=32)
    assert "bird" in written(page) and "mat" in written(page)


def test_a_link_restores_the_form_and_runs_on_request(visit, server):
    page = visit()
    values = {"seed": 42, "steps": 12, "temperature": 0.8, "top_p": 0.7, "length": 24, "sampler": "remdm-loop"}
    generate(page, **values, compare=True, sampler2="entropy", model2="other", banned="dog")
    texts = written(page, 0), written(page, 1)
    page.click("#share")
    link = page.url
    other = visit("#" + link.split("#")[1])
    for name, value in {**values, "sampler2": "entropy", "model2": "other", "banned": "dog"}.items():
        assert other.locator(f"[name={name}]").input_value() == str(value)
    assert set(written(other)) == {"_"}, "it only runs when asked to"
    other.click("#notice button")
    finished(other, 2)
    assert (written(other, 0), written(other, 1)) == texts
    page.check("#runs")
    page.click("#share")
    third = visit("#" + page.url.split("#")[1])
    finished(third, 2)
    assert (written(third, 0), written(third, 1)) == texts


def test_a_link_to_what_is_not_there_says_so(visit):
    page = visit("#model=gone&sampler=mdlm&steps=8&seed=1&run=1")
    page.wait_for_selector("text=This link names the model gone, which this server does not have.")
    assert set(written(page)) == {"_"} and page.locator("[name=model]").input_value() == "tiny"


def test_a_link_holds_the_holes_of_a_canvas(visit):
    page = visit()
    page.fill("#text", TEXT)
    generate(page, seed=4, length=32)
    page.locator(".canvas span", has_text="c").first.click()
    page.click("#infill")
    page.wait_for_selector("#holes", state="hidden")
    finished(page)
    page.check("#runs")
    page.click("#share")
    assert "tokens=" in page.url
    other = visit("#" + page.url.split("#")[1])
    finished(other)
    assert written(other) == written(page)


def overflow(page):
    return page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_a_phone_needs_no_sideways_scrolling(visit):
    page = visit()
    page.set_viewport_size({"width": 360, "height": 740})
    page.reload()
    page.wait_for_selector("select[name=model] option", state="attached")
    assert not page.locator("#settings").evaluate("box => box.open") and overflow(page) <= 0
    generate(page, compare=True, seed=2)
    assert overflow(page) <= 0
    tops = [page.locator(f".lane{i}").bounding_box()["y"] for i in (0, 1)]
    assert tops[1] > tops[0] + 100, "lanes stand below each other"
    page.locator(".lane0 .canvas span b").first.click()
    page.wait_for_selector(".lane0 .cutbox")
    page.locator(".lane0 .cutbox input").fill("40")
    page.locator(".lane0 .cutbox input").press("Tab")
    assert overflow(page) <= 0


def background(page):
    return page.evaluate("() => getComputedStyle(document.body).backgroundColor")


def test_light_and_dark(visit):
    page = visit(color_scheme="light")
    light = background(page)
    page.click("#theme")
    dark = background(page)
    assert light == "rgb(251, 250, 247)" and dark == "rgb(20, 22, 26)"
    page.reload()
    assert background(page) == dark, "the choice is kept"
    assert background(visit(color_scheme="dark")) == dark
    page.wait_for_selector("select[name=model] option", state="attached")


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
    page = visit(expect=["429", "401", "400"])
    generate(page, seed=1)
    before = written(page)
    settings(page, steps=99999)
    page.click("#generate")
    page.wait_for_selector("#notice:not([hidden])")
    said = page.locator("#notice").inner_text()
    assert "\n" not in said and "serve.max_steps" in said
    assert written(page) == before and last_frame(page) > 5, "the text before it can still be scrubbed"
    settings(page, steps=16)

    full = {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": None}}
    page.route("**/v1/frames", lambda r: r.fulfill(status=429, headers={"Retry-After": "1"}, body=json.dumps(full)))
    page.click("#generate")
    page.wait_for_selector("text=Try again in 1 s")
    page.unroute("**/v1/frames")
    page.wait_for_selector("#notice button:enabled")
    page.click("#notice button")
    finished(page)
    assert page.locator("#notice").is_hidden()

    def locked(route):
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, body=json.dumps(full))

    page.route("**/v1/frames", locked)
    page.click("#generate")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    finished(page)
    assert page.evaluate("() => sessionStorage.length") == 1 and "sesame" not in page.url


def test_every_control_has_a_name_and_stillness_is_respected(visit):
    page = visit(reduced_motion="reduce")
    nameless = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea, button")].filter(e =>
        !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map(e => e.outerHTML)""")
    assert nameless == []
    assert page.locator("[aria-live=polite]").count() >= 1
    settings(page, seed=1)
    page.click("#generate")
    page.wait_for_selector(".copy:not([hidden])")
    assert "_" not in written(page), "nothing is replayed by itself"
    assert page.locator(".canvas b").first.evaluate("b => getComputedStyle(b).animationName") == "none"
    page.locator("#stage").focus()
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()


def test_only_spans_that_change_are_touched_and_long_tapes_scrub_smoothly(visit):
    """1,024 tokens, 500 frames with guesses: every canvas equals a plain replay, and a step touches its own spans."""
    page = visit()
    result = page.evaluate(script("long_tape.js"))
    assert result["wrong"] == []
    assert result["touched"] == result["changed"] and 0 < result["changed"] < 40
    assert result["median"] < 250, result  # 7 ms at best; the suite shares its cores


def test_pure_functions(visit):
    page = visit()
    result = page.evaluate(script("pure.js"))
    assert result == {name: True for name in result}, result


def test_the_page_may_only_talk_to_its_server(server):
    import urllib.request

    with contextlib.closing(urllib.request.urlopen(server.url + "/")) as answer:
        policy = answer.headers["Content-Security-Policy"]
        page = answer.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "<script>" not in page and "style=" not in page and "http://" not in page and "https://" not in page

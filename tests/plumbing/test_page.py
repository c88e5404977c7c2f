"""The page in a real browser, against the real server with a tiny model: what people do with it, end to end.

Every test also fails on an error in the console, a blocked resource or a request to another host.
"""

import contextlib
import json
import re
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


AXE = Path(__file__).parents[2] / ".venv/npm/node_modules/axe-core/axe.min.js"
"""Put there by .ci/run, or by `npm install --no-save --prefix .venv/npm axe-core@4`."""
STATIC = Path(__file__).parents[2] / "src/adlm/serving/static"


@contextlib.contextmanager
def serving(models, port=0, key="", slots=32, **settings):
    """A server in a thread; ends as if killed: connections are cut."""
    from adlm.schema import SamplingConfig, ServeConfig
    from adlm.serving.app import make_app
    from adlm.serving.server import make_server
    from adlm.serving.service import Service

    sampling = SamplingConfig(steps=16, top_p=0.9, batch_size=slots)
    service = Service(models, ServeConfig(port=port, **settings), sampling)
    uvicorn = make_server(make_app(service, key), service)
    thread = threading.Thread(target=uvicorn.run, daemon=True)
    thread.start()
    wait_until(lambda: uvicorn.started and service.ready)
    port = uvicorn.servers[0].sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, service=service)
    finally:
        uvicorn.should_exit = uvicorn.force_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return readable_model(tmp_path_factory.mktemp("page") / "export")


@pytest.fixture(scope="module")
def server(folder):
    """A tiny model under two names, served from a thread; `.lm` is the library's view of it."""
    from adlm.api import load

    with serving({name: load(folder, "cpu") for name in ("tiny", "other")}, slots=4) as running:
        running.lm = load(folder, "cpu")
        yield running


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


WATCH_SHIFTS = """window.shifts = [];
new PerformanceObserver((list) => {
    for (const shift of list.getEntries()) if (!shift.hadRecentInput) shifts.push(shift.value);
}).observe({ type: "layout-shift", buffered: true });"""


@pytest.fixture
def visit(browser, server):
    """Open the page: visit(fragment, **options of the browser context). Says at the end whether anything was amiss."""
    amiss, contexts = [], []

    def open_page(fragment="", expect=(), url=server.url, ready=True, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.add_init_script(WATCH_SHIFTS)

        def console(message):
            if message.type in ("error", "warning") and not any(text in message.text for text in expect):
                amiss.append(message.text)

        page.on("console", console)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("request", lambda request: request.url.startswith((url, "blob:")) or amiss.append(request.url))
        page.goto(url + "/" + fragment)
        if ready:
            page.wait_for_selector("#generate:enabled", state="attached")
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
    page.wait_for_function("() => document.getElementById('announce').textContent.startsWith('Finished')")
    assert page.locator(".copy:not([hidden])").count() == lanes
    scrub(page, last_frame(page))


def written(page, lane=0):
    """What stands on the canvas, without begin and end tokens; a mask is one underscore. Lines are broken at spaces,
    which stay behind."""
    read = """canvas => [...canvas.children].map(line => [...line.children].map(s =>
        s.querySelector(".hole") ? "_" : s.querySelector(".special") ? "" : s.textContent).join("")).join("|")"""
    return page.locator(f".lane{lane} .canvas").evaluate(read)


def words(text):
    return text.replace("|", " ").split()


def same(shown, text):
    """Whether the canvas shows this text, wherever its lines are broken."""
    return shown.replace("|", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


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
    settings(page, seed=5, steps=16, length=32)
    page.evaluate("""() => {
        window.seen = [];
        const recorded = () => document.querySelector(".lane h2").textContent.startsWith("Recorded");
        const note = () => recorded() || seen.push(document.querySelectorAll(".canvas .hole").length);
        new MutationObserver(note).observe(document.getElementById("lanes"), { subtree: true, childList: true });
    }""")
    page.click("#generate")
    page.wait_for_function("() => document.getElementById('announce').textContent.startsWith('Finished')")
    page.wait_for_selector("#play:not(.playing)")  # the playhead has caught up by itself
    masks = page.evaluate("() => seen")
    assert masks[0] == 32 and masks[-1] == 0 and len(set(masks)) > 5
    (expected,) = server.lm.generate(seed=5, steps=16, top_p=0.9, length=32)
    assert same(written(page), expected.text)
    assert "16" in page.locator(".status").inner_text() and "0 % masked" in page.locator(".status").inner_text()


def test_the_page_opens_with_a_film_of_the_model_in_the_package(visit):
    """Unedited: it plays from masks to the text that the recording ends with. It needs no model."""
    film = json.loads((STATIC / "film.json").read_text())
    page = visit()
    page.wait_for_function("() => document.querySelectorAll('.canvas .hole').length > 60")
    assert page.locator(".lane h2").inner_text().startswith("Recorded")
    page.wait_for_function("() => document.querySelectorAll('.canvas .hole.guess').length > 0")
    page.locator("#speed").select_option("4")
    page.wait_for_selector("#play:not(.playing)")
    assert same(written(page), film["end"]["text"])
    assert 4 <= page.locator("#chips button:enabled").count() <= 6
    assert sum(page.evaluate("() => shifts")) < 0.1
    calm = visit(reduced_motion="reduce")
    calm.wait_for_function("() => document.querySelectorAll('.canvas b').length > 60")
    assert same(written(calm), film["end"]["text"]), "whole at once"


@pytest.mark.slow
def test_the_film_is_what_the_model_writes():
    from adlm.api import load

    film = json.loads((STATIC / "film.json").read_text())
    start = film["start"]
    (text,) = load().generate("The river", length=128, seed=start["seed"], steps=start["steps"], top_p=0.9)
    assert text.text == film["end"]["text"] and text.nfe == film["end"]["nfe"]


def test_chips_fill_the_form_and_run(visit):
    page = visit(expect=["400"])
    page.click("#chips button:has-text('Change its mind')")
    finished(page)
    assert page.locator("[name=sampler]").input_value() == "remdm-loop" and "_" not in written(page)
    page.click("#chips button:has-text('Fill holes')")  # more than the tiny model can hold
    page.wait_for_selector("#notice:not([hidden])")
    assert "[MASK:" in page.locator("#text").input_value() and page.locator("#generate").inner_text() == "Fill holes"


def test_scrubbing_by_slider_keys_and_plot(visit):
    page = visit()
    page.click("#charts summary")
    generate(page, seed=1, steps=16, sampler="remdm-cap", length=32)
    whole, n = written(page), last_frame(page)
    scrub(page, 0)
    assert written(page).count("_") == 32
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
    assert set(written(page)) <= {"_", "|"}
    page.locator("#speed").select_option("4")
    page.locator("#stage").focus()
    page.keyboard.press("Space")
    page.wait_for_function("n => Number(document.getElementById('slider').value) === n", arg=n)
    assert written(page) == whole
    box = page.locator("#plot-masked svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    assert 0 < int(page.locator("#slider").input_value()) < n
    assert page.locator("#plot-nfe polyline").count() == 1


def test_layout_shift_of_a_run_stays_small(visit):
    """Words that come move their own line at most; while the text is replayed nothing moves at all."""
    for options in ({}, {"viewport": {"width": 390, "height": 800}, "has_touch": True}):
        page = visit(**options)
        settings(page, seed=5, steps=32, length=32)
        page.evaluate("() => { document.activeElement.blur(); shifts.length = 0; }")
        page.wait_for_timeout(600)  # shifts within half a second of a click are not counted
        page.evaluate("() => document.getElementById('form').requestSubmit()")
        page.wait_for_function("() => document.getElementById('announce').textContent.startsWith('Finished')")
        page.wait_for_selector("#play:not(.playing)")
        assert sum(page.evaluate("() => shifts")) < 0.1
        tops = """() => [...document.querySelectorAll(".cell")].map(c => {
            const { x, y } = (c.querySelector("b, i") ?? c).getBoundingClientRect();
            return [Math.round(x), Math.round(y)];
        })"""
        places = []
        for k in (0, last_frame(page) // 2, last_frame(page)):
            scrub(page, k)
            places.append(page.evaluate(tops))
        assert places[0] == places[1] == places[2]


def test_what_came_first_colours_words_by_the_step_at_which_they_settled(visit):
    page = visit(reduced_motion="reduce")
    page.wait_for_function("() => document.querySelectorAll('.canvas b').length > 60")  # the film, at its end
    page.click("#camefirst")
    levels = page.evaluate("""() => [...document.querySelectorAll(".canvas b:not(.special, .given)")].map(b =>
        [...b.classList].find(c => /^t\\d$/.test(c)))""")
    assert None not in levels and set(levels) == {f"t{i}" for i in range(7)}
    assert page.locator("#legendfirst").is_visible() and "settled" in page.locator(".status").inner_text()
    page.click("#writing")
    assert page.locator(".canvas .t0").count() == 0


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


def test_guesses_are_whole_content_words_and_are_never_clipped(visit):
    """A guess that does not fit the place of its word in a replay is a colour; while the run goes on the mask grows."""
    page = visit()
    result = page.evaluate(script("guesses.js"))
    assert result["kept"] == [" Atlantic", " river"]
    assert result["live"] == ["Atlantic", "river"] and result["clipped"] == 0
    assert result["replayed"] == {"fits": "river", "long": "", "colour": True}


def test_text_outside_ascii_is_whole_at_every_step(visit, server):
    page = visit()
    page.fill("#text", "Zürich 東京 😀 is [MASK:6].")
    generate(page, seed=3)
    for k in range(last_frame(page) + 1):
        scrub(page, k)
        shown = written(page)
        assert "Zürich" in shown and "東京" in shown and "😀" in shown and "\ufffd" not in shown
    result = page.evaluate(script("unicode.js"))
    assert result == ["_", "", "東", "東", "東"], "half of a character is a mask, not a broken one"


def test_three_alternatives_in_place_of_a_word_before_after_and_undo(visit, server):
    page = visit()
    page.fill("#text", TEXT)
    generate(page, seed=4, length=32)
    text = written(page)
    page.locator(".canvas .cell", has_text="c").first.click()  # of "cat"
    page.wait_for_function("() => document.querySelectorAll('.alternatives .choice').length === 3")
    choices = page.locator(".alternatives .choice").all_inner_texts()
    assert len(set(choices)) == 3 and "cat" not in choices
    page.locator(".alternatives .choice").nth(1).click()
    after = written(page)
    assert after.startswith(f"the old {choices[1]} sat on") and page.locator(".alternatives").is_hidden()
    assert page.locator("#text").input_value() == TEXT, "what was typed stays"
    page.click("#before")
    assert written(page) == text and page.locator(".canvas .changed").count() > 0
    page.click("#before")
    assert written(page) == after
    page.locator("#stage").focus()
    page.keyboard.press("Control+z")
    assert written(page) == text and page.locator("#edits").is_hidden()
    page.locator(".canvas .cell", has_text="c").first.click()
    page.wait_for_selector(".alternatives .choice")
    page.keyboard.press("Escape")
    assert page.locator(".alternatives").is_hidden() and written(page) == text


def test_words_of_the_film_have_alternatives_too(visit):
    """Its tokens are another model's: the text is sent."""
    page = visit(reduced_motion="reduce", expect=["400"])
    page.wait_for_function("() => document.querySelectorAll('.canvas b').length > 60")
    page.locator(".canvas b", has_text="originally").click()
    page.wait_for_selector("#notice:not([hidden])")  # too long for the tiny model, and said in plain words
    said = page.locator("#notice").inner_text()
    assert "allowed" in said and "serve." not in said and "sampling." not in said


def test_holes_of_a_typed_text_are_filled_and_the_text_stays(visit, server):
    page = visit()
    page.fill("#text", TEXT)
    page.click("#cut")
    page.wait_for_selector(".editor .word")
    cut = page.locator(".editor .word")
    assert [w.strip() for w in cut.all_inner_texts()] == TEXT.split()
    cut.nth(2).click()
    assert page.locator("#holecount").inner_text() == "1 hole, 4 masks to fill."  # " cat" is four bytes
    page.locator(".cutbox input").fill("6")
    page.locator(".cutbox input").press("Tab")
    assert "6 masks" in page.locator("#holecount").inner_text()
    settings(page, seed=7)
    page.click("#infill")
    finished(page)
    (expected,) = server.lm.generate("the old[MASK:6] sat on the mat", seed=7, steps=16, top_p=0.9)
    assert same(written(page), expected.text)
    scrub(page, 0)
    assert same(written(page), "the old______ sat on the mat")
    assert page.locator("#text").input_value() == TEXT
    assert page.locator("#generate").inner_text() == "Fill holes", "again, with another seed"
    page.click("#clear")
    assert page.locator("#generate").inner_text() == "Generate"


def test_holes_that_are_written_otherwise_are_pointed_out(visit):
    page = visit()
    for written_so, meant in {"a [mask:3] b": "[MASK:3]", "a [MASK:] b": "[MASK]", "a [MASK:3 b": "[MASK:3]"}.items():
        page.fill("#text", written_so)
        assert "is read as words" in page.locator("#hint").inner_text() and meant in page.locator("#hint").inner_text()
        assert (
            page.locator("#text").input_value() == written_so and page.locator("#generate").inner_text() == "Generate"
        )
        page.click("#hint button")
        assert page.locator("#text").input_value() == f"a {meant} b" and page.locator("#hint").is_hidden()
        assert page.locator("#generate").inner_text() == "Fill holes"
    page.fill("#text", "an unmasked [masked] man")
    assert page.locator("#hint").is_hidden()


def test_holes_cut_into_a_canvas_leave_every_other_token_alone(visit):
    page = visit()
    page.fill("#text", TEXT)
    generate(page, seed=4, length=32)
    before = written(page)
    page.keyboard.press("Escape")
    page.click("#cut")
    page.locator(".editor .word").nth(2).click()
    settings(page, seed=11)
    page.click("#infill")
    finished(page)
    after = written(page)
    assert after.startswith("the old") and after.endswith(before[before.index(" sat") :])
    scrub(page, 0)
    assert same(written(page), before.replace("cat", "____", 1))
    page.click("#undo")
    assert written(page) == before


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
    page.locator("#stage").focus()
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
    page.click("#charts summary")
    values = {"compare": True, "model2": "other", "sampler": "mdlm", "sampler2": "confidence", "seed": 9, "length": 32}
    generate(page, **values, steps=16, steps2=8)
    (a,) = server.lm.generate(seed=9, sampler="mdlm", steps=16, top_p=0.9)
    (b,) = server.lm.generate(seed=9, sampler="confidence", steps=8, top_p=0.9)
    assert same(written(page, 0), a.text) and same(written(page, 1), b.text)
    assert page.locator(".lane h2").all_inner_texts() == ["mdlm · tiny", "confidence · other"]
    page.wait_for_function("() => document.querySelectorAll('.plots polyline').length === 4")
    scrub(page, 0)
    assert set(written(page, 0)) | set(written(page, 1)) <= {"_", "|"}
    settings(page, compare=False)
    assert page.locator(".lane").count() == 1


def test_a_race_of_diffusion_against_left_to_right(visit, server):
    page = visit()
    settings(page, seed=9, steps=8, length=32)
    page.click("#race")
    finished(page, 2)
    page.wait_for_function("() => !document.getElementById('board').textContent.includes('…')")
    rows = page.locator("#board tr").all_inner_texts()
    names = [row.split("\t")[0] for row in rows]
    assert names == ["sampler", "mdlm", "left to right"]
    (_, clock, nfe, rate, nats), (_, slow, slow_nfe, one, _) = (row.split("\t") for row in rows[1:])
    texts = [server.lm.generate(seed=9, sampler=s, steps=8, top_p=0.9)[0] for s in ("mdlm", "autoregressive")]
    assert same(written(page, 0), texts[0].text) and same(written(page, 1), texts[1].text)
    assert (
        (int(nfe), int(slow_nfe)) == (texts[0].nfe, 32) and float(rate) == round(32 / texts[0].nfe, 2) and one == "1.00"
    )
    assert clock.endswith(" s") and slow.endswith(" s") and float(nats) > 0
    assert page.locator("#board .won").count() >= 3


def test_required_and_banned_words_are_sent(visit):
    page = visit()
    generate(page, seed=1, required="bird, mat", banned="dog", length=32)
    assert "bird" in written(page).replace("|", "") and "mat" in written(page).replace("|", "")


@pytest.mark.parametrize(("match", "allowed"), [("/[xyz]{4}/", "[xyz]{4}"), ("bird, fish", "(bird|fish)")])
def test_holes_must_match_what_is_asked_for(visit, match, allowed):
    pytest.importorskip("outlines_core", reason="the extra 'constrain'")
    page = visit()
    page.fill("#text", "the old [MASK:4] sat")
    generate(page, seed=1, match=match)
    assert re.fullmatch(f"the old ?{allowed} sat", written(page)), written(page)


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
    assert set(written(other)) <= {"_", "|"}, "it only runs when asked to"
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
    assert set(written(page)) <= {"_", "|"} and page.locator("[name=model]").input_value() == "tiny"


@pytest.mark.parametrize("how", ["cut", "typed"])
def test_a_link_to_an_infill_opens_as_one(visit, how):
    page = visit()
    page.fill("#text", TEXT if how == "cut" else "the old[MASK:4] sat on the mat")
    settings(page, seed=4)
    if how == "cut":
        page.click("#cut")
        page.locator(".editor .word").nth(2).click()
        page.click("#infill")
    else:
        page.click("#generate")
    finished(page)
    page.click("#share")
    other = visit("#" + page.url.split("#")[1])
    assert same(written(other), "the old____ sat on the mat"), "the template, before anything ran"
    assert other.locator("#text").input_value() == page.locator("#text").input_value()
    assert other.locator("#generate").inner_text() == "Fill holes"
    other.click("#generate")  # and not only the button beside the message
    finished(other)
    assert written(other) == written(page)


def test_get_code_prints_the_text_that_the_page_shows(visit, server):
    import subprocess
    import sys

    page = visit()
    page.fill("#text", 'it\'s [MASK:5] "quoted" é')
    generate(page, seed=12, banned="dog")
    (expected,) = server.lm.generate('it\'s [MASK:5] "quoted" é', seed=12, steps=16, top_p=0.9, banned=["dog"])
    page.click("#code")
    codes = {}
    for name in ("curl", "Python", "JavaScript"):
        page.click(f"#languages button:text-is('{name}')")
        codes[name] = page.locator("#snippet").inner_text()
    ran = subprocess.run(
        [sys.executable, "-c", codes["Python"]], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == expected.text
    ran = subprocess.run(["bash", "-c", codes["curl"]], capture_output=True, text=True, timeout=60)
    assert shutil.which("curl") is None or json.loads(ran.stdout)["choices"][0]["text"] == expected.text
    shown = page.evaluate(
        "code => new (async () => {}).constructor(code.replace('console.log', 'return '))()", codes["JavaScript"]
    )
    assert shown == expected.text


def test_a_saved_page_opens_again_and_plays(visit, browser, tmp_path):
    page = visit()
    page.fill("#text", "</script><b>old")
    generate(page, seed=4, length=32)
    text = written(page)
    with page.expect_download() as download:
        page.click("#savehtml")
    file = tmp_path / "run.html"
    download.value.save_as(file)
    context = browser.new_context()
    saved, amiss = context.new_page(), []
    saved.on("pageerror", lambda error: amiss.append(str(error)))
    saved.on("request", lambda request: request.url.startswith("file:") or amiss.append(request.url))
    saved.goto(file.as_uri())
    saved.wait_for_function("() => document.querySelectorAll('.canvas .hole').length > 5")
    saved.wait_for_selector("#play:not(.playing)")
    read = (
        """c => [...c.querySelectorAll(".cell")].map(s => s.querySelector(".special") ? "" : s.textContent).join("")"""
    )
    assert same(saved.locator(".canvas").evaluate(read), text)
    scrub(saved, 0)
    assert saved.locator(".canvas .hole").count() > 5
    saved.click("#camefirst")
    scrub(saved, last_frame(saved))
    assert saved.locator(".canvas :is(.t0, .t1, .t2, .t3, .t4, .t5, .t6)").count() > 0 and not amiss
    context.close()


def test_a_saved_gif_is_an_animation_that_ends_with_the_text(visit, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib")
    page = visit()
    generate(page, seed=4, length=32, steps=16)
    with page.expect_download() as download:
        page.click("#savegif")
    page.wait_for_selector("text=Saved.")
    file = tmp_path / "run.gif"
    download.value.save_as(file)
    with image.open(file) as gif:
        box = page.locator(".canvas").bounding_box()
        assert abs(gif.width - box["width"]) <= 1 and abs(gif.height - box["height"]) <= 1
        assert gif.n_frames == last_frame(page) + 1
        pictures = []
        for n in range(gif.n_frames):
            gif.seek(n)
            pictures.append(gif.convert("RGB"))
    shot = tmp_path / "canvas.png"
    page.locator(".canvas").evaluate("c => c.classList.add('still')")
    page.locator(".canvas").screenshot(path=shot)
    with image.open(shot) as picture:
        whole = picture.convert("L").resize((60, 12))

    def far(one):
        return sum(abs(a - b) for a, b in zip(one.convert("L").resize((60, 12)).tobytes(), whole.tobytes())) / 720

    assert far(pictures[-1]) < 0.5 * far(pictures[0]), (far(pictures[-1]), far(pictures[0]))


def overflow(page):
    return page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_a_phone_has_its_bar_in_reach_and_targets_that_a_finger_hits(visit):
    page = visit(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert not page.locator("#settings").evaluate("box => box.open") and overflow(page) <= 0
    generate(page, seed=2, length=32)
    assert overflow(page) <= 0
    page.evaluate("() => scrollTo(0, 1e6)")
    bar = page.locator("#generate").bounding_box()
    assert bar["y"] + bar["height"] <= 740, "whatever is scrolled to"
    page.locator("#settings").evaluate("box => { box.open = false; }")
    small = page.evaluate("""() => [...document.querySelectorAll("button, select, input, summary")].filter(e => {
        const { width, height } = (e.type === "checkbox" ? e.closest("label") : e).getBoundingClientRect();
        return width && (width < 44 || height < 44) && !e.closest("p");
    }).map(e => e.id || e.outerHTML)""")
    assert small == []
    settings(page, length=32)
    page.evaluate("() => scrollTo(0, 0)")
    assert page.locator(".lane0 .canvas").bounding_box()["height"] < 740 * 0.6, "the text fits the screen"
    page.locator(".lane0 .canvas b").first.tap()
    page.wait_for_selector(".alternatives .choice")
    box = page.locator(".alternatives").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= bar["y"]


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


def test_every_control_has_a_name_and_stillness_is_respected(visit):
    page = visit(reduced_motion="reduce")
    nameless = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea, button")].filter(e =>
        !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map(e => e.outerHTML)""")
    assert nameless == []
    assert page.locator("[aria-live=polite]").count() >= 1
    settings(page, seed=1, length=32)
    page.click("#generate")
    page.wait_for_function("() => document.getElementById('announce').textContent.startsWith('Finished')")
    assert "_" not in written(page), "nothing is replayed by itself"
    assert page.locator(".canvas b").first.evaluate("b => getComputedStyle(b).animationName") == "none"
    page.locator("#stage").focus()
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core (npm install --no-save --prefix .venv/npm axe-core@4)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, scheme):
    """Contrast of 4.5 included, in the film half way, a finished run with alternatives, what came first, the race."""
    page = visit(color_scheme=scheme, expect=["[axe]"])
    page.evaluate(AXE.read_text())

    def faults():
        page.locator(".canvas").evaluate_all("all => all.forEach(c => c.classList.add('still'))")
        found = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
        return [(v["id"], [node["target"] for node in v["nodes"]][:5]) for v in found]

    page.wait_for_function("() => document.querySelectorAll('.canvas .hole').length > 60")
    scrub(page, 40)
    assert faults() == []
    page.fill("#text", "[mask] a cat sat")
    settings(page, seed=2, length=32, steps=8)
    page.click("#race")
    finished(page, 2)
    page.locator(".lane0 .canvas b", has_text="c").first.click()
    page.wait_for_selector(".alternatives .choice")
    assert faults() == []
    page.keyboard.press("Escape")
    page.click("#camefirst")
    page.click("#charts summary")
    page.click("#cut")
    page.wait_for_selector(".editor .word")
    page.locator(".editor .word").nth(2).click()
    assert faults() == []
    page.keyboard.press("Escape")
    for button, dialog in (("#help", "#keys"), ("#code", "#codes")):
        page.click(button)
        assert faults() == []
        page.click(f"{dialog} .main")


LISTED = """
the a an and or but nor so yet for of to in on at by from with about against between into through during before after
above below up down out off over under again further then once here there when where why how all any both each few
more most other some such no not only own same than too very can will just should now i me my we our you your he him
his she her it its they them their what which who whom this that these those am is are was were be been being have has
had having do does did doing would could might must shall may if because as until while although though whereas
whether unless since despite toward towards upon within without among amongst along across behind beyond beside
besides except per via whose whoever whatever anything something nothing everything everyone someone one two three
first second also however therefore thus hence moreover furthermore nevertheless otherwise instead perhaps already
always never often sometimes usually still even quite rather almost much many several either neither another every
ever else around near onto outside inside throughout regarding including concerning according him itself himself
herself themselves ourselves myself yourself whilst albeit notwithstanding thereby therein thereof thereafter whereby
wherein hereby cannot till plus versus lest hitherto elsewhere somewhere anywhere nowhere
"""
FUNCTION_WORDS = set(LISTED.split())


def marked_words(page, tokens, texts):
    """The page's own marks of a finished text, and how many words it has."""
    return page.evaluate(
        """async ([tokens, texts]) => {
            const { loadRanks, markedPositions } = await import("/static/words.js");
            const { itemsOf } = await import("/static/template.js");
            const marked = markedPositions(tokens, texts, new Set(), await loadRanks());
            let at = 0;
            const words = itemsOf(tokens, texts).map((item) => {
                const size = item.ids.length, own = [...Array(size).keys()].some((i) => marked.has(at + i));
                at += size;
                return [item.kind, item.texts.join(""), own];
            }).filter(([kind]) => kind === "word");
            return [words.filter(([, , own]) => own).map(([, text]) => text), words.length];
        }""",
        [tokens, texts],
    )


def check_marks(page, tokens, texts):
    marked, n = marked_words(page, tokens, texts)
    bare = ["".join(c for c in word.lower() if c.isalpha()) for word in marked]
    assert 0 < len(marked) < 0.15 * n
    assert all(bare) and not FUNCTION_WORDS & set(bare), FUNCTION_WORDS & set(bare)
    return len(marked) / n


def test_few_words_of_the_film_are_marked_and_no_function_word(visit):
    film = json.loads((STATIC / "film.json").read_text())
    check_marks(visit(), film["end"]["tokens"], film["end"]["texts"])
    listed = set((STATIC / "words.txt").read_text().split())
    assert len(listed) == 16_000 and not FUNCTION_WORDS & listed


@pytest.mark.slow
def test_few_words_are_marked_in_ten_runs_and_no_function_word(visit, capsys):
    from adlm.api import load
    from adlm.constrain.automaton import token_bytes
    from adlm.serving.answers import characters

    lm, page, shares = load(), visit(), []
    spelled = token_bytes(lm.tokenizer)
    for text in lm.generate(n=10, length=128, steps=64, top_p=0.9, seed=100):
        texts = characters([spelled[t] for t in text.tokens])
        shares.append(check_marks(page, text.tokens, texts))
    with capsys.disabled():
        print(f"\nmarked words in ten runs: {min(shares):.3f} to {max(shares):.3f}, mean {sum(shares) / 10:.3f}")


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

"""The page in a real browser, against the real server with a tiny model: what people do with it, end to end."""

import contextlib
import json

import pytest
from in_browser import STATIC, finished, generate, last_frame, needs_chromium, same, script, scrub, settings, written

pytestmark = needs_chromium


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
    if any(frame["anchors"] for frame in film["frames"]):
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
    (text,) = load().generate(**film["settings"])
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

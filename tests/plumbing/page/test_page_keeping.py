"""What a reader takes away from the page, in a real browser: links, code, saved pages and films."""

import json
import shutil

import pytest
from in_browser import TEXT, finished, generate, last_frame, needs_chromium, same, scrub, settings, written

pytestmark = needs_chromium


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

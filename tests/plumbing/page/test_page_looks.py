"""How the page looks in a real browser: phones, light and dark, names of controls, accessibility, marked words."""

import json

import pytest
from in_browser import AXE, STATIC, finished, generate, needs_chromium, scrub, settings, written

pytestmark = needs_chromium


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

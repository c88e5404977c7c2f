"""Holes of the page in a real browser: alternatives of a word, typed templates, holes cut by hand, what must match."""

import re

import pytest
from in_browser import TEXT, finished, generate, needs_chromium, same, scrub, settings, written

pytestmark = needs_chromium


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
    page.locator(".canvas b").nth(40).click()
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


@pytest.mark.parametrize(("match", "allowed"), [("/[xyz]{4}/", "[xyz]{4}"), ("bird, fish", "(bird|fish)")])
def test_holes_must_match_what_is_asked_for(visit, match, allowed):
    pytest.importorskip("outlines_core", reason="the extra 'constrain'")
    page = visit()
    page.fill("#text", "the old [MASK:4] sat")
    generate(page, seed=1, match=match)
    assert re.fullmatch(f"the old ?{allowed} sat", written(page)), written(page)

"""The page of a plain model that writes in blocks of any length, such as `adlm adapt` makes."""

import pytest
from in_browser import finished, generate, needs_chromium, same, serving, settings, written
from served import load_tiny

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks") / "model"
    lm = load_tiny(folder, anchored=False, block_length="1,8,4,0", shift=True, conditioning="none")
    with serving({"blocks": lm}, slots=4) as running:
        running.lm = lm
        yield running


def test_a_text_is_written_in_the_models_own_blocks_unless_others_are_chosen(visit, server):
    page = visit()
    names = page.locator("[name=block_length] option").all_inner_texts()
    assert names == ["its own (1: left to right)", "1: left to right", "8 tokens", "4 tokens", "the whole text"]
    for K in (0, 4):
        values = {"sampler": "confidence", "seed": 3, "steps": 4, "length": 30}
        generate(page, text="the cat", block_length=str(K), **values)
        (text,) = server.lm.generate("the cat", block_length=K, top_p=0.9, **values)
        assert same(written(page), text.text)


def test_holes_are_filled_on_the_whole_canvas_whatever_is_chosen(visit, server):
    page = visit()
    generate(page, text="the [MASK:3] sat on [MASK:2].", block_length="8", seed=3, steps=8)
    (filled,) = server.lm.generate("the [MASK:3] sat on [MASK:2].", seed=3, steps=8, top_p=0.9)
    assert same(written(page), filled.text)
    generate(page, text="the", required="cat", length=30)
    assert "cat" in written(page).replace("|", "")
    generate(page, text="is it [MASK:3]", required="", match="yes", block_length="0")
    assert "yes" in written(page)


def test_a_race_is_between_blocks_and_one_token_at_a_time(visit, server):
    page = visit()
    settings(page, text="the cat", seed=9, length=30, steps=4)
    page.click("#race")
    finished(page, 2)
    for lane, (sampler, K) in enumerate((("confidence", 8), ("autoregressive", 1))):
        (text,) = server.lm.generate("the cat", seed=9, length=30, steps=4, top_p=0.9, sampler=sampler, block_length=K)
        assert same(written(page, lane), text.text)
    page.click("#share")
    link = page.evaluate("() => location.hash")
    again = visit(link)
    again.click("#notice button")
    finished(again, 2)
    assert [written(again, lane) for lane in (0, 1)] == [written(page, lane) for lane in (0, 1)]


def test_examples_show_blocks_and_nothing_speaks_of_anchors(visit):
    page = visit()
    assert "anchor" not in page.locator("main").inner_text()
    page.click("#chips button:has-text('Surest words first')")
    finished(page)
    assert page.locator("[name=sampler]").input_value() == "confidence"
    assert page.locator("[name=block_length]").input_value() == "8", "more than one word at once"

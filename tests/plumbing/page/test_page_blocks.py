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


def test_a_text_is_drafted_unless_a_block_length_is_chosen(visit, server):
    page = visit()
    assert page.locator("[name=sampler]").input_value() == "speculative"
    names = page.locator("[name=block_length] option").all_inner_texts()
    assert names == ["its own (1: left to right)", "1: left to right", "8 tokens", "4 tokens", "the whole text"]
    generate(page, text="the cat", seed=3, length=30)
    drafted = written(page)
    causal = {"sampler": "autoregressive", "block_length": 1}
    (left_to_right,) = server.lm.generate("the cat", seed=3, length=30, top_p=0.9, **causal)
    assert same(drafted, left_to_right.text), "the same, in fewer evaluations"
    generate(page, sampler="confidence", block_length="4", seed=3, steps=4)
    (blocks,) = server.lm.generate(
        "the cat", seed=3, length=30, sampler="confidence", block_length=4, steps=4, top_p=0.9
    )
    assert same(written(page), blocks.text) and blocks.text != left_to_right.text


def test_holes_are_filled_on_the_whole_canvas_whatever_is_chosen(visit, server):
    page = visit()
    generate(page, text="the [MASK:3] sat on [MASK:2].", block_length="8", seed=3, steps=8)
    (filled,) = server.lm.generate("the [MASK:3] sat on [MASK:2].", seed=3, steps=8, top_p=0.9)
    assert same(written(page), filled.text)
    generate(page, text="the", required="cat", length=30)
    assert "cat" in written(page).replace("|", "")
    generate(page, text="is it [MASK:3]", required="", match="yes", block_length="0")
    assert "yes" in written(page)


def test_a_race_is_between_the_draft_and_one_token_at_a_time(visit, server):
    page = visit()
    settings(page, text="the cat", seed=9, length=30)
    page.click("#race")
    finished(page, 2)
    (expected,) = server.lm.generate("the cat", seed=9, length=30, block_length=1, sampler="autoregressive", top_p=0.9)
    assert same(written(page, 0), expected.text) and same(written(page, 1), expected.text)
    names = [row.split("\t")[0] for row in page.locator("#board tr").all_inner_texts()]
    assert names == ["sampler", "speculative", "left to right"]


def test_examples_show_blocks_and_nothing_speaks_of_anchors(visit):
    page = visit()
    assert "anchor" not in page.locator("main").inner_text()
    page.click("#chips button:has-text('Surest words first')")
    finished(page)
    assert page.locator("[name=sampler]").input_value() == "confidence"
    assert page.locator("[name=block_length]").input_value() == "8", "more than one word at once"

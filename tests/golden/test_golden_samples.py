"""Texts of every sampler and bounds of given texts equal the stored ones; regenerate.py says how to change them."""

import json

import pytest
from regenerate import BOUNDS, SAMPLES, SCORES, TEXTS, bound_of, texts_of

GOLDEN_TEXTS, GOLDEN_BOUNDS = json.loads(SAMPLES.read_text()), json.loads(SCORES.read_text())


def test_every_case_has_its_numbers():
    assert list(GOLDEN_TEXTS) == list(TEXTS)
    assert list(GOLDEN_BOUNDS) == list(BOUNDS)


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    assert texts_of(name) == GOLDEN_TEXTS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    found = bound_of(name)
    assert list(found) == list(GOLDEN_BOUNDS[name])
    for quantity, value in GOLDEN_BOUNDS[name].items():
        tolerance = 1e-3 if quantity == "stderr" else 1e-5
        assert found[quantity] == pytest.approx(value, rel=tolerance, abs=1e-5), quantity

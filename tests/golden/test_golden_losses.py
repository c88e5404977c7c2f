"""Ten training losses of every algorithm equal those stored in losses.json; regenerate.py says how to change them."""

import json

import pytest
from regenerate import LOSSES, RUNS, losses_of

GOLDEN = json.loads(LOSSES.read_text())
# A gradient has small and large parts that cancel, so its norm is less certain than the loss it belongs to.
TOLERANCES = {"grad_norm": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


def test_every_run_has_its_numbers():
    assert list(GOLDEN) == list(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_losses(run, folder):
    found = losses_of(run, folder)
    assert list(found) == list(GOLDEN[run])
    for term, numbers in GOLDEN[run].items():
        assert found[term] == pytest.approx(numbers, rel=TOLERANCES.get(term, 1e-5)), term

"""The choice of an attention kernel: timed more than once, since a card that wakes up is slow for the first."""

import pytest
import torch

from adlm.models import layers
from adlm.schema import ModelConfig

ANYTHING = (2, ModelConfig(), torch.device("cpu"))


@pytest.fixture(autouse=True)
def _any_kernel_afterwards():
    yield
    layers.use("any")


def timed(monkeypatch, flash: list[float | None], cudnn: list[float | None]) -> None:
    """Answers of the clock for each kernel, round by round; None: the kernel was not built for this card."""
    left = {"flash": iter(flash), "cudnn": iter(cudnn)}

    def milliseconds(*_: object) -> float:
        found = next(left[layers.attention_kernel()])
        if found is None:
            raise RuntimeError("no such kernel")
        return found

    monkeypatch.setattr(layers, "milliseconds", milliseconds)


def test_a_slow_first_round_does_not_decide(monkeypatch):
    timed(monkeypatch, flash=[9.0, 1.0, 1.1], cudnn=[2.0, 2.1, 2.0])
    assert layers.choose_attention(*ANYTHING) == {"flash": 1.0, "cudnn": 2.0}
    assert layers.attention_kernel() == "flash"


def test_a_kernel_that_was_not_built_is_not_chosen(monkeypatch):
    timed(monkeypatch, flash=[5.0, 5.0, 5.0], cudnn=[None] * 3)
    assert layers.choose_attention(*ANYTHING) == {"flash": 5.0}
    assert layers.attention_kernel() == "flash"


def test_where_none_was_built_torch_chooses(monkeypatch):
    timed(monkeypatch, flash=[None] * 3, cudnn=[None] * 3)
    assert layers.choose_attention(*ANYTHING) == {}
    assert layers.attention_kernel() == "any"

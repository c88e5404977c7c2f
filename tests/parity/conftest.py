"""Checkpoints in the release's layout, for the tests of reading and writing them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from release_shapes import SHAPES

from adlm.compat.checkpoints import export_release
from adlm.data.tokenizers import load_tokenizer
from adlm.io.export import describe, save_folder
from adlm.models import build_model
from adlm.schema import Config


@pytest.fixture
def exported(tmp_path):
    """A folder of ours with random weights; text8's 35 characters need no files."""

    def make(kind: str, objective=None, noise=None, **changes) -> Path:
        """`objective`, `noise`: settings of these sections that are not as in SHAPES; `changes`: of the model's."""
        sections = zip(SHAPES[kind], (changes, objective or {}, noise or {}))
        model_cfg, objective, noise = (replace(section, **other) for section, other in sections)
        tokenizer = load_tokenizer("text8")
        torch.manual_seed(0)
        model = build_model(model_cfg, tokenizer.vocab_size, tokenizer.mask_id)
        weights = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
        cfg = Config(algo=kind.removesuffix("-time"), model=model_cfg, objective=objective, noise=noise)
        folder = tmp_path / f"{kind}-folder"
        save_folder(folder, weights, tokenizer, describe(cfg, tokenizer, step=7))
        return folder

    return make


@pytest.fixture
def good(exported, tmp_path) -> Path:
    """A checkpoint in the release's layout."""
    return export_release(exported("adlm"), tmp_path / "good.ckpt")

"""Shared by all tests: where real data may lie, and one thread per worker (the suite runs in parallel)."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# The same examples in every run: what is tested does not depend on luck. To look for more: HYPOTHESIS_PROFILE=default
settings.register_profile("repeatable", derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SHARED = Path(__file__).parents[1].parent / "shared"
RELEASE = Path(__file__).parent / "parity" / "fixtures" / "release.tar.xz"


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config, items):
    """Slow and GPU tests are skipped, not deselected: the summary then lists what was not run."""
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; `make test-slow` runs it"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real assets beside the checkout, where there is one."""
    if not SHARED.is_dir():
        pytest.skip("no folder of shared assets beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def parity(tmp_path_factory) -> Path:
    """Numbers and checkpoints of the public release (parity/fixtures/README.md), unpacked."""
    folder = tmp_path_factory.mktemp("parity")
    shutil.unpack_archive(RELEASE, folder)
    return folder


@pytest.fixture(scope="session")
def assets(shared: Path) -> Path:
    """Published vocabulary files (tokenizers/) and slices of public data sets (data/)."""
    if not (shared / "assets").is_dir():
        pytest.skip("no vocabularies and data sets beside this checkout")
    return shared / "assets"

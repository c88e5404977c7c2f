"""Marks of single parameters."""

import pytest


def slow(*values: object):
    """One case of a parametrised test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)

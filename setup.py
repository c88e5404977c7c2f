"""The page of the package index: README.md without pictures and links into the repository, dead there.

Everything else about the package stands in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup


def page(text: str) -> str:
    """Drop pictures; keep the words of links whose target is a file of the repository."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https://)[^)]*\)", r"\1", text)


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=page(readme), long_description_content_type="text/markdown")

"""The embedded corpus: English documentation that ships inside every CPython.

Documents are the language-reference topics of `pydoc_data` and, for each module of the standard library, its
docstrings in source order under their signatures. Sources are parsed, never imported, so nothing runs. The text
depends on the Python version, which is why the version is part of the identity.
"""

import ast
import functools
import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Raise it when the same Python would give other documents.
VERSION = 1
# Not documentation of the library: tests, vendored packages, GUI programs, and what distributions add.
SKIPPED = {
    "__pycache__", "_bundled", "_vendor", "dist-packages", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
# Characters; drops a hundred codec modules that all say the same sentence.
SHORTEST = 200

Function = ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_files() -> list[Path]:
    """The library's source files, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [(Path(folder) / name).relative_to(root) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.as_posix())


def identity() -> dict[str, str]:
    """What this Python's corpus is, without reading it: the version, and a digest of the names and sizes."""
    root = Path(sysconfig.get_path("stdlib"))
    listing = "".join(f"{p.as_posix()} {(root / p).stat().st_size}\n" for p in stdlib_files())
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return {"python": platform.python_version(), "files": digest, "version": str(VERSION)}


@functools.cache
def documents() -> tuple[str, ...]:
    """All documents, in an order that is fixed but unrelated to their names, so that the held-out end is typical."""
    named = {f"topic:{name}": text for name, text in _topics()} | {f"module:{name}": text for name, text in _modules()}
    names = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    return tuple(named[name] for name in names if len(named[name]) >= SHORTEST)


def _topics() -> Iterator[tuple[str, str]]:
    # pydoc_data holds one dictionary literal and runs nothing.
    from pydoc_data.topics import topics

    for name, text in topics.items():
        # The literal keeps reStructuredText's reference targets and escapes; the reader wants prose.
        text = re.sub(r"^\.\. _[^\n]*:\n", "", text, flags=re.MULTILINE)
        yield name, text.replace("\\*", "*").strip() + "\n"


def _modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in stdlib_files():
        try:
            tree = ast.parse((root / path).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # deliberately broken fixtures exist in some distributions
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        parts = list(_docstrings(tree, name))
        if parts:
            yield name, "\n\n\n".join(parts) + "\n"


def _docstrings(node: ast.Module | ast.ClassDef | Function, name: str) -> Iterator[str]:
    """Signature and docstring of the module, its public classes and functions, and their public members."""
    text = ast.get_docstring(node, clean=False)
    if text and text.strip():
        yield f"{_heading(node, name)}\n\n{inspect.cleandoc(text)}"
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield from _docstrings(child, child.name)


def _heading(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    if isinstance(node, Function):
        return f"{name}({ast.unparse(node.args)})"
    return f"module {name}"

"""The corpora of `tables.CORPORA`: where each comes from, how it is split, read, detokenized and packed.

A corpus is read from local files in its published format (`data.path`, or found by name under `data.root`), else from
the hub. Revisions name the hub's own parquet conversion where the original is a loading script, which current
`datasets` refuses to run. Neither numpy nor torch is imported here: the command line reads this table.

The end of the module reads one more corpus: the documentation inside every CPython.
"""

import ast
import fnmatch
import functools
import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adlm.data.formats import plain_name
from adlm.errors import require
from adlm.io.paths import path_of
from adlm.schema import DataConfig
from adlm.tables import CORPORA

PARQUET = "refs/convert/parquet"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """One corpus of the table; your own package can add one by an entry point of the group adlm.corpora."""

    about: str
    hub: str = ""
    """Name on the hub; empty: local files only."""
    config: str = ""
    revision: str = ""
    splits: dict[str, str] = field(default_factory=dict)
    """Our split -> the hub's split, in its slicing notation."""
    text_key: str = "text"
    form: str = "auto"
    """Format of the published local files: a name of tables.FORMATS, or text8."""
    files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Our split (or `any`: not split) -> names of the published files, best first; * and / work as in a shell."""
    module: str = ""
    """Module whose documents() are the text, for a corpus without files; its identity() says what they depend on."""
    needs_path: bool = False
    """Whether data.path is required."""
    detokenizer: str = "none"
    """A name of tables.DETOKENIZERS."""
    tokenizer: str = "gpt2"
    packing: str = "stream"
    """data.packing with which results are usually reported."""
    length: int = 1024
    """Sequence length with which results are usually reported."""
    valid_documents: int = 0
    """Documents held out from the end when the files are not split (0: data.valid_fraction)."""
    valid_fraction: float = 0.0
    """Overrides data.valid_fraction."""
    only: str = ""
    """Use this split for every split (evaluation sets, and the two parts of OpenWebText that have names)."""
    any_size: bool = False
    """Whether it may be small: where a whole document would be too much to hold out, only the end of the last one is;
    and a validation split shorter than one sequence becomes one padded sequence."""
    crop: bool = False
    """Whether training sequences are stored twice as long and a random window is taken when they are read."""


def _wikitext(name: str) -> dict[str, tuple[str, ...]]:
    # Both sizes share validation and test, so a bare wiki.valid.raw can be used for either; their train splits differ.
    def names(split: str, hub_split: str) -> tuple[str, ...]:
        bare = () if split == "train" else (f"wiki.{split}.raw",)
        return (
            f"{name}*/wiki.{split}.raw",
            *bare,
            f"{name}*/{hub_split}-*.parquet",
            f"{name}/wiki.{split}.tokens",
            f"{name}.{split}.tokens",
        )

    return {"train": names("train", "train"), "valid": names("valid", "validation"), "test": names("test", "test")}


_THREE = {"train": "train", "valid": "validation", "test": "test"}
OPENWEBTEXT = Corpus(
    "OpenWebText; the last 100,000 documents are the validation split",
    hub="Skylion007/openwebtext",
    revision=PARQUET,
    splits={"train": "train[:-100000]", "valid": "train[-100000:]"},
    files={"any": ("openwebtext*.jsonl", "openwebtext*.parquet", "openwebtext/*.parquet")},
    valid_documents=100_000,
)
LM1B = Corpus(
    "One Billion Words, one sentence a sequence, lower-cased WordPiece",
    hub="dvruette/lm1b",
    splits={"train": "train", "valid": "test", "test": "test"},
    form="lines",
    files={
        "train": ("1b_benchmark.train.tokens", "news.en-0*", "lm1b/train-*.parquet"),
        "valid": ("1b_benchmark.test.tokens", "news.en.heldout-*", "lm1b/test-*.parquet"),
        "test": ("1b_benchmark.test.tokens", "news.en.heldout-*", "lm1b/test-*.parquet"),
    },
    detokenizer="lm1b",
    tokenizer="bert-base-uncased",
    packing="documents",
    length=128,
)
TEXT8 = Corpus(
    "text8: 100 million characters of Wikipedia, cut 90/5/5; sequences of 256",
    hub="afmck/text8",
    splits={"train": "train", "valid": "train", "test": "train"},
    form="text8",
    files={"any": ("text8", "text8.txt")},
    tokenizer="text8",
    length=256,
)
_PAPERS = Corpus(
    "",
    hub="armanc/scientific_papers",
    revision=PARQUET,
    splits=_THREE,
    text_key="article",
    form="scientific_papers",
    detokenizer="scientific_papers",
)

PYDOCS = Corpus(
    "English documentation inside every CPython; nothing to download",
    module="adlm.data.corpora",
    tokenizer="bpe-4096",
    valid_fraction=0.05,
)
FILE = Corpus(
    "your own text, jsonl, csv or parquet file or folder: data.path=, data.text_key=",
    needs_path=True,
    tokenizer="bpe-8192",
    any_size=True,
)
PREPARED = Corpus("a folder written by `adlm data prepare`: data.path=, data.valid_path=", needs_path=True)
CHECKPOINT = Corpus("the corpus that a checkpoint was trained on (evaluation only)")
OPENWEBTEXT_TRAIN = replace(OPENWEBTEXT, about="OpenWebText without its last 100,000 documents", only="train")
OPENWEBTEXT_VALID = replace(OPENWEBTEXT, about="the last 100,000 documents of OpenWebText", only="valid")
LM1B_GPT2 = replace(
    LM1B, about="One Billion Words packed with GPT-2's tokenizer", tokenizer="gpt2", packing="stream", length=1024
)
WIKITEXT2 = Corpus(
    "WikiText-2, raw",
    "Salesforce/wikitext",
    "wikitext-2-raw-v1",
    splits=_THREE,
    form="wikitext",
    files=_wikitext("wikitext-2"),
    detokenizer="wikitext",
)
WIKITEXT103 = Corpus(
    "WikiText-103, raw",
    "Salesforce/wikitext",
    "wikitext-103-raw-v1",
    splits=_THREE,
    form="wikitext",
    files=_wikitext("wikitext-103"),
    detokenizer="wikitext",
)
PTB = Corpus(
    "Penn Treebank, Mikolov's plain text",
    "ptb-text-only/ptb_text_only",
    "penn_treebank",
    PARQUET,
    _THREE,
    text_key="sentence",
    form="lines",
    detokenizer="ptb",
    files={split: (f"ptb.{split}.txt",) for split in SPLITS},
)
LAMBADA = Corpus(
    "LAMBADA, OpenAI's test file",
    "EleutherAI/lambada_openai",
    "default",
    splits={"test": "test"},
    only="test",
    form="jsonl",
    detokenizer="lambada",
    files={"test": ("lambada_test.jsonl",)},
)
AG_NEWS = Corpus(
    "AG News, title and description",
    "fancyzhx/ag_news",
    form="ag_news",
    splits={"train": "train", "valid": "test", "test": "test"},
    files={"train": ("ag_news*/train.csv",), "valid": ("ag_news*/test.csv",), "test": ("ag_news*/test.csv",)},
)
PUBMED = replace(
    _PAPERS,
    about="scientific_papers: PubMed articles",
    config="pubmed",
    files={
        "train": ("pubmed-dataset/train.txt",),
        "valid": ("pubmed-dataset/val.txt", "scientific_papers_pubmed*.jsonl", "pubmed_sum*.jsonl"),
        "test": ("pubmed-dataset/test.txt",),
    },
)
ARXIV = replace(
    _PAPERS,
    about="scientific_papers: arXiv articles",
    config="arxiv",
    files={
        "train": ("arxiv-dataset/train.txt",),
        "valid": ("arxiv-dataset/val.txt", "scientific_papers_arxiv*.jsonl", "arxiv_*.jsonl"),
        "test": ("arxiv-dataset/test.txt",),
    },
)
TEXT8_CROP = replace(TEXT8, about="text8 with random windows of training sequences", crop=True)
TINYSTORIES = Corpus(
    "TinyStories",
    "roneneldan/TinyStories",
    splits={"train": "train", "valid": "validation"},
    files={
        "train": ("TinyStories*-train.txt",),
        "valid": ("TinyStories*-valid.txt",),
        "any": ("tinystories*.txt", "tinystories*.jsonl"),
    },
)
FINEWEB_EDU = Corpus(
    "FineWeb-Edu, the 10-billion-token sample",
    "HuggingFaceFW/fineweb-edu",
    "sample-10BT",
    splits={"train": "train[:-20000]", "valid": "train[-20000:]"},
    files={"any": ("fineweb-edu*/*.parquet", "fineweb-edu*.jsonl", "fineweb-edu*.parquet")},
    valid_documents=20_000,
)
WIKIPEDIA = Corpus(
    "English Wikipedia",
    "wikimedia/wikipedia",
    "20231101.en",
    splits={"train": "train[:-20000]", "valid": "train[-20000:]"},
    files={"any": ("wikipedia_[A-Z][A-Z].jsonl", "wikipedia*.jsonl", "wikipedia*.parquet")},
)

# Other common names of the same corpora.
ALIASES = {
    "openwebtext-split": "openwebtext",
    "scientific_papers_pubmed": "pubmed",
    "scientific_papers_arxiv": "arxiv",
    "ag-news": "ag_news",
    "penn-treebank": "ptb",
    "wikitext-2": "wikitext2",
    "wikitext-103": "wikitext103",
}


def get_corpus(name: str) -> tuple[str, Corpus]:
    """The table's name and the corpus for a name that a user typed."""
    name = ALIASES.get(name, name)
    return name, CORPORA.load(name, "data.name")


def check(cfg: DataConfig) -> None:
    """Raise a one-line ValueError if settings of a corpus do not fit together."""
    _, corpus = get_corpus(cfg.name)
    require(not corpus.needs_path or cfg.path != "", f"data.name={cfg.name} needs data.path=FILE_OR_FOLDER")


def group(name: str) -> dict[str, dict[str, Any]]:
    """The settings that `data=NAME` stands for. A corpus with an unusual length also sets the model's; one that is not
    published uses its default tokenizer, written as data.tokenizer=''."""
    name, corpus = get_corpus(name)
    settings: dict[str, dict[str, Any]] = {
        "data": {"name": name, "packing": corpus.packing, "tokenizer": corpus.tokenizer if corpus.hub else ""}
    }
    if corpus.length != Corpus.length:
        settings["model"] = {"length": corpus.length}
    return settings


def defaults(name: str, **changes: str | bool | int | float) -> DataConfig:
    """The settings with which a corpus is usually read, with its tokenizer by name."""
    name, corpus = get_corpus(name)
    return replace(DataConfig(name=name, tokenizer=corpus.tokenizer, packing=corpus.packing), **changes)


def find_local(root: str | Path, name: str, split: str = "valid") -> list[Path]:
    """Files of a corpus' split (`any`: not split) anywhere under `root`, by their published names; [] if none."""
    _, corpus = get_corpus(name)
    root = path_of(root)
    require(root.is_dir(), f"data.root={str(root)!r} is not a folder")
    return matching(root, corpus.files.get(split if split == "any" else corpus.only or split, ()))


def matching(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of the first pattern that matches any. A pattern matches the end of a path, without compression
    suffix."""
    found = sorted((p for p in root.rglob("*") if p.is_file()), key=lambda p: p.as_posix()) if patterns else []
    for pattern in patterns:
        if hits := [path for path in found if is_called(path, pattern)]:
            return hits
    return []


def is_called(path: Path, pattern: str) -> bool:
    """Whether the last parts of a path match the pattern, ignoring a compression suffix."""
    parts = pattern.split("/")
    names = [*path.parent.parts, plain_name(path)][-len(parts) :]
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


# ---- the embedded corpus ---------------------------------------------------------------------------------------------
# The English documentation that ships inside every CPython.
#
# Documents are the language-reference topics of `pydoc_data` and, for each module of the standard library, its
# docstrings in source order under their signatures. Sources are parsed, never imported, so nothing is executed. The
# text depends on the Python version, which is therefore part of the identity.

# Increase it when the same Python would give different documents.
VERSION = 1
# Not documentation of the library: tests, vendored packages, GUI programs, and what distributions add.
SKIPPED = {
    "__pycache__", "_bundled", "_vendor", "dist-packages", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
# Minimum characters of a document; drops a hundred codec modules that all have the same sentence.
SHORTEST = 200

Function = ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_files() -> list[Path]:
    """The source files of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [(Path(folder) / name).relative_to(root) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.as_posix())


def identity() -> dict[str, str]:
    """What identifies this Python's corpus without reading it: the version, and a digest of file names and sizes."""
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
        # The literal keeps reStructuredText's reference targets and escapes; remove them to get prose.
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

"""A package that knows nothing of this repository adds names to every table, and YAML groups, by entry points alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from adlm import tables
from adlm.tables import Table

TABLES = {name: table for name, table in vars(tables).items() if isinstance(table, Table)}
CORPUS = """
from adlm.data.corpora import Corpus

TALES = Corpus("tales", module="my_plugin.tales", tokenizer="mine", length=64)

def tokenizer(root=""):
    from adlm.data.tokenizers import raw_bytes
    return raw_bytes()
"""
TALES = """
def documents():
    return [f"Tale {i} is about the number {i}." for i in range(100)]

def identity():
    return "tales 1"
"""
ALGO = """# @package _global_
# adlm with more anchors
defaults:
  - adlm
algo: mine
objective:
  tau: 7
"""


@pytest.fixture
def plugin(tmp_path):
    """A folder for PYTHONPATH that holds the package as if it were installed."""
    package, facts = tmp_path / "my_plugin", tmp_path / "my_plugin-1.0.dist-info"
    (package / "configs" / "algo").mkdir(parents=True)
    (package / "configs" / "recipe").mkdir()
    facts.mkdir()
    (package / "__init__.py").touch()
    (package / "corpus.py").write_text(CORPUS)
    (package / "tales.py").write_text(TALES)
    (package / "configs" / "algo" / "mine.yaml").write_text(ALGO)
    (package / "configs" / "recipe" / "mine.yaml").write_text("# @package _global_\n# Mine\noptim:\n  lr: 0.125\n")
    points = {f"adlm.{table.group}": "mine = my_plugin.missing:Thing" for table in TABLES.values()}
    points |= {
        "adlm.corpora": "tales = my_plugin.corpus:TALES\nbroken = my_plugin.corpus:NOTHING\npydocs = my_plugin.x:y",
        "adlm.tokenizers": "mine = my_plugin.corpus:tokenizer",
        "adlm.configs": "mine = my_plugin",
    }
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}\n" for group, lines in points.items()))
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + "\n".join(command)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


def adlm(folder: Path, *argv: str) -> subprocess.CompletedProcess:
    return run(folder, "from adlm.cli import main", f"sys.exit(main({list(argv)!r}))")


def test_every_table_has_the_name(plugin):
    code = [f"from adlm.tables import {', '.join(TABLES)}"]
    code += [f"assert list({name})[-1] in ('mine', 'broken'), list({name})" for name in TABLES]
    done = run(plugin, *code, "assert 'torch' not in sys.modules and 'my_plugin' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_groups_and_a_corpus(plugin):
    done = adlm(plugin, "config", "algo=mine", "recipe=mine", "data=tales")
    assert done.returncode == 0, done.stderr
    for line in ('algo: "mine"', "tau: 7", "lr: 0.125", 'name: "tales"', "length: 64"):
        assert line in done.stdout
    listed = adlm(plugin, "config", "algo=list", "data.name=list")
    assert "adlm with more anchors" in listed.stdout and "tales" in listed.stdout.split()
    prepared = adlm(plugin, "data", "prepare", "train", "data=tales", "model.length=32", "data.cache_dir=cache")
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout.startswith("train: ")


def test_what_cannot_be_loaded_is_one_line_that_names_the_entry_point(plugin):
    done = adlm(plugin, "config", "data=broken")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert (
        "the entry point broken = 'my_plugin.corpus:NOTHING' of the group adlm.corpora cannot be loaded" in done.stderr
    )
    done = adlm(plugin, "config", "data=tale")
    assert "did you mean 'tales'?" in done.stderr
    (plugin / "my_plugin" / "configs").rename(plugin / "elsewhere")
    done = adlm(plugin, "config")
    assert "entry point mine = 'my_plugin' of the group adlm.configs names no package with a folder" in done.stderr
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_ours_cannot_be_replaced(plugin):
    assert adlm(plugin, "config", "data=pydocs").returncode == 0

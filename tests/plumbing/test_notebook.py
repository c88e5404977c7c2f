"""The notebook runs from top to bottom."""

import runpy
from pathlib import Path

from exports import export

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "inference.py"


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ADLM_MODEL", str(export(tmp_path / "export", length=48)))
    names = runpy.run_path(str(NOTEBOOK))
    assert len(names["filled"]) == 3
    out = capsys.readouterr().out
    assert "nats per token" in out
    assert "anchors:" in out


def test_it_is_a_percent_notebook():
    """Cells as jupytext and editors read them."""
    text = NOTEBOOK.read_text()
    assert text.count("# %% [markdown]") >= 7
    assert "format_name: percent" in text

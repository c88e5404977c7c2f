"""adlm zeroshot: every set from local files, short ones too; what cannot be read is said and stops nothing."""

import json
from pathlib import Path

import pytest
import torch
from exports import export
from runs import run_config

from adlm import cli
from adlm.data.corpora import defaults
from adlm.data.tokenizers import load_tokenizer
from adlm.evaluation.perplexity import PAPER, SETS, comparable, prepare_fitting, published
from adlm.io.export import Loaded
from adlm.io.load import load_checkpoint
from adlm.models import build_model
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig
from adlm.tables import CORPORA
from adlm.training.loop import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zeroshot")
    train(run_config(folder, train__steps=2, train__valid_every=0))
    return folder


def write_sets(root: Path) -> Path:
    """Three of the sets in their published formats; PTB is shorter than one row."""
    root.mkdir()
    (root / "ptb.valid.txt").write_text(" the cat sat \n")
    (root / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": f"story number {i}"}) + "\n" for i in range(40))
    )
    (root / "ag_news").mkdir()
    (root / "ag_news" / "test.csv").write_text("".join(f'"{1 + i % 4}","title {i}","words {i}"\n' for i in range(40)))
    return root


def run(folder: Path, root: Path, *more: str) -> int:
    keys = [f"data.root={root}", f"data.cache_dir={folder / 'cache'}", f"out={folder / 'zeroshot.json'}"]
    return cli.main(["zeroshot", str(folder / "run"), *more, *keys])


def test_sets_from_local_files_and_one_that_is_missing(trained, tmp_path, capsys, monkeypatch):
    def no_hub(*_):
        raise ValueError("no network here")

    monkeypatch.setattr("adlm.data.remote.documents", no_hub)
    root = write_sets(tmp_path / "root")
    assert run(trained, root, "ptb", "lambada", "ag_news", "arxiv", "eval.draws=2") == 0
    said = capsys.readouterr()
    result = json.loads((trained / "zeroshot.json").read_text())
    sets = result["sets"]
    assert list(sets) == ["ptb", "lambada", "ag_news", "arxiv"]
    assert "no network" in sets["arxiv"]["error"] and "arxiv: no network" in said.err
    assert sets["lambada"]["data"]["row_length"] == 32 and sets["lambada"]["continuous"]["rows"] > 5
    # the short set is one row of all its bytes, begin, end of the document and end
    assert sets["ptb"]["data"]["row_length"] == len("the cat sat") + 3 and sets["ptb"]["continuous"]["rows"] == 1
    assert sets["ptb"]["continuous"]["perplexity_interval"] is None
    assert not result["comparable_with_the_paper"] and "paper" not in said.out
    for name in ("ptb", "lambada", "ag_news"):
        assert f"{sets[name]['continuous']['perplexity']:,.2f}" in said.out
        assert sets[name]["data"]["fingerprint"] and sets[name]["paper_perplexity"] is None


def test_nothing_readable_is_an_error(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.data.remote.documents", lambda *_: iter(()))
    (tmp_path / "empty").mkdir()
    assert run(trained, tmp_path / "empty", "ptb") == 1
    assert "no set could be read" in capsys.readouterr().err
    assert run(trained, tmp_path / "empty", "ptbb") == 1
    assert "did you mean 'ptb'" in capsys.readouterr().err


def test_a_long_set_keeps_its_own_error(tmp_path):
    """Only a set that is too short is fitted; any other problem is reported as it is."""
    (tmp_path / "ptb.valid.txt").write_bytes(b"\xff\xfe broken \xff")
    data = defaults("ptb", root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="UTF-8"):
        prepare_fitting(data, load_tokenizer("bytes"), 32)


def test_all_sets_from_the_published_files(trained, assets, tmp_path, capsys):
    keys = ["data.max_sequences=6", f"out={tmp_path / 'all.json'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert cli.main(["zeroshot", str(trained / "run"), f"data.root={assets / 'data'}", *keys]) == 0
    sets = json.loads((tmp_path / "all.json").read_text())["sets"]
    assert list(sets) == SETS
    assert all(entry["continuous"]["rows"] == 6 for entry in sets.values())
    assert sets["wikitext2"]["continuous"] == sets["wikitext103"]["continuous"]  # the same validation text
    assert {entry["data"]["detokenizer"] for entry in sets.values()} >= {"lambada", "ptb", "wikitext", "lm1b"}


def of_config(**changes) -> Loaded:
    cfg = ModelConfig(**changes)
    with torch.device("meta"):
        model = build_model(cfg, 50258, 50257)
    return Loaded(model, None, NoiseConfig(), ObjectiveConfig(), {})  # type: ignore[arg-type]


def test_the_papers_values_stand_beside_a_model_like_its_own_only():
    assert comparable(of_config())
    for change in ({"length": 512}, {"n_blocks": 6}, {"anchored": False}, {"causal": True}):
        assert not comparable(of_config(**change)), change


def test_paper_column_is_printed_for_a_comparable_model(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.evaluation.perplexity.comparable", lambda loaded: True)
    assert run(trained, write_sets(tmp_path / "root"), "lambada") == 0
    assert "44.32" in capsys.readouterr().out
    assert json.loads((trained / "zeroshot.json").read_text())["sets"]["lambada"]["paper_perplexity"] == 44.32


def test_weights_are_those_of_the_run(trained):
    assert load_checkpoint(trained / "run").info["step"] == 2


def test_published_values_belong_to_a_model_by_name_or_kind(tmp_path):
    tiny = load_checkpoint(export(tmp_path))
    mdlm = PAPER["kuleshov-group/mdlm-owt"]
    for name in (
        "kuleshov-group/mdlm-owt",
        "kuleshov-group/mdlm-owt@main",
        "/x/models--kuleshov-group--mdlm-owt/",
        "y/mdlm-owt",
    ):
        assert published(name, tiny) is mdlm, name
    for name in ("runs/mine", "kuleshov-group/mdlm-owt-2", "", "adlm"):
        assert published(name, tiny) is None, name
    assert published("runs/mine", of_config()) is PAPER["adlm"]
    assert all(corpus in CORPORA for found in PAPER.values() for corpus in found.perplexities)


def test_ppl_prints_the_published_value_beside_its_own(tmp_path, capsys):
    folder = export(tmp_path / "mdlm-owt")
    (tmp_path / "ptb.valid.txt").write_text("the cat sat on the mat and the dog ran\n" * 30)
    line = [
        "ppl",
        str(folder),
        "data=ptb",
        f"data.path={tmp_path / 'ptb.valid.txt'}",
        f"data.cache_dir={tmp_path / 'c'}",
    ]
    assert cli.main([*line, "train.device=cpu", "--json"]) == 0
    said = capsys.readouterr().out
    assert "published: perplexity 95.26 (arXiv 2505.18456, MDLM" in said
    assert json.loads(said.splitlines()[-1])["published"]["perplexity"] == 95.26

"""The table of corpora, and which documents a split turns out to be."""

import itertools
import json
from dataclasses import replace

import pytest

from adlm.data import corpora, remote
from adlm.data.corpora import ALIASES, defaults, find_local, get_corpus
from adlm.data.sources import resolve
from adlm.schema import DataConfig
from adlm.tables import CORPORA, DETOKENIZERS, FORMATS

ALL = {name: CORPORA.load(name) for name in CORPORA}


def jsonl(path, n, word="document"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{word} {i}"}) + "\n" for i in range(n)))
    return path


def texts(cfg, split, length=16):
    return list(resolve(cfg, split).documents(length))


def test_table_is_consistent():
    for name, corpus in ALL.items():
        assert corpus.detokenizer in DETOKENIZERS, name
        assert corpus.form in {*FORMATS, "text8"}, name
        assert set(corpus.files) <= {"train", "valid", "test", "any"}, name
        assert corpus.about, name
        assert bool(corpus.hub) == (name not in ("pydocs", "file", "prepared", "checkpoint")), name
        assert not corpus.hub or corpus.splits, name
    assert set(ALIASES.values()) <= set(CORPORA)
    assert not set(ALIASES) & set(CORPORA)


def test_published_settings():
    """What perplexities are reported with."""
    assert (ALL["lm1b"].packing, ALL["lm1b"].length, ALL["lm1b"].tokenizer) == (
        "documents",
        128,
        "bert-base-uncased",
    )
    assert (ALL["lm1b-gpt2"].packing, ALL["lm1b-gpt2"].tokenizer) == ("stream", "gpt2")
    assert ALL["ptb"].text_key == "sentence"
    assert ALL["pubmed"].text_key == ALL["arxiv"].text_key == "article"
    assert {n for n, c in ALL.items() if c.splits.get("valid") == "test"} == {"lm1b", "lm1b-gpt2", "ag_news"}
    assert ALL["openwebtext"].splits == {"train": "train[:-100000]", "valid": "train[-100000:]"}
    assert get_corpus("openwebtext-split")[0] == "openwebtext"
    assert get_corpus("scientific_papers_arxiv")[0] == "arxiv"
    assert defaults("lm1b", root="x") == DataConfig(
        name="lm1b", tokenizer="bert-base-uncased", packing="documents", root="x"
    )


def test_unknown_corpus_names_the_nearest():
    with pytest.raises(ValueError, match=r"data.name='wikitext-13' is unknown \(did you mean 'wikitext"):
        resolve(DataConfig(name="wikitext-13"), "train")


def test_holding_out_the_end(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", 10)
    cfg = DataConfig(name="file", path=str(path), valid_fraction=0.2)
    assert texts(cfg, "train") == [f"document {i}" for i in range(8)]
    assert texts(cfg, "valid") == ["document 8", "document 9"]
    cfg.valid_fraction = 0.01
    assert texts(cfg, "valid") == ["document 9"], "at least one"
    cfg.valid_fraction = 0
    assert len(texts(cfg, "train")) == 10
    assert texts(cfg, "valid") == []


def test_valid_path_makes_both_whole(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", 4), jsonl(tmp_path / "b.jsonl", 2, "other")
    cfg = DataConfig(name="file", path=str(a), valid_path=str(b))
    assert len(texts(cfg, "train")) == 4
    assert texts(cfg, "valid") == ["other 0", "other 1"]


def test_validation_on_another_corpus(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", 4)
    (tmp_path / "root" / "ptb").mkdir(parents=True)
    (tmp_path / "root" / "ptb" / "ptb.valid.txt").write_text(" it 's N \n")
    cfg = DataConfig(name="file", path=str(a), valid_name="ptb", root=str(tmp_path / "root"))
    assert len(texts(cfg, "train")) == 4
    assert texts(cfg, "valid") == ["it's N"]


def test_folder_with_published_names(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text(f"{split} <unk>\n")
    cfg = DataConfig(name="ptb", path=str(tmp_path))
    assert [texts(cfg, split) for split in ("train", "valid", "test")] == [["train ?"], ["valid ?"], ["test ?"]]
    alone = DataConfig(name="ptb", path=str(tmp_path / "ptb.valid.txt"))
    assert texts(alone, "valid") == ["valid ?"], "a file that is named as the split is the split"


def test_openwebtext_split_of_local_files(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "openwebtext.jsonl", 10)
    small = DataConfig(name="openwebtext", path=str(path), valid_fraction=0.1)
    assert texts(small, "valid") == ["document 9"], "a slice shorter than the official split is cut by fraction"
    monkeypatch.setattr(corpora, "OPENWEBTEXT", replace(corpora.OPENWEBTEXT, valid_documents=3))
    assert texts(small, "train") == [f"document {i}" for i in range(7)]
    assert texts(small, "valid") == [f"document {i}" for i in range(7, 10)]


def test_halves_of_openwebtext_by_name(tmp_path):
    root = tmp_path
    jsonl(root / "openwebtext_10.jsonl", 10)
    for split in ("train", "valid"):
        assert texts(DataConfig(name="openwebtext-train", root=str(root)), split) == [f"document {i}" for i in range(9)]
        assert texts(DataConfig(name="openwebtext-valid", root=str(root)), split) == ["document 9"]


def test_lambada_is_whole_whatever_the_split(tmp_path):
    path = tmp_path / "lambada_test.jsonl"
    path.write_text('{"text": "“a”"}\n{"text": "b"}\n')
    for split in ("train", "valid", "test"):
        assert texts(DataConfig(name="lambada", path=str(path)), split) == ['\n"a"', "\nb"]
        assert texts(DataConfig(name="lambada", root=str(tmp_path)), split) == ['\n"a"', "\nb"]


def test_text8_is_cut_by_characters(tmp_path):
    path = tmp_path / "text8"
    path.write_text("".join("abcdefghij"[i % 10] for i in range(1000)))
    cfg = DataConfig(name="text8", path=str(path))
    assert [len(d) for d in texts(cfg, "train", 16)] == [16] * (900 // 16)
    assert "".join(texts(cfg, "train", 16)) == path.read_text()[: 900 // 16 * 16]
    assert "".join(texts(cfg, "valid", 10)) == path.read_text()[950:]
    crop = resolve(DataConfig(name="text8-crop", root=str(tmp_path)), "train")
    assert crop.stored_length(16) == 32
    assert resolve(DataConfig(name="text8-crop", root=str(tmp_path)), "valid").stored_length(16) == 16


def test_bad_combinations(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", 4)
    for cfg, split, message in [
        (DataConfig(name="file"), "train", "data.name=file needs data.path"),
        (DataConfig(name="checkpoint"), "valid", "is for evaluating a checkpoint"),
        (DataConfig(name="ptb", valid_path=str(a)), "train", "data.valid_path is given without data.path"),
        (DataConfig(name="file", path=str(tmp_path / "no")), "train", "does not exist"),
        (DataConfig(name="ptb", root=str(a)), "valid", "is not a folder"),
        (DataConfig(name="tinystories"), "test", "has no test split"),
        (DataConfig(), "validation", "split='validation' is unknown"),
    ]:
        with pytest.raises(ValueError) as error:
            resolve(cfg, split)
        assert message in str(error.value)


def test_hub_is_asked_for_the_right_split(monkeypatch):
    asked = []
    monkeypatch.setattr(remote, "documents", lambda *a: asked.append(a) or iter(["x"]))
    assert texts(DataConfig(name="openwebtext"), "valid") == ["x"]
    assert texts(DataConfig(name="lm1b"), "valid") == ["x"]
    assert texts(DataConfig(name="ptb"), "train") == ["x"]
    assert [(a[0], a[1], a[3], a[4]) for a in asked] == [
        ("Skylion007/openwebtext", "", "train[-100000:]", "text"),
        ("dvruette/lm1b", "", "test", "text"),
        ("ptb-text-only/ptb_text_only", "penn_treebank", "train", "sentence"),
    ]


def test_nothing_is_held_out_when_validation_is_elsewhere(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(remote, "documents", lambda *a: asked.append(a[3]) or iter(["x"]))
    texts(DataConfig(name="openwebtext", valid_name="wikitext103"), "train")
    texts(DataConfig(name="openwebtext", valid_name="openwebtext"), "train")
    texts(DataConfig(name="openwebtext-train", valid_name="wikitext103"), "train")
    assert asked == ["train", "train[:-100000]", "train[:-100000]"]
    jsonl(tmp_path / "openwebtext_10.jsonl", 10)
    assert len(texts(DataConfig(name="openwebtext", root=str(tmp_path), valid_name="ptb"), "train")) == 10
    assert len(texts(DataConfig(name="openwebtext", root=str(tmp_path)), "train")) == 9


def test_a_group_of_the_command_line_is_a_corpus():
    from adlm import config

    plain = config.load([])
    for name, corpus in ALL.items():
        cfg = config.load([f"data={name}", "data.path=x"])
        assert (cfg.data.name, cfg.data.packing) == (name, corpus.packing)
        assert cfg.data.tokenizer == (corpus.tokenizer if corpus.hub else "")
        assert cfg.model.length == (plain.model.length if corpus.length == 1024 else corpus.length)


def test_hub_documents_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)
    assert list(remote.documents("x/y", "", "", "train", "text", "")) == ["a", "b"]
    with pytest.raises(ValueError, match="has no column 'body'; it has text, n"):
        list(remote.documents("x/y", "", "", "train", "body", ""))

    def offline(*a, **k):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(
        ValueError, match=r"data set 'x/y' cannot be fetched from the hub \(ConnectionError: no route\); give"
    ):
        list(remote.documents("x/y", "", "", "train", "text", "give files"))


def test_pydocs():
    found = corpora.documents()
    text = "".join(found)
    assert len(found) > 200
    assert len(text) > 1_000_000
    assert any("module argparse" in document for document in found)
    assert any('The "if" statement' in document for document in found), "language reference topics"
    again = {text for _, text in itertools.islice(corpora._modules(), 40)}
    assert {text for text in again if len(text) >= corpora.SHORTEST} <= set(found), "same Python, same documents"
    assert not any(part in corpora.SKIPPED for path in corpora.stdlib_files() for part in path.parts)
    train, valid = texts(DataConfig(), "train"), texts(DataConfig(), "valid")
    assert tuple(train + valid) == found
    assert 0.04 < len(valid) / len(found) < 0.06


def test_find_local_real_files(assets):
    def names(corpus, split):
        return [path.relative_to(assets / "data").as_posix() for path in find_local(assets / "data", corpus, split)]

    assert names("ptb", "train") == ["ptb/ptb.train.txt.xz"]
    assert names("wikitext103", "valid") == names("wikitext2", "valid") == ["wikitext/wiki.valid.raw"]
    assert names("wikitext2", "train") == []
    assert names("lm1b", "valid") == ["lm1b/1b_benchmark.test.tokens"]
    assert names("ag_news", "valid") == ["ag_news/test.csv"]
    assert names("lambada", "valid") == ["lambada/lambada_test.jsonl"]
    assert names("openwebtext", "any") == ["openwebtext_1000.jsonl.xz"]


@pytest.mark.parametrize(
    ("name", "documents", "first"),
    [
        ("ptb", 3370, "consumers may want to move their telephones a little closer to the tv set"),
        ("wikitext103", 3760, ""),
        ("lm1b", 12105, "BAGHDAD -- An Iraqi military commander on Monday compared"),
        ("lambada", 5153, "\nIn my palm is a clear stone"),
        ("ag_news", 7600, "Fears for T N pension after talks Unions representing workers at Turner   Newall say"),
        ("pubmed", 200, "BACKGROUND\nthe ability to produce"),
        ("arxiv", 49, ""),
    ],
)  # fmt: skip
def test_real_files(assets, name, documents, first):
    found = texts(DataConfig(name=name, root=str(assets / "data")), "valid")
    assert len(found) == documents
    assert found[0].startswith(first)
    assert any(found)
    if name == "lm1b":
        assert 'restrictions on the U.S. military to "house arrest," saying American' in found[0]

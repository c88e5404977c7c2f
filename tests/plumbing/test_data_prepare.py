"""Prepared rows: what is in them, when they are reused, and what is answered to bad input."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus, refusal, texts

from adlm.data import packing, tokenizers
from adlm.data import preparation as module
from adlm.data.blocks import Blocks
from adlm.data.corpora import defaults
from adlm.data.preparation import prepare, run_data, tokenizer_for
from adlm.data.tokenizers import load_tokenizer, raw_bytes, text8_characters, train_bpe, word_piece
from adlm.schema import Config, DataConfig

BYTES = raw_bytes()


@pytest.fixture
def cfg(tmp_path) -> DataConfig:
    path = corpus(tmp_path / "a.jsonl")
    return DataConfig(name="file", path=str(path), valid_fraction=0.1, cache_dir=str(tmp_path / "cache"))


def test_rows_are_the_documents(cfg):
    train = prepare(cfg, BYTES, 32, "train")
    ids = [i for text in texts(cfg)[:36] for i in [*text.encode(), BYTES.eos_id]]
    expected = [[256, *ids[at : at + 30], 257] for at in range(0, len(ids) - 29, 30)]
    assert [train[i].tolist() for i in range(len(train))] == expected
    assert train.rows(np.array([2, 0])).tolist() == [expected[2], expected[0]]
    assert train.rows(np.array([0])).dtype == np.int64
    assert train.tokens.dtype == np.uint16
    assert train.attention_masks(np.array([0])) is None
    m = train.manifest
    assert (m["documents"], m["tokens"], m["rows"], m["length"]) == (36, len(ids) - 36, len(expected), 32)
    assert m["row_tokens"] == 32 * len(expected)
    assert m["tokenizer"]["fingerprint"] == BYTES.fingerprint
    assert m["origin"]["contents"][0][0] == os.path.getsize(cfg.path)
    valid = prepare(cfg, BYTES, 32, "valid")
    assert valid.manifest["documents"] == 4
    assert valid.fingerprint != train.fingerprint


def test_unwrapped_rows_have_masks(cfg):
    rows = prepare(replace(cfg, packing="documents"), BYTES, 24, "train")
    assert len(rows) == 36
    text = texts(cfg)[3].encode()[:22]
    assert rows[3].tolist() == [256, *text, 257]
    short = next(i for i, t in enumerate(texts(cfg)) if len(t.encode()) == 19)
    assert rows[short][21:].tolist() == [BYTES.pad_id] * 3
    assert rows.manifest["row_tokens"] == sum(len(t.encode()[:22]) + 2 for t in texts(cfg)[:36]), "padding is not text"
    masks = rows.attention_masks(np.array([short, 3]))
    assert masks is not None
    assert masks.sum(1).tolist() == [21, 24]


def test_padding_without_a_padding_token_is_eos_and_never_the_mask(cfg, assets):
    gpt2 = load_tokenizer("gpt2", root=assets / "tokenizers")
    rows = prepare(replace(cfg, packing="documents"), gpt2, 32, "train")
    assert rows[0][-1] == gpt2.eos_id
    assert gpt2.mask_id not in rows.tokens


def test_second_time_is_the_cache(cfg, monkeypatch):
    first = prepare(cfg, BYTES, 32, "train")
    monkeypatch.setattr(module, "_build", None)  # calling it would fail
    assert prepare(cfg, BYTES, 32, "train").folder == first.folder


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": train_bpe(["some text to train on"], 270)},
        {"length": 16},
        {"packing": "release"},
        {"packing": "documents"},
        {"valid_fraction": 0.2},
        {"max_sequences": 3},
        {"text_key": "body"},
        {"contents": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_that_changes_the_rows_changes_the_cache(cfg, change):
    first = prepare(cfg, BYTES, 32, "train")
    change = dict(change)
    tokenizer, length = change.pop("tokenizer", BYTES), change.pop("length", 32)
    if change.pop("contents", False):
        Path(cfg.path).write_text(Path(cfg.path).read_text().replace("Document", "document"))
    if "text_key" in change:
        Path(cfg.path).write_text(Path(cfg.path).read_text().replace('"text"', '"text": "x", "body"'))
    second = prepare(replace(cfg, **change), tokenizer, length, "train")
    assert second.folder != first.folder
    assert second.fingerprint != first.fingerprint


def test_a_renamed_file_is_the_same_corpus(cfg, tmp_path):
    first = prepare(cfg, BYTES, 32, "train")
    moved = Path(cfg.path).rename(tmp_path / "b.jsonl")
    assert prepare(replace(cfg, path=str(moved)), BYTES, 32, "train").folder == first.folder


def test_batches_and_threads_do_not_show(cfg, monkeypatch, tmp_path):
    whole = prepare(cfg, BYTES, 32, "train")
    monkeypatch.setattr(packing, "SHARD_CHARACTERS", 50)
    for how in ("stream", "release"):
        a = prepare(replace(cfg, cache_dir=str(tmp_path / "other"), packing=how), BYTES, 32, "train")
        assert np.array_equal(a.tokens, whole.tokens), "40 documents are one group of 1000"


def test_max_rows_reads_no_further_than_needed(cfg, monkeypatch):
    monkeypatch.setattr(packing, "SHARD_CHARACTERS", 50)
    whole, part = prepare(cfg, BYTES, 32, "train"), prepare(replace(cfg, max_sequences=3), BYTES, 32, "train")
    assert np.array_equal(part.tokens, whole.tokens[:3])
    assert part.manifest["documents"] < 12


def test_large_vocabularies_use_four_bytes(tmp_path, cfg):
    assert packing.token_dtype(65536) == np.uint16
    assert packing.token_dtype(65537) == np.uint32


# ---- answers to bad input -------------------------------------------------------------------------------------------


def test_too_short_says_what_would_fit(cfg):
    tokens = sum(len(text.encode()) + 1 for text in texts(cfg)[:36])
    message = refusal(cfg, length=4096)
    assert f"has {tokens} tokens in 36 documents" in message
    assert f"one sequence of model.length=4096 needs 4094; model.length={tokens + 2} would fit one" in message
    assert not list(Path(cfg.cache_dir).glob("*.partial")), "nothing is left behind"
    assert len(prepare(cfg, BYTES, tokens + 2, "train")) == 1
    assert "too short for a sequence" in refusal(cfg, length=2)


def test_a_validation_split_shorter_than_a_sequence_is_one_padded_sequence(cfg):
    valid = prepare(cfg, BYTES, 4096, "valid")
    ids = [i for text in texts(cfg)[36:] for i in [*text.encode(), BYTES.eos_id]]
    assert valid[0].tolist() == [256, *ids, 257] + [BYTES.pad_id] * (4094 - len(ids))
    masks = valid.attention_masks(np.array([0]))
    assert len(valid) == 1 and masks is not None and masks.sum() == len(ids) + 2
    assert prepare(cfg, BYTES, 32, "valid").lengths is None, "where a sequence is filled the rest is dropped"


@pytest.mark.parametrize("size", [600, 2_000, 20_000, 40_000, 200_000])
def test_any_text_has_a_validation_split_of_about_its_fraction(cfg, tmp_path, size):
    text = " ".join(f"word{i}" for i in range(size // 8))[:size]
    (tmp_path / "my.txt").write_text(text)
    cfg = replace(cfg, path=str(tmp_path / "my.txt"))
    parts = [list(module.resolve(cfg, split).documents(32)) for split in ("train", "valid")]
    assert " ".join(parts[0] + parts[1]).split() == text.split(), "nothing is lost, no word is cut"
    assert 0.05 < sum(map(len, parts[1])) / size < 0.2
    assert len(prepare(cfg, BYTES, 32, "valid")) >= 1


def test_release_packing_that_drops_everything(cfg, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "ab"}\n' * 3000)
    message = refusal(replace(cfg, path=str(path), packing="release", valid_path=cfg.path), length=4000)
    assert "9000 tokens in 3000 documents, but data.packing=release drops" in message


def test_empty_and_single_documents(cfg, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "empty.txt) holds no documents" in refusal(replace(cfg, path=str(empty)))
    assert "holds no documents; nothing is held out by data.valid_fraction=0.1" in refusal(
        replace(cfg, path=str(empty)), split="valid"
    )


def test_unknown_choices(cfg):
    assert "split='tran' is unknown (did you mean 'train'?)" in refusal(cfg, split="tran")
    assert "did you mean 'openwebtext" in refusal(replace(cfg, name="openwebtxt"))


@pytest.mark.parametrize("key", ["path", "valid_path", "tokenizer", "cache_dir"])
def test_the_home_of_nobody(tmp_path, key):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    given = {
        "name": "file",
        "path": str(tmp_path / "a.txt"),
        "cache_dir": str(tmp_path / "cache"),
        "valid_fraction": 0.5,
    }
    cfg = DataConfig(**(given | {key: "~nobody-here/x"}))
    with pytest.raises(ValueError, match=r"'~nobody-here/x': there is no such user"):
        prepare(cfg, tokenizer_for(cfg), 16, "valid")


# ---- long documents --------------------------------------------------------------------------------------------------

LONG = "Some words, 12 numbers;  two spaces\n\nand  blank lines, é and 漢字 too. " * 40 + "x" * 60 + " end"


@pytest.mark.parametrize("name", ["bytes", "bpe", "word_piece"])
def test_a_long_document_is_tokenised_in_pieces_with_the_same_result(cfg, tmp_path, monkeypatch, name):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "so", "##me"])
    )
    tokenizer = {
        "bytes": lambda: BYTES,
        "bpe": lambda: train_bpe([LONG], 400),
        "word_piece": lambda: word_piece(tmp_path / "vocab.txt"),
    }[name]()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("short", LONG, "end")))
    cfg = replace(cfg, path=str(tmp_path / "a.jsonl"), valid_path=cfg.path)
    whole = prepare(cfg, tokenizer, 32, "train")
    monkeypatch.setattr(tokenizers, "LONGEST_TEXT", 100)
    monkeypatch.setattr(packing, "SHARD_CHARACTERS", 700)
    pieces = prepare(replace(cfg, cache_dir=cfg.cache_dir + "2"), tokenizer, 32, "train")
    assert np.array_equal(whole.tokens, pieces.tokens)
    assert pieces.manifest["documents"] == 3
    parts = list(tokenizers.text_pieces(LONG))
    assert "".join(parts) == LONG and max(map(len, parts)) <= 100 and len(parts) > 20
    assert [*map(len, tokenizers.text_pieces("x" * 250))] == [100, 100, 50], "without a space: anywhere"


def test_bpe_learns_the_same_from_pieces(monkeypatch):
    whole = train_bpe([LONG], 350)
    monkeypatch.setattr(tokenizers, "LONGEST_TEXT", 400)
    assert train_bpe([LONG], 350).fingerprint == whole.fingerprint


@pytest.mark.slow
def test_one_document_of_50_mb_needs_little_memory(tmp_path):
    line = "The quick brown fox jumps over the lazy dog number 1234 of a story that goes on.\n"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": line * 620_000}) + "\n")
    code = (
        "import resource, sys; from adlm import cli; "
        f"cli.main(['data', 'prepare', 'train', 'data=file', 'data.path={tmp_path}/a.jsonl', 'data.tokenizer=bpe-512',"
        f" 'data.cache_dir={tmp_path}/cache']); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 1.5, "GiB"


# ---- tokenizers of a corpus, copies, commands -----------------------------------------------------------------------


def test_bpe_is_trained_on_the_training_split_and_kept(cfg, monkeypatch):
    cfg = replace(cfg, tokenizer="bpe-300")
    first = tokenizer_for(cfg)
    assert first.name == "bpe-300"
    assert first.fingerprint == train_bpe(texts(cfg)[:36], 300).fingerprint
    monkeypatch.setattr(
        module, "load_tokenizer", lambda name, **kw: load_tokenizer(name) if name != "bpe-300" else 1 / 0
    )
    again = tokenizer_for(cfg)
    assert (again.fingerprint, again.name) == (first.fingerprint, "bpe-300")


def test_the_corpus_of_a_checkpoint_is_for_evaluating_one(cfg):
    """Said first, and not that its tokenizer, which nobody asked for, cannot be fetched."""
    with pytest.raises(ValueError, match=r"data\.name=checkpoint is for evaluating a checkpoint"):
        tokenizer_for(replace(cfg, name="checkpoint", tokenizer=""))


def test_default_tokenizer_is_the_corpus_own(cfg):
    assert tokenizer_for(DataConfig(name="text8")).fingerprint == text8_characters().fingerprint
    assert tokenizer_for(replace(cfg, tokenizer="bytes")).fingerprint == BYTES.fingerprint


def test_a_prepared_folder_can_be_copied_and_used_alone(cfg, tmp_path):
    train, valid = (prepare(cfg, BYTES, 32, split) for split in ("train", "valid"))
    folders = {}
    for blocks, name in ((train, "t"), (valid, "v")):
        folders[name] = blocks.folder.rename(tmp_path / name)
    copy = DataConfig(name="prepared", path=str(folders["t"]), valid_path=str(folders["v"]))
    tokenizer = tokenizer_for(copy)
    assert tokenizer.fingerprint == BYTES.fingerprint
    assert np.array_equal(prepare(copy, tokenizer, 32, "train").tokens, train.tokens)
    assert len(prepare(copy, tokenizer, 32, "valid")) == len(valid)
    assert "was prepared with tokenizer 'bytes', not with 'text8'" in refusal(copy, text8_characters())
    assert "has sequences of 32 tokens, but model.length=64" in refusal(copy, length=64)
    other = replace(cfg, valid_name="prepared", valid_path=str(folders["v"]))
    assert len(prepare(other, tokenizer, 32, "valid")) == len(valid), "train on text, validate on a prepared folder"
    assert "holds no manifest.json" in refusal(replace(copy, path=str(tmp_path)))
    assert "needs data.valid_path" in refusal(replace(copy, valid_path=""), split="valid")
    os.truncate(folders["t"] / "rows.bin", 10)
    assert "has 10 bytes" in refusal(copy)


def test_text8_crop_needs_full_rows(tmp_path):
    """Windows are cut from rows without padding: masks of unwrapped rows would be twice as long as the windows."""
    (tmp_path / "text8").write_text("abcdefghi " * 500)
    cfg = DataConfig(name="text8-crop", root=str(tmp_path), cache_dir=str(tmp_path / "cache"), packing="documents")
    with pytest.raises(ValueError, match=r"data\.packing=stream"):
        prepare(cfg, text8_characters(), 16)


def test_text8_crop_stores_rows_of_twice_the_length(tmp_path):
    (tmp_path / "text8").write_text("abcdefghi " * 500)
    cfg = DataConfig(name="text8-crop", root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    train, valid = (prepare(cfg, text8_characters(), 16, split) for split in ("train", "valid"))
    assert (train.length, train.crop) == (32, 16)
    assert (valid.length, valid.crop) == (16, 0)


def test_command_prepares_both_splits(cfg, capsys):
    whole = Config(data=replace(cfg, tokenizer="bytes"))
    whole.model.length = 32
    result = run_data(whole, ["prepare"])
    assert Blocks(result["train"]["folder"]).fingerprint == prepare(cfg, BYTES, 32, "train").fingerprint
    assert json.loads(json.dumps(result)) == result
    assert "sequences of 32" in capsys.readouterr().out
    assert set(run_data(whole, ["prepare", "valid"])) == {"tokenizer", "vocab_size", "valid"}
    with pytest.raises(ValueError, match="did you mean 'prepare'"):
        run_data(whole, ["prepar"])


def test_command_lists_corpora(capsys):
    listed = run_data(Config())
    out = capsys.readouterr().out
    assert all(name in out for name in listed["corpora"])
    assert {"pydocs", "openwebtext", "lm1b", "text8"} <= set(listed["corpora"])


# ---- real files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "length", "tokenizer"),
    [("ptb", 1024, "gpt2"), ("wikitext103", 512, "gpt2"), ("lm1b", 128, "bert-base-uncased")],
)
def test_real_corpora(assets, tmp_path, name, length, tokenizer):
    cfg = defaults(name, root=str(assets / "data"), tokenizer=tokenizer, cache_dir=str(tmp_path))
    tok = tokenizer_for(cfg)
    rows = prepare(cfg, tok, length, "valid")
    assert tok.mask_id not in rows.tokens
    assert (rows.tokens[:, 0] == tok.bos_id).all()
    m = rows.manifest
    if cfg.packing == "stream":
        assert len(rows) == (m["tokens"] + m["documents"]) // (length - 2)
        assert (rows.tokens[:, -1] == tok.eos_id).all()
    else:
        assert len(rows) == m["documents"] == 12105
        assert rows.lengths is not None
        assert (rows.tokens[np.arange(len(rows)), rows.lengths - 1] == tok.eos_id).all()
        assert tok.decode(rows[1], skip_special=True).startswith("too soon to tell but i ' m not going")

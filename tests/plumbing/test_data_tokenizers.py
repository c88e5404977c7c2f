"""Tokenizers: known ids, exact round trips, no special token out of plain text, fingerprints that notice any change."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from adlm.data.tokenizers import (
    MASK,
    Tokenizer,
    load_tokenizer,
    raw_bytes,
    text8_characters,
    train_bpe,
    vocabulary_size,
)

SENTENCES = ["The capital of France is Paris.", "naïve café\n\ttabs, emoji 🙂 and 漢字", "don't  stop", ""]
CORPUS = ["the quick brown fox jumps over the lazy dog\n" * 20, "a quick test of a quick tokenizer " * 30]


@pytest.fixture(scope="module")
def gpt2(assets):
    return load_tokenizer("gpt2", root=assets / "data")


@pytest.fixture(scope="module")
def bert(assets):
    return load_tokenizer("bert-base-uncased", root=assets / "tokenizers")


def test_text8_layout():
    tok = text8_characters()
    assert (tok.vocab_size, tok.mask_id, tok.bos_id, tok.eos_id, tok.pad_id) == (35, 4, 2, 3, 5)
    assert tok.encode("a z") == [8, 34, 33]
    assert tok.decode(tok.encode("the quick fox")) == "the quick fox"
    assert tok.encode("aB\n") == [8, 7, 7], "characters outside the alphabet are [UNK], one each"


def test_bytes_are_their_values():
    tok = raw_bytes()
    assert (tok.vocab_size, tok.mask_id, tok.bos_id, tok.eos_id, tok.pad_id) == (260, 259, 256, 257, 258)
    for text in SENTENCES:
        assert tok.encode(text) == list(text.encode())
        assert tok.decode(tok.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_byte_level_round_trip_of_any_text(text):
    assert raw_bytes().decode(list(text.encode())) == text
    assert BPE.decode(BPE.encode(text)) == text


BPE = train_bpe(CORPUS, 300)


def test_trained_bpe_is_deterministic_across_processes_and_threads(tmp_path):
    code = f"import sys; from adlm.data.tokenizers import train_bpe;print(train_bpe({CORPUS!r}, 300).fingerprint)"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], env={"RAYON_NUM_THREADS": n, "PYTHONHASHSEED": n},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for n in ("1", "2", "3")
    }  # fmt: skip
    assert prints == {BPE.fingerprint}


def test_trained_bpe_ids():
    assert (BPE.bos_id, BPE.eos_id, BPE.pad_id, BPE.mask_id) == (0, 1, 2, 3)
    assert 260 < BPE.vocab_size <= 300
    assert len(BPE.encode("quick quick quick")) < len("quick quick quick")


def test_sizes_are_known_by_name():
    for tok in (raw_bytes(), text8_characters(), BPE):
        assert vocabulary_size(tok.name) == tok.vocab_size
    assert vocabulary_size("") == vocabulary_size("gpt2") == 50258
    with pytest.raises(ValueError, match="its size is not known without reading it"):
        vocabulary_size("my/tokenizer.json")


def test_gpt2_ids(gpt2):
    assert vocabulary_size("gpt2") == gpt2.vocab_size
    assert (gpt2.vocab_size, gpt2.mask_id, gpt2.bos_id, gpt2.eos_id, gpt2.pad_id) == (50258, 50257, 50256, 50256, None)
    assert gpt2.encode("Hello world") == [15496, 995]
    for text in SENTENCES:
        assert gpt2.decode(gpt2.encode(text)) == text


def test_bert_ids(bert):
    assert vocabulary_size("bert-base-uncased") == bert.vocab_size
    assert (bert.vocab_size, bert.mask_id, bert.bos_id, bert.eos_id, bert.pad_id) == (30522, 103, 101, 102, 0)
    assert bert.encode("Hello, world!") == [7592, 1010, 2088, 999]
    assert bert.decode(bert.encode("Hello, wonderful world!")) == "hello, wonderful world!"


def test_agrees_with_transformers(gpt2, bert, assets):
    transformers = pytest.importorskip("transformers")
    folder = assets / "tokenizers"
    text = (assets / "data" / "wikitext" / "wiki.valid.raw").read_text()[:20000]
    theirs = transformers.GPT2TokenizerFast(
        vocab=str(folder / "gpt2-encoder.json"), merges=str(folder / "gpt2-vocab.bpe")
    )  # fmt: skip
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert gpt2.encode(text) == ids
    assert len(ids) > 3000
    theirs = transformers.BertTokenizerFast(vocab=str(folder / "bert-base-uncased-vocab.txt"))
    assert bert.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert [bert.bos_id, *bert.encode("a b"), bert.eos_id] == theirs("a b")["input_ids"]


@pytest.mark.parametrize("make", [text8_characters, raw_bytes, lambda: BPE])
def test_text_never_becomes_a_special_token(make):
    tok = make()
    special = {tok.mask_id, tok.bos_id, tok.eos_id, tok.pad_id}
    assert not special & set(tok.encode("[MASK] [BOS] [EOS] [PAD] [CLS] <|endoftext|>"))
    assert tok.mask_id != tok.pad_id


def test_real_text_never_becomes_a_special_token(gpt2, bert):
    assert gpt2.mask_id not in gpt2.encode("[MASK] [PAD]")
    assert gpt2.eos_id not in gpt2.encode("<|endoftext|>")
    assert not {0, 101, 102, 103} & set(bert.encode("[MASK] [PAD] [CLS] [SEP]"))


def test_special_tokens_show_by_name_or_not_at_all(gpt2):
    ids = [gpt2.bos_id, *gpt2.encode("Hi"), gpt2.mask_id]
    assert gpt2.decode(ids) == "<|endoftext|>Hi[MASK]"
    assert gpt2.decode(ids, skip_special=True) == "Hi"
    assert gpt2.token(gpt2.mask_id) == MASK
    assert {gpt2.mask_id, gpt2.eos_id} <= gpt2.special_ids


def test_release_ends(gpt2, bert):
    assert gpt2.release_ends() == (50256, 50256)
    assert bert.release_ends() == (101, 101), "the release's EOS with BERT is [CLS]"
    assert text8_characters().release_ends() == (2, 3)


@pytest.mark.parametrize("make", [text8_characters, raw_bytes, lambda: BPE])
def test_save_and_load(make, tmp_path):
    tok = make()
    tok.save(tmp_path / "deep" / "tokenizer.json")
    again = load_tokenizer(str(tmp_path / "deep"))
    assert again.fingerprint == tok.fingerprint == load_tokenizer(str(tmp_path / "deep" / "tokenizer.json")).fingerprint
    assert again.encode("a quick test") == tok.encode("a quick test")
    assert (again.mask_id, again.bos_id, again.pad_id) == (tok.mask_id, tok.bos_id, tok.pad_id)


def test_fingerprint_notices_a_swapped_pair_of_ids():
    vocab = {"[EOS]": 0, "a": 1, "b": 2}
    swapped = {"[EOS]": 0, "a": 2, "b": 1}
    one, two = (Tokenizer(Backend(models.BPE(v, [])), "x") for v in (vocab, swapped))
    assert one.fingerprint != two.fingerprint
    assert len({one.fingerprint, raw_bytes().fingerprint, text8_characters().fingerprint, BPE.fingerprint}) == 4
    assert one.fingerprint == Tokenizer(Backend(models.BPE(vocab, [])), "another name").fingerprint


def test_mask_is_appended_when_there_is_none():
    tok = Tokenizer(Backend(models.BPE({"</s>": 0, "a": 1}, [])), "x")
    assert (tok.mask_id, tok.vocab_size, tok.eos_id, tok.bos_id, tok.pad_id) == (2, 3, 0, 0, None)


def test_stored_truncation_is_dropped():
    backend = Backend(models.BPE({"</s>": 0, "a": 1}, []))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert Tokenizer(backend, "x").encode("a" * 10) == [1] * 10


def test_vocabulary_files_under_every_published_name(tmp_path):
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    for i, (first, second) in enumerate([("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")]):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / first).write_text(json.dumps(vocab))
        (folder / second).write_text("#version: 0.2\na b\n")
        for path in (folder, folder / first, folder / second):
            tok = load_tokenizer(str(path))
            assert tok.encode("abb") == [2, 1]
            assert (tok.mask_id, tok.vocab_size, tok.eos_id) == (4, 5, 3)
    # one token is a line break of Unicode: lines end at \n alone, or every id after it is wrong
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a\u2028b", "hi", "##s"]
    (tmp_path / "my-vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).encode("His") == [6, 7]
    own = load_tokenizer(str(tmp_path / "my-vocab.txt"))
    assert (own.mask_id, own.vocab_size) == (4, len(tokens))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "did you mean 'gpt2'"),
        ("bpe-100", "at least 260"),
        ("no/such/file.json", "does not exist"),
        ("{tmp}", "holds no vocabulary"),
        ("{tmp}/bad.json", "is not a tokenizer.json"),
        ("{tmp}/sub/vocab.json", "needs both vocab.json and merges.txt"),
        ("{tmp}/words.txt", "is not a BERT vocabulary (no [PAD], [UNK], [CLS], [SEP], [MASK])"),
        ("{tmp}/noeos", "no end-of-text token"),
    ],
)
def test_bad_names_say_why_in_one_line(name, message, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "words.txt").write_text("a\nb\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "vocab.json").write_text("{}")
    (tmp_path / "noeos").mkdir()
    (tmp_path / "noeos" / "tokenizer.json").write_text(Backend(models.BPE({"a": 0}, [])).to_str())
    with pytest.raises(ValueError) as error:
        load_tokenizer(name.format(tmp=tmp_path), documents=["x"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_offline_error_names_the_files(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be fetched from the hub .*vocab.json and merges.txt"):
        load_tokenizer("gpt2")


def test_bpe_needs_documents():
    with pytest.raises(ValueError, match="no documents were given"):
        load_tokenizer("bpe-300")

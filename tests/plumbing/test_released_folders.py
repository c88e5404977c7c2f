"""Folders of released models that are wrong are refused in one line; vocabularies and revisions are found."""

import json
import os

import pytest
import torch
from released import dit_weights, vocabulary, write_folder
from released_cases import CASES, MDLM, TOK, V

import adlm


def mdlm_folder(tmp_path, tokenizer: object = TOK, **config):
    return write_folder(tmp_path / "m", {**MDLM, "vocab_size": V, **config}, dit_weights(V, "backbone."), tokenizer)


def half(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def missing_shard(folder):
    no_weights(folder)
    case = CASES["llada"]()
    write_folder(folder, case.config, case.weights, TOK, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def no_index(folder):
    missing_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def wrong_tokenizer(folder):
    vocabulary(size=320).save(folder / "tokenizer.json")


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    case = CASES["llada"]()
    no_weights(folder)
    write_folder(folder, case.config, case.weights, None)


def mask_outside(folder):
    case = CASES["llada"]()
    no_weights(folder)
    write_folder(folder, {**case.config, "mask_token_id": V + 5}, case.weights, TOK)


def other_mask(folder):
    case = CASES["llada"]()
    no_weights(folder)
    write_folder(folder, {**case.config, "mask_token_id": 7}, case.weights, TOK)


def change(**settings):
    def act(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return act


def lacks_a_tensor(folder):
    weights = dit_weights(V, "backbone.")
    del weights["backbone.blocks.1.attn_out.weight"]
    write_folder(folder, {**MDLM, "vocab_size": V}, weights)


def more_tensors(folder):
    weights = dit_weights(V, "backbone.") | {"backbone.blocks.1.router.weight": torch.zeros(2)}
    write_folder(folder, {**MDLM, "vocab_size": V}, weights)


def code_in_a_pickle(folder):
    no_weights(folder)

    class Bad:
        def __reduce__(self):
            return (os.system, ("touch hacked",))

    torch.save({"a": Bad()}, folder / "pytorch_model.bin")


WRONG = [
    (half, "is not a complete safetensors file"),
    (no_weights, "holds no weights: neither model.safetensors nor pytorch_model.bin"),
    (missing_shard, "lacks model-00002-of-00003.safetensors of the 3 files .* download it again"),
    (no_index, "without model.safetensors.index.json"),
    (wrong_tokenizer, "has 2?[0-9]+ entries and the tokenizer .* give the right one as data.tokenizer"),
    (no_tokenizer, "holds no tokenizer: put its tokenizer.json"),
    (mask_outside, "its mask has the id [0-9]+, outside of its vocabulary"),
    (other_mask, "its mask has the id 7, but [0-9]+ in the tokenizer"),
    (change(n_heads=4), "its settings say model.n_heads=4, its weights 2"),
    (change(model_type="duo"), "Duo's noise is uniform"),
    (change(model_type="fmlm"), "FMLM is a continuous flow"),
    (change(model_type="gidd", p_uniform=0.2), "p_unif=0.2 mixes masks with uniform noise"),
    (change(model_type="gpt_bigcode"), "is of the kind 'gpt_bigcode', which is not read; known are llama"),
    (lacks_a_tensor, "no usable|lacks|not every|in the file"),
    (more_tensors, "has 1 parameters that mdlm has not, such as .*router"),
    (code_in_a_pickle, "pytorch_model.bin"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_a_wrong_folder_is_one_line(spoil, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = mdlm_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        adlm.load(folder, "cpu")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hacked").exists()


def test_vocabulary_files_of_dream_are_read(tmp_path):
    case = CASES["dream"]()
    folder = write_folder(tmp_path / "dream", case.config, case.weights)
    described = json.loads(TOK.backend.to_str())
    (folder / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    merges = [" ".join(pair) for pair in described["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    with pytest.raises(ValueError, match=r"holds neither tokenizer\.json nor tokenizer_config\.json"):
        adlm.load(folder, "cpu")
    names = {TOK.mask_id: "<|mask|>", TOK.bos_id: "[BOS]", TOK.eos_id: "[EOS]"}
    added = {str(i): {"content": name, "special": True} for i, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    lm = adlm.load(folder, "cpu")
    assert (lm.tokenizer.mask_id, lm.tokenizer.eos_id) == (TOK.mask_id, TOK.eos_id)
    assert lm.tokenizer.decode(lm.tokenizer.encode("The quick fox, 12!")) == "The quick fox, 12!"
    assert len(lm.tokenizer.encode("12")) == 2  # Qwen divides numbers into digits


def test_gpt2_is_the_tokenizer_of_models_without_one(tmp_path):
    case, folder = CASES["gidd"](), tmp_path / "gidd"
    folder.mkdir()
    described = json.loads(TOK.backend.to_str())
    tokens = [token for token in described["model"]["vocab"] if not token.startswith("[") or len(token) == 1]
    vocab = {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in described["model"]["merges"]))
    rows = len(vocab) + 2
    write_folder(folder, case.config, dit_weights(rows, rotary="cached"))
    lm = adlm.load(folder, "cpu")
    assert (lm.model.vocab_size, lm.tokenizer.mask_id, lm.tokenizer.pad_id) == (rows, rows - 1, rows - 2)


def test_the_hub_has_revisions(tmp_path, monkeypatch):
    import huggingface_hub

    from adlm.data import remote

    folder, asked = mdlm_folder(tmp_path), []

    def download(repository, revision, allow_patterns):
        asked.append((repository, revision, "pytorch_model*.bin" in allow_patterns))
        assert not any(p.endswith("py") for p in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(remote, "notice_missing_network", lambda: None)
    adlm.load("owner/model", "cpu", revision="7_rounds")
    adlm.load("owner/model@other", "cpu")
    assert asked == [("owner/model", "7_rounds", False), ("owner/model", "other", False)]

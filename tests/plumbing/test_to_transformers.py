"""Exports for transformers: its Auto classes load them without adlm, and compute the same logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exports import L
from tiny import MODERN, tiny_model

from adlm import cli
from adlm.compat.layouts import llama_type, save_for_transformers
from adlm.data.tokenizers import raw_bytes
from adlm.io.export import Loaded, describe, load_folder
from adlm.io.load import load_checkpoint
from adlm.schema import Config, NoiseConfig, ObjectiveConfig

transformers = pytest.importorskip("transformers")
TOK = raw_bytes()
PLAIN = {"anchored": False}
LLAMA = {
    "anchored": False, "conditioning": "none", "bias": False, "norm": "rmsnorm", "activation": "swiglu",
    "n_kv_heads": 1, "mlp_size": 24, "rope_base": 1e5, "norm_eps": 1e-5,
}  # fmt: skip


def loaded(**options) -> Loaded:
    model = tiny_model(TOK.vocab_size, TOK.mask_id, scale=0.2, **{"length": L, **options})
    objective = ObjectiveConfig(name="autoregressive", gamma=0.0) if options.get("causal") else ObjectiveConfig()
    cfg = Config(algo="test", model=model.config, objective=objective)
    return Loaded(model, TOK, NoiseConfig(), objective, describe(cfg, TOK, step=3))


def tokens(seed=0):
    found = torch.randint(0, 256, (3, L), generator=torch.Generator().manual_seed(seed))
    found[:, 5:9] = TOK.mask_id
    return found


KINDS = {
    "adlm": {}, "adlm without bridge": {"bridge": "none"}, "mdlm": PLAIN, "modern": MODERN,
    "time": {**PLAIN, "conditioning": "sigma"}, "adlm-time": {"conditioning": "sigma"},
    "llama masked": LLAMA, "dream": {**LLAMA, "shift": True, "qkv_bias": True},
    "qwen3 masked": {**LLAMA, "tied": True, "qk_norm": True, "head_size": 4},
    "ar": {**PLAIN, "causal": True}, "a2r": {"causal": True},
    "llama": {**LLAMA, "causal": True}, "qwen2": {**LLAMA, "causal": True, "qkv_bias": True},
    "qwen3": {**LLAMA, "causal": True, "qk_norm": True, "tied": True, "head_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_ours(tmp_path, kind):
    ours = loaded(**KINDS[kind])
    name = save_for_transformers(tmp_path, ours)
    causal = ours.model.config.causal
    assert name == ("AutoModelForCausalLM" if causal else "AutoModelForMaskedLM")
    needs_code = (tmp_path / "modeling_adlm.py").exists()
    assert needs_code == (kind not in ("llama", "qwen2", "qwen3"))
    theirs, report = getattr(transformers, name).from_pretrained(
        tmp_path, output_loading_info=True, **({"trust_remote_code": True} if needs_code else {})
    )
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x_BL = tokens()
    sigma = None
    if ours.model.config.is_time_conditioned:  # by the fraction of masks, where none is given
        sigma = theirs.noise_level(x_BL)
        torch.testing.assert_close(
            theirs(x_BL, sigma=sigma + 0.5).logits, ours.model.logits(x_BL, sigma + 0.5), rtol=0, atol=1e-5
        )
    torch.testing.assert_close(theirs.eval()(x_BL).logits, ours.model.logits(x_BL, sigma), rtol=0, atol=1e-5)
    again = load_checkpoint(tmp_path)
    torch.testing.assert_close(again.model.logits(x_BL, sigma), ours.model.logits(x_BL, sigma), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["export_v1", "export_v1_published", "export_v1_sedd"])
def test_a_folder_of_an_earlier_version_is_written_with_the_keys_of_today(tmp_path, name):
    ours = load_folder(Path(__file__).parents[1] / "golden" / name)
    kind = save_for_transformers(tmp_path, ours)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path, trust_remote_code=True).eval()
    x_BL, sigma = torch.randint(0, ours.model.mask_id, (2, 9)), torch.tensor([0.3, 1.2])
    torch.testing.assert_close(theirs(x_BL, sigma=sigma).logits, ours.model.logits(x_BL, sigma), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["adlm", "ar"])
def test_padding_is_not_attended_to(tmp_path, kind):
    ours = loaded(**KINDS[kind])
    name = save_for_transformers(tmp_path, ours)
    model = getattr(transformers, name).from_pretrained(tmp_path, trust_remote_code=True).eval()
    x_BL = tokens()
    mask = torch.ones_like(x_BL)
    mask[:, 15:] = 0
    found = model(x_BL, attention_mask=mask).logits[:, :15]
    torch.testing.assert_close(found, model(x_BL[:, :15]).logits, rtol=0, atol=1e-5)
    labels = x_BL.masked_fill(mask == 0, -100)
    assert torch.isfinite(model(x_BL, attention_mask=mask, labels=labels).loss)


def test_a_causal_model_of_ours_generates(tmp_path):
    ours = loaded(**KINDS["ar"])
    save_for_transformers(tmp_path, ours)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    prompt = tokens()[:1, :4]
    drawn = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=258)
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, ours.model.logits(expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(drawn, expected)


def test_the_command_writes_a_folder_that_needs_no_adlm(tmp_path, capsys):
    """A process that cannot import adlm loads model and tokenizer."""
    base = tmp_path / "base"
    from exports import export

    export(base)
    assert cli.main(["export", str(base), str(tmp_path / "hf"), "--transformers"]) == 0
    assert "transformers.AutoModelForMaskedLM.from_pretrained" in capsys.readouterr().out
    code = """
import sys
sys.modules["adlm"] = None
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer(f"The {tokenizer.mask_token} sat.", return_tensors="pt")
print(inputs["input_ids"].tolist()[0], round(model(**inputs).logits.sum().item(), 2))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hf")], capture_output=True, text=True, check=True,
        env={"HF_HOME": str(tmp_path / "cache"), "PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    ids = [*b"The ", TOK.mask_id, *b" sat."]
    with torch.no_grad():
        expected = load_folder(base).model.logits(torch.tensor([ids])).sum().item()
    found = done.stdout.strip().splitlines()[-1]
    assert found.startswith(json.dumps(ids)) and float(found.split()[-1]) == pytest.approx(expected, abs=0.02)


def test_layouts_are_chosen_by_what_the_block_has():
    assert llama_type(loaded(**KINDS["llama"]).model.config) == "llama"
    assert not llama_type(loaded(**KINDS["llama masked"]).model.config), "no code of transformers reads both ways"
    both = {**LLAMA, "causal": True, "qk_norm": True, "qkv_bias": True}
    assert not llama_type(loaded(**both).model.config)


def test_a_llama_model_goes_through_fine_tuning_and_back(tmp_path, capsys):
    """A folder of transformers, low-rank fine-tuning on pairs, and a folder of transformers again, without code."""
    torch.manual_seed(0)
    cfg = transformers.LlamaConfig(
        vocab_size=TOK.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=24, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    base = tmp_path / "base"
    before = transformers.LlamaForCausalLM(cfg)
    before.save_pretrained(base)
    TOK.save(base / "tokenizer.json")
    pairs = [{"prompt": f"{i % 7}+{i % 5}=", "completion": f"{i % 7 + i % 5}"} for i in range(24)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = [
        str(tmp_path / "sums.jsonl"), f"init_from={base}", f"out={tmp_path / 'run'}", "lora.rank=2", "train.steps=6",
        f"data.cache_dir={tmp_path / 'cache'}", "data.valid_fraction=0.25", "train.device=cpu", "sampling.steps=4",
    ]  # fmt: skip
    assert cli.main(["finetune", *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["after"] < facts["before"]
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--transformers"]) == 0
    assert not (tmp_path / "hf" / "modeling_adlm.py").exists()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    x_BL = tokens()[:, :4]
    ours = load_checkpoint(tmp_path / "run").model
    with torch.no_grad():
        torch.testing.assert_close(after(x_BL).logits, ours.logits(x_BL), rtol=0, atol=1e-5)
        assert (after(x_BL).logits - before(x_BL).logits).abs().max() > 1e-3

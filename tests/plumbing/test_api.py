"""The public face: load, generate, stream, score and save."""

import json
import math
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from exports import L, export
from tiny import tiny_model

import adlm
from adlm.data.tokenizers import raw_bytes
from adlm.io.export import describe, save_folder
from adlm.objectives import Sequences, make_objective, sequence_bounds
from adlm.schema import Config, DataConfig, NoiseConfig, ObjectiveConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("diffusion") / "export")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder, device="cpu")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return adlm.load(
        export(tmp_path_factory.mktemp("causal") / "export", causal=True, anchored=False, conditioning="none"), "cpu"
    )


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys, adlm; assert adlm.config.load(['model=nano']).model.length == 128;"
        "assert 'torch' not in sys.modules; adlm.load; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        adlm.lod  # noqa: B018


def test_generate_is_a_function_of_the_seed(lm):
    four = lm.generate(n=4, steps=8, seed=10)
    assert [g.seed for g in four] == [10, 11, 12, 13]
    assert all(len(g.tokens) == L and 1 <= g.nfe <= 8 and g.seconds > 0 for g in four)
    assert lm.generate(seed=12, steps=8)[0].tokens == four[2].tokens
    assert lm.generate(n=3, steps=8, seed=11, batch_size=2)[0].tokens == four[1].tokens


def test_prompts_are_continued(lm):
    (g,) = lm.generate(prompt="abc", length=12, steps=4)
    assert g.text.startswith("abc")
    assert g.tokens[:4] == [lm.tokenizer.bos_id, *b"abc"]
    assert len(g.tokens) == 12


def test_templates_are_filled(lm):
    (g,) = lm.generate("It [MASK:2] on [MASK:3].", steps=4)
    assert g.tokens[:3] == [lm.tokenizer.bos_id, *b"It"]
    assert g.tokens[5:8] == [*b" on"]
    assert g.tokens[-1] == ord(".")
    assert len(g.tokens) == 3 + 2 + 3 + 3 + 1
    assert lm.tokenizer.mask_id not in g.tokens


def test_one_engine_is_kept_and_freed_before_the_next_is_built(lm, monkeypatch):
    import adlm.api.language_model as module

    other, before = adlm.LanguageModel(lm.loaded), []
    first = weakref.ref(other.engine(2))
    assert other.engine(2) is first()
    build = module.Engine
    monkeypatch.setattr(module, "Engine", lambda *args, **kw: before.append(first()) or build(*args, **kw))
    assert len(other.engine(3).slots) == 3
    assert before == [None]


def test_words(lm):
    (g,) = lm.generate(required=["cat"], steps=4, seed=3)
    assert " cat" in g.text
    assert b"z"[0] not in [t for g in lm.generate(n=5, banned=["z"], steps=4) for t in g.tokens]


def test_words_that_can_be_read_once_hold_for_every_text(lm):
    asked = ["", "a", "b"]
    for name, words in (("banned", ["a", "e"]), ("required", ["cat"]), ("choices", ["yes", "no"])):
        plain = lm.generate(asked, steps=4, length=9, **{name: words})
        for same in (iter(words), np.array(words)):
            assert [g.text for g in lm.generate(asked, steps=4, length=9, **{name: same})] == [g.text for g in plain]


def test_streams_end_with_what_generate_gives(lm):
    *partial, last = lm.stream(prompt="ab", length=10, steps=6, seed=5)
    assert isinstance(last, adlm.Generation)
    assert last.tokens == lm.generate(prompt="ab", length=10, steps=6, seed=5)[0].tokens
    assert all(isinstance(p, adlm.Partial) and p.text.startswith("ab") for p in partial)
    masks = [p.tokens.count(lm.tokenizer.mask_id) for p in partial]
    assert masks == sorted(masks, reverse=True)


def test_strides(lm):
    (g,) = lm.generate(length=60, stride=8, steps=4)
    assert len(g.tokens) == 60


def test_stop_cuts_at_the_end_of_text(lm):
    texts = lm.generate(n=30, stop=True, steps=8, temperature=3.0)
    assert any(len(g.tokens) < L for g in texts)
    assert all(g.tokens[-1] == lm.tokenizer.eos_id for g in texts if len(g.tokens) < L)


def test_causal_models_have_the_same_face(causal):
    (g,) = causal.generate(prompt="ab", length=12, seed=4)
    assert g.tokens[:3] == [causal.tokenizer.bos_id, *b"ab"]
    assert g.nfe == 9
    *_, last = causal.stream(prompt="ab", length=12, seed=4)
    assert last.tokens == g.tokens
    with pytest.raises(ValueError, match="needs a diffusion model"):
        causal.generate(sampler="mdlm")
    with pytest.raises(ValueError, match="all holes must stand at the end"):
        causal.generate("a [MASK] b")


def test_score_of_a_causal_model_is_the_likelihood(causal):
    tokens = [*b"hello there"]
    row = torch.tensor([[causal.tokenizer.bos_id, *tokens]])
    log_p = causal.log_probs(row)[0, :-1].gather(-1, row[0, 1:, None])[:, 0]
    score = causal.score("hello there")
    assert score.nll == pytest.approx(-log_p.mean().item(), rel=1e-5)
    np.testing.assert_allclose(score.per_token, -log_p.numpy(), rtol=1e-4)
    assert score.stderr == 0
    assert score.ppl == pytest.approx(math.exp(score.nll))


def test_score_of_a_diffusion_model_is_the_bound(lm):
    """Two tokens: the bound is the mean over both orders of the chain rule, by enumeration of the masks."""
    x = [*b"hi"]
    bos, m = lm.tokenizer.bos_id, lm.tokenizer.mask_id
    canvases = torch.tensor([[bos, m, m], [bos, x[0], m], [bos, m, x[1]]])
    log_p = lm.log_probs(canvases)
    none, first, second = (log_p[i] for i in range(3))
    # -E over orders: half of the time each position comes first
    exact = -0.5 * (none[1, x[0]] + first[2, x[1]] + none[2, x[1]] + second[1, x[0]]).item()
    score = lm.score("hi", draws=4_000)
    assert score.stderr is not None and score.nll * 2 == pytest.approx(exact, abs=5 * 2 * score.stderr)
    assert lm.score("hi", draws=1).stderr is None and lm.score("h", draws=1).stderr == 0, "one token is always masked"
    assert lm.fill_distribution("h[MASK]", draws=1)[0].stderr is None
    assert sum(score.per_token) == pytest.approx(score.nll * 2)
    assert score.tokens == x
    assert lm.score("hi", draws=64) == lm.score(x, draws=64)


def test_predictions_of_a_time_conditioned_model_are_those_of_its_engine(tmp_path):
    timed = adlm.load(export(tmp_path / "timed", conditioning="sigma"), "cpu")
    with torch.no_grad():  # freshly initialised, noise levels change nothing
        for name, p in timed.model.named_parameters():
            if "modulation" in name or "time_embedding" in name:
                p.normal_(std=0.5)
    m = timed.tokenizer.mask_id
    row = [timed.tokenizer.bos_id, *b"ab", m, m, *b"c", m]
    engine = timed.engine(1)
    expected = engine.evaluator.word_log_probs(row, list(range(m)), 3 / 7)
    found = timed.log_probs(torch.tensor([row]))[0]
    np.testing.assert_allclose(found[3, :m].numpy(), expected[3], rtol=1e-4, atol=1e-4)
    shallow, deep = (timed.anchor_logits(torch.tensor([r])) for r in (row, [m if t == row[5] else t for t in row]))
    assert shallow.isfinite().all() and not torch.equal(shallow[0, 3], deep[0, 3])


def test_a_context_is_part_of_the_noise_level_of_what_is_scored(tmp_path, monkeypatch):
    """Of nine positions six are scored: however many of those are masked, the network hears of two thirds at most, as
    `log_probs` says it of the same canvas."""
    timed = adlm.load(export(tmp_path / "timed", conditioning="sigma"), "cpu")
    told, forward = [], type(timed.model).forward
    monkeypatch.setattr(
        type(timed.model),
        "forward",
        lambda self, z, sigma, **k: (told.append((z, sigma)), forward(self, z, sigma, **k))[1],
    )
    timed.score("abcdef", draws=64, context="xy")
    canvases, sigma = (torch.cat(parts) for parts in zip(*told))
    most = timed.noise_level(torch.tensor([[0, 0, 0] + [timed.tokenizer.mask_id] * 6]))
    assert 0.9 * most < sigma.max() <= most
    # draw by draw a random time, on average the canvas' own fraction of masks
    fraction = -torch.expm1(-sigma) / timed.schedule.masked_at_1
    masks = (canvases == timed.tokenizer.mask_id).float().mean(-1)
    assert fraction.mean() == pytest.approx(masks.mean().item() * 6 / 7, rel=0.05)


def test_score_after_a_context_keeps_it_visible(lm, causal):
    """One token has no noise: its bound is its probability. Two: both orders, by enumeration."""
    tok = lm.tokenizer
    given = [tok.bos_id, *b"ab"]
    one = lm.score("h", draws=8, context="ab")
    expected = -lm.log_probs(torch.tensor([[*given, tok.mask_id]]))[0, 3, ord("h")].item()
    assert one.nll == pytest.approx(expected, rel=1e-5) and one.stderr == 0
    x, m = [*b"hi"], tok.mask_id
    log_p = lm.log_probs(torch.tensor([[*given, m, m], [*given, x[0], m], [*given, m, x[1]]]))
    exact = -0.5 * (log_p[0, 3, x[0]] + log_p[1, 4, x[1]] + log_p[0, 4, x[1]] + log_p[2, 3, x[0]]).item()
    two = lm.score("hi", draws=4_000, context="ab")
    assert two.nll * 2 == pytest.approx(exact, abs=5 * 2 * two.stderr)
    assert len(two.per_token) == 2
    # a causal model: the probability of the whole is that of its parts
    whole, first, second = causal.score("abhi"), causal.score("ab"), causal.score("hi", context="ab")
    assert 4 * whole.nll == pytest.approx(2 * first.nll + 2 * second.nll, rel=1e-5)
    np.testing.assert_allclose(whole.per_token[2:], second.per_token, rtol=1e-5)


def test_a_context_that_does_not_fit_is_cut_from_the_left(lm):
    long = "y" * 100 + "ab"
    kept = long[-(L - 1 - 2) :]
    assert lm.score("hi", draws=4, context=long) == lm.score("hi", draws=4, context=kept)
    assert lm.score("x" * L, draws=4, context="ab") == lm.score("x" * L, draws=4)


@pytest.mark.parametrize("name", ["score-entropy", "d3pm"])
def test_score_of_other_baselines_is_their_own_bound(tmp_path, name):
    tokenizer = raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, length=L, anchored=False)
    objective = ObjectiveConfig(name=name, T=50 if name == "d3pm" else 0)
    cfg = Config(algo="test", model=model.config, objective=objective, data=DataConfig(name="none", tokenizer="bytes"))
    save_folder(tmp_path / "x", model.state_dict(), tokenizer, describe(cfg, tokenizer))
    other = adlm.load(tmp_path / "x", "cpu")
    x = torch.tensor([[tokenizer.bos_id, *b"hi"]])
    scored = torch.tensor([[False, True, True]]).repeat(500, 1)
    task = make_objective(objective, NoiseConfig(), model.mask_id, 0).corrupt_for_bound(
        Sequences(x.repeat(500, 1), torch.arange(500), 500, scored), 0
    )
    task.tokens_BL[:, 0] = tokenizer.bos_id
    assert 2 * other.score("hi", draws=500).nll == pytest.approx(sequence_bounds(model, task).mean().item(), rel=1e-5)


def test_long_texts_are_scored_in_pieces(lm):
    score = lm.score("x" * 100, draws=4)
    assert len(score.per_token) == 100


def test_save_and_load_again(lm, tmp_path):
    lm.save(tmp_path / "copy")
    again = adlm.load(tmp_path / "copy", device="cpu")
    assert again.generate(steps=4, seed=1)[0].tokens == lm.generate(steps=4, seed=1)[0].tokens
    tokens = torch.randint(0, 250, (2, L))
    assert torch.equal(lm.anchor_logits(tokens), again.anchor_logits(tokens))
    assert "length 24" in repr(again)
    weights = tmp_path / "copy" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-40] + b"\xff" * 20 + whole[-20:])
    with pytest.raises(ValueError, match=r"copy/model\.safetensors is corrupt: its sha256 is not"):
        adlm.load(tmp_path / "copy", device="cpu")
    info = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(info | {"mask_id": 5}))
    with pytest.raises(ValueError, match=r"the mask is token 259 of tokenizer.json and 5 of config.json$"):
        adlm.load(tmp_path / "copy", device="cpu")
    del info["weights_file_sha256"]  # as older versions wrote it
    (tmp_path / "copy" / "config.json").write_text(json.dumps(info))
    assert adlm.load(tmp_path / "copy", device="cpu").length == L
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^folder='.*file/x' cannot be written: Not a directory$"):
        lm.save(tmp_path / "file" / "x")
    with pytest.raises(ValueError, match="folder must be a path, got None"):
        lm.save(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "no hole"}, "at least one hole"),
        ({"template": "x" * 30 + "[MASK]"}, r"template has 32 tokens, allowed are 24 \(the model's length\)"),
        ({"template": "[MASK:999999999999999]"}, "allowed are 24"),
        ({"template": "[MASK]", "prompt": "a"}, "only one of prompt and template"),
        ({"template": "[MASK]", "length": 9}, "length has no meaning beside template"),
        ({"template": 3}, "template must be a text, got 3"),
        ({"prompt": ["a", "b"]}, r"prompt must be a text, got \['a', 'b'\]"),
        ({"prompt": b"abc"}, "prompt must be a text"),
        ({"prompt": "a\ud83d"}, "prompt holds half of a character"),
        ({"prompt": "x" * 30}, "leaves nothing to draw"),
        ({"top_p": 0}, r"^top_p=0.0 must be in \(0, 1\]$"),
        ({"steps": 0}, "^steps=0 must be at least 1$"),
        ({"seed": None}, "seed must be an integer"),
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": 2, "prompt": "a", "seed": 2**63 - 1}, "^seed must be an integer"),
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"length": 30}, r"^a sequence of 30 positions is longer than 24 \(model.length\); set stride to go beyond$"),
        ({"length": 999999999999999}, "longer than 24"),
        ({"steps": "8"}, "steps must be an integer, got '8'"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"sampler": 3}, "sampler must be a text"),
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"stop": "yes"}, "stop must be True or False, got 'yes'"),
        ({"stop": ["\n"]}, "stop must be True or False"),
        ({"banned": [3]}, "a text of banned must be a text, got 3"),
        ({"banned": "the"}, "banned must be a list of texts, got 'the'"),
        ({"required": None}, "required must be a list of texts"),
        ({"required": ["is"], "banned": ["the", "is"]}, "required and banned both name 'is'$"),
        ({"required": ["this is"], "banned": ["is"]}, r"both name 'is' \('this is' holds it\)"),
        ({"banned": [""]}, "word is empty"),
        ({"sampler": "remdm"}, "sampler='remdm' is unknown"),
    ],
)
def test_bad_arguments_are_answered(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(**arguments) if arguments.get("seed", 0) is not None else next(lm.stream(**arguments))


def test_numbers_of_numpy_are_numbers(lm):
    plain = lm.generate(prompt="a", seed=3, steps=4, temperature=0.5, n=2)
    own = lm.generate(prompt="a", seed=np.int64(3), steps=np.int32(4), temperature=np.float32(0.5), n=np.int64(2))
    assert [g.tokens for g in own] == [g.tokens for g in plain]
    assert lm.score(np.array([104, 105]), np.int64(4)) == lm.score("hi", 4) == lm.score(torch.tensor([104, 105]), 4)


def test_a_banned_phrase_may_take_in_a_required_word(lm):
    (g,) = lm.generate(required=["cat"], banned=["a cat"], steps=4, seed=3)
    assert " cat" in g.text and "a cat" not in g.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": None}, "text must be one text or a list of token ids, got None"),
        ({"text": ["a", "b"]}, "text must be one text or a list"),
        ({"text": b"abc"}, "text must be one text or a list"),
        ({"text": "\ud800"}, "text holds half of a character"),
        ({"text": "hello", "draws": 1.5}, "draws must be an integer, got 1.5"),
        ({"text": "hello", "draws": 0}, "draws=0 must be at least 1"),
        ({"text": "hello", "context": 3}, "context must be one text or a list"),
    ],
)
def test_what_cannot_be_scored_is_answered(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        lm.score(**arguments)


def test_unknown_words_are_answered():
    from adlm.constrain import variants
    from adlm.data.tokenizers import text8_characters

    with pytest.raises(ValueError, match="'caf\u00e9' is unknown to this vocabulary"):
        variants(text8_characters(), "caf\u00e9")


def test_what_cannot_be_loaded_is_answered(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        adlm.load(tmp_path / "nothing")
    for source in (None, 3):
        with pytest.raises(ValueError, match=f"source must be a path, got {source}"):
            adlm.load(source)
    with pytest.raises(ValueError, match="device='foo' is no device"):
        adlm.load(device="foo")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda', but no CUDA device is available"):
            adlm.load(device="cuda")
    with pytest.raises(ValueError, match="neither a run folder nor an exported folder"):
        adlm.load(tmp_path)


def test_the_home_of_nobody_is_said_to_be_that():
    with pytest.raises(ValueError, match=r"'~nobody-of-that-name/run': there is no such user"):
        adlm.load("~nobody-of-that-name/run")


def test_the_score_sampler_is_for_models_that_learned_a_score(lm, tmp_path):
    with pytest.raises(ValueError, match="needs a model that learned a score"):
        lm.generate(sampler="score", steps=4)
    tokenizer = raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, length=L, anchored=False)
    objective = ObjectiveConfig(name="score-entropy")
    cfg = Config(algo="sedd", model=model.config, objective=objective, data=DataConfig(name="none", tokenizer="bytes"))
    save_folder(tmp_path / "x", model.state_dict(), tokenizer, describe(cfg, tokenizer))
    (text,) = adlm.load(tmp_path / "x", "cpu").generate(sampler="score", steps=6)
    assert tokenizer.mask_id not in text.tokens and text.nfe <= 7

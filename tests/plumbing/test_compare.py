"""`adlm compare`: one line trains several algorithms, the table is right, and nothing finished is done again."""

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import overrides, start, wait_for_step
from scipy import stats

from adlm import cli, compare
from adlm.config.keys import group_choices
from adlm.evaluation.comparison import Comparison, Entry, curves, paired
from adlm.evaluation.intervals import summarise
from adlm.evaluation.perplexity import phases
from adlm.objectives import Sequences, make_objective
from adlm.schema import Config, NoiseConfig, ObjectiveConfig
from adlm.training.setup import scored_fractions

ALGOS = ("adlm", "mdlm", "ar", "sedd", "d3pm")


def line(folder, *more: str) -> list[str]:
    keys = overrides(folder, train__steps=3, train__valid_every=0, eval__draws=2, eval__sequences=10)
    return ["compare", *keys, *more]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    assert cli.main([*line(folder), *ALGOS]) == 0
    return folder


def test_every_algorithm_has_its_line(compared):
    document = json.loads((compared / "run" / "table.json").read_text())
    entries = {e["name"]: e for e in document["entries"]}
    assert set(entries) == set(ALGOS) and document["entries"][-1]["name"] == "ar", "exact likelihoods stand last"
    assert [e["kind"] for e in entries.values() if e["name"] in ("ar", "adlm")].count("exact") == 1
    for name, entry in entries.items():
        estimate = entry["estimate"]
        assert estimate["rows"] == 10 and estimate["nats_interval"] is not None
        assert sum(entry["row_nats"]) / sum(entry["row_tokens"]) == pytest.approx(estimate["nats_per_token"])
        assert entry["tokens_per_s"] > 0 and entry["training_tokens"] == 3 * 8 * 32
        assert json.loads((compared / "run" / name / "compared.json").read_text())["name"] == name
    assert entries["adlm"]["parameters"] > entries["mdlm"]["parameters"]
    assert set(document["differences"]) == {"mdlm", "sedd", "d3pm"}
    text = (compared / "run" / "table.md").read_text()
    assert "Budget of each:" in text
    assert text.count("\n| ") == len(ALGOS) and "bound" in text and "exact" in text and "3 steps of 8 sequences" in text


def test_a_run_named_twice_is_one_and_is_told(compared, capsys):
    assert cli.main([*line(compared), *ALGOS, "adlm"]) == 0
    out = capsys.readouterr().out
    assert "adlm is named 2 times, and is one run; +seed=2 makes another" in out and "mdlm is named" not in out


def test_a_rerun_clears_what_a_killed_one_left_half_written(compared):
    half = compared / "run" / f".table.md.{2**22 + 1}"  # no process has that number
    half.write_text("| algo")
    assert cli.main([*line(compared), *ALGOS]) == 0
    assert not half.exists() and (compared / "run" / "table.md").exists()


def test_arithmetic_is_that_of_the_rows_really_scored(compared):
    """A causal model scores all but the first token of a row; SEDD the masked half, exactly as MDLM."""
    entries = {e["name"]: e for e in json.loads((compared / "run" / "table.json").read_text())["entries"]}
    D, V, length, blocks = 16, 260, 32, 2
    block = 2 * 12 * D * D
    finish = 2 * 9 * D * D  # after the last attention, where something is scored
    ar = 3 * (blocks * (block + 4 * D * length / 2) - finish / length + 2 * D * V * (length - 1) / length)
    assert entries["ar"]["flops_per_token"] == pytest.approx(ar, rel=1e-6)
    mdlm = 3 * (blocks * (block + 4 * D * length) - 0.5 * finish + 2 * D * V * 0.5)
    assert entries["mdlm"]["flops_per_token"] == pytest.approx(mdlm, rel=0.05)
    assert entries["sedd"]["flops_per_token"] == entries["mdlm"]["flops_per_token"]
    assert entries["adlm"]["flops_per_token"] > 1.3 * mdlm


@pytest.mark.parametrize(
    ("gammas", "counted"),
    [((0.3, 0.0), 1.0), ((0.3, 0.2), 1.0), ((0.3, 0.0, 0.25), 0.25)],
)
def test_the_anchor_head_counts_wherever_in_the_run_gamma_is_zero(gammas, counted):
    tokens_BL = torch.arange(8 * 12).view(8, 12) % 50  # no token twice in a row
    clean = Sequences(tokens_BL, torch.arange(8), 8)
    cfg = ObjectiveConfig("anelbo", *gammas)
    scored, anchors = scored_fractions(make_objective(cfg, NoiseConfig(), 50, seed=0), clean)
    assert 0.3 < scored < 0.7 and anchors == counted
    given_BL = torch.arange(12) < 9  # prompts are read, and neither scored nor anchors
    with_prompts = Sequences(tokens_BL, torch.arange(8), 8, given_BL=given_BL.expand(8, 12))
    scored_answers, anchors = scored_fractions(make_objective(cfg, NoiseConfig(), 50, seed=0), with_prompts)
    assert scored_answers == pytest.approx(scored / 4, rel=0.3) and anchors == counted / 4


def test_equal_flops_give_cheaper_algorithms_more_steps(compared, tmp_path, capsys):
    here = line(tmp_path, "equal_flops=true", f"data.path={compared / 'corpus.jsonl'}", "train.steps=40")
    assert cli.main([*here, "train.valid_every=20", "adlm", "mdlm"]) == 0
    entries = {e["name"]: e for e in json.loads((tmp_path / "run" / "table.json").read_text())["entries"]}
    assert entries["adlm"]["config"]["train"]["steps"] == 40 < entries["mdlm"]["config"]["train"]["steps"]
    total = {name: e["flops_per_token"] * e["training_tokens"] for name, e in entries.items()}
    assert total["mdlm"] == pytest.approx(total["adlm"], rel=0.02)  # a step of 40 is 2.5%
    page = (tmp_path / "run" / "report.html").read_text()
    assert "training compute, PFLOP" in page and "the training FLOPs of the first algorithm in 40 steps" in page
    capsys.readouterr()
    assert cli.main([*here, "adlm", "mdlm+train.steps=7"]) == 1
    assert "take train.steps out of ['mdlm+train.steps=7']" in capsys.readouterr().err


def test_curves_have_the_mean_and_the_range_of_seeds():
    tokens = np.full(4, 10)
    runs = [entry("adlm" if seed == 1 else f"adlm+seed={seed}", np.ones(4), tokens, seed=seed) for seed in (1, 2)]
    assert curves(runs) is None, "nothing was validated on the way"
    for run, nats in zip(runs, (5.0, 7.0)):
        run.config["train"] = {"steps": 1}
        run.validations.extend([(0, 9.0), (2, nats)])
    chart = curves(runs)
    assert chart is not None and "adlm: 2e-15, 6" in chart and "adlm+seed" not in chart and "polygon" in chart


def test_what_is_finished_is_not_trained_again(compared, monkeypatch, capsys):
    def refuse(cfg):
        raise AssertionError(f"{cfg.algo} is trained again")

    monkeypatch.setattr(compare, "train", refuse)
    capsys.readouterr()
    assert cli.main([*line(compared), *ALGOS]) == 0
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in ALGOS)
    assert cli.main([*line(compared), "mdlm", "ar"]) == 0
    assert {e["name"] for e in json.loads((compared / "run" / "table.json").read_text())["entries"]} == {"mdlm", "ar"}
    with pytest.raises(AssertionError, match="mdlm is trained again"):
        cli.main([*line(compared, "eval.draws=3"), "mdlm"])  # other settings: another number


def test_a_run_with_another_budget_is_not_trained_on(compared, capsys):
    """Its rate has fallen for the end that it had, and more steps after that are no longer run."""
    assert cli.main([*line(compared, "train.steps=5"), "mdlm"]) == 1
    problem = capsys.readouterr().err
    assert "holds a run of mdlm with train.steps=3, not 5: give another out=" in problem
    assert cli.main([*line(compared, "optim.lr=0.5"), "mdlm"]) == 1 and "optim.lr=" in capsys.readouterr().err


def test_a_signal_stops_the_whole_and_a_rerun_goes_on(compared, monkeypatch):
    stopped = type("Result", (), {"finished": False, "stopped_by": signal.SIGTERM})
    monkeypatch.setattr(compare, "train", lambda cfg: stopped)
    assert cli.main([*line(compared), "mdlm", "two-stage", "ar"]) == 143
    assert len(json.loads((compared / "run" / "table.json").read_text())["entries"]) == 2


@pytest.mark.slow
def test_runs_side_by_side_are_those_one_by_one(compared, tmp_path, capsys):
    """Two at a time: the same numbers to the last bit, and one that fails costs only itself."""
    words = ["mdlm", "mdlm+data.path=nowhere.jsonl", "adlm", "ar"]
    capsys.readouterr()
    assert cli.main([*line(tmp_path, "jobs=2", f"data.path={compared / 'corpus.jsonl'}"), *words]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("adlm: error: mdlm+data.path=nowhere.jsonl failed: ") and "does not exist" in said.err
    assert "ar: started" in said.out and said.err.count("\n") == 1

    def rows(folder: Path, name: str) -> list[float]:
        return json.loads((folder / "run" / name / "compared.json").read_text())["row_nats"]

    assert "mdlm" in (tmp_path / "run" / "table.md").read_text()
    for name in ("mdlm", "adlm", "ar"):
        assert rows(tmp_path, name) == rows(compared, name)
        assert (tmp_path / "run" / name / "log.txt").read_text()


@pytest.mark.slow
def test_signals_to_runs_side_by_side(tmp_path):
    """One that is killed costs itself; all that run are told to stop, and what waits is not started."""
    process = start(tmp_path, "jobs=2", "train.steps=1000000", "adlm", "mdlm", "ar", "sedd", command="compare")
    for name in ("adlm", "mdlm"):
        wait_for_step(tmp_path / "run" / name, 1, process)
    os.kill(int((tmp_path / "run" / "adlm" / ".claim").read_text()), signal.SIGKILL)
    wait_for_step(tmp_path / "run" / "ar", 1, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "adlm: error: adlm failed: killed by signal 9" in said
    for name in ("mdlm", "ar"):
        assert "stopped by a signal" in (tmp_path / "run" / name / "log.txt").read_text()
    assert not (tmp_path / "run" / "sedd").exists()


def test_mistakes_are_said_before_anything_is_trained(tmp_path, capsys):
    assert cli.main([*line(tmp_path), "adlm", "mdml"]) == 1
    assert "did you mean 'mdlm'" in capsys.readouterr().err
    assert cli.main([*line(tmp_path, "eval.estimator=both"), "adlm"]) == 1
    assert "eval.estimator=continuous" in capsys.readouterr().err
    assert cli.main([*line(tmp_path, "jobs=0"), "adlm"]) == 1
    assert "compare.jobs=0 must be at least 1" in capsys.readouterr().err
    assert cli.main([*line(tmp_path, "objective.T=5"), "mdlm", "adlm"]) == 1  # adlm cannot, though mdlm could
    assert not (tmp_path / "run").exists()


def test_every_algorithm_of_the_package_can_be_compared():
    """Same blocks and heads for the matched ones; everything composes with the table's settings."""
    from adlm import config

    runs = {name: config.load(["experiment=compare", f"algo={name}"]) for name in group_choices("algo")}
    assert set(runs) >= {"adlm", "two-stage", "mdlm", "mdlm-matched", "ar", "ar-matched", "a2r", "sedd", "d3pm"}
    assert any(cfg.model.is_time_conditioned and cfg.model.anchored for cfg in runs.values())
    total = runs["adlm"].model.n_blocks + runs["adlm"].model.n_denoiser_blocks
    for name in ("mdlm-matched", "ar-matched"):
        assert runs[name].model.n_blocks == total and runs[name].model.n_heads == runs["adlm"].model.n_heads
    budgets = {(c.train.steps, c.train.global_batch_size, c.model.length, c.data.name, c.seed) for c in runs.values()}
    assert len(budgets) == 1 and runs["two-stage"].objective.gamma == 0


def entry(algo: str, row_nats: np.ndarray, tokens: np.ndarray, kind: str = "continuous", seed: int = 1) -> Entry:
    phase = None if kind == "exact" else phases(len(row_nats)).numpy()
    estimate = summarise(row_nats[:, None], tokens, phase)
    return Entry(algo, kind, estimate.as_dict(), row_nats.tolist(), tokens.tolist(), 1, 1.0, 1.0, 1, {"seed": seed})


def test_paired_differences_see_what_intervals_hide():
    rng = np.random.default_rng(0)
    tokens = np.full(200, 32)
    base = rng.normal(100, 30, 200)  # rows differ far more than models do
    shift = 0.5 + rng.normal(0, 0.2, 200)
    a, b = entry("adlm", base, tokens), entry("mdlm", base + shift, tokens)
    d = paired(b, a)
    assert d is not None and d.interval is not None
    assert d.nats == pytest.approx(shift.sum() / tokens.sum()) and d.interval[0] > 0
    low, high = a.estimate["nats_interval"]
    assert low < b.estimate["nats_per_token"] < high, "the intervals alone could not tell them apart"
    assert d.row_error == pytest.approx(0.2 / math.sqrt(200) / 32, rel=0.25)
    exact = entry("ar", base, tokens - 1, "exact")
    assert paired(exact, a) is None and paired(a, a) is None
    table = Comparison([b, exact, a], "adlm", Config())
    assert [e.name for e in table.entries] == ["adlm", "mdlm", "ar"] and list(table.differences) == ["mdlm"]


def test_one_row_has_no_interval():
    tokens = np.full(1, 10)
    table = Comparison(
        [entry(name, np.array([n]), tokens) for name, n in (("adlm", 20.0), ("mdlm", 21.0))], "adlm", Config()
    )
    assert [line[0] for line in table.rows()] == ["adlm", "mdlm"]
    assert all(line[2] == line[4] == "" for line in table.rows())


def test_scatter_between_seeds():
    tokens = np.full(4, 10)
    rows = np.array([10.0, 20, 30, 40])
    runs = {"adlm": (0.0, 1.0, 3.0), "mdlm": (2.0, 3.5, 4.5)}  # nats of all rows together, by seed
    entries = [
        entry(name if seed == 1 else f"{name}+seed={seed}", rows + 10 * shift, tokens, seed=seed)
        for name, shifts in runs.items()
        for seed, shift in enumerate(shifts, 1)
    ]
    entries.append(entry("mdlm+train.steps=9+seed=2", rows, tokens, seed=2))  # alone: no group
    table = Comparison([*entries, entry("ar", rows, tokens, "exact")], "adlm", Config())
    groups = {g["name"]: g for g in table.seeds()}
    assert set(groups) == {"adlm", "mdlm"} and groups["mdlm"]["nats"].keys() == {1, 2, 3}
    assert groups["adlm"]["mean"] == pytest.approx(2.5 + 4 / 3) and "to" not in groups["adlm"]
    assert groups["adlm"]["deviation"] == pytest.approx(np.std([0, 1, 3], ddof=1))
    expected = stats.ttest_rel(runs["mdlm"], runs["adlm"]).confidence_interval(0.95)
    g = groups["mdlm"]
    assert g["difference"] - g["half"] == pytest.approx(expected.low, rel=1e-3)
    assert g["difference"] + g["half"] == pytest.approx(expected.high, rel=1e-3)
    assert (
        "| mdlm | 1, 2, 3 |" in table.markdown()
        and "over seeds" not in Comparison(entries[:1], "adlm", Config()).markdown()
    )


def test_a_list_of_seeds_is_several_runs():
    assert compare.each_seed("adlm+seed=1,2+model.bridge=none") == [
        "adlm+seed=1+model.bridge=none", "adlm+seed=2+model.bridge=none",
    ]  # fmt: skip
    assert compare.each_seed("mdlm+sampling.prompt=a,b") == ["mdlm+sampling.prompt=a,b"]


def test_every_algorithm_has_its_recipe_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    assert all(f"| `{name}` |" in text for name in group_choices("algo"))


def test_variants_are_algorithms_with_changes(compared, capsys):
    """Named by what was changed; the plain algorithm's run is taken as it is."""
    capsys.readouterr()
    assert cli.main([*line(compared), "mdlm", "mdlm+seed=7", "mdlm+train.steps=2"]) == 0
    assert "| mdlm | 1, 7 |" in capsys.readouterr().out
    document = json.loads((compared / "run" / "table.json").read_text())
    entries = {e["name"]: e for e in document["entries"]}
    assert set(entries) == {"mdlm", "mdlm+seed=7", "mdlm+train.steps=2"}
    assert entries["mdlm+seed=7"]["config"]["seed"] == 7 and entries["mdlm"]["config"]["seed"] == 1
    assert entries["mdlm+seed=7"]["row_nats"] != entries["mdlm"]["row_nats"]
    assert "unless its name says otherwise" in (compared / "run" / "table.md").read_text()
    assert set(document["differences"]) == {"mdlm+seed=7", "mdlm+train.steps=2"}
    for wrong, message in (("mdlm+seed", "+key=value"), ("mdml+seed=1", "mdlm"), ("mdlm+sed=1", "seed")):
        assert cli.main([*line(compared), wrong]) == 1
        assert message in capsys.readouterr().err

"""The controls of `benchmarks/anchor_controls.py` at toy scale: what is said to be equal is equal, to the bit."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_graphs import record_on_a_cpu

from adlm import config
from adlm.objectives.base import Rows
from adlm.training.draw import rows_on
from adlm.training.graphs import Replays
from adlm.training.parallel import world

PATH = Path(__file__).parents[1] / "benchmarks" / "anchor_controls.py"
SPEC = importlib.util.spec_from_file_location("anchor_controls", PATH)
assert SPEC is not None and SPEC.loader is not None
controls = sys.modules["anchor_controls"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(controls)

V, L, STEPS = 64, 32, 6
TOY = (
    "model.hidden_size=32 model.n_heads=2 model.n_blocks=2 model.n_denoiser_blocks=1 train.global_batch_size=4"
    " train.steps=10 objective.tau=2 train.cuda_graphs=false train.compile=false train.device=cpu optim.warmup=2"
)


def text(n: int, seed: int) -> np.ndarray:
    """Rows in which a token says something about its neighbours, and some tokens are common."""
    rng = np.random.default_rng(seed)
    return (np.cumsum(rng.integers(0, 3, (n, L)), axis=1) + rng.integers(0, 9, (n, 1))).astype(np.uint16) % (V - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    cfg = config.load([*controls.SETTINGS.split(), f"model.length={L}", *TOY.split()], world_size=1)
    folder = tmp_path_factory.mktemp("toy")
    controls.write_folder(folder, cfg, text(200, 1), text(12, 2), V - 1, V)
    return folder


@pytest.fixture
def study(folder):
    return controls.read_study(folder, STEPS, draws=2, words=[])


@pytest.fixture(scope="module")
def trainer(folder):
    study = controls.read_study(folder, STEPS, draws=2, words=[])
    with world(study.cfg.train) as ranks:
        trainer, _ = controls.make_trainer(study, ranks, seed=1)
        yield trainer


@pytest.fixture(scope="module")
def base(trainer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controls, "MOST_EXTENSIONS", 0)
        return controls.train_base(trainer, "probe", 1)


def some_rows(study, n=16) -> Rows:
    return rows_on(torch.device("cpu"), study.text.rows(np.arange(n)), None, np.arange(n), n)


def task_of(study, name: str, step=3, progress=0.0, n=16):
    cfg = controls.continued(study.cfg, STEPS)
    return controls.Controlled(cfg, controls.VARIANTS[name].scored, V - 1, seed=5).draw(
        some_rows(study, n), step, progress
    )


def gradients(trainer, name: str) -> dict[str, torch.Tensor]:
    task = task_of(trainer.study, name)
    trainer.loss(task, controls.VARIANTS[name]).total.backward()
    found = {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}
    trainer.step.zero_grad(set_to_none=True)
    return found


def continuation(trainer, base, name: str, seed: int):
    line = controls.run_continuation(trainer, base, name, seed)
    timeless = {key: value for key, value in line.items() if "seconds" not in key and key != "tokens_per_s"}
    return timeless, {key: p.detach().clone() for key, p in trainer.parameters.items()}


def test_variants_see_the_same_noise_and_score_what_they_say(study):
    tasks = {name: task_of(study, name) for name in controls.VARIANTS}
    anchors = tasks["anchors"].terms["anchor"]
    for name, task in tasks.items():
        assert torch.equal(task.tokens_BL, tasks["plain"].tokens_BL), name
        assert torch.equal(task.terms["nelbo"].rows_N, tasks["plain"].terms["nelbo"].rows_N), name
        assert ("anchor" in task.terms) == (controls.VARIANTS[name].scored != "none"), name
    for name in ("probe", "tied", "gamma-off", "shuffled"):
        assert torch.equal(tasks[name].terms["anchor"].rows_N, anchors.rows_N)
    shuffled = tasks["shuffled"].terms["anchor"].targets_N
    assert not torch.equal(shuffled, anchors.targets_N)
    assert torch.equal(shuffled.sort().values, anchors.targets_N.sort().values)
    assert "anchor" not in task_of(study, "gamma-off", progress=0.5).terms


def test_rare_common_and_random_anchors_are_equal_in_number_and_weight(study):
    clean = some_rows(study).tokens_BL
    counts = torch.stack([(row[:, None] == row).sum(1) for row in clean]).flatten()
    for step in range(3):
        terms = {name: task_of(study, name, step).terms for name in ("rare", "common", "random")}
        numbers = {len(t["anchor"].rows_N) for t in terms.values()}
        assert len(numbers) == 1 and numbers.pop() > 10
        for t in terms.values():
            torch.testing.assert_close(t["anchor"].weights_N.sum(), t["nelbo"].weights_N.sum())
            assert set(t["anchor"].rows_N.tolist()) <= set(t["nelbo"].rows_N.tolist()), "masked ones alone"
            assert torch.equal(t["anchor"].targets_N, clean.flatten()[t["anchor"].rows_N])
        assert (counts[terms["rare"]["anchor"].rows_N] <= study.cfg.objective.tau).all()
        assert (counts[terms["common"]["anchor"].rows_N] > study.cfg.objective.tau).all()


def test_a_probe_changes_no_gradient_but_its_own(trainer, base):
    trainer.fork(base, controls.VARIANTS["probe"])
    plain, probe, anchors = (gradients(trainer, name) for name in ("plain", "probe", "anchors"))
    assert set(probe) - set(plain) == {"model.anchor_head.weight"}
    for name, gradient in plain.items():
        assert torch.equal(gradient, probe[name]), name
    assert not torch.equal(plain["model.embedding"], anchors["model.embedding"])


def test_a_tied_head_has_no_parameters_of_its_own(trainer, base):
    names = {name: {n for n, _, _ in trainer.trained(trainer.fork(base, v))} for name, v in controls.VARIANTS.items()}
    own = {"model.anchor_head.weight"}
    assert names["tied"] == names["plain"] == names["anchors"] - own
    trainer.fork(base, controls.VARIANTS["tied"])
    tied, plain = gradients(trainer, "tied"), gradients(trainer, "plain")
    assert not set(tied) & own
    assert not torch.equal(tied["model.head.weight"], plain["model.head.weight"]), "its loss is the head's, too"


def test_forking_twice_gives_the_same_continuation_to_the_bit(trainer, base):
    identity = base.identity
    first, weights = continuation(trainer, base, "anchors", 1)
    other, _ = continuation(trainer, base, "anchors", 2)
    continuation(trainer, base, "plain", 1)
    again, weights_again = continuation(trainer, base, "anchors", 1)
    assert first == again and first["bound"] != other["bound"]
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert base.identity == identity, "nobody trains the base itself"


def test_a_fork_is_the_base_going_on(trainer, base):
    """Moments and averages come along: one more step from the fork is the step that the base would have made."""
    study, variant = trainer.study, controls.BASES["probe"]

    def one_step(update):
        trainer.train(update, variant, study.cfg, study.base_text, 1, 10, 11, lambda i: 1.0)
        return trainer.state(update)

    update = trainer.fork(base, variant)
    forked = one_step(update)
    going_on = one_step(update)
    assert forked.updates == base.updates + 1 == going_on.updates - 1
    assert torch.equal(
        one_step(trainer.fork(base, variant)).averages["model.embedding"], forked.averages["model.embedding"]
    )
    cold = one_step(trainer.fork(base._replace(moments={}), variant))
    assert not torch.equal(cold.weights["model.embedding"], forked.weights["model.embedding"])


def test_equal_flops_are_equal(folder):
    study = controls.read_study(folder, 640, draws=2, words=[])
    anchors, plain = (controls.training_flops(study, scored) for scored in ("quarter", "none"))
    steps = controls.steps_of(study, controls.VARIANTS["plain"])
    assert steps > study.steps and abs(steps * plain - study.steps * anchors) <= plain / 2
    assert controls.steps_of(study, controls.VARIANTS["plain-equal-tokens"]) == study.steps


def test_replayed_networks_train_every_variant_alike(trainer, base, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record_on_a_cpu)
    for name in ("plain", "anchors", "probe", "tied", "gamma-off"):
        monkeypatch.setattr(trainer.step, "replays", None)
        launched, _ = continuation(trainer, base, name, 1)
        monkeypatch.setattr(trainer.step, "replays", Replays(trainer.model))
        replayed, _ = continuation(trainer, base, name, 1)
        assert replayed["bound"] == pytest.approx(launched["bound"], abs=1e-4), name


def test_a_way_that_fails_is_left(study, capsys):
    study.cfg.train.cuda_graphs = True  # which no CPU has
    with world(study.cfg.train) as ranks:
        _, way = controls.make_trainer(study, ranks, seed=1)
    assert way == "compile=none graphs=False"
    assert "needs a GPU" in capsys.readouterr().out


def test_from_end_to_end(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(controls, "MOST_EXTENSIONS", 1)
    monkeypatch.setattr(controls, "EXTENSION", 2)
    out, state = tmp_path / "results.jsonl", tmp_path / "state"
    line = ["run", str(folder), "--steps", "2", "--draws", "1", "--seconds", "1e9", "--state", str(state)]
    controls.main([*line, "--seeds", "1", "--out", str(out)])
    controls.main([*line, "--seeds", "2", "--out", str(out)])
    assert "from " + str(state) in capsys.readouterr().out, "the second call takes the first one's base"
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    expected = [(seed, name) for seed in (1, 2) for name in controls.VARIANTS]
    assert [(x["seed"], x["variant"]) for x in lines] == expected
    assert len({x["base_id"] for x in lines}) == 1
    # another base has other seeds, and its results are not paired with these
    more = tmp_path / "more.jsonl"
    controls.main(
        [
            *line[:-2],
            "--seeds",
            "1",
            "--base",
            "anchors",
            "--variants",
            "plain,anchors",
            "--done",
            str(out),
            "--out",
            str(more),
        ]
    )
    assert [json.loads(x)["seed"] for x in more.read_text().splitlines()] == [3, 3]
    controls.main([*line, "--seconds", "0", "--seeds", "3", "--out", str(out)])
    assert len(out.read_text().splitlines()) == 20, "no time, nothing begun"

    capsys.readouterr()
    document = tmp_path / "report.json"
    controls.main(["report", str(out), str(more), "--json", str(document), "--plot", str(tmp_path / "plot.png")])
    table = capsys.readouterr().out
    found = {row["variant"]: row for row in json.loads(document.read_text())["variants"]}
    assert list(found) == list(controls.VARIANTS) and found["anchors"]["seeds"] == 3
    bounds = {name: np.array([x["bound"] for x in lines if x["variant"] == name]) for name in controls.VARIANTS}
    pairs = bounds["probe"] - bounds["plain"]
    assert found["probe"]["minus plain"]["pairs"] == pytest.approx(pairs)
    mean, half = found["probe"]["minus plain"]["interval"]
    assert mean == pytest.approx(pairs.mean()) and half == pytest.approx(
        12.706 * abs(pairs[0] - pairs[1]) / 2, rel=1e-3
    )
    assert "| tied - anchors |" in table and "| shuffled | 2 |" in table
    assert (tmp_path / "plot.png").stat().st_size > 1000

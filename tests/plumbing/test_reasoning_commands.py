"""`adlm reason`: its commands and tables, mistakes in one line, and what earlier versions left."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from reasoning_runs import TINY, settings

from adlm import cli, config
from adlm.migration import migrate
from adlm.reasoning import tasks
from adlm.reasoning.command import PAPER, mcnemar, paired
from adlm.reasoning.generators import Shape
from adlm.reasoning.logic import canonical
from adlm.reasoning.methods import plans_of
from adlm.reasoning.tasks import PROSQA, PROSQA_2HOP, generate, load_splits
from adlm.reasoning.training import train
from adlm.schema import CheckpointConfig
from adlm.tables import METHODS, TASKS
from adlm.training.checkpoint import Checkpoints
from adlm.training.metrics import read_metrics
from adlm.training.parallel import World


def test_mcnemar_and_the_table_of_pairs(tmp_path):
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 15) == pytest.approx(0.0414, abs=1e-4)  # R: binom.test(5, 20)
    assert mcnemar(1, 7) == pytest.approx(0.0703, abs=1e-4)
    for name, right in (("a", [1, 1, 0]), ("b", [1, 0, 0]), ("c", [1, 1])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"question": f"q{i}", "correct": bool(r)}) for i, r in enumerate(right)]
        (tmp_path / name / "answers-x.jsonl").write_text("\n".join(lines) + "\n")
    (row,) = paired([str(tmp_path / name) for name in "abc"])
    assert (row["only_first"], row["only_second"], row["n"], row["p"]) == (1, 0, 3, 1.0)


def run(capsys, *argv):
    status = cli.main(["reason", *argv])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_more_test_questions_than_were_held_out_are_none_of_the_training(tmp_path, monkeypatch):
    """Of a world so small that chance would ask many of the training questions."""
    small = replace(PROSQA_2HOP, shape=Shape(hops=1, nodes=4, words=4, names=3, balanced=True, terse=True))
    monkeypatch.setattr(tasks, "PROSQA_2HOP", small)
    cfg = settings(tmp_path / "run", "method=cot", "reason.epochs=1", "reason.n_train=60")
    splits = load_splits(cfg.reason, cfg.seed)
    train(cfg)
    assert cli.main(["reason", "eval", cfg.out, "train.device=cpu", "reason.n_test=60"]) == 0
    lines = (tmp_path / "run" / "answers-generated.jsonl").read_text().splitlines()
    asked = [json.loads(line)["question"] for line in lines]
    assert len(asked) == 60
    assert asked[:8] == [example.question for example in splits.tests["generated"]]
    trained = {canonical(example) for example in splits.train}
    assert not trained & {canonical(splits.train[0]._replace(question=question)) for question in asked}


def test_commands(tmp_path, capsys):
    out = tmp_path / "runs" / "a"
    status, printed, _ = run(capsys, "train", *TINY, f"out={out}", "method=acot", "--json")
    assert status == 0
    result = json.loads(printed.splitlines()[-1])
    assert result["finished"]
    assert set(result["tests"]) == {"generated"}
    assert [stage["stage"] for stage in result["stages"]] == [0, 1, 2, 3]
    assert (out / "export" / "model.safetensors").is_file()
    assert (out / "curves.png").is_file()

    file = tmp_path / "published_test.json"
    file.write_text(
        json.dumps([e._asdict() for e in generate(replace(PROSQA, shape=Shape(hops=2, nodes=6)), 12, seed=9)])
    )
    status, printed, _ = run(capsys, "eval", str(out), f"reason.test_path={file}", "reason.n_test=8", "--json")
    assert status == 0
    scores = json.loads(printed.splitlines()[-1])[str(out)]
    assert scores["generated"] == result["tests"]["generated"]
    assert scores["published_test"]["n"] == 12
    answers = [json.loads(line) for line in (out / "answers-published_test.jsonl").read_text().splitlines()]
    assert len(answers) == 12
    assert set(answers[0]) == {"question", "answer", "written", "correct", "anchors"}
    assert sum(answer["correct"] for answer in answers) == scores["published_test"]["correct"]
    assert scores["published_test"]["slot_1"] <= 1 and scores["published_test"]["anchor_nats"] > 0
    valid = [event for event in read_metrics(out) if event["kind"] == "valid"]
    assert "slot_1" not in valid[0] and {"slot_1", "slot_2", "anchor_nats"} <= set(valid[-1])
    trained = [event for event in read_metrics(out) if event["kind"] == "train"]
    assert trained[-1]["tokens_per_s"] > trained[-1]["examples_per_s"] > 0

    question = answers[0]["question"]
    status, printed, _ = run(capsys, "ask", str(out), question, "train.device=cpu")
    assert status == 0
    assert printed.startswith(f"anchors: {' -> '.join(answers[0]['anchors'])}\n")
    assert "answer" in printed.splitlines()[-1]

    status, printed, _ = run(capsys, "table", str(out))
    assert status == 0
    assert "published_test" in printed

    status, printed, _ = run(capsys, "data", *TINY, str(file))
    assert status == 0
    assert "published_test" in printed
    assert "with 2 steps" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs one of train, eval, ask, table, data"),
        (["trian"], "did you mean 'train'"),
        (["eval"], "needs a run folder"),
        (["eval", "nowhere"], "not a finished reasoning run"),
        (["table", "nowhere"], "results.json"),
        (["train", "task=gsm8k", "out=x"], "data.path"),
        (["train", "method=acott"], "did you mean 'acot'"),
        (["train", "train.steps=5"], "train.steps: `adlm reason` does not read this key; reason.epochs rules"),
        (
            ["train", "checkpoint.init_from=x"],
            "checkpoint.init_from: `adlm reason` does not read this key; reason.base rules",
        ),
        (["train", "data=lm1b"], "data=...: `adlm reason` does not read this group"),
        (["train", "data.name=lm1b"], "data.name: `adlm reason` does not read this key"),
        (["ask", "nowhere"], "one question in quotes"),
        (["data", "task=gsm8k"], "name a file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    status, _, error = run(capsys, *argv)
    assert status == 1
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_tables():
    assert set(METHODS) - set(PAPER) == {"acot-kept", "acot-triple"}
    assert all(set(row) <= set(TASKS) for row in PAPER.values())
    for method in METHODS:
        assert config.load([f"method={method}", "task=prosqa", "algo=ar"]).reason.method == method
    for task in TASKS:
        assert config.load([f"task={task}", "method=acot", "algo=ar"]).reason.task == task
    paper = config.load(["algo=ar", "task=prosqa", "method=acot"])
    assert (paper.reason.epochs, paper.reason.epochs_per_stage, paper.reason.slots) == (50, 5, 6)
    assert plans_of(paper.reason)[-1].removed and paper.objective.gamma == 1.0
    paper = config.load(["task=gsm8k", "method=acot", "algo=ar"])
    assert (paper.reason.epochs, paper.reason.epochs_per_stage, paper.reason.slots) == (25, 3, 2)
    assert not plans_of(paper.reason)[-1].removed
    coconut = config.load(["experiment=coconut-gsm8k", "algo=ar"])
    assert [plan.slots for plan in plans_of(coconut.reason)] == [0, 2, 4, 6, 6]


def test_a_small_prosqa_of_an_earlier_version_is_not_set_beside_the_paper(tmp_path, capsys, monkeypatch):
    """Every shape of ProsQA was called prosqa then; its settings tell which it is."""
    monkeypatch.chdir(tmp_path)  # long paths would be wrapped
    shape = {"hops": 2, "nodes": 6, "words": 8, "names": 4, "balanced": True, "terse": True}
    facts = {"n": 10, "correct": 9, "accuracy": 0.9, "low": 0.6, "high": 1.0, "tokens": 3.0}
    results = {"task": "prosqa", "method": "acot", "network": "own", "finished": True, "stage": 3, "valid": facts}
    for name, settings_then in (("small", shape), ("whole", {}), ("other", shape | {"hops": 4})):
        (tmp_path / name / "export").mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(results | {"tests": {}}))
        told = {"reason": {"task": "prosqa", "method": "acot", **settings_then}}
        (tmp_path / name / "export" / "reason.json").write_text(json.dumps(told))
    assert cli.main(["reason", "table", "small", "whole", "other"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {name: next(x for x in lines if x.rstrip(" │").endswith(name)) for name in ("small", "whole", "other")}
    assert "prosqa-2hop" in shown["small"] and "97.3" not in shown["small"]
    assert "97.3" in shown["whole"] and "97.3" not in shown["other"]


def test_settings_of_earlier_versions(tmp_path):
    """What shaped the questions of ProsQA is the name of a task today; a shape without a name is refused."""
    shape = {"hops": 2, "nodes": 6, "words": 8, "names": 4, "balanced": True, "terse": True}
    stored = {"reason.task": "prosqa", "reason.reset_optimizer": False, "reason.epochs": 3}
    stored |= {f"reason.{key}": value for key, value in shape.items()}
    assert migrate(stored, "x") == {"reason.task": "prosqa-2hop", "reason.epochs": 3}
    with pytest.raises(ValueError, match=r"x: reason\.hops=3 is not supported any more"):
        migrate(stored | {"reason.hops": 3}, "x")


@pytest.mark.parametrize(
    ("task", "method", "per_stage", "removes", "today"),
    [
        ("prosqa", "acot", 1, True, "acot"),
        ("prosqa-2hop", "acot", 1, False, "acot-kept"),
        ("gsm8k", "acot", 1, False, "acot"),
        ("gsm8k", "acot", 1, True, None),
        ("prosqa", "acot", 3, True, "acot-triple"),
        ("prosqa", "acot", 3, False, None),
        ("prosqa", "acot", 2, True, None),
        ("gsm8k", "coconut", 2, False, "coconut-double"),
        ("prosqa", "coconut", 1, True, "coconut"),
        ("prosqa", "icot", 2, True, None),
        ("prosqa", "pause", 2, True, "pause"),
    ],
)
def test_methods_of_earlier_versions(task, method, per_stage, removes, today):
    """Slots of a stage and whether acot removes steps were keys; today the name of the method says both."""
    stored = {"reason.task": task, "reason.method": method, "reason.slots_per_stage": per_stage}
    stored |= {"reason.remove_steps": removes}
    if today is None:
        with pytest.raises(ValueError, match=f"no method of today is reason.method={method} for {task} with"):
            migrate(stored, "x")
    else:
        assert migrate(stored, "x") == {"reason.task": task, "reason.method": today}
        typed = [f"task={task}", f"method={method}", f"reason.slots_per_stage={per_stage}", "algo=ar"]
        found = config.load([*typed, f"reason.remove_steps={str(removes).lower()}"])
        assert found.reason.method == today


def test_epochs_between_validations_are_not_taken_for_steps():
    assert migrate({"reason.valid_every": 5, "train.valid_every": 10_000}, "x") == {"train.valid_every": 10_000}
    with pytest.raises(
        ValueError, match=r"reason\.valid_every=5 is not .*train\.valid_every says it, in optimizer steps"
    ):
        config.load(["reason.valid_every=5"])


def test_files_of_earlier_versions():
    """A reasoning run had files of its own beside those of a corpus, which it did not read."""
    stored = {"data.path": "", "data.valid_path": "", "reason.train_path": "a.json", "reason.valid_path": ""}
    assert migrate(stored, "x") == {"data.path": "a.json", "data.valid_path": ""}
    assert migrate(dict(reversed(stored.items())), "x") == {"data.path": "a.json", "data.valid_path": ""}
    assert migrate(stored | {"reason.train_path": "", "data.path": "b.txt"}, "x")["data.path"] == "b.txt"
    assert config.load(["task=gsm8k", "reason.train_path=c.json", "algo=ar"]).data.path == "c.json"


def test_a_checkpoint_of_an_earlier_version(tmp_path):
    """Accuracy was kept where lower is better now, and the weight of the anchors was a key of reasoning."""
    tree = asdict(settings(tmp_path, "method=acot"))
    tree["reason"] |= {"task": "prosqa", "gamma": 0.5, "hops": 2, "nodes": 6, "words": 8, "names": 4}
    tree["reason"] |= {"balanced": True, "terse": True}
    tree["objective"]["gamma"] = 0.0
    progress = {"step": 4, "best": 0.75, "best_step": 2, "stages": [{"stage": 0}]}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), World(0, 1, torch.device("cpu"), "fp32", "none"))
    checkpoints.path(4).mkdir(parents=True)
    (checkpoints.path(4) / "state.json").write_text(json.dumps({"step": 4, "progress": progress, "config": tree}))
    info = checkpoints.read_info(4)
    assert (info["best"], info["extra"]) == (0.25, {"stages": [{"stage": 0}]})
    assert (info["config"]["reason"]["task"], info["config"]["objective"]["gamma"]) == ("prosqa-2hop", 0.5)
    assert not {"gamma", "hops"} & set(info["config"]["reason"])


def test_a_run_in_another_order_of_examples_is_not_continued(tmp_path):
    """Its weights load: only whoever continues it asks."""
    cfg = settings(tmp_path, "method=icot")
    tree = asdict(cfg)
    tree["reason"] |= {"fresh": True}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), World(0, 1, torch.device("cpu"), "fp32", "none"))
    checkpoints.path(4).mkdir(parents=True)
    (checkpoints.path(4) / "state.json").write_text(json.dumps({"step": 4, "tokenizer": "x", "config": tree}))
    checkpoints.read_info(4)
    checkpoints.read_info(4, resumed=("train", "model"))  # a run of `adlm train`, which never read it
    with pytest.raises(ValueError, match=r"reason\.fresh=True is not supported any more"):
        checkpoints.read_info(4, resumed=("train", "reason"))

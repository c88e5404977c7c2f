"""Staged training: schedule, loss falls, resume in the middle of a stage."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hugging_face import make_folder
from reasoning_runs import settings

from adlm import cli
from adlm.reasoning.answers import Answerer
from adlm.reasoning.generators import PROSQA_NAMES, STORY_KINDS, STORY_NAMES, Shape, retold
from adlm.reasoning.logic import distances, read_either_or, read_fact, sentences
from adlm.reasoning.methods import plans_of
from adlm.reasoning.runs import load_run, read_results
from adlm.reasoning.tasks import PROSQA, generate
from adlm.reasoning.training import ReasoningSetup, StageSchedule, learn_stories, train
from adlm.tables import METHODS
from adlm.training import run as runs
from adlm.training.checkpoint import read_weights
from adlm.training.metrics import read_metrics
from adlm.training.parallel import Interruption, world

# ---- the schedule


def test_schedule_visits_every_example_in_every_epoch(tmp_path):
    schedule = StageSchedule(settings(tmp_path), 40)  # batches of 16, 16 and 8
    assert (schedule.per_epoch, schedule.steps) == (3, 24)
    for epoch in range(3):
        seen = np.concatenate([schedule.examples(3 * epoch + i) for i in range(3)])
        assert sorted(seen) == list(range(40))
    assert len(schedule.examples(2)) == 8
    assert not np.array_equal(schedule.examples(0), schedule.examples(3))


def test_stages_follow_epochs(tmp_path):
    schedule = StageSchedule(settings(tmp_path, "method=icot"), 40)  # stages 0, 1, 2 and the one without a trace
    stages = [schedule.stage(step) for step in range(schedule.steps)]
    assert stages == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    assert [step for step in range(24) if schedule.starts_stage(step)] == [0, 6, 12, 18]
    assert schedule.within_stage(7) == (1, 6)
    longer = StageSchedule(settings(tmp_path, "method=icot", "reason.epochs=12"), 40)
    assert [step for step in range(36) if longer.starts_stage(step)] == [0, 6, 12, 18]
    assert longer.within_stage(35) == (17, 18)
    assert [step for step in range(1, 37) if longer.is_validated(step)] == [6, 12, 18, 24, 36]


def test_without_validations_on_the_way_there_is_one_at_the_end_of_each_stage(tmp_path, monkeypatch):
    asked, seeds = [], set()
    real, seed = Answerer.answer, torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: (seeds.add(number), seed(number))[1])
    monkeypatch.setattr(Answerer, "answer", lambda *args: asked.append(args[1]) or real(*args))
    result = train(settings(tmp_path, "method=icot", "train.valid_every=0"))
    assert len(asked) == 5  # validation questions at the end of each stage, then the test questions
    assert [event["step"] for event in read_metrics(tmp_path) if event["kind"] == "valid"] == [6, 12, 18, result.step]
    assert result.valid["accuracy"] == result.stages[-1]["accuracy"]
    assert len(seeds) >= result.step > 1, "dropout is drawn anew at every step"
    state = next((tmp_path / "checkpoints").glob("step-*/state.json"))
    assert json.loads(state.read_text())["decay_all"], "as the published recipe does"


def test_too_few_epochs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="never reaches the last of the 4 stages"):
        StageSchedule(settings(tmp_path, "method=icot", "reason.epochs=6"), 40)


# ---- learning


@pytest.mark.parametrize("terse", [False, True])
def test_stories_are_told_again_and_thought_through(terse):
    rng, retellings = random.Random(1), set()
    for i in range(100):
        plain = i % 2 == 0
        told = retold(rng, Shape(words=8, names=4, terse=terse), plain)
        story = sentences(told.question)
        assert (read_either_or(story[-1]) is None) == plain
        story, again = story[: STORY_NAMES + STORY_KINDS], sentences(told.steps[0]) if told.steps else []
        facts = [read_fact(sentence) for sentence in story]
        who = {fact.who for fact in facts}
        assert len(who) == len(facts) == STORY_NAMES + STORY_KINDS
        assert len(who & set(PROSQA_NAMES[:4])) == STORY_NAMES
        assert set(again) <= set(story) and len(set(again)) == len(again)
        assert len(again) == len(story) or not plain
        retellings.add(len(again))
        follows = [read_fact(sentence) for sentence in sentences(told.answer)]
        assert sorted(fact.who for fact in follows) == sorted(who)  # of everyone, two statements away and not fewer
        assert all(distances(facts, fact.who)[fact.what] == 2 for fact in follows)
    assert retellings == set(range(STORY_NAMES + STORY_KINDS + 1))


def test_the_question_in_a_story_tells_nothing():
    """Whoever is asked about and whatever the candidates are: what follows is right of one of them as often as not."""
    rng, right, named = random.Random(2), 0, 0
    for _ in range(2000):
        told = retold(rng, Shape(words=8, names=4, terse=True), plain=False)
        asked = read_either_or(told.question)
        assert asked is not None
        first = read_fact(sentences(told.answer)[0])
        named += first.who == asked["who"]
        truth = next(f.what for f in map(read_fact, sentences(told.answer)) if f.who == asked["who"])
        right += truth in (asked["one"], asked["two"])
    # four standard errors: one of six speaks first, two of four kinds are named
    assert abs(named / 2000 - 1 / 6) < 4 * (5 / 36 / 2000) ** 0.5
    assert abs(right / 2000 - 1 / 2) < 4 * (1 / 4 / 2000) ** 0.5


def test_stories_come_before_the_first_stage_and_repeat_exactly(tmp_path):
    """The warm-up changes where the stages start, is a function of the seed, and is refused where it has no stories."""
    options = ("method=no-cot", "reason.epochs=1", "train.global_batch_size=8", "reason.n_train=8", "data.tokenizer=")
    weights = []
    for name, steps in (("none", 0), ("one", 3), ("two", 3)):
        train(settings(tmp_path / name, *options, f"reason.story_steps={steps}"))
        weights.append(load_run(str(tmp_path / name), torch.device("cpu")).network.state_dict())
    none, one, two = weights
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(none[key], one[key]) for key in one)
    # told beforehand, for several methods: the same weights in the end
    cfg = settings(tmp_path / "three", *options, "reason.story_steps=3")
    with world(cfg.train) as ranks:
        setup = ReasoningSetup(cfg, ranks)
        learn_stories(setup)
    train(cfg, setup.network.state_dict())
    three = load_run(str(tmp_path / "three"), torch.device("cpu")).network.state_dict()
    assert all(torch.equal(one[key], three[key]) for key in one)
    with pytest.raises(ValueError, match=r"reason\.story_steps=3: there are no stories for reason\.task=prontoqa"):
        train(
            settings(tmp_path / "other", *options, "task=prontoqa", "reason.story_steps=3", "reason.epochs_per_stage=1")
        )
    with pytest.raises(ValueError, match=r"a story of .* has \d+ tokens and model\.length leaves room for 39"):
        train(settings(tmp_path / "long", *options, "reason.story_steps=3", "model.length=40"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(tmp_path, method):
    """A few steps on one batch: the loss of the first and of the last stage falls."""
    cfg = settings(tmp_path, f"method={method}", "reason.n_train=16", "train.global_batch_size=16", "reason.epochs=40",
                   "reason.epochs_per_stage=10", "train.valid_every=40", "optim.schedule=constant",
                   f"reason.slots={2 * METHODS.load(method).slots_per_stage}")  # fmt: skip
    train(cfg)
    events = [e for e in read_metrics(tmp_path) if e["kind"] == "train"]
    stages = [
        [e["nll"] + e.get("anchor", 0.0) for e in events if e["stage"] == stage]
        for stage in (events[0]["stage"], events[-1]["stage"])
    ]
    assert stages[0][-1] < 0.9 * stages[0][0], stages[0]
    assert stages[1][-1] < stages[1][0], stages[1]  # what was learned before helps: it starts lower
    anchored = {e["stage"] for e in events if "anchor" in e}
    assert anchored == {stage for stage, plan in enumerate(plans_of(cfg.reason)) if plan.anchored and plan.slots}


def same_weights(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


class Signal(Interruption):
    """Asks to stop after some steps, as SIGTERM would."""

    after = 0

    def __enter__(self):
        self.asked = 0
        return self

    def __exit__(self, *exception):
        pass

    @property
    def requested(self):
        self.asked += 1
        return self.asked >= self.after

    @requested.setter
    def requested(self, value):
        pass


@pytest.mark.parametrize("method", ["acot", "coconut"])
def test_resume_in_the_middle_of_a_stage_is_exact(tmp_path, monkeypatch, method):
    extra = (f"method={method}", "model.dropout=0.1", "optim.ema=0.9", "train.valid_every=3")
    whole = train(settings(tmp_path / "whole", *extra))
    for stop in (4, 12, 20):  # inside a stage, at the border of two, inside the last
        monkeypatch.setattr(runs, "Interruption", type("Stop", (Signal,), {"after": stop}))
        part = train(settings(tmp_path / f"part{stop}", *extra))
        assert (part.step, part.finished) == (stop, False)
        monkeypatch.undo()
        result = train(settings(tmp_path / f"part{stop}", *extra))
        assert result[1:] == whole[1:]
        networks = [load_run(str(tmp_path / name), torch.device("cpu")).network for name in ("whole", f"part{stop}")]
        assert same_weights(*networks)
        drop = {"time", "tokens_per_s", "examples_per_s", "memory_gib"}
        events = [
            [{k: v for k, v in e.items() if k not in drop} for e in read_metrics(tmp_path / name)]
            for name in ("whole", f"part{stop}")
        ]
        assert events[0] == events[1]


def test_the_optimizer_starts_anew_with_every_stage(tmp_path, monkeypatch):
    reset, real = [], runs.Run.reset_optimizer
    monkeypatch.setattr(runs.Run, "reset_optimizer", lambda self: reset.append(self.step) or real(self))
    train(settings(tmp_path, "method=icot"))
    assert reset == [0, 0, 6, 12, 18], "at the start of the run, and of each stage"


def test_micro_batches_change_nothing(tmp_path):
    losses = []
    for size in (16, 4):
        train(settings(tmp_path / str(size), "method=coconut", f"train.batch_size={size}", "reason.epochs=7"))
        losses.append([e["nll"] for e in read_metrics(tmp_path / str(size)) if e["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_best_checkpoint_of_the_last_stage_is_kept(tmp_path, monkeypatch):
    """Accuracies are dictated; the weights exported must be those of the best validation, not the last."""
    dictated = iter([0.9, 0.2, 0.3, 0.4, 0.1, 0.8, 0.5, 0.7])  # per epoch; the last stage has epochs 7 and 8
    snapshots = {}
    real = Answerer.answer

    def answer(self, examples, ranks):
        accuracy, texts = real(self, examples, ranks)
        if (value := next(dictated, None)) is not None:
            snapshots[len(snapshots)] = {k: v.clone() for k, v in self.network.state_dict().items()}
            accuracy = accuracy._replace(n=10, correct=round(10 * value))
        return accuracy, texts

    monkeypatch.setattr(Answerer, "answer", answer)
    result = train(settings(tmp_path, "method=icot", "train.valid_every=3"))
    exported = load_run(str(tmp_path), torch.device("cpu")).network.state_dict()
    assert all(torch.equal(exported[k], snapshots[7][k]) for k in exported)  # 0.7 beats 0.5; 0.9 was another stage's
    assert [s["accuracy"] for s in result.stages] == [0.2, 0.4, 0.8, 0.7]


@pytest.mark.parametrize("where", ["middle", "zip header"])
def test_a_corrupt_best_checkpoint_is_not_exported(tmp_path, monkeypatch, capsys, where):
    dictated = iter([0.9, 0.5])  # the best is not the last
    real = Answerer.answer

    def answer(self, examples, ranks):
        accuracy, texts = real(self, examples, ranks)
        value = next(dictated, 0.1)
        return accuracy._replace(n=10, correct=round(10 * value)), texts

    monkeypatch.setattr(Answerer, "answer", answer)
    extra = ("method=no-cot", "reason.epochs=2", "train.valid_every=3")
    train(settings(tmp_path, *extra))
    assert json.loads((tmp_path / "export" / "reason.json").read_text())["step"] == 3
    (victim,) = (tmp_path / "checkpoints" / "step-00000003").glob("*.distcp")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2 if where == "middle" else 0] ^= 1
    victim.write_bytes(data)
    train(settings(tmp_path, *extra))
    assert "the best checkpoint, of step 3, is corrupt" in capsys.readouterr().err
    assert json.loads((tmp_path / "export" / "reason.json").read_text())["step"] == 6
    exported = load_run(str(tmp_path), torch.device("cpu")).network.model.state_dict()
    last, _ = read_weights(tmp_path, ema=True)
    assert all(torch.equal(x, exported[name.removeprefix("model.")]) for name, x in last.items())


def test_changed_questions_are_refused(tmp_path):
    path = tmp_path / "train.json"
    examples = [{"question": f"What is {n} + 1?", "steps": [f"{n} + 1"], "answer": str(n + 1)} for n in range(20)]
    path.write_text(json.dumps(examples))
    line = ("task=gsm8k", "method=no-cot", "reason.epochs=1", f"data.path={path}", "reason.n_valid=4")
    line += ("reason.n_train=0", "reason.n_test=0", "model.length=64")
    train(settings(tmp_path / "run", *line))
    examples[3]["question"] = "What is 7 + 1?"
    path.write_text(json.dumps(examples))
    with pytest.raises(ValueError, match="was trained on other data"):
        train(settings(tmp_path / "run", *line))


def test_another_run_is_not_continued(tmp_path):
    train(settings(tmp_path, "method=no-cot", "reason.epochs=1"))
    with pytest.raises(ValueError, match=r"reason\.method=no-cot"):
        train(settings(tmp_path, "method=cot", "reason.epochs=1"))
    with pytest.raises(ValueError, match=r"started with reason\.n_test=8, now it is 9"):  # a training question more
        train(settings(tmp_path, "method=no-cot", "reason.epochs=1", "reason.n_test=9"))
    longer = train(settings(tmp_path, "method=no-cot", "reason.epochs=2"))
    assert longer.step == 6
    with pytest.raises(ValueError, match=r"checkpoint\.resume"):
        train(settings(tmp_path, "method=no-cot", "checkpoint.resume=false"))


def test_examples_longer_than_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.length leaves room for 19"):
        train(settings(tmp_path, "model.length=20"))


def test_hugging_face_base(tmp_path):
    """A tiny GPT-2 folder through training, export, evaluation."""
    from adlm.data.tokenizers import load_tokenizer
    from adlm.reasoning.methods import whole_text

    examples = generate(replace(PROSQA, shape=Shape(hops=2, nodes=6)), 50, 1)
    make_folder(tmp_path / "base", load_tokenizer("bpe-420", map(whole_text, examples)))
    cfg = settings(tmp_path / "run", f"reason.base={tmp_path / 'base'}", "method=coconut")
    result = train(cfg)
    assert result.finished
    run = load_run(str(tmp_path / "run"), torch.device("cpu"))
    assert type(run.network).__name__ == "HuggingFaceNetwork"
    assert run.network.head.weight.shape[0] == run.tokenizer.vocab_size
    assert cli.main(["reason", "eval", str(tmp_path / "run"), "train.device=cpu", "reason.n_test=8"]) == 0
    assert read_results(tmp_path / "run")["tests"] == result.tests  # the same questions, the same answers


def test_a_run_without_test_questions_is_exported(tmp_path):
    result = train(settings(tmp_path / "run", "method=cot", "reason.epochs=1", "reason.n_test=0"))
    assert result.finished and result.tests == {}
    assert load_run(str(tmp_path / "run"), torch.device("cpu")).stage == 0


# ---- mixing, sorting, a shared first stage


def test_mixing_draws_earlier_stages(tmp_path):
    schedule = StageSchedule(settings(tmp_path, "method=icot", "reason.mixing=0.25"), 40)
    assert schedule.plans_at(3, 4) == [schedule.plans[0]] * 4
    drawn = [schedule.plans.index(plan) for step in range(18, 24) for plan in schedule.plans_at(step, 400)]
    assert schedule.plans_at(18, 8) == schedule.plans_at(18, 8) != schedule.plans_at(19, 8)
    fractions = [drawn.count(stage) / len(drawn) for stage in range(4)]
    for fraction, wanted in zip(fractions, (0.25 / 3, 0.25 / 3, 0.25 / 3, 0.75)):
        assert abs(fraction - wanted) < 4 * (wanted * (1 - wanted) / len(drawn)) ** 0.5
    for method in ("acot", "coconut"):  # thoughts of different numbers go into different micro-batches
        result = train(settings(tmp_path / method, f"method={method}", "reason.mixing=0.5", "reason.epochs=7"))
        assert result.finished


def test_sorted_batches_hold_the_same_examples(tmp_path, monkeypatch):
    monkeypatch.setattr("adlm.reasoning.training.SORTED_BATCHES", 4)
    lengths = np.random.default_rng(0).integers(10, 90, 100)
    # batches of 16: six and a small one
    plain, kept = (StageSchedule(settings(tmp_path), 100, given) for given in (None, lengths))
    for epoch in (0, 1):
        steps = [[s.examples(7 * epoch + i) for i in range(7)] for s in (plain, kept)]
        assert sorted(np.concatenate(steps[1])) == list(range(100))
        for first, end in ((0, 4), (4, 7)):
            windows = [np.sort(np.concatenate(batches[first:end])) for batches in steps]
            assert np.array_equal(*windows)
        padding = [sum(len(b) * lengths[b].max() for b in batches) for batches in steps]
        assert padding[1] < 0.8 * padding[0]
    assert not np.array_equal(np.sort(kept.examples(0)), np.sort(kept.examples(7)))


def test_a_shared_first_stage_changes_nothing(tmp_path, capsys):
    extra = (f"reason.stage0={tmp_path / 'shared'}", "reason.mixing=0.2")
    alone = train(settings(tmp_path / "alone", "method=acot", "reason.mixing=0.2"))
    train(settings(tmp_path / "first", "method=icot", *extra))
    (file,) = (tmp_path / "shared").iterdir()
    capsys.readouterr()
    taken = train(settings(tmp_path / "second", "method=acot", *extra))
    assert "the first stage is taken over: step 6" in capsys.readouterr().err
    assert taken[1:] == alone[1:]
    networks = [load_run(str(tmp_path / name), torch.device("cpu")).network for name in ("alone", "second")]
    assert same_weights(*networks)
    train(settings(tmp_path / "other", "method=icot", *extra, "seed=2"))  # another seed, another first stage
    assert len([*(tmp_path / "shared").iterdir()]) == 2
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"stage0-.* cannot be read"):
        train(settings(tmp_path / "third", "method=coconut", *extra))
    with pytest.raises(ValueError, match=r"optim\.ema=0\.9 must be 0"):
        train(settings(tmp_path / "ema", "method=icot", *extra, "optim.ema=0.9"))


def test_test_questions_that_do_not_fit_are_refused(tmp_path):
    long = tmp_path / "long.json"
    long.write_text(json.dumps([e._asdict() for e in generate(PROSQA, 2, seed=1)]))
    with pytest.raises(ValueError, match=r"set long: example \d has \d+ tokens .* the model reads 127"):
        train(settings(tmp_path / "run", "method=cot", f"reason.test_path={long}"))
    train(settings(tmp_path / "run", "method=cot", "reason.epochs=1"))
    assert cli.main(["reason", "eval", str(tmp_path / "run"), f"reason.test_path={long}", "train.device=cpu"]) == 1


def test_a_model_from_scratch_is_warned_about(tmp_path, capsys):
    train(settings(tmp_path, "method=cot", "reason.epochs=1"))
    assert "warning: a small model from scratch" in capsys.readouterr().err

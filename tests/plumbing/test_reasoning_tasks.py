"""Tasks: published formats, anchors, grading, the language of logic, and splits that do not leak."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from adlm import cli
from adlm.reasoning import logic, tasks
from adlm.reasoning.generators import Shape
from adlm.reasoning.logic import is_guessed
from adlm.reasoning.methods import Example, written_answer
from adlm.reasoning.tasks import (
    PRONTOQA,
    PROSQA,
    PROSQA_2HOP,
    generate,
    load_held_out,
    load_splits,
    load_tests,
    read_gsm8k,
    same_number,
)
from adlm.schema import DataConfig, ReasonConfig

SMALL = ReasonConfig(task="prosqa-2hop", n_train=60, n_valid=20, n_test=20)


# ---- GSM8K


def test_gsm8k_reads_three_published_forms(tmp_path):
    record = {
        "question": "How many?",
        "answer": "She has 16 - 3 = <<16-3=13>>13.\nSo 13*.5=<<13*.5=6.5>>6.5\n#### 1,006",
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "b.txt").write_text("How many?||<<16-3=13>> <<13*.5=6.5>> #### 1,006\n")
    steps = ["<<16-3=13>>", "<<13*.5=6.5>>"]
    (tmp_path / "c.json").write_text(json.dumps([{"question": "How many?", "steps": steps, "answer": "1006"}]))
    wanted = Example("How many?", tuple(steps), "1006", ("16", "3", "13", "13", ".5", "6.5"))
    assert [read_gsm8k(tmp_path / name) for name in ("a.jsonl", "b.txt", "c.json")] == [[wanted]] * 3


def test_line_breaks_of_unicode_do_not_end_an_example(tmp_path):
    question = "How\u2028 many\x85?"
    record = {"question": question, "answer": "<<1+1=2>>2 #### 2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text(f"{question}||<<1+1=2>> #### 2\n", encoding="utf-8")
    for name in ("a.jsonl", "b.txt"):
        (example,) = read_gsm8k(tmp_path / name)
        assert example.question == question


def test_gsm8k_published_forms_agree(assets):
    original = read_gsm8k(assets / "data/gsm8k/test.jsonl")
    assert original == read_gsm8k(assets / "data/gsm8k_icot/test.txt")
    assert len(original) == 1319
    assert original[0].steps == ("<<16-3-4=9>>", "<<9*2=18>>")
    assert original[0].anchors == ("16", "3", "4", "9", "9", "2", "18")


def test_gsm8k_training_file_is_read_compressed(assets):
    assert len(read_gsm8k(assets / "data/gsm8k/train.jsonl.xz")) == 7473


@pytest.mark.parametrize(
    ("written", "right"), [("18", True), ("18.0", True), ("$18.", True), ("81", False), ("", False)]
)
def test_gsm8k_answers_are_numbers(written, right):
    assert same_number(written, "18") is right


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.json"])
def test_gsm8k_refuses_what_it_cannot_read(tmp_path, name):
    (tmp_path / name).write_text('{"question": "x", "answer": "no mark"}' if name != "b.txt" else "no bars")
    with pytest.raises(ValueError):
        read_gsm8k(tmp_path / name)


# ---- the language of logic


@pytest.mark.parametrize(
    ("sentence", "fact"),
    [
        ("Tom is a terpus.", logic.Fact("Tom", "terpus", True)),
        ("Every brimpus is a lempus.", logic.Fact("brimpus", "lempus", True)),
        ("Each yumpus is an impus.", logic.Fact("yumpus", "impus", True)),
        ("Tumpuses are gorpuses.", logic.Fact("tumpus", "gorpus", True)),
        ("Brimpuses are not brown.", logic.Fact("brimpus", "brown", False, denied=True)),
        ("Every lorpus is not happy.", logic.Fact("lorpus", "happy", False, denied=True)),
        ("Alex is happy.", logic.Fact("Alex", "happy", False)),
    ],
)
def test_statements_are_understood(sentence, fact):
    assert logic.read_fact(sentence) == fact


@pytest.mark.parametrize("sentence", ["It rains.", "tom lempus.", "Tom lempus"])
def test_other_sentences_are_refused(sentence):
    with pytest.raises(ValueError, match="not a statement"):
        logic.read_fact(sentence)


def test_what_follows():
    story = "Tom is a terpus. Every terpus is a brimpus. Alex is a rempus."
    assert logic.derivable_answers(f"{story} Is Tom a brimpus or rempus?") == {"Tom is a brimpus."}
    assert logic.derivable_answers(f"{story} Is Tom a brimpus or terpus?") == {"Tom is a brimpus.", "Tom is a terpus."}
    assert logic.derivable_answers(f"{story} Is Alex a brimpus or terpus?") == set()
    story = "Tumpuses are gorpuses. Gorpuses are not happy. Lorpuses are happy. Alex is a tumpus."
    assert logic.derivable_answers(f"{story} True or false: Alex is happy.") == {"False"}
    assert logic.derivable_answers(f"{story} True or false: Alex is not happy.") == {"True"}
    assert logic.derivable_answers(f"{story} True or false: Alex is brown.") == set()


@pytest.mark.parametrize("file", ["prosqa_valid", "prosqa_test", "prontoqa_valid", "prontoqa_test"])
def test_published_questions_have_one_answer(assets, file):
    examples = logic.read(assets / "data" / file.split("_")[0] / f"{file}.json")
    assert all(logic.derivable_answers(e.question) == {e.answer} for e in examples)


def test_published_anchors(assets):
    first = logic.read(assets / "data/prosqa/prosqa_valid.json")[0]
    assert first.anchors == ("Tom", " terpus", " brimpus", " lempus")
    records = json.loads((assets / "data/prontoqa/prontoqa_test.json").read_text())
    examples = logic.read(assets / "data/prontoqa/prontoqa_test.json")
    for record, example in zip(records, examples):
        assert [a.strip() for a in example.anchors] == [record["idx_to_symbol"][0], *record["chain_concepts"]]


def test_anchors_stand_in_the_trace(assets):
    for example in logic.read(assets / "data/prosqa/prosqa_test.json"):
        trace = "\n".join(example.steps)
        assert trace.startswith(example.anchors[0])
        assert all(anchor in trace for anchor in example.anchors)


def test_answers_are_found_after_the_last_mark():
    assert written_answer("Tom is a terpus.\n### Tom is a lempus.") == "Tom is a lempus."
    assert written_answer("### one ### two") == "two"
    assert written_answer("Tom is a lempus.") is None


# ---- splits


def keys(examples):
    return {logic.canonical(e) for e in examples}


def test_splits_do_not_leak():
    splits = load_splits(SMALL, seed=1)
    parts = [keys(part) for part in (splits.train, splits.valid, splits.tests["generated"])]
    assert [len(p) for p in parts] == [60, 20, 20]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


def test_the_order_of_sentences_does_not_make_a_new_question():
    one = Example("Tom is a terpus. Alex is a rempus. Is Tom a terpus or rempus?", (), "", ())
    turned = one._replace(question="Alex is a rempus. Tom is a terpus. Is Tom a terpus or rempus?")
    other = one._replace(question="Alex is a rempus. Tom is a terpus. Is Alex a terpus or rempus?")
    assert logic.canonical(one) == logic.canonical(turned) != logic.canonical(other)


def test_held_out_examples_do_not_depend_on_the_training_set():
    cfg = ReasonConfig(task="prosqa", n_train=5, n_valid=10, n_test=10)
    splits = load_splits(cfg, seed=4)
    valid, tests = load_held_out(ReasonConfig(task="prosqa", n_train=50, n_valid=10, n_test=10), seed=4)
    assert (splits.valid, splits.tests) == (valid, tests)


def test_published_test_questions_are_kept_out_of_training(tmp_path):
    train = load_splits(SMALL, seed=1).train
    records = [e._asdict() for e in train[:7]]
    (tmp_path / "leak.json").write_text(json.dumps(records))
    cfg = ReasonConfig(**{**vars(SMALL), "test_path": str(tmp_path / "leak.json")})
    splits = load_splits(cfg, seed=1)
    assert len(splits.tests["leak"]) == 7
    assert not keys(splits.train) & keys(splits.tests["leak"])
    assert len(splits.train) == 60


def test_easier_questions_are_for_training_only(monkeypatch):
    shape = Shape(hops=2, nodes=6, words=8, balanced=True)
    monkeypatch.setattr(tasks, "PROSQA_2HOP", replace(PROSQA, shape=shape))
    plain = load_splits(SMALL, seed=1)
    monkeypatch.setattr(tasks, "PROSQA_2HOP", replace(PROSQA, shape=shape, easier=0.25))
    splits = load_splits(SMALL, seed=1)
    assert Counter(len(e.steps) for e in splits.train) == {2: 45, 1: 15}
    assert {len(e.steps) for part in (splits.valid, splits.tests["generated"]) for e in part} == {2}
    assert all(logic.derivable_answers(e.question) == {e.answer} for e in splits.train)
    assert (plain.valid, plain.tests) == (splits.valid, splits.tests)


def test_several_test_files(tmp_path):
    records = [e._asdict() for e in load_splits(SMALL, seed=2).train[:5]]
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    both = ",".join(str(tmp_path / f"{name}.json") for name in ("one", "two"))
    _, tests = load_held_out(ReasonConfig(**{**vars(SMALL), "test_path": both}), seed=1)
    assert {name: len(part) for name, part in tests.items()} == {"generated": 20, "one": 5, "two": 5}
    with pytest.raises(ValueError, match="two test sets are called 'one'"):
        load_held_out(ReasonConfig(**{**vars(SMALL), "test_path": f"{both},{tmp_path / 'one.json'}"}), seed=1)


def test_files_give_all_splits(tmp_path):
    examples = generate(PROSQA, 40, seed=2)
    (tmp_path / "train.json").write_text(json.dumps([e._asdict() for e in examples]))
    cfg, data = ReasonConfig(task="prosqa", n_valid=10, n_train=25), DataConfig(path=str(tmp_path / "train.json"))
    splits = load_splits(cfg, 1, data)
    assert splits.train == examples[:25]
    assert splits.valid == examples[30:]
    assert splits.tests == {}
    test = ReasonConfig(**{**vars(cfg), "test_path": str(tmp_path / "train.json")})
    with pytest.raises(ValueError, match="held out"):
        load_splits(test, 1, data)


@pytest.mark.parametrize(
    ("task", "path", "message"),
    [
        ("gsm8k", "", "data.path"),
        ("gsm9k", "", "did you mean 'gsm8k'"),
        ("prosqa", "nowhere.json", "data.path='nowhere.json' is not a file"),
    ],
)
def test_splits_say_what_is_missing(task, path, message):
    with pytest.raises(ValueError, match=message):
        load_splits(ReasonConfig(task=task), 1, DataConfig(path=path))


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        ("prosqa", {"question": 7}, r"example 1: its question is 7, not a text"),
        ("prosqa", {"answer": ["x"]}, r"example 1: its answer is \["),
        ("prosqa", {"answer": 3}, r"example 1 is not of ProsQA or ProntoQA \(its answer 3 is not a text"),
        ("prosqa", {"steps": "Tom is a terpus."}, r"not a list of texts"),
        ("prosqa", {"steps": [1]}, r"one of its steps is 1, not a text"),
        ("prontoqa", {}, r"example 0 is not a question of ProntoQA.*check task="),
        ("gsm8k", {"question": None}, r"its question is null, not a text"),
    ],
)
def test_records_are_checked(tmp_path, task, record, message):
    examples = [e._asdict() for e in generate(PROSQA_2HOP, 2, seed=1)]
    examples[1] |= record
    (tmp_path / "train.json").write_text(json.dumps(examples))
    with pytest.raises(ValueError, match=message):
        load_splits(ReasonConfig(task=task, n_valid=1), 1, DataConfig(path=str(tmp_path / "train.json")))


def test_a_file_of_another_task_is_refused(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([e._asdict() for e in generate(PRONTOQA, 2, seed=1)]))
    with pytest.raises(ValueError, match=r"example 0 is not a question of ProsQA: it ends in .*check task="):
        load_held_out(ReasonConfig(**{**vars(SMALL), "test_path": str(tmp_path / "test.json")}), seed=1)


def test_tasks_are_test_sets_by_name():
    cfg = ReasonConfig(task="prosqa", n_valid=2, n_test=3, test_path="prosqa-balanced,prosqa-7hop")
    _, tests = load_held_out(cfg, seed=1)
    assert {name: len(part) for name, part in tests.items()} == {"generated": 3, "prosqa-balanced": 3, "prosqa-7hop": 3}
    assert {len(e.steps) for e in tests["prosqa-7hop"]} == {7}
    assert all(not is_guessed(e) for e in tests["prosqa-balanced"])
    with pytest.raises(ValueError, match="prontoqa is no generated task of the same kind"):
        load_held_out(replace(cfg, test_path="prontoqa"), seed=1)


def test_missing_files_are_told_before_questions_are_made(monkeypatch, capsys):
    monkeypatch.setattr(tasks, "generate", lambda *_: pytest.fail("questions were made first"))
    cfg, message = ReasonConfig(task="prosqa-2hop", test_path="prosqa-balanced,no.json"), "='no.json' is not a file"
    with pytest.raises(ValueError, match=f"reason.test_path{message}"):
        load_splits(cfg, 1)
    with pytest.raises(ValueError, match=f"reason.test_path{message}"):
        load_tests(ReasonConfig(task="prosqa-2hop"), DataConfig(), 10_000, "no.json", 1)
    assert cli.main(["reason", "data", "task=prosqa-2hop", "no.json"]) == 1
    assert f"adlm reason data{message}" in capsys.readouterr().err


def test_the_own_task_named_as_a_test_holds_nothing_that_was_trained_on_or_held_out():
    """There are so few questions of two hops that a sixth of another draw would be among those of the training set."""
    trained = ReasonConfig(task="prosqa-2hop", n_train=1500, n_valid=100, n_test=100)
    splits = load_splits(trained, 1)
    tests = load_tests(trained, DataConfig(), 100, "prosqa-2hop", 1)
    assert tests["generated"] == splits.tests["generated"]
    known = {PROSQA_2HOP.canonical(e) for e in (*splits.train, *splits.valid, *tests["generated"])}
    assert len(tests["prosqa-2hop"]) == 100
    assert known.isdisjoint(PROSQA_2HOP.canonical(e) for e in tests["prosqa-2hop"])


def test_whoever_waits_for_questions_is_told(capsys, monkeypatch):
    monkeypatch.setattr(tasks, "SILENCE", -1.0)
    generate(PROSQA_2HOP, 2, seed=1)
    assert "making questions: 1 of 2" in capsys.readouterr().err

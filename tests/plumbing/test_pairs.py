"""Prompts and answers: recognised by their fields, written by the vocabulary's template, learned and scored after the
prompt."""

import json

import numpy as np
import pytest
from exports import export
from tokenizers import AddedToken

import adlm
from adlm import cli
from adlm.data import pairs
from adlm.data.pairs import Turn
from adlm.data.preparation import prepare
from adlm.data.tokenizers import raw_bytes
from adlm.schema import DataConfig

TOK = raw_bytes()


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(path, n: int = 40):
    return write(path, *({"prompt": f"{i % 7}+{i % 5}=", "completion": f"{i % 7 + i % 5}"} for i in range(n)))


def prepared(tmp_path, file, length=24, **more):
    cfg = DataConfig(name="file", path=str(file), cache_dir=str(tmp_path / "cache"), valid_fraction=0.25, **more)
    return [prepare(cfg, TOK, length, split) for split in ("train", "valid")]


def test_prompts_and_completions_become_one_sequence_each(tmp_path):
    train, valid = prepared(tmp_path, sums(tmp_path / "sums.jsonl"))
    assert len(train) == 30 and len(valid) == 10
    assert train.length == valid.length == 16, "as long as the longest pair needs, up to a multiple of 16"
    assert train.starts is not None and train.lengths is not None
    tokens, start, end = train[8], train.starts[8], train.lengths[8]
    assert (
        tokens[0] == TOK.bos_id and TOK.decode(tokens[1:start]) == "1+3=" and TOK.decode(tokens[start : end - 1]) == "4"
    )
    assert tokens[end - 1] == TOK.eos_id and (tokens[end:] == TOK.pad_id).all()
    mask = train.prompts(np.array([8]))
    assert mask is not None and mask[0].sum() == start == 5


def test_a_conversation_is_one_sequence_for_each_answer(tmp_path):
    said = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    record = {"messages": [{"role": role, "content": content} for role, content in said]}
    train, _ = prepared(tmp_path, write(tmp_path / "chat.jsonl", *[record] * 4), length=96)
    assert len(train) == 6 and train.starts is not None and train.lengths is not None
    texts = [
        (TOK.decode(train[i][1:a]), TOK.decode(train[i][a : b - 1]))
        for i, (a, b) in enumerate(zip(train.starts, train.lengths))
    ]
    plain = "System: Be kind.\nUser: Hi\nAssistant:"
    assert texts[0] == (plain, " Hello") and texts[1] == (f"{plain} Hello\nUser: Bye\nAssistant:", " See you")


def test_too_long_prompts_lose_their_beginning():
    assert pairs.sequence([1, 2, 3, 4], [8, 9], 6, 0, 7) == ([0, 3, 4, 8, 9, 7], 3)
    assert pairs.sequence([1, 2], [8, 9, 8, 9, 8, 9], 6, 0, 7) == ([0, 8, 9, 8, 9, 8], 1)
    assert pairs.sequence([1], [], 6, 0, 7) == ([0, 1, 7], 2)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "x"}, "has no field 'completion': a pair has prompt and completion, or messages"),
        ({"prompt": "x", "completion": 3}, "field 'completion' .* is int, not text"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": ["hi"]}, "a message needs role and content, got 'hi'"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages hold no answer"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "role='robot' is unknown"),
        ({"messages": [{"role": "user"}]}, "has no field 'content'"),
    ],
)
def test_bad_records_are_answered_in_one_line(tmp_path, record, message):
    file = write(tmp_path / "x.jsonl", {"prompt": "1", "completion": "2"}, record)
    with pytest.raises(ValueError, match=f"record 2.*{message}"):
        list(pairs.read(file))


def test_files_are_recognised_by_their_fields(tmp_path):
    assert pairs.are_pairs(sums(tmp_path / "a.jsonl"), "text")
    assert not pairs.are_pairs(write(tmp_path / "b.jsonl", {"text": "a", "prompt": "b", "completion": "c"}), "text")
    for half in ("prompt", "completion"):  # the other field is missed by name, and not one called `text`
        assert pairs.are_pairs(write(tmp_path / "half.jsonl", {half: "b"}), "text")
    assert not pairs.are_pairs(write(tmp_path / "c.jsonl", {"text": "a"}), "text")
    assert not pairs.are_pairs(write(tmp_path / "d.txt", {"prompt": "b", "completion": "c"}), "text")


def with_marks(*marks):
    """Bytes, and special tokens of a chat template."""
    tokenizer = raw_bytes()
    tokenizer.backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return type(tokenizer)(tokenizer.backend, "marked")


def test_templates_are_written_with_their_marks():
    """As the models' own templates write a conversation; what people write never becomes a mark."""
    turns = [Turn("user", "Hi <|im_end|>"), Turn("assistant", "<|im_end|>"), Turn("user", "Bye")]
    tok = with_marks("<|im_start|>", "<|im_end|>")
    ids = pairs.prompt_ids(turns, tok)
    start, end = tok.backend.token_to_id("<|im_start|>"), tok.backend.token_to_id("<|im_end|>")
    assert (ids.count(start), ids.count(end)) == (4, 3)
    written = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n<|im_end|><|im_end|>\n"
    assert tok.decode(ids) == written + "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    assert pairs.answer_ids("<|im_end|>", tok) == [*tok.encode("<|im_end|>"), end]
    llama = with_marks("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    assert llama.decode(pairs.prompt_ids(turns[2:], llama)) == (
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert pairs.template_of(TOK).name == "plain" and pairs.template_of(TOK).stop == "\nUser:"
    assert TOK.decode(pairs.prompt_ids(turns[2:], TOK)) == "User: Bye\nAssistant:"


def test_changing_the_template_changes_the_cache():
    assert pairs.packing_name(TOK) == "pairs-plain"
    assert pairs.packing_name(with_marks("<|im_start|>", "<|im_end|>")) == "pairs-chatml"


@pytest.mark.parametrize("kind", [{}, {"causal": True, "anchored": False, "conditioning": "none"}])
def test_finetuning_on_pairs_reports_answers_alone(tmp_path, capsys, kind):
    export(tmp_path / "base", **kind)
    words = [
        str(sums(tmp_path / "sums.jsonl")), f"init_from={tmp_path / 'base'}", f"out={tmp_path / 'run'}", "lora.rank=4",
        f"data.cache_dir={tmp_path / 'cache'}", "data.valid_fraction=0.25", "train.device=cpu", "train.steps=6",
        "sampling.steps=4", "eval.draws=2",
    ]  # fmt: skip
    assert cli.main(["finetune", *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["after"] < facts["before"]
    assert "Answering: " in (tmp_path / "run" / "report.html").read_text()
    assert (
        cli.main(["ppl", str(tmp_path / "run"), f"data.cache_dir={tmp_path / 'cache'}", "eval.draws=2", "--json"]) == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (name,) = {"exact", "continuous"} & result.keys()
    answers = [f"{i % 7 + i % 5}" for i in range(30, 40)]
    assert result[name]["tokens"] == sum(len(a) + 1 for a in answers)
    nats = result[name]["nats_per_token"] * result[name]["tokens"]
    assert result[name]["bits_per_byte"] == pytest.approx(nats / np.log(2) / len("".join(answers)))
    if kind:  # exact: the same as the API's score of each answer after its prompt
        lm = adlm.load(tmp_path / "run", device="cpu")
        scores = [
            lm.score([*TOK.encode(a), TOK.eos_id], context=TOK.encode(f"{i % 7}+{i % 5}="))
            for i, a in zip(range(30, 40), answers)
        ]
        assert nats == pytest.approx(sum(s.nll * len(s.tokens) for s in scores), rel=1e-5)


def test_the_server_writes_conversations_by_the_same_rule():
    from adlm.serving.openai import prompt_ids

    assert prompt_ids is pairs.prompt_ids

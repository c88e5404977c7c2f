"""adlm demo: from nothing to a report, at a size that tests can afford; and what it says about anchors."""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from documents import Document, player_data
from tiny import random_tokens, tiny_model

import adlm
from adlm import cli, config
from adlm.data.preparation import prepare, tokenizer_for
from adlm.demo import wishes
from adlm.diffusion.process import LogLinear
from adlm.evaluation.anchors import anchors_section, guesses, hide, read_hidden

SMALL = [
    "data.tokenizer=bpe-512", "data.max_sequences=40", "model.hidden_size=16", "model.n_heads=2", "model.n_blocks=1",
    "model.n_denoiser_blocks=1", "model.length=64", "train.steps=12", "train.global_batch_size=4", "optim.warmup=2",
    "train.valid_every=4", "train.valid_sequences=8", "train.log_every=2", "checkpoint.every=6", "sampling.steps=8",
]  # fmt: skip


def demo(folder: Path, *more: str) -> int:
    return cli.main(["demo", *SMALL, f"out={folder / 'run'}", f"data.cache_dir={folder / 'cache'}", *more])


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a finished demo, and what it printed."""
    folder, out = tmp_path_factory.mktemp("demo"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert demo(folder, "--json") == 0
    return folder, out.getvalue()


def test_the_demo_ends_with_a_report_and_commands_to_try(ran):
    folder, out = ran
    facts = json.loads(out.splitlines()[-1])
    assert facts["steps"] == 12 and facts["last_ppl"] < facts["first_ppl"]
    assert len(re.findall(r"^  adlm ", out, re.MULTILINE)) == 4 and (folder / "run" / "report.html").as_uri() in out
    text = (folder / "run" / "report.html").read_text()
    document = Document(text)
    for words in (f"{facts['last_ppl']:,.1f}", "Training loss", "Held-out text 3", "gamma: 0.1", "hidden_size: 16"):
        assert words in document.words
    assert text.count('class="reveal"') == 3 and text.count("<svg") == 2
    assert not re.search(r"https?://", re.sub(r"<(p|mark|code|script)[^>]*>.*?</\1>", "", text, flags=re.DOTALL))


def test_a_second_call_rebuilds_the_report_and_says_so(ran, capsys):
    folder, _ = ran
    report = folder / "run" / "report.html"
    before = report.read_text()
    report.unlink()
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    assert demo(folder) == 0
    assert "trained already" in capsys.readouterr().out
    assert (folder / "run" / "metrics.jsonl").read_text() == metrics
    # texts are those of the seed; only the seconds differ
    assert [player_data(p) for p in players(report.read_text())] == [player_data(p) for p in players(before)]


def test_a_run_without_its_record_is_answered_in_one_line(ran, capsys):
    folder, _ = ran
    record = folder / "run" / "metrics.jsonl"
    kept = record.read_bytes()
    record.unlink()
    assert demo(folder) == 1
    assert "metrics.jsonl holds no record of the training" in capsys.readouterr().err
    record.write_bytes(kept)


def players(text: str) -> list[str]:
    return re.findall(r'<script type="application/json">.*?</script>', text, re.DOTALL)


@pytest.mark.parametrize(("rule", "words"), [("all", "at most"), ("common", "more than")])
def test_the_report_shows_anchors_by_a_rule_that_a_text_can_answer(ran, rule, words):
    folder, _ = ran
    lm = adlm.load(folder / "run", device="cpu")
    data = config.load([*SMALL, f"data.cache_dir={folder / 'cache'}"]).data
    loaded = lm.loaded._replace(objective=replace(lm.loaded.objective, anchor_rule=rule))
    text = str(anchors_section(loaded, prepare(data, lm.tokenizer, 64, "valid")))
    assert words in text and text.count("Held-out text") == 3


def test_a_report_is_written_of_texts_without_anchors_and_hides_nothing_in_prompts(ran, tmp_path):
    """No token of a text that repeats itself is rare in its sequence; and a prompt is given."""
    folder, _ = ran
    lm = adlm.load(folder / "run", device="cpu")
    (tmp_path / "same.txt").write_text("z" * 4000)
    pair = {"prompt": "the quick brown fox ", "completion": "z" * 20}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    for name in ("same.txt", "pairs.jsonl"):
        data = config.load(["data=file", f"data.path={tmp_path / name}", f"data.cache_dir={tmp_path / 'cache'}"]).data
        text = str(anchors_section(lm.loaded, prepare(data, lm.tokenizer, 64, "valid")))
        assert "(0% of these texts)" in text and "Held-out text 1" in text


def test_prompts_come_from_the_held_out_text(tmp_path):
    sentence = "The cat number {i} sat on the old red mat and slept."
    text = " ".join(sentence.format(i=i) for i in range(300))
    (tmp_path / "my.txt").write_text(text)
    line = ["experiment=demo", f"data.path={tmp_path / 'my.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    cfg = config.load(line, own_text=True)
    assert cfg.data.name == "file" and cfg.out == "runs/demo"
    tokenizer = tokenizer_for(cfg.data)
    found = wishes(tokenizer, prepare(cfg.data, tokenizer, cfg.model.length, "valid"))
    prompt, template = found["Continuing a prompt"]["prompt"], found["Filling a hole"]["template"]
    assert re.fullmatch(r"The cat number \d+ sat", prompt) and prompt in text
    begin, holes, end = re.fullmatch(r"(.*)\[MASK:(\d+)\](.*)", template).groups()  # pyright: ignore
    held_out = next(s for s in re.findall(r"The cat[^.]*\.", text) if s.startswith(begin + " "))
    assert held_out.endswith(end) and int(holes) == len(tokenizer.encode(held_out[len(begin) : -len(end)]))


def test_the_experiment_is_what_the_issue_asks_for():
    """Nano, embedded data, both cores, few enough tokens for minutes on a CPU."""
    cfg = config.load(["experiment=demo"])
    assert (cfg.data.name, cfg.out, cfg.model.anchored, cfg.train.num_threads) == ("pydocs", "runs/demo", True, 0)
    assert cfg.train.steps * cfg.train.global_batch_size * cfg.model.length < 4e6


# Reading anchors


def test_hidden_positions_are_anchors_fixed_by_the_seed():
    anchors = random_tokens(1, 40, 2, seed=3)[0].bool()
    hidden = hide(anchors, 0.5, seed=1)
    assert hidden.sum() == round(0.5 * int(anchors.sum())) and not (hidden & ~anchors).any()
    assert torch.equal(hidden, hide(anchors, 0.5, seed=1)) and not torch.equal(hidden, hide(anchors, 0.5, seed=2))
    assert hide(anchors, 0.001, seed=1).sum() == 1
    assert not hide(torch.zeros(4, dtype=torch.bool), 0.5, 0).any()


@pytest.mark.parametrize("options", [{}, {"conditioning": "sigma"}], ids=["plain", "time"])
def test_readings_are_the_dense_predictions(options):
    model = tiny_model(**options)
    x = random_tokens(1, 12, 10)[0]
    hidden = torch.zeros(12, dtype=torch.bool)
    hidden[[2, 7]] = True
    z = torch.where(hidden, model.mask_id, x)[None]
    sigma = LogLinear().sigma(hidden.float().mean())[None] if options else None
    denoiser, anchor = model.log_probs(z, sigma)[0].exp(), model.anchor_logits(z, sigma)[0].softmax(-1)
    anchor = anchor.index_fill(1, torch.tensor(model.mask_id), 0)  # no guess is the mask
    anchor /= anchor.sum(-1, keepdim=True)
    readings = read_hidden(model, LogLinear(), x, hidden, top=3)
    assert [(r.position, r.truth) for r in readings] == [(2, int(x[2])), (7, int(x[7]))]
    for r in readings:
        for guess, p_LV in ((r.anchor, anchor), (r.denoiser, denoiser)):
            p_V = p_LV[r.position]
            assert guess.tokens == p_V.topk(3).indices.tolist()
            assert guess.probability == pytest.approx(p_V[r.truth].item(), rel=1e-4)
            assert guess.rank == 1 + sum(p_V[v] > p_V[r.truth] for v in range(11))
    with pytest.raises(ValueError, match="no anchor network"):
        read_hidden(tiny_model(anchored=False), LogLinear(), x, hidden)


def test_a_sure_guess_has_rank_one():
    (guess,) = guesses(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([1]), top=2)
    assert guess.tokens == [1, 2] and guess.rank == 1 and guess.probability > 0.99

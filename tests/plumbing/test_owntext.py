"""Training on one's own text: settings that fit its size and the machine, at any size, and what a plan doubts."""

import json
import math
import random

import pytest
from runs import WORDS, overrides

from adlm import cli, config
from adlm.config import as_yaml, owntext
from adlm.schema import Config
from adlm.training import setup
from adlm.training.parallel import Step, world
from adlm.training.setup import validate


def write_text(path, size: int):
    rng = random.Random(0)
    path.write_text(" ".join(rng.choice(WORDS) for _ in range(size // 4))[:size])
    return path


def fit(*line: str) -> Config:
    return config.load([*line, "train.device=cpu"], world_size=1, own_text=True)


def test_a_path_alone_is_ones_own_text_with_our_recipe(tmp_path):
    cfg = fit(f"data.path={write_text(tmp_path / 'my.txt', 200_000)}")
    assert (cfg.data.name, cfg.out, cfg.model.norm, cfg.optim.name) == ("file", "runs/my", "rmsnorm", "muon")
    assert (cfg.data.tokenizer, cfg.model.hidden_size, cfg.model.length) == ("bpe-2048", 128, 128)
    assert cfg == fit("data=file", f"data.path={tmp_path / 'my.txt'}"), "the long form means the same"
    assert fit("data=pydocs", f"data.path={tmp_path / 'my.txt'}").optim.name == "adamw", "another corpus is left alone"
    demo = fit("experiment=demo", f"data.path={tmp_path / 'my.txt'}")
    assert (demo.data.name, demo.train.steps, demo.out) == ("file", 800, "runs/demo"), "so is an experiment"


@pytest.mark.parametrize("choice", ["recipe=published", "algo=mdlm-matched"])
def test_a_recipe_or_algorithm_that_is_named_is_trained_as_it_is(tmp_path, choice):
    path = f"data.path={write_text(tmp_path / 'my.txt', 50_000)}"
    usual, named = fit(path).objective, fit(path, choice).objective
    assert (usual.causal_until, usual.gamma_until, usual.anchor_fraction) == (0.2, 0.4, 1.0)
    assert (named.causal_until, named.gamma_until) == (0.0, 1.0 if choice == "recipe=published" else 0.25)
    assert fit(path, choice, "objective.causal_until=0.1").objective.causal_until == 0.1, "what is typed wins"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [1e2, 2e3, 2e4, 2e5, 2e6, 2e7, 2e9, 2e12])
def test_a_run_fits_a_text_of_any_size(monkeypatch, tmp_path, size, device):
    monkeypatch.setattr(owntext, "text_bytes", lambda cfg: size)
    monkeypatch.setattr(config, "pick_device", lambda name: type("Device", (), {"type": device}))
    cfg = config.load([f"data.path={tmp_path}"], world_size=3, own_text=True)
    tokens = owntext.estimated_tokens(size, int(cfg.data.tokenizer[4:]))
    read = cfg.train.steps * cfg.train.global_batch_size * cfg.model.length
    assert cfg.train.global_batch_size % 3 == 0
    assert size < 2000 or (cfg.model.length < tokens / 8 and read < 100 * tokens)
    assert size * cfg.data.valid_fraction > 100 or cfg.data.valid_fraction == 0.1
    assert 1 <= cfg.optim.warmup <= cfg.train.steps / 10
    assert 1 / (1 - cfg.optim.ema) < cfg.train.steps
    assert setup.doubts(cfg, read / max(tokens, 2000), 1, 2) == []
    assert cfg.data.max_sequences == 0 or cfg.data.max_sequences == cfg.train.steps * cfg.train.global_batch_size


def test_schedules_follow_what_is_typed(tmp_path):
    path = f"data.path={write_text(tmp_path / 'my.txt', 50_000)}"
    cfg = fit(path, "train.steps=4000", "optim.ema=0.9", "model=tiny", "recipe=published")
    assert (cfg.optim.warmup, cfg.train.valid_every, cfg.optim.ema) == (100, 500, 0.9)
    assert (cfg.model.hidden_size, cfg.model.length, cfg.model.norm) == (512, 1024, "layernorm"), "groups win"
    assert cfg.optim.lr == Config().optim.lr
    longer = fit(path, "model.length=64", "train.global_batch_size=2")
    assert longer.train.steps == pytest.approx(fit(path).train.steps * 16 * 128 / (64 * 2), rel=0.3)


def test_a_run_that_began_keeps_what_was_chosen(tmp_path):
    line = [f"data.path={write_text(tmp_path / 'my.txt', 30_000)}", f"out={tmp_path / 'run'}"]
    before = fit(*line)
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(as_yaml(before))
    write_text(tmp_path / "my.txt", 900_000)
    assert fit(*line) == before
    assert fit(*line[:1]).data.tokenizer != before.data.tokenizer


TINY = ["model.hidden_size=16", "model.n_heads=2", "model.n_blocks=1", "model.n_denoiser_blocks=1", "train.device=cpu"]


@pytest.mark.parametrize(
    ("size", "more"),
    [(600, []), (2_000, ["algo=ar"]), (40_000, ["algo=mdlm-matched"])],
)
def test_adlm_train_my_txt(tmp_path, capsys, size, more):
    my = write_text(tmp_path / "my.txt", size)
    line = ["train", str(my), *TINY, "train.steps=3", f"out={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert cli.main([*line, *more, "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["finished"] and result["valid_nll"] > 0
    assert "warning" not in printed.err


def test_a_few_sequences_are_validated_at_many_times(tmp_path):
    """One sequence, noised once, has no mask at all at some times: its bound was 0."""
    cfg = config.load(overrides(tmp_path, data__max_sequences=1))
    with world(cfg.train) as ranks:
        data = setup.prepare_data(cfg, ranks)
        step = Step(setup.make_model(cfg, data.tokenizer))
        bound = validate(step, setup.objective_for(cfg, data), data.valid, cfg.train, ranks)
        assert len(data.valid) == 1
        assert bound == pytest.approx(math.log(260), rel=0.4)


def test_a_word_that_is_no_file_is_said_to_be_none(capsys):
    assert cli.main(["train", "nothing.txt"]) == 1
    assert "data.path='nothing.txt' does not exist" in capsys.readouterr().err


# ---- what a plan doubts ----------------------------------------------------------------------------------------------


def test_a_plan_says_in_one_line_what_cannot_be_meant(tmp_path, capsys):
    """The published defaults in a short run on a small text, as a stranger typed them."""
    line = ["model=small", "recipe=published", "optim.warmup=2500", "optim.ema=0.9999", "train.global_batch_size=512"]
    line += ["train.steps=150", "model.length=32", "data.tokenizer=bytes", "train.device=cpu"]
    my = write_text(tmp_path / "my.txt", 20_000)
    assert cli.main(["train", str(my), *line, f"data.cache_dir={tmp_path / 'cache'}", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    said = [text for text in printed.err.splitlines() if text.startswith("warning: ")]
    assert len(said) == 3
    assert "optim.warmup=2500 lasts as long as train.steps=150: the rate stays low; optim.warmup=3 would fit" in said[0]
    assert "optim.ema=0.9999 averages 10,000 steps, more than train.steps=150; optim.ema=0.9333 would fit" in said[1]
    assert "train.steps=150 read the text 12" in said[2]
    assert len(json.loads(printed.out.splitlines()[-1])["warnings"]) == 3


def test_memory_beyond_the_machine_is_said(tmp_path):
    cfg = config.load(overrides(tmp_path, optim__ema=0.5))
    (said,) = setup.doubts(cfg, 1, 217, 23)
    assert said.startswith("about 217 GiB are needed and the device has 23: take a smaller model")
    assert setup.memory_gib(setup.torch.device("cpu")) > 0.5

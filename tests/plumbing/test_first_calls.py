"""What a user guesses first: calls from threads, prompts as texts, typed settings, a quick start."""

import dataclasses
import inspect
import io
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from exports import L, export
from runs import overrides

import adlm
from adlm import cli
from adlm.api.command import record
from adlm.api.language_model import GenerateSettings, StreamSettings
from adlm.evaluation import result_path
from adlm.io.export import describe, save_folder
from adlm.io.load import BOX, locate
from adlm.schema import Config, DataConfig, SamplingConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("calls") / "export")


@pytest.fixture(scope="module")
def lm(folder):
    return adlm.load(folder, device="cpu")


# Threads

SAMPLERS = ("mdlm", "remdm-cap", "confidence")


def call(lm, i):
    """One of many kinds of calls, and what it says."""
    kind, seed = i % 5, i // 5
    if kind == 0:
        return lm.generate(n=2, steps=6, seed=seed, sampler=SAMPLERS[i % 3])[1].tokens
    if kind == 1:
        return lm.generate("ab [MASK:4] c", steps=4, seed=seed)[0].tokens
    if kind == 2:
        *_, last = lm.stream(prompt="ab", length=16, steps=8, seed=seed)
        return last.tokens
    if kind == 3:
        return next(iter(lm.stream(length=16, steps=8, seed=seed))).tokens  # and the rest is given up
    return lm.score("some text", draws=4).nll


def test_calls_from_many_threads_say_what_one_thread_says(lm):
    alone = [call(lm, i) for i in range(200)]
    start = threading.Barrier(16)
    interval = sys.getswitchinterval()

    def together(thread):
        start.wait(60)
        return {i: call(lm, i) for i in range(thread, 200, 16)}

    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(16) as pool:
            found = {i: said for part in pool.map(together, range(16), timeout=200) for i, said in part.items()}
    finally:
        sys.setswitchinterval(interval)
    assert [i for i in range(200) if found[i] != alone[i]] == []


def test_a_stream_that_is_given_up_inside_a_step_is_dropped_later(lm):
    """The garbage collector closes generators at any moment, also in the middle of another one's step."""
    engine = lm.engine(16)
    other = engine.stream(lm.request(steps=8))
    next(other)
    with engine.lock:
        other.close()  # as the collector would: without waiting for the lock
    assert lm.generate(steps=4, seed=3)[0].tokens == lm.generate(steps=4, seed=3)[0].tokens
    assert not engine.busy and not engine.awaited


# A quick start


def test_sampling_on_a_cpu_does_not_import_the_compiler(folder):
    code = (
        f"import sys, adlm; lm = adlm.load({str(folder)!r}); lm.generate(steps=2); lm.score('ab', draws=1)\n"
        "slow = ('torch._dynamo', 'torch._inductor', 'torch.distributed.checkpoint', 'sympy', 'hydra', 'pandas')\n"
        "print([name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


# First calls


def test_a_text_without_holes_is_a_prompt_and_one_with_holes_a_template(lm):
    (g,) = lm.generate("Once", length=12, steps=4)
    assert g.tokens == lm.generate(prompt="Once", length=12, steps=4)[0].tokens and g.text.startswith("Once")
    (g,) = lm.generate("a [MASK:2] b", steps=4)
    assert g.tokens == lm.generate(template="a [MASK:2] b", steps=4)[0].tokens
    *_, last = lm.stream("Once", length=12, steps=4)
    assert last.tokens == lm.generate("Once", length=12, steps=4)[0].tokens
    assert lm.generate(prompt="a [MASK] b", length=20, steps=2)[0].text.startswith("a [MASK] b"), "text, if so named"
    for template in ("[MASK:", "[mask]"):
        with pytest.raises(ValueError, match="is no hole"):
            lm.generate(template)
    with pytest.raises(ValueError, match=r"^give only one of the first argument and prompt$"):
        lm.generate("a", prompt="b")


def test_lists_of_prompts(lm):
    texts = lm.generate(["ab", "c [MASK:2] d", ""], n=2, steps=4, seed=7)
    alone = [g for text in ("ab", "c [MASK:2] d", "") for g in lm.generate(text, n=2, steps=4, seed=7)]
    assert [(g.tokens, g.seed) for g in texts] == [(g.tokens, g.seed) for g in alone]
    assert lm.generate([]) == []
    for bad in (3, b"ab"):
        with pytest.raises(ValueError, match="text must be a text or a list of texts"):
            lm.generate(bad)
    with pytest.raises(ValueError, match="text must be a text, got 3"):
        lm.generate(["a", 3])


def test_max_new_tokens_counts_what_is_drawn(lm):
    (g,) = lm.generate("abc", max_new_tokens=5, steps=4)
    assert len(g.tokens) == 1 + 3 + 5, "begin-of-text, prompt, and five"
    assert len(lm.generate(max_new_tokens=5, steps=4)[0].tokens) == 5
    for arguments, message in (
        ({"text": "a", "max_new_tokens": 5, "length": 9}, "^give only one of max_new_tokens=5 and length=9$"),
        ({"text": "a [MASK]", "max_new_tokens": 5}, "^max_new_tokens has no meaning beside template"),
        ({"max_new_tokens": 0}, "^max_new_tokens=0 must be at least 1$"),
        ({"text": "a", "max_new_tokens": 30}, "longer than 24"),
        ({"text": "a", "max_new_token": 30}, "did you mean 'max_new_tokens'"),
        ({"temperature": -1}, r"^temperature=-1.0 must be in \[0, 3e\+38\]$"),
        ({"sampler": "remdm-loop", "t_on": 0.1, "t_off": 0.2}, "^t_off=0.2 must lie below t_on=0.1 for remdm-loop$"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate(**arguments)


def test_keywords_are_typed_as_the_schema_says():
    """`step=4` is an error in an editor, since signatures name every setting; this holds the two lists together."""
    own = {"max_new_tokens": int, "banned": adlm.api.language_model.Words, "required": adlm.api.language_model.Words}
    own |= {"choices": Sequence[str], "response_format": str | Mapping[str, Any]}  # texts, on the command line
    expected = get_type_hints(SamplingConfig) | own
    assert get_type_hints(GenerateSettings) == expected
    assert get_type_hints(StreamSettings) == {name: kind for name, kind in expected.items() if name != "n"}
    assert not GenerateSettings.__required_keys__
    for method, settings in (("generate", GenerateSettings), ("stream", StreamSettings)):
        hint = get_type_hints(getattr(adlm.LanguageModel, method))["settings"]
        assert get_args(hint) == (settings,)


def test_hidden_states_are_what_the_heads_read(lm):
    tokens = torch.tensor([[lm.tokenizer.bos_id, *b"ab", lm.tokenizer.mask_id]])
    hidden = lm.hidden("ab [MASK]")
    assert hidden.denoiser_BLD.shape == hidden.anchor_BLD.shape == (1, 4, lm.model.config.hidden_size)
    assert torch.allclose(lm.model.head(hidden.denoiser_BLD), lm.model.logits(tokens, lm.noise_level(tokens)))
    assert torch.allclose(lm.model.anchor_head(hidden.anchor_BLD), lm.anchor_logits(tokens))
    assert torch.equal(lm.log_probs("ab [MASK]"), lm.log_probs(tokens))
    assert torch.equal(lm.log_probs([1, 2]), lm.log_probs(torch.tensor([[1, 2]])))
    for bad in ("x" * L, torch.zeros(1, 2, 3, dtype=torch.long), [], 3):
        with pytest.raises(ValueError, match=r"the text has 25 tokens|text must be one text or"):
            lm.hidden(bad)


def test_dtype_and_device(folder):
    for dtype in ("bf16", "bfloat16", torch.bfloat16):
        low = adlm.load(folder, device=torch.device("cpu"), dtype=dtype)
        assert low.engine(1).evaluator.bf16
    high = adlm.load(folder, device="cpu", dtype=torch.float32)
    assert not high.engine(1).evaluator.bf16
    a, b = low.score("hello", draws=8).nll, high.score("hello", draws=8).nll
    assert a != b and a == pytest.approx(b, rel=0.05)
    assert low.hidden("ab").denoiser_BLD.isfinite().all()
    with pytest.raises(ValueError, match=r"^dtype='float16' is unknown"):
        adlm.load(folder, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^device='gpu' is no device; use auto, cpu, cuda, cuda:N or mps$"):
        adlm.load(folder, device="gpu")
    for path in ("nowhere", "a/sampling.x/y", "sampling.x"):
        with pytest.raises(ValueError, match=f"^source='{path}' does not exist$"):
            adlm.load(path)


def test_the_package_shows_its_names():
    assert {"load", "train", "LanguageModel", "Score", "config", "__version__"} <= set(dir(adlm))
    assert {*adlm.__all__, "__version__"} == set(adlm.NAMES)
    assert all(getattr(adlm, name) for name in adlm.NAMES)
    assert adlm.__version__.count(".") == 2
    assert (Path(adlm.__file__).parent / "py.typed").is_file()


def test_train_from_python(tmp_path):
    line = overrides(tmp_path, train__steps=2)
    lm = adlm.train(line, seed=5, out=tmp_path / "python", valid_every=0, ema=0.5, **{"optim.eps": 1e-6})
    assert lm.info["step"] == 2 and (tmp_path / "python" / "export").is_dir()
    cfg = adlm.config.from_yaml(tmp_path / "python" / "config.yaml")
    assert (cfg.seed, cfg.train.valid_every, cfg.optim.ema, cfg.optim.eps) == (5, 0, 0.5, 1e-6)
    with pytest.raises(ValueError, match=r"^eps is the end of noise.eps and optim.eps; give the whole name"):
        adlm.train("my.txt", eps=3)
    with pytest.raises(ValueError, match=r"unknown setting 'stepz' .did you mean 'train.steps'"):
        adlm.train("my.txt", stepz=3)
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        adlm.train(tmp_path / "nowhere.txt", model="nano", steps=2, out=tmp_path / "none")


# The sampler of a model

SAMPLERS_BY_OBJECTIVE = [
    ("score-entropy", "score"), ("d3pm", "ddpm"), ("nelbo", "mdlm"), ("nelbo in blocks", "confidence"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sampler"), SAMPLERS_BY_OBJECTIVE)
def test_one_rule_for_the_sampler_of_a_model(tmp_path, monkeypatch, name, sampler):
    """API, `adlm sample`, `adlm evaluate` and the server draw with the same sampler where none is named."""
    from adlm.api.command import request_of
    from adlm.evaluation.evaluate import make_settings
    from adlm.schema import ServeConfig
    from adlm.serving.jobs import ServerMetrics
    from adlm.serving.service import Served

    lm = adlm.load(of_objective(tmp_path, name), "cpu")
    assert lm.request().settings.sampler == sampler
    assert lm.generate(steps=3)[0].tokens == lm.generate(steps=3, sampler=sampler)[0].tokens
    c = SamplingConfig(steps=3)
    assert request_of(lm, c).settings.sampler == sampler
    (setting,) = make_settings(lm, [c], tmp_path)
    assert setting.config.sampler == setting.request.settings.sampler == sampler
    assert Served("x", lm, ServeConfig(), c, ServerMetrics()).card().default.sampler == sampler
    # and one that is named is taken, even if it is the usual one
    assert request_of(lm, dataclasses.replace(c, sampler="mdlm")).settings.sampler == "mdlm"


def of_objective(folder, name):
    """A tiny model that says it was trained with this objective."""
    made = adlm.load(export(folder / "anchored", anchored=False), "cpu")
    objective, _, in_blocks = name.partition(" ")
    model = dataclasses.replace(made.model.config, block_length="4,1" if in_blocks else "")
    cfg = Config(algo="test", model=model, data=DataConfig(name="none", tokenizer="bytes"))
    cfg.objective.name, cfg.objective.T = objective, 10 if objective == "d3pm" else 0
    save_folder(folder / name, made.model.state_dict(), made.tokenizer, describe(cfg, made.tokenizer))
    return folder / name


# Commands


def test_score_from_the_command_line(folder, lm, tmp_path, capsys, monkeypatch):
    (tmp_path / "my.txt").write_text("some words")
    monkeypatch.setattr("sys.stdin", io.StringIO("some words"))
    expected = lm.score("some words", draws=8)
    for words in (["some words"], [f"@{tmp_path / 'my.txt'}"], [str(tmp_path / "my.txt")], ["-"]):
        line = ["score", *words, str(folder), "eval.draws=8", "train.device=cpu", "--json"]
        assert cli.main(line) == 0
        said, *_, document = capsys.readouterr().out.splitlines()
        assert f"perplexity {expected.ppl:.2f} (upper bound)" in said
        found = json.loads(document)
        assert (found["nll"], found["tokens"]) == (expected.nll, expected.tokens)
        assert found["bits_per_byte"] == pytest.approx(expected.nll / math.log(2)), "a byte is a token here"


def test_a_misspelt_file_is_no_silent_text(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = [str(folder), "eval.draws=1", "train.device=cpu"]
    for words, note in (("my.txt", True), ("here/my", True), ("some words.txt", False), ("word.", False)):
        assert cli.main(["score", words, *line]) == 0
        assert (f"there is no file {words!r}" in capsys.readouterr().err) == note
    assert cli.main(["score", str(tmp_path), *line]) == 1
    assert "is a folder, no text: adlm score 'some words' [CHECKPOINT]" in capsys.readouterr().err


def test_an_export_replaces_no_other_files_and_hides_no_run(folder, lm, tmp_path, capsys):
    run, project, again = tmp_path / "run", tmp_path / "project", tmp_path / "again"
    for place in (run / "checkpoints", project, again / ".git"):
        place.mkdir(parents=True)
    (project / "README.md").write_text("mine")
    for place, message in ((run, "is a run folder, whose model"), (project, "holds README.md, but no exported model")):
        for flags in ([], ["--transformers"], ["--four-bit"]):
            assert cli.main(["export", str(folder), str(place), *flags]) == 1
            assert message in capsys.readouterr().err
        with pytest.raises(ValueError, match=message):
            lm.save(place)
    assert not (run / "config.json").exists() and (project / "README.md").read_text() == "mine"
    assert [file.name for file in project.iterdir()] == ["README.md"]
    for flags in ([], [], ["--transformers"], ["--four-bit"]):  # what is an export may be replaced
        assert cli.main(["export", str(folder), str(again), *flags]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_named(lm):
    text = lm.generate(length=4, steps=1)[0]
    with pytest.raises(ValueError, match=r"^out='/dev/full' cannot be written: No space left on device; a rerun"):
        record(Path("/dev/full"), text, "")


def test_texts_for_lists_and_numbers_for_files_are_refused():
    with pytest.raises(ValueError, match=r"settings must be a list of texts, got 'lora\.rank=8'"):
        adlm.finetune("my.txt", settings="lora.rank=8")
    with pytest.raises(ValueError, match="source must be a path, got 5"):
        adlm.train(5)
    with pytest.raises(ValueError, match="path must be a path, got 5"):
        adlm.finetune(5)


def test_export_writes_our_folder_and_convert_the_release_checkpoint(folder, lm, tmp_path, capsys):
    assert cli.main(["export", str(folder), str(tmp_path / "copy")]) == 0
    assert adlm.load(tmp_path / "copy").weights_digest == lm.weights_digest
    for command in ("convert", "export"):
        assert cli.main([command, str(folder), str(tmp_path / f"{command}.ckpt")]) == 0
        assert ("is now `adlm convert`" in capsys.readouterr().err) == (command == "export")
    assert (tmp_path / "convert.ckpt").read_bytes() == (tmp_path / "export.ckpt").read_bytes()


def test_the_model_in_the_package_has_a_name(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    assert locate("box") == locate("") == BOX
    assert locate("runs/x") == Path("runs/x")
    (tmp_path / "box").symlink_to(folder)
    assert locate("box") == Path("box"), "something here has that name"
    for command in ("sample", "ppl", "evaluate", "zeroshot", "serve"):
        assert cli.COMMANDS[command].required == 0
    assert result_path("", "", "ppl.json") == Path("runs/box/ppl.json")
    assert result_path("", str(folder), "ppl.json") == folder / "ppl.json"


def test_every_key_that_serve_lists_is_a_default_of_requests(capsys):
    from adlm.serving.service import SERVER_DEFAULTS

    assert cli.main(["serve", "--help"]) == 0
    listed = set(re.findall(r"^  sampling\.(\w+)", capsys.readouterr().out, re.MULTILINE))
    assert listed == {*SERVER_DEFAULTS, "stop", "batch_size"}  # the last one is the server's own


def test_a_judge_that_is_nowhere_is_refused_before_samples_are_drawn(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adlm.evaluation.evaluate.draw_samples", lambda *args: pytest.fail("samples were drawn"))
    assert cli.main(["evaluate", str(folder), "eval.judge=nofolder/", f"out={tmp_path / 'out'}"]) == 1
    assert "eval.judge='nofolder/' does not exist" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_something_is_on_the_screen_while_sampling(folder, monkeypatch, capsys):
    """A bar on a terminal, gone at the end, and texts on stdout alone; in a log a line now and then."""
    line = ["sample", str(folder), "sampling.n=2", "sampling.steps=6", "train.device=cpu"]
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    assert cli.main(line) == 0
    assert re.search(r"evaluations, at most.*/6", screen.getvalue())
    texts = capsys.readouterr().out
    assert texts.count("--- seed") == 2 and "evaluations, at most" not in texts
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    monkeypatch.setattr("adlm.io.RARE", 0.0)
    assert cli.main(line) == 0
    assert re.search(r"^adlm: evaluations, at most: 1 of 6, 0 s$", log.getvalue(), re.MULTILINE)
    assert capsys.readouterr().out == texts
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(cli, "_target", lambda command: lambda cfg: None)
    assert cli.main(line) == 0
    assert screen.getvalue() == "adlm sample: loading torch ...\n"


def test_anchors_say_how_far_they_are(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    monkeypatch.setattr("adlm.io.RARE", 0.0)
    assert cli.main(["anchors", str(folder), "some words", "eval.draws=1", f"out={tmp_path}", "train.device=cpu"]) == 0
    done = re.findall(r"adlm: reading: (\d+) of (\d+)", log.getvalue())
    assert [int(a) for a, _ in done] == list(range(1, int(done[0][1]) + 1)), "every pass is counted"


# The page


def test_every_line_of_the_page_runs(tmp_path, monkeypatch):
    """On a tiny model in place of those it names; training is only begun, with the settings it would have."""
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 10
    tiny, load, trained = export(tmp_path / "tiny", length=160), adlm.load, []

    def load_tiny(*args, **settings):
        inspect.signature(load).bind(*args, **settings)
        return load(tiny, **{"device": "cpu", **settings})

    def begin(cfg):
        trained.append((cfg.data.path, cfg.train.steps, cfg.out))
        return SimpleNamespace(run=tiny)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("A text of one's own.\n" * 100)
    monkeypatch.setitem(adlm.__dict__, "load", load_tiny)
    monkeypatch.setattr("adlm.api.command.load", load_tiny)
    monkeypatch.setattr("adlm.training.loop.train", begin)
    monkeypatch.setattr(adlm.LanguageModel, "push_to_hub", lambda self, name: None)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python-api.md", "exec"), names)
    assert trained == [("my.txt", 500, "runs/mine")] * 2
    assert names["text"].text.startswith("Once upon a time") and len(names["pairs"]) == 4
    listed = set(re.findall(r"lm\.(\w+)\(", page))
    assert {"generate", "stream", "score", "hidden", "log_probs", "anchor_logits", "save"} <= listed

"""`adlm serve`: what is served under which name, where it listens, and what is used when nothing is given."""

import socket

import pytest
from served import readable_model

from adlm import cli, config
from adlm.io.load import DEMO, default_checkpoint
from adlm.serving import listen, names


def test_keys_of_the_section_may_be_typed_without_its_name(monkeypatch):
    seen = []
    monkeypatch.setattr("adlm.serving.run_serve", lambda cfg, args: seen.append((cfg, args)))
    assert cli.main(["serve", "a", "b", "port=8001", "slots=3", "sampling.steps=5", "timeout=2.5"]) == 0
    cfg, args = seen[0]
    assert (cfg.serve.port, cfg.sampling.batch_size, cfg.serve.timeout, cfg.sampling.steps) == (8001, 3, 2.5, 5)
    assert args == ["a", "b"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("port=70000", "serve.port=70000 must be in [0, 65535]"),
        ("sampling.batch_size=0", "sampling.batch_size=0 must be at least 1"),
        ("timeout=0", "serve.timeout=0.0 must be above 0"),
        ("prot=3", "did you mean"),
    ],
)
def test_bad_settings_are_one_line(capsys, typed, says):
    assert cli.main(["serve", typed]) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_limits_that_could_never_be_met_and_ports_in_use(tmp_path, capsys):
    folder = readable_model(tmp_path / "tiny")
    assert cli.main(["serve", str(folder), "sampling.batch_size=1", "queue=1", "max_n=3"]) == 1
    assert "serve.max_n=3 texts could never be accepted" in capsys.readouterr().err
    assert cli.main(["serve", str(folder), "max_length=1"]) == 1
    assert "serve.max_length=1 has room for the begin token alone" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(folder), f"port={port}"]) == 1
        assert f"serve.port={port}: Address already in use" in capsys.readouterr().err
    listen("127.0.0.1", 0).close()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["sampling.prompt=The", "sampling.n=1"], "sampling.prompt: `adlm serve` does not read this key"),
        (
            ["sampling.steps=100", "max_steps=50"],
            "sampling.steps=100 is more than serve.max_steps=50: every request without steps would be refused",
        ),
    ],
)
def test_what_cannot_be_a_default_of_requests_is_refused(tmp_path, monkeypatch, capsys, typed, says):
    def listen(*args):
        raise AssertionError("it would have been served")

    monkeypatch.setattr("adlm.serving.listen", listen)
    assert cli.main(["serve", str(tmp_path), *typed]) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_default_sampler_that_fits_no_model_is_refused(tmp_path, capsys):
    folder = readable_model(tmp_path / "tiny")
    assert cli.main(["serve", str(folder), "sampling.sampler=score", "port=0"]) == 1
    assert "sampling.sampler='score' needs a model that learned a score (algo=sedd)" in capsys.readouterr().err


def test_models_are_named_after_their_folders():
    paths = ["runs/demo", "x/demo/", "my/adlm-medium.ckpt", "runs/a/export", "runs/demo"]
    assert names(paths) == {
        "demo": "runs/demo", "demo-2": "x/demo/", "adlm-medium": "my/adlm-medium.ckpt", "a": "runs/a/export",
        "demo-3": "runs/demo",
    }  # fmt: skip
    named = ["smollm2", "kuleshov-group/mdlm-owt@main", "box", "my/SmolLM2-135M.Q4_1.gguf"]
    assert list(names(named)) == ["smollm2", "mdlm-owt", "box", "SmolLM2-135M.Q4_1"]


def test_without_a_checkpoint_the_box_then_the_demo_then_advice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adlm.io.load.BOX", tmp_path / "box")
    for command in ("sample", "serve"):
        assert cli.main([command]) == 1
        err = capsys.readouterr().err
        assert "no checkpoint given" in err and "adlm demo" in err and err.count("\n") == 1
    readable_model(tmp_path / "runs" / "demo" / "export")
    assert default_checkpoint() == DEMO
    assert cli.main(["sample", "sampling.length=8", "sampling.steps=2", "train.device=cpu"]) == 0
    assert "--- seed 0" in capsys.readouterr().out
    readable_model(tmp_path / "box")
    assert default_checkpoint() == tmp_path / "box"


def test_every_serve_key_has_a_default_that_passes_the_checks():
    cfg = config.load([])
    assert cfg.serve.host == "127.0.0.1" and cfg.serve.cors == "" and cfg.serve.api_key == ""
    assert cfg.serve.max_n <= cfg.sampling.batch_size + cfg.serve.queue

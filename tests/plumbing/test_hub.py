"""Models on the hub, with the hub's library faked: what is uploaded is what is loaded, and failures are one line."""

import shutil

import huggingface_hub
import pytest
import torch
import yaml
from exports import export

import adlm
from adlm import cli
from adlm.data import remote

NAME = "someone/tiny-adlm"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A hub on disk; `calls` lists what was asked of it."""
    root, calls = tmp_path / "hub", []

    class FakeApi:
        def create_repo(self, repo_id, private=False, exist_ok=False):
            calls.append(("create", repo_id, private, exist_ok))

        def upload_folder(self, repo_id, folder_path):
            calls.append(("upload", repo_id))
            shutil.copytree(folder_path, root / repo_id)

    def download(repository, revision, allow_patterns):
        calls.append(("download", repository, revision))
        if not (root / repository).exists():
            raise FileNotFoundError(f"404: there is no {repository}\nand a paragraph of advice")
        return str(root / repository)

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(remote, "notice_missing_network", lambda: None)
    # An earlier test of the same worker may have noticed that there is no network.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return root, calls


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return adlm.load(export(tmp_path_factory.mktemp("hub") / "export"), "cpu")


def test_what_is_pushed_is_what_is_loaded(lm, shelf):
    root, calls = shelf
    lm.push_to_hub(NAME, private=True)
    assert calls == [("create", NAME, True, True), ("upload", NAME)]
    assert {p.name for p in (root / NAME).iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "README.md",
    }
    again = adlm.load(NAME, "cpu")
    x = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.log_probs(x), lm.log_probs(x))
    assert again.tokenizer.fingerprint == lm.tokenizer.fingerprint
    assert again.generate(n=1, steps=4)[0].text == lm.generate(n=1, steps=4)[0].text


def test_the_card_says_what_the_hub_reads_and_how_to_load_it(lm, shelf):
    root, _ = shelf
    lm.push_to_hub(NAME)
    _, front, body = (root / NAME / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "adlm", "pipeline_tag": "text-generation", "tags": ["masked-diffusion", "test"],
    }  # fmt: skip
    assert f'adlm.load("{NAME}")' in body and "# An adlm language model" in body


def test_commands_take_hub_names(lm, shelf, capsys):
    lm.push_to_hub(NAME)
    assert cli.main(["sample", NAME, "sampling.steps=2", "train.device=cpu"]) == 0
    assert "--- seed 0" in capsys.readouterr().out


def test_failures_are_one_line_with_a_way_out(lm, shelf, monkeypatch, capsys):
    with pytest.raises(ValueError, match="owner/model, got 'tiny'"):
        lm.push_to_hub("tiny")
    assert cli.main(["sample", "someone/else", "train.device=cpu"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "404" in error and "paragraph" not in error and "give a run folder" in error

    def refuse(self, *args, **kwargs):
        raise PermissionError("401: no token\nlog in with a command")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    with pytest.raises(
        ValueError, match=r"cannot be uploaded to the hub \(PermissionError: 401: no token\); lm\.save"
    ) as e:
        lm.push_to_hub(NAME)
    assert "\n" not in str(e.value)


def test_without_network_the_answer_comes_at_once(lm, monkeypatch):
    """The real library in its offline mode: no retries, one line."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for act in (lambda: lm.push_to_hub(NAME), lambda: adlm.load("nobody/nothing-here", "cpu")):
        with pytest.raises(ValueError, match="no network") as e:
            act()
        assert "\n" not in str(e.value)


def test_missing_package_is_said(lm, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(remote, "notice_missing_network", lambda: None)
    with pytest.raises(ValueError, match="needs huggingface_hub"):
        lm.push_to_hub(NAME)

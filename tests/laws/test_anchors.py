"""`adlm anchors`: every position is hidden, the tallies mean what they say, text comes from anywhere."""

import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from documents import Document
from exports import L, export

from adlm import cli
from adlm.api.command import read_text
from adlm.evaluation import anchors
from adlm.evaluation.anchors import Guesses, Reading, read_levels, windows
from adlm.objectives.anchors import describe_anchors, describe_rule, for_texts
from adlm.schema import ObjectiveConfig
from adlm.tables import ANCHOR_RULES


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_windows_hide_everything_maskable_and_nothing_else(share):
    maskable = torch.tensor([False, *[True] * 20, False])
    masks = torch.stack(list(windows(maskable, share, seed=3, turn=0)))
    assert (masks.sum(1) == max(1, round(share * 20))).all()
    assert torch.equal(masks.any(0), maskable)
    other = torch.stack(list(windows(maskable, share, seed=3, turn=1)))
    assert share == 1.0 or not torch.equal(masks, other)


def test_tallies_of_networks_that_are_known(monkeypatch):
    """The anchor network knows every token; the denoiser always says 7, which would be an anchor if it came once."""

    def read(model, schedule, tokens_L, hidden_L, top=3):
        found = []
        for l in hidden_L.nonzero().squeeze(1).tolist():
            truth = int(tokens_L[l])
            found.append(Reading(l, truth, Guesses([truth], [0.5], 1, 0.5), Guesses([7], [0.9], 4, 0.1)))
        return found

    class Model:
        class tokenizer:
            special_ids = frozenset({0})

        device, length, model, schedule = torch.device("cpu"), 8, None, None

    monkeypatch.setattr(anchors, "read_hidden", read)
    monkeypatch.setattr(anchors, "FRACTIONS", (1 / 7, 1.0))
    tokens = torch.tensor([0, 1, 1, 2, 3, 3, 4, 5])  # anchors at tau=1: 0 (not maskable), 2, 4, 5
    rule = ObjectiveConfig(tau=1)
    one, all_ = read_levels(Model(), rule, [tokens], draws=1, seed=0)  # type: ignore[arg-type]
    for level in (one, all_):
        anchor = level.as_dict()["anchor"]
        assert (anchor["recall"], anchor["precision"], anchor["median_rank"]) == (1.0, 1.0, 1)
        assert anchor["nats"] == pytest.approx(0.6931, abs=1e-3) and anchor["hidden_anchors"] == 3
        denoiser = level.as_dict()["denoiser"]
        assert (denoiser["recall"], denoiser["median_rank"], level.as_dict()["agreement"]) == (0.0, 4, 0.0)
        assert sorted(level.first) == [2, 5, 6], "positions in the text, without its begin token"
    # hidden alone, a 7 would come once; hidden all together, it comes seven times and is no anchor of that sequence
    assert (one.tallies["denoiser"].claims, one.tallies["denoiser"].precision) == (7, 0.0)
    assert (all_.tallies["denoiser"].claims, all_.tallies["denoiser"].precision) == (0, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tmp_path_factory.mktemp("anchored") / "export")


def test_the_command_tells_and_writes(folder, tmp_path, capsys):
    text = "hello <b>there</b> [bold]" + "x" * L  # two rows, and text that must not become markup
    assert cli.main(["anchors", str(folder), text, f"out={tmp_path / 'a.json'}", "--json"]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "a.json").read_text())
    assert json.loads(said.splitlines()[-1]) == result
    assert result["tokens"] == len(text) and 0 < result["anchors"] < len(text)
    assert [level["share"] for level in result["levels"]] == list(anchors.FRACTIONS)
    for level in result["levels"]:
        for name in ("anchor", "denoiser"):
            assert level[name]["hidden_anchors"] >= result["anchors"] and level[name]["median_rank"] >= 1
            assert 0 <= level[name]["recall"] <= 1
    readings = result["readings"]
    assert [r["token"] for r in readings] == [text[r["position"]] for r in readings]
    assert len(readings) == result["anchors"] and all(len(r["said"]) == 5 for r in readings)
    document = Document((tmp_path / "a.html").read_text())
    assert "Rank of the truth" in document.words and "hello <b>there</b> [bold]" in document.words.replace("\n", "")
    assert "b" not in document.tags


@pytest.mark.parametrize(
    "rule", sorted({*ANCHOR_RULES.entries, "loss", "rarity"})
)  # two of them are of earlier versions
def test_a_text_is_marked_whatever_the_rule_of_training(tmp_path, rule):
    """Where the rule chooses no tokens (all, none), or is there no more, the paper's rule is shown."""
    folder = export(tmp_path / "export")
    info = json.loads((folder / "config.json").read_text())
    info["objective"] |= {"anchor_rule": rule, "tau": 1}
    (folder / "config.json").write_text(json.dumps(info))
    assert cli.main(["anchors", str(folder), "hello", f"out={tmp_path / 'a.json'}"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    often, anchors = ("more than", 2) if rule == "common" else ("at most", 3)
    shown = f"tokens that occur {often} 1 time in their sequence"
    assert result["anchors"] == anchors and result["rule"].startswith(shown)
    assert ("the paper's rule; this model was trained with:" in result["rule"]) == (rule not in ("count", "common"))


def test_text_comes_from_words_files_or_standard_input(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("from a file")
    assert read_text(["two", "words"], "adlm anchors") == "two words"
    for word in (f"{tmp_path / 't.txt'}", f"@{tmp_path / 't.txt'}"):
        assert read_text([word], "adlm anchors") == "from a file"
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed"))
    assert read_text([], "adlm anchors") == "typed"
    with pytest.raises(ValueError, match="there is no file"):
        read_text(["@nowhere"], "adlm anchors")
    (tmp_path / "bad").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text([str(tmp_path / "bad")], "adlm anchors")


def test_models_without_an_anchor_network_are_refused(tmp_path, capsys):
    plain = export(tmp_path / "plain", anchored=False)
    assert cli.main(["anchors", str(plain), "text"]) == 1
    assert "has no anchor network" in capsys.readouterr().err
    causal = export(tmp_path / "a2r", causal=True, conditioning="none")
    assert cli.main(["anchors", str(causal), "text"]) == 1
    assert "is causal" in capsys.readouterr().err


def test_a_model_of_common_anchors_shows_those():
    cfg = ObjectiveConfig(anchor_rule="common", tau=2)
    assert for_texts(cfg) is cfg and describe_rule(cfg) == "tokens that occur more than 2 times in their sequence"
    assert for_texts(replace(cfg, anchor_rule="all")).anchor_rule == "count"


def test_anchors_in_words():
    """A key that the rule does not read (tau, with the rule `all`) is seen to do nothing before the run."""
    cfg = ObjectiveConfig(name="anelbo", anchor_rule="all", anchor_positions="masked", anchor_fraction=0.25, tau=3)
    assert describe_anchors(cfg) == "all tokens, where masked; a random 0.25 of them at each step"
    assert describe_anchors(replace(cfg, gamma_until=0.25)) == describe_anchors(cfg) + "; in the first 0.25 of the run"
    assert describe_anchors(replace(cfg, gamma=0.0)) == "none"
    everywhere = ObjectiveConfig(tau=1)
    assert describe_anchors(everywhere) == "tokens that occur at most 1 time in their sequence"
    for rule in ANCHOR_RULES.entries:
        assert describe_rule(replace(cfg, anchor_rule=rule))

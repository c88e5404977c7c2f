"""Objectives, anchor rules, schedules and samplers of other packages work everywhere, with no edit of ours."""

import json
from importlib.metadata import EntryPoint

import foreign
import pytest
from runs import overrides

import adlm
from adlm import cli, config, tables
from adlm.evaluation.evaluate import make_settings
from adlm.schema import SamplingConfig, ServeConfig

TABLES = (tables.OBJECTIVES, tables.ANCHOR_RULES, tables.SCHEDULES, tables.SAMPLERS)


@pytest.fixture(scope="module", autouse=True)
def installed():
    """As if the package of tests/support/foreign.py were installed."""

    groups = foreign.ENTRY_POINTS.items()
    found = [EntryPoint(name, value, group) for group, named in groups for name, value in named.items()]
    patch = pytest.MonkeyPatch()
    patch.setattr(tables, "installed", lambda: found)
    for table in TABLES:
        table.__dict__.pop("targets", None)
    yield
    patch.undo()
    for table in TABLES:
        table.__dict__.pop("targets", None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of `adlm train` with the foreign objective and schedule."""
    folder = tmp_path_factory.mktemp("foreign")
    line = overrides(folder, objective__name="my-bound", noise__name="my-schedule", train__steps=3, train__device="cpu")
    assert cli.main(["train", *line]) == 0
    return folder / "run"


def test_a_foreign_objective_trains(run):
    kinds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [entry for entry in kinds if entry["kind"] == "train"]
    assert len(trained) == 3 and all("mine" in entry for entry in trained)


def test_a_foreign_anchor_rule_trains(tmp_path):
    line = overrides(tmp_path, objective__anchor_rule="my-rule", train__steps=2, train__device="cpu")
    assert cli.main(["train", *line]) == 0


@pytest.mark.parametrize("sampler", ["my-rates", "my-order"])
def test_foreign_samplers_draw(run, sampler, capsys):
    """The command line, Python, evaluation and the server's list know them."""
    assert cli.main(["sample", str(run), f"sampling.sampler={sampler}", "sampling.steps=4", "train.device=cpu"]) == 0
    lm = adlm.load(run, device="cpu")
    (text,) = lm.generate(sampler=sampler, steps=4)
    assert len(text.tokens) == 32 and lm.model.mask_id not in text.tokens
    settings = make_settings(lm, [SamplingConfig(sampler=sampler, steps=n) for n in (4, 8)], run)
    assert len(settings) == (2 if sampler == "my-rates" else 1), "steps do not matter to my-order"


def test_the_server_offers_foreign_samplers(run):
    pytest.importorskip("starlette")
    from adlm.serving.jobs import ServerMetrics
    from adlm.serving.service import Served

    served = Served("m", adlm.load(run, device="cpu"), ServeConfig(), SamplingConfig(), ServerMetrics())
    assert {"my-rates", "my-order", "mdlm"} <= set(served.samplers) and "score" not in served.samplers


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("objective.name=my-bund", "did you mean 'my-bound'"),
        ("sampling.sampler=my-rats", "did you mean 'my-rates'"),
        ("sampling.sampler=my-rates sampling.steps=1", "with one step needs sampling.eta=0"),
        ("algo=ar objective.name=my-bound", "my-bound needs model.causal=false"),
    ],
)
def test_their_rules_are_rules_of_the_command_line(typed, says):
    with pytest.raises(ValueError) as error:
        config.load(typed.split())
    assert says in str(error.value)


def test_what_the_release_lacks_has_no_parity(run):
    with pytest.raises(ValueError, match="the release has no sampler 'my-order'"):
        adlm.load(run, device="cpu").generate(sampler="my-order", parity="release")

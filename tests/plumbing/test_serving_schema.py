"""The OpenAPI document is true: schemathesis sends what it allows and what it forbids, and knows every answer."""

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from served import load_tiny, serving

from adlm import tables
from adlm.config.keys import keys
from adlm.rules import Range
from adlm.serving.bodies import NOT_IN_REQUESTS, OWN_FORM, SETTINGS

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
# Some valid bodies are refused for what a schema cannot say: a text of too many tokens, two ways to give a row.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "429"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving({"tiny": load_tiny(tmp_path_factory.mktemp("schema") / "tiny")}, max_steps=16, queue=64) as running:
        yield running


def test_every_route_documents_its_answers(server):
    document = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/completions", "/v1/models", "/v1/frames", "/v1/infill", "/v1/score", "/v1/anchors", "/v1/tokenize",
            "/healthz", "/readyz", "/metrics"} <= set(document["paths"])  # fmt: skip
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert "200" in statuses
            if method == "post":
                assert {"400", "401", "404", "408", "413", "422", "503"} <= statuses, path
                for status in statuses - {"200"}:
                    shape = operation["responses"][status]["content"]["application/json"]["schema"]["$ref"]
                    assert shape.endswith("/ErrorAnswer"), (path, status)


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed (extra 'test')")
@pytest.mark.slow
def test_schemathesis_finds_nothing(server, tmp_path):
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [str(SCHEMATHESIS), "--config-file", str(config), "run", server.url + "/openapi.json"]
    options = ["--max-examples", "40", "--seed", "1", "--checks", "all", "--generation-database", "none"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    shutil.rmtree(tmp_path / ".hypothesis", ignore_errors=True)
    assert 'status="500"' not in server.service.metrics.text()


def test_requests_carry_every_sampling_setting_by_the_rules_of_the_schema(server):
    """A setting that is added to SamplingConfig is a field of requests, or is listed as one that is not."""
    found = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]
    fields = {key.name.removeprefix("sampling."): key for key in keys().values() if key.name.startswith("sampling.")}
    assert set(SETTINGS) == set(fields) - {*OWN_FORM, *NOT_IN_REQUESTS}
    for name in SETTINGS:
        key, (said, nothing) = fields[name], found[name]["anyOf"]
        assert found[name]["description"] == key.help and nothing == {"type": "null"}
        assert said["type"] == {int: "integer", float: "number", str: "string"}[key.kind]
        if isinstance(key.rule, Range):
            low, high = (said.get(f"exclusive{end}", said.get(end.lower())) for end in ("Minimum", "Maximum"))
            assert (low, high) == (
                key.rule.low,
                None if key.rule.high == float("inf") else pytest.approx(key.rule.high),
            )
            assert ("exclusiveMinimum" in said, "exclusiveMaximum" in said) == (key.rule.open_low, key.rule.open_high)
        elif key.rule is not None:
            assert said["enum"] == sorted(key.rule.names)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """An installed package with two entry points: a sampler, and one that cannot be loaded."""
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[adlm.samplers]\nforeign-order = foreign_sampler:ForeignOrder\nbroken = nowhere:Nothing\n"
    )
    source = "from adlm.samplers.scheduled import FirstHitting\n\n\nclass ForeignOrder(FirstHitting):\n    pass\n"
    (tmp_path / "foreign_sampler.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    tables.installed.cache_clear()
    fresh = tables.Table("samplers", tables.SAMPLERS.entries).targets
    monkeypatch.setitem(tables.SAMPLERS.__dict__, "targets", fresh)
    yield
    tables.installed.cache_clear()


def test_a_sampler_of_another_package_is_served_and_documented(foreign, tmp_path):
    """An entry point is enough: the enum of requests, the list of the page and the engine read the one table."""
    with serving({"tiny": load_tiny(tmp_path / "tiny")}) as running, httpx.Client(base_url=running.url) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        for name in ("CompletionBody", "FramesBody", "InfillBody"):
            assert "foreign-order" in schemas[name]["properties"]["sampler"]["anyOf"][0]["enum"]
        listed = http.get("/v1/models").json()["data"][0]["samplers"]
        assert "foreign-order" in listed and "broken" not in listed
        body = {"prompt": "a", "max_tokens": 12, "seed": 3}
        mine, same = (
            http.post("/v1/completions", json=body | {"sampler": name}).json()["choices"][0]
            for name in ("foreign-order", "first-hitting")
        )
        assert mine == same
        for name, says in (("foreign-ordr", "did you mean 'foreign-order'?"), ("broken", "nowhere")):
            refused = http.post("/v1/completions", json=body | {"sampler": name})
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]

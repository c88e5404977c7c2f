"""deploy/: the manifests say what the server does, and HAProxy accepts its configuration."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from adlm.schema import SamplingConfig, ServeConfig
from adlm.serving.app import make_app
from adlm.serving.service import Service

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "adlm.yaml").read_text()))
    return {manifest["kind"]: manifest for manifest in found}


@pytest.fixture(scope="module")
def service() -> Service:
    return Service({}, ServeConfig(), SamplingConfig())


def test_probes_ask_routes_of_the_server(manifests, service):
    routes = {route.path for route in make_app(service).routes}
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["path"] in routes
    haproxy = (DEPLOY / "haproxy.cfg").read_text()
    assert "option httpchk GET /readyz" in haproxy
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", "a draining server is not ready"


def test_the_drain_has_time(manifests):
    """serve.grace and the pause before SIGTERM end before Kubernetes kills."""
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    grace = next(int(word.removeprefix("grace=")) for word in container["args"] if word.startswith("grace="))
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + grace + 10 < pod["terminationGracePeriodSeconds"]
    timeout = int((DEPLOY / "haproxy.cfg").read_text().split("timeout server")[1].split()[0].removesuffix("s"))
    assert timeout > ServeConfig().timeout


def test_autoscaling_reads_metrics_that_exist(manifests, service):
    text = service.metrics.text()
    adapter = (DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text()
    for metric in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"]
        assert f"# TYPE {name} gauge" in text
        assert name.removeprefix("adlm_") in adapter


def test_names_fit_together(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = manifests[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    (rule,) = manifests["Ingress"]["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": manifests["Service"]["metadata"]["name"], "port": {"name": "http"}}
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifests["Deployment"]["metadata"]["name"])


def test_compose_starts_what_haproxy_expects():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    environment = compose["services"]["haproxy"]["environment"]
    used = set(environment) & {"ADLM_BIND", "ADLM_1", "ADLM_2"}
    assert len(used) == 3
    assert {environment[name].split(":")[0] for name in ("ADLM_1", "ADLM_2")} <= compose["services"].keys()


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy on this machine")
def test_haproxy_accepts_its_configuration():
    places = {"ADLM_BIND": "127.0.0.1:18080", "ADLM_1": "127.0.0.1:1", "ADLM_2": "127.0.0.1:2"}
    done = subprocess.run(
        ["haproxy", "-c", "-f", str(DEPLOY / "haproxy.cfg")], env=os.environ | places, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout

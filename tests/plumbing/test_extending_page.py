"""docs/extending.md, followed literally: its files are written, its package is found, its commands run."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The page's files, and its package installed as pip would: the modules and their entry points on the path."""
    home = tmp_path_factory.mktemp("extending")
    files = re.findall(r"```(?:toml|python)\n# (my-package/\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["my-package/pyproject.toml", "my-package/my_package/parts.py"]
    for name, text in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
    project = tomllib.loads((home / "my-package" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    facts = home / "my-package" / "my_package-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups]
    (facts / "entry_points.txt").write_text("\n".join(sections))
    (home / "haiku.txt").write_text("an old silent pond, a frog jumps in: the sound of water\n" * 400)
    return home


def environment(home: Path) -> dict[str, str]:
    path = [str(home / "my-package"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "ADLM_CACHE": str(home / "cache"),
        "PYTHONUNBUFFERED": "1",
    }


def call(home: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=home, env=environment(home), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def complete(home: Path, *words: str) -> str:
    """Start `adlm serve`, ask for a completion with the new sampler, and return the list of models and samplers."""
    command = [sys.executable, "-m", "adlm", "serve", *words, "port=0", "train.device=cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment(home), **pipes) as server:
        try:
            assert server.stdout is not None
            said = iter(server.stdout)
            address = next(m[0] for line in said if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))
            body = {"model": "haiku", "prompt": "an", "max_tokens": 8, "sampler": "halves", "steps": 4, "seed": 1}
            for _ in range(100):  # the address is printed before the models are ready
                try:
                    with urllib.request.urlopen(f"{address}/readyz", timeout=5):
                        break
                except OSError:
                    time.sleep(0.3)
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["seed"] == 1
            with urllib.request.urlopen(f"{address}/v1/models", timeout=10) as models:
                return models.read().decode()
        finally:
            server.terminate()


SMALL = ("model.hidden_size=32", "model.n_heads=2", "model.length=32", "train.global_batch_size=4", "train.device=cpu")


# The page's commands in one process: each of its own would load torch again.
USED = """
import shlex, sys
import adlm
from adlm import cli

for line in sys.argv[1:]:
    assert cli.main(shlex.split(line)) == 0, line
lm = adlm.load("runs/haiku", device="cpu")
(text,) = lm.generate(sampler="halves", steps=8)
assert lm.model.mask_id not in text.tokens
print("drawn from Python")
"""


def test_the_page_is_true(home):
    lines = re.findall(r"^adlm (train|sample|serve) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in lines] == ["train", "sample", "serve"]
    (_, train), (_, sample), (_, serve) = lines
    said = call(
        home, "-c", USED,
        " ".join(["train", train, *SMALL]), f"sample {sample} train.device=cpu", "config sampling.sampler=list",
    )  # fmt: skip
    assert "flat" in (home / "runs" / "haiku" / "metrics.jsonl").read_text()
    assert "gated" in (home / "runs" / "haiku" / "export" / "config.json").read_text()
    for expected in ("seed 0", "halves", "drawn from Python"):
        assert expected in said
    pytest.importorskip("fastapi")
    assert "halves" in complete(home, *serve.split())

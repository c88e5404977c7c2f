"""What is released: the files of the wheel and the sdist, the metadata, the lock file; and the wheel at work."""

import email
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest
from runs import ON_A_CPU, overrides

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = ROOT / "requirements.lock"
NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*", re.IGNORECASE)
# What setuptools would pack, without packing it: the model takes seconds to compress.
LISTING = """
import json, sys
import setuptools  # gives distutils its own form
from distutils.core import run_setup
command = run_setup("setup.py", ["--quiet", "egg_info", "--egg-base", sys.argv[1]]).get_command_obj("build_py")
command.ensure_finalized()
files = command.get_outputs(include_bytecode=False)
print(json.dumps([file.replace("\\\\", "/").removeprefix("build/lib/") for file in files]))
"""

# A tiny training in the public release's words, beside the corpus of `overrides`.
RELEASE_LINE = shlex.split(
    "mode=train data=file data.path=corpus.jsonl data.tokenizer=bytes data.valid_fraction=0.1 data.cache_dir=cache"
    " loader.global_batch_size=4 trainer.max_steps=1 train.valid_sequences=4"
    " model.length=32 model.hidden_size=16 model.n_heads=2 model.n_blocks=2"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[set[str], set[str], email.message.Message]:
    """Files of the wheel, files of the sdist, metadata."""
    folder = tmp_path_factory.mktemp("egg")
    line = [sys.executable, "-c", LISTING, str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    info = folder / "adlm.egg-info"
    sdist = {name.replace("\\", "/") for name in (info / "SOURCES.txt").read_text(encoding="utf-8").splitlines()}
    metadata = email.message_from_string((info / "PKG-INFO").read_text(encoding="utf-8"))
    return set(json.loads(done.stdout.splitlines()[-1])), sdist, metadata


def tracked() -> list[str]:
    """Files under version control; an unpacked sdist has no version control, and its own list is what it holds."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a clone")
    return done.stdout.splitlines()


def test_the_wheel_holds_the_package_and_the_shims(packed):
    wheel, _, _ = packed
    sources = {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    assert sources <= wheel, sorted(sources - wheel)
    assert {"adlm_main.py", "main.py", "adlm/py.typed", "adlm/box/LICENSE", "adlm/box/model.safetensors"} <= wheel
    assert {name.split("/")[0] for name in wheel} == {"adlm", "adlm_main.py", "main.py"}


def test_the_sdist_holds_what_the_tests_need(packed):
    _, sdist, _ = packed
    missing = {name for name in tracked() if not name.startswith(".")} - sdist
    assert not missing, sorted(missing)
    assert not [name for name in sdist if "__pycache__" in name or name.endswith(".pyc")]


def test_the_metadata_says_who_what_and_under_which_licences(packed):
    _, _, metadata = packed
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-SA-4.0"
    assert metadata.get_all("License-File") == ["LICENSE", "src/adlm/box/LICENSE"]
    assert metadata["Author"] == "The adlm authors"
    assert "Paper, https://arxiv.org/abs/2505.18456" in metadata.get_all("Project-URL")
    assert metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier")
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "lm = adlm.load()" in page
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets and all(target.startswith("https://") for target in targets), "a relative target is dead on PyPI"
    assert "![" not in page


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1] == version  # type: ignore[index]


def test_links_between_the_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            to = page.parent / path if path else page
            assert to.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", to.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{page.name}: {target}"
    assert len(pages) > 10


def test_every_import_is_declared():
    """Whatever src imports is the standard library, ours, or named in pyproject.toml."""
    extras = [name for names in PROJECT["optional-dependencies"].values() for name in names]
    declared = {normal(name) for name in PROJECT["dependencies"] + extras}
    # module -> the package that brings it, where the two differ
    brings = {
        "yaml": "pyyaml",
        "hydra": "hydra-core",
        "sklearn": "scikit-learn",
        "mauve": "mauve-text",
        "tqdm": "lm-eval",
    }
    brings |= {
        "triton": "torch",
        "pydantic": "fastapi",
        "pydantic_core": "fastapi",
        "starlette": "fastapi",
        "huggingface_hub": "transformers",
    }
    for path in sorted((ROOT / "src").rglob("*.py")):
        lines = re.findall(r"^\s*(?:import|from) (\w+)[\w.]*(?: import| as|$)", path.read_text(encoding="utf-8"), re.M)
        for module in set(lines) - sys.stdlib_module_names - {"adlm"}:
            assert normal(brings.get(module, module)) in declared, f"{path} imports {module}"


def normal(requirement: str) -> str:
    """The name of a requirement, as an index spells it."""
    found = NAME.match(requirement)
    assert found, requirement
    return re.sub(r"[._-]+", "-", found.group()).lower()


def locked() -> dict[str, list[str]]:
    """Entries of the lock file: name -> its lines."""
    text = LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found: dict[str, list[str]] = {}
    for line in filter(None, lines):
        found.setdefault(normal(line), []).append(line)
    return found


def test_the_lock_pins_every_dependency_with_hashes():
    entries = locked()
    wanted = PROJECT["dependencies"] + [n for names in PROJECT["optional-dependencies"].values() for n in names]
    assert {normal(name) for name in wanted} - {"adlm"} <= set(entries)
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    for name, version in pins.items():
        assert entries[normal(name)][0].startswith(f"{normal(name)}=={version} "), "run `make lock`"
    for line in (line for lines in entries.values() for line in lines):
        assert re.match(r"[\w.-]+==[\w.]+( ; [^\\]+?)?( +--hash=sha256:[0-9a-f]{64})+$", line), line
    assert not re.search(r"https?:|file:|--index|--find-links|-e |@ |/\w+/\w+", LOCK.read_text(encoding="utf-8"))


def test_everything_installed_is_pinned():
    """Every package that a dependency of ours needs here stands in the lock, in this version or another."""
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    entries, queue, seen = locked(), [Requirement(name) for name in PROJECT["dependencies"]], set()
    while queue:
        requirement = queue.pop()
        name = normal(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in entries, name
        try:
            queue += [Requirement(text) for text in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
    assert len(seen) > 10


# ---- slow: the release itself ---------------------------------------------------------------------------------------


def run(*line: object, cwd: Path, **more: object) -> str:
    environment = {key: value for key, value in ON_A_CPU.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    more = {"env": environment, "timeout": 250} | more
    done = subprocess.run([str(word) for word in line], cwd=cwd, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("needs uv")
    own_builds = ["--no-verify-hashes"] if os.environ.get("PIP_FIND_LINKS") else []  # as in the Makefile
    copy = tmp_path / "copy"  # a build leaves traces in its folder
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", cwd=copy)
    (wheel,) = (tmp_path / "dist").glob("adlm-*.whl")
    (sdist,) = (tmp_path / "dist").glob("adlm-*.tar.gz")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {sdist.name}: {sdist.stat().st_size:,} bytes")
    assert "adlm_main.py" in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("tests/support/runs.py") for name in archive.getnames())

    home = tmp_path / "home"  # nothing of the checkout is in reach
    home.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=home)
    folder = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, adlm = folder / "python", folder / "adlm"
    links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}  # of torch, where there is a build of one's own
    install = [uv, "pip", "install", "--quiet", "--python", python, "-c", ROOT / "requirements.lock", *own_builds]
    run(*install, f"{wheel}[serve]", cwd=home, env=os.environ | links, timeout=900)

    assert "adlm" in run(adlm, "--help", cwd=home)
    sampled = run(adlm, "sample", "sampling.length=16", "sampling.steps=4", cwd=home)
    assert sampled.strip()
    run(adlm, "train", *overrides(home, train__steps=2), cwd=home)
    assert run(adlm, "sample", home / "run", "sampling.length=8", "sampling.steps=2", "--json", cwd=home)
    for shim in ("adlm_main", "main"):
        run(python, "-m", shim, *RELEASE_LINE, f"checkpointing.save_dir={home / shim}/", cwd=home)
        assert (home / shim / "export" / "config.json").is_file()
    serve_once(adlm, home)


def serve_once(adlm: Path, home: Path) -> None:
    """Start a server, ask it for one text, stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in ON_A_CPU.items() if key != "PYTHONPATH"}
    line = [adlm, "serve", f"port={port}", "sampling.steps=4"]
    with (home / "serve.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(line, cwd=home, stdout=log, stderr=log, env=environment)
        try:
            body = json.dumps({"prompt": "The history of", "max_tokens": 8}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            deadline = time.monotonic() + 120
            while not answers(request, told := []):
                assert time.monotonic() < deadline and server.poll() is None, (home / "serve.log").read_text("utf-8")
                time.sleep(0.2)
            assert json.loads(told[0])["choices"][0]["text"]
        finally:
            server.terminate()
            server.wait(timeout=60)


def answers(request: urllib.request.Request, told: list[bytes]) -> bool:
    """Whether a server answers; what it says goes to `told`."""
    try:
        told.append(urllib.request.urlopen(request, timeout=60).read())
    except OSError:
        return False
    return True

"""Windows and macOS, as far as they can be had on Linux: without the modules, calls and encodings they lack."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exports import export
from pretend_mps import pretend_mps
from runs import ON_A_CPU, overrides, read_lines

import adlm
from adlm import cli, config
from adlm.io.paths import pick_device
from adlm.schema import TrainConfig
from adlm.training.parallel import world

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
POSIX_NAMES = {
    "os": {"fork", "killpg", "setsid", "getuid", "geteuid", "getpgid", "mkfifo", "sched_getaffinity", "sysconf"},
    "signal": {"SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGALRM", "SIGQUIT", "SIGPIPE", "pause", "setitimer"},
}  # fmt: skip
IN_A_PROCESS = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)

import pytest
from test_platforms import forget_posix
from adlm import cli

forget_posix(pytest.MonkeyPatch())
for line in json.loads(sys.argv[1]):
    assert cli.main(line) == 0, line
"""


def forget_posix(monkeypatch) -> None:
    """Make calls do what they do on Windows: folders cannot be opened, a rename replaces nothing, fsync wants a file
    that may be written."""
    open_file, sync, rename = os.open, os.fsync, os.rename

    def open_no_folder(path, flags, *more, **named):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, flags, *more, **named)

    def sync_written(descriptor):
        os.write(descriptor, b"")  # EBADF if it was opened for reading
        sync(descriptor)

    def rename_to_free(source, target, **named):
        if os.path.exists(target):
            raise FileExistsError(17, "File exists", str(source), None, str(target))
        rename(source, target, **named)

    for name, replacement in {"open": open_no_folder, "fsync": sync_written, "rename": rename_to_free}.items():
        monkeypatch.setattr(os, name, replacement)
    monkeypatch.setattr(shutil, "_use_fd_functions", False)  # rmtree without descriptors of folders
    for name in ("fcntl", "resource"):
        monkeypatch.setitem(sys.modules, name, None)


def lines_of_a_run(folder: Path) -> list[list[str]]:
    """Train, resume, sample."""
    texts = [f"Die Katze {i} läuft über die Straße, öfter als früher; 猫 - ½" for i in range(200)]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
    short = ["train.valid_every=2", "checkpoint.every=2"]
    return [
        ["train", *overrides(folder, train__steps=2), *short],
        ["train", *overrides(folder, train__steps=4), *short],
        ["sample", str(folder / "run"), "sampling.length=8", "sampling.steps=4", f"out={folder / 'samples.jsonl'}"],
    ]


def test_a_run_needs_nothing_of_posix(tmp_path, monkeypatch, capsys):
    forget_posix(monkeypatch)
    for line in lines_of_a_run(tmp_path):
        assert cli.main(line) == 0, line
    assert "resuming" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").stat().st_size
    assert "memory_gib" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_process_needs_nothing_of_posix(tmp_path):
    """The same from the first import on, where text without a stated encoding is ASCII and the console has a code
    page."""
    env = ON_A_CPU | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    line = [sys.executable, "-c", IN_A_PROCESS, json.dumps(lines_of_a_run(tmp_path))]
    done = subprocess.run(line, env=env, capture_output=True, text=True, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr and (tmp_path / "samples.jsonl").stat().st_size


def test_sources_state_encodings_and_ask_for_posix_with_care():
    assert [problem for path in SOURCES for problem in problems(path)] == []


def problems(path: Path) -> list[str]:
    """What would fail on another system, one line each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for s in t.body for n in ast.walk(s)}
    found = []
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and reads_text_unstated(node):
            found.append(f"{where}: state encoding= (Windows would use its code page)")
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded:
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [
                f"{where}: not every system has {name}; import it inside try" for name in POSIX_MODULES & {*names}
            ]
        if isinstance(node, ast.Attribute) and node.attr in POSIX_NAMES.get(owner(node), ()):
            found.append(f"{where}: not every system has {owner(node)}.{node.attr}; use getattr")
    return found


def reads_text_unstated(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the system's encoding: open(), .open(), .read_text(), .write_text()."""
    of = owner(call.func) if isinstance(call.func, ast.Attribute) else None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if of is not None and name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    if name != "open" or of == "os":
        return False
    first = call.args[0] if call.args else None
    if of is not None and first is not None and not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return False  # no mode of a file, but an `open` of its own: of an archive, a service
    modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    modes += [k.value.value for k in call.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)]
    return not any("b" in mode and set(mode) <= set("rwxab+") for mode in modes)


def owner(attribute: ast.Attribute) -> str:
    """`os` of os.open; nothing where it is an expression."""
    return attribute.value.id if isinstance(attribute.value, ast.Name) else ""


def test_a_console_of_a_code_page_shows_any_text(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli, "_run", lambda *argv: print("a cat: 猫") or 0)
    assert cli.main(["sample"]) == 0
    assert out.buffer.getvalue().decode("cp1252").split() == ["a", "cat:", "\\u732b"]


@pytest.mark.parametrize(("cuda", "mps", "found"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_takes_the_best_device_there_is(cuda, mps, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto").type == found


def test_mps_is_a_device_where_there_is_one(monkeypatch):
    assert config.load(["train.device=mps"]).train.device == "mps"
    with pytest.raises(ValueError, match=r"mps.*must be auto, cpu, cuda, cuda:N or mps"):
        config.load(["train.device=mps:1"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no MPS device"):
        pick_device("mps")


@pytest.fixture
def mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pretend_mps():
        yield


@pytest.mark.parametrize("causal", [False, True])
def test_mps_draws_and_scores_as_the_cpu_does(causal, tmp_path, mps):
    """Without float64 on the device: MPS has none."""
    folder = export(tmp_path / "model", conditioning="constant" if causal else "sigma", causal=causal)
    host, device = (adlm.load(folder, device=name) for name in ("cpu", "mps"))
    assert device.device.type == "mps"
    ways = [{"sampler": "remdm-conf", "top_p": 0.9}, {"sampler": "anchor-first"}, {"min_p": 0.1, "prompt": "The "}]
    for way in [{"top_k": 5}] if causal else ways:
        texts = [[g.tokens for g in lm.generate(n=2, steps=4, length=12, **way)] for lm in (host, device)]
        assert texts[0] == texts[1]
    assert host.score("a text").nll == device.score("a text").nll


def test_mps_trains_and_measures_as_the_cpu_does(tmp_path, mps, capsys):
    found = []
    for device in ("cpu", "mps"):
        run = tmp_path / device
        line = overrides(tmp_path, train__steps=2, train__valid_every=2, train__device=device, out=run)
        assert cli.main(["train", *line, "checkpoint.every=1"]) == 0
        assert cli.main(["ppl", str(run), f"train.device={device}", f"data.cache_dir={tmp_path / 'cache'}"]) == 0
        measured = json.loads((run / "ppl-file.json").read_text(encoding="utf-8"))["continuous"]
        found.append((read_lines(run)[-1]["nll"], measured))
    assert found[0] == found[1]


def test_mps_is_for_one_process(mps, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="mps is for one process"), world(TrainConfig(device="mps")):
        pass

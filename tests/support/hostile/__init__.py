"""Files and folders as a hostile stranger would write them, each with the command line that reads it.

A case is a function that writes its files below a folder and returns the command line; CASES has them by name. Code in
them would write the file CANARY. `python -m hostile FOLDER` runs every case in a process of its own and prints what
each took, as JSON lines (test_hostile_files.py reads them).
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from adlm import cli
from hostile import (  # noqa: F401 - importing them adds their cases
    archives,
    exported_folders,
    gguf_files,
    other_files,
    pickles,
    prepared_data,
    run_folders,
    tokenizer_files,
)
from hostile.cases import CANARY, CASES, base, start


def build(name: str, folder: Path) -> list[str]:
    """Write the files of a case below `folder`, made for it; returns the command line."""
    folder.mkdir(parents=True)
    return CASES[name](folder)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a case here: exit status and what was said."""
    line = build(name, folder)
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            status: Any = cli.main(line)
        except BaseException as error:  # what a user would see as a traceback
            status = f"{type(error).__name__}: {error}"
    return {"status": status, "said": said.getvalue(), "ran": (folder / CANARY).exists()}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a case in a child of this process; what it took is what the child used beyond this process."""
    line = build(name, folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        signal.alarm(300)  # a read that waits for a device takes no CPU time
        for number, file in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(folder / file, os.O_CREAT | os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        (folder / "statm").write_text(Path("/proc/self/statm").read_text())
        try:
            status = cli.main(line)
        except BaseException as error:
            print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
            status = 99
        sys.stderr.flush()
        os._exit(status)
    _, status, used = os.wait4(child, 0)
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "name": name,
        "status": os.waitstatus_to_exitcode(status),
        "said": (folder / "err.txt").read_text(errors="replace"),
        "ran": (folder / CANARY).exists(),
        "file_mb": round(size / 1e6, 2),
        "memory_mb": round((used.ru_maxrss * 1024 - resident) / 2**20, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def main(folder: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    start(folder / "base")
    base().prepare()
    for number, name in enumerate(chosen or CASES):
        place = folder / f"{number:03}"
        print(json.dumps(measure(name, place)), flush=True)
        shutil.rmtree(place, ignore_errors=True)

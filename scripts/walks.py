"""How widely the code of a task is spread: functions, files and switches between folders until its first result.

    python scripts/walks.py [--json] [--list WALK]

| walk | from | until |
|---|---|---|
| train | `adlm train` of a model of the demo's size, nothing prepared | the first optimizer update |
| train, one step | the end of the first update | the end of the second one |
| generate | `lm.generate` of a loaded model, a short text | its texts |
| completions | POST /v1/completions to the application of a started `adlm serve` | the answer |
| ppl | `adlm ppl` of a small run, its data prepared | the end of the command |
| reason train | `adlm reason train` of a small network | the first optimizer update |

Functions: those of the package that are called, each counted once. Not counted: lambdas, comprehensions, the bodies of
modules and classes, everything that runs during imports, and the methods that `dataclass` and `NamedTuple` generate.
Files: those with these functions. Switches: with the functions in the order of their first call, thread after thread, a
switch is a place where the next function belongs to another folder of the package. Threads count from their first call,
so that reading ahead and the worker of a server are part of the walk.

Every walk starts from outside: `adlm.cli.main`, `adlm.load`, or the application that `adlm serve` passes to uvicorn. An
update is a call of `torch.optim.Optimizer.step`. Each walk has its own process, with torch and other libraries loaded
before, but nothing of the package. Takes less than a minute on one core.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = Path(next(iter(importlib.util.find_spec("adlm").submodule_search_locations)))  # type: ignore[union-attr]
LIBRARIES = ("torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "hydra", "omegaconf", "tokenizers")
LIBRARIES += ("rich.progress", "rich.table", "safetensors.torch", "fastapi", "starlette.testclient", "uvicorn")
OPTIMIZED = 1  # a code flag that functions have, but not the bodies of modules and classes
# The size of the model that `adlm demo` trains, with a file as the corpus, so that preparing it takes no time.
DEMO = ("experiment=demo", "data=file", "data.tokenizer=bpe-300", "train.valid_sequences=4", "train.device=cpu")
LONGEST = 120.0  # most seconds of a walk


class Visit(NamedTuple):
    file: str
    """Path relative to the package."""
    name: str
    line: int

    @property
    def folder(self) -> str:
        return os.path.dirname(self.file)


class Walk(NamedTuple):
    functions: int
    files: int
    switches: int
    visits: list[Visit]


class Recorder:
    """Records the first call of every function of the package in every thread, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.known: dict[CodeType, Visit | None] = {}
        self.local = threading.local()
        self.threads: list[dict[Visit, None]] = []

    def __enter__(self) -> "Recorder":
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def start(self) -> None:
        """Begin a walk; earlier records are dropped."""
        self.threads, self.local, self.on = [], threading.local(), True

    def read(self) -> Walk:
        """The walk so far."""
        visits = list(dict.fromkeys(visit for thread in self.threads for visit in list(thread)))
        switches = sum(a.folder != b.folder for a, b in itertools.pairwise(visits))
        return Walk(len(visits), len({visit.file for visit in visits}), switches, visits)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """The profile function, which Python calls at every call and return."""
        if event not in ("call", "return"):
            return
        code, local = frame.f_code, self.local
        if code.co_name == "<module>":
            local.imports = getattr(local, "imports", 0) + (1 if event == "call" else -1)
        if event == "return" or not self.on or getattr(local, "imports", 0) > 0:
            return
        if code not in self.known:
            self.known[code] = visit_of(code)
        visit = self.known[code]
        if visit is None:
            return
        if not hasattr(local, "visits"):
            local.visits = {}
            self.threads.append(local.visits)
        local.visits.setdefault(visit)


def visit_of(code: CodeType) -> Visit | None:
    path = Path(code.co_filename)
    if not code.co_flags & OPTIMIZED or code.co_name.startswith("<") or not path.is_relative_to(PACKAGE):
        return None
    return Visit(path.relative_to(PACKAGE).as_posix(), code.co_qualname, code.co_firstlineno)


class Updates:
    """Calls `done(n)` after optimizer update n = 1, 2, ...: once for each optimizer of the model, so the last call for
    an update is its end. Ends the command, as Ctrl-C does, when update `last` is over and the next one begins."""

    def __init__(self, last: int, done: Callable[[int], None]) -> None:
        from torch.optim import optimizer

        self.last, self.done, self.count = last, done, Counter[int]()
        optimizer.register_optimizer_step_pre_hook(self.before)
        optimizer.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Any, *arguments: Any) -> None:
        if self.count[id(optimizer)] == self.last:
            raise KeyboardInterrupt

    def after(self, optimizer: Any, *arguments: Any) -> None:
        self.count[id(optimizer)] += 1
        self.done(self.count[id(optimizer)])


def command(*line: object) -> int:
    """Run a command line without its output."""
    from adlm.cli import main

    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        return main([str(word) for word in line])


def finished(*line: object) -> None:
    status = command(*line)
    if status:
        raise RuntimeError(f"adlm {' '.join(map(str, line))} ended with status {status}")


def walk_updates(first: int, line: tuple[object, ...]) -> Walk:
    """The walk of a training command to its first update (first=0), or from the end of update `first` to the next."""
    found: list[Walk] = []
    with Recorder() as recorder:

        def done(n: int) -> None:
            if n <= first:
                recorder.start()
            else:
                found.append(recorder.read())

        Updates(first + 1, done)
        if not first:
            recorder.start()
        command(*line)
    if not found:
        raise RuntimeError(f"adlm {' '.join(map(str, line))} made no update {first + 1}")
    return found[-1]


def corpus(folder: Path) -> Path:
    path, rng = folder / "corpus.txt", random.Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 7))) for _ in range(200)]
    if not path.exists():
        path.write_text("".join(" ".join(rng.choice(words) for _ in range(60)) + ".\n" for _ in range(400)))
    return path


def training(folder: Path, name: str) -> tuple[object, ...]:
    places = (f"data.path={corpus(folder)}", f"data.cache_dir={folder / name}", f"out={folder / name}-run")
    return ("train", *DEMO, *places)


def walk_train(folder: Path) -> Walk:
    return walk_updates(0, training(folder, "train"))


def walk_step(folder: Path) -> Walk:
    return walk_updates(1, training(folder, "step"))


def walk_reason(folder: Path) -> Walk:
    sizes = ("reason.n_train=64", "reason.n_valid=8", "reason.n_test=8", "train.global_batch_size=8")
    return walk_updates(0, ("reason", "train", *sizes, "train.device=cpu", f"out={folder / 'reason'}"))


def train_model(folder: Path) -> None:
    """Train the model that the other walks load: two steps of the same training, in a separate process."""
    finished(*training(folder, "model"), "train.steps=2", "train.valid_every=0")


def walk_generate(folder: Path) -> Walk:
    import adlm

    lm = adlm.load(folder / "model-run", "cpu")
    with Recorder() as recorder:
        recorder.start()
        lm.generate(prompt="the", length=16, steps=8)
        return recorder.read()


def walk_ppl(folder: Path) -> Walk:
    with Recorder() as recorder:
        recorder.start()
        data = (f"data.cache_dir={folder / 'model'}", "eval.sequences=4", "train.device=cpu")
        finished("ppl", folder / "model-run", *data, f"out={folder / 'ppl.json'}")
        return recorder.read()


def walk_completions(folder: Path) -> Walk:
    """Start `adlm serve` up to the point where uvicorn would listen; the request goes to its application in process."""
    import uvicorn
    from starlette.testclient import TestClient

    found: list[Walk] = []
    with Recorder() as recorder:

        def answer(server: uvicorn.Server, sockets: Any = None) -> None:
            with TestClient(server.config.app, base_url="http://127.0.0.1") as client:
                deadline = threading.Event()
                while client.get("/readyz").status_code != 200:
                    deadline.wait(0.05)
                recorder.start()
                answer = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 8, "steps": 8})
                found.append(recorder.read())
                if answer.status_code != 200:
                    raise RuntimeError(f"POST /v1/completions: {answer.text}")

        uvicorn.Server.run = answer  # type: ignore[method-assign]
        finished("serve", folder / "model-run", "port=0", "train.device=cpu")
    return found[0]


WALKS: dict[str, Callable[[Path], Walk]] = {
    "train": walk_train,
    "train, one step": walk_step,
    "generate": walk_generate,
    "completions": walk_completions,
    "ppl": walk_ppl,
    "reason train": walk_reason,
}


def apart(function: Callable[[Path], Any], folder: Path) -> Any:
    """The result of the function in a separate process, forked from this one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(function, (folder,)).get(LONGEST)


def measure() -> Iterator[tuple[str, Walk]]:
    for library in LIBRARIES:
        importlib.import_module(library)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        apart(train_model, Path(folder))
        for name, walk in WALKS.items():
            yield name, apart(walk, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    parser.add_argument("--list", choices=list(WALKS), help="also print the functions of this walk")
    arguments = parser.parse_args()
    walks = dict(measure())
    if arguments.json:
        print(json.dumps({name: dict(zip(Walk._fields[:3], walk)) for name, walk in walks.items()}))
        return
    print(f"{'walk':<18}{'functions':>10}{'files':>10}{'switches':>10}")
    for name, walk in walks.items():
        print(f"{name:<18}{walk.functions:>10}{walk.files:>10}{walk.switches:>10}")
    for visit in walks[arguments.list].visits if arguments.list else ():
        print(f"{visit.file}:{visit.line} {visit.name}")


if __name__ == "__main__":
    main()

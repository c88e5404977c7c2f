"""The table of hostile files: how a case is added, and the valid files that cases copy and spoil."""

import contextlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exports import export
from runs import overrides

from adlm import cli
from adlm.compat.checkpoints import export_release

CANARY = "the-canary-was-here"
GOLDEN_RUN = Path(__file__).parents[2] / "golden" / "run_v1"
Case = Callable[[Path], list[str]]
CASES: dict[str, Case] = {}
HEAVY: set[str] = set()
"""Cases that take a second or more."""


class Base:
    """Valid files, made once, that cases copy and spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.export = export(folder / "export")
        self.release = export_release(self.export, folder / "release.ckpt")
        self.release_members = {}
        with zipfile.ZipFile(self.release) as archive:
            self.release_members = {m.filename: archive.read(m) for m in archive.infolist()}
        self.prepared: Path | None = None

    def prepare(self) -> Path:
        """A folder of `adlm data prepare`; padded, so that it has lengths too."""
        if self.prepared is None:
            line = [*overrides(self.folder, data__wrap="false"), "data.max_sequences=8"]
            line = [word for word in line if word.startswith(("data", "model.length="))]
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(["data", "prepare", "train", *line]) == 0
            self.prepared = next(p.parent for p in (self.folder / "cache").glob("*-unwrapped-*/manifest.json"))
        return self.prepared


BASE: Base | None = None


def base() -> Base:
    assert BASE is not None
    return BASE


def start(folder: Path) -> None:
    """Make the valid files."""
    global BASE
    BASE = Base(folder)


def case(name: str, heavy: bool = False) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        if heavy:
            HEAVY.add(name)
        return function

    return add


def cases(kind: str, variants: dict[str, Any], build: Callable[[Path, Any], list[str]], heavy: bool = False) -> None:
    """One case for each variant."""
    for name, variant in variants.items():
        case(f"{kind}: {name}", heavy)(lambda folder, variant=variant: build(folder, variant))


class Call:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def touch(folder: Path) -> str:
    return f"touch {folder / CANARY}"


def sample(path: Path) -> list[str]:
    return ["sample", str(path), "sampling.steps=1", "sampling.length=8", "train.device=cpu"]

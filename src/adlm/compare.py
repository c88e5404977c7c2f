"""`adlm compare [algo[+key=value...] ...]`: train algorithms, and variants of them, on one corpus with one budget, and
set them side by side.

Each is a run folder of its own below `out`, composed from the same command line with another `algo=`, so
that any of them can be looked at, sampled from or trained further. What is finished is not done again: a rerun trains
what is missing, goes on with what was interrupted, and rebuilds the table, which is written after every run.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from adlm import config
from adlm.config.keys import group_choices
from adlm.data.blocks import write_atomically
from adlm.errors import choose, require
from adlm.evaluation.comparison import Comparison, Entry, measure_run
from adlm.evaluation.results import write_result
from adlm.schema import Config
from adlm.training.loop import command_line, train
from adlm.training.parallel import world

ENTRY = "compared.json"
REFERENCE = "adlm"


def run_compare(cfg: Config, line: Sequence[str], args: Sequence[str] = ()) -> dict[str, Any]:
    """`line`: the overrides of the command line, from which each algorithm's settings are composed."""
    names = list(dict.fromkeys(name for arg in args for name in each_seed(arg))) or list(group_choices("algo"))
    folder = Path(cfg.out)
    # all of them before the first is trained: a mistake must not wait for hours
    runs = {name: config.load([*line, *variant(name), f"out={folder / name.replace('/', '_')}"]) for name in names}
    require(
        cfg.eval.estimator == "continuous" and not cfg.eval.chain_rows,
        "adlm compare sets one number beside another: eval.estimator=continuous eval.chain_rows=0",
    )
    entries = {name: entry for name, run in runs.items() if (entry := read_entry(run)) is not None}
    for name, run in [(n, r) for n, r in runs.items() if n not in entries]:
        print(f"{name}: {len(entries)} of {len(runs)} are done", flush=True)
        if not train(run).finished:
            break
        with world(run.train) as ranks:
            entries[name] = measure_run(name, run, ranks)
            if ranks.is_main:
                write_atomically(Path(run.out) / ENTRY, json.dumps(asdict(entries[name])) + "\n")
        show(list(entries.values()), cfg, folder)
    return show(list(entries.values()), cfg, folder, tell=True) if entries else {}


def each_seed(name: str) -> list[str]:
    """`adlm+seed=1,2` -> `adlm+seed=1` and `adlm+seed=2`."""
    parts = name.split("+")
    at = next((i for i, part in enumerate(parts) if part.startswith("seed=")), None)
    if at is None:
        return [name]
    seeds = parts[at].removeprefix("seed=").split(",")
    return ["+".join([*parts[:at], f"seed={seed}", *parts[at + 1 :]]) for seed in seeds]


def variant(name: str) -> list[str]:
    """`adlm+seed=2+recipe=fast` -> the overrides it stands for."""
    algo, *changes = name.split("+")
    choose("algo", algo, group_choices("algo"))
    require(all("=" in change for change in changes), f"{name!r}: after the algorithm, +key=value for each change")
    return [f"algo={algo}", *changes]


def show(entries: list[Entry], cfg: Config, folder: Path, tell: bool = False) -> dict[str, Any]:
    """Write table.md and table.json; print the table if it is the last."""
    reference = REFERENCE if any(e.name == REFERENCE for e in entries) else entries[0].name
    comparison = Comparison(entries, reference, cfg)
    document = {"command": command_line(), **comparison.as_dict()}
    if os.environ.get("RANK", "0") == "0":
        write_result(folder / "table.json", document)
        write_atomically(folder / "table.md", comparison.markdown())
        if tell:
            console = Console()
            console = console if console.is_terminal else Console(width=160)
            console.print(comparison.table())
            console.print("\n".join(comparison.seeds_markdown()), highlight=False)
            print(f"written to {folder / 'table.md'} and {folder / 'table.json'}")
    return document


def read_entry(cfg: Config) -> Entry | None:
    """What an earlier call found for exactly these settings."""
    try:
        entry = Entry(**json.loads((Path(cfg.out) / ENTRY).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return entry if entry.config == json.loads(json.dumps(asdict(cfg))) else None

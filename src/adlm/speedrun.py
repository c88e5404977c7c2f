"""`adlm speedrun`: how soon does a model reach the bound that the public release has after 36M tokens?

A run is trained, its validations are read, and the first that is at or below the target counts. The clock starts with
the first step. Compiling is reported apart from the steps: a log window in which something was compiled (the first one,
and the first after sequences get their full length) counts at the speed of the window after it. docs/speedrun.md has
the rules and the records.
"""

import json
from pathlib import Path
from typing import Any

import torch

from adlm.errors import require
from adlm.evaluation import versions
from adlm.io.paths import write_atomically
from adlm.models.network import parameter_count
from adlm.schema import Config
from adlm.training import setup
from adlm.training.loop import command_line, train
from adlm.training.metrics import read_metrics
from adlm.training.parallel import world

TARGET = 6.726
"""Nats per token on held-out Wikipedia: the release's recipe, 768 wide, after 36M tokens (docs/results.md)."""
RULES = {"data.name": "wikipedia", "data.tokenizer": "gpt2", "model.length": 1024, "model.causal": False}
LEAST_SEQUENCES = 512
"""Held-out sequences of a validation."""
RECORD = "record.json"


def run_speedrun(cfg: Config) -> dict[str, Any]:
    """`adlm speedrun`: train by the rules, print and write the record."""
    check_rules(cfg)
    result = train(cfg)
    if not result.finished:
        return result._asdict()
    folder = Path(result.run)
    record = read_record(read_metrics(folder), cfg)
    with world(cfg.train) as ranks:
        data = setup.prepare_data(cfg, ranks)
        record |= {"validation": data.fingerprints()["valid"], "versions": versions(ranks.device)}
    record |= {"parameters": parameters(cfg, data), "seed": cfg.seed, "command": command_line()}
    write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
    print(describe(record))
    print(f"written to {folder / RECORD}")
    return record


def check_rules(cfg: Config) -> None:
    """Refuse what could not be compared with other records."""
    for key, value in RULES.items():
        section, _, name = key.partition(".")
        given = getattr(getattr(cfg, section), name)
        require(given == value, f"{key}={given} is against the rules of the speedrun, which has {key}={value}")
    given = cfg.train.valid_sequences
    require(
        given == 0 or given >= LEAST_SEQUENCES,
        f"train.valid_sequences={given} is against the rules of the speedrun: at least {LEAST_SEQUENCES}",
    )
    require(cfg.train.valid_every > 0, "train.valid_every=0 never looks whether the target is reached")


def parameters(cfg: Config, data: setup.Data) -> int:
    with torch.device("meta"):
        return parameter_count(setup.build_model(cfg.model, data.tokenizer.vocab_size, data.tokenizer.mask_id))


def read_record(events: list[dict[str, Any]], cfg: Config) -> dict[str, Any]:
    """When the target was reached: tokens, seconds of steps, seconds with everything. None of these if it was not."""
    valid = [event for event in events if event["kind"] == "valid"]
    reached = next((event for event in valid if event["nll"] <= TARGET), None)
    best = min(event["nll"] for event in valid)
    if reached is None:
        return {"target": TARGET, "reached": False, "best": best}
    tokens_per_step = cfg.train.global_batch_size * cfg.model.length
    windows = [event for event in events if event["kind"] == "train" and event["step"] <= reached["step"]]
    seconds = step_seconds(windows, cfg)
    start = valid[0]["time"]  # the validation before the first step
    return {
        "target": TARGET,
        "reached": True,
        "bound": reached["nll"],
        "tokens": reached["step"] * tokens_per_step,
        "step_seconds": round(seconds, 2),
        "seconds": round(reached["time"] - start, 2),
        "best": best,
    }


def step_seconds(windows: list[dict[str, Any]], cfg: Config) -> float:
    """Seconds that the steps of these log windows took, without compiling."""
    changes = {0}  # steps before which something is compiled
    if cfg.train.length_warmup > 1:
        changes.add(int(cfg.train.steps * cfg.train.length_warmup_fraction))
    total, begin = 0.0, 0
    for i, window in enumerate(windows):
        end = window["step"]
        compiles = any(begin <= change < end for change in changes)
        speed = windows[i + 1 if compiles and i + 1 < len(windows) else i]["tokens_per_s"]
        total += (end - begin) * cfg.train.global_batch_size * cfg.model.length / speed
        begin = end
    return total


def describe(record: dict[str, Any]) -> str:
    if not record["reached"]:
        return f"The target of {TARGET} nats was not reached; the best bound is {record['best']:.3f}"
    return (
        f"{record['bound']:.3f} nats after {record['tokens'] / 1e6:.2f}M tokens:"
        f" {record['step_seconds']:.1f} s of steps, {record['seconds']:.1f} s with compiling and validation"
    )

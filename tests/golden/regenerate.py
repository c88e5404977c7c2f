"""Golden numbers: what the package computes today, stored, so that a change of the code that changes a number is seen.

losses.json   ten training losses and the validation bound of a toy model for every algorithm and recipe
samples.json  texts of every sampler, and bounds of given texts, from the exported folders kept here

`python tests/golden/regenerate.py` computes both again and rewrites them. A commit that changes one of the files says
in a sentence why the numbers had to change. Numbers are of float32 on one CPU thread; other CPUs agree to five digits.
Everything is entered by the command line and `adlm.load`, so that the code between may be arranged differently.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from adlm import cli

HERE = Path(__file__).parent
LOSSES, SAMPLES = HERE / "losses.json", HERE / "samples.json"
STEPS = 10
TERMS = ("nelbo", "d3pm", "score_entropy", "nll", "anchor")  # of the loss, as metrics.jsonl calls them
# Name -> what makes it: every objective, every recipe, every conditioning.
RUNS: dict[str, tuple[str, ...]] = {
    "adlm": ("algo=adlm",),
    "adlm recipe=fast": ("algo=adlm", "recipe=fast"),
    "adlm recipe=quick": ("algo=adlm", "recipe=quick"),
    "adlm-time": ("algo=adlm-time",),
    "two-stage": ("algo=two-stage",),
    "mdlm": ("algo=mdlm",),
    "mdlm recipe=fast": ("algo=mdlm", "recipe=fast"),
    "mdlm-matched": ("algo=mdlm-matched",),
    "mdlm-time": ("algo=mdlm-time",),
    "sedd": ("algo=sedd",),
    "d3pm": ("algo=d3pm",),
    "ar": ("algo=ar",),
    "ar-matched": ("algo=ar-matched",),
    "a2r": ("algo=a2r",),
}
TOY = (
    "data=file",
    f"data.path={HERE / 'train.txt'}",
    f"data.valid_path={HERE / 'valid.txt'}",
    "data.tokenizer=text8",
    "data.num_proc=1",
    "model=nano",
    "model.hidden_size=32",
    "model.n_heads=2",
    "model.n_blocks=2",
    "model.n_denoiser_blocks=1",
    "model.length=32",
    "model.cond_dim=8",
    "optim.lr=1e-2",
    "optim.muon_lr=1e-2",
    "optim.warmup=2",
    "optim.ema=0.9",
    f"train.steps={STEPS}",
    "train.global_batch_size=8",
    "train.batch_size=4",  # gradients of two micro-batches
    "train.valid_every=0",
    "train.log_every=1",
    "train.device=cpu",
    "train.num_threads=1",
)


@contextlib.contextmanager
def without_plots() -> Iterator[None]:
    """The curves at the end of a run take half of its time."""
    kept = sys.modules.get("matplotlib")
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    try:
        yield
    finally:
        del sys.modules["matplotlib"]
        if kept is not None:
            sys.modules["matplotlib"] = kept


def losses_of(run: str, folder: Path) -> dict[str, Any]:
    """Ten steps of a toy model: every term of the loss (0 where it has no weight yet) and the norm of the gradient
    at every step, then the bound of the averaged weights on the validation split."""
    out = folder / run.replace(" ", "-")
    with without_plots():
        status = cli.main(["train", *TOY, *RUNS[run], f"data.cache_dir={folder / 'cache'}", f"out={out}"])
    assert status == 0, f"adlm train ended with status {status}"
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    terms = [key for key in steps[-1] if key in TERMS]
    found: dict[str, Any] = {term: [short(event.get(term, 0.0)) for event in steps] for term in (*terms, "grad_norm")}
    found["valid"] = short([event["nll"] for event in events if event["kind"] == "valid"][-1])
    return found


def short(number: float) -> float:
    """Nine digits: what a float32 has."""
    return float(f"{number:.9g}")


def write_losses() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {run: losses_of(run, Path(folder)) for run in RUNS}
    lines = [
        f" {json.dumps(run)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in numbers.items())
        + "\n }"
        for run, numbers in found.items()
    ]
    LOSSES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_losses()

"""Golden numbers: what the package computes today, stored, so that a change of the code that changes a number is seen.

losses.json       ten training losses and the validation bound of a toy model for every algorithm and recipe
samples.json      texts of every sampler, from the exported folders kept here
bounds.json       bounds of given texts, from the same folders
resumed.json      what the interrupted run kept here computes when it is resumed
export_v1*/       exported folders of format 1, as commit af510e1 wrote them
run_v1/           a run folder of the same commit, interrupted after 6 of its 12 steps
train.txt, valid.txt  what all of these learned from

`python tests/golden/regenerate.py` computes the JSON files again and rewrites them. A commit that changes one of them
says in a sentence why the numbers had to change. The folders are never written again: files of users look like them.
Numbers are of float32 on one CPU thread; other CPUs agree to five digits.
Everything is entered by the command line and `adlm.load`, so that the code between may be arranged differently.
"""

import contextlib
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import adlm
from adlm import cli

HERE = Path(__file__).parent
LOSSES, SAMPLES, SCORES, RESUMED = (HERE / f"{name}.json" for name in ("losses", "samples", "bounds", "resumed"))
STEPS = 10
TERMS = ("nelbo", "d3pm", "score_entropy", "nll", "anchor")  # of the loss, as metrics.jsonl calls them
# Name -> what makes it: every objective, every recipe, every conditioning.
RUNS: dict[str, tuple[str, ...]] = {
    "adlm": ("algo=adlm",),
    "adlm recipe=fast": ("algo=adlm", "recipe=fast"),
    "adlm recipe=quick": ("algo=adlm", "recipe=quick"),
    "adlm recipe=quick, anchors to the end": (
        "algo=adlm",
        "recipe=quick",
        "objective.gamma=0.1",
        "objective.gamma_until=1",
    ),
    "adlm-time": ("algo=adlm-time",),
    "two-stage": ("algo=two-stage",),
    "mdlm": ("algo=mdlm",),
    "mdlm recipe=fast": ("algo=mdlm", "recipe=fast"),
    "mdlm-matched": ("algo=mdlm-matched",),
    "mdlm-time": ("algo=mdlm-time",),
    "bd3lm": ("algo=bd3lm", "model.block_length=4"),
    "bd3lm, any block": ("algo=bd3lm", "model.block_length=4,1,16,0", "model.shift=true"),
    "adlm recipe=fast, any block": ("algo=adlm", "recipe=fast", "model.block_length=4,1,16,0"),
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
    "recipe=published",
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


# Name -> exported folder and the arguments of `lm.generate`: every sampler, and every way to ask for a text.
SHORT = {"length": 24, "steps": 16, "n": 2, "seed": 3}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        sampler: ("export_v1", {"sampler": sampler, **SHORT})
        for sampler in (
            "mdlm", "remdm-cap", "remdm-rescale", "remdm-conf", "remdm-loop", "forward-backward", "dfm", "ddpm",
            "analytic", "first-hitting",
        )
    },
    # After a prompt: without one all positions of the first canvas are alike, and rounding chooses between them.
    **{
        sampler: ("export_v1", {"sampler": sampler, "prompt": "the old bird ", **SHORT})
        for sampler in ("confidence", "entropy", "anchor-first")
    },
    "score": ("export_v1_sedd", {"sampler": "score", **SHORT}),
    "autoregressive": ("export_v1_a2r", {"sampler": "autoregressive", **SHORT}),
    "defaults": ("export_v1", {}),
    "defaults, published recipe": ("export_v1_published", {}),
    "defaults, autoregressive": ("export_v1_a2r", {}),
    "prompt": ("export_v1", {"prompt": "the old bird ", **SHORT}),
    "prompt, autoregressive": ("export_v1_a2r", {"prompt": "the old bird ", **SHORT}),
    "template": ("export_v1_published", {"template": "the [MASK:3] sat on [MASK:6] twice", "steps": 16, "seed": 3}),
    "temperature": ("export_v1", {"temperature": 0.7, **SHORT}),
    "top_p": ("export_v1", {"top_p": 0.8, **SHORT}),
    "top_p, autoregressive": ("export_v1_a2r", {"top_p": 0.8, **SHORT}),
    "top_k": ("export_v1", {"top_k": 4, **SHORT}),
    "min_p": ("export_v1", {"min_p": 0.1, **SHORT}),
    "eta": ("export_v1_published", {"sampler": "remdm-cap", "eta": 0.5, **SHORT}),
    "stride": ("export_v1", {**SHORT, "stride": 8, "length": 56}),
    "release": ("export_v1", {"parity": "release", "top_p": 0.9, **SHORT}),
    "release, remdm-cap": ("export_v1_published", {"sampler": "remdm-cap", "parity": "release", "top_p": 0.9, **SHORT}),
    "banned and required": ("export_v1", {"banned": ["e"], "required": ["dog"], **SHORT}),
    "stop": ("export_v1_a2r", {**SHORT, "stop": True, "n": 4, "top_k": 6, "temperature": 3.0}),
}  # fmt: skip
# Name -> exported folder and the arguments of `lm.score`.
BOUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        folder: (folder, {"text": "the cat sat on the mat twice", "draws": 8})
        for folder in ("export_v1", "export_v1_published", "export_v1_sedd", "export_v1_a2r")
    },
    "context": ("export_v1", {"text": "the river again", "context": "one red fox saw ", "draws": 8}),
    "longer than a row": ("export_v1_published", {"text": "a dog ran under every road and slept at night", "draws": 4}),
}
# What made run_v1, in a folder with train.jsonl; the same line resumes it.
RUN = (
    "train", "data=file", "data.path=train.jsonl", "data.valid_share=0.1", "data.max_rows=60", "data.tokenizer=text8",
    "data.cache_dir=cache", "data.num_proc=1", "algo=adlm", "recipe=published", "model=nano", "model.hidden_size=8",
    "model.n_heads=1", "model.n_blocks=1", "model.n_denoiser_blocks=1", "model.length=32", "model.cond_dim=4",
    "model.adaln=false", "model.bridge=collapsed", "objective.anchor_share=0.5", "lr_scheduler=linear", "optim.lr=1e-2",
    "optim.warmup=2", "optim.final=0.1", "optim.ema=0.9", "train.steps=12", "train.row_pieces=2",
    "train.row_pieces_share=0.75", "train.global_batch_size=8", "train.valid_every=0", "train.valid_rows=8",
    "train.log_every=1", "checkpoint.every=100", "train.device=cpu", "train.num_threads=1", "out=run_v1",
)  # fmt: skip


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
    """Ten steps of a toy model."""
    out = folder / run.replace(" ", "-")
    train("train", *TOY, *RUNS[run], f"data.cache_dir={folder / 'cache'}", f"out={out}")
    return numbers_of(out, range(1, STEPS + 1))


def resumed(folder: Path) -> dict[str, Any]:
    """The other six steps of a copy of run_v1. The folder becomes the working directory: paths of the run are relative
    to it."""
    documents = (HERE / "train.txt").read_text().splitlines()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    shutil.copytree(HERE / "run_v1", folder / "run_v1")
    with contextlib.chdir(folder):
        train(*RUN)
    return numbers_of(folder / "run_v1", range(7, 13))


def train(*line: str) -> None:
    with without_plots():
        status = cli.main(line)
    assert status == 0, f"adlm {' '.join(line)} ended with status {status}"


def numbers_of(run: Path, steps: range) -> dict[str, Any]:
    """Every term of the loss (0 where it has no weight yet) and the norm of the gradient at these steps, then the bound
    of the averaged weights on the validation split."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [event for event in events if event["kind"] == "train"]
    assert [event["step"] for event in taken] == list(range(1, steps.stop))
    taken = taken[steps.start - 1 :]
    terms = [key for key in taken[-1] if key in TERMS]
    found: dict[str, Any] = {term: [short(event.get(term, 0.0)) for event in taken] for term in (*terms, "grad_norm")}
    found["valid"] = short([event["nll"] for event in events if event["kind"] == "valid"][-1])
    return found


@functools.cache
def model(folder: str) -> "adlm.LanguageModel":
    return adlm.load(HERE / folder, "cpu")


def texts_of(name: str) -> list[dict[str, Any]]:
    folder, arguments = TEXTS[name]
    texts = model(folder).generate(**arguments)
    return [{"text": g.text, "tokens": list(g.tokens), "nfe": g.nfe, "seed": g.seed} for g in texts]


def bound_of(name: str) -> dict[str, Any]:
    folder, arguments = BOUNDS[name]
    found = model(folder).score(**arguments)
    per_token = [short(nats) for nats in found.per_token]
    return {"nll": short(found.nll), "stderr": short(found.stderr), "per_token": per_token}


def short(number: float) -> float:
    """Nine digits: what a float32 has."""
    return float(f"{number:.9g}")


def write(path: Path, found: dict[str, dict[str, Any] | list[Any]]) -> None:
    """JSON with a line for every list of numbers, so that a change is readable."""
    blocks = []
    for name, entry in found.items():
        parts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items()] if isinstance(entry, dict) else None
        inner = ",\n  ".join(parts or map(json.dumps, entry))
        blocks.append(f" {json.dumps(name)}: " + ("{%s}" if parts else "[%s]") % f"\n  {inner}\n ")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write(LOSSES, {run: losses_of(run, Path(folder)) for run in RUNS})
        write(RESUMED, {"run_v1": resumed(Path(folder))})
    write(SAMPLES, {name: texts_of(name) for name in TEXTS})
    write(SCORES, {name: bound_of(name) for name in BOUNDS})


if __name__ == "__main__":
    main()

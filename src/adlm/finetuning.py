"""`adlm finetune my.txt`: fine-tune a trained model on the user's own text, in minutes on a CPU.

Starts from the model that comes with the package, or from any model that `adlm.load` reads (checkpoint.init_from), and
keeps its network, tokenizer and objective. Learning rates and the length of the run fit the size of the text. The
result is an ordinary run folder, which resumes and is exported, with a report: bound and samples before and after.

The module also has `adlm adapt`, which starts from a causal model.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adlm import config
from adlm.api import LanguageModel, load
from adlm.api.language_model import path_given
from adlm.config import owntext
from adlm.data.blocks import Blocks
from adlm.data.pairs import padded_length
from adlm.data.preparation import prepare
from adlm.data.sources import resolve
from adlm.demo import AT_MOST, HOW, player, report_page, run_tiles, summary, text_name, wishes
from adlm.errors import require
from adlm.evaluation.intervals import Estimate
from adlm.evaluation.perplexity import bits_per_byte, measure
from adlm.io.export import CONFIG, TOKENIZER, Loaded, describe, load_folder, save_folder
from adlm.io.load import is_released, load_checkpoint, locate
from adlm.io.paths import pick_device, write_atomically
from adlm.models import build_model
from adlm.models.network import parameter_count, weights_digest
from adlm.reporting import Html, columns, section, tag, tiles
from adlm.schema import Config, ModelConfig
from adlm.tables import GROUPS
from adlm.training.loop import farewell, train
from adlm.training.metrics import read_metrics
from adlm.training.parallel import World, world

EPOCHS = 8
"""Most epochs: with more, the model memorises the text."""
TOKENS = {"cpu": 130_000, "cuda": 20_000_000}
"""Most tokens that a run reads, which takes minutes."""
SMALL = 20_000_000
"""Up to this many parameters a model reads that many tokens on a CPU in minutes; larger ones read fewer, and take as
long."""
LARGE = 50_000_000
"""With more parameters, a CPU trains adapters only, unless lora.rank is set: training all weights would take gigabytes
of memory and disk, and twice the time."""
RANK = 16
START = "checkpoint.init_from"


class FineTuned(NamedTuple):
    """A fine-tuned model, its run folder and report, and bounds on held-out text before and after, in bits per byte."""

    lm: LanguageModel
    run: str
    report: str
    before: float
    after: float


def finetune(
    path: str | os.PathLike[str],
    *,
    start: str | os.PathLike[str] = "",
    out: str | os.PathLike[str] = "",
    steps: int = 0,
    device: str = "auto",
    settings: Sequence[str] = (),
) -> FineTuned:
    """Fine-tune a model on the text, jsonl, csv or parquet file or folder `path`.

    `start`: a run folder, an exported folder or a release .ckpt; by default the model in the box. `out`: the run folder
    (default runs/NAME-finetuned). `steps`: optimizer steps (0: chosen to fit the text). `settings`: further overrides,
    as on the command line, such as "optim.lr=1e-4".
    """
    require(not isinstance(settings, str), f"settings must be a list of texts, got {settings!r:.60}")
    line = ["data=file", f"data.path={path_given('path', path)}", f"train.device={device}"]
    line += [f"{START}={os.fspath(start)}"] if start else []
    line += [f"out={os.fspath(out)}"] if out else []
    line += [f"train.steps={steps}"] if steps else []
    line += settings
    result = run_finetune(config.load(line), line)
    if not result["finished"]:
        raise KeyboardInterrupt(f"stopped by a signal at step {result['step']}; the same call resumes there")
    kept = {name: result[name] for name in ("run", "report", "before", "after")}
    return FineTuned(lm=load(result["run"], device), **kept)


def run_finetune(cfg: Config, line: list[str]) -> dict[str, Any]:
    """`adlm finetune TEXT`: train, measure before and after, write report.html, and print what to try next."""
    start = locate(cfg.checkpoint.init_from)
    require(start.exists(), f"{START}={str(start)!r} does not exist")
    loaded = load_checkpoint(start, tokenizer=cfg.data.tokenizer, root=cfg.data.root, key=START)
    cfg = settings_for(loaded, start, line)
    what = f"low-rank adapters (lora.rank={cfg.lora.rank}) of {start}" if cfg.lora.rank else str(start)
    print(f"Fine-tuning {what} on {text_name(cfg)}: {cfg.train.steps} steps on this machine")
    result = train(cfg)
    if not result.finished:
        return result._asdict()
    run = Path(result.run)
    before, after = LanguageModel(loaded), load(run, cfg.train.device)
    before.model.to(after.device)
    with world(cfg.train) as ranks:
        valid = prepare(cfg.data, after.tokenizer, cfg.model.length, "valid")
        bounds = [bound_of(lm.loaded, valid, cfg, ranks) for lm in (before, after)]
        facts = summary(cfg, read_metrics(run)) | {"before": bounds[0][1], "after": bounds[1][1]}
        path = run / "report.html"
        if ranks.is_main:
            write_atomically(path, build_report(cfg, before, after, valid, facts, bounds))
            say(run, path, bounds, exact=cfg.model.causal)
    return {**facts, **result._asdict(), "report": str(path)}


def bound_of(loaded: Loaded, valid: Blocks, cfg: Config, ranks: World) -> tuple[Estimate, float]:
    """The bound (or exact value) on the held-out text, and the same in bits per byte."""
    (found,) = measure(loaded, valid, cfg.eval, ranks).values()
    return found, bits_per_byte(found, valid, loaded.tokenizer)


def say(run: Path, report: Path, bounds: list[tuple[Estimate, float]], exact: bool) -> None:
    (before, before_bits), (after, after_bits) = bounds
    kind = "" if exact else " (upper bounds)"
    print(f"\nHeld-out text, bits per byte: {before_bits:.3f} -> {after_bits:.3f}{kind}")
    print(f"Perplexity per token: {before.perplexity:.1f} -> {after.perplexity:.1f}")
    print(f"Report: {report.resolve().as_uri()}\n\nTry next:")
    for command, what in next_commands(run):
        print(f"  {command}\n      {what}")


def next_commands(run: Path) -> list[tuple[str, str]]:
    model = shlex.quote(str(run))
    return [
        (f"adlm sample {model} sampling.n=4 sampling.top_p=0.9", "draw texts from the fine-tuned model"),
        (f"adlm serve {model}", "a page that shows texts appear"),
        (f"adlm ppl {model}", "its perplexity on the held-out text, with an interval"),
    ]


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_for(loaded: Loaded, start: Path, line: Sequence[str]) -> Config:
    """The settings of the run: network, noise, objective and tokenizer of the starting model, and values that fit the
    text and the machine. Typed settings win; a run that has begun keeps the values chosen then."""
    for group in ("model", "noise", "algo", "recipe", "experiment"):
        said = f"{group}= cannot be set here: adlm finetune keeps network and objective of its start"
        require(not is_typed(group, line), said)
    typed = config.load(line, run_folder=False)
    out = typed.out or owntext.run_folder(typed.data.path) + "-finetuned"
    size, device = owntext.text_bytes(typed.data), pick_device(typed.train.device).type
    saved = config.begun(out)
    folder = saved.get(START) or str(exported(loaded, start, Path(out)))
    check_start(Path(folder), loaded.model.state_dict(), start, out)
    chosen: dict[str, Any] = {"algo": loaded.info["algo"]} if loaded.info["algo"] in GROUPS["algo"] else {}
    for name, part in (("model", loaded.model.config), ("noise", loaded.noise), ("objective", loaded.objective)):
        chosen |= {f"{name}.{key}": value for key, value in asdict(part).items()}
    # Training ended with masks at the bound's own times, and continues so; earlier versions began causally again.
    chosen |= {"objective.time_density": 1.0, "objective.gamma_warmup": 0.0}
    chosen |= {"objective.causal_until": saved.get("objective.causal_until", 0.0)}
    most = most_tokens(parameter_count(loaded.model), device)
    rank = saved.get("lora.rank", typed.lora.rank if is_typed("lora.rank", line) else rank_for(loaded, device))
    chosen |= {"lora.rank": rank} | rates(loaded, low_rank=rank > 0)
    source, length, most_at_once = resolve(typed.data, "train"), loaded.model.config.length, 8
    if source.holds_pairs:  # one pair per sequence, which may be short
        length = padded_length(source.every_pair(), loaded.tokenizer, length)
        sequences, most_at_once = float(sum(1 for _ in source.every_pair())), max(8, min(32, 2048 // length))
    else:
        if rank and device != "cuda":  # many short sequences; the model keeps its own length
            chosen["model.length"] = length = owntext.power_of_two(most / 128, 16, min(length, 256))
        sequences = owntext.estimated_tokens(size, loaded.tokenizer.vocab_size) / length
    batch = owntext.power_of_two(min(sequences / 4, most / length / 32), 1, most_at_once)
    chosen |= {"data.valid_fraction": owntext.held_out_fraction(size), "train.global_batch_size": batch}
    part = most / most_tokens(0, device)
    chosen |= {"eval.sequences": max(32, round(256 * part)), "train.valid_sequences": max(12, round(96 * part))}
    chosen |= {"sampling.steps": 64, "sampling.length": min(96, loaded.model.config.length), "sampling.top_p": 0.9}
    # Paths last: a string of the line may hold anything, even the name of a group.
    fixed = ["data=file", f"out={out}", f"data.tokenizer={Path(folder) / TOKENIZER}", f"{START}={folder}"]
    line = [word for word in line if not word.lstrip("+").startswith(f"{START}=")]

    def answer(more: dict[str, Any]) -> Config:
        chosen.update({key: saved.get(key, value) for key, value in more.items()})
        return config.load([*fixed, *(f"{key}={value}" for key, value in chosen.items()), *line])

    cfg = answer({})
    steps = min(EPOCHS * sequences, most / length) / cfg.train.global_batch_size
    cfg = answer({"train.steps": max(10, round(steps))})
    return answer(owntext.schedule(cfg, size))


def is_typed(key: str, line: Sequence[str]) -> bool:
    return any(word.lstrip("+").startswith(f"{key}=") for word in line)


def most_tokens(parameters: int, device: str) -> float:
    """The largest number of tokens that a run reads."""
    if device == "cuda":
        return TOKENS["cuda"]
    return TOKENS["cpu"] * min(1.0, SMALL / max(1, parameters))


def rank_for(loaded: Loaded, device: str) -> int:
    """The default rank of the adapters; 0: train all weights."""
    return RANK if device != "cuda" and parameter_count(loaded.model) > LARGE else 0


def rates(loaded: Loaded, low_rank: bool) -> dict[str, Any]:
    """Optimizer and peak rates: those of the recipes for long runs. Models with the published block use AdamW, with
    which it was trained. Adapters use it, too, at a higher rate, since they start at zero."""
    modern = loaded.model.config.norm == "rmsnorm"
    shared = {"optim.schedule": "linear", "optim.weight_decay": 0.0}
    if low_rank:
        return shared | {"optim": "adamw", "optim.lr": 2e-3}
    if modern:
        return shared | {"optim": "muon", "optim.lr": 6e-4, "optim.muon_lr": 2e-3}
    return shared | {"optim": "adamw", "optim.lr": 3e-4}


def exported(loaded: Loaded, start: Path, out: Path) -> Path:
    """An exported folder of the starting model: `start` itself, its `export`, or one written into the run folder (for a
    model of another project, or a run that has not finished)."""
    for folder in (start, start / "export"):
        if (folder / CONFIG).is_file() and not is_released(folder):
            return folder.resolve()
    save_folder(out / "start", loaded.model.state_dict(), loaded.tokenizer, loaded.info)
    return (out / "start").resolve()


def check_start(folder: Path, weights: dict[str, Tensor], named: Path, out: str) -> None:
    """Refuse to continue in the folder of a run that began with another model than the one named."""
    if folder.resolve() not in (named.resolve(), (named / "export").resolve()):
        same = weights_digest(load_folder(folder).model.state_dict()) == weights_digest(weights)
        require(
            same,
            f"out={out!r} began with other weights, those of {str(folder)!r}, than {str(named)!r} gives: name the model"
            " it began with, or use another out=",
        )


# ---- the report ------------------------------------------------------------------------------------------------------


def build_report(
    cfg: Config,
    before: LanguageModel,
    after: LanguageModel,
    valid: Blocks,
    facts: dict[str, Any],
    bounds: list[tuple[Estimate, float]],
) -> str:
    """The page: bounds and samples before and after, then the parts that all reports share."""
    (old, old_bits), (new, new_bits) = bounds
    head = {
        "Bits per byte": Html(f"{new_bits:.3f}<br><small>from {old_bits:.3f}</small>"),
        "Perplexity per token": Html(f"{new.perplexity:,.1f}<br><small>from {old.perplexity:,.1f}</small>"),
    }
    texts = []
    for label, wish in wishes(after.tokenizer, valid).items():
        sides = [
            tag("div", *player(cfg, lm, f"{label}: {when}", wish))
            for when, lm in (("before", before), ("after", after))
        ]
        texts.append(columns(*sides))
    samples = section(
        "Before and after",
        *texts,
        lead=f"{HOW.format(sampler=cfg.sampling.sampler)} Both models draw with the same seed.",
    )
    return report_page(
        f"A language model, fine-tuned on {text_name(cfg)}",
        f"Perplexity and bits per byte are of text that was held out of training{AT_MOST * (not cfg.model.causal)}.",
        tiles(head | run_tiles(facts, after)),
        samples,
        cfg,
        after,
        valid,
        next_commands(Path(cfg.out)),
    )


# ---- adlm adapt ------------------------------------------------------------------------------------------------------
# `adlm adapt BASE data=...`: turn a causal model into a block-diffusion model, anchored or not.
#
# The weights stay the same. Attention becomes bidirectional inside blocks, and a mask embedding (the mean of all) is
# added. Predictions stay shifted by one position, so with blocks of one token the model is the causal model itself,
# before any training. With `algo=adlm` the last third of the blocks is the denoiser, the others are the anchor network,
# whose head starts as the model's own.
#
# The starting weights are written to `out`/start, an exported folder; after that it is a run like any other.

BLOCK_LENGTH = "16,1,4,64,0"
"""One model for all these block lengths, with 16 as the default."""
LONGEST = 1024
"""Most tokens of a sequence, unless model.length is set; a longer context of the base is not trained."""
ANCHORED = {
    "gamma": 0.1, "gamma_warmup": 0.0, "anchor_rule": "all", "anchor_fraction": 0.25, "anchor_positions": "masked",
}  # fmt: skip
"""The anchor loss of the recipe `fast`."""
QUIET = 0.1
"""The anchor network's norm starts at this fraction of the base's final norm, so that its first predictions are nearly
uniform."""
RECIPE: dict[str, Any] = {
    "optim.name": "adamw", "optim.lr": 5e-4, "optim.beta2": 0.95, "optim.schedule": "linear", "optim.warmup": 50,
    "optim.ema": 0.0, "train.global_batch_size": 40, "train.steps": 1600, "objective.time_density": 3.0,
}  # fmt: skip
"""Steps of 40 sequences have 8 of each block length, so that compiled passes meet few shapes. Times near the middle
first teach faster (docs/LOG.md, November 19)."""
LEFT_TO = {
    "optim": ("optim.name", "optim.lr", "optim.beta2"),
    "lr_scheduler": ("optim.schedule", "optim.warmup", "optim.min_lr_ratio"),
}
"""Settings that a typed group (optim=muon) decides."""


def run_adapt(cfg: Config, line: Sequence[str]) -> dict[str, Any]:
    """`adlm adapt BASE`."""
    base = locate(cfg.checkpoint.init_from)
    require(base.exists(), f"{START}={str(base)!r} does not exist: give the causal model to adapt")
    loaded = load_checkpoint(base, tokenizer=cfg.data.tokenizer, root=cfg.data.root, key=START)
    cfg = adapted_settings(loaded, base, line)
    result = train(cfg)
    if result.finished:
        print(farewell(result, exact=False))
    return result._asdict()


def adapted_settings(loaded: Loaded, base: Path, line: Sequence[str]) -> Config:
    """The settings of the run: network and tokenizer of the base, with default blocks and rates. Typed settings win."""
    line = [word for word in line if not word.lstrip("+").startswith(f"{START}=")]
    given = {word.lstrip("+").partition("=")[0] for word in line}
    fixed = sorted(given & {"model", "recipe", "experiment", "model.causal"})
    require(not fixed, f"{', '.join(fixed)} cannot be set here: adlm adapt keeps the network of its base")
    typed = config.load(line, run_folder=False)
    was = loaded.model.config
    anchored = typed.model.anchored if given & {"algo", "model.anchored"} else was.anchored and not was.causal
    model = adapted_config(was, anchored)
    chosen = {f"model.{key}": value for key, value in asdict(model).items()}
    objective = {"name": "anelbo", **ANCHORED} if anchored else {"name": "nelbo", "gamma": 0.0}
    chosen |= {f"objective.{key}": value for key, value in objective.items()} | RECIPE
    if not was.causal:  # as in fine-tuning, training goes on at the bound's own times
        chosen["objective.time_density"] = 1.0
    for group in given & LEFT_TO.keys():
        for key in LEFT_TO[group]:
            chosen.pop(key, None)
    if is_typed("train.steps", line) and "optim.warmup" in chosen:
        chosen["optim.warmup"] = min(RECIPE["optim.warmup"], max(1, typed.train.steps // 20))
    if typed.data.name == "file" and typed.data.path:
        chosen["data.valid_fraction"] = owntext.held_out_fraction(owntext.text_bytes(typed.data))
    kind = f"-{typed.algo}" if anchored else ""
    out = typed.out or f"runs/{base.stem}-adapted{kind}"
    start, begun, density = Path(out).absolute() / "start", config.begun(out), "objective.time_density"
    chosen[density] = begun.get(density, chosen[density])  # earlier versions began at the bound's own times
    words = [
        *([] if "algo" in given else [f"algo={'adlm' if anchored else 'bd3lm'}"]),
        *(f"{key}={value}" for key, value in chosen.items()),
    ]
    places = [f"out={out}", f"data.tokenizer={start / TOKENIZER}", f"{START}={start}"]
    cfg = config.load([*words, *line, *places])
    weights = adapted_weights(loaded, cfg.model)
    if (start / CONFIG).is_file():
        check_start(start, weights, base, out)
    else:
        info = describe(cfg, loaded.tokenizer, step=0, parameters=parameter_count(loaded.model))
        save_folder(start, weights, loaded.tokenizer, info)
    return cfg


def adapted_config(base: ModelConfig, anchored: bool) -> ModelConfig:
    """The block-diffusion network made from a causal one; that of an adapted model stays as it is."""
    if base.block_lengths and not base.causal:
        kind = "has anchors" if base.anchored else "has no anchors"
        require(anchored == base.anchored, f"this model {kind}, and adlm adapt cannot change that a second time")
        return replace(base, dropout=0.0)
    require(base.causal, "adlm adapt makes a block-diffusion model of a causal one; this is a diffusion model already")
    require(not base.anchored, "adlm adapt needs a causal model of one stack; this one has anchors (a2r)")
    length = min(base.length, LONGEST)
    cfg = replace(base, causal=False, shift=True, block_length=BLOCK_LENGTH, length=length, dropout=0.0)
    if not anchored:
        return cfg
    last = max(1, round(base.n_blocks / 3))
    return replace(cfg, anchored=True, bridge="none", n_blocks=base.n_blocks - last, n_denoiser_blocks=last)


@torch.no_grad()
def adapted_weights(loaded: Loaded, cfg: ModelConfig) -> dict[str, Tensor]:
    """The base's weights under the names of the adapted network."""
    base = {name: value.detach().float() for name, value in loaded.model.state_dict().items()}
    if not loaded.model.config.causal:
        return base
    mask = loaded.model.mask_id
    for name in [name for name in ("embedding", "head.weight", "head.bias") if name in base]:
        others = torch.arange(len(base[name]), device=base[name].device) != mask
        base[name] = base[name].clone()
        base[name][mask] = base[name][others].mean(0)
    if cfg.anchored:
        base = in_two_stacks(base, cfg)
    with torch.device("meta"):
        expected = build_model(cfg, loaded.model.vocab_size, mask).state_dict()
    wrong = sorted(base.keys() ^ expected.keys())
    wrong += [name for name in sorted(base.keys() & expected.keys()) if base[name].shape != expected[name].shape]
    require(not wrong, f"{', '.join(wrong[:3])}: these settings ask for another network than the base's")
    return base


def in_two_stacks(base: dict[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Split the weights of one stack into anchor network and denoiser. Both end in a norm and a head. The anchor
    network's are copies, with the norm scaled by QUIET: in the middle of a model they predict nothing useful yet, so
    their predictions should be nearly uniform."""
    found: dict[str, Tensor] = {}
    for name, value in base.items():
        stack, _, rest = name.partition(".blocks.")
        number, _, part = rest.partition(".")
        if stack != "denoiser" or not rest:
            found[name] = value
        elif int(number) < cfg.n_blocks:
            found[f"anchor.blocks.{number}.{part}"] = value
        else:
            found[f"denoiser.blocks.{int(number) - cfg.n_blocks}.{part}"] = value
        if name.startswith(("denoiser.norm.", "head.")):
            own = f"anchor_{name}" if name.startswith("head.") else name.replace("denoiser", "anchor")
            found[own] = value.clone() if name.startswith("head.") else QUIET * value
    return found

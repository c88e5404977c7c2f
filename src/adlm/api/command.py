"""`adlm sample CHECKPOINT ...`: prints texts and appends each finished one to the jsonl file `out`;
`adlm score 'some words' CHECKPOINT`; and `adlm.train`, which is `adlm train` from Python.

Sample i is a function of (settings, seed + i), so the file itself records the progress: a rerun reads it, drops a line
that a crash cut short, and draws only what is missing. Under torchrun each rank takes every size-th missing seed and
writes its own file; the first rank merges the files before and after drawing. The final file is sorted by seed and
does not depend on interruptions or on the number of ranks. With --watch one text appears live from masks, and its
anchors (tokens that are rare in their sequence) are marked.
"""

import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from adlm import config
from adlm.api.language_model import Generation, LanguageModel, load, load_any, path_given
from adlm.compat.checkpoints import run_convert
from adlm.compat.layouts import CODE, save_for_transformers
from adlm.config.keys import TRAINING, full_name
from adlm.data.preparation import prepare
from adlm.engine import Request, Result, most_evaluations
from adlm.errors import require
from adlm.io import progress
from adlm.io.export import place_for_export
from adlm.io.load import BOX_NAME, own_data
from adlm.io.paths import claimed, path_of, read_json, writable_file, write_atomically
from adlm.io.quantised import DAMPING, GROUP, TIED_DAMPING, calibrated, products, rounding, shrink
from adlm.models.network import is_block_matrix
from adlm.objectives import make_objective
from adlm.objectives.anchors import counts_in_sequence
from adlm.objectives.base import CorruptedBatch, on_device, read_positions, states_at
from adlm.schema import Config, DataConfig, SamplingConfig
from adlm.training.parallel import World, world
from adlm.training.setup import batch_of, sequences_on

# Settings that do not change what sample i is.
NOT_IDENTITY = ("n", "batch_size", "seed")
# Removed settings, with the values they had: a rerun still continues files of earlier versions.
GONE = {"grid": "", "guidance": 0.0}
# Settings newer than some files, with the values that reproduce the old behaviour: with those they are left out.
LATER = {"block_length": 0}
# The beginning of every line that `record` writes
BEGINNING = b'{"text": "'
CALIBRATION = 16_384
"""Tokens that four bits are fitted to: from half as many to these it gained 0.001 bits per byte (docs/LOG.md)."""
LONGEST = 1024
"""Most tokens of one of their sequences: many short ones do better than a few long ones."""
AMONG = 16
"""They are evenly spaced among as many times more tokens from the beginning of the text."""
HOLE, NEW, ANCHOR = "bright_black", "bold black on bright_yellow", "bold cyan"


def open_model(cfg: Config) -> LanguageModel:
    """The model that a command line names, by default the one in the package."""
    where = cfg.eval.checkpoint or BOX_NAME
    return LanguageModel(load_any(where, cfg.train.device, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root))


def run_sample(cfg: Config, watch: bool = False) -> dict[str, Any]:
    """Draw sampling.n texts; return how many, where they are, and how fast they were drawn."""
    c = cfg.sampling
    require(not (watch and c.n > 1), f"--watch shows one text, got sampling.n={c.n}")
    with processes(cfg) as ranks:
        require(
            ranks.size == 1 or (bool(cfg.out) and not watch),
            f"{ranks.size} processes draw into one file: give out=FILE.jsonl, and no --watch",
        )
        lm = open_model(cfg)
        request = request_of(lm, c)
        if not cfg.out:
            return draw_missing(lm, request, c, None, watch, ranks)
        file = Path(cfg.out)
        again = file.is_file() or file.is_dir() or not file.exists()
        require(again, f"out={cfg.out!r} cannot be written: samples are read again, which a device or pipe cannot be")
        path = writable_file("out", file)
        # two processes that read the file before either has written would both draw the same texts
        refusal = f"out={cfg.out!r} is being written by another process; wait for it, or use another"
        with claimed(path, lambda _: refusal) if ranks.is_main else nullcontext():
            return draw_missing(lm, request, c, path, watch, ranks)


def processes(cfg: Config) -> AbstractContextManager[World]:
    """The ranks of torchrun; or this process alone, without changing any of its settings."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return world(cfg.train)
    return nullcontext(World(0, 1, torch.device("cpu"), "fp32", "none"))


def draw_missing(
    lm: LanguageModel, request: Request, c: SamplingConfig, path: Path | None, watch: bool, ranks: World
) -> dict[str, Any]:
    """Draw the texts that are not in the file yet, divided evenly among the ranks."""
    identity = fingerprint(lm, replace(c, sampler=request.settings.sampler)) if path else ""
    have = collect(path, identity, ranks) if path else {}
    wanted = [c.seed + i for i in range(c.n) if c.seed + i not in have]
    mine = wanted[ranks.rank :: ranks.size]
    own = part_of(path, ranks) if path else None
    drawn: list[Generation] = []
    began = time.perf_counter()
    if watch and mine:
        drawn.append(watch_text(lm, replace(request, seed=mine[0])))
        record(own, drawn[0], identity)
    elif not wanted and ranks.is_main:
        print(f"all {c.n} samples are in {path} already")
    elif mine:
        most = math.ceil(len(mine) / c.batch_size) * most_evaluations(request, lm.model, lm.schedule)
        unseen, ready = list(reversed(mine)), dict[int, Any]()
        with progress("evaluations, at most", most, ranks.is_main) as advance:
            for text in draw(lm, request, mine, c.batch_size, advance):
                record(own, text, identity)
                drawn.append(text)
                ready[text.seed] = text
                with advance.paused():  # printed in the order of seeds, whichever text is finished first
                    while unseen and unseen[-1] in ready:
                        shown = ready.pop(unseen.pop())
                        print(f"--- seed {shown.seed}, {shown.nfe} evaluations\n{shown.text}", flush=True)
    found = [asdict(text) for text in sorted(drawn, key=lambda text: text.seed)]
    if path:
        have = collect(path, identity, ranks)
        found = [have[seed] for seed in wanted]
    seconds = time.perf_counter() - began
    return {
        "drawn": len(found),
        "already_there": c.n - len(wanted),
        "out": str(path) if path else "",
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(len(x["tokens"]) for x in found) / seconds, 1) if found else 0.0,
        "nfe": sum(x["nfe"] for x in found) / max(1, len(found)),
        "texts": [x["text"] for x in sorted(found, key=lambda x: x["seed"])],
    }


def request_of(lm: LanguageModel, c: SamplingConfig) -> Request:
    """The request that the configuration describes, with seed c.seed; `adlm serve` and evaluation use it, too."""
    lists = ("banned", "required", "choices")
    words = {name: [w.strip() for w in getattr(c, name).split(",") if w.strip()] for name in lists}
    empty = [name for name in lists if getattr(c, name).strip() and not words[name]]
    require(not empty, f"sampling.{''.join(empty[:1])} holds no text, only commas")
    settings: dict[str, Any] = asdict(c) | words
    if c.response_format and not c.response_format.lstrip().startswith("{") and c.response_format != "json_object":
        settings["response_format"] = read_json(path_of(c.response_format))
    return lm.request(**settings)


def draw(
    lm: LanguageModel, request: Request, seeds: list[int], batch_size: int, tick: Callable[[], None] = lambda: None
) -> Iterator[Generation]:
    """Texts of the given seeds, in the order they are finished; `tick` is called after each network evaluation."""
    for result in lm.engine(batch_size).run((replace(request, seed=s) for s in seeds), tick):
        yield lm.finish(result)


def watch_text(lm: LanguageModel, request: Request, console: Console | None = None) -> Generation:
    """Draw one text and show every evaluation; return the finished text."""
    engine = lm.engine(request.settings.batch_size)
    with Live(console=console, refresh_per_second=20, transient=False) as live:
        for update in engine.stream(replace(request, watch=True)):
            drawn = [] if isinstance(update, Result) else update.drawn
            live.update(view(lm, update.tokens, drawn, update.nfe, request))
            if isinstance(update, Result):
                return lm.finish(update)
    raise AssertionError("a stream ends with its result")


def view(lm: LanguageModel, tokens: list[int], drawn: list[int], nfe: int, request: Request) -> Panel:
    """The canvas after one evaluation: holes as dots, newly drawn tokens highlighted, anchors in colour."""
    tok, new = lm.tokenizer, set(drawn)
    rare = (counts_in_sequence(torch.tensor([tokens])) <= lm.loaded.objective.tau)[0].tolist()
    text = Text()
    for l, token in enumerate(tokens):
        if token == tok.mask_id:
            text.append(" \u00b7", HOLE)
        elif token not in tok.special_ids:
            style = NEW if l in new else ANCHOR if rare[l] and tok.token(token).strip().isalnum() else ""
            text.append(tok.token(token), style)
    masks = tokens.count(tok.mask_id)
    title = f"{request.settings.sampler}, seed {request.seed}: {nfe} evaluations, {masks} of {len(tokens)} to come"
    return Panel(text, title=title, subtitle="cyan: rare in this text", subtitle_align="left")


def fingerprint(lm: LanguageModel, c: SamplingConfig) -> str:
    """A digest of everything that decides, together with the seed, which text is drawn."""
    settings = {k: v for k, v in asdict(c).items() if k not in NOT_IDENTITY and LATER.get(k) != v}
    model = {k: lm.info.get(k) for k in ("algo", "model", "step", "vocab_size")}
    what = [GONE | settings, model, lm.tokenizer.fingerprint, lm.weights_digest]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def record(path: Path | None, text: Generation, identity: str, **facts: Any) -> None:
    """Append one line. The file is opened and closed each time, so that every finished text is on disk."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(text), **facts, "run": identity}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be written: {error.strerror}; a rerun continues it") from None


def read_samples(path: Path, identity: str) -> dict[int, dict[str, Any]]:
    """Samples by seed; a last line that a crash cut short is removed. A file with samples of other settings, or with
    anything else, is refused and left as it is."""
    if not path.exists():
        return {}
    whole = path.read_bytes()
    # Not str.splitlines: it also breaks at characters that may occur inside a text (U+2028, U+0085).
    *lines, rest = whole.split(b"\n")
    have = {}
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line)
            seed, run = sample["seed"], sample["run"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"out={str(path)!r}: line {number} is not a sample; choose another file") from None
        require(
            run == identity,
            f"out={str(path)!r} holds samples of another model or other settings; choose another file",
        )
        have[seed] = sample
    if rest:
        ours = bool(have) or rest.startswith(BEGINNING) or BEGINNING.startswith(rest)
        require(ours, f"out={str(path)!r}: line 1 is not a sample; choose another file")
        os.truncate(path, len(whole) - len(rest))
    return have


def part_of(path: Path, ranks: World) -> Path:
    """The file that a rank writes to: the output file itself if there is only one rank."""
    return path if ranks.size == 1 else path.with_suffix(f".part{ranks.rank}{path.suffix}")


def collect(path: Path, identity: str, ranks: World) -> dict[int, dict[str, Any]]:
    """Samples by seed. The first rank merges the files of all ranks, of this run or of a killed one, into one file
    sorted by seed. All ranks call this."""
    ranks.barrier()
    if ranks.is_main:
        name = re.compile(rf"{re.escape(path.stem)}\.part\d+{re.escape(path.suffix)}")
        parts = sorted(p for p in path.parent.glob("*.part*") if name.fullmatch(p.name))
        found: dict[int, dict[str, Any]] = {}
        for file in (path, *parts):
            found |= read_samples(file, identity)
        if parts or list(found) != sorted(found):
            lines = [json.dumps(found[seed], ensure_ascii=False) + "\n" for seed in sorted(found)]
            write_atomically(path, "".join(lines))
        for part in parts:
            part.unlink()
    ranks.barrier()
    return read_samples(path, identity)


# Scoring


def run_score(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm score TEXT [CHECKPOINT]`: how likely a text is, with the most surprising tokens."""
    require(len(args) <= 2, f"adlm score TEXT [CHECKPOINT]: {' '.join(args[2:3])!r} is one word too many (quotes?)")
    text = read_text(args[:1], "adlm score 'some words' [CHECKPOINT]")
    cfg.eval.checkpoint = args[1] if len(args) == 2 else cfg.eval.checkpoint
    lm = open_model(cfg)
    found = lm.score(text, cfg.eval.draws)
    size = max(1, len(text.encode()))
    bits = found.nll * len(found.tokens) / math.log(2) / size
    kind = "exact" if found.exact else "upper bound"
    error = f" +- {found.stderr:.4f}" if found.stderr else ""
    print(f"perplexity {found.ppl:.2f} ({kind}): {found.nll:.4f}{error} nats per token, {bits:.4f} bits per byte;")
    print(f"    {len(found.tokens):,} tokens, {size:,} bytes")
    pieces = [lm.tokenizer.token(t) for t in found.tokens]
    return {**asdict(found), "bits_per_byte": bits, "kind": kind, "pieces": pieces}


def read_text(args: Sequence[str], usage: str) -> str:
    """The words of the command line, the file they name, or standard input."""
    if not args or list(args) == ["-"]:
        require(not sys.stdin.isatty(), f"which text? {usage}, or @FILE, or < FILE")
        return sys.stdin.read()
    text = " ".join(args)
    if text.startswith("@"):
        require(Path(text[1:]).is_file(), f"{text}: there is no file {text[1:]!r}")
        text = text[1:]
    elif re.fullmatch(r"\S*(/\S+|\.(txt|text|md|rst|jsonl?|csv|html|py))", text) and not os.path.lexists(text):
        print(f"adlm: note: there is no file {text!r}; these words are read as the text", file=sys.stderr)
    require(len(text) >= 4096 or not Path(text).is_dir(), f"{text!r} is a folder, no text: {usage}")
    try:
        return Path(text).read_text(encoding="utf-8") if len(text) < 4096 and Path(text).is_file() else text
    except UnicodeDecodeError:
        raise ValueError(f"{text} is not UTF-8 text") from None


# Exporting and training


def run_export(cfg: Config, transformers: bool = False, four_bit: bool = False) -> dict[str, Any]:
    """`adlm export MODEL FOLDER [--transformers | --four-bit]`: write any model that can be loaded as an export. Four
    bits are fitted to the text of `data`, by default the one that the model was trained on."""
    require(not (transformers and four_bit), "--transformers and --four-bit do not go together: its files are plain")
    if cfg.out.endswith(".ckpt"):  # earlier versions of this command wrote such files
        print("adlm: note: `adlm export MODEL FILE.ckpt` is now `adlm convert`", file=sys.stderr)
        return run_convert(cfg)
    named = cfg.data.name != "checkpoint"
    require(four_bit or not named, f"data={cfg.data.name}: only --four-bit reads a text")
    lm = open_model(cfg)
    out = place_for_export(Path(cfg.out))
    rounded = in_four_bits(lm, cfg.data) if four_bit else None
    kind = save_for_transformers(out, lm.loaded) if transformers else lm.save(out, rounded=rounded)
    size = sum(file.stat().st_size for file in out.iterdir() if file.is_file())
    print(f"{cfg.out}: {lm!r}, {size / 1e6:,.1f} MB")
    if kind:
        needs = ", trust_remote_code=True" if (Path(cfg.out) / f"{CODE}.py").is_file() else ""
        print(f"transformers.{kind}.from_pretrained({cfg.out!r}{needs})")
    return {"folder": cfg.out, "bytes": size}


def in_four_bits(lm: LanguageModel, data: DataConfig) -> dict[str, Tensor]:
    """Weights as in a file of four bits, fitted to a text; without one rounded to nearest, which is said."""
    try:
        batch = calibration(lm, data)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if data.name != "checkpoint" or data.path:
            raise
        print(
            f"adlm: note: rounded to nearest, not fitted to a text, which data=file data.path=my.txt does: {error}",
            file=sys.stderr,
        )
        return shrink(lm.model.state_dict())
    return fitted(lm, batch)


def calibration(lm: LanguageModel, data: DataConfig) -> CorruptedBatch:
    """What the model reads in training, from some sequences of the text."""
    require(
        data.name != "checkpoint" or "released" not in lm.info,
        "a model of another project does not say what it was trained on",
    )
    length = min(lm.length, LONGEST)
    n = CALIBRATION // length
    text = replace(own_data(lm.loaded, data, "train"), max_sequences=AMONG * n)
    blocks = prepare(text, lm.tokenizer, length, "train")
    chosen = np.unique(np.linspace(0, len(blocks) - 1, n).astype(int))
    clean = sequences_on(torch.device("cpu"), batch_of(blocks, chosen, np.arange(len(chosen))), len(chosen))
    objective = make_objective(lm.loaded.objective, lm.loaded.noise, lm.model.mask_id, 0, lm.model.config)
    return on_device(objective.corrupt(clean, 0, 1.0), lm.device)


@torch.no_grad()
def fitted(lm: LanguageModel, batch: CorruptedBatch) -> dict[str, Tensor]:
    """Weights as in a file of four bits: those of the blocks, one after the other, and then the head are rounded for
    the inputs that they have in this batch; the others to nearest."""
    model, weights = lm.model, lm.model.state_dict()
    names = [name for name, w in weights.items() if is_block_matrix(name, w) and w.shape[1] % GROUP == 0]
    at_N, term = read_positions(batch), next(iter(batch.terms.values()))
    with rounding(model, [name.removesuffix(".weight") for name in names]) as found:
        hidden = model(batch.tokens_BL, batch.sigma_B, at_N=at_N, **batch.inputs)
    rounded = {f"{name}.weight": (linear.codes, linear.scale) for name, linear in found.items()}
    if model.config.hidden_size % GROUP == 0:
        states_ND = states_at(hidden.denoiser_BLD, term.positions_N, at_N is not None)
        head, damping = ("embedding", TIED_DAMPING) if model.config.tied else ("head.weight", DAMPING)
        rounded[head] = calibrated(model.head.weight, products(states_ND), damping)
    return shrink(weights, rounded)


def train(source: str | Path | Sequence[str] = (), **settings: Any) -> LanguageModel:
    """Train as `adlm train` does, or resume, and load the result.

    `source`: a file or folder of text, or a list of overrides as on the command line. `settings`: overrides by name,
    without the section where the name is unambiguous: adlm.train("my.txt", model="nano", steps=500, out="runs/mine").
    """
    from adlm.training.loop import train as run

    if isinstance(source, (str, os.PathLike)) or not isinstance(source, Iterable):
        source = ["data=file", f"data.path={path_given('source', source)}"]
    named = [f"{full_name(name, TRAINING)}={as_typed(value)}" for name, value in settings.items()]
    return load(run(config.load([*source, *named], own_text=True)).run)


def as_typed(value: Any) -> str:
    """A Python value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)

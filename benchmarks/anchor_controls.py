"""Do anchors help? Many short continuations of one base model, so that the first plateau decides nothing.

    python benchmarks/anchor_controls.py prepare TRAIN VALID FOLDER [key=value ...]   # folders of `adlm data prepare`
    python benchmarks/anchor_controls.py run FOLDER --out RESULTS [--done FILE ...] [--seconds 540] [--state FOLDER]
    python benchmarks/anchor_controls.py report RESULTS ... [--json FILE] [--plot FILE]

How long a run stays on the plateau at 7.8 nats is a lottery that hides everything else at 36M tokens. So a base is
trained past it once, and everything that is compared goes on from its weights, moments and averages, with a decay of
its own to zero. Continuations of one seed read the same rows with the same noise whatever the variant: all differences
are paired. Intervals are over seeds, and so hold for these bases; give `--base-seed` another number for another one.

Which base is fair? One trained with anchors has their gain already, or has grown used to them; one trained without
has a head that knows nothing, and its first gradients are noise for everybody else. The default, `--base probe`, has
a stream that never felt an anchor and a head that learned from it all along, its gradient stopped before the stream.
What is left is against anchors: their states have to be made first. `--base anchors` is the other side, `--base plain`
has the head that knows nothing.

One network serves all variants, compiled and recorded as CUDA graphs once: variants differ in the rows that are scored
and in what happens behind the network's states, and neither is part of a recording. `run` needs no hydra: `prepare`
leaves the settings as JSON beside the rows.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import lzma
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.data.loader import Batches, RowOrder
from adlm.diffusion.schedules import make_schedule
from adlm.diffusion.uniforms import Stream, uniforms32
from adlm.errors import require
from adlm.evaluation.intervals import Estimate, student
from adlm.evaluation.perplexity import BATCH_TOKENS, stratified
from adlm.models import build_model
from adlm.models.flops import count_flops
from adlm.objectives import LossOutput, Rows, Task, Term, row_bounds
from adlm.objectives.anchors import counts_in_row
from adlm.objectives.anelbo import Anelbo
from adlm.objectives.base import only_rows, score_terms
from adlm.schema import Config
from adlm.training.draw import drawn, on_device
from adlm.training.optim import Ema, Guard, Updater, learning_rate_factor, state_of
from adlm.training.parallel import Step, World, expect_any_number, parallelise, world
from adlm.training.setup import scored_shares

BEGAN = time.monotonic() - time.process_time()
"""The process: importing torch is a part of its time."""
SETTINGS = (
    "experiment=evidence algo=adlm model=tiny recipe=quick data=prepared data.path=TRAIN data.valid_path=VALID"
    " optim.schedule=constant optim.lr=1e-3 optim.muon_lr=3e-3 optim.warmup=50 optim.ema=0.98 train.steps=610"
    " train.row_pieces_share=0.6 train.compile=block train.cuda_graphs=true"
)
PIECE = 9_400
"""Rows of a file: two of them, 20 MiB, travel beside the repository to a machine that takes 64."""
VALID_ROWS = 512
CONTINUED = 1000
"""Added to the seed of a continuation: its noise is not the base's."""
MARK, EXTENSION, MOST_EXTENSIONS = 7.0, 100, 6
"""Nats below which the plateau is behind a base; steps that are added until it is, and how often."""


@dataclass(frozen=True)
class Variant:
    scored: str
    """Which anchors: `none`, `quarter` (of all masked tokens), `half-time` (no more of them in the second half),
    `rare`, `common`, `random` (equal in number and total weight), `shuffled` (targets of other positions)."""
    stopped: bool = False
    """The anchor head learns, and the network does not learn from it."""
    tied: bool = False
    """The anchor head is the denoiser's."""
    more_steps: bool = False
    """As many as make its training FLOPs those of `anchors`."""

    @property
    def own_head(self) -> bool:
        """There is an anchor head to be trained."""
        return self.scored != "none" and not self.tied


VARIANTS = {
    "plain": Variant("none", more_steps=True),
    "plain-equal-tokens": Variant("none"),
    "anchors": Variant("quarter"),
    "probe": Variant("quarter", stopped=True),
    "tied": Variant("quarter", tied=True),
    "gamma-off": Variant("half-time"),
    "rare": Variant("rare"),
    "common": Variant("common"),
    "random": Variant("random"),
    "shuffled": Variant("shuffled"),
}
BASES = {"probe": VARIANTS["probe"], "anchors": VARIANTS["anchors"], "plain": VARIANTS["plain-equal-tokens"]}

QUESTIONS = {
    ("anchors", "plain"): "do anchors help at equal compute?",
    ("anchors", "plain-equal-tokens"): "and for the same tokens?",
    ("plain-equal-tokens", "plain"): "what are the control's additional steps worth?",
    ("probe", "plain-equal-tokens"): "is there a gain without a gradient? (there must be none)",
    ("tied", "anchors"): "does the head need weights of its own?",
    ("gamma-off", "anchors"): "does the gain stay without the loss?",
    ("rare", "random"): "are rare tokens better anchors than any?",
    ("common", "random"): "are common ones worse?",
    ("random", "anchors"): "do exact numbers change anything? (they should not)",
    ("shuffled", "plain-equal-tokens"): "is it regularisation?",
}


def say(message: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {message}", flush=True)


# ---- data and settings -----------------------------------------------------------------------------------------------


class Text:
    """Rows in memory, for whoever reads `Blocks`."""

    lengths, crop = None, 0

    def __init__(self, tokens: np.ndarray):
        self.tokens, self.length = tokens, tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.tokens[indices].astype(np.int64)

    def attention_masks(self, indices: np.ndarray) -> None:
        return None


def pack(tokens: np.ndarray) -> bytes:
    """Rows as xz, whose contexts are told that numbers have two bytes."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
    return lzma.compress(np.ascontiguousarray(tokens, dtype="<u2").tobytes(), filters=filters)


def unpack(path: Path, length: int) -> np.ndarray:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").reshape(-1, length)


def write_folder(
    folder: Path, cfg: Config, train: np.ndarray, valid: np.ndarray, mask_id: int, vocab_size: int, facts: Any = None
) -> None:
    """Everything that `run` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, start in enumerate(range(0, len(train), PIECE)):
        (folder / f"train-{i}.xz").write_bytes(pack(train[start : start + PIECE]))
    (folder / "valid.xz").write_bytes(pack(valid))
    about = {"config": asdict(cfg), "mask_id": mask_id, "vocab_size": vocab_size, "data": facts}
    (folder / "about.json").write_text(json.dumps(about, indent=1))


def prepare(train: str, valid: str, folder: str, words: list[str]) -> None:
    """Rows of two prepared folders: all of the first, and VALID_ROWS of the second, evenly spaced."""
    from adlm import config
    from adlm.data.blocks import Blocks

    a, b = Blocks(train), Blocks(valid)
    require(a.manifest["tokenizer"] == b.manifest["tokenizer"], "the two folders have different tokenizers")
    cfg = config.load([*SETTINGS.split(), f"model.length={a.length}", *words])
    chosen = np.linspace(0, len(b), VALID_ROWS, endpoint=False).astype(np.int64)
    facts = [{key: x.manifest[key] for key in ("files", "documents", "rows", "fingerprint")} for x in (a, b)]
    write_folder(
        Path(folder), cfg, a.tokens[:], b.tokens[chosen], a.manifest["mask_id"], a.manifest["vocab_size"], facts
    )
    for path in sorted(Path(folder).iterdir()):
        print(f"{path.name:12} {path.stat().st_size / 2**20:6.1f} MiB")


@dataclass(eq=False)
class Study:
    """What is the same for every continuation."""

    cfg: Config
    """Of the base."""
    mask_id: int
    vocab_size: int
    base_text: Text
    text: Text
    """What continuations read: rows that the base has not seen."""
    valid: Text
    steps: int
    draws: int
    identity: str
    """Of settings and data."""


def read_study(folder: Path, steps: int, draws: int, words: list[str]) -> Study:
    """`words`: key=value changes of the settings, for sections of plain numbers."""
    about = json.loads((folder / "about.json").read_text())
    cfg = Config()
    for section, values in about["config"].items():
        if isinstance(values, dict):
            for key, value in values.items():
                setattr(getattr(cfg, section), key, value)
    for word in words:
        key, value = word.split("=", 1)
        section, name = key.split(".")
        kind = type(getattr(getattr(cfg, section), name))
        setattr(getattr(cfg, section), name, value == "true" if kind is bool else kind(value))
    paths = sorted(folder.glob("train-*.xz"), key=lambda path: int(path.stem.split("-")[1]))
    tokens = np.concatenate([unpack(path, cfg.model.length) for path in paths])
    tokens = tokens[RowOrder(len(tokens), 0)[np.arange(len(tokens))]]  # files are in the order of the encyclopedia
    first = min((cfg.train.steps + EXTENSION) * cfg.train.global_batch_size, len(tokens) // 2)
    what = [asdict(cfg), len(tokens), int(tokens[: 64 * 16].astype(np.int64).sum())]
    identity = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    valid = Text(unpack(folder / "valid.xz", cfg.model.length))
    texts = (Text(tokens[:first]), Text(tokens[first:]), valid)
    return Study(cfg, about["mask_id"], about["vocab_size"], *texts, steps, draws, identity)


def continued(cfg: Config, steps: int) -> Config:
    """Settings of a continuation: whole rows, and times as in the bound."""
    train = replace(cfg.train, steps=steps, row_pieces=1, batch_parts=1)
    return replace(cfg, train=train, objective=replace(cfg.objective, time_density_a=1.0, time_density_b=1.0))


# ---- variants --------------------------------------------------------------------------------------------------------


class Controlled(Anelbo):
    """The objective of `recipe=quick` with other anchors."""

    def __init__(self, cfg: Config, scored: str, mask_id: int, seed: int):
        super().__init__(cfg.objective, make_schedule(cfg.noise), mask_id, seed)
        self.scored = scored

    def draw(self, rows: Rows, step: int, progress: float) -> Task:
        task = super().draw(rows, step, progress)
        bound, anchor = task.terms["nelbo"], task.terms["anchor"]
        if self.scored == "none" or (self.scored == "half-time" and progress >= 0.5):
            return task._replace(terms={"nelbo": bound})
        if self.scored == "shuffled":
            anchor = anchor._replace(targets_N=anchor.targets_N[self.order(anchor.targets_N, step)])
        elif self.scored in ("rare", "common", "random"):
            anchor = self.equal_subset(rows, bound, anchor, step)
        return task._replace(terms={"nelbo": bound, "anchor": anchor})

    def order(self, values_N: Tensor, step: int) -> Tensor:
        """A permutation of N positions."""
        return uniforms32(self.seed, Stream.ORDER, step, torch.arange(len(values_N))).argsort(stable=True)

    def equal_subset(self, rows: Rows, bound: Term, anchor: Term, step: int) -> Term:
        """As many rare, common or any masked tokens, whose weights have the sum of all masked tokens' weights."""
        rare_N = (counts_in_row(rows.tokens_BL) <= self.cfg.tau).flatten()[bound.rows_N]
        number = min(round(self.cfg.anchor_share * len(rare_N)), int(rare_N.sum()), int((~rare_N).sum()))
        allowed_N = {"rare": rare_N, "common": ~rare_N, "random": torch.ones_like(rare_N)}[self.scored]
        u_N = uniforms32(self.seed, Stream.ANCHOR, step, bound.rows_N)
        chosen = u_N.masked_fill(~allowed_N, 2.0).argsort(stable=True)[:number].sort().values
        weights = bound.weights_N[chosen]
        weights = weights * (bound.weights_N.sum() / weights.sum().clamp(min=1e-9))
        return anchor._replace(rows_N=bound.rows_N[chosen], targets_N=bound.targets_N[chosen], weights_N=weights)


@functools.cache
def training_flops(study: Study, scored: str) -> float:
    """Of a token, averaged over a continuation: the package's count for the positions that this variant scores."""
    if scored == "half-time":
        return (training_flops(study, "quarter") + training_flops(study, "none")) / 2
    cfg = continued(study.cfg, study.steps)
    shares = scored_shares(Controlled(cfg, scored, study.mask_id, seed=0), study.text)  # type: ignore[arg-type]
    return count_flops(cfg.model, study.vocab_size, cfg.model.length, *shares).training_per_token


def steps_of(study: Study, variant: Variant) -> int:
    if not variant.more_steps:
        return study.steps
    return round(study.steps * training_flops(study, "quarter") / training_flops(study, "none"))


# ---- one network for all ---------------------------------------------------------------------------------------------


class State(NamedTuple):
    """All that a continuation starts from."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    updates: int
    """That the averages have seen."""
    moments: dict[str, dict[str, Tensor]]

    @property
    def identity(self) -> str:
        sums = [float(x.double().sum()) for x in (*self.weights.values(), *self.averages.values())]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:8]


class TiedHeads(NamedTuple):
    head: Any
    anchor_head: Any


class Trainer:
    """The network, on the device for the whole process; runs put their weights into it."""

    def __init__(self, study: Study, ranks: World, seed: int):
        self.study, self.ranks, self.cfg = study, ranks, study.cfg
        torch.manual_seed(seed)
        self.model = build_model(study.cfg.model, study.vocab_size, study.mask_id).to(ranks.device).train()
        self.step = Step(self.model)
        parallelise(self.step, study.cfg.train, ranks)
        self.parameters = dict(self.step.named_parameters())

    def loss(self, task: Task, variant: Variant) -> LossOutput:
        """`objectives.loss`, with the two changes that a variant may make behind the network."""
        if self.step.compiled:
            expect_any_number(task)
        network = self.model if self.step.replays is None else self.step.replays
        at_N = only_rows(task)
        hidden = network(task.tokens_BL, task.sigma_B, at=at_N)
        heads = TiedHeads(self.model.head, self.model.head) if variant.tied else self.model
        anchor_BLD = hidden.anchor_BLD
        if variant.stopped and anchor_BLD is not None:
            anchor_BLD = anchor_BLD.detach()
        return score_terms(heads, hidden.denoiser_BLD, anchor_BLD, task, picked=at_N is not None)

    @torch.no_grad()
    def fork(self, state: State | None, variant: Variant) -> Updater:
        """Put a state in place (None: leave the weights alone), with optimizers for what this variant trains."""
        if state is not None:
            for name, p in self.parameters.items():
                p.copy_(state.weights[name])
        assert self.model.anchor_head is not None
        ema, head = Ema(self.step, self.cfg.optim.ema), self.model.anchor_head.weight
        head.requires_grad_(variant.own_head)
        update = Updater(self.cfg.optim, self.step, ema, Guard(0.0, self.ranks.device))
        head.requires_grad_(True)  # as it was when the network was recorded; without a loss it has no gradient
        if state is not None:
            for name, average in ema.shadow.items():
                average.copy_(state.averages[name])
            ema.n = state.updates
            for name, optimizer, p in self.trained(update):
                for key, value in state.moments.get(name, {}).items():
                    state_of(optimizer, p)[key].copy_(value)
        return update

    def trained(self, update: Updater) -> list[tuple[str, torch.optim.Optimizer, Any]]:
        """Names and parameters of all optimizers."""
        names = {p: name for name, p in self.parameters.items()}
        return [(names[p], o, p) for o in update.optimizers for group in o.param_groups for p in group["params"]]

    @torch.no_grad()
    def state(self, update: Updater) -> State:
        moments = {name: {k: x.clone() for k, x in o.state[p].items()} for name, o, p in self.trained(update)}
        averages = {name: x.clone() for name, x in update.ema.shadow.items()}
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        return State(weights, averages, update.ema.n, moments)

    def train(
        self, update: Updater, variant: Variant, cfg: Config, text: Text, seed: int, first: int, last: int,
        factor: Callable[[int], float],
    ) -> dict[str, float]:  # fmt: skip
        """Steps `first` to `last`; what happened, on average. The host waits for the device at the end only."""
        objective, size = Controlled(cfg, variant.scored, self.study.mask_id, seed), cfg.train.global_batch_size
        batches = map(Batches(text, seed, size).read, range(first * size, last * size, size))  # type: ignore[arg-type]
        norms, bounds, anchors, scored, weight = [], [], [], 0, 0.0
        began = time.monotonic()
        for i, (_, (host,)) in enumerate(drawn(objective, batches, first, 1, cfg, self.ranks.device), first):
            if "anchor" in host.terms:
                scored += len(host.terms["anchor"].rows_N)
                weight += float(host.terms["anchor"].weights_N.sum())
            task = on_device(host, self.ranks.device)
            with self.ranks.autocast():
                output = self.loss(task, variant)
                (output.total / task.count).backward()
            norms.append(update(factor(i)))
            bounds.append(output.terms["nelbo"] / task.count)
            if "anchor" in output.terms:
                anchors.append(output.terms["anchor"] / task.count)
        norm, bound = torch.stack(norms).float().cpu(), torch.stack(bounds).float().cpu()
        seconds = time.monotonic() - began
        assert update.guard is not None
        return {
            "tokens": (last - first) * size * text.length,
            "seconds": round(seconds, 2),
            "tokens_per_s": round((last - first) * size * text.length / seconds),
            "train_bound": float(bound[-64:].mean()),
            "anchor_loss": float(torch.stack(anchors)[-64:].mean()) if anchors else 0.0,
            "anchors_per_step": scored / (last - first),
            "anchor_weight_per_step": weight / (last - first),
            "norm": float(norm.mean()),
            "clipped": float((norm > self.cfg.optim.clip).float().mean()),
            "skipped": float(update.guard.skipped),
        }

    def bound(self, update: Updater, rows: int = 0, draws: int = 0) -> Estimate:
        """On held-out rows with the averaged weights, the noise that is the same for everybody."""
        valid, objective = self.study.valid, Controlled(self.cfg, "none", self.study.mask_id, 0)
        size = max(1, BATCH_TOKENS[self.ranks.device.type] // valid.length)

        def score(some: Rows, draw: int) -> Tensor:
            return row_bounds(self.model, objective.draw_bound(some, draw))

        given = (valid, rows or len(valid), draws or self.study.draws, 0, size, self.ranks, "")
        with update.ema, as_written(self.model):
            return stratified(score, *given)  # type: ignore[arg-type]

    def try_out(self, state: State | None = None) -> dict[str, list[float]]:
        """Loss and gradient norm of every way through the network, as trained and as written."""
        found: dict[str, list[float]] = {}
        for cfg in (self.cfg, continued(self.cfg, self.study.steps)) if state is None else (continued(self.cfg, 100),):
            size = cfg.train.global_batch_size
            for name in ("anchors", "plain", "probe", "tied"):
                variant = VARIANTS[name]
                self.fork(state, variant)
                objective = Controlled(cfg, variant.scored, self.study.mask_id, 0)
                batches = map(Batches(self.study.text, 0, size).read, [0])  # type: ignore[arg-type]
                ((_, (host,)),) = list(drawn(objective, batches, 0, 1, cfg, self.ranks.device))
                for way in (contextlib.nullcontext(), self.plainly()) if state else (contextlib.nullcontext(),):
                    with way, self.ranks.autocast():
                        task = on_device(host, self.ranks.device)
                        total = self.loss(task, variant).total / task.count
                        total.backward()
                    grads = [p.grad for p in self.parameters.values() if p.grad is not None]
                    values = [float(total.detach()), float(torch.nn.utils.get_total_norm(grads))]
                    require(all(map(math.isfinite, values)), f"{name}: loss and gradient norm {values}")
                    found.setdefault(name, []).extend(values)
                    self.step.zero_grad(set_to_none=True)
        return found

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Neither compiled nor replayed."""
        replays, self.step.replays = self.step.replays, None
        try:
            with as_written(self.model):
                yield
        finally:
            self.step.replays = replays


@contextlib.contextmanager
def as_written(model: torch.nn.Module) -> Iterator[None]:
    """Not as compiled: an evaluation of two seconds is not worth another compilation."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def told(facts: dict[str, Any]) -> str:
    return (
        f"train {facts['train_bound']:.4f}, anchor loss {facts['anchor_loss']:.3f} of {facts['anchors_per_step']:.0f},"
        f" clipped {facts['clipped']:.2f}, skipped {facts['skipped']:.0f}, {facts['tokens_per_s']:,} tokens/s"
    )


def make_trainer(study: Study, ranks: World, seed: int) -> tuple[Trainer, str]:
    """The fastest way that works here."""
    graphs, compiled = study.cfg.train.cuda_graphs, ranks.compile
    ways = [(compiled, True)] if graphs else []
    ways += [(compiled, False)] if compiled != "none" else []
    for ranks.compile, study.cfg.train.cuda_graphs in [*ways, ("none", False)]:
        way = f"compile={ranks.compile} graphs={study.cfg.train.cuda_graphs}"
        try:
            trainer = Trainer(study, ranks, seed)
            trainer.try_out()
        except Exception as error:
            if (ranks.compile, study.cfg.train.cuda_graphs) == ("none", False):
                raise
            traceback.print_exc()
            say(f"{way} does not work here, going on without: {type(error).__name__}: {error}")
            continue
        # trying out has drawn nothing from the generator, and no optimizer has made a step
        return trainer, way
    raise AssertionError


# ---- base and continuations ------------------------------------------------------------------------------------------


def train_base(trainer: Trainer, kind: str, seed: int) -> State:
    """From the start to where the plateau is left, at a constant rate; a little longer if it is not yet."""
    study, variant, cfg = trainer.study, BASES[kind], trainer.study.cfg
    update = trainer.fork(None, variant)
    rows = min(len(study.valid), 128)

    def go_on(first: int, last: int) -> float:
        rate = lambda i: learning_rate_factor(cfg.optim, i, cfg.train.steps)  # noqa: E731
        facts = trainer.train(update, variant, cfg, study.base_text, seed, first, last, rate)
        bound = trainer.bound(update, rows, 1).nats
        say(f"base {kind}, seed {seed}: step {last}, bound {bound:.4f} on {rows} rows, {told(facts)}")
        return bound

    third, step = 3 * cfg.train.steps // 10, cfg.train.steps
    go_on(0, third)
    go_on(third, 2 * third)
    bound = go_on(2 * third, step)
    for _ in range(MOST_EXTENSIONS):
        if bound < MARK:
            break
        say(f"base: still at {bound:.2f} nats, {EXTENSION} steps more")
        bound = go_on(step, step + EXTENSION)
        step += EXTENSION
    return trainer.state(update)


def base_for(trainer: Trainer, kind: str, seed: int, folder: Path | None) -> State:
    """From an earlier call, if it has left one on this machine, else trained."""
    path = None if folder is None else folder / f"base-{kind}-{seed}-{trainer.study.identity}.pt"
    if path is not None and path.exists():
        try:
            state = State(**torch.load(path, map_location=trainer.ranks.device))
            say(f"base {kind}, seed {seed}: from {path}")
            return state
        except Exception as error:
            say(f"{path} cannot be read, so the base is trained again: {error}")
    state = train_base(trainer, kind, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        torch.save(state._asdict(), draft)
        os.replace(draft, path)
        say(f"base written to {path}")
    return state


def run_continuation(trainer: Trainer, base: State, name: str, seed: int) -> dict[str, Any]:
    """One line of the results."""
    study, variant = trainer.study, VARIANTS[name]
    steps = steps_of(study, variant)
    update = trainer.fork(base, variant)
    parameters = sum(p.numel() for _, _, p in trainer.trained(update))
    facts = trainer.train(
        update, variant, continued(study.cfg, steps), study.text, CONTINUED + seed, 0, steps, lambda i: 1 - i / steps
    )
    began = time.monotonic()
    e = trainer.bound(update)
    per_token = training_flops(study, variant.scored)
    return {
        "variant": name,
        "seed": seed,
        "steps": steps,
        "bound": e.nats,
        "row_error": e.row_error,
        **facts,
        "eval_seconds": round(time.monotonic() - began, 2),
        "mflop_per_token": per_token / 1e6,
        "flops": per_token * facts["tokens"],
        "parameters": parameters,
        "row_nats": [] if e.row_nats is None else [round(float(x), 3) for x in e.row_nats],
    }


def plan(done: list[dict[str, Any]], base: dict[str, Any], variants: list[str], seeds: int) -> list[tuple[int, str]]:
    """Seed by seed, so that a run that is cut short is balanced. What is done from this very base is not done again;
    a base that was trained anew gets seeds of its own."""
    same = {(line["seed"], line["variant"]) for line in done if all(line[key] == base[key] for key in base)}
    elsewhere = {line["seed"] for line in done} - {seed for seed, _ in same}
    free = [seed for seed in range(1, len(elsewhere) + seeds + 1) if seed not in elsewhere][:seeds]
    return [(seed, name) for seed in free for name in variants if (seed, name) not in same]


def run(args: argparse.Namespace) -> None:
    study = read_study(Path(args.folder), args.steps, args.draws, args.words)
    names = args.variants.split(",") if args.variants else list(VARIANTS)
    require(set(names) <= set(VARIANTS), f"--variants: some of {', '.join(VARIANTS)}")
    say(
        f"{len(study.base_text):,} rows for the base, {len(study.text):,} for continuations, {len(study.valid)} held"
        f" out; study {study.identity}; torch {torch.__version__}"
    )
    for name in names:
        steps, per_token = steps_of(study, VARIANTS[name]), training_flops(study, VARIANTS[name].scored)
        total = per_token * steps * study.cfg.train.global_batch_size * study.text.length
        say(f"  {name:20} {steps} steps, {per_token / 1e6:.1f} MFLOP per token, {total:.4g} FLOP in all")
    done = read_lines([args.out, *args.done])
    with world(study.cfg.train) as ranks:
        trainer, way = make_trainer(study, ranks, args.base_seed)
        say(f"ready: {ranks.device}, {way}")
        base = base_for(trainer, args.base, args.base_seed, Path(args.state) if args.state else None)
        seen = trainer.try_out(base)
        for name, (loss, norm, written_loss, written_norm) in seen.items():
            say(f"  {name}: loss {loss:.4f}, norm {norm:.4f}; as written {written_loss:.4f}, {written_norm:.4f}")
            if abs(loss / written_loss - 1) > 0.02 or abs(norm / written_norm - 1) > 0.1:
                say("  WARNING: these should agree; replaying is switched off")
                trainer.step.replays, way = None, f"{way}, but not replayed"
        at_fork = trainer.bound(trainer.fork(base, VARIANTS["plain"])).nats
        say(f"base {base.identity}: bound {at_fork:.4f} at the fork{'' if at_fork < MARK else ', STILL THE PLATEAU'}")
        about = {"study": study.identity, "continuation": args.steps, "base": args.base, "base_seed": args.base_seed}
        about |= {"base_id": base.identity}
        todo = plan(done, about, names, args.seeds)
        say(f"{len(todo)} continuations of {args.steps} steps to do")
        longest = 0.0
        for seed, name in todo:
            began = time.monotonic()
            if began - BEGAN + 1.1 * longest + 3 > args.seconds:
                say(f"stopped before {name}, seed {seed}: {args.seconds} s are nearly over; --done {args.out} goes on")
                break
            line = run_continuation(trainer, base, name, seed)
            line = {**about, "base_bound": at_fork, "way": way, **line}
            with open(args.out, "a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            longest = max(longest, time.monotonic() - began)
            say(f"seed {seed} {name:20} bound {line['bound']:.4f}, {told(line)}, {time.monotonic() - began:.1f} s")
        else:
            say("all done")


# ---- report ----------------------------------------------------------------------------------------------------------


def read_lines(paths: list[str]) -> list[dict[str, Any]]:
    """Results; a last line that was cut off is none."""
    found = []
    for path in map(Path, paths):
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def pair_of(line: dict[str, Any]) -> tuple[str, str, int, int]:
    """What two results must share to be compared."""
    return line["study"], line["base_id"], line["continuation"], line["seed"]


def differences(lines: list[dict[str, Any]], name: str, other: str) -> list[float]:
    """Bounds minus another variant's, of the same seed from the same base."""
    own = {pair_of(x): x["bound"] for x in lines if x["variant"] == name}
    others = {pair_of(x): x["bound"] for x in lines if x["variant"] == other}
    return [own[pair] - others[pair] for pair in sorted(own) if pair in others]


def interval(values: list[float]) -> tuple[float, float] | None:
    """Mean and half of a 95% interval (Student); None where there are not two."""
    if len(values) < 2:
        return None
    return statistics.mean(values), student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each variant, in the order of the table."""
    found = []
    for name in VARIANTS:
        own = [line for line in lines if line["variant"] == name]
        if own:
            row: dict[str, Any] = {"variant": name, "seeds": len(own)}
            for key in ("bound", "flops", "tokens", "anchors_per_step", "clipped", "train_bound"):
                row[key] = statistics.mean(line[key] for line in own)
            for other in ("plain", "plain-equal-tokens"):
                pairs = differences(lines, name, other) if name != other else []
                row[f"minus {other}"] = {"pairs": pairs, "interval": interval(pairs)}
            found.append(row)
    return found


def cell(value: dict[str, Any]) -> str:
    """A difference with its interval, bold where that leaves zero out, and the number of pairs."""
    if value["interval"] is None:
        return " ".join(f"{x:+.4f}" for x in value["pairs"])
    mean, half = value["interval"]
    mark = "**" if abs(mean) > half else ""
    return f"{mark}{mean:+.4f} +- {half:.4f}{mark} ({len(value['pairs'])})"


def answers(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for (name, other), question in QUESTIONS.items():
        if pairs := differences(lines, name, other):
            found[f"{name} - {other}"] = {"question": question, "pairs": pairs, "interval": interval(pairs)}
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    most = max(row["flops"] for row in rows)
    text = [
        "| variant | seeds | bound, nats per token | minus `plain` (equal FLOPs; pairs) | minus `plain-equal-tokens` |"
        " anchors a step | training FLOPs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        text.append(
            f"| {row['variant']} | {row['seeds']} | {row['bound']:.4f} | {cell(row['minus plain'])} |"
            f" {cell(row['minus plain-equal-tokens'])} | {row['anchors_per_step']:.0f} | {row['flops'] / most:.3f} |"
        )
    return "\n".join(text)


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["minus plain"]["pairs"]]
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.4 * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        pairs, ends = row["minus plain"]["pairs"], row["minus plain"]["interval"]
        axes.plot(pairs, [y] * len(pairs), "o", color="tab:gray", alpha=0.5, markersize=4)
        if ends is not None:
            axes.errorbar(ends[0], y, xerr=ends[1], fmt="o", color="tab:blue", capsize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("bound minus plain's at equal training FLOPs, nats per token (95% over seeds, paired)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(args: argparse.Namespace) -> None:
    lines = list({(*pair_of(x), x["variant"]): x for x in read_lines(args.files)}.values())
    require(bool(lines), f"no results in {', '.join(args.files)}")
    bases = sorted({(x["base"], x["base_id"], round(x["base_bound"], 4)) for x in lines})
    rows = summary(lines)
    print(f"{len(lines)} continuations of {len(bases)} base{'s' * (len(bases) > 1)}: {bases}\n")
    print(markdown(rows))
    asked = answers(lines)
    print("\n| question | pair | difference, 95% (pairs) |\n|---|---|---|")
    for pair, answer in asked.items():
        print(f"| {answer['question']} | {pair} | {cell(answer)} |")
    each = {}
    if len(bases) > 1:
        for kind, identity, bound in bases:
            own = [line for line in lines if line["base_id"] == identity]
            each[identity] = summary(own)
            print(f"\nbase {kind} {identity}, {bound} nats at the fork:\n\n{markdown(each[identity])}")
    document = {"bases": bases, "variants": rows, "answers": asked, "each": each}
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    else:
        print(json.dumps(document))
    if args.plot:
        draw(rows, args.plot)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    for name in ("train", "valid", "folder"):
        one.add_argument(name)
    one.add_argument("words", nargs="*", metavar="key=value")
    one = commands.add_parser("run")
    one.add_argument("folder")
    one.add_argument("words", nargs="*", metavar="section.key=value")
    one.add_argument("--out", required=True, help="one JSON line for each continuation, appended")
    one.add_argument("--done", nargs="*", default=[], help="results of earlier calls")
    one.add_argument("--seconds", type=float, default=540, help="of this process, after which nothing new is begun")
    one.add_argument("--state", default="", help="folder that keeps the base for another call (1.8 GB)")
    one.add_argument("--base", choices=BASES, default="probe")
    one.add_argument("--base-seed", type=int, default=1)
    one.add_argument("--seeds", type=int, default=6, help="continuations of each variant from this base, at most")
    one.add_argument("--steps", type=int, default=600, help="of a continuation (plain: a few more)")
    one.add_argument("--draws", type=int, default=4)
    one.add_argument("--variants", default="", help="separated by commas; all")
    one = commands.add_parser("report")
    one.add_argument("files", nargs="+")
    one.add_argument("--json", default="")
    one.add_argument("--plot", default="")
    args = parser.parse_args(argv)
    if args.command == "prepare":
        prepare(args.train, args.valid, args.folder, args.words)
    elif args.command == "run":
        run(args)
    else:
        report(args)


if __name__ == "__main__":
    main(sys.argv[1:])

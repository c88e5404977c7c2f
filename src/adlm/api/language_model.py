"""A trained model with its tokenizer: generate, stream, score, read predictions, save.

    lm = adlm.load("runs/demo")
    lm.generate(n=4, sampler="remdm-loop", steps=256, top_p=0.9, seed=0)
    lm.generate("Once upon a time", max_new_tokens=64)
    lm.generate("The capital of [MASK:2] is [MASK:3].")

Everything random follows from `seed`: text i of a prompt uses seed + i, whatever the batch size. Every method may be
called from any thread: concurrent calls to generate are batched together, and only one call uses the network at a time.
"""

import contextlib
import functools
import gc
import hashlib
import operator
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_type_hints

import torch
from torch import Tensor

from adlm import tables
from adlm.api.scoring import Parts, Score, SlotReads, T, read_slots, score_tokens, whole
from adlm.constrain import banned_and_required, listed, make_constraint
from adlm.data import remote
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.process import make_schedule, noise_level
from adlm.engine import Engine, Request, Result
from adlm.engine.prepare import autocast
from adlm.engine.request import LIKE_A_HOLE, Limit, check_canvas, check_length, parse_template
from adlm.errors import choose, require
from adlm.io.export import CARD, PLACEHOLDER, Loaded, place_for_export, save_folder
from adlm.io.load import BOX_NAME, load_checkpoint
from adlm.io.paths import float64_device, path_of, pick_device
from adlm.io.quantised import in_precision
from adlm.models.network import Hidden
from adlm.objectives import Objective
from adlm.rules import Count, WholeNumber, accept, rules_of
from adlm.samplers.base import with_sampler
from adlm.schema import SamplingConfig, TrainConfig

Words = Sequence[str]
SETTINGS = get_type_hints(SamplingConfig, include_extras=True)
"""Fields of SamplingConfig, with the rules for their values."""
# Keys in messages of the command line -> names of Python arguments; KEYS does not match inside paths and quoted texts.
PYTHON_NAMES = {"sampling.": "", "train.device": "device", "eval.checkpoint": "source", "eval.ema": "ema"}
KEYS = re.compile(r"(?<![\w/.'\"])(" + "|".join(map(re.escape, PYTHON_NAMES)) + ")")


class StreamSettings(TypedDict, total=False):
    """The fields of SamplingConfig as keywords, for type checkers and editors; a test compares the two."""

    prompt: str
    template: str
    length: int
    max_new_tokens: int
    stop: bool
    banned: Words
    required: Words
    regex: str
    choices: Words
    response_format: str | Mapping[str, Any]
    seed: int
    sampler: str
    steps: int
    block_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stride: int
    eta: float
    t_on: float
    t_off: float
    alpha_on: float
    threshold: float
    parity: str
    batch_size: int


class GenerateSettings(StreamSettings, total=False):
    n: int


@dataclass(frozen=True)
class Generation:
    """One finished text."""

    text: str
    tokens: list[int]
    nfe: int
    """Network evaluations (a diffusion model needs far fewer than steps x tokens)."""
    seconds: float
    """Time from its first evaluation to its end; texts of one batch share it."""
    seed: int


@dataclass(frozen=True)
class Partial:
    """An unfinished text: holes still show as the mask token."""

    text: str
    tokens: list[int]
    step: int
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation."""


@contextlib.contextmanager
def python_words() -> Iterator[None]:
    """Make errors name Python arguments: `temperature=-1`, not the command line's `sampling.temperature=-1`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(KEYS.sub(lambda key: PYTHON_NAMES[key[0]], str(error))) from None


def load(
    source: str | Path = BOX_NAME,
    device: str | torch.device = "auto",
    ema: bool = True,
    tokenizer: str = "",
    root: str = "",
    dtype: str | torch.dtype = "auto",
    revision: str = "",
) -> "LanguageModel":
    """Load a run folder, an exported folder, a .ckpt of the public release, or a released model: a folder, a GGUF file
    or a hub name "owner/model", whose `revision` is a branch, tag or commit. By default: the model in the package.

    `device`: auto, cpu, cuda or cuda:N. `dtype`: what the network computes in. auto is bfloat16 while generating on a
    GPU, and otherwise the precision of the weights: float32 for our models, that of the file for released ones.
    `tokenizer` and `root` (a folder with vocabulary files) are for a model that comes without its tokenizer.
    """
    name = str(dtype).removeprefix("torch.")
    precision = {"float32": "fp32", "bfloat16": "bf16"}.get(name, name)  # torch's names -> ours
    rules_of(TrainConfig)["precision"].check("dtype", precision)
    with python_words():
        loaded = load_any(source, str(device), ema, tokenizer, root, revision)
        if precision == "fp32":
            loaded.model.float()
        return LanguageModel(loaded, precision)


def load_any(
    source: str | Path, device: str, ema: bool = True, tokenizer: str = "", root: str = "", revision: str = ""
) -> Loaded:
    """A model from this machine or from the hub; errors name keys of the command line."""
    path_given("source", source)
    return load_checkpoint(source, ema, pick_device(device), tokenizer, root, revision)


def path_given(what: str, value: Any) -> Path:
    """A path from Python; anything but a text or a path is refused."""
    require(isinstance(value, (str, os.PathLike)), f"{what} must be a path, got {value!r:.60}")
    return path_of(value)


class LanguageModel:
    """A trained model with its tokenizer; `adlm.load` makes one."""

    def __init__(self, loaded: Loaded, precision: str = "auto"):
        """`precision`: auto, fp32 or bf16; see `dtype` of `load`."""
        self.loaded, self.precision = loaded, precision
        self.model, self.info = loaded.model, loaded.info
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.schedule = make_schedule(loaded.noise)
        self.length: int = loaded.model.config.length
        """Longest sequence in tokens."""
        self.new_tokens: int = loaded.info.get("new_tokens") or self.length
        """Tokens to draw after a prompt when a request does not say how many."""
        self.objective: type[Objective] = tables.OBJECTIVES.load(loaded.objective.name)
        self.kept_engine: Engine | None = None
        self.lock = threading.Lock()
        """Held while the network is in use; the engine uses the same lock."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def weights_digest(self) -> str:
        """The sha256 of all weights, which tells apart two runs with the same settings."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        kind = self.info.get("algo", "?")
        return f"LanguageModel({kind}, {size:,} parameters, length {self.length}, {self.tokenizer!r})"

    # Generating

    def generate(self, text: str | Words = "", **settings: Unpack[GenerateSettings]) -> list[Generation]:
        """Draw n texts for `text`, sorted by seed; for a list of texts, n for each, in the order of the list.

        A text without holes is a prompt to continue; a text with holes ([MASK], [MASK:3]) is a template to fill; an
        empty one asks for free text. Use `prompt` or `template` instead to say which it is, whatever it contains.
        `length` counts all tokens, including the prompt and its begin-of-text token (0: the model's own);
        `max_new_tokens` counts only those that are drawn. `stop` ends a text at its first end-of-text token. `banned`
        and `required` are lists of words. What fills the holes can be constrained by a `regex`, by a list of `choices`,
        or by `response_format`: a JSON schema, or OpenAI's form of one (docs/sampling.md). The other settings are those
        of the command line's `sampling` section.
        """
        with python_words():
            n = accept("sampling.n", settings.pop("n", 1), SETTINGS["n"])
            several = isinstance(text, Iterable) and not isinstance(text, bytes)
            require(several, f"text must be a text or a list of texts, got {text!r:.60}")
            texts = [text] if isinstance(text, str) else text
            for name in {"banned", "required", "choices"} & settings.keys():  # read once for each text
                if settings[name] is not None:
                    settings[name] = listed(f"sampling.{name}", settings[name])
            requests = [self.checked_request(one, **settings) for one in texts]
            asked = (replace(request, seed=request.seed + i) for request in requests for i in range(n))
            if not requests:
                return []
            results = self.engine(requests[0].settings.batch_size).run(asked)
            # In the order of the requests: the engine numbers them as it takes them.
            return [self.finish(result) for result in sorted(results, key=lambda result: result.id)]

    def stream(self, text: str = "", **settings: Unpack[StreamSettings]) -> Iterator[Partial | Generation]:
        """Draw one text with the arguments of `generate`: a Partial after each evaluation, then the Generation."""
        require("n" not in settings, "stream yields one text; draw several with generate(n=...)")
        with python_words():
            request = self.checked_request(text, **settings)
        return self.updates(replace(request, watch=True))

    def updates(self, request: Request) -> Iterator[Partial | Generation]:
        for update in self.engine(request.settings.batch_size).stream(request):
            if isinstance(update, Result):
                yield self.finish(update)
            else:
                yield Partial(self.text(update.tokens), update.tokens, update.step, update.nfe, update.drawn)

    def checked_request(self, text: str, **settings: Any) -> Request:
        """A request that its engine has accepted."""
        request = self.request(text, **settings)
        self.engine(request.settings.batch_size).check(request)
        return request

    def request(self, text: str = "", **settings: Any) -> Request:
        """A request for the engine from the arguments of `generate`, checked by the rules of the schema."""
        banned, required, choices = (settings.pop(name, ()) for name in ("banned", "required", "choices"))
        form = settings.pop("response_format", "")
        new = accept("max_new_tokens", settings.pop("max_new_tokens"), Count) if "max_new_tokens" in settings else 0
        if text := accept("text", text, str):
            kind = "template" if LIKE_A_HOLE.search(text) else "prompt"
            named = [name for name in ("prompt", "template") if settings.get(name)]
            require(not named, f"give only one of the first argument and {''.join(named[:1])}")
            settings[kind] = text
        for name in settings:
            choose("setting", name, [*SETTINGS, "max_new_tokens"])
        given = {name: accept(f"sampling.{name}", value, SETTINGS[name]) for name, value in settings.items()}
        c = with_sampler(SamplingConfig(**given), self.loaded.objective, self.model.config)
        constraint = make_constraint(self.tokenizer, self.model.vocab_size, c.regex, choices, form)
        c = c if constraint is None else replace(c, stop=True)
        misfit = self.misfit(c.sampler)
        require(not misfit, f"sampling.sampler={c.sampler!r} {misfit}")
        tokens = self.canvas(c, new)
        avoided, placed = banned_and_required(self.tokenizer, banned, required)
        stop_id = self.tokenizer.eos_id if c.stop else None
        return Request(tokens, c, c.seed, avoided, placed, stop_id, constraint)

    def canvas(self, c: SamplingConfig, new: int = 0) -> list[int]:
        """The sequence to fill: the tokens of the template or prompt, and masks where tokens are to be drawn. `new`:
        the number of masks, when c.length does not give the number of positions."""
        tok = self.tokenizer
        check_canvas(c.length, prompt=c.prompt, template=c.template)
        require(not (new and c.length), f"give only one of max_new_tokens={new} and sampling.length={c.length}")
        require(not (new and c.template), "max_new_tokens has no meaning beside template: its holes say how many")
        if c.template:
            limit = None if c.stride > 0 else Limit(self.length)
            return parse_template(c.template, tok.encode, tok.mask_id, [tok.bos_id], limit)
        # Training sequences begin with this token; without a prompt a diffusion model draws it itself.
        given = c.prompt or c.stop or self.model.config.causal or self.model.config.shift
        start = [tok.bos_id, *tok.encode(c.prompt)] if given else []
        total = len(start) + new if new else c.length or min(self.length, len(start) + self.new_tokens)
        check_length(total, self.length, c.stride)
        require(
            len(start) < total,
            f"the prompt has {len(start)} tokens, which leaves nothing to draw in sampling.length={total}",
        )
        return start + [tok.mask_id] * (total - len(start))

    def sampler_of(self, configured: str) -> str:
        """The sampler of that name; for an empty name, the model's default."""
        return with_sampler(SamplingConfig(sampler=configured), self.loaded.objective, self.model.config).sampler

    def misfit(self, sampler: str) -> str:
        """Why a sampler cannot draw from this model; empty if it can."""
        return tables.SAMPLERS.load(sampler).misfit(self.model.config, self.objective.learns_score)

    def engine(self, slots: int) -> Engine:
        """The engine with that many slots. It is kept for its compiled graphs (on a GPU) until another number of slots
        is requested, since each engine has its own copy of the blocks. A stream from a replaced engine still works."""
        with self.lock:
            if self.kept_engine is not None and len(self.kept_engine.slots) != slots:
                self.drop_engine()
            if self.kept_engine is None:
                tau = self.loaded.objective.tau
                self.kept_engine = Engine(self.model, self.schedule, slots, self.device, self.precision, tau=tau)
                self.kept_engine.lock = self.lock
            return self.kept_engine

    def drop_engine(self) -> None:
        """Free the memory of the kept engine. It refers to itself, so only the garbage collector can free it."""
        self.kept_engine = None
        gc.collect()

    def finish(self, result: Result) -> Generation:
        """A finished sequence of the engine as text; an abandoned one raises its problem."""
        if result.problem:
            raise ValueError(result.problem)
        return Generation(self.text(result.tokens), result.tokens, result.nfe, result.seconds, result.seed)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a sequence without begin, end and padding tokens; masks show by name."""
        return self.tokenizer.decode([t for t in tokens if t not in self.tokenizer.silent_ids])

    # Reading predictions

    def score(self, text: str | Sequence[int], draws: int = 64, context: str | Sequence[int] = ()) -> Score:
        """The bound on -log p(text | context) from `draws` draws of noise; the exact value where `Score.exact`."""
        return whole(self.score_in_parts(text, draws, context))

    def score_in_parts(
        self, text: str | Sequence[int], draws: int = 64, context: str | Sequence[int] = ()
    ) -> Parts[Score]:
        """As `score`, as a generator that yields after every pass of the network: callers can do other work there."""
        draws = accept("draws", draws, Count)
        tokens, given = self.encode("text", text), self.encode("context", context)
        noise, objective = self.loaded.noise, self.loaded.objective
        return self.in_turns(score_tokens(self.model, tokens, self.tokenizer.bos_id, noise, objective, draws, given))

    def in_turns(self, parts: Parts[T]) -> Parts[T]:
        """Run each part of a computation with the network's lock held."""
        while True:
            try:
                with self.using_network():
                    next(parts)
            except StopIteration as end:
                return end.value
            yield

    def encode(self, what: str, value: str | Sequence[int]) -> list[int]:
        """Token ids of a text; given ids are returned as a list."""
        if isinstance(value, str):
            return self.tokenizer.encode(accept(what, value, str))
        wrong = f"{what} must be one text or a list of token ids, got {value!r:.60}"
        require(not isinstance(value, bytes), wrong)  # its elements are integers, too
        try:
            return [operator.index(token) for token in value]
        except TypeError:
            raise ValueError(wrong) from None

    def log_probs(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Log-probabilities log p(x0 | canvas) at every position, or of the next token if causal: float32 [B, L, V]."""
        tokens_BL = self.tokens(text)
        with self.using_network():
            return self.model.log_probs(tokens_BL, self.noise_level(tokens_BL))

    def fill_distribution(self, template: str | Sequence[int], top: int = 5, draws: int = 0) -> SlotReads:
        """The model's prediction for every hole of a template: the likeliest tokens, the entropy and, with `draws`
        draws of the other holes, the standard error of each probability."""
        return whole(self.slots_in_parts(template, top, draws))

    def slots_in_parts(self, template: str | Sequence[int], top: int = 5, draws: int = 0) -> Parts[SlotReads]:
        """As `fill_distribution`, as a generator that yields after every pass of the network."""
        top, draws = accept("top", top, Count), accept("draws", draws, WholeNumber)
        tokens_L = self.tokens(template)[0]
        return self.in_turns(read_slots(self.model, tokens_L, self.noise_level, top, draws))

    def anchor_logits(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Raw logits of the anchor network at every position: float32 [B, L, V]."""
        tokens_BL = self.tokens(text)
        with self.using_network():
            return self.model.anchor_logits(tokens_BL, self.noise_level(tokens_BL))

    def hidden(self, text: str | Sequence[int] | Tensor) -> Hidden:
        """Final hidden states of both networks, as their heads read them: `denoiser_BLD` and `anchor_BLD` (None if the
        model has no anchor network), [B, L, D]."""
        tokens_BL = self.tokens(text)
        with self.using_network():
            return self.model(tokens_BL, self.noise_level(tokens_BL))

    @contextlib.contextmanager
    def using_network(self) -> Iterator[None]:
        """Hold the network's lock; compute in the requested precision, without gradients."""
        with self.lock, torch.no_grad(), autocast(self.device, self.precision == "bf16"):
            yield

    def tokens(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """Token ids [B, L], int64, on the model's device: of a text (which may have holes) after a begin-of-text token,
        or as given: one sequence, or several of one length."""
        if isinstance(text, str):
            tok, start = self.tokenizer, [self.tokenizer.bos_id]
            holes = LIKE_A_HOLE.search(accept("text", text, str))
            found = parse_template(text, tok.encode, tok.mask_id, start) if holes else start + tok.encode(text)
            tokens = torch.tensor(found)
        else:
            tokens = text if isinstance(text, Tensor) else torch.tensor(self.encode("text", text))
        tokens_BL = tokens[None] if tokens.ndim == 1 else tokens
        whole = tokens_BL.ndim == 2 and tokens_BL.numel() > 0 and not tokens_BL.is_floating_point()
        require(whole, f"text must be one text or token ids [batch, length], got {text!r:.60}")
        Limit(self.length).check(tokens_BL.shape[1], "the text")
        return tokens_BL.to(self.device)

    def noise_level(self, tokens_BL: Tensor) -> Tensor:
        """The sigma_B at which each sequence's number of masks is the expected one, for time-conditioned models."""
        masked_B = (tokens_BL == self.model.mask_id).float().mean(-1).to(float64_device(self.device))
        return noise_level(masked_B, self.schedule).to(self.device)

    # Keeping

    def save(
        self, folder: str | Path, precision: str = "fp32", rounded: Mapping[str, Tensor] | None = None, **facts: Any
    ) -> None:
        """Write an exported folder: weights (fp32; bf16: half the size; 4bit: a seventh), config.json, tokenizer.json
        and a model card. `rounded`: weights in the form of the file, in place of the model's (io/quantised.py). `facts`
        are added to the card, such as licence="cc-by-sa-4.0"."""
        weights = in_precision(self.model.state_dict(), precision) if rounded is None else dict(rounded)
        try:
            place = place_for_export(path_given("folder", folder))
            save_folder(place, weights, self.tokenizer, self.info | facts)
        except OSError as error:
            raise ValueError(f"folder={str(folder)!r} cannot be written: {error.strerror or error}") from None

    def push_to_hub(self, name: str, private: bool = False) -> None:
        """Upload an exported folder as `owner/model`, for `adlm.load` (needs a login of huggingface_hub)."""
        require(name.count("/") == 1 and all(name.split("/")), f"a hub name is owner/model, got {name!r}")
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            card = Path(folder) / CARD
            card.write_text(card.read_text(encoding="utf-8").replace(PLACEHOLDER, name), encoding="utf-8")
            remote.upload(Path(folder), name, private, f"model {name!r}", "lm.save(FOLDER) keeps it on this machine")

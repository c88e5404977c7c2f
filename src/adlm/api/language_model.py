"""A trained model with its tokenizer: generate, stream, score, read predictions, save.

    lm = adlm.load("runs/demo")
    lm.generate(n=4, sampler="remdm-loop", steps=256, top_p=0.9, seed=0)
    lm.generate("The capital of [MASK:2] is [MASK:3].")
    lm.generate(prompt="Once upon a time", length=128)

Everything random follows from `seed`: sample i uses seed + i, whatever the batch size.
"""

import functools
import gc
import hashlib
import operator
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from adlm import tables
from adlm.api.scoring import Parts, Score, score_tokens, whole
from adlm.data import hub
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule, noise_level
from adlm.engine import CausalEngine, Engine, Request, Result, make_engine
from adlm.engine.request import Limit, check_canvas, check_length, parse_template
from adlm.errors import choose, require
from adlm.io.export import CARD, CONFIG, PLACEHOLDER, TOKENIZER, WEIGHTS, Loaded, save_folder
from adlm.io.load import BOX, load_checkpoint
from adlm.io.paths import path_of, pick_device
from adlm.rules import Count, accept
from adlm.schema import SamplingConfig

Words = Sequence[str]
SETTINGS = get_type_hints(SamplingConfig, include_extras=True)
"""Fields of SamplingConfig, with the rules their values obey."""


@dataclass(frozen=True)
class Generation:
    """One finished text."""

    text: str
    tokens: list[int]
    nfe: int
    """Network evaluations (a diffusion model needs far fewer than steps x tokens; guidance counts two each)."""
    seconds: float
    """From its first evaluation to its end; texts of one batch share that time."""
    seed: int


@dataclass(frozen=True)
class Partial:
    """A text on its way: holes still show as the mask token."""

    text: str
    tokens: list[int]
    step: int
    nfe: int
    drawn: list[int]
    """Positions drawn in the last evaluation."""


def load(
    source: str | Path = BOX, device: str = "auto", ema: bool = True, tokenizer: str = "", root: str = ""
) -> "LanguageModel":
    """Load a run folder, exported folder, release .ckpt or hub name "owner/model"; by default the model in the box."""
    path = path_given("source", source)
    place = pick_device(str(device))
    if not path.exists() and str(source).count("/") == 1 and not str(source).startswith((".", "/", "~")):
        advice = "give a run folder, an exported folder or a .ckpt file"
        path = hub.fetch(str(source), (CONFIG, WEIGHTS, TOKENIZER), f"model {str(source)!r}", advice)
    return LanguageModel(load_checkpoint(path, ema, place, tokenizer, root))


def path_given(what: str, value: Any) -> Path:
    """A path from Python; anything but a text or a path is refused."""
    require(isinstance(value, (str, os.PathLike)), f"{what} must be a path, got {value!r:.60}")
    return path_of(value)


class LanguageModel:
    """A trained model with its tokenizer; `adlm.load` makes one."""

    def __init__(self, loaded: Loaded):
        self.loaded = loaded
        self.model, self.info = loaded.model, loaded.info
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.schedule = make_schedule(loaded.noise)
        self.length: int = loaded.model.config.length
        """Longest sequence in tokens."""
        self.kept_engine: Engine | CausalEngine | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def weights_digest(self) -> str:
        """The sha256 of all weights: two runs with the same settings are still two models."""
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

    def generate(
        self, template: str = "", *, banned: Words = (), required: Words = (), **settings: Any
    ) -> list[Generation]:
        """Draw n texts: free, continuing `prompt`, or filling the holes of `template`; sorted by their seeds.

        `settings` are the fields of SamplingConfig: n, prompt, seed, sampler, steps, temperature, top_p, top_k, min_p,
        guidance, batch_size, ...; `length` counts tokens, prompt included (0: the model's); `stop` ends a text at its
        first end-of-text token. `banned` and `required` are lists of words.
        """
        request = self.request(template, banned=banned, required=required, **settings)
        requests = (replace(request, seed=request.seed + i) for i in range(request.settings.n))
        texts = [self.finish(r) for r in self.engine(request.settings.batch_size).run(requests)]
        return sorted(texts, key=lambda g: g.seed)

    def stream(self, template: str = "", **arguments: Any) -> Iterator[Partial | Generation]:
        """Draw one text, with the arguments of `generate`: partial texts after each evaluation, then the Generation."""
        require("n" not in arguments, "stream yields one text; draw several with generate(n=...)")
        request = replace(self.request(template, **arguments), watch=True)
        for update in self.engine(request.settings.batch_size).stream(request):
            if isinstance(update, Result):
                yield self.finish(update)
            else:
                yield Partial(self.text(update.tokens), update.tokens, update.step, update.nfe, update.drawn)

    def request(self, template: str = "", *, banned: Words = (), required: Words = (), **settings: Any) -> Request:
        """What the engine is asked for; the arguments are those of `generate`, checked by the rules of the schema."""
        tok, causal = self.tokenizer, self.model.config.causal
        given = {"sampler": self.sampler_of(SamplingConfig.sampler), **settings, "template": template}
        for name in given:
            choose("setting", name, SETTINGS)
        c = SamplingConfig(**{name: accept(f"sampling.{name}", value, SETTINGS[name]) for name, value in given.items()})
        check_canvas(c.length, prompt=c.prompt, template=c.template)
        learns_score = tables.OBJECTIVES.load(self.loaded.objective.name).learns_score
        misfit = tables.SAMPLERS.load(c.sampler).misfit(self.model.config, learns_score)
        require(not misfit, f"sampling.sampler={c.sampler!r} {misfit}")
        if c.template:
            limit = None if c.stride > 0 else Limit(self.length)
            tokens = parse_template(c.template, tok.encode, tok.mask_id, [tok.bos_id], limit)
        else:
            total = c.length or self.length
            check_length(total, self.length, c.stride)
            # Training sequences begin so; without a prompt a diffusion model finds that out by itself.
            start = [tok.bos_id, *tok.encode(c.prompt)] if c.prompt or c.stop or causal else []
            require(
                len(start) < total,
                f"the prompt has {len(start)} tokens, which leaves nothing to draw in sampling.length={total}",
            )
            tokens = start + [tok.mask_id] * (total - len(start))
        avoided, placed = self.words(banned, required)
        return Request(tokens, c, c.seed, avoided, placed, stop_id=tok.eos_id if c.stop else None)

    def sampler_of(self, configured: str) -> str:
        """The sampler for this model: the schema's default is for diffusion models; a causal one has a single other."""
        default = configured == SamplingConfig.sampler
        return "autoregressive" if default and self.model.config.causal else configured

    def words(self, banned: Words, required: Words) -> tuple[list[list[int]], list[list[int]]]:
        """Banned and required words as token sequences; a required one must not hold a banned one."""
        for key, words in (("sampling.banned", banned), ("sampling.required", required)):
            listed = isinstance(words, Iterable) and not isinstance(words, (str, bytes))
            require(listed, f"{key} must be a list of texts, got {words!r:.60}")
        avoided = [(word, v) for word in banned for v in self.variants(accept("a word of sampling.banned", word, str))]
        placed = [(word, self.variants(accept("a word of sampling.required", word, str))[-1]) for word in required]
        for word, tokens in placed:
            for bad, part in avoided:
                held = any(tokens[at : at + len(part)] == part for at in range(len(tokens)))
                inside = "" if bad == word else f" ({word!r} holds it)"
                require(not held, f"sampling.required and sampling.banned both name {bad!r}{inside}")
        return [v for _, v in avoided], [v for _, v in placed]

    def variants(self, word: str) -> list[list[int]]:
        """A word as tokens, at the start of a text and after a space (the same in some vocabularies)."""
        require(bool(word.strip()), "a banned or required word is empty")
        found = []
        for text in (word, " " + word):
            tokens = self.tokenizer.encode(text)
            require(bool(tokens), f"the word {word!r} has no tokens in this vocabulary")
            unknown = self.tokenizer.decode(tokens).strip().lower() != word.strip().lower()
            require(
                not unknown,
                f"the word {word!r} is unknown to this vocabulary: it reads {self.tokenizer.decode(tokens)!r}",
            )
            if tokens not in found:
                found.append(tokens)
        return found

    def engine(self, slots: int) -> Engine | CausalEngine:
        """The engine with that many slots; kept, since on a GPU its compiled graphs are worth keeping, until another
        number is asked for: each engine has its own copy of the blocks."""
        if self.kept_engine is not None and len(self.kept_engine.slots) != slots:
            self.drop_engine()
        if self.kept_engine is None:
            tau = self.loaded.objective.tau
            self.kept_engine = make_engine(self.model, self.schedule, slots, self.device, tau=tau)
        return self.kept_engine

    def drop_engine(self) -> None:
        """Free the memory of the kept engine. It refers to itself: only the collector finds it."""
        self.kept_engine = None
        gc.collect()

    def finish(self, result: Result) -> Generation:
        """A sequence of the engine as text; one that was given up is raised as the problem it met."""
        if result.problem:
            raise ValueError(result.problem)
        return Generation(self.text(result.tokens), result.tokens, result.nfe, result.seconds, result.seed)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a sequence without its begin and end tokens; masks show by name."""
        ends = {self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id}
        return self.tokenizer.decode([t for t in tokens if t not in ends])

    # Reading predictions

    def score(self, text: str | Sequence[int], draws: int = 64, context: str | Sequence[int] = ()) -> Score:
        """The bound on -log p(text | context) (exact for causal models), with `draws` draws of noise."""
        return whole(self.score_in_parts(text, draws, context))

    def score_in_parts(
        self, text: str | Sequence[int], draws: int = 64, context: str | Sequence[int] = ()
    ) -> Parts[Score]:
        """As `score`; a generator that yields after every pass of the network, for who has other things to do."""
        draws = accept("draws", draws, Count)
        tokens, given = self.encode("text", text), self.encode("context", context)
        noise, objective = self.loaded.noise, self.loaded.objective
        return score_tokens(self.model, tokens, self.tokenizer.bos_id, noise, objective, draws, given)

    def encode(self, what: str, value: str | Sequence[int]) -> list[int]:
        """Token ids of a text, or those given."""
        if isinstance(value, str):
            return self.tokenizer.encode(accept(what, value, str))
        wrong = f"{what} must be one text or a list of token ids, got {value!r:.60}"
        require(not isinstance(value, bytes), wrong)  # whose elements are integers, too
        try:
            return [operator.index(token) for token in value]
        except TypeError:
            raise ValueError(wrong) from None

    @torch.no_grad()
    def log_probs(self, tokens_BL: Tensor) -> Tensor:
        """Log-probabilities log p(x0 | canvas) at every position, or of the next token if causal: float32 [B, L, V]."""
        return self.model.log_probs(tokens_BL.to(self.device), self.noise_level(tokens_BL))

    @torch.no_grad()
    def anchor_logits(self, tokens_BL: Tensor) -> Tensor:
        """Raw logits of the anchor network at every position: float32 [B, L, V]."""
        return self.model.anchor_logits(tokens_BL.to(self.device), self.noise_level(tokens_BL))

    def noise_level(self, tokens_BL: Tensor) -> Tensor:
        """The sigma_B at which as many masks are expected as each sequence has: what time-conditioned models read."""
        masked_B = (tokens_BL == self.model.mask_id).float().mean(-1).to(self.device)
        return noise_level(masked_B, self.schedule)

    # Keeping

    def save(self, folder: str | Path, precision: str = "fp32", **facts: Any) -> None:
        """Write an exported folder: weights (fp32, or bf16 for half the size), config.json, tokenizer.json, model card;
        `facts` are added to what the card knows, such as licence="cc-by-sa-4.0"."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[choose("precision", precision, ("fp32", "bf16"))]
        weights = {name: weight.to(dtype) for name, weight in self.model.state_dict().items()}
        try:
            save_folder(path_given("folder", folder), weights, self.tokenizer, self.info | facts)
        except OSError as error:
            raise ValueError(f"folder={str(folder)!r} cannot be written: {error.strerror or error}") from None

    def push_to_hub(self, name: str, private: bool = False) -> None:
        """Upload an exported folder as `owner/model`, for `adlm.load` (needs a login of huggingface_hub)."""
        require(name.count("/") == 1 and all(name.split("/")), f"a hub name is owner/model, got {name!r}")
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            card = Path(folder) / CARD
            card.write_text(card.read_text().replace(PLACEHOLDER, name))
            hub.upload(Path(folder), name, private, f"model {name!r}", "lm.save(FOLDER) keeps it on this machine")

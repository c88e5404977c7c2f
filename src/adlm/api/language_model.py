"""A trained model with its tokenizer: generate, stream, score, look inside, save.

    lm = adlm.load("runs/demo")
    lm.generate(n=4, sampler="remdm-loop", steps=256, top_p=0.9, seed=0)
    lm.generate("The capital of [MASK:2] is [MASK:3].")
    lm.generate(prompt="Once upon a time", length=128)

Everything random follows from `seed`: sample i uses seed + i, whatever the batch size.
"""

import functools
import gc
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm import tables
from adlm.api.arguments import TYPES, as_path, as_settings, as_tokens, as_words, typed
from adlm.api.results import Generation, Partial, Score
from adlm.api.scoring import score_tokens
from adlm.data import hub
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule, noise_level
from adlm.engine import CausalEngine, Engine, Request, Result, make_engine
from adlm.engine.request import check_length
from adlm.engine.template import Limit, check_canvas, parse_template
from adlm.errors import choose, require
from adlm.io.export import CARD, CONFIG, PLACEHOLDER, TOKENIZER, WEIGHTS, Loaded, save_folder
from adlm.io.load import BOX, load_checkpoint
from adlm.io.paths import pick_device
from adlm.schema import SamplingConfig

Words = Sequence[str]


def load(
    source: str | Path = BOX, device: str = "auto", ema: bool = True, tokenizer: str = "", root: str = ""
) -> "LanguageModel":
    """A run folder, exported folder, release .ckpt or hub name "owner/model"; by default the model in the box."""
    path = as_path("source", source)
    place = pick_device(str(device))
    if not path.exists() and str(source).count("/") == 1 and not str(source).startswith((".", "/", "~")):
        advice = "give a run folder, an exported folder or a .ckpt file"
        path = hub.fetch(str(source), (CONFIG, WEIGHTS, TOKENIZER), f"model {str(source)!r}", advice)
    return LanguageModel(load_checkpoint(path, ema, place, tokenizer, root))


class LanguageModel:
    def __init__(self, loaded: Loaded):
        self.loaded = loaded
        self.model, self.info = loaded.model, loaded.info
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.kept_engine: Engine | CausalEngine | None = None

    @property
    def length(self) -> int:
        """Longest row in tokens."""
        return self.model.config.length

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def weights_digest(self) -> str:
        """sha256 over all weights: two runs with the same settings are still two models."""
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
        self,
        template: str = "",
        *,
        prompt: str = "",
        n: int = 1,
        length: int = 0,
        seed: int = 0,
        banned: Words = (),
        required: Words = (),
        stop: bool = False,
        **settings: Any,
    ) -> list[Generation]:
        """n texts: free, continuing `prompt`, or filling the holes of `template`, in the order of their seeds.

        `length` counts tokens, prompt included (0: the model's). `stop` ends a text at its first end-of-text token.
        `settings` are the fields of SamplingConfig: sampler, steps, temperature, top_p, top_k, min_p, eta, guidance,
        stride, batch_size, parity, ...
        """
        request = self.request(template, prompt, length, seed, banned, required, stop, n=n, **settings)
        n = request.settings.n
        require(n >= 1, f"n must be at least 1, got {n}")
        requests = (replace(request, seed=request.seed + i) for i in range(n))
        texts = [self.finish(r) for r in self.engine(request.settings.batch_size).run(requests)]
        return sorted(texts, key=lambda g: g.seed)

    def stream(self, template: str = "", **arguments: Any) -> Iterator[Partial | Generation]:
        """The arguments of `generate` (n = 1): partial texts after each evaluation, then the Generation."""
        require("n" not in arguments, "stream yields one text; draw several with generate(n=...)")
        request = replace(self.request(template, **arguments), watch=True)
        for update in self.engine(request.settings.batch_size).stream(request):
            if isinstance(update, Result):
                yield self.finish(update)
            else:
                yield Partial(self.text(update.tokens), update.tokens, update.step, update.nfe, update.drawn)

    def request(
        self,
        template: str = "",
        prompt: str = "",
        length: int = 0,
        seed: int = 0,
        banned: Words = (),
        required: Words = (),
        stop: bool = False,
        **settings: Any,
    ) -> Request:
        """What the engine is asked for; `generate` and `stream` are this and an engine."""
        tok, causal = self.tokenizer, self.model.config.causal
        for name in settings:
            choose("setting", name, TYPES)
        own = as_settings(template=template, prompt=prompt, length=length, seed=seed, stop=stop)
        template, prompt, length, seed, stop = own.values()
        settings = as_settings(**settings)
        check_canvas(length, prompt=prompt, template=template)
        sampler = settings.setdefault("sampler", self.sampler_of(SamplingConfig.sampler))
        learns_score = tables.OBJECTIVES.load(self.loaded.objective.name).learns_score
        misfit = tables.SAMPLERS.load(sampler, "sampling.sampler").misfit(self.model.config, learns_score)
        require(not misfit, f"sampling.sampler={sampler!r} {misfit}")
        config = SamplingConfig(**settings)
        if template:
            limit = None if config.stride > 0 else Limit(self.length)
            tokens = parse_template(template, tok.encode, tok.mask_id, [tok.bos_id], limit)
        else:
            total = length or self.length
            require(total >= 1, f"sampling.length must be positive, or 0 for the model's, got {length}")
            check_length(total, self.length, config.stride)
            # Rows of the training data begin so; without a prompt a diffusion model finds that out by itself.
            start = [tok.bos_id, *tok.encode(prompt)] if prompt or stop or causal else []
            require(
                len(start) < total,
                f"the prompt has {len(start)} tokens, which leaves nothing to draw in sampling.length={total}",
            )
            tokens = start + [tok.mask_id] * (total - len(start))
        avoided, placed = self.words(banned, required)
        return Request(tokens, config, seed, avoided, placed, stop_id=tok.eos_id if stop else None)

    def sampler_of(self, configured: str) -> str:
        """sampling.sampler for this model: its default is for diffusion models, and a causal one has a single other."""
        default = configured == SamplingConfig.sampler
        return "autoregressive" if default and self.model.config.causal else configured

    def words(self, banned: Words, required: Words) -> tuple[list[list[int]], list[list[int]]]:
        """Banned and required words as token sequences; a required one must not hold a banned one."""
        avoided = [(word, v) for word in as_words("sampling.banned", banned) for v in self.variants(word)]
        placed = [(word, self.variants(word)[-1]) for word in as_words("sampling.required", required)]
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
        if self.kept_engine is None or len(self.kept_engine.slots) != slots:
            self.drop_engine()
            schedule, tau = make_schedule(self.loaded.noise), self.loaded.objective.tau
            self.kept_engine = make_engine(self.model, schedule, slots, self.device, tau=tau)
        return self.kept_engine

    def drop_engine(self) -> None:
        """Free the memory of the kept engine. It refers to itself: only the collector finds it."""
        self.kept_engine = None
        gc.collect()

    def finish(self, result: Result) -> Generation:
        if result.problem:
            raise ValueError(result.problem)
        return Generation(self.text(result.tokens), result.tokens, result.nfe, result.seconds, result.seed)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a row without its begin and end tokens; masks show by name."""
        ends = {self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id}
        return self.tokenizer.decode([t for t in tokens if t not in ends])

    # Looking

    def score(self, text: str | Sequence[int], draws: int = 64, context: str | Sequence[int] = ()) -> Score:
        """The bound on -log p(text | context) (exact for causal models), with `draws` draws of noise."""
        encode, draws = self.tokenizer.encode, typed("draws", draws, int)
        tokens, given = as_tokens("text", text, encode), as_tokens("context", context, encode)
        noise, objective = self.loaded.noise, self.loaded.objective
        return score_tokens(self.model, tokens, self.tokenizer.bos_id, noise, objective, draws, given)

    @torch.no_grad()
    def log_probs(self, tokens_BL: Tensor) -> Tensor:
        """log p(x0 | canvas) at every position after SUBS, or of the next token if causal: float32 [B, L, V]."""
        return self.model.log_probs(tokens_BL.to(self.device), self.noise_level(tokens_BL))

    @torch.no_grad()
    def anchor_logits(self, tokens_BL: Tensor) -> Tensor:
        """Raw logits of the anchor network at every position: float32 [B, L, V]."""
        return self.model.anchor_logits(tokens_BL.to(self.device), self.noise_level(tokens_BL))

    def noise_level(self, tokens_BL: Tensor) -> Tensor:
        """sigma_B at which as many masks are expected as each row has; time-conditioned models want to know it."""
        share_B = (tokens_BL == self.model.mask_id).float().mean(-1).to(self.device)
        return noise_level(share_B, make_schedule(self.loaded.noise))

    # Keeping

    def save(self, folder: str | Path, precision: str = "fp32", **facts: Any) -> None:
        """Write an exported folder: weights (fp32, or bf16 for half the size), config.json, tokenizer.json, model card;
        `facts` are added to what the card knows, such as licence="cc-by-sa-4.0"."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[choose("precision", precision, ("fp32", "bf16"))]
        weights = {name: weight.to(dtype) for name, weight in self.model.state_dict().items()}
        try:
            save_folder(as_path("folder", folder), weights, self.tokenizer, self.info | facts)
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

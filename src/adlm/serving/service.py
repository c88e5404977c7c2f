"""The served models, each with its worker and defaults. Bodies of requests become requests of the engine here.

The same settings and seed give the same text as `adlm sample` and `lm.generate`, since `LanguageModel.request` builds
the requests. A request that would need excessive memory or time is refused before it is built.
"""

import asyncio
import functools
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from starlette.types import Scope
from tokenizers import decoders

from adlm.api import LanguageModel
from adlm.api.scoring import Parts
from adlm.config.keys import PER_REQUEST
from adlm.constrain.automaton import token_bytes
from adlm.engine import Request, block_of, most_evaluations
from adlm.engine.request import HOLES, LIKE_A_HOLE, Limit, check_canvas, parse_template
from adlm.errors import require
from adlm.samplers.base import make_sampler
from adlm.schema import SamplingConfig, ServeConfig
from adlm.serving.answers import Defaults, ModelCard, Pieces, characters
from adlm.serving.bodies import SETTINGS, AnchorsBody, CanvasBody, CompletionBody, Problem, SlotsBody
from adlm.serving.jobs import Job, ServerMetrics, within
from adlm.serving.worker import MATCHED, Worker, matching_work
from adlm.tables import SAMPLERS

log = logging.getLogger("adlm.serving")
T = TypeVar("T")
SUFFIX_TOKENS = 16
"""Tokens drawn before a suffix, unless max_tokens says otherwise."""
SOON = {"Retry-After": "1"}
CONSTRAINTS = ("regex", "choices", "response_format")
"""Fields of a request that constrain the text."""
MOST_TURNS = 10
"""Most work in a step of one constrained sequence, in units of the work that others may wait for."""
LONGEST_HOLE = len("[MASK:]") + 18
SHORT_TEXT = 4096
"""Texts up to this many characters are tokenised without estimating how many tokens they could be."""
WATCHED = {"steps": 64, "top_p": 0.9}
"""Initial settings of the page, unless the server was given others: a text within seconds on a CPU."""
UNTOLD = vars(SamplingConfig())
SERVER_DEFAULTS = [name for name in SETTINGS if name not in PER_REQUEST]
"""The sampling settings whose server-side values are defaults of requests."""


class Prompt(NamedTuple):
    """The tokens before a completion."""

    tokens: list[int]
    """Includes a begin token."""
    own: int
    """Where the client's tokens begin: 1, or 0 if the client sent the begin token itself."""


class Served:
    """One served model, with its worker, defaults and limits."""

    def __init__(self, id: str, lm: LanguageModel, cfg: ServeConfig, sampling: SamplingConfig, metrics: ServerMetrics):
        self.id, self.lm, self.cfg = id, lm, cfg
        self.created = int(time.time())
        self.worker = Worker(id, lm, sampling.batch_size, cfg.queue, metrics)
        self.settings = {name: getattr(sampling, name) for name in SERVER_DEFAULTS}
        self.settings["sampler"] = lm.sampler_of(sampling.sampler)
        self.stop = sampling.stop
        self.limit = Limit(cfg.max_length, "serve.max_length") if cfg.max_length else Limit(lm.length)
        self.length = min(self.limit.tokens, lm.length)
        """Default length of a sequence: the model's, or the most that the server allows."""
        self.longest_token = max(len(token) for token in lm.tokenizer.backend.get_vocab(with_added_tokens=False))
        """The most characters that a token can stand for."""
        self.samplers = [name for name in sorted(SAMPLERS) if self.can_use(name)]

    def can_use(self, sampler: str) -> bool:
        """Whether a sampler can draw from this model; a sampler of another package that fails to load cannot."""
        try:
            return not self.lm.misfit(sampler)
        except ValueError as problem:
            log.warning("%s: the sampler %s is left out: %s", self.id, sampler, problem)
            return False

    def writes_once(self, settings: SamplingConfig) -> bool:
        """Whether a token that was drawn is never masked again."""
        return self.lm.model.config.causal or make_sampler(settings, self.lm.schedule).writes_once

    def card(self) -> ModelCard:
        model, s = self.lm.model, self.settings
        return ModelCard(
            id=self.id,
            created=self.created,
            length=self.length,
            vocab_size=model.vocab_size,
            mask=model.mask_id,
            anchored=model.anchor_head is not None,
            causal=model.config.causal,
            block_lengths=list(dict.fromkeys(model.config.block_lengths)),
            samplers=self.samplers,
            parameters=sum(p.numel() for p in model.parameters()),
            default=self.defaults(s),
            page=self.defaults(s | {name: value for name, value in WATCHED.items() if s[name] == UNTOLD[name]}),
        )

    def defaults(self, settings: dict[str, Any]) -> Defaults:
        return Defaults(**{name: settings[name] for name in Defaults.model_fields})

    # Tokens as text

    def piece(self, token: int) -> str:
        """The text of a single token; empty for begin, end and padding."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, perhaps only a part of a character."""
        tok = self.lm.tokenizer
        name, decoder = tok.backend.id_to_token(token) or "", tok.backend.decoder
        if token in tok.silent_ids:
            return b""
        if isinstance(decoder, decoders.WordPiece):
            return (name.removeprefix("##") if name.startswith("##") else " " + name).encode()
        if token in tok.special_ids:
            return name.encode()
        if isinstance(decoder, decoders.ByteLevel):
            return self.spelled[token]
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", name)  # a vocabulary with byte fallback
        return bytes.fromhex(byte[1]) if byte else tok.token(token).encode()

    @functools.cached_property
    def spelled(self) -> list[bytes]:
        return token_bytes(self.lm.tokenizer)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds; a character made of several tokens belongs to the last one."""
        return [text or "" for text in characters([self.bytes_of(t) for t in tokens])]

    def with_holes(self, tokens: Sequence[int]) -> tuple[list[int | None], list[str | None]]:
        """Tokens and their texts, holes as None."""
        shown = [None if t == self.lm.model.mask_id else t for t in tokens]
        return shown, characters([None if t is None else self.bytes_of(t) for t in shown])

    # From a body to requests of the engine

    def arguments(self, body: CanvasBody | CompletionBody, n: int) -> dict[str, Any]:
        """Arguments of `lm.request` from the body, the server's defaults and a seed; refuses more sequences (n) or
        steps than the server allows."""
        given = {name: value for name in SETTINGS if (value := getattr(body, name)) is not None}
        found = {**self.settings, **given, "banned": body.banned, "required": body.required, "choices": body.choices}
        found["response_format"] = "" if body.response_format is None else body.response_format.plain
        found.setdefault("seed", secrets.randbelow(2**31))
        most, steps = self.cfg.max_steps, found["steps"]
        require(n <= self.cfg.max_n, f"{n} texts are asked for, allowed are {self.cfg.max_n} (serve.max_n)")
        require(steps <= most, f"steps={steps}, allowed are {most} (serve.max_steps)")
        return found

    def check_cost(self, requests: Sequence[Request], more: int = 0) -> None:
        """Refuse requests that cost more than one client may use: tokens times evaluations, plus `more` for tokens that
        are scored, not drawn."""
        most = self.length * max(self.cfg.max_steps, self.cfg.max_n * self.settings["steps"])
        cost = more + sum(cost_of(r, self.lm) for r in requests)
        require(
            cost <= most,
            f"the cost n x length x steps is {cost}, allowed are {most} (length {self.length} times"
            f" serve.max_steps={self.cfg.max_steps}, or times serve.max_n={self.cfg.max_n} and the default steps)",
        )

    def check_text(self, text: str, what: str, longest: int = 0) -> None:
        """Refuse, before tokenising it, a text that is too long whatever its tokens are. No token stands for more
        characters than it has itself, or than `longest`."""
        longest = max(self.longest_token, longest)
        most = max(SHORT_TEXT, self.limit.tokens * longest)
        require(
            len(text) <= most,
            f"{what} has {len(text)} characters, allowed are {most}: {self.limit.tokens} tokens ({self.limit.name}) of"
            f" at most {longest}",
        )

    def encode(self, text: str, what: str) -> list[int]:
        self.check_text(text, what)
        return self.lm.tokenizer.encode(text)

    def tokens_of(self, text: str | None, tokens: Sequence[int | None] | None) -> list[int] | None:
        """A template, or tokens with null for holes, as tokens with masks; None if neither is given."""
        tok = self.lm.tokenizer
        if tokens is not None:
            self.limit.check(len(tokens), "tokens")
            return [tok.mask_id if t is None else t for t in tokens]
        if text is None:
            return None
        self.check_text(text, "the template", LONGEST_HOLE)
        return parse_template(text, tok.encode, tok.mask_id, [tok.bos_id], self.limit)

    def requests(self, body: CanvasBody, n: int = 1, watch: bool = False) -> list[Request]:
        """n checked requests to fill a canvas; request i has seed + i."""
        arguments = self.arguments(body, n)
        check_canvas(body.length, prompt=body.prompt, template=body.template, tokens=body.tokens)
        self.check_text(body.prompt or "", "the prompt")
        self.limit.check(body.length or 1, "length")
        tokens = self.tokens_of(body.template or None, body.tokens)
        stop = self.stop if body.stop is None else body.stop
        request = self.lm.request(
            prompt=body.prompt or "", length=body.length or self.length, stop=stop, **arguments
        )  # fmt: skip
        request = replace(request, watch=watch, tokens=request.tokens if tokens is None else tokens)
        found = self.seeds(request, n)
        self.check_cost(found)
        return found

    def prompt(self, given: str | list[int]) -> Prompt:
        """A prompt as tokens after a begin token; a prompt given as tokens may include it."""
        tok = self.lm.tokenizer
        if isinstance(given, str):
            tokens = self.encode(given, "the prompt")
        else:
            tokens = given
            self.limit.check(len(tokens), "the prompt")
            size = self.lm.model.vocab_size
            bad = [t for t in tokens if not 0 <= t < size or t == tok.mask_id]
            require(not bad, f"the prompt holds token {bad[0] if bad else ''}: outside 0..{size - 1}, or the mask")
        begun = not isinstance(given, str) and tokens[:1] == [tok.bos_id]
        found = Prompt(tokens if begun else [tok.bos_id, *tokens], 0 if begun else 1)
        self.limit.check(len(found.tokens), "the prompt")
        return found

    def completions(self, body: CompletionBody) -> tuple[list[Prompt], list[Request]]:
        """The prompts, and n requests for each. A sequence is begin token, prompt, holes, suffix."""
        given = body.prompt
        several: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        arguments = self.arguments(body, len(several) * body.n)
        require(body.best_of in (None, body.n), f"best_of={body.best_of} must equal n={body.n}: nothing is ranked")
        tok = self.lm.tokenizer
        after = self.encode(body.suffix, "the suffix") if body.suffix else []
        stop = body.stop is not False and not after
        found, room = [], self.limit.tokens if arguments["stride"] else self.length
        prompts = [self.prompt(one) for one in several]
        asked = self.lm.request(stop=stop, **arguments)  # checks the settings, even if nothing is drawn
        for before in prompts if body.max_tokens != 0 else ():
            size = len(before.tokens)
            holes = body.max_tokens or (SUFFIX_TOKENS if after else room - size)
            self.limit.check(size + holes + len(after), "prompt, max_tokens and suffix together")
            require(holes >= 1, f"the prompt leaves nothing to draw in {room} tokens")
            tokens = [*before.tokens, *[tok.mask_id] * holes, *after]
            found += self.seeds(replace(asked, tokens=tokens), body.n)
        scored = bool(body.echo and body.wants_logprobs) and not self.lm.model.config.causal
        self.check_cost(found, sum(len(p.tokens) ** 2 for p in prompts) if scored else 0)
        return prompts, found

    def seeds(self, request: Request, n: int) -> list[Request]:
        """The request n times, each with its own seed."""
        # A step visits every edge of the automaton at every position, and no other request has the network meanwhile.
        work, most = matching_work(request, self.lm.length), MOST_TURNS * MATCHED
        said = request.constraint.said if request.constraint else ""
        require(
            work <= most, f"{said}: edges of its automaton x length is {work}, allowed are {most}; use a simpler one"
        )
        self.worker.check(request)
        return [replace(request, seed=request.seed + i) for i in range(n)]

    def tokenize(self, text: str) -> Pieces:
        tokens = self.encode(text, "the text")
        return Pieces(tokens=tokens, texts=self.pieces(tokens))

    def text_tokens(self, text: str) -> list[int]:
        tokens = self.encode(text, "the text")
        require(bool(tokens), "the text has no tokens")
        self.limit.check(len(tokens), "the text")
        return tokens

    def anchor_tokens(self, body: AnchorsBody) -> list[int]:
        """The sequence of a request to /v1/anchors: text or template, or tokens with null for holes."""
        require((body.text is None) != (body.tokens is None), "give text or tokens")
        if body.text is not None and not LIKE_A_HOLE.search(body.text):
            return self.text_tokens(body.text)
        return self.with_known_tokens(body.text, body.tokens)

    def slot_tokens(self, body: SlotsBody) -> list[int]:
        """The sequence of a request to /v1/slots. Each hole is read separately, so the cost is checked."""
        require((body.template is None) != (body.tokens is None), "give template or tokens")
        tokens = self.with_known_tokens(body.template, body.tokens)
        require(not self.lm.model.config.causal, "a causal model predicts no hole in the middle of a text")
        holes = tokens.count(self.lm.model.mask_id)
        require(holes > 0, f"there is no hole to read: {HOLES}, null in tokens")
        require(len(tokens) <= self.lm.length, f"tokens has {len(tokens)}, allowed are {self.lm.length}")
        self.check_cost([], len(tokens) * (1 + holes * body.draws))
        return tokens

    def with_known_tokens(self, text: str | None, given: list[int | None] | None) -> list[int]:
        tokens = self.tokens_of(text, given)
        assert tokens is not None
        size = self.lm.model.vocab_size
        bad = [t for t in tokens if not 0 <= t < size]
        require(not bad, f"tokens holds {bad[0] if bad else ''}, outside the vocabulary 0..{size - 1}")
        return tokens


def cost_of(request: Request, lm: LanguageModel) -> int:
    """The most tokens times evaluations that a sequence can take; a prompt before blocks is read once."""
    block, tokens = block_of(request, lm.model), min(len(request.tokens), lm.length)
    evaluations = most_evaluations(request, lm.model, lm.schedule)
    return tokens + block * evaluations if block else tokens * evaluations


def check_defaults(c: SamplingConfig, max_steps: int) -> None:
    """Refuse defaults with which every request would fail."""
    require(
        c.steps <= max_steps,
        f"sampling.steps={c.steps} is more than serve.max_steps={max_steps}:"
        " every request without steps would be refused",
    )


def check_sampler(sampler: str, models: Mapping[str, LanguageModel]) -> None:
    """Refuse a default sampler that cannot draw from any of the models."""
    if not sampler:
        return
    reasons = [lm.misfit(sampler) for lm in models.values()]
    wrong = f"sampling.sampler={sampler!r} {reasons[0]}: every request that names no sampler would be refused"
    require("" in reasons, wrong)


class Reader:
    """A thread that builds requests, and the number of requests that wait for it."""

    def __init__(self, name: str):
        self.thread, self.waiting = ThreadPoolExecutor(1, name), 0


class Service:
    """The state that the routes use: models, metrics and running requests."""

    def __init__(self, models: dict[str, LanguageModel], cfg: ServeConfig, sampling: SamplingConfig):
        self.cfg, self.metrics = cfg, ServerMetrics()
        self.models = {id: Served(id, lm, cfg, sampling, self.metrics) for id, lm in models.items()}
        self.draining = False
        """Whether new work is refused while running requests finish."""
        self.active: set[Any] = set()
        """Tasks of running requests."""
        self.jobs: set[Job] = set()
        self.reader, self.matcher = Reader("adlm-reader"), Reader("adlm-matcher")
        """Threads that keep slow work off the event loop: one tokenises, the other builds automata of constraints,
        which takes seconds."""
        workers = [m.worker for m in self.models.values()]
        gauges = {
            "adlm_slots": ("Sequences that share a network call.", lambda w: w.slots),
            "adlm_slots_in_use": ("Sequences being worked on.", lambda w: w.in_use),
            "adlm_queue_depth": ("Sequences accepted that wait for a slot.", lambda w: max(0, w.taken - w.in_use)),
        }
        for name, (help, read) in gauges.items():
            self.metrics.gauge(name, help, ("model",), lambda read=read: [((w.name,), read(w)) for w in workers])

    def model(self, id: str | None) -> Served:
        """The model with that id; without an id, the first."""
        found = self.models.get(id) if id is not None else next(iter(self.models.values()))
        if found is None:
            names = ", ".join(self.models)
            message = (
                f"model {str(id)[:80]!r} is not served; there is {names}. Models are named after their folders, and a"
                f" request without `model` gets {next(iter(self.models))}"
            )
            raise Problem(404, message, "model_not_found", "model")
        return found

    async def prepare(self, build: Callable[..., T], *arguments: Any) -> T:
        """Build something off the event loop, one at a time, since long texts take a while. A ValueError is the
        client's fault and becomes a 400."""
        constrained = any(getattr(given, name, None) for given in arguments for name in CONSTRAINTS)
        reader = self.matcher if constrained else self.reader
        if reader.waiting >= self.cfg.queue:
            raise Problem(429, f"{reader.waiting} texts wait to be read (serve.queue)", "queue_full", headers=SOON)
        reader.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(reader.thread, build, *arguments)
        except ValueError as problem:
            raise Problem(400, str(problem)) from None
        finally:
            reader.waiting -= 1

    def open(self, scope: Scope, served: Served, requests: list[Request], guesses: bool = False) -> Job:
        """Start sequences; `close` frees their slots, whatever happens to the client."""
        job = Job(requests, self.cfg.timeout, guesses and served.lm.model.anchor_head is not None)
        served.worker.submit(job)
        scope.setdefault("adlm.jobs", []).append((served.worker, job))
        self.jobs.add(job)
        return job

    def close(self, scope: Scope) -> None:
        """Cancel the jobs of a request that was answered or refused, or whose client left."""
        for worker, job in scope.get("adlm.jobs", ()):
            worker.cancel(job)
            self.jobs.discard(job)

    async def evaluate(self, served: Served, use: Parts[T]) -> T:
        """Run another use of a model's network, within the time limit of a request."""
        end = asyncio.get_running_loop().time() + self.cfg.timeout
        try:
            return await within(self.cfg.timeout, end, served.worker.call(use))
        except ValueError as problem:
            raise Problem(400, str(problem)) from None

    def cut_off(self) -> None:
        """Tell all waiting clients that the server shuts down."""
        problem = Problem(503, "the server shut down before this request was finished", "shutting_down")
        for job in self.jobs:
            job.updates.put_nowait(problem)
        for served in self.models.values():
            served.worker.give_up_calls(problem)

    def stop_workers(self, seconds: float) -> None:
        """Let every model's thread end after its current step, and wait for all of them, at most `seconds` in total."""
        workers = [m.worker for m in self.models.values()]
        for reader in (self.reader, self.matcher):
            reader.thread.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()
        end = time.monotonic() + seconds
        for worker in workers:
            worker.thread.join(max(0.0, end - time.monotonic()))

    @property
    def undone(self) -> list[str]:
        """What the threads that have not ended are doing."""
        return [m.worker.undone for m in self.models.values() if m.worker.thread.is_alive()]

    @property
    def ready(self) -> bool:
        return not self.draining and all(m.worker.ready for m in self.models.values())

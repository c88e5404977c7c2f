"""What is served: a checkpoint with its worker and defaults. Bodies of requests become rows of the engine here.

The same settings and seed give the text of `adlm sample` and `lm.generate`, since the rows are built by
`LanguageModel.request`. Everything that could take memory or time out of proportion is refused before it is built.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from starlette.types import Scope

from adlm.api import LanguageModel
from adlm.engine import Request
from adlm.engine.template import HOLE, Limit, check_canvas, parse_template
from adlm.errors import require
from adlm.schema import SamplingConfig, ServeConfig
from adlm.serving.metrics import Metrics
from adlm.serving.problems import Problem
from adlm.serving.schemas import AnchorsBody, Canvas, CompletionBody, Defaults, ModelCard, without_none
from adlm.serving.worker import Job, Worker, within
from adlm.tables import OBJECTIVES, SAMPLERS

T = TypeVar("T")
SUFFIX_TOKENS = 16
# Fields of SamplingConfig that say what is drawn, and where it goes: for `adlm sample`, not for a server
NOT_FOR_SERVERS = ("n", "batch_size", "out", "prompt", "template", "length", "seed", "banned", "required")


class Served:
    """One model."""

    def __init__(self, id: str, lm: LanguageModel, cfg: ServeConfig, sampling: SamplingConfig, metrics: Metrics):
        self.id, self.lm, self.cfg = id, lm, cfg
        self.created = int(time.time())
        self.worker = Worker(id, lm, cfg.slots, cfg.queue, metrics)
        self.settings = {k: v for k, v in asdict(sampling).items() if k not in NOT_FOR_SERVERS}
        self.settings["sampler"] = lm.sampler_of(sampling.sampler)
        self.stop = self.settings.pop("stop")
        self.limit = Limit(cfg.max_length, "serve.max_length") if cfg.max_length else Limit(lm.length)
        self.known_pieces: dict[int, str] = {}

    @property
    def samplers(self) -> list[str]:
        model, learns_score = self.lm.model.config, OBJECTIVES.load(self.lm.loaded.objective.name).learns_score
        return [s for s in sorted(SAMPLERS) if not SAMPLERS.load(s).misfit(model, learns_score)]

    @property
    def length(self) -> int:
        """Tokens of a row for which no number is given: the model's, or as many as are allowed."""
        return min(self.limit.tokens, self.lm.length)

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
            samplers=self.samplers,
            parameters=sum(p.numel() for p in model.parameters()),
            default=Defaults(sampler=s["sampler"], steps=s["steps"], top_p=s["top_p"], temperature=s["temperature"]),
        )

    # Tokens as people see them

    def piece(self, token: int) -> str:
        """The text a token adds; nothing for begin, end and padding."""
        if token not in self.known_pieces:
            tok = self.lm.tokenizer
            text = "" if token in tok.special_ids and token != tok.mask_id else tok.token(token)
            if text and type(tok.backend.decoder).__name__ == "WordPiece":
                whole = tok.backend.id_to_token(token) or ""
                text = whole.removeprefix("##") if whole.startswith("##") else " " + whole
            self.known_pieces[token] = text
        return self.known_pieces[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.piece(t) for t in tokens]

    def with_holes(self, tokens: Sequence[int]) -> tuple[list[int | None], list[str | None]]:
        """Tokens and their texts, holes as None."""
        shown = [None if t == self.lm.model.mask_id else t for t in tokens]
        return shown, [None if t is None else self.piece(t) for t in shown]

    # From a body to rows

    def check_rows(self, rows: int) -> None:
        require(rows <= self.cfg.max_n, f"{rows} rows are asked for, allowed are {self.cfg.max_n} (serve.max_n)")

    def settings_of(self, body: Any) -> dict[str, Any]:
        settings = {**self.settings, **without_none(body)}
        steps = settings["steps"]
        require(steps <= self.cfg.max_steps, f"steps={steps}, allowed are {self.cfg.max_steps} (serve.max_steps)")
        return settings

    def row_of(self, text: str | None, tokens: Sequence[int | None] | None) -> list[int] | None:
        """A template, or tokens with null for holes, as tokens with masks; None if neither is given."""
        tok = self.lm.tokenizer
        if tokens is not None:
            self.limit.check(len(tokens), "tokens")
            return [tok.mask_id if t is None else t for t in tokens]
        if text is None:
            return None
        return parse_template(text, tok.encode, tok.mask_id, [tok.bos_id], self.limit)

    def requests(self, body: Canvas, n: int = 1, watch: bool = False) -> list[Request]:
        """The rows of a canvas, checked; number i has seed + i."""
        self.check_rows(n)
        check_canvas(body.length, prompt=body.prompt, template=body.template, tokens=body.tokens)
        self.limit.check(body.length or 1, "length")
        row = self.row_of(body.template or None, body.tokens)
        stop = self.stop if body.stop is None else body.stop
        request = self.lm.request(
            prompt=body.prompt or "",
            length=body.length or self.length,
            seed=seed_of(body.seed),
            banned=body.banned,
            required=body.required,
            stop=stop,
            **self.settings_of(body),
        )
        request = replace(request, watch=watch, tokens=request.tokens if row is None else row)
        return self.seeds(request, n)

    def completions(self, body: CompletionBody) -> list[Request]:
        """n rows for each prompt; the row is begin, prompt, holes, suffix."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self.check_rows(len(prompts) * body.n)
        require(body.best_of in (None, body.n), f"best_of={body.best_of} must equal n={body.n}: nothing is ranked")
        tok, seed, settings = self.lm.tokenizer, seed_of(body.seed), self.settings_of(body)
        after = tok.encode(body.suffix) if body.suffix else []
        stop = body.stop is not False and not after
        rows, room = [], self.limit.tokens if settings["stride"] else self.length
        for prompt in prompts:
            before = [tok.bos_id, *tok.encode(prompt)]
            self.limit.check(len(before), "the prompt")
            holes = body.max_tokens or (SUFFIX_TOKENS if after else room - len(before))
            self.limit.check(len(before) + holes + len(after), "prompt, max_tokens and suffix together")
            require(holes >= 1, f"the prompt leaves nothing to draw in {room} tokens")
            request = self.lm.request(seed=seed, banned=body.banned, required=body.required, stop=stop, **settings)
            rows += self.seeds(replace(request, tokens=[*before, *[tok.mask_id] * holes, *after]), body.n)
        return rows

    def text_tokens(self, text: str) -> list[int]:
        tokens = self.lm.tokenizer.encode(text)
        require(bool(tokens), "the text has no tokens")
        self.limit.check(len(tokens), "the text")
        return tokens

    def anchor_row(self, body: AnchorsBody) -> list[int]:
        """The row that /v1/anchors looks at: text or template, or tokens with null for holes."""
        require((body.text is None) != (body.tokens is None), "give text or tokens")
        if body.text is not None and not HOLE.search(body.text):
            return self.text_tokens(body.text)
        row = self.row_of(body.text, body.tokens)
        assert row is not None
        bad = [t for t in row if not 0 <= t < self.lm.model.vocab_size]
        size = self.lm.model.vocab_size
        require(not bad, f"tokens holds {bad[0] if bad else ''}, outside the vocabulary 0..{size - 1}")
        return row

    def seeds(self, request: Request, n: int) -> list[Request]:
        self.worker.check([request])
        return [replace(request, seed=request.seed + i) for i in range(n)]


def check_defaults(c: SamplingConfig, max_steps: int) -> None:
    """What `adlm serve` cannot take as a default of requests is refused, not ignored."""
    require(
        c.steps <= max_steps,
        f"sampling.steps={c.steps} is more than serve.max_steps={max_steps}:"
        " every request without steps would be refused",
    )
    given = [f"sampling.{name}" for name in NOT_FOR_SERVERS if getattr(c, name) != getattr(SamplingConfig, name)]
    names = " and ".join(given)
    require(not given, f"{names}: not for a server; requests say what is drawn, serve.slots how many rows at once")


def seed_of(given: int | None) -> int:
    return secrets.randbelow(2**31) if given is None else given


class Service:
    """Everything the routes need."""

    def __init__(self, models: dict[str, LanguageModel], cfg: ServeConfig, sampling: SamplingConfig, metrics: Metrics):
        self.cfg, self.metrics = cfg, metrics
        self.models = {id: Served(id, lm, cfg, sampling, metrics) for id, lm in models.items()}
        self.draining = False
        """No new work; what runs may finish."""
        self.active: set[Any] = set()
        """Tasks of requests under way."""
        self.jobs: set[Job] = set()
        workers = [m.worker for m in self.models.values()]
        gauges = {
            "adlm_slots": ("Rows that share a network call.", lambda w: w.slots),
            "adlm_slots_in_use": ("Rows being worked on.", lambda w: w.in_use),
            "adlm_queue_depth": ("Rows accepted that wait for a slot.", lambda w: max(0, w.taken - w.in_use)),
        }
        for name, (help, read) in gauges.items():
            metrics.gauge(name, help, ("model",), lambda read=read: [((w.name,), read(w)) for w in workers])

    def model(self, id: str | None) -> Served:
        """The model of that id, or the first."""
        found = self.models.get(id) if id is not None else next(iter(self.models.values()))
        if found is None:
            names = ", ".join(self.models)
            raise Problem(404, f"model {id[:80]!r} is not served; there is {names}", "model_not_found", "model")  # type: ignore[index]
        return found

    def open(self, scope: Scope, served: Served, requests: list[Request], guesses: bool = False) -> Job:
        """Start rows; `close` frees their slots whatever happens to who asked for them."""
        job = Job(requests, self.cfg.timeout, guesses and served.lm.model.anchor_head is not None)
        served.worker.submit(job)
        scope.setdefault("adlm.jobs", []).append((served.worker, job))
        self.jobs.add(job)
        return job

    def close(self, scope: Scope) -> None:
        """A request is over: answered, refused, or its client left."""
        for worker, job in scope.get("adlm.jobs", ()):
            worker.cancel(job)
            self.jobs.discard(job)

    async def look(self, served: Served, use: Callable[[], T]) -> T:
        """Another use of a model's network, within the time of a request."""
        end = asyncio.get_running_loop().time() + self.cfg.timeout
        try:
            return await within(self.cfg.timeout, end, served.worker.call(use))
        except ValueError as problem:
            raise Problem(400, str(problem)) from None

    def cut_off(self) -> None:
        """Tell everybody who still waits that the server goes away."""
        problem = Problem(503, "the server shut down before this request was finished", "shutting_down")
        for job in self.jobs:
            job.updates.put_nowait(problem)
        for served in self.models.values():
            served.worker.give_up_calls(problem)

    def stop_workers(self, seconds: float) -> None:
        """Let every model's thread end after the step it is in, and wait for them all, together at most `seconds`."""
        workers = [m.worker for m in self.models.values()]
        for worker in workers:
            worker.stop()
        end = time.monotonic() + seconds
        for worker in workers:
            worker.thread.join(max(0.0, end - time.monotonic()))

    @property
    def undone(self) -> list[str]:
        """What the threads that have not ended are busy with."""
        return [m.worker.undone for m in self.models.values() if m.worker.thread.is_alive()]

    @property
    def ready(self) -> bool:
        return not self.draining and all(m.worker.ready for m in self.models.values())

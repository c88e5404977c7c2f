"""The routes. Each is a few lines: a body becomes rows, rows become an answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from adlm import evaluation
from adlm.engine import Request as Row
from adlm.engine import Result
from adlm.serving import schemas as s
from adlm.serving.frames import counts, film
from adlm.serving.guard import Guard
from adlm.serving.guesses import best_guesses
from adlm.serving.models import Served, Service
from adlm.serving.openai import Completion
from adlm.serving.problems import MEANING, Problem

STATIC = (Path(__file__).parent / "static", Path(evaluation.__file__).parent / "static")
"""The page's files, and the sheet it shares with reports."""
PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    # Text of a model can never become a script, and nothing is loaded from or sent to another host.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    # Asked for again at each visit, answered 304: an upgraded server must not meet the scripts of the old one.
    "Cache-Control": "no-cache",
}
STOPPING = 5.0
"""Seconds that the step under way gets to end when the server stops."""
GENERATING = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)
READING = (400, 401, 404, 408, 413, 422, 500, 503)
T = TypeVar("T")
Answers = dict[int | str, dict[str, Any]]


def documented(*statuses: int, also: Answers | None = None) -> Answers:
    return {**{n: {"model": s.ErrorAnswer, "description": MEANING[n]} for n in statuses}, **(also or {})}


def streamed(*statuses: int) -> Answers:
    """The same for a route that answers with events: FastAPI would document its errors as events too."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    return {**{n: {"content": error, "description": MEANING[n]} for n in statuses}, **STREAM}


# One server-sent event; what its data holds is told in docs/serving.md.
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
EVENTS = {"text/event-stream": {"schema": EVENT}}
STREAM: Answers = {200: {"content": EVENTS, "description": "Server-sent events: start, frame, end or error."}}
COMPLETION: Answers = {
    200: {"model": s.CompletionAnswer, "content": EVENTS, "description": "With stream: server-sent events."}
}


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], status_code: int = 200):
        # No proxy may hold events back.
        super().__init__(events, status_code, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def prepared(build: Callable[..., T], *arguments: Any) -> T:
    """Text to rows, off the event loop: long texts take a while. What cannot be built is the client's fault."""
    try:
        return await asyncio.to_thread(build, *arguments)
    except ValueError as problem:
        raise Problem(400, str(problem)) from None


def make_app(service: Service, key: str = "") -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for served in service.models.values():
            served.worker.start()
        yield
        await asyncio.to_thread(service.stop_workers, STOPPING)

    # FastAPI's own pages of documentation load scripts from other hosts; /openapi.json stays.
    app = FastAPI(title="adlm", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    add_routes(app, service)
    app.add_middleware(Guard, service=service, key=key)  # type: ignore[arg-type]
    if service.cfg.cors:
        origins = [o.strip() for o in service.cfg.cors.split(",") if o.strip()]
        app.add_middleware(
            CORSMiddleware,  # type: ignore[arg-type]
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def add_handlers(app: FastAPI) -> None:
    """Every error leaves in the one shape."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return Problem(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return Problem(400, f"the body is not JSON: {first['ctx']['error']}", "invalid_json").response()
        places = [place_of(e["loc"][1:], error.body) for e in error.errors()]
        where = max(places, key=lambda place: place.count("."))  # a union is wrong as a whole, or at one of its parts
        why = " or ".join(dict.fromkeys(e["msg"] for e, place in zip(error.errors(), places) if place == where))
        return Problem(422, f"{where or 'body'}: {why}", "invalid_body", where or None).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return Problem(500, "internal error", "internal").response()


def place_of(path: Sequence[str | int], value: Any) -> str:
    """A field as the client wrote it. The path also names the branch of a union that was tried: `prompt.str`."""
    place = []
    for part in path:
        if isinstance(value, dict if isinstance(part, str) else list):
            place.append(str(part))
            value = value.get(part) if isinstance(value, dict) else value[part]  # type: ignore[index]
    return ".".join(place)


def add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return await static("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        # The name is looked up among the files there are, never joined to a path: there is nothing to climb out of.
        for folder in STATIC:
            for file in folder.iterdir() if folder.is_dir() else ():
                if file.name == name and file.is_file():
                    return FileResponse(file, headers=PAGE_HEADERS)
        raise Problem(404, "no such file")

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """The process answers."""
        return "ok\n"

    @app.get(
        "/readyz", response_class=PlainTextResponse, responses={503: {"description": "Starting or shutting down."}}
    )
    async def readyz() -> Response:
        """Models are loaded and new work is taken."""
        ready = service.ready
        return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=documented(401))
    async def metrics() -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses=documented(401))
    async def models() -> s.ModelList:
        return s.ModelList(data=[served.card() for served in service.models.values()])

    @app.get("/v1/models/{id}", responses=documented(401, 404))
    async def model(id: str) -> s.ModelCard:
        return service.model(id).card()

    @app.post("/v1/tokenize", responses=documented(*READING))
    async def tokenize(body: s.TextBody) -> s.Pieces:
        """The pieces a text is made of."""
        served = service.model(body.model)
        tokens = await prepared(served.lm.tokenizer.encode, body.text)
        return s.Pieces(tokens=tokens, texts=served.pieces(tokens))

    @app.post("/v1/frames", responses=streamed(*GENERATING), response_class=EventStream, response_model=None)
    async def frames(body: s.FramesBody, request: Request) -> Response:
        """Watch one text appear: events start, frame (one per evaluation) and end, or error."""
        served = service.model(body.model)
        rows = await prepared(served.requests, body, 1, True)
        return EventStream(film(served, service.open(request.scope, served, rows, guesses=body.anchors)))

    @app.post("/v1/infill", responses=documented(*GENERATING))
    async def infill(body: s.InfillBody, request: Request) -> s.InfillAnswer:
        """Fill holes: a template, tokens with null, or a prompt."""
        served = service.model(body.model)
        rows = await prepared(served.requests, body, body.n)
        job = service.open(request.scope, served, rows)
        return infill_answer(served, rows, {row: result async for row, result in job.results()})

    @app.post("/v1/completions", responses=documented(*GENERATING, also=COMPLETION), response_model=None)
    async def completions(body: s.CompletionBody, request: Request) -> Response:
        """OpenAI's completions: continue prompts, or fill in before a suffix."""
        served = service.model(body.model)
        completion = await prepared(Completion, served, body)
        job = service.open(request.scope, served, completion.requests)
        if body.stream:
            return EventStream(completion.stream(job))
        return JSONResponse((await completion.whole(job)).model_dump(mode="json"))

    @app.post("/v1/score", responses=documented(*GENERATING))
    async def score(body: s.ScoreBody) -> s.ScoreAnswer:
        """How likely a text is: an upper bound on its nats per token (exact for causal models)."""
        served = service.model(body.model)
        tokens = await prepared(served.text_tokens, body.text)
        found = await service.look(served, lambda: served.lm.score(tokens, body.draws))
        return s.ScoreAnswer(
            nll=found.nll,
            ppl=found.ppl,
            stderr=found.stderr,
            exact=served.lm.model.config.causal,
            tokens=found.tokens,
            texts=served.pieces(found.tokens),
            per_token=found.per_token,
        )

    @app.post("/v1/anchors", responses=documented(*GENERATING))
    async def anchors(body: s.AnchorsBody) -> s.AnchorsAnswer:
        """Which tokens are anchors (rare in their row), and what the anchor network puts into holes."""
        served = service.model(body.model)
        row = await prepared(served.anchor_row, body)
        guesses = await service.look(served, lambda: best_guesses(served.lm, [row], body.top)[0])
        tokens, texts = served.with_holes(row)
        count, tau = counts(row), served.lm.loaded.objective.tau
        return s.AnchorsAnswer(
            tokens=tokens,
            texts=texts,
            anchor=[t is not None and c <= tau for t, c in zip(tokens, count)],
            count=[0 if t is None else c for t, c in zip(tokens, count)],
            tau=tau,
            guesses=[
                s.HoleGuess(
                    position=g.position,
                    candidates=[
                        s.Candidate(id=t, text=served.piece(t), probability=p)
                        for t, p in zip(g.tokens, g.probabilities)
                    ],
                )
                for g in guesses
            ],
        )


def infill_answer(served: Served, rows: list[Row], results: dict[int, Result]) -> s.InfillAnswer:
    mask, choices = served.lm.model.mask_id, []
    for row, result in sorted(results.items()):
        texts = served.pieces(result.tokens)
        choices.append(
            s.InfillChoice(
                index=row,
                text=served.lm.text(result.tokens),
                tokens=result.tokens,
                texts=texts,
                seed=result.seed,
                nfe=result.nfe,
            )
        )
    given = sum(t != mask for t in rows[0].tokens)
    drawn = sum(t == mask for r in results.values() for t in rows[0].tokens[: len(r.tokens)])
    usage = s.Usage(prompt_tokens=given, completion_tokens=drawn, total_tokens=given + drawn)
    return s.InfillAnswer(id=f"infill-{secrets.token_hex(12)}", model=served.id, choices=choices, usage=usage)

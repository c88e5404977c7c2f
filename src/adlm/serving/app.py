"""The routes. Each takes a few lines: a body becomes requests of the engine, and their results become an answer."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from adlm import reporting
from adlm.serving import answers
from adlm.serving import bodies as b
from adlm.serving.bodies import Problem
from adlm.serving.frames import best_guesses, counts, film
from adlm.serving.jobs import in_one_part
from adlm.serving.openai import Chat, Completion
from adlm.serving.server import RequestGuard, other_origins
from adlm.serving.service import Served, Service

STATIC = (Path(__file__).parent / "static", Path(reporting.__file__).parent / "static")
"""The page's files, and the style sheet it shares with reports."""
PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    # A model's text can never become a script, and nothing is loaded from or sent to another host.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    # Browsers check at each visit (and get 304): the page of an upgraded server must not run old scripts.
    "Cache-Control": "no-cache",
}
JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)
STOPPING = 5.0
"""Seconds that the running step gets to end when the server stops."""
T = TypeVar("T")


# Answers in the OpenAPI document

MEANING = {
    400: "The body is not JSON, or a value is out of range; the message names it.",
    401: "The key is missing or wrong.",
    403: "The Host header names another machine (serve.host).",
    404: "No such model.",
    408: "The request was sent too slowly.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    422: "The body does not have this schema.",
    429: "The queue is full (serve.queue); Retry-After says when to come back.",
    500: "The engine failed; the request may be sent again.",
    503: "The server is starting or shutting down.",
    504: "The request took longer than serve.timeout.",
}
Answers = dict[int | str, dict[str, Any]]
ERRORS: Answers = {status: {"model": b.ErrorAnswer, "description": text} for status, text in MEANING.items()}
KEY_ONLY: Answers = {401: ERRORS[401], 403: ERRORS[403]}
NAME_ONLY: Answers = {403: ERRORS[403]}
# One server-sent event; docs/serving.md describes its data.
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
EVENTS = {"text/event-stream": {"schema": EVENT}}
COMPLETION: Answers = {
    **ERRORS,
    200: {"model": answers.CompletionAnswer, "content": EVENTS, "description": "With stream: server-sent events."},
}
CHAT: Answers = {**COMPLETION, 200: {**COMPLETION[200], "model": answers.ChatAnswer}}
# FastAPI would document the errors of a route that answers with events as events, too.
ERROR_BODY = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
FRAMES: Answers = {
    **{status: {"content": ERROR_BODY, "description": text} for status, text in MEANING.items()},
    200: {"content": EVENTS, "description": "Server-sent events: start, queue, frame, end or error."},
}


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], status_code: int = 200):
        # No proxy may delay events.
        super().__init__(events, status_code, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


# The page, and the state of the server

router = APIRouter()
ASKING = ["GET", "HEAD"]
DOCS = """<!doctype html><html lang="en"><meta charset="utf-8"><title>adlm: the routes</title>
<link rel="stylesheet" href="/static/style.css"><body><h1>The routes of this server</h1>
<p>Fields, limits and answers are in <a href="/openapi.json">/openapi.json</a>. The page to watch text appear is at
<a href="/">/</a>.</p><table>ROUTES</table></body></html>
"""


@router.api_route("/", methods=ASKING, include_in_schema=False)
async def page() -> Response:
    return await static("index.html")


@router.api_route("/docs", methods=ASKING, include_in_schema=False)
async def docs(request: Request) -> Response:
    """The routes, as the OpenAPI document describes them."""
    lines = [
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation.get('description') or operation['summary'])}</td></tr>"
        for path, operations in request.app.openapi()["paths"].items()
        for method, operation in operations.items()
    ]
    return HTMLResponse(DOCS.replace("ROUTES", "\n".join(lines)), headers=PAGE_HEADERS)


@router.api_route("/static/{name}", methods=ASKING, include_in_schema=False)
async def static(name: str) -> Response:
    # The name is looked up in the list of files and never joined to a path, so it cannot leave the folder.
    for folder in STATIC:
        for file in folder.iterdir():
            if file.name == name and file.is_file():
                return FileResponse(file, headers=PAGE_HEADERS)
    raise Problem(404, "no such file")


@router.head("/healthz", response_class=PlainTextResponse, include_in_schema=False)
@router.get("/healthz", response_class=PlainTextResponse, responses=NAME_ONLY)
async def healthz() -> str:
    """Whether the process is alive."""
    return "ok\n"


@router.head("/readyz", response_class=PlainTextResponse, include_in_schema=False)
@router.get("/readyz", response_class=PlainTextResponse, responses={**NAME_ONLY, 503: {"description": MEANING[503]}})
async def readyz(request: Request) -> Response:
    """Whether models are loaded and new work is accepted."""
    ready = request.app.state.service.ready
    return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)


@router.get("/metrics", response_class=PlainTextResponse, responses=KEY_ONLY)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return PlainTextResponse(request.app.state.service.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/models", responses=KEY_ONLY)
async def models(request: Request) -> answers.ModelList:
    """The served models, with their samplers and defaults."""
    return answers.ModelList(data=[served.card() for served in request.app.state.service.models.values()])


@router.get("/v1/models/{id}", responses={**KEY_ONLY, 404: ERRORS[404]})
async def model(id: str, request: Request) -> answers.ModelCard:
    return request.app.state.service.model(id).card()


# Work for a model


@router.post("/v1/tokenize", responses=ERRORS)
async def tokenize(body: b.TextBody, request: Request) -> answers.Pieces:
    """Split a text into tokens, each with its piece of the text."""
    service: Service = request.app.state.service
    return await service.prepare(service.model(body.model).tokenize, body.text)


@router.post("/v1/completions", responses=COMPLETION, response_model=None)
async def completions(body: b.CompletionBody, request: Request) -> Response:
    """OpenAI's completions: continue prompts, or fill in before a suffix."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    return await answered(request, served, await service.prepare(Completion, served, body))


@router.post("/v1/chat/completions", responses=CHAT, response_model=None)
async def chat(body: b.ChatBody, request: Request) -> Response:
    """OpenAI's chat completions: answer a conversation."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    return await answered(request, served, await service.prepare(Chat, served, body))


async def answered(request: Request, served: Served, completion: Completion) -> Response:
    job = request.app.state.service.open(request.scope, served, completion.requests)
    if completion.body.stream:
        return EventStream(completion.stream(job))
    return JSONResponse((await completion.whole(job)).model_dump(mode="json"))


@router.post("/v1/frames", responses=FRAMES, response_class=EventStream, response_model=None)
async def frames(body: b.FramesBody, request: Request) -> Response:
    """Watch one text appear, as events: start, queue (while others are ahead), frame (one per evaluation), and end or
    error."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    requests = await service.prepare(served.requests, body, 1, True)
    return EventStream(film(served, service.open(request.scope, served, requests, guesses=body.anchors)))


@router.post("/v1/infill", responses=ERRORS)
async def infill(body: b.InfillBody, request: Request) -> answers.InfillAnswer:
    """Fill holes: a template, tokens with null, or a prompt."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    requests = await service.prepare(served.requests, body, body.n)
    job = service.open(request.scope, served, requests)
    results = {index: result async for index, result in job.results()}
    choices = [
        answers.InfillChoice(
            index=index,
            text=served.lm.text(result.tokens),
            tokens=result.tokens,
            texts=served.pieces(result.tokens),
            seed=result.seed,
            nfe=result.nfe,
        )
        for index, result in sorted(results.items())
    ]
    tokens, mask = requests[0].tokens, served.lm.model.mask_id
    given = sum(t != mask for t in tokens)
    drawn = sum(t == mask for choice in choices for t in tokens[: len(choice.tokens)])
    usage = answers.Usage(prompt_tokens=given, completion_tokens=drawn, total_tokens=given + drawn)
    return answers.InfillAnswer(id=f"infill-{secrets.token_hex(12)}", model=served.id, choices=choices, usage=usage)


@router.post("/v1/score", responses=ERRORS)
async def score(body: b.ScoreBody, request: Request) -> answers.ScoreAnswer:
    """How likely a text is: an upper bound on its nats per token, or the exact value (`exact`)."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    tokens = await service.prepare(served.text_tokens, body.text)
    found = await service.evaluate(served, served.lm.score_in_parts(tokens, body.draws))
    return answers.ScoreAnswer(
        nll=found.nll,
        ppl=found.ppl,
        stderr=found.stderr,
        exact=found.exact,
        tokens=found.tokens,
        texts=served.pieces(found.tokens),
        per_token=found.per_token,
    )


@router.post("/v1/slots", responses=ERRORS)
async def slots(body: b.SlotsBody, request: Request) -> answers.SlotsAnswer:
    """The model's prediction for every hole of a template: candidates, entropy and standard errors."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    sequence = await service.prepare(served.slot_tokens, body)
    found = await service.evaluate(served, served.lm.slots_in_parts(sequence, body.top, body.draws))
    tokens, texts = served.with_holes(sequence)
    return answers.SlotsAnswer(
        tokens=tokens,
        texts=texts,
        slots=[
            answers.SlotAnswer(
                position=slot.position,
                entropy=slot.entropy,
                candidates=[
                    answers.SlotCandidate(id=t, text=served.piece(t), probability=p, stderr=e)
                    for t, p, e in zip(slot.tokens, slot.probabilities, slot.stderr or [None] * len(slot.tokens))
                ],
            )
            for slot in found
        ],
    )


@router.post("/v1/anchors", responses=ERRORS)
async def anchors(body: b.AnchorsBody, request: Request) -> answers.AnchorsAnswer:
    """Which tokens are anchors (rare in their sequence), and the anchor network's prediction for holes."""
    service: Service = request.app.state.service
    served = service.model(body.model)
    sequence = await service.prepare(served.anchor_tokens, body)
    guesses = await service.evaluate(served, in_one_part(lambda: best_guesses(served.lm, sequence, body.top)))
    tokens, texts = served.with_holes(sequence)
    count, tau = counts(sequence), served.lm.loaded.objective.tau
    return answers.AnchorsAnswer(
        tokens=tokens,
        texts=texts,
        anchor=[t is not None and c <= tau for t, c in zip(tokens, count)],
        count=[0 if t is None else c for t, c in zip(tokens, count)],
        tau=tau,
        guesses=[
            answers.HoleGuess(
                position=g.position,
                candidates=[
                    answers.Candidate(id=t, text=served.piece(t), probability=p)
                    for t, p in zip(g.tokens, g.probabilities)
                ],
            )
            for g in guesses
        ],
    )


# All errors have one shape


async def problem(request: Request, error: Any) -> JSONResponse:
    return error.response()


async def http_error(request: Request, error: Any) -> JSONResponse:
    return Problem(error.status_code, str(error.detail), headers=error.headers).response()


async def invalid(request: Request, error: Any) -> JSONResponse:
    sent = request.headers.get("content-type", "")
    if not JSON_TYPE.match(sent):  # the default of curl -d
        message = f"the header Content-Type must be application/json, got {sent[:80]!r}"
        return Problem(415, message, "wrong_content_type").response()
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {first['ctx']['error']}", "invalid_json").response()
    places = [place_of(e["loc"][1:], error.body) for e in error.errors()]
    where = max(places, key=lambda place: place.count("."))  # an error in a union concerns the whole or one part
    why = " or ".join(dict.fromkeys(e["msg"] for e, place in zip(error.errors(), places) if place == where))
    return Problem(422, f"{where or 'body'}: {why}", "invalid_body", where or None).response()


async def bug(request: Request, error: Exception) -> JSONResponse:
    return Problem(500, "internal error", "internal").response()


def place_of(path: Sequence[str | int], value: Any) -> str:
    """A field as the client wrote it. pydantic's path also has the branch of a union that it tried: `prompt.str`."""
    place = []
    for part in path:
        if isinstance(value, dict if isinstance(part, str) else list):
            place.append(str(part))
            value = value.get(part) if isinstance(value, dict) else value[part]  # type: ignore[index]
    return ".".join(place)


def make_app(service: Service, key: str = "") -> FastAPI:
    """The application: routes, errors, the guard, and other origins (CORS)."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for served in service.models.values():
            served.worker.start()
        yield
        await asyncio.to_thread(service.stop_workers, STOPPING)

    app = FastAPI(
        title="adlm",
        version="1",
        lifespan=lifespan,
        routes=router.routes,
        # FastAPI's documentation pages load scripts from other hosts; /openapi.json stays.
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            Problem: problem,
            HTTPException: http_error,
            RequestValidationError: invalid,
            Exception: bug,
        },
    )
    app.state.service = service
    app.add_middleware(RequestGuard, service=service, key=key)  # type: ignore[arg-type]
    if service.cfg.cors:
        app.add_middleware(CORSMiddleware, **other_origins(service.cfg.cors))  # type: ignore[arg-type]
    return app

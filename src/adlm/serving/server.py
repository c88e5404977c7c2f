"""The layers around the application: uvicorn, and the guard that every request passes.

uvicorn gets two additions. On SIGTERM or Ctrl-C the listener stays open while running requests finish, and answers new
ones with 503, so that a load balancer can tell "shutting down" from "gone"; after serve.grace seconds the remaining
requests are cancelled with an error, and a second signal ends the server at once. And a client that does not finish its
request line and headers in time is disconnected.

The guard checks host name and key and reads the whole body, whose size is limited. After that, the only message that
can arrive is that the client is gone. The route's task is then cancelled, and its sequences leave their slots.
"""

import asyncio
import hmac
import logging
import re
import time
from types import FrameType
from typing import Any

import uvicorn
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from adlm.serving.bodies import Problem
from adlm.serving.service import Service

log = logging.getLogger("adlm.serving")
READ_TIMEOUT = 10.0
"""Seconds that a client may take to send its headers, and again for its body."""
MAX_BODY = 1_000_000
"""Largest request body in bytes."""
GONE = 499
"""Status counted for a client that left; never sent."""


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def names_this_machine(header: bytes | None, host: str) -> bool:
    """Whether a Host header, with any port, names a server on loopback. Programs may leave it out."""
    if header is None:
        return True
    name = re.sub(r":\d*$", "", header.decode("latin-1")).lower()
    return name in ("localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host.lower()}]")


def other_origins(names: str) -> dict[str, Any]:
    """Arguments of the CORS middleware for serve.cors."""
    return {
        "allow_origins": [o.strip() for o in names.split(",") if o.strip()],
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],  # clients add their own (OpenAI's: x-stainless-*)
        "expose_headers": ["Retry-After"],
    }


def path_of_route(scope: Scope, app: ASGIApp) -> str:
    """The declared path of the request's route: metric labels must not come from clients."""
    route = scope.get("route")
    if route is None:  # refused before routing, or routed in a worker
        routes = getattr(scope.get("app", app), "routes", ())
        route = next((r for r in routes if r.matches(scope)[0] != Match.NONE), None)
    return getattr(route, "path", "other")


class RequestGuard:
    """Middleware: checks key, size and time to send; cancels when the client leaves; counts status and time."""

    def __init__(self, app: ASGIApp, service: Service, key: str):
        self.app, self.service, self.key = app, service, key.encode()
        # Another site can resolve its own name to this machine's address and then read answers (DNS rebinding). With a
        # key it cannot, and a server that is not on loopback cannot know all of its names.
        self.checks_host = not key and is_loopback(service.cfg.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, complete = time.perf_counter(), GONE, False

        async def note_and_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        task = asyncio.current_task()
        self.service.active.add(task)
        try:
            try:
                self.check(scope)
                body = await self.read_body(scope, receive)
            except Problem as problem:
                await problem.response()(scope, receive, note_and_send)
                return
            if body is not None and not await self.run(scope, body, receive, note_and_send) and not complete:
                status = GONE
        except Exception:
            status = 500  # the outermost layer sends it
            raise
        finally:
            self.service.active.discard(task)
            self.service.close(scope)
            path = path_of_route(scope, self.app)
            self.service.metrics.add("adlm_requests_total", 1, (path, str(status)))
            self.service.metrics.observe("adlm_request_seconds", time.perf_counter() - began, (path,))

    def check(self, scope: Scope) -> None:
        """Refuse a foreign name, a wrong key, and new work while the server shuts down."""
        host = self.service.cfg.host
        if self.checks_host and not names_this_machine(dict(scope["headers"]).get(b"host"), host):
            allowed = f"localhost, 127.0.0.1, [::1] and {host} (serve.host), unless a key is set"
            raise Problem(403, f"the Host header names another machine; allowed are {allowed}", "wrong_host")
        if self.key and scope["path"].startswith(("/v1", "/metrics")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            # Always compared, and in constant time: the time of the answer must not tell how much of the key is right.
            if not (hmac.compare_digest(key.strip(), self.key) and kind.lower() == b"bearer"):
                message = "the key is missing or wrong; send it as `Authorization: Bearer KEY`"
                raise Problem(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.service.draining and scope["method"] == "POST":
            # The connection is closed, too: a client that keeps it would come back to the same server.
            headers = {"Retry-After": "5", "Connection": "close"}
            raise Problem(503, "the server is shutting down", "shutting_down", headers=headers)

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client left."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        fits = not declared.isdigit() or int(declared[:20]) <= MAX_BODY
        parts, size = [], 0
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                while fits:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    fits = size <= MAX_BODY
                    if fits and not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message = f"the request was not sent within {READ_TIMEOUT:g} s"
            raise Problem(408, message, "too_slow", headers={"Connection": "close"}) from None
        message = f"the body is larger than {MAX_BODY} bytes"
        raise Problem(413, message, "body_too_large", headers={"Connection": "close"})

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Run the route. False if it was cancelled: the client left, or had the whole answer before the route ended."""
        given = False
        gone = asyncio.ensure_future(receive())  # the body is read: only a disconnect can follow

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        work: asyncio.Future[Any] = asyncio.ensure_future(self.app(scope, replay, send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return True
            return False
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


class PromptProtocol(H11Protocol):
    """HTTP/1.1 that closes connections whose client does not finish its request line and headers in time."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Start the clock at the first byte of the next request; a running request has its own limits."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.forget()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(READ_TIMEOUT, self.close)

    def forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def close(self) -> None:
        self.deadline = None
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn that finishes running requests before it ends."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service
        self.drain: asyncio.Task[None] | None = None
        self.running: asyncio.AbstractEventLoop | None = None

    async def _serve(self, sockets: Any = None) -> None:
        self.running = asyncio.get_running_loop()
        await super()._serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining or self.running is None:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        self.running.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        self.drain = asyncio.ensure_future(self.finish_requests())

    async def finish_requests(self) -> None:
        """Wait at most serve.grace seconds for running requests; then end them with an error."""
        service, loop = self.service, asyncio.get_running_loop()
        log.info("shutting down: %d requests under way", len(service.active))
        end = loop.time() + service.cfg.grace
        while service.active and loop.time() < end:
            await asyncio.sleep(0.02)
        service.cut_off()
        end = loop.time() + 5
        while service.active and loop.time() < end:
            await asyncio.sleep(0.02)
        self.should_exit = True


def make_server(app: Any, service: Service) -> Server:
    """The server of the application, ready to run."""
    config = uvicorn.Config(
        app,
        host=service.cfg.host,
        port=service.cfg.port,
        http=PromptProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return Server(config, service)

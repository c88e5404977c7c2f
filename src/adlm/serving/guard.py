"""What every request passes before a route sees it: key, size, time to send; and what is noticed after: a client that
left, the status and the time.

The body is read here, whole: bodies are small by limit, and afterwards the connection has only one thing left to say,
that the client is gone. A route's task is cancelled then, and its rows leave their slots.
"""

import asyncio
import hmac
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adlm.serving.models import Service
from adlm.serving.problems import Problem

GONE = 499  # what is counted for a client that left; never sent


class Guard:
    def __init__(self, app: ASGIApp, service: Service, key: str):
        self.app, self.service, self.key = app, service, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), GONE

        async def note_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        task = asyncio.current_task()
        self.service.active.add(task)
        try:
            try:
                self.check_key(scope)
                self.check_draining(scope)
                body = await self.read_body(scope, receive)
            except Problem as problem:
                await problem.response()(scope, receive, note_and_send)
                return
            if body is not None and not await self.run(scope, body, receive, note_and_send):
                status = GONE
        except Exception:
            status = 500  # sent by the outermost layer
            raise
        finally:
            self.service.active.discard(task)
            self.service.close(scope)
            # The route's own path: labels must not be what clients make up.
            path = getattr(scope.get("route"), "path", "other")
            self.service.metrics.add("adlm_requests_total", 1, (path, str(status)))
            self.service.metrics.observe("adlm_request_seconds", time.perf_counter() - began, (path,))

    def check_key(self, scope: Scope) -> None:
        if not self.key or not scope["path"].startswith(("/v1", "/metrics")):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        # Compared whatever is wrong, and in constant time: how long the answer takes must not tell how much is right.
        if not (hmac.compare_digest(key.strip(), self.key) and kind.lower() == b"bearer"):
            message = "the key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise Problem(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_draining(self, scope: Scope) -> None:
        if self.service.draining and scope["method"] == "POST":
            # The connection is closed too: whoever keeps it would come back to the same server.
            headers = {"Retry-After": "5", "Connection": "close"}
            raise Problem(503, "the server is shutting down", "shutting_down", headers=headers)

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client left."""
        limit, seconds = self.service.cfg.max_body, self.service.cfg.read_timeout
        too_large = Problem(
            413, f"the body is larger than {limit} bytes (serve.max_body)", "body_too_large",
            headers={"Connection": "close"},
        )  # fmt: skip
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message = f"the request was not sent within {seconds:g} s (serve.read_timeout)"
            raise Problem(408, message, "too_slow", headers={"Connection": "close"}) from None

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Run the route; False if the client left before its end."""
        given = False
        gone = asyncio.ensure_future(disconnected(receive))

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


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

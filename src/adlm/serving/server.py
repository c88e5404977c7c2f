"""uvicorn, with two things added: a drain before the end, and a limit on the time a client takes to say what it wants.

On SIGTERM or Ctrl-C the listener stays open while running requests finish, and answers new ones 503, so that a load
balancer can tell "going away" from "gone". After serve.grace seconds what still runs is cancelled and told so. A
second signal ends at once.
"""

import asyncio
import logging
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from adlm.serving.models import Service

log = logging.getLogger("adlm.serving")


class PromptProtocol(H11Protocol):
    """Closes connections whose client does not finish its request line and headers in time."""

    seconds = 10.0

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
        """A request under way has its own limits; otherwise the clock runs, from the first byte of the next one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.forget()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self.close)

    def forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def close(self) -> None:
        self.deadline = None
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
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
        """Wait for running requests, at most serve.grace seconds; then tell them and go."""
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
    cfg = service.cfg
    protocol = type("Protocol", (PromptProtocol,), {"seconds": cfg.read_timeout})
    config = uvicorn.Config(
        app,
        host=cfg.host,
        port=cfg.port,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return Server(config, service)

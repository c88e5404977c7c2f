"""`adlm serve workers=N`: one process for each GPU behind one port.

The front listens, guards every request as a server of one process does (server.py), and forwards it to the least busy
worker, over a Unix socket. Workers are ordinary servers. Requests for which no worker has room wait here, in one common
queue. Exact seeds make workers interchangeable: a request whose worker dies is sent to another one, as long as its
client has received nothing of the answer; a stream that has begun ends with an error event. A worker that dies is
started again.
"""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import h11
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from adlm.io.paths import KILL, die_with_parent
from adlm.schema import Config, ServeConfig
from adlm.serving.app import router
from adlm.serving.bodies import Problem
from adlm.serving.jobs import ServerMetrics, merged, out_of_time, within
from adlm.serving.server import RequestGuard, make_server, other_origins

log = logging.getLogger("adlm.serving")
ATTEMPTS = 2
"""Workers that a request may be sent to: a request that crashes its worker must not crash all of them."""
LOOK = 0.1
"""Seconds between two checks whether a worker is ready."""
SOON_ENOUGH = 2.0
"""Seconds within which a worker that is alive says whether it is ready, and its metrics."""
LATE = 5.0
"""Seconds to wait for an answer after the request's time limit: a healthy worker reports the timeout itself."""
SLOWEST_RESTART = 30.0
"""Longest pause, in seconds, before restarting a worker that never became ready."""
STOPPING = 10.0
"""Seconds that workers get to end."""
HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection", b"te", b"trailer"}
"""Headers of one connection, not of the message (hop-by-hop)."""


class WorkerGone(Exception):
    """The worker ended before its answer was complete."""


class AnswerHead(NamedTuple):
    """Status and headers of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class WorkerProcess:
    """A worker: a server process, and how many sequences it has."""

    def __init__(self, number: int, cfg: Config, paths: list[str], folder: Path):
        self.number, self.cfg, self.paths = number, cfg, paths
        self.socket = folder / f"worker-{number}"
        self.process: Any = None
        self.told: Any = None
        """The process that was already told to end."""
        self.ready = False
        self.load = 0
        """Sequences it is working on."""
        self.restarts = -1
        self.is_over = False
        self.on_ready: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.restarts += 1
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve_alone, args=(self.cfg, self.paths, str(self.socket)), name=f"adlm-worker-{self.number}"
        )
        self.process.start()

    async def mind(self) -> None:
        """Start the process, report when it is ready, and restart it whenever it dies."""
        pause = 0.0
        while not self.is_over:
            await asyncio.sleep(pause)
            began, loaded = time.monotonic(), False
            await asyncio.to_thread(self.start)
            while self.process.is_alive():
                if not (self.ready or self.is_over) and await self.answers():
                    self.ready, pause = True, 0.0
                    if not loaded:
                        log.info("worker %d: ready after %.1f s", self.number, time.monotonic() - began)
                    loaded = True
                    self.on_ready()
                await asyncio.sleep(LOOK)
            if not loaded:
                pause = min(SLOWEST_RESTART, max(1.0, 2 * pause))
            self.ready = False
            if not self.is_over:
                log.warning("worker %d: %s; starting it again", self.number, ending(self.process.exitcode))

    async def answers(self) -> bool:
        """Whether its models are loaded."""
        with contextlib.suppress(OSError, WorkerGone, asyncio.TimeoutError):
            async with asyncio.timeout(SOON_ENOUGH):
                async for part in exchange(self.socket, "GET", b"/readyz", [(b"host", b"localhost")], b""):
                    return isinstance(part, AnswerHead) and part.status == 200
        return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process for good. SIGTERM is sent only once: a second one would end it at once."""
        self.is_over, self.ready = True, False
        again, self.told = number == signal.SIGTERM and self.told is self.process, self.process
        if self.process is not None and self.process.is_alive() and not again:
            os.kill(self.process.pid, number)


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"ended with status {code}"


def serve_alone(cfg: Config, paths: list[str], place: str) -> None:
    """Run a worker: an ordinary server on a Unix socket. It ignores Ctrl-C, which the front handles, and ends with the
    front."""
    from adlm.serving import serve_models

    getattr(os, "setsid")()  # noqa: B009  # workers need sockets of the file system, which Windows lacks too
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(place)
    listener.listen(2048)
    serve_models(cfg, paths, listener)


async def exchange(
    place: Path, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> AsyncGenerator[AnswerHead | bytes, None]:
    """Send a request to a worker; yield the head of its answer, then the parts of the body as they arrive."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(place))
    except OSError as error:
        raise WorkerGone(str(error)) from None
    connection = h11.Connection(h11.CLIENT)
    own = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    kept = [(name, value) for name, value in headers if name not in HOP and name not in (b"content-length", b"expect")]
    try:
        writer.write(connection.send(h11.Request(method=method, target=target, headers=kept + own)) or b"")
        writer.write(connection.send(h11.Data(data=body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Response):
                answered = [(name, value) for name, value in event.headers.raw_items() if name.lower() not in HOP]
                yield AnswerHead(event.status_code, [(name.lower(), value) for name, value in answered])
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise WorkerGone("it closed the connection")
    except (OSError, h11.RemoteProtocolError) as error:
        raise WorkerGone(str(error)) from None
    finally:
        writer.close()


def sequences_of(body: bytes) -> int:
    """How many sequences a body seems to request; the worker checks the body."""
    try:
        found = json.loads(body)
        n, prompt = found.get("n") or 1, found.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return max(1, int(n)) * prompts
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1


class Front:
    """The workers and their common queue, with the attributes of `Service` that the guard and the server use."""

    def __init__(self, cfg: ServeConfig, slots: int, workers: list[WorkerProcess]):
        """`slots`: sequences that a worker has room for."""
        self.cfg, self.slots, self.workers, self.metrics = cfg, slots, workers, ServerMetrics()
        self.draining = False
        self.routes = router.routes
        """The workers' routes, to label requests."""
        self.active: set[Any] = set()
        self.waiting: deque[tuple[int, asyncio.Future[WorkerProcess]]] = deque()
        count = {"adlm_workers": lambda: len(workers), "adlm_workers_ready": lambda: sum(w.ready for w in workers)}
        count["adlm_worker_restarts"] = lambda: sum(max(0, w.restarts) for w in workers)
        helps = ("Worker processes.", "Of them those that take requests.", "How often one was started again.")
        for (name, read), help in zip(count.items(), helps):
            self.metrics.gauge(name, help, (), lambda read=read: [((), read())])
        self.metrics.gauge(
            "adlm_front_queue", "Sequences that wait for a worker.", (), lambda: [((), sum(n for n, _ in self.waiting))]
        )

    @property
    def ready(self) -> bool:
        return not self.draining and any(w.ready for w in self.workers)

    def close(self, scope: Scope) -> None:
        """Do nothing: a request that has ended leaves nothing to release here."""

    def cut_off(self) -> None:
        """Tell all waiting clients that the server shuts down: those in the queue by an error, and those of running
        requests by ending the workers."""
        for _, future in self.waiting:
            if not future.done():
                future.set_exception(self.lost())
        for worker in self.workers:
            worker.stop(KILL if worker.load else signal.SIGTERM)

    def lost(self) -> Problem:
        """The error for a request whose worker is gone."""
        if self.draining:
            return Problem(503, "the server shut down before this request was finished", "shutting_down")
        message = "the worker that had this request died; send it again"
        return Problem(503, message, "worker_died", headers={"Retry-After": "1"})

    # The queue

    def free_worker(self, sequences: int) -> WorkerProcess | None:
        """The least busy worker that has room. An idle worker has room for anything, and every worker for requests that
        draw nothing (the page, the list of models)."""
        able = [w for w in self.workers if w.ready and (not w.load * sequences or w.load + sequences <= self.slots)]
        return min(able, key=lambda w: (w.load, w.restarts), default=None)

    async def acquire(self, sequences: int, again: bool) -> WorkerProcess:
        """A worker, as soon as it is this request's turn. `again`: the request waited before and lost its worker."""
        if not any(w.ready for w in self.workers):
            if again:
                raise self.lost()
            raise Problem(503, "no worker is ready", "not_ready", headers={"Retry-After": "5"})
        worker = None if self.waiting and sequences and not again else self.free_worker(sequences)
        if worker is None:
            if not again and sum(n for n, _ in self.waiting) + sequences > self.cfg.queue:
                message = f"the queue is full (serve.queue={self.cfg.queue}); try again later"
                raise Problem(429, message, "queue_full", headers={"Retry-After": "1"})
            place: tuple[int, asyncio.Future[WorkerProcess]] = (sequences, asyncio.get_running_loop().create_future())
            self.waiting.appendleft(place) if again else self.waiting.append(place)
            try:
                return await place[1]
            except asyncio.CancelledError:
                if place in self.waiting:
                    self.waiting.remove(place)
                elif not place[1].cancelled() and place[1].exception() is None:
                    self.release(place[1].result(), sequences)
                raise
        worker.load += sequences
        return worker

    def release(self, worker: WorkerProcess, sequences: int) -> None:
        worker.load -= sequences
        self.dispatch()

    def dispatch(self) -> None:
        """Give workers to the requests that have waited longest."""
        while self.waiting:
            sequences, future = self.waiting[0]
            worker = self.free_worker(sequences)
            if worker is None:
                return
            self.waiting.popleft()
            if not future.done():
                worker.load += sequences
                future.set_result(worker)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer questions about this server; forward all other requests to a worker."""
        if scope["type"] == "lifespan":
            await self.live(receive, send)
            return
        body = (await receive()).get("body", b"")
        path = scope["path"]
        try:
            if path == "/healthz":
                await respond(send, AnswerHead(200, [(b"content-type", b"text/plain; charset=utf-8")]), b"ok\n")
            elif path == "/readyz":
                ready = self.ready
                head = AnswerHead(200 if ready else 503, [(b"content-type", b"text/plain; charset=utf-8")])
                await respond(send, head, b"ready\n" if ready else b"not ready\n")
            elif path == "/metrics":
                head = AnswerHead(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])
                await respond(send, head, (await self.all_metrics(scope)).encode())
            else:
                await self.forward(scope, body, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Forward a request to a worker, and to another one if the first dies before anything was sent."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        sequences = sequences_of(body) if scope["method"] == "POST" else 0
        end = asyncio.get_running_loop().time() + self.cfg.timeout
        for attempt in range(ATTEMPTS):
            worker = await within(self.cfg.timeout, end, self.acquire(sequences, again=attempt > 0))
            began = False
            try:
                async with contextlib.aclosing(
                    exchange(worker.socket, scope["method"], target, scope["headers"], body)
                ) as parts:
                    head = None
                    while (part := await within(self.cfg.timeout, end + LATE, anext(parts, None))) is not None:
                        if isinstance(part, AnswerHead):
                            head = part
                            continue
                        if not began:  # after a head alone, another worker can still answer
                            assert head is not None
                            await send_head(send, head)
                            began = True
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    assert head is not None
                    if not began:
                        await send_head(send, head)
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
            except WorkerGone as error:
                log.warning("worker %d lost a request to %s: %s", worker.number, scope["path"], error)
                if began:
                    await self.end_stream(head, self.lost(), send)
                    return
                # A killed process closes its connections before it is seen as dead. Until the worker answers again, it
                # gets no requests.
                worker.ready = False
            except Problem as problem:  # it hangs, so it gets no requests, either
                log.warning("worker %d does not answer a request to %s", worker.number, scope["path"])
                worker.ready = False
                if not began:
                    raise
                await self.end_stream(head, problem, send)
                return
            finally:
                self.release(worker, sequences)
            if asyncio.get_running_loop().time() > end:
                raise out_of_time(self.cfg.timeout)
        raise self.lost()

    async def end_stream(self, head: AnswerHead | None, problem: Problem, send: Send) -> None:
        """End an answer that has begun: with an error event if it is an event stream; else by closing the connection
        early, so that no client takes it for a complete answer."""
        if head is not None and dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            event = b"event: error\ndata: " + bytes(problem.response().body) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        raise WorkerGone("an answer was cut short")

    async def all_metrics(self, scope: Scope) -> str:
        """The metrics of the front, and the sums of the workers' metrics. A worker that hangs is left out."""
        texts = []
        for worker in [w for w in self.workers if w.ready]:
            with contextlib.suppress(WorkerGone, asyncio.TimeoutError):
                async with asyncio.timeout(SOON_ENOUGH):
                    parts = [p async for p in exchange(worker.socket, "GET", b"/metrics", scope["headers"], b"")]
                texts.append(b"".join(p for p in parts if isinstance(p, bytes)).decode())
        return merged(self.metrics.text(), texts)

    async def live(self, receive: Receive, send: Send) -> None:
        """Run the workers from the start to the end of the server."""
        await receive()
        for worker in self.workers:
            worker.on_ready = self.dispatch
        tasks = [asyncio.create_task(worker.mind()) for worker in self.workers]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.stop_workers)
        await send({"type": "lifespan.shutdown.complete"})

    def stop_workers(self) -> None:
        for worker in self.workers:
            worker.stop()
        end = time.monotonic() + STOPPING
        for worker in [w for w in self.workers if w.process is not None]:
            worker.process.join(max(0.0, end - time.monotonic()))
            worker.stop(KILL)


async def send_head(send: Send, head: AnswerHead) -> None:
    await send({"type": "http.response.start", "status": head.status, "headers": head.headers})


async def respond(send: Send, head: AnswerHead, body: bytes) -> None:
    await send_head(send, head)
    await send({"type": "http.response.body", "body": body, "more_body": False})


def guarded(front: Front, key: str) -> ASGIApp:
    """The front behind the guard. CORS comes before the guard, as in a server of one process: a browser asks without a
    key whether it may send one."""
    guard = RequestGuard(front, front, key)  # type: ignore[arg-type]
    return CORSMiddleware(guard, **other_origins(front.cfg.cors)) if front.cfg.cors else guard


def run_front(cfg: Config, paths: list[str], listener: socket.socket, devices: list[str], key: str) -> int:
    """Serve with one worker for each of `devices` until told to stop; return how many requests were answered."""
    theirs = replace(cfg, serve=replace(cfg.serve, cors=""))  # the front handles CORS
    with tempfile.TemporaryDirectory(prefix="adlm-") as folder:
        workers = [
            WorkerProcess(i, replace(theirs, train=replace(cfg.train, device=device)), paths, Path(folder))
            for i, device in enumerate(devices)
        ]
        front = Front(cfg.serve, cfg.sampling.batch_size, workers)
        server = make_server(guarded(front, key), front)  # type: ignore[arg-type]
        server.run(sockets=[listener])
        front.stop_workers()
        return server.server_state.total_requests

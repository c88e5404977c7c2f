"""The HTTP server on top of the engine: many requests, any mixture of samplers and steps, one network call at a time.

This file is `adlm serve` itself: load the models, print their addresses, answer until told to stop.

server.py   uvicorn with a drain on SIGTERM; the guard of every request: host name, key, size, slow and lost clients
app.py      the routes, and errors as answers
bodies.py   bodies of requests (sampling settings generated from the schema), and errors
answers.py  bodies of answers; bytes of tokens as characters
service.py  the served models with their defaults and limits; bodies become requests of the engine
jobs.py     running requests, how they share the network, and their metrics
worker.py   the thread that owns an engine
front.py    several processes behind one port: a common queue, and requests of a worker that died
frames.py   canvases as server-sent events, and the anchor network's guesses
openai.py   OpenAI's completions and chat completions
static/     the page
"""

import atexit
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.errors import require
from adlm.schema import Config

if TYPE_CHECKING:
    from adlm.serving.service import Service

log = logging.getLogger("adlm.serving")


def run_serve(cfg: Config, args: list[str] | None = None) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; return how many requests were answered."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    room = cfg.sampling.batch_size + cfg.serve.queue
    require(
        cfg.serve.max_n <= room,
        f"serve.max_n={cfg.serve.max_n} texts could never be accepted: sampling.batch_size + serve.queue is {room}",
    )
    require(
        cfg.serve.max_length != 1,
        "serve.max_length=1 has room for the begin token alone: give at least 2, or 0 for the model's length",
    )
    print("adlm serve: loading PyTorch", flush=True)
    # imported here and below: these imports take seconds, so the lines on the terminal come first
    from adlm.io.load import BOX_NAME
    from adlm.serving.server import is_loopback
    from adlm.serving.service import check_defaults

    check_defaults(cfg.sampling, cfg.serve.max_steps)
    paths = list(args or ()) or [cfg.eval.checkpoint or BOX_NAME]
    devices = worker_devices(cfg)
    listener = listen(cfg.serve.host, cfg.serve.port)  # first: a port in use must be reported before models are loaded
    key = api_key(cfg)
    if not key and not is_loopback(cfg.serve.host):
        log.warning(
            "serve.host=%s and no key: whoever reaches this machine can use it; set ADLM_API_KEY", cfg.serve.host
        )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    said = f"adlm serves on http://{shown}:{port} (key: {'required' if key else 'none'})"
    if len(devices) == 1:
        return {"requests": serve_models(cfg, paths, listener, said)}
    from adlm.serving.front import run_front

    for path in paths:
        locate_model(path)  # report an error once here, not in every worker
    print(f"{said}, with {len(devices)} workers on {', '.join(devices)}", flush=True)
    return {"requests": run_front(cfg, paths, listener, devices, key)}


def api_key(cfg: Config) -> str:
    return cfg.serve.api_key or os.environ.get("ADLM_API_KEY", "")


def worker_devices(cfg: Config) -> list[str]:
    """The device of each worker: the available GPUs in turn, or the configured device."""
    import torch

    several = cfg.train.device in ("auto", "cuda") and torch.cuda.is_available()
    gpus = torch.cuda.device_count() if several else 1
    workers = cfg.serve.workers or gpus
    return [f"cuda:{i % gpus}" if several and workers > 1 else cfg.train.device for i in range(workers)]


def locate_model(path: str) -> None:
    from adlm.io.load import locate

    require(locate(path).exists(), f"there is no model at {path!r}")


def serve_models(cfg: Config, paths: list[str], listener: socket.socket, said: str = "") -> int:
    """Load the models and answer requests in this process until told to stop; return how many were answered."""
    import torch

    from adlm.api import LanguageModel
    from adlm.api.language_model import load_any
    from adlm.serving.app import make_app
    from adlm.serving.server import make_server
    from adlm.serving.service import Service, check_sampler

    if cfg.train.num_threads:
        torch.set_num_threads(cfg.train.num_threads)
    options = (cfg.train.device, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root)
    models = {}
    for name, path in names(paths).items():
        print(f"{name}: loading {path}", flush=True)
        models[name] = LanguageModel(load_any(path, *options))
        print(f"{name}: {models[name]!r} on {models[name].device}", flush=True)
    check_sampler(cfg.sampling.sampler, models)
    service = Service(models, cfg.serve, cfg.sampling)
    server = make_server(make_app(service, api_key(cfg)), service)
    if said:
        print(said, flush=True)
    server.run(sockets=[listener])
    service.stop_workers(0.1)  # a second signal ends the server without stopping them
    if service.undone:
        log.warning("left undone, inside a step: %s", "; ".join(service.undone))
        atexit.register(leave, service)
    return server.server_state.total_requests


def leave(service: "Service") -> None:
    """End the process at once if a thread is still inside torch: Python could only end such a thread by an abort."""
    if service.undone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def names(paths: list[str]) -> dict[str, str]:
    """Id -> path of each model: the last meaningful part of the path, made unique. A name that is not a path (smollm2,
    owner/model@revision) is its own id."""
    from adlm.io.load import BOX_NAME, locate
    from adlm.io.paths import path_of

    found: dict[str, str] = {}
    for path in paths:
        named = path not in ("", BOX_NAME) and not path_of(path).exists()
        place = Path(path.partition("@")[0]) if named else locate(path).resolve()
        parts = [p for p in place.parts if p not in ("export", "checkpoints")]
        name = base = Path(parts[-1]).stem if path.endswith((".ckpt", ".gguf")) else parts[-1]
        number = 1
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found[name] = path
    return found


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or a one-line error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # connections made while models are loading wait
    except OSError as error:
        listener.close()
        raise ValueError(f"serve.host={host} serve.port={port}: {error.strerror or error}") from None
    return listener

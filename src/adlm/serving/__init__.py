"""HTTP on the engine: many requests, any mixture of samplers and steps, one network call at a time.

Here is `adlm serve` itself: load the models, say where they are, answer until told to stop.

server.py   uvicorn with a drain on SIGTERM; the guard of every request: name, key, size, slow and lost clients
app.py      the routes, and errors as answers
bodies.py   bodies of requests (sampling settings generated from the schema) and of answers
service.py  what is served: a checkpoint, its defaults and limits; bodies become requests of the engine
jobs.py     requests under way, and how they share the network
worker.py   the thread that owns an engine
characters.py  bytes of tokens as characters
frames.py   canvases as server-sent events, and the anchor network's guesses
openai.py   OpenAI's completions and chat completions
metrics.py  counters in Prometheus' text format
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
    """Serve until SIGTERM or Ctrl-C; returns how many requests were answered."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    require(
        cfg.serve.max_n <= cfg.serve.slots + cfg.serve.queue,
        f"serve.max_n={cfg.serve.max_n} texts could never be accepted: serve.slots + serve.queue is"
        f" {cfg.serve.slots + cfg.serve.queue}",
    )
    print("adlm serve: loading PyTorch", flush=True)
    import torch  # here and below: seconds, in which somebody looks at the terminal

    from adlm.api import LanguageModel
    from adlm.api.language_model import load_any
    from adlm.io.load import BOX_NAME
    from adlm.serving.app import make_app
    from adlm.serving.server import is_loopback, make_server
    from adlm.serving.service import Service, check_defaults

    check_defaults(cfg.sampling, cfg.serve.max_steps)
    if cfg.train.num_threads:
        torch.set_num_threads(cfg.train.num_threads)
    paths = list(args or ()) or [cfg.eval.checkpoint or BOX_NAME]
    listener = listen(cfg.serve.host, cfg.serve.port)  # first: a port in use must not cost the loading of models
    options = (cfg.train.device, cfg.eval.ema, cfg.data.tokenizer, cfg.data.root)
    models = {}
    for name, path in names(paths).items():
        print(f"{name}: loading {path}", flush=True)
        models[name] = LanguageModel(load_any(path, *options))
        print(f"{name}: {models[name]!r} on {models[name].device}", flush=True)
    service = Service(models, cfg.serve, cfg.sampling)
    key = cfg.serve.api_key or os.environ.get("ADLM_API_KEY", "")
    server = make_server(make_app(service, key), service)
    if not key and not is_loopback(cfg.serve.host):
        log.warning(
            "serve.host=%s and no key: whoever reaches this machine can use it; set ADLM_API_KEY", cfg.serve.host
        )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"adlm serves on http://{shown}:{port} (key: {'required' if key else 'none'})", flush=True)
    server.run(sockets=[listener])
    service.stop_workers(0.1)  # after a second signal nobody has told them
    if service.undone:
        log.warning("left undone, inside a step: %s", "; ".join(service.undone))
        atexit.register(leave, service)
    return {"requests": server.server_state.total_requests}


def leave(service: "Service") -> None:
    """End the process at once if a thread is still inside torch, where Python could only end it by an abort."""
    if service.undone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def names(paths: list[str]) -> dict[str, str]:
    """Id -> path of each model: the last part of the path that says something, made unique."""
    from adlm.io.load import locate

    found: dict[str, str] = {}
    for path in paths:
        parts = [p for p in locate(path).resolve().parts if p not in ("export", "checkpoints")]
        name = base = Path(parts[-1]).stem if path.endswith(".ckpt") else parts[-1]
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
        listener.listen(2048)  # who comes while models are loading waits
    except OSError as error:
        listener.close()
        raise ValueError(f"serve.host={host} serve.port={port}: {error.strerror or error}") from None
    return listener

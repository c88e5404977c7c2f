"""A real server in a thread, with a tiny model that writes small letters: what the tests of serving talk to."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny import tiny_model

from adlm.api import LanguageModel, load
from adlm.data.tokenizers import raw_bytes
from adlm.io.export import describe, save_folder
from adlm.schema import Config, DataConfig, SamplingConfig, ServeConfig

# Thousands of evaluations: a request that is still running whenever a test looks
LONG = {"sampler": "remdm-cap", "steps": 4000, "eta": 0.9}


def readable_model(folder: Path, **options) -> Path:
    """An untrained model over bytes that mostly draws letters and spaces, sometimes an end of text; exported."""
    tokenizer = raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, **{"length": 32, **options})
    letters = [tokenizer.encode(c)[0] for c in "abcdefghijklmnopqrstuvwxyz "]
    with torch.no_grad():
        for head in (model.head, model.anchor_head):
            if head is not None:
                head.bias[[*letters, tokenizer.eos_id]] += 12.0
        model.head.bias[letters[-1]] += 2.0
        model.head.bias[tokenizer.eos_id] -= 1.0
    cfg = Config(algo="test", model=model.config, data=DataConfig(name="none", tokenizer="bytes"))
    if model.config.causal:
        cfg.objective.name = "autoregressive"
    save_folder(folder, model.state_dict(), tokenizer, describe(cfg, tokenizer, step=3))
    return folder


@contextlib.contextmanager
def serving(
    models: dict[str, LanguageModel],
    key: str = "",
    wait: bool = True,
    sampling: SamplingConfig = SamplingConfig(steps=8),  # noqa: B008
    slots: int = 4,
    **settings,
) -> Iterator[SimpleNamespace]:
    """Serve from a thread, ready unless not waited for. `settings` are fields of ServeConfig."""
    from adlm.serving.app import make_app
    from adlm.serving.server import make_server
    from adlm.serving.service import Service

    cfg = ServeConfig(**{"port": 0, "grace": 5.0, **settings})
    service = Service(models, cfg, replace(sampling, batch_size=slots))
    server = make_server(make_app(service, key), service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started and (service.ready or not wait))
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, service=service, server=server, thread=thread)
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def load_tiny(folder: Path, **options) -> LanguageModel:
    return load(readable_model(folder, **options), "cpu")


def worker(server: SimpleNamespace):
    return server.service.models["tiny"].worker


def idle(server: SimpleNamespace) -> Callable[[], bool]:
    return lambda: worker(server).taken == 0 and worker(server).in_use == 0 and not server.service.jobs

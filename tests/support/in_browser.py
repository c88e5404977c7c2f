"""The page in a real browser: the server behind it, and what a reader does with it.

Whatever imports this is skipped where the packages for it are missing.
"""

import contextlib
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

pytest.importorskip("fastapi", reason="the server needs the extra 'serve'")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra 'test')")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"
)
TEXT = "the old cat sat on the mat"


def readable_model(folder):
    """A tiny untrained model over bytes that draws small letters and spaces only, as an exported folder."""
    from adlm.data.tokenizers import raw_bytes
    from adlm.io.export import describe, save_folder
    from adlm.schema import Config, DataConfig

    tokenizer = raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, length=32)
    letters = [tokenizer.encode(c)[0] for c in "abcdefghijklmnopqrstuvwxyz "]
    with torch.no_grad():
        for head in (model.head, model.anchor_head):
            likely = head.bias[letters] + 30.0
            head.bias[letters] = likely
        model.head.bias[letters[-1]] += 2.0
    cfg = Config(algo="test", model=model.config, data=DataConfig(name="none", tokenizer="bytes"))
    save_folder(folder, model.state_dict(), tokenizer, describe(cfg, tokenizer, step=3))
    return folder


AXE = Path(__file__).parents[2] / ".venv/npm/node_modules/axe-core/axe.min.js"
"""Put there by .ci/run, or by `npm install --no-save --prefix .venv/npm axe-core@4`."""
STATIC = Path(__file__).parents[2] / "src/adlm/serving/static"


@contextlib.contextmanager
def serving(models, port=0, key="", slots=32, **settings):
    """A server in a thread; ends as if killed: connections are cut."""
    from adlm.schema import SamplingConfig, ServeConfig
    from adlm.serving.app import make_app
    from adlm.serving.server import make_server
    from adlm.serving.service import Service

    sampling = SamplingConfig(steps=16, top_p=0.9, batch_size=slots)
    service = Service(models, ServeConfig(port=port, **settings), sampling)
    uvicorn = make_server(make_app(service, key), service)
    thread = threading.Thread(target=uvicorn.run, daemon=True)
    thread.start()
    wait_until(lambda: uvicorn.started and service.ready)
    port = uvicorn.servers[0].sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, service=service)
    finally:
        uvicorn.should_exit = uvicorn.force_exit = True
        thread.join(20)


WATCH_SHIFTS = """window.shifts = [];
new PerformanceObserver((list) => {
    for (const shift of list.getEntries()) if (!shift.hadRecentInput) shifts.push(shift.value);
}).observe({ type: "layout-shift", buffered: true });"""


def script(name):
    return (Path(__file__).parent / "page" / name).read_text()


def wait_until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def settings(page, **values):
    """Fill in the form; a seed that is given stays."""
    page.locator("#settings").evaluate("box => { box.open = true; }")
    if "seed" in values:
        page.uncheck("#vary")
    for name, value in values.items():
        field = page.locator(f"[name={name}]")
        if field.evaluate("f => f.tagName") == "SELECT":
            field.select_option(value)
        elif isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(str(value))


def finished(page, lanes=1):
    """The run has ended and the playhead stands at its last frame."""
    page.wait_for_function("() => document.getElementById('announce').textContent.startsWith('Finished')")
    assert page.locator(".copy:not([hidden])").count() == lanes
    scrub(page, last_frame(page))


def written(page, lane=0):
    """What stands on the canvas, without begin and end tokens; a mask is one underscore. Lines are broken at spaces,
    which stay behind."""
    read = """canvas => [...canvas.children].map(line => [...line.children].map(s =>
        s.querySelector(".hole") ? "_" : s.querySelector(".special") ? "" : s.textContent).join("")).join("|")"""
    return page.locator(f".lane{lane} .canvas").evaluate(read)


def same(shown, text):
    """Whether the canvas shows this text, wherever its lines are broken."""
    return shown.replace("|", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


def scrub(page, k):
    page.locator("#slider").evaluate(
        "(s, k) => { s.value = k; s.dispatchEvent(new Event('input', { bubbles: true })); }", k
    )


def last_frame(page):
    return int(page.locator("#slider").get_attribute("max"))


def generate(page, **values):
    settings(page, **values)
    page.click("#generate")
    finished(page, 2 if values.get("compare") else 1)

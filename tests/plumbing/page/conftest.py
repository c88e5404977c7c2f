"""A browser and a server of a tiny model, for the tests of the page.

What needs optional packages is imported in the fixtures: a test module without them is skipped, a conftest cannot be.
Every test that visits the page also fails on an error in the console, a blocked resource or a request to another host.
"""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from in_browser import readable_model

    return readable_model(tmp_path_factory.mktemp("page") / "export")


@pytest.fixture(scope="module")
def server(folder):
    """A tiny model under two names, served from a thread; `.lm` is the library's view of it."""
    from in_browser import serving

    from adlm.api import load

    with serving({name: load(folder, "cpu") for name in ("tiny", "other")}, slots=4) as running:
        running.lm = load(folder, "cpu")
        yield running


@pytest.fixture(scope="module")
def browser():
    from in_browser import CHROMIUM, sync_api

    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, server):
    """Open the page: visit(fragment, **options of the browser context). Says at the end whether anything was amiss."""
    from in_browser import WATCH_SHIFTS

    amiss, contexts = [], []

    def open_page(fragment="", expect=(), url=server.url, ready=True, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.add_init_script(WATCH_SHIFTS)

        def console(message):
            if message.type in ("error", "warning") and not any(text in message.text for text in expect):
                amiss.append(message.text)

        page.on("console", console)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("request", lambda request: request.url.startswith((url, "blob:")) or amiss.append(request.url))
        page.goto(url + "/" + fragment)
        if ready:
            page.wait_for_selector("#generate:enabled", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not amiss

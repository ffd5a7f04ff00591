"""The browser of the tests of the viewer's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.unit.viewer.browsers import CHROMIUM, is_own, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def view() -> Iterator[Callable[..., str]]:
    """Serve runs until the page is closed, which asks for what is new; return the URL."""
    with ExitStack() as servers:
        yield lambda *runs: servers.enter_context(contextmanager(served)(*runs))


@pytest.fixture
def page(browser: Browser, view: object) -> Iterator[Page]:
    """A page that fails the test if a script fails, or if anything but the viewer is asked for."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page, faults = context.new_page(), list[str]()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: faults.append(request.url) if not is_own(request.url) else None)
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    yield page
    context.close()
    assert faults == []

"""Debian's Chromium, driven by Playwright, with checks for forbidden requests and errors in each page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from page_kit import PASSWORD

CHROMIUM = Path("/usr/bin/chromium")
#: Generous, for a busy machine.
WAIT_MS = 60_000
#: The message of the page after a click right after an update.
JUST_CHANGED = "The page has just changed. Check it again."
_MOST_CLICKS = 10


def why_not() -> str | None:
    """Return the reason why no browser can run, or None."""
    if find_spec("playwright") is None:
        return "the Python package playwright is not installed"
    return None if CHROMIUM.exists() else f"there is no {CHROMIUM}"


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser, or skip the test without one."""
    why = why_not()
    if why is not None:
        pytest.skip(why)
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # where it is

    with sync_playwright() as playwright:
        # No sandbox, because CI runs as root. The browser opens only pages of the tests.
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A user's browser window. At the end, it checks for requests to other hosts and violations of the policy."""

    def __init__(self, browser: Any, origin: str, **options: Any) -> None:
        self.origin = origin
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self._foreign: list[str] = []
        self._complaints: list[str] = []
        self.page.on("request", self._note_request)
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))

    def sign_in(self, name: str, password: str = PASSWORD) -> Watched:
        """Sign in, and wait for the first page."""
        self.go("/login")
        self.page.fill("[name=name]", name)
        self.page.fill("[name=password]", password)
        self.page.click("main button")
        self.page.wait_for_url(f"{self.origin}/")
        return self

    def go(self, path: str) -> None:
        """Open the page at *path*."""
        self.page.goto(f"{self.origin}{path}")

    def is_live(self) -> None:
        """Wait until the page receives live updates and has applied the earlier ones."""
        self.page.wait_for_selector("#live[data-state=live]")

    def row(self, key: str) -> Any:
        """Return the row of the event with that key."""
        return self.page.locator(f"#event-{key}")

    def event(self) -> Any:
        """Return the content of the event page."""
        return self.page.locator("#whole")

    def press(self, row: Any, verdict: str, *, reason: str = "") -> None:
        """Fill in the reason and press the button, and retry if the page has just changed."""
        for _ in range(_MOST_CLICKS):
            self.page.wait_for_timeout(1_000)
            row.locator("[name=reason]").fill(reason)
            row.locator(f"button[value={verdict}]").click()
            if not self.page.locator("#live", has_text=JUST_CHANGED).is_visible():
                return
        raise AssertionError(f"the page changed under each of {_MOST_CLICKS} clicks")

    def close(self) -> None:
        """Close the window, and check for violations. A failed test prints the content of the page."""
        if self.page.url.startswith(self.origin):
            sys.stdout.write(f"{self.page.url}\n{self.page.locator('body').inner_text()}\n")
        self.context.close()
        assert self._foreign == []
        assert self._complaints == []

    def _note_request(self, request: Any) -> None:
        if f"{urlsplit(request.url).scheme}://{urlsplit(request.url).netloc}" != self.origin:
            self._foreign.append(request.url)

    def _note_message(self, message: Any) -> None:
        # Errors of a stream that ends with its session, or of a connection that a stop closes, are expected.
        if message.type in {"error", "warning"} and "Content Security Policy" in message.text:
            self._complaints.append(message.text)

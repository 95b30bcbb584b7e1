"""Pages in a real browser, whose errors and requests are recorded.

The environment variable CHROMIUM names the program; with it, a missing browser is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ATTACKS = (
    "<img src=x onerror='window.attacked = 1'>",
    "<script>window.attacked = 1<_script>",
    "javascript:window.attacked=1",
    "a\u202eb",
    "a\x1b[31mb",
    os.fsdecode(b"a\xff"),
)
"""Names from strangers"""
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


def found_browser() -> str:
    named = os.environ.get("CHROMIUM")
    if named:
        program = shutil.which(named)
        assert program is not None, f"CHROMIUM={named}: there is no such program"
        return program
    programs = [program for program in map(shutil.which, PROGRAMS) if program is not None]
    if not programs:
        pytest.skip("no Chromium is installed")
    return programs[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    program = found_browser()
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=sandbox)
        yield started
        started.close()


class Watched:
    """A page whose errors and requests are recorded."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.add_init_script(WATCH)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def check(self) -> None:
        """Check that there was no error, and that the page is not attacked."""
        assert self.problems == []
        assert self.page.evaluate("window.violations") == []
        assert self.page.evaluate("window.attacked") is None


def opened(browser: Any, address: str, **options: Any) -> Watched:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    watched.page.goto(address)
    return watched

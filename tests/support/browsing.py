"""A real browser for the pages, and a record of the errors in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium without a window. Tests are skipped if it is not installed. CI installs it."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium to look at the pages with: apt-get install chromium")
    expect.set_options(timeout=20_000)  # the machine may be busy with other tests
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; the pages are our own.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """The errors of a page: messages of scripts, requests to other hosts, error statuses."""

    origin: str
    faults: list[str] = field(default_factory=list)

    def over(self, page: Page) -> Page:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("request", self._request)
        page.on("response", self._response)
        return page

    def forgive(self, *statuses: int) -> None:
        """Ignore these statuses, which the test expects, also in the browser's console."""
        marks = [f"{status}" for status in statuses]
        self.faults = [
            fault for fault in self.faults if not any(f" {m}" in f" {fault}" for m in marks)
        ]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self.origin):
            self.faults.append(f"another host: {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")


IMPERFECT = (Path(__file__).parent / "imperfect.js").read_text()
"""A script that lists problems for users of keyboards and screen readers, and for weak eyes."""

LINKS = "() => [...document.querySelectorAll('a[href]')].map((a) => a.href.baseVal ?? a.href)"
"""A script that lists the targets of all links in a page, including those in pictures."""

FOCUSABLE = """() => [...document.querySelectorAll(
    "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']")]
  .filter((e) => e.checkVisibility())"""
"""A script that lists the elements that the tabulator must reach, in reading order."""

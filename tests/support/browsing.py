"""A real browser on the pages, and a watch over what it meets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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
    """Chromium without a window; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    expect.set_options(timeout=20_000)  # the machine may be busy with other tests
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; the pages are our own.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """What went wrong in a page: messages of scripts, requests to other hosts, bad answers."""

    origin: str
    faults: list[str] = field(default_factory=list)

    def over(self, page: Page) -> Page:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("request", self._request)
        page.on("response", self._response)
        return page

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self.origin):
            self.faults.append(f"another host: {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")


IMPERFECT = """() => {
  const said = (e) => (e.getAttribute("aria-label") || e.textContent || e.value || "").trim();
  const found = [];
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  for (const e of document.querySelectorAll("input:not([type=hidden]), select, progress"))
    if (!e.labels.length && !e.ariaLabel) found.push(`no label: ${e.outerHTML}`);
  for (const e of document.querySelectorAll("a, button"))
    if (!said(e)) found.push(`no text: ${e.outerHTML}`);
  for (const e of document.querySelectorAll("img:not([alt]), svg:not([aria-label])"))
    found.push(`no text: ${e.outerHTML.slice(0, 80)}`);
  for (const e of document.querySelectorAll("table"))
    if (!e.querySelector("thead th[scope=col]")) found.push("a table without headers");
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids))
    if (ids.filter((other) => other === id).length > 1) found.push(`twice: #${id}`);
  return found;
}"""
"""A script that lists what keyboards and screen readers would stumble over in a page."""

LINKS = "() => [...document.querySelectorAll('a[href]')].map((a) => a.href.baseVal ?? a.href)"
"""A script that lists where a page's links lead, those inside pictures too."""

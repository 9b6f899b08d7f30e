"""axe-core over an open page; it comes with the package axe-playwright-python."""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Page

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
FINDINGS = """async () => (await axe.run(
    { exclude: [["section.call:nth-of-type(n+4)"]] }, { resultTypes: ["violations"] })
  ).violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" | ").slice(0, 300)}`)"""
"""Of the calls in /docs the first three are looked at: all are alike, and there are 30."""


def findings(page: Page) -> list[str]:
    """What axe-core finds wrong with the page."""
    page.evaluate(AXE)
    found: list[str] = page.evaluate(FINDINGS)
    return found

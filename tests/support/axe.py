"""Runs axe-core, which the package axe-playwright-python includes, on an open page."""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Page

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
FINDINGS = """async () => (await axe.run(
    { exclude: [["section.call:nth-of-type(n+4)"]] }, { resultTypes: ["violations"] })
  ).violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" | ").slice(0, 300)}`)"""
"""Only the first three of the 30 calls in /docs are checked, because all are similar."""


def findings(page: Page) -> list[str]:
    """The violations that axe-core reports for the page."""
    page.evaluate(AXE)
    violations: list[str] = page.evaluate(FINDINGS)
    return violations

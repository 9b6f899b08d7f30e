"""axe-core has no findings on any page: on a wide light screen, and on a narrow dark one."""

from __future__ import annotations

from importlib.resources import files

import pytest
from playwright.sync_api import Browser, Page

from service.pages import addresses
from tests.support.browsing import Watch
from tests.support.content import HOPELESS, TRIED
from tests.support.serving import H200
from tests.support.site import Site

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
FINDINGS = """async () => (await axe.run(
    { exclude: [["section.call:nth-of-type(n+4)"]] }, { resultTypes: ["violations"] })
  ).violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" | ").slice(0, 300)}`)"""
"""Of the calls in /docs the first three are looked at: all are alike, and there are 30."""


def kinds_of_pages(site: Site) -> list[str]:
    return [
        "/ui",
        "/ui/problems?q=4096",
        addresses.problem(TRIED, H200.slug),
        addresses.problem(HOPELESS, H200.slug),
        "/ui/map?dtype=bf16&k=4096",
        "/ui/jobs",
        *(addresses.job(site.jobs[state]) for state in ("running", "failed", "waiting")),
        "/ui/devices",
        "/ui/tune",
        "/docs",
        "/ui/nowhere",
        "/ui/problems?q=nonsense",
    ]


def findings(page: Page, path: str) -> list[str]:
    page.goto(path)
    page.evaluate(AXE)
    found: list[str] = page.evaluate(FINDINGS)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing(
    site: Site, chromium: Browser, watch: Watch, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 860}
    with chromium.new_context(base_url=site.origin, viewport=size, color_scheme=scheme) as context:
        page = watch.over(context.new_page())
        assert {
            path: found for path in kinds_of_pages(site) if (found := findings(page, path))
        } == {}
    watch.forgive(404, 422)

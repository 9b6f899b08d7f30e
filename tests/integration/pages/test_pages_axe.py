"""axe-core has no findings on any page: on a wide light screen, and on a narrow dark one."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page

from service.pages import addresses
from tests.integration.pages.test_pages_reach import kinds_of_pages
from tests.support.axe import findings
from tests.support.browsing import Watch
from tests.support.site import Site


def every_page(site: Site) -> list[str]:
    waiting = addresses.job(site.jobs["waiting"])
    return [*kinds_of_pages(site), waiting, "/ui/nowhere", "/ui/problems?q=nonsense"]


def opened(page: Page, path: str) -> list[str]:
    page.goto(path)
    return findings(page)


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing(
    site: Site, chromium: Browser, watch: Watch, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 860}
    with chromium.new_context(base_url=site.origin, viewport=size, color_scheme=scheme) as context:
        page = watch.over(context.new_page())
        assert {path: found for path in every_page(site) if (found := opened(page, path))} == {}
    watch.forgive(404, 422)

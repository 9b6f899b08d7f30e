"""The service to look at and the browser to look with, anew for each file of tests.

Not for the whole session: while a browser is open, nothing else may run an event loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support import browsing
from tests.support.browsing import Watch
from tests.support.site import Site, open_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("pages")) as opened:
        yield opened


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing.browser() as opened:
        yield opened


@pytest.fixture
def watch(site: Site) -> Iterator[Watch]:
    watch = Watch(site.origin)
    yield watch
    assert watch.faults == []


@pytest.fixture
def page(site: Site, chromium: Browser, watch: Watch) -> Iterator[Page]:
    """A new page in a profile of its own, in which nothing may go wrong."""
    with chromium.new_context(base_url=site.origin) as context:
        yield watch.over(context.new_page())

"""A running service with all kinds of content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page

from service.settings import Settings
from tests.support.content import RECORDED, fill, jobs_in_every_state
from tests.support.recordings import record
from tests.support.serving import new_settings, running
from tuner.jobs import Queue
from tuner.store import Store


@dataclass(frozen=True, kw_only=True)
class Site:
    """The service, its database, and jobs in every state."""

    http: httpx.Client
    settings: Settings
    store: Store
    queue: Queue
    jobs: dict[str, str]

    @property
    def origin(self) -> str:
        return str(self.http.base_url).rstrip("/")


@contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """The service with a new database in `folder`, and a worker with a recorded problem."""
    settings = new_settings(folder, device="replay:h200")
    settings.sweeps.mkdir()
    record(settings.sweeps, RECORDED)
    with Store.open(settings.database) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.http.state.usable_gpu", lambda: None)
        fill(store)
        queue = Queue(store)
        jobs = jobs_in_every_state(queue)
        with running(settings) as http:
            yield Site(http=http, settings=settings, store=store, queue=queue, jobs=jobs)


def tab_to(page: Page, selector: str) -> None:
    """Press the tabulator until the element has the focus, like a user without a mouse."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    pytest.fail(f"the keyboard does not reach {selector}")

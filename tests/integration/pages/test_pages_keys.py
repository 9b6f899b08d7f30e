"""Who may do what on the pages, and text from elsewhere that would like to be a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from service.pages import addresses
from tests.support.axe import findings
from tests.support.browsing import IMPERFECT, Watch
from tests.support.content import TRIED
from tests.support.records import failed_trial, trial
from tests.support.records import winner as made_up
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, running, winner
from tests.support.site import Site, tab_to
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.keys import Scope

TRIED_PAGE = addresses.problem(TRIED, H200.slug)


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A service that asks for keys, one of each scope, and jobs that wait and that failed."""

    origin: str
    keys: dict[Scope, str]
    waiting: str
    failed: str


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    settings = new_settings(tmp_path_factory.mktemp("guarded"), require_keys=True)
    with Store.open(settings.database) as store:
        for us in (195.0, 190.0):
            store.promote(winner(TRIED, us=us))
        keys = {scope: store.keys.create(scope.value, scope)[1] for scope in Scope}
        queue = Queue(store)
        tunes = Scope.TUNE.value
        failed = queue.enqueue(Problem(m=2, n=8, k=8), ordered_by=tunes)[0].id
        leased = queue.lease("test:keys", [H200.slug])
        assert leased is not None
        leased.fail("nothing like it was recorded", retry=False)
        waiting = queue.enqueue(Problem(m=1, n=8, k=8), ordered_by=tunes)[0].id
    with running(settings) as http:
        origin = str(http.base_url).rstrip("/")
        yield Guarded(origin=origin, keys=keys, waiting=waiting, failed=failed)


@pytest.fixture
def visitor(guarded: Guarded, chromium: Browser) -> Iterator[Page]:
    with chromium.new_context(base_url=guarded.origin) as context:
        yield context.new_page()


def test_a_browser_logs_in_by_keyboard_and_goes_on_to_where_it_wanted(
    visitor: Page, guarded: Guarded
) -> None:
    visitor.goto("/ui/problems?q=4096")
    assert visitor.evaluate(IMPERFECT) == []
    assert findings(visitor) == []
    expect(visitor.get_by_label("API key")).to_be_focused()
    visitor.keyboard.type("gsk_wrong")
    visitor.keyboard.press("Enter")
    expect(visitor.get_by_role("alert")).to_contain_text("unknown")
    assert visitor.evaluate(IMPERFECT) == []
    visitor.keyboard.type(guarded.keys[Scope.READ])
    visitor.keyboard.press("Enter")
    expect(visitor.get_by_label("Search")).to_have_value("4096")
    expect(visitor.locator("header")).to_contain_text("key read")
    assert visitor.evaluate("document.cookie") == ""
    tab_to(visitor, "form[action='/ui/logout'] button")
    visitor.keyboard.press("Enter")
    expect(visitor.get_by_label("API key")).to_be_visible()


@pytest.mark.parametrize("scope", list(Scope))
def test_a_page_offers_what_its_key_may_do(visitor: Page, guarded: Guarded, scope: Scope) -> None:
    visitor.goto(f"/ui/login?next={TRIED_PAGE}")
    visitor.get_by_label("API key").fill(guarded.keys[scope])
    visitor.get_by_role("button", name="Log in").click()
    expect(visitor.get_by_role("heading", level=1)).to_have_text(str(TRIED))
    tunes, pins = Scope.TUNE in scope.included, Scope.ADMIN in scope.included
    links, buttons = visitor.get_by_role("link"), visitor.get_by_role("button")
    for path in (TRIED_PAGE, "/ui/jobs", "/ui/problems?q=7777", "/ui/map?k=7777"):
        visitor.goto(path)
        expect(links.filter(has_text="Tune")).to_have_count(2 if tunes else 0)
        assert visitor.evaluate(IMPERFECT) == []
    visitor.goto(TRIED_PAGE)
    expect(buttons.filter(has_text="Pin")).to_have_count(2 if pins else 0)
    expect(buttons.filter(has_text="Roll back")).to_have_count(1 if pins else 0)
    visitor.goto(addresses.job(guarded.waiting))
    expect(buttons.filter(has_text="Cancel")).to_have_count(1 if tunes else 0)
    visitor.goto(addresses.job(guarded.failed))
    expect(buttons.filter(has_text="Try again")).to_have_count(1 if tunes else 0)
    for path, allowed in (
        (f"{TRIED_PAGE}/pin", pins),
        (f"{TRIED_PAGE}/unpin", pins),
        (f"{TRIED_PAGE}/rollback", pins),
        (f"{addresses.job(guarded.waiting)}/cancel", tunes),
        (f"{addresses.job(guarded.failed)}/retry", tunes),
        ("/ui/tune", tunes),
    ):
        if not allowed:
            answer = visitor.request.post(path, form={"revision": "1"})
            assert answer.status == 403, path
            assert "<h1>Scope missing</h1>" in answer.text()
    if tunes:
        visitor.goto("/ui/tune?m=3&n=8&k=8")
        buttons.filter(has_text="Request").click()
        expect(visitor.locator("#state")).to_have_text("waiting")
        buttons.filter(has_text="Cancel").click()
        expect(visitor.locator("#state")).to_have_text("cancelled")


SCRIPT = "<script>document.title='broken'</script>"
IMAGE = '"><img src=x onerror=document.title=1>'
"""In names that are part of an address: no slash."""


def test_text_from_elsewhere_stays_text(site: Site, page: Page, watch: Watch) -> None:
    problem = Problem(m=13, n=4096, k=4096)
    device = replace(H200, name=f"GPU {IMAGE}")
    environment = replace(made_up().environment, gpu_uuid=SCRIPT, driver=SCRIPT, cublas=SCRIPT)
    kernel = replace(made_up(problem).candidate.kernel, name=f"kernel{IMAGE}")
    tried = replace(trial(0, problem, job=SCRIPT), device=device, environment=environment)
    tried = replace(tried, candidate=Candidate(kernel=kernel, launch=tried.candidate.launch))
    failure = replace(failed_trial(1).failure, message=SCRIPT)
    site.store.add_trial(tried)
    site.store.add_trial(
        replace(tried, statistics=None, samples_us=(), failure=failure, correctness=None)
    )
    site.store.promote(
        replace(
            made_up(problem),
            device=device,
            environment=environment,
            candidate=tried.candidate,
            promoted_at=SCRIPT,
            job=SCRIPT,
            baseline_kernels=(SCRIPT,),
            conditions=replace(tried.conditions, throttle=(SCRIPT,)),
        ),
    )
    job = site.queue.enqueue(problem, device=device.slug)[0].id
    page.goto(addresses.job(job))
    leased = site.queue.lease("test:text", [device.slug])
    assert leased is not None
    leased.progress("screen", 1, 2, 7.0, SCRIPT, SCRIPT)
    expect(page.locator("#best")).to_have_text(SCRIPT)
    expect(page.locator("#log li").first).to_contain_text(SCRIPT)
    leased.fail(f"wrong: {SCRIPT}", retry=False)
    expect(page.locator(".note")).to_have_text(f"Failed: wrong: {SCRIPT}")
    for path, times in (
        (addresses.problem(problem, device.slug), 8),
        (addresses.with_query("/ui", device=device.slug), 1),
        (addresses.with_query("/ui/problems", device=device.slug), 0),
        (addresses.with_query("/ui/problems", operation=SCRIPT), 0),
        (addresses.with_query("/ui/problems", device=device.slug, q=SCRIPT), 0),
        (addresses.with_query("/ui/map", device=device.slug, k=4096), 0),
        ("/ui/devices", 3),
        (addresses.job(job), 3),
        (addresses.with_query("/ui/tune", device=device.slug, m=SCRIPT), 0),
        ("/ui/jobs", 0),
        (f"/ui/{SCRIPT}", 1),
    ):
        page.goto(path)
        text = page.locator("main").inner_text()
        assert text.count(SCRIPT) >= times, path
        assert "broken" not in page.title()
        assert page.locator("main img, main script").count() == 0, path
        assert page.evaluate(IMPERFECT) == [], path
    watch.forgive(404, 422)

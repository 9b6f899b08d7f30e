"""The pages in a real browser: every link, search and forms, keyboard, narrow, without scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from gemmsmith.problem import Problem
from service.pages import addresses
from service.settings import Settings
from tests.support import browsing
from tests.support.browsing import IMPERFECT, LINKS, Watch
from tests.support.content import (
    BATCHED,
    CUBLAS_WINS,
    HOPELESS,
    RECORDED,
    TRIED,
    fill,
    jobs_in_every_state,
)
from tests.support.recordings import record
from tests.support.serving import H200, new_settings, running, winner
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.keys import Scope


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pages")
    settings = new_settings(folder, device="replay:h200")
    settings.sweeps.mkdir()
    record(settings.sweeps, RECORDED)
    with Store.open(settings.database) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.app.usable_gpu", lambda: None)
        fill(store)
        queue = Queue(store)
        jobs = jobs_in_every_state(queue)
        with running(settings) as http:
            yield Site(http=http, settings=settings, store=store, queue=queue, jobs=jobs)


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


def test_every_link_of_every_page_leads_somewhere(site: Site, page: Page, watch: Watch) -> None:
    waiting, seen, pages = ["/ui", *(addresses.job(job) for job in site.jobs.values())], set(), 0
    while waiting:
        url = urldefrag(urljoin(site.origin, waiting.pop()))[0]
        if url in seen or not url.startswith("http"):
            continue
        seen.add(url)
        assert url.startswith(site.origin), f"a link to another host: {url}"
        if not url.startswith(f"{site.origin}/ui") or "/ui/tune?" in url:
            assert site.http.get(url).status_code == 200, url
            continue
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == 200, url
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert page.evaluate(IMPERFECT) == [], url
        assert watch.faults == [], url
        pages += 1
        waiting += page.evaluate(LINKS)
    assert pages > 70
    for problem in (TRIED, BATCHED, CUBLAS_WINS, HOPELESS):
        assert site.origin + addresses.problem(problem, H200.slug) in seen
    assert f"{site.origin}/docs" in seen


def rows(page: Page) -> list[str]:
    return page.locator("tbody th").all_inner_texts()


def test_problems_are_searched_and_sorted(page: Page) -> None:
    page.goto("/")
    expect(page).to_have_title("Problems · gemmsmith")
    assert len(rows(page)) == 50
    page.get_by_label("Search").fill("4096x4096 bf16 tn")
    page.get_by_role("button", name="Search").click()
    assert str(TRIED) in rows(page)
    assert all("4096×4096" in row and "bf16 tn" in row for row in rows(page))
    page.get_by_label("Search").fill("n=1024, fp16")
    page.get_by_label("Sort by").select_option("time")
    page.get_by_role("button", name="Search").click()
    assert rows(page)[0].startswith("115×1024×1024")
    page.get_by_role("link", name="Next page").click()
    assert [row.split("×")[0] for row in rows(page)] == ["65", "64"]
    page.get_by_role("link", name="First page").click()
    assert len(rows(page)) == 50
    page.goto("/ui/problems?q=512x512&sort=loss")
    expect(page.locator("tbody tr")).to_contain_text("cuBLAS")


def test_a_search_that_cannot_be_read_is_explained(page: Page, watch: Watch) -> None:
    page.goto("/ui/problems")
    page.get_by_label("Search").fill("4096 <i>by</i>")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#q-error")).to_contain_text("<i>by</i>")
    expect(page.locator("#q-error")).to_contain_text("n=4096")
    expect(page.get_by_label("Search")).to_have_value("4096 <i>by</i>")
    page.goto("/ui/problems?q=99999x1")
    expect(page.locator("main")).to_contain_text("No winner matches")
    watch.faults = [fault for fault in watch.faults if "422" not in fault]


def test_a_problem_shows_its_trials_and_what_was_served(site: Site, page: Page) -> None:
    page.goto(addresses.problem(TRIED, H200.slug))
    expect(page.get_by_role("heading", name="Run CUTLASS")).to_be_visible()
    ranked = page.get_by_role("region", name="Ranked trials").locator("tbody tr")
    expect(ranked).to_have_count(4)
    expect(ranked.first).to_contain_text("final")
    expect(page.get_by_role("region", name="Failed trials")).to_contain_text("<b>wrong</b>")
    assert page.get_by_role("region", name="Times").locator("circle").count() == 24
    history = page.get_by_role("region", name="Revisions").locator("tbody tr")
    expect(history).to_have_count(2)
    page.get_by_role("button", name="Pin revision 1").click()
    expect(history.nth(1)).to_contain_text("pinned")
    served = site.store.winner(TRIED, H200.slug)
    assert served is not None
    assert (served.revision, served.pinned) == (1, True)
    page.get_by_role("button", name="Unpin").click()
    expect(history.first).to_contain_text("served")
    page.get_by_role("button", name="Roll back").click()
    expect(history.nth(1)).to_contain_text("pinned")
    page.get_by_role("button", name="Unpin").click()


def test_a_problem_without_a_winner_says_what_is_served(page: Page) -> None:
    page.goto(addresses.problem(replace(TRIED, m=3000), H200.slug))
    expect(page.locator("main")).to_contain_text("Not tuned yet")
    expect(page.get_by_role("link", name=str(TRIED))).to_be_visible()
    page.get_by_role("link", name="Tune it").click()
    expect(page.get_by_label("M", exact=True)).to_have_value("3000")


def test_the_map_leads_to_problems(page: Page) -> None:
    page.goto("/ui/map")
    page.get_by_label("Element types").select_option("fp16")
    page.get_by_label("K", exact=True).fill("1024")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("a.cell")).to_have_count(52)
    page.get_by_text("The same as a table").click()
    expect(page.locator("tbody tr")).to_have_count(52)
    page.locator("a.cell").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("1024×1024 fp16")


def test_a_wrong_order_keeps_what_was_typed(page: Page, watch: Watch, site: Site) -> None:
    before = site.queue.list(limit=1)
    page.goto("/ui/tune")
    for name, value in (("M", "4096"), ("N", "many"), ("K", "0"), ("Priority", "101")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("Element types").select_option("fp8_e4m3")
    page.get_by_role("button", name="Order the tuning").click()
    expect(page.get_by_role("alert")).to_contain_text("n, k, priority")
    expect(page.locator("#k-error")).to_contain_text("1 … 2147483647")
    expect(page.locator("#n-error")).to_contain_text("'many'")
    expect(page.get_by_label("M", exact=True)).to_have_value("4096")
    expect(page.get_by_label("N", exact=True)).to_have_value("many")
    expect(page.get_by_label("Element types")).to_have_value("fp8_e4m3")
    for name, value in (("N", "64"), ("K", "64"), ("Priority", "0")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("Layout").select_option("nt")
    page.get_by_role("button", name="Order the tuning").click()
    expect(page.locator("#layout-error")).to_contain_text("fp8_e4m3 needs layout tn")
    assert site.queue.list(limit=1) == before
    watch.faults = [fault for fault in watch.faults if "422" not in fault]


def order(page: Page, problem: Problem) -> str:
    """Order a tuning by the form; the job's id."""
    page.goto("/ui/tune")
    for name in ("m", "n", "k"):
        page.get_by_label(name.upper(), exact=True).fill(str(getattr(problem, name)))
    page.get_by_role("button", name="Order the tuning").click()
    page.wait_for_url("**/ui/jobs/*")
    return page.url.rsplit("/", 1)[1]


def test_an_ordered_tuning_is_watched_to_its_end(page: Page, site: Site) -> None:
    job = order(page, RECORDED)
    expect(page.locator("#state")).to_have_text("waiting")
    command = [sys.executable, "-m", "service.worker"]
    environ = {**os.environ, **site.settings.environment()}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as worker:
        try:
            expect(page.locator("#state")).to_have_text("done", timeout=60_000)
        finally:
            worker.kill()
    expect(page.locator("#log")).to_contain_text("finished")
    page.get_by_role("link", name="See the winner").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(str(RECORDED))
    expect(page.locator(".tag", has_text="replayed").first).to_be_visible()
    expect(page.get_by_role("region", name="Failed trials")).to_contain_text("refused")
    assert site.store.trials(job=job)


def test_a_running_job_is_shown_as_it_goes(page: Page, site: Site) -> None:
    job = order(page, Problem(m=21, n=22, k=23))
    page.evaluate("document.title = 'not loaded again'")
    leased = site.queue.lease("test:live", [])
    assert leased is not None
    assert leased.job.id == job
    expect(page.locator("#state")).to_have_text("running")
    leased.progress("screen", 5, 12, 7.125, "the best so far", "twelve candidates")
    expect(page.locator("#step")).to_have_text("screen: 5 of 12")
    expect(page.locator("#best-us")).to_have_text("7.125 µs")
    expect(page.locator("#best")).to_have_text("the best so far")
    expect(page.locator("#log li").last).to_contain_text("twelve candidates")
    assert page.title() == "not loaded again"
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("main")).to_contain_text("cancellation was asked for")
    leased.cancelled()
    expect(page.locator("#state")).to_have_text("cancelled")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#state")).to_have_text("waiting")
    assert page.url.rsplit("/", 1)[1] != job
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#state")).to_have_text("cancelled")


def test_without_scripts_a_job_still_comes_to_its_end(
    site: Site, chromium: Browser, watch: Watch
) -> None:
    with chromium.new_context(base_url=site.origin, java_script_enabled=False) as context:
        page = watch.over(context.new_page())
        order(page, Problem(m=31, n=32, k=33))
        site.queue.cancel(page.url.rsplit("/", 1)[1])
        expect(page.locator("#state")).to_have_text("cancelled", timeout=20_000)


def tab_to(page: Page, selector: str) -> None:
    """Press the tabulator until the element has the focus, as one without a mouse does."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    pytest.fail(f"the keyboard does not reach {selector}")


def test_the_keyboard_is_enough(page: Page, site: Site) -> None:
    page.goto("/ui/problems")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    tab_to(page, "#q")
    page.keyboard.type("4096x4096x4096 bf16 tn")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=4096*")
    tab_to(page, "tbody a")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(str(TRIED))
    tab_to(page, "a.button")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tune a problem")
    tab_to(page, "#m")
    page.keyboard.type("41")
    tab_to(page, "form.order button")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/jobs/*")
    tab_to(page, "form[action$=cancel] button")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("cancelled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_need_no_sideways_scrolling(
    site: Site, chromium: Browser, watch: Watch, scheme: str
) -> None:
    narrow = {"width": 360, "height": 740}
    with chromium.new_context(
        base_url=site.origin, viewport=narrow, color_scheme=scheme
    ) as context:
        page = watch.over(context.new_page())
        for path in (
            "/ui/problems",
            addresses.problem(TRIED, H200.slug),
            "/ui/map?dtype=fp16&k=1024",
            "/ui/jobs",
            *(addresses.job(job) for job in site.jobs.values()),
            "/ui/devices",
            "/ui/tune",
        ):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") == 360, path


def test_errors_are_pages_too(page: Page, watch: Watch) -> None:
    for path, status, said in (
        ("/ui/nowhere", 404, "There is nothing at /ui/nowhere"),
        ("/ui/jobs/nobody", 404, "There is no job 'nobody'"),
        ("/ui/problems/h200/bf16/tn/1x1x1", 404, "no device model 'h200'"),
        (f"/ui/problems/{H200.slug}/bf16/tn/1x1", 422, "4096x6144x4096"),
        (f"/ui/problems/{H200.slug}/int4/tn/1x1x1", 422, "fp8_e4m3"),
        (f"/ui/problems/{H200.slug}/fp8_e4m3/nn/1x1x1", 422, "layout tn"),
        ("/ui/map?k=0", 422, "1 … 2147483647"),
        ("/ui/problems?sort=colour", 422, "'gain'"),
    ):
        answer = page.goto(path)
        assert answer is not None
        assert (answer.status, answer.headers["content-type"][:9]) == (status, "text/html")
        expect(page.locator("main")).to_contain_text(said)
        assert page.evaluate(IMPERFECT) == []
    watch.faults = [fault for fault in watch.faults if "40" not in fault and "42" not in fault]


def test_a_key_opens_what_it_may(chromium: Browser, tmp_path: Path) -> None:
    settings = new_settings(tmp_path, require_keys=True)
    with Store.open(settings.database) as store:
        store.promote(winner(TRIED))
        _, secret = store.keys.create("reader", Scope.READ)
    with running(settings) as http, chromium.new_context(base_url=str(http.base_url)) as context:
        page = context.new_page()
        page.goto("/ui/problems?q=4096")
        page.get_by_label("API key").fill("gsk_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown")
        page.get_by_label("API key").fill(secret)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_label("Search")).to_have_value("4096")
        page.goto("/ui/tune?m=1&n=1&k=1")
        page.get_by_role("button", name="Order the tuning").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Scope missing")
        page.goto("/ui/problems")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("API key")).to_be_visible()

"""For all who look: links lead somewhere, the keyboard is enough, narrow screens and paper do."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest
from playwright.sync_api import Browser, Page, expect

from service.pages import addresses, report
from service.report.problem_rows import device_report
from service.report.roofs import ceilings_of
from tests.support.browsing import FOCUSABLE, IMPERFECT, LINKS, Watch
from tests.support.content import BATCHED, CUBLAS_WINS, HOPELESS, SHIPPED, TRIED
from tests.support.serving import H200
from tests.support.site import Site, tab_to
from tuner.exchange import read_winners

TRIED_PAGE = addresses.problem(TRIED, H200.slug)


ALIKE = 4
"""Of pages that differ in numbers or a query's values so many are opened; the others' links do."""


@pytest.mark.long
def test_every_link_of_every_page_leads_somewhere(site: Site, page: Page, watch: Watch) -> None:
    special = [addresses.problem(of, H200.slug) for of in (BATCHED, CUBLAS_WINS, HOPELESS)]
    special += [TRIED_PAGE, *(addresses.job(job) for job in site.jobs.values())]
    waiting = ["/", *special]
    asked: set[str] = set()
    linked: set[str] = set()
    opened: Counter[str] = Counter()
    while waiting:
        url = urldefrag(urljoin(site.origin, waiting.pop()))[0]
        if url in asked or not url.startswith("http"):
            continue
        asked.add(url)
        assert url.startswith(site.origin), f"a link to another host: {url}"
        path = url.removeprefix(site.origin)
        kind = re.sub("[0-9]+|=[^&]*|(?<=/models/)[^?]*", "", path)
        if path not in special and (opened[kind] >= ALIKE or not path.startswith(PAGES)):
            answer = site.http.get(url, follow_redirects=True)
            assert answer.status_code == 200, url
            found = [unescape(href) for href in re.findall('<a [^>]*href="([^"]+)"', answer.text)]
        else:
            found = open_checked(page, url)
            assert watch.faults == [], url
            opened[kind] += 1
        linked.update(found := [urljoin(url, href) for href in found])
        waiting += found
    assert opened.total() > 20
    assert len(asked) > 150
    for path in (*special[:3], TRIED_PAGE, addresses.job(site.jobs["done"]), "/docs"):
        assert site.origin + path in linked
    assert f"{site.origin}/openapi.json" in linked
    assert any("/kernels/" in url for url in linked)


PAGES = ("/ui", "/docs")


def open_checked(page: Page, url: str) -> list[str]:
    """Open a page in the browser, where nothing may be wrong with it; its links."""
    answer = page.goto(url)
    assert answer is not None
    assert answer.status == 200, url
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';"), url
    assert "unsafe" not in policy, url
    assert page.evaluate(IMPERFECT) == [], url
    return list(page.evaluate(LINKS))


def kinds_of_pages(site: Site) -> list[str]:
    return [
        "/ui",
        "/ui/problems?q=4096",
        TRIED_PAGE,
        addresses.problem(HOPELESS, H200.slug),
        "/ui/map?dtype=bf16&k=4096",
        "/ui/models",
        "/ui/models/llama-3-8b?tokens=4096",
        "/ui/jobs",
        *(addresses.job(site.jobs[state]) for state in ("running", "failed", "done")),
        "/ui/devices",
        "/ui/tune",
        "/docs",
    ]


FOCUSED = f"""() => {{
  const e = document.activeElement, style = getComputedStyle(e);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [({FOCUSABLE})().indexOf(e), seen, e.outerHTML.slice(0, 120)];
}}"""


@pytest.mark.long
def test_the_tabulator_reaches_everything_in_order_and_shows_where_it_is(
    site: Site, page: Page
) -> None:
    for path in kinds_of_pages(site):
        page.goto(path)
        count = page.evaluate(f"() => ({FOCUSABLE})().length")
        assert count > 5
        for place in range(min(count, 40)):  # rows of a list are all alike
            page.keyboard.press("Tab")
            at, visible, what = page.evaluate(FOCUSED)
            assert at == place, f"{path}: {what}"
            assert visible, f"{path}: {what}"


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
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(str(TRIED))
    tab_to(page, "form[action$=pin] button")
    page.keyboard.press("Enter")
    expect(page.locator("tr.chosen").last).to_contain_text("pinned")
    tab_to(page, "form[action$=unpin] button")
    page.keyboard.press("Enter")
    expect(page.locator("tr.chosen").last).not_to_contain_text("pinned")
    tab_to(page, "a.button")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tune a problem")
    tab_to(page, "#m")
    page.keyboard.type("41")
    tab_to(page, "#layout")
    page.keyboard.press("ArrowDown")
    tab_to(page, "form.request button")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/jobs/*")
    expect(page.get_by_role("heading", level=1)).to_have_text("41×4096×4096 bf16 tt")
    tab_to(page, "form[action$=cancel] button")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("cancelled")
    page.goto("/ui/map?dtype=fp16&k=1024")
    tab_to(page, "#k")
    page.keyboard.press("Enter")
    page.wait_for_url("**batch=1*")
    tab_to(page, "a.cell")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("×1024×1024 fp16")


CUT_WITHOUT_A_HINT = """() => [...document.querySelectorAll("main *")]
  .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).overflowX !== "visible" && !e.matches("input, select, .log"))
  .filter((e) => (getComputedStyle(e).backgroundImage.match(/gradient/g) || []).length < 4)
  .map((e) => e.outerHTML.slice(0, 120))"""
"""A script that lists what scrolls sideways without the shadows that say so."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_need_no_sideways_scrolling(
    site: Site, chromium: Browser, watch: Watch, scheme: str
) -> None:
    narrow = {"width": 360, "height": 740}
    with chromium.new_context(
        base_url=site.origin, viewport=narrow, color_scheme=scheme
    ) as context:
        page = watch.over(context.new_page())
        for path in kinds_of_pages(site):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") == 360, path
            assert page.evaluate(CUT_WITHOUT_A_HINT) == [], path
            assert page.evaluate(IMPERFECT) == [], path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_as_good_a_page(tmp_path: Path, chromium: Browser, scheme: str) -> None:
    """But for its style, which is in it: the file needs nothing else."""
    shipped = list(read_winners(SHIPPED))
    file = tmp_path / "report.html"
    file.write_text(report.page([device_report(shipped, ceilings_of(H200.slug))]))
    narrow = {"width": 360, "height": 740}
    with chromium.new_context(viewport=narrow, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate(CUT_WITHOUT_A_HINT) == []
        assert [fault[:14] for fault in page.evaluate(IMPERFECT)] == ["inline: <style"]


def test_paper_has_what_was_on_the_screen(site: Site, page: Page) -> None:
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 within Chromium's margins
    for path in kinds_of_pages(site):
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert page.locator("header, form, .actions, .skip").filter(visible=True).count() == 0
        hidden = """() => [...document.querySelectorAll(".wide, .log")]
            .filter((e) => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)
            .map((e) => e.ariaLabel)"""
        assert page.evaluate(hidden) == [], path


def test_errors_are_pages_too(page: Page, watch: Watch) -> None:
    for path, status, said in (
        ("/ui/nowhere", 404, "There is nothing at /ui/nowhere"),
        ("/ui/jobs/nobody", 404, "There is no job 'nobody'"),
        ("/ui/problems/h300/bf16/tn/1x1x1", 404, "no device model 'h300'"),
        (f"/ui/problems/{H200.slug}/bf16/tn/1x1", 422, "4096x6144x4096"),
        (f"/ui/problems/{H200.slug}/int4/tn/1x1x1", 422, "fp8_e4m3"),
        (f"/ui/problems/{H200.slug}/fp8_e4m3/nn/1x1x1", 422, "layout tn"),
        ("/ui/models/nothing", 404, "no model 'nothing'"),
        ("/ui/models/llama-3-8b?tokens=0", 422, "1 … 2147483647"),
        ("/ui/map?k=0", 422, "1 … 2147483647"),
        ("/ui/problems?sort=colour", 422, "'gain'"),
    ):
        answer = page.goto(path)
        assert answer is not None
        assert (answer.status, answer.headers["content-type"][:9]) == (status, "text/html")
        expect(page.locator("main")).to_contain_text(said)
        assert page.evaluate(IMPERFECT) == []
    watch.forgive(404, 422)

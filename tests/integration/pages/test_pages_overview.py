"""The overview by size of the screen: what is seen first, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from service.pages import addresses
from tests.integration.pages.test_pages_reach import kinds_of_pages
from tests.support.browsing import IMPERFECT, Watch
from tests.support.content import TRIED
from tests.support.serving import H200, filled, running
from tests.support.site import Site

DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
CUT = """() => [...document.querySelectorAll(".wide")]
  .filter((e) => e.querySelector("table") && e.scrollWidth > e.clientWidth + 1)
  .map((e) => `${e.ariaLabel}: ${e.scrollWidth} in ${e.clientWidth}`)"""
"""A script that lists tables whose last column is out of sight."""
UNSEEN = """() => [...document.querySelectorAll("main summary, main tbody tr")]
  .filter((e) => e.checkVisibility())
  .filter((e) => ![...e.querySelectorAll("b, td.n")].some((number) => {
    const { left, right, width } = number.getBoundingClientRect();
    return width > 0 && left >= 0 && right <= innerWidth && /[0-9–]/.test(number.textContent);
  }))
  .map((e) => e.textContent.trim().slice(0, 60))"""
"""A script that lists rows without a number in sight."""
DRAWN = """() => [...document.querySelectorAll(".wide > svg")].map((e) => {
    const frame = e.parentElement.getBoundingClientRect();
    return [...e.querySelectorAll(".mark")].filter((mark) => {
      const { left, right } = mark.getBoundingClientRect();
      return left >= frame.left && right <= frame.right;
    }).length;
  })"""
"""A script that counts the marks in sight, for each chart."""


@pytest.fixture
def phone(site: Site, chromium: Browser, watch: Watch) -> Iterator[Page]:
    with chromium.new_context(base_url=site.origin, viewport=PHONE) as context:
        yield watch.over(context.new_page())


@pytest.fixture
def desk(site: Site, chromium: Browser, watch: Watch) -> Iterator[Page]:
    with chromium.new_context(base_url=site.origin, viewport=DESK) as context:
        yield watch.over(context.new_page())


def test_a_headline_and_the_box_are_seen_first(desk: Page, watch: Watch) -> None:
    box = desk.get_by_label("Size or model")
    for said, url in (
        (f"{TRIED.m}x{TRIED.n}x{TRIED.k}", addresses.problem(TRIED, H200.slug)),
        ("4096 x 4096 x 4096 fp16 tt", "/ui/problems?q=4096+x+4096+x+4096+fp16+tt"),
        ("4096×4096×4096 fp16 tt", f"/ui/problems/{H200.slug}/fp16/tt/4096x4096x4096"),
        ("Llama-3-8b", "/ui/models/llama-3-8b"),
        ("llama", "/ui/problems?q=llama"),
        ("n=4096", "/ui/problems?q=n%3D4096"),
        ("4095x1x1 bf16.then_silu_gate", "/ui/problems?q=4095x1x1+bf16.then_silu_gate"),
        ("what?", "/ui/problems?q=what%3F"),
    ):
        desk.goto("/ui")
        expect(desk.get_by_role("heading", level=1)).to_be_in_viewport(ratio=1)
        expect(desk.get_by_role("heading", level=1)).to_contain_text("faster than torch's default")
        expect(box).to_be_in_viewport(ratio=1)
        box.fill(said)
        desk.get_by_role("button", name="Find").click()
        assert url in desk.url, said
    expect(desk.locator("#q-error")).to_contain_text("what?")
    watch.forgive(422)


def test_families_unfold(desk: Page) -> None:
    desk.goto("/ui")
    families = desk.get_by_role("region", name="Winners by family and GPU").locator("details")
    expect(families).to_have_count(1)
    plain = families.filter(has_text="Plain products")
    expect(plain.locator("summary")).to_contain_text("saved")
    expect(plain.locator("table")).to_be_hidden()
    plain.locator("summary").press("Enter")
    expect(plain.locator("tbody tr", has_text="fp16")).to_contain_text("53 problems, 53 ahead")
    assert desk.evaluate(IMPERFECT) == []


def test_what_runs_comes_before_what_is_known(desk: Page, site: Site) -> None:
    desk.goto("/ui")
    assert headings(desk)[:3] == ["Workers", "Latest jobs", "Winners by family and GPU"]
    expect(desk.get_by_role("region", name="Jobs").get_by_text("running")).to_be_in_viewport()


def test_where_nothing_runs_winners_come_first(tmp_path: Path, chromium: Browser) -> None:
    with (
        running(filled(tmp_path, TRIED)) as http,
        chromium.new_context(base_url=str(http.base_url), viewport=DESK) as context,
    ):
        page = context.new_page()
        page.goto("/ui")
        assert headings(page)[0] == "Winners by family and GPU"
        assert headings(page)[-2:] == ["Workers", "Latest jobs"]


def test_a_desk_shows_the_last_column(desk: Page, site: Site) -> None:
    for path in kinds_of_pages(site):
        desk.goto(path)
        desk.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        assert desk.evaluate(CUT) == [], path


def test_a_phone_shows_a_number_in_every_row_and_data_in_every_chart(phone: Page) -> None:
    phone.goto("/ui")
    assert phone.evaluate(UNSEEN) == []
    assert min(phone.evaluate(DRAWN)) > 3
    for fold in phone.locator(".families summary").all():
        fold.click()
    assert phone.evaluate(UNSEEN) == []
    assert phone.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert phone.evaluate(IMPERFECT) == []


def headings(page: Page) -> list[str]:
    return page.get_by_role("heading", level=2).all_inner_texts()

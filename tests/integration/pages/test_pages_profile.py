"""The profile on a problem's page, in a browser: recorded ones, and one with stalls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from gemmsmith.core.problem import Problem
from service.pages import addresses
from tests.support import played_ncu
from tests.support.browsing import IMPERFECT, Watch
from tests.support.serving import new_settings, running
from tests.support.shipped import SLUG, TRUSTED, shipped_files
from tuner.exchange import import_winners
from tuner.profiling import files, ncu
from tuner.profiling.files import add_profiles, file_in, read_profiles, shipped_folder
from tuner.store import Store

COUNTED = Problem(m=4096, n=6144, k=1024)
EARLIER = Problem(m=256, n=7168, k=2048)
WITHOUT = Problem(m=4096, n=4096, k=4096)
WIDTHS = (1280, 390)


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A service with the shipped winners, and a profile that was made here."""
    monkeypatch.setattr(files, "own_folder", lambda: tmp_path / "profiles")
    settings = new_settings(tmp_path)
    with Store.open(settings.database) as store:
        for file in shipped_files():
            if file.name == f"{SLUG}.bf16.jsonl":
                import_winners(store, file, TRUSTED)
        winner = store.winner(COUNTED, SLUG)
    assert winner is not None
    shipped = read_profiles(file_in(shipped_folder(), SLUG))[0]
    ours, theirs = (
        ncu.per_launch(ncu.read(played_ncu.table(name)), 3) for name in ("winner", "default")
    )
    made = replace(
        shipped,
        problem=COUNTED,
        tool="ncu 2025.3",
        candidate=replace(shipped.candidate, candidate=winner.candidate, kernels=ours),
        default=replace(shipped.default, kernels=theirs),
    )
    add_profiles(file_in(tmp_path / "profiles", SLUG), [made])
    with running(settings) as http:
        yield str(http.base_url).rstrip("/")


def test_a_profile_is_drawn_at_every_width(origin: str, chromium: Browser) -> None:
    watch = Watch(origin)
    for width in WIDTHS:
        with chromium.new_context(
            base_url=origin, viewport={"width": width, "height": 800}
        ) as context:
            page = watch.over(context.new_page())
            page.goto(addresses.problem(COUNTED, SLUG))
            assert page.evaluate(IMPERFECT) == []
            section = page.locator("section", has=page.locator("#profile"))
            expect(section).to_contain_text("50% for the tensor cores")
            expect(section).to_contain_text("by ncu 2025.3")
            expect(section).not_to_contain_text("earlier candidate")
            for name, rows in (("What a warp waits for", 4), ("How busy the units are", 6)):
                chart = page.get_by_role("region", name=name)
                expect(chart.locator("circle.cutlass")).to_have_count(rows)
                expect(chart.locator("circle.cublas")).to_have_count(rows)
            sides = page.get_by_role("region", name="Candidate and default")
            expect(sides.locator("tr", has_text="Tensor pipe active")).to_contain_text("61.2%")
            page.goto(addresses.problem(EARLIER, SLUG))
            assert page.evaluate(IMPERFECT) == []
            section = page.locator("section", has=page.locator("#profile"))
            expect(section).to_contain_text("The profile is of an earlier candidate.")
            expect(section).to_contain_text("128x112x64_1x1x1_0_tnt_align8_warpspecialized")
            expect(page.get_by_role("region", name="What a warp waits for")).to_have_count(0)
            page.goto(addresses.problem(WITHOUT, SLUG))
            expect(page.locator("#profile")).to_have_count(0)
    assert watch.faults == []

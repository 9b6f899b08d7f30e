"""Makes the pictures of docs/pages.md: `python -m tests.support.screenshots docs/images`.

The service has the shipped winners, and a worker tunes on the recorded H200, so every number in the
pictures was measured. 256 colours are enough for the pages, and keep the files small.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import JobState
from service.pages import addresses
from service.settings import Settings
from tests.support.browsing import browser
from tests.support.processes import until
from tests.support.serving import new_settings, running
from tests.support.shipped import TRUSTED
from tuner.exchange import import_winners
from tuner.jobs import Queue
from tuner.store import Store

ROOT = Path(__file__).parents[2]
DEVICE = "nvidia-h200-132sm"
TUNED = Problem(m=1024, n=6144, k=1024)
COMPARED = Problem(m=256, n=4096, k=14336)
"""A problem with shipped winners for both GPUs, which is also tuned on the recorded GPU."""
EXPLAINED = Problem(m=4096, n=6144, k=1024)
"""The first example of docs/explain.md."""
ALSO_TUNED = (COMPARED, Problem(m=16, n=4096, k=4096))
NARROW = 390
NOT_RECORDED = Problem(m=77, n=4096, k=4096)


def main(folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, browser() as chromium:
        os.environ["GEMMSMITH_TRUSTED"] = f"{state}/trusted"
        os.environ["GEMMSMITH_SIGNING_KEY"] = f"{state}/signing.key"
        settings = new_settings(
            Path(state), sweeps=ROOT / "configs" / "sweeps", device=f"replay:{DEVICE}"
        )
        with Store.open(settings.database) as store:
            for shipped in sorted((ROOT / "configs" / "winners").glob("*.jsonl")):
                import_winners(store, shipped, TRUSTED)
            for problem in (*ALSO_TUNED, NOT_RECORDED):
                Queue(store).enqueue(problem)
            with running(settings) as http:
                _pictures(folder, chromium, str(http.base_url), settings)
        guarded = new_settings(Path(state) / "guarded", require_keys=True)
        with running(guarded) as http, _opened(chromium, str(http.base_url), 640, 330) as page:
            page.goto("/ui/problems")
            _save(page.screenshot(), folder / "login.png")


def _pictures(folder: Path, chromium: Browser, origin: str, settings: Settings) -> None:
    tuned = addresses.problem(TUNED, DEVICE)
    with _opened(chromium, origin, 1280, 860) as page:
        _job(page, folder, settings)
        page.goto("/ui/jobs")
        _save(page.screenshot(clip=_clip(page, 420)), folder / "jobs.png")
        page.goto("/ui/problems?operation=group_rows")
        _save(page.screenshot(), folder / "problems.png")
        page.goto(addresses.problem(COMPARED, DEVICE))
        _parts(page, folder, {"problem": ("", "Roofline"), "snippets": ("Request this answer", "")})
        page.goto(addresses.problem(EXPLAINED, DEVICE))
        _parts(page, folder, {"why": ("Why", "Regimes")})
        page.goto(tuned)
        search = ("The latest search", "Trials")
        _parts(page, folder, {"search": search, "trials": ("Trials", "Measured on")})
        page.goto("/ui/map?k=4096")
        _save(page.screenshot(full_page=True), folder / "map.png")
        page.goto(addresses.model("gpt-oss-20b", tokens=16384, device=DEVICE))
        _save(page.screenshot(full_page=True), folder / "model.png")
        page.goto("/ui/devices")
        _save(page.screenshot(clip=_clip(page, 640)), folder / "devices.png")
        page.goto("/docs")
        _save(page.screenshot(), folder / "api.png")
        page.goto("/ui/tune?m=4096&n=many&k=0")
        page.get_by_role("button", name="Request").click()
        expect(page.get_by_role("alert")).to_be_visible()
        _save(page.screenshot(clip=_clip(page, 740)), folder / "tune.png")
    with _opened(chromium, origin, 1280, 860, scheme="dark") as page:
        page.goto("/ui/map?dtype=fp8_e4m3&k=4096")
        _save(page.screenshot(full_page=True), folder / "map-dark.png")
    with _opened(chromium, origin, NARROW, 740) as page:
        screens = []
        for path in ("/ui", "/ui/problems", tuned):
            page.goto(path)
            screens.append(Image.open(io.BytesIO(page.screenshot())))
        beside = Image.new("RGB", (3 * NARROW + 2 * 24, 740), "white")
        for i, screen in enumerate(screens):
            beside.paste(screen, (i * (NARROW + 24), 0))
        _write(beside, folder / "narrow.png")


def _job(page: Page, folder: Path, settings: Settings) -> None:
    """Request a tuning job with the form, and watch it."""
    page.goto(addresses.tune(TUNED))
    page.get_by_label("Effort").select_option("exhaustive")
    page.get_by_role("button", name="Request").click()
    expect(page.locator("#state")).to_have_text("waiting")
    command = [sys.executable, "-m", "service.worker.process"]
    environ = {**os.environ, **settings.environment()}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as worker:
        try:
            well_on = re.compile("screen: ([5-9][0-9]|[0-9]{3}) of")
            expect(page.locator("#step")).to_have_text(well_on)
            expect(page.get_by_role("region", name="Convergence")).to_be_visible()
            _save(page.screenshot(clip=_clip(page, 860)), folder / "job.png")
            expect(page.locator("#state")).to_have_text("done", timeout=60_000)
            with Store.open(settings.database) as store:  # running jobs would come first
                busy = {JobState.WAITING, JobState.RUNNING}
                until(lambda: not any(Queue(store).counts()[state] for state in busy), "idle", 120)
            page.goto("/ui")
            _save(page.screenshot(), folder / "overview.png")
            _parts(page, folder, {"suites": ("Time saved for the suites", "Workers")})
        finally:
            worker.terminate()


@contextmanager
def _opened(
    chromium: Browser, origin: str, width: int, height: int, scheme: str = "light"
) -> Iterator[Page]:
    size = {"width": width, "height": height}
    with chromium.new_context(base_url=origin, viewport=size, color_scheme=scheme) as context:
        yield context.new_page()


def _parts(page: Page, folder: Path, parts: dict[str, tuple[str, str]]) -> None:
    """Take parts of a page, between two headings or from its beginning or to its end."""
    for name, (begin, end) in parts.items():
        start = _top(page, begin) if begin else 0.0
        stop = _top(page, end) if end else page.evaluate("document.body.scrollHeight")
        clip = _clip(page, stop, start)
        _save(page.screenshot(full_page=True, clip=clip), folder / f"{name}.png")


def _top(page: Page, heading: str) -> float:
    box = page.get_by_role("heading", name=heading, exact=True).bounding_box()
    assert box is not None
    return box["y"] - 12


def _clip(page: Page, end: float, start: float = 0) -> dict[str, float]:
    """A part of the page with its full width, between two heights."""
    return {"x": 0, "y": start, "width": page.viewport_size["width"], "height": end - start}


def _save(png: bytes, path: Path) -> None:
    _write(Image.open(io.BytesIO(png)).convert("RGB"), path)


def _write(image: Image.Image, path: Path) -> None:
    few = image.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

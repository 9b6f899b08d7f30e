"""What the pages show and change, in a real browser: searches, trials, orders, jobs that run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from gemmsmith.core.problem import Problem
from service.pages import addresses
from tests.support.browsing import IMPERFECT, Watch
from tests.support.content import CUBLAS_WINS, HOPELESS, RECORDED, TRIED
from tests.support.serving import H200, new_settings, running, trial
from tests.support.site import Site


def rows(page: Page) -> list[str]:
    return page.locator("tbody th").all_inner_texts()


def test_problems_are_searched_and_sorted(page: Page) -> None:
    page.goto("/ui/problems")
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
    expect(page.locator("tbody tr")).to_contain_text("cuBLAS stays")


def test_problems_are_filtered(page: Page) -> None:
    page.goto("/ui/problems")
    for name, value in (("Type", "bf16"), ("Layout", "tn"), ("Served", "cublas")):
        page.get_by_label(name, exact=True).select_option(value)
    page.get_by_label("Operation").select_option("plain")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_label("Served", exact=True)).to_have_value("cublas")
    assert {str(CUBLAS_WINS), str(HOPELESS)} <= {*rows(page)}
    for row in page.locator("tbody tr").all():
        expect(row).to_contain_text("cuBLAS stays")
    page.get_by_label("Search").fill("fp16")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("main")).to_contain_text("No winner matches fp16")
    page.get_by_role("link", name="Show all problems").click()
    assert len(rows(page)) == 50
    page.goto("/ui/problems?dtype=fp16&sort=size")
    page.get_by_role("link", name="Next page").click()
    assert "dtype=fp16" in page.url
    assert all("fp16" in row for row in rows(page))


def test_the_overview_tells_how_things_stand(page: Page, site: Site) -> None:
    page.goto("/")
    expect(page).to_have_title("Overview · gemmsmith")
    table = page.get_by_role("region", name="Winners by family and GPU")
    table.locator("summary", has_text="Plain products").click()
    row = table.locator("tbody tr", has_text="fp16")
    expect(row).to_contain_text("53 problems, 53 ahead")
    expect(row).to_contain_text("at best 71.0% faster")
    expect(page.get_by_role("region", name="Roofline").locator("svg")).to_be_visible()
    jobs = page.get_by_role("region", name="Jobs")
    expect(jobs.locator("tr", has_text="failed")).to_contain_text("nothing like it was recorded")
    expect(page.locator(".workers")).to_contain_text(f"on job {site.jobs['running'][:8]}")
    waiting = jobs.locator("tr", has_text="waiting")
    expect(waiting).to_contain_text("no worker that is alive takes jobs for another-gpu")
    site.queue.workers.report("elsewhere:1:x", [H200.slug, "another-gpu"])
    page.reload()
    expect(page.locator(".workers")).to_contain_text(
        f"elsewhere, for {H200.slug} and another-gpu: idle"
    )
    expect(waiting).to_contain_text("the worker on elsewhere runs it next")
    site.queue.workers.leave("elsewhere:1:x")
    table.locator("summary", has_text="Plain products").click()
    row.get_by_role("link").first.click()
    assert len(rows(page)) == 50
    assert all("fp16" in row for row in rows(page))


def test_a_search_that_cannot_be_read_is_explained(page: Page, watch: Watch) -> None:
    page.goto("/ui/problems")
    page.get_by_label("Search").fill("4096 <i>by</i>")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#q-error")).to_contain_text("<i>by</i>")
    expect(page.locator("#q-error")).to_contain_text("n=4096")
    expect(page.get_by_label("Search")).to_have_value("4096 <i>by</i>")
    page.goto("/ui/problems?q=99999x1")
    expect(page.locator("main")).to_contain_text("No winner matches")
    watch.forgive(422)


def test_a_problem_shows_its_trials_and_what_was_served(site: Site, page: Page) -> None:
    page.goto(addresses.problem(TRIED, H200.slug))
    expect(page.get_by_role("heading", name="Run CUTLASS")).to_be_visible()
    expect(page.locator(".big")).to_have_text("10.0% faster")
    ranked = page.get_by_role("region", name="Ranked trials").locator("tbody tr")
    expect(ranked).to_have_count(4)
    expect(ranked.first).to_contain_text("final")
    expect(page.get_by_role("region", name="Failed trials")).to_contain_text("<b>wrong</b>")
    finals = page.get_by_role("region", name="Finals of the latest run")
    assert finals.locator("circle").count() == 24
    expect(finals).not_to_contain_text("cuBLAS"), "measured in another run"
    expect(page.get_by_role("region", name="What is served")).to_contain_text("cuBLAS")
    expect(
        page.get_by_role("region", name="Trials by tile").locator("path.dots")
    ).not_to_have_count(0)
    expect(page.get_by_role("region", name="On other GPUs").locator("tbody tr")).to_have_count(2)
    history = page.get_by_role("region", name="Revisions").locator("tbody tr")
    expect(history).to_have_count(2)
    expect(history.first).to_contain_text("ratio +0.0%")
    page.get_by_role("button", name="Pin revision 1").click()
    expect(history.nth(1)).to_contain_text("pinned")
    expect(page.locator(".note")).to_contain_text("Pinned: this revision is served")
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


def test_a_problem_says_how_programs_ask_for_it(site: Site, page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(addresses.problem(TRIED, H200.slug))
    page.get_by_role("button", name="Copy: Python").click()
    program = page.evaluate("navigator.clipboard.readText()")
    assert program == page.get_by_role("region", name="Python").inner_text()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cutlass Ratio(median=1.1")
    command = page.get_by_role("region", name="curl").inner_text()
    [_, _, url] = shlex.split(command)
    assert site.http.get(url).json()["use"] == "cutlass"
    page.get_by_role("button", name="Copy: the kernel's name").click()
    served = site.store.winner(TRIED, H200.slug)
    assert served is not None
    assert served.candidate is not None
    assert page.evaluate("navigator.clipboard.readText()") == served.candidate.kernel.name


def test_the_description_has_examples_that_work(site: Site, page: Page) -> None:
    page.goto("/docs")
    for call in ("GET /best", "GET /devices", "GET /healthz"):
        command = page.get_by_role("region", name=f"Example of {call}", exact=True).inner_text()
        [_, _, url] = shlex.split(command)
        assert site.http.get(url).status_code == 200
    command = page.get_by_role("region", name="Example of POST /best:batch").inner_text()
    [*_, sent, url] = shlex.split(command)
    assert site.http.post(url, json=json.loads(sent)).status_code == 200
    page.get_by_text("Responses").first.click()
    shown = page.get_by_role("region", name="Answer of GET /best", exact=True).inner_text()
    assert json.loads(shown)["problem"]["n"] == 6144


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
    page.get_by_role("button", name="Request the tuning").click()
    expect(page.get_by_role("alert")).to_contain_text("n, k, priority")
    expect(page.locator("#k-error")).to_contain_text("1 … 2147483647")
    expect(page.locator("#n-error")).to_contain_text("'many'")
    expect(page.get_by_label("M", exact=True)).to_have_value("4096")
    expect(page.get_by_label("N", exact=True)).to_have_value("many")
    expect(page.get_by_label("Element types")).to_have_value("fp8_e4m3")
    for name, value in (("N", "64"), ("K", "64"), ("Priority", "0")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("Layout").select_option("nt")
    page.get_by_role("button", name="Request the tuning").click()
    expect(page.locator("#layout-error")).to_contain_text("fp8_e4m3 needs layout tn")
    assert site.queue.list(limit=1) == before
    watch.forgive(422)


def order(page: Page, problem: Problem) -> str:
    """Order a tuning by the form; the job's id."""
    page.goto("/ui/tune")
    for name in ("m", "n", "k"):
        page.get_by_label(name.upper(), exact=True).fill(str(getattr(problem, name)))
    page.get_by_role("button", name="Request the tuning").click()
    page.wait_for_url("**/ui/jobs/*")
    return page.url.rsplit("/", 1)[1]


STEPS = """document.addEventListener("DOMContentLoaded", () => {
  const step = document.getElementById("step");
  const tell = () => stepped(step.textContent);
  if (step) new MutationObserver(tell).observe(step, { childList: true });
});"""
"""A script that tells of every step that a job's page shows while it is open."""


def test_an_ordered_tuning_is_watched_to_its_end(page: Page, site: Site) -> None:
    steps: list[str] = []
    page.expose_function("stepped", lambda step: steps.append(step))
    page.add_init_script(STEPS)
    job = order(page, RECORDED)
    expect(page.locator("#state")).to_have_text("waiting")
    expect(page.locator("#step")).to_contain_text("the worker on test has another job")
    command = [sys.executable, "-m", "service.worker.process"]
    environ = {**os.environ, **site.settings.environment()}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as worker:
        try:
            expect(page.locator("#state")).to_have_text("done", timeout=60_000)
        finally:
            worker.kill()
    assert [step.split(":")[0] for step in steps if "screen" in step]
    expect(page.locator("#log li").first).to_contain_text("finished")
    page.get_by_role("link", name="See the winner").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(str(RECORDED))
    expect(page.locator(".tag", has_text="recorded H200").first).to_be_visible()
    expect(page.get_by_role("region", name="Finals of the latest run")).to_contain_text("cuBLAS")
    expect(page.get_by_role("region", name="What is served")).to_have_count(0)
    expect(page.get_by_role("region", name="Convergence").locator("path.best")).to_have_count(2)
    expect(page.get_by_role("region", name="Failed trials")).to_contain_text("refused")
    assert site.store.trials(job=job)


def test_a_running_job_is_shown_as_it_goes(page: Page, site: Site) -> None:
    job = order(page, Problem(m=21, n=22, k=23))
    page.evaluate("document.title = 'not loaded again'")
    leased = site.queue.lease("test:live", [])
    assert leased is not None
    assert leased.job.id == job
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#attempt")).to_have_text("1")
    expect(page.locator("#started")).to_contain_text("UTC")
    made = [replace(trial(leased.job.problem, i), job=job) for i in range(3)]
    site.store.add_trials(made)
    leased.progress("screen", 5, 12, 7.125, "the best so far", "twelve candidates")
    expect(page.get_by_role("region", name="Convergence").locator("path.best")).to_have_count(2)
    expect(page.locator("#step")).to_have_text("screen: 5 of 12")
    expect(page.locator("#best-us")).to_have_text("7.125 µs")
    expect(page.locator("#best")).to_have_text("the best so far")
    expect(page.locator("#log li").first).to_contain_text("screen 5 of 12 · twelve candidates")
    assert page.title() == "not loaded again"
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("main")).to_contain_text("Cancellation was requested")
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


def test_a_queue_without_room_says_so_in_the_form(tmp_path: Path) -> None:
    with running(new_settings(tmp_path, queue_limit=1)) as http:
        for m, status in (("1", 303), ("2", 429)):
            answer = http.post("/ui/tune", data={"m": m, "n": "8", "k": "8", "calls": "7"})
            assert answer.status_code == status
        assert int(answer.headers["retry-after"]) > 0
        assert "1 jobs are waiting, which is the limit. Nothing was requested" in answer.text
        assert 'name="calls" inputmode="numeric" autocomplete="off" value="7"' in answer.text


def test_a_service_without_anything_says_how_to_begin(chromium: Browser, tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as http:
        origin = str(http.base_url)
        with chromium.new_context(base_url=origin) as context:
            watch = Watch(origin.rstrip("/"))
            page = watch.over(context.new_page())
            for path, said in (
                ("/ui", "There are no winners yet"),
                ("/ui", "none alive"),
                ("/ui/problems", "There are no winners yet"),
                ("/ui/problems?q=4096&sort=time", "No winner matches"),
                ("/ui/map", "No winner has K = 1"),
                ("/ui/jobs?state=failed", "There are no failed jobs"),
                ("/ui/devices", "There is no device yet"),
                ("/ui/tune", "whichever worker comes first"),
            ):
                page.goto(path)
                expect(page.locator("main")).to_contain_text(said)
                assert page.evaluate(IMPERFECT) == []
            assert watch.faults == []

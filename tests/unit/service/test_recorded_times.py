"""Times of a recorded GPU say so wherever a job or its result is shown, beside what is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gemmsmith import Client, Problem
from gemmsmith.core.config import Use
from gemmsmith.http.jobs import JobStatus
from service.settings import Settings
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, statistics, trial, winner
from tuner.jobs import Queue
from tuner.store import Store

PROBLEM = Problem(256, 4096, 4096)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = new_settings(tmp_path)
    promote(made, winner(PROBLEM))  # measured: 10 µs, revision 1
    return made


@pytest.fixture
def http(settings: Settings) -> Iterator[httpx.Client]:
    with running(settings) as found:
        yield found


def tuned(settings: Settings, *, replayed: bool = True, use: Use = Use.CUTLASS) -> str:
    """A job that a worker has done; its identifier."""
    recorded = H200.name if replayed else ""
    with Store.open(settings.database) as store:
        queue = Queue(store)
        job, _ = queue.enqueue(PROBLEM)
        leased = present(queue.lease("worker", []))
        for i in range(3):
            store.add_trial(replace(trial(PROBLEM, i), job=job.id, replayed=replayed))
        found = replace(winner(PROBLEM, use=use, us=12.345), job=job.id, replayed=replayed)
        found = replace(found, statistics=statistics(12.345))
        promoted = store.promote(found)
        best_us = 12.345 if use is Use.CUTLASS else 12.345 * 1.1
        leased.progress("promote", 3, 3, best_us, "the best", "", recorded)
        leased.complete(promoted.revision, {"device": H200.slug})
        return job.id


def test_a_job_says_whose_times_it_has(settings: Settings, http: httpx.Client) -> None:
    job = tuned(settings)
    assert http.get(f"/jobs/{job}").json()["recorded"] == "NVIDIA H200"
    assert http.get("/jobs").json()["jobs"][0]["recorded"] == "NVIDIA H200"
    events = http.get(f"/jobs/{job}/events").text
    assert '"recorded":"NVIDIA H200"' in events
    listed = http.get("/ui/jobs").text
    assert re.search(r'12\.35 <span class="tag"[^>]*>recorded H200</span>', listed)
    measured = tuned(settings, replayed=False)
    assert http.get(f"/jobs/{measured}").json()["recorded"] == ""
    assert "recorded H200" not in http.get(f"/ui/jobs/{measured}").text


def test_a_waiting_job_has_no_times(http: httpx.Client) -> None:
    asked = {"m": 8, "n": 8, "k": 8}
    job = http.post("/tune", json=asked).json()
    assert job["recorded"] == ""
    page = http.get(f"/ui/jobs/{job['id']}").text
    assert re.search(r'id="recorded"[^>]* hidden>', page)


@pytest.mark.parametrize("use", [Use.CUTLASS, Use.CUBLAS])
def test_a_jobs_page_wait_and_chart_have_one_number(
    settings: Settings, http: httpx.Client, use: Use
) -> None:
    job = tuned(settings, use=use)
    with Client(str(http.base_url), cache_dir=None) as client:
        won = client.job(job).wait(timeout=30)
        status: JobStatus = client.job_status(job)
    result = present(won.baseline if use.is_default else won.statistics)
    assert (won.revision, won.use, won.replayed) == (2, use, True)
    assert won.served.revision == 1
    assert not won.served.replayed
    assert result.median_us == status.best_us
    page = http.get(f"/ui/jobs/{job}").text
    shown = f"{result.median_us:.2f}"
    assert re.search(rf'<dt>Result</dt><dd><span id="best-us">{shown} µs</span>', page)
    assert f"result {shown}" in page
    picture = http.get(f"/ui/jobs/{job}/convergence").text
    assert picture.count(f"result {shown}<") == 2  # against trials, and against seconds
    served = present(re.search(r"<dt>Served</dt>.*?</dd>", page, re.DOTALL))
    assert "10.00 µs" in served[0]
    assert "recorded" not in served[0]
    assert "revision 1, not this job's 2" in served[0].replace("&#39;", "'")


def test_a_result_that_is_served_is_alone(settings: Settings, http: httpx.Client) -> None:
    job = tuned(settings, replayed=False)
    assert "<dt>Served</dt>" not in http.get(f"/ui/jobs/{job}").text
    with Client(str(http.base_url), cache_dir=None) as client:
        won = client.job(job).wait(timeout=30)
    assert won.is_served
    assert won.served.to_dict() == {k: v for k, v in won.to_dict().items() if k != "served"}


def test_a_problems_page_marks_recorded_times(settings: Settings, http: httpx.Client) -> None:
    other = Problem(512, 512, 1024)
    promote(settings, replace(winner(other, us=7.0), replayed=True))
    page = http.get(f"/ui/problems/{H200.slug}/bf16/tn/512x512x1024").text
    for time in ("7.000", "7.700"):
        assert re.search(rf"{time} µs <span[^>]*>recorded H200</span>", page)
    assert "recorded H200" in http.get("/ui/problems").text
    assert "recorded H200" not in http.get(f"/ui/problems/{H200.slug}/bf16/tn/256x4096x4096").text

"""`/results`, `/devices`, `/kernels`, `/packs`, `/metrics` and `/docs`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Layout, Problem
from service.settings import Settings
from tests.support.processes import until
from tests.support.serving import H100, H200, new_settings, pages, running, trial
from tuner.store import Store
from tuner.trial import Trial

SMALL = Problem(m=64, n=64, k=64)
OTHER = Problem(m=128, n=64, k=64, layout=Layout.NT)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path_factory.mktemp("history"))
    with Store.open(settings.database) as store:
        for index in range(5):
            store.add_trial(trial(SMALL, index))
        store.add_trial(trial(OTHER))
    with running(settings) as client:
        yield client


def test_results_page_by_page_are_the_trials_whole(history: httpx.Client) -> None:
    listed = pages(history, f"/results?device={H200.slug}&limit=2", "trials")
    found = [item for page in listed for item in page]
    assert len(found) == 6
    assert [msgspec.convert(item, Trial) for item in found[:5]] == [
        trial(SMALL, index) for index in range(5)
    ]
    assert len({item["id"] for item in found}) == 6


def test_results_are_filtered(history: httpx.Client) -> None:
    for query, count in (
        ("m=64&n=64&k=64", 5),
        ("m=128&n=64&k=64&layout=nt", 1),
        ("m=128&n=64&k=64", 0),
        ("layout=nt", 1),
        ("dtype=fp16", 0),
        ("phase=final", 0),
        ("phase=screen&limit=3", 3),
        ("job=none", 0),
        ("device=unknown", 0),
    ):
        assert len(history.get(f"/results?{query}").json()["trials"]) == count, query


def test_results_as_csv(history: httpx.Client) -> None:
    reply = history.get("/results?format=csv&limit=4")
    rows = list(csv.DictReader(io.StringIO(reply.text)))
    assert reply.headers["content-type"].startswith("text/csv")
    assert [row["median_us"] for row in rows] == ["10.0", "11.0", "12.0", "13.0"]
    following = re.fullmatch(r'<(.*)>; rel="next"', reply.headers["link"])
    assert following
    assert len(history.get(following[1]).text.splitlines()) == 3


def test_devices_are_listed_with_the_default_first(client: httpx.Client) -> None:
    devices = client.get("/devices").json()["devices"]
    assert {device["slug"] for device in devices} == {H200.slug, H100.slug}
    assert [device["default"] for device in devices] == [True, False]
    assert not any(device["local"] for device in devices)


def test_the_local_gpu_is_the_default(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.state.usable_gpu", lambda: H200)
    with running(settings) as client:
        devices = client.get("/devices").json()["devices"]
        assert (devices[0]["slug"], devices[0]["local"], len(devices)) == (H200.slug, True, 2)
        assert client.get("/best?m=4096&n=4096&k=4096").json()["device"]["name"] == H200.name
        other = client.get("/best?m=1&n=1&k=1&arch=sm90&device=nvidia-h100-pcie-114sm")
        assert other.json()["device"]["name"] == H100.name


def test_a_kernel_is_described(history: httpx.Client) -> None:
    kernel = trial(SMALL).candidate.kernel
    reply = history.get(f"/kernels/{kernel.name}").json()
    assert msgspec.convert(reply, AnyKernel) == kernel
    assert reply["pack"] is None


def test_metrics_count_requests_lookups_and_jobs(history: httpx.Client) -> None:
    history.get("/best?m=1&n=1&k=1")
    history.get("/best?m=1&n=1&k=1&exact=true")
    history.get("/nowhere")
    history.get("/jobs/abc")
    until(lambda: "gemmsmith_records" in history.get("/metrics").text, "the database was not read")
    text = history.get("/metrics").text
    for line in (
        'gemmsmith_lookups_total{match="unknown"} 1.0',
        'gemmsmith_lookups_total{match="exact"} 0.0',
        'gemmsmith_lookups_total{match="predicted"} 1.0',
        'gemmsmith_requests_total{method="GET",route="unmatched",status="404"} 1.0',
        'gemmsmith_requests_total{method="GET",route="/jobs/{job_id}",status="404"} 1.0',
        'gemmsmith_request_seconds_count{route="/best"} 2.0',
        'gemmsmith_jobs{state="waiting"} 0.0',
        'gemmsmith_records{kind="trials"} 6.0',
    ):
        assert line in text


def test_docs_need_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert "<script" not in page
    assert "1 … 2147483647" in page


def test_index_links_work(client: httpx.Client) -> None:
    links = client.get("/").json()["links"]
    for name in ("jobs", "results", "devices", "healthz", "readyz", "metrics", "docs"):
        assert client.get(links[name]["href"]).status_code == 200

"""The service with its worker, on a recorded GPU: from an order to a served winner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tests.integration.test_service_events import read_events
from tests.support.processes import address, commands, serving, until
from tests.support.serving import ENVIRONMENT, H200
from tuner.backends import kernels, launches
from tuner.devices.recording import Header, RecordedProblem, RecordedTrial, SweepWriter

RECORDED = Problem(m=4096, n=4096, k=4096)
NOT_RECORDED = Problem(m=4096, n=4096, k=4104)
CONDITIONS = Conditions(sm_clock_mhz=1755.0, power_w=600.0, temperature_c=60.0)
CHECKED = Correctness(error=1e-3, max_error=2e-3, tolerance=1e-2, repeatable=True)
FASTEST_US = 180.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a made-up sweep of one problem; its third candidate is the fastest."""
    folder = tmp_path_factory.mktemp("worker")
    header = Header(
        schema=1,
        device=H200,
        environment=ENVIRONMENT,
        recorded_at="2026-11-20T00:00:00+00:00",
        gemmsmith="0.1.0",
    )
    trials = []
    for index, kernel in enumerate(kernels(RECORDED)[:12]):
        us = FASTEST_US if index == 2 else 200.0 + index
        trials.append(
            RecordedTrial(
                candidate=Candidate(kernel=kernel, launch=launches(kernel, RECORDED, H200)[0]),
                common_us=tuple(us + round_ / 100 for round_ in range(7)),
                further_us=tuple(us + round_ / 100 for round_ in range(25)),
                correctness=CHECKED,
            )
        )
    with SweepWriter(folder / "sweeps" / "made-up.jsonl.zst", header) as writer:
        writer.append(
            RecordedProblem(
                problem=RECORDED,
                baseline_common_us=tuple(210.0 + round_ / 100 for round_ in range(7)),
                baseline_further_us=tuple(210.0 + round_ / 100 for round_ in range(25)),
                conditions=CONDITIONS,
                further_conditions=CONDITIONS,
                discarded_rounds=0,
                trials=tuple(trials),
            )
        )
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving(folder, "worker", GEMMSMITH_DEVICE="replay:made-up") as running:
        yield running


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    until(lambda: bool(psutil.Process(process.pid).children()), "no worker")
    return psutil.Process(process.pid).children()[0]


def test_the_printed_order_is_tuned_and_then_served(
    service: tuple[subprocess.Popen[str], str],
) -> None:
    _, banner = service
    lookup, tune, events = commands(banner)
    job = json.loads(subprocess.check_output(tune))
    stream = subprocess.check_output(events, text=True, timeout=60)
    seen = list(read_events(iter(stream.splitlines())))
    kinds = [event.kind for event in seen]
    assert kinds[0] == "created"
    assert kinds[-2:] == ["winner", "finished"]
    assert "progress" in kinds
    assert {event.data["job"] for event in seen} == {job["id"]}
    answer = json.loads(subprocess.check_output(lookup))
    assert answer["match"] == "exact"
    assert answer["replayed"]
    assert answer["statistics"]["median_us"] == pytest.approx(FASTEST_US, rel=0.01)
    assert answer["config"]["kernel"]["name"] == kernels(RECORDED)[2].name
    assert seen[-1].data["winner_revision"] == answer["revision"]
    trials = httpx.get(f"{address(banner)}/results?job={job['id']}&phase=screen").json()["trials"]
    assert len(trials) >= 1
    [kept] = httpx.get(f"{address(banner)}/winners").json()["winners"]
    assert len(kept["signature"]["key"]) == 16  # the worker says that it measured this


def test_what_was_not_recorded_fails_at_once_and_says_what_was(
    service: tuple[subprocess.Popen[str], str],
) -> None:
    url = address(service[1])
    body = {"m": NOT_RECORDED.m, "n": NOT_RECORDED.n, "k": NOT_RECORDED.k}
    href = httpx.post(f"{url}/tune", json=body).headers["location"]
    with httpx.stream("GET", f"{url}{href}/events", timeout=60) as stream:
        last = list(read_events(stream.iter_lines()))[-1]
    assert last.kind == "failed"
    job = httpx.get(url + href).json()
    assert job["state"] == "failed"
    assert job["attempt"] == 1
    assert str(RECORDED) in job["error"]


def test_a_killed_worker_is_replaced(service: tuple[subprocess.Popen[str], str]) -> None:
    process, banner = service
    first = worker_of(process)
    first.kill()
    until(
        lambda: any(child.pid != first.pid for child in psutil.Process(process.pid).children()),
        "no second worker",
    )
    url = address(banner)
    body = {"m": RECORDED.m, "n": RECORDED.n, "k": RECORDED.k, "effort": "exhaustive"}
    href = httpx.post(f"{url}/tune", json=body).headers["location"]
    until(lambda: httpx.get(url + href).json()["state"] == "done", "the job was not done")


def test_no_worker_outlives_a_killed_service(folder: Path) -> None:
    with serving(folder, "worker", GEMMSMITH_DEVICE="replay:made-up") as (process, _):
        worker = worker_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs([worker], timeout=30)
        assert not worker.is_running()


def test_sigterm_stops_service_and_worker(folder: Path) -> None:
    with serving(folder, "worker", GEMMSMITH_DEVICE="replay:made-up") as (process, _):
        worker = worker_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not worker.is_running()

"""`/metrics`: figures of this process and of the whole fleet, read quickly and once each."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from service.metrics.database import Figures
from service.worker import process
from tests.support import fake_nvcc
from tests.support.present import present
from tests.support.processes import until
from tests.support.recordings import record
from tests.support.records import failed_trial, trial, winner
from tests.support.serving import new_settings, promote, running
from tuner.devices.replay import ReplayDevice
from tuner.jobs import Queue
from tuner.jobs.figures import Watch
from tuner.store import Store
from tuner.store.totals import Totals


def scrape(client: httpx.Client) -> dict[str, Metric]:
    """The families of a scrape, as Prometheus reads them, once they are up to date."""
    text = ""

    def read() -> bool:
        nonlocal text
        text = client.get("/metrics").text
        return "\ngemmsmith_records" in text

    until(read, "the database's figures were not read")
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float | None:
    for family in families.values():
        for found in family.samples:
            if found.name == sample and found.labels == labels:
                return float(found.value)
    return None


def test_totals_count_each_row_once(store: Store) -> None:
    totals = Totals(store.database, settle_s=0.0)
    store.add_trials([trial(0), trial(1), failed_trial(2)])
    store.promote(winner())
    first = totals.read()
    store.add_trials([trial(1), trial(3), trial(4, Problem(m=8, n=8, k=8))])  # the first is known
    store.promote(winner(time=9.0))
    second = totals.read()
    assert first is not None
    assert second is not None
    assert first.trials == {("screen", "measured"): 2, ("screen", "non_finite"): 1}
    assert first.trial_seconds[("screen", "measured")] == 0.5
    assert second.trials == {("screen", "measured"): 4, ("screen", "non_finite"): 1}
    assert second.records == store.counts()
    assert second.records["winners"] == 1


def test_totals_wait_for_transactions_that_may_still_commit(store: Store) -> None:
    totals = Totals(store.database, settle_s=0.2)
    store.add_trial(trial(0))
    assert totals.read() is not None
    store.add_trial(trial(1))
    soon = present(totals.read())
    assert soon.records["trials"] == (2 if store.database.is_sqlite else 1)
    time.sleep(0.25)
    later = present(totals.read())
    assert later.records["trials"] == 2


def test_totals_stop_between_pieces(store: Store) -> None:
    store.add_trial(trial(0))
    totals = Totals(store.database)
    assert totals.read(should_stop=lambda: True) is None
    after = present(totals.read())
    assert after.records["trials"] == 1


def test_time_of_jobs_is_told_from_their_events(store: Store) -> None:
    queue, watch = Queue(store), Watch(store.database)
    done, _ = queue.enqueue(Problem(m=8, n=8, k=8))
    before = watch.read()
    assert before.states == {"waiting": 1, "running": 0}
    time.sleep(0.05)
    waiting = watch.read()
    assert waiting.oldest_waiting_s >= 0.05
    leased = present(queue.lease("host-a:12:ff", ["any"]))
    leased.progress("enumerate", 0, 9)
    time.sleep(0.02)
    leased.progress("compile", 1, 2)
    time.sleep(0.03)
    leased.progress("screen", 1, 2)
    leased.event("built", {"found": 3, "compiled": 2, "failed": 1, "compile_s": 7.5})
    halfway = watch.read()
    assert halfway.states == {"waiting": 0, "running": 1}
    assert halfway.oldest_waiting_s == 0.0
    leased.progress("finals", 0, 2)
    time.sleep(0.04)
    leased.progress("promote", 2, 2)
    leased.complete(None)
    queue.cancel(queue.enqueue(Problem(m=8, n=8, k=16))[0].id)  # between two readings
    after = watch.read()
    assert after.ended == {"done": 1, "failed": 0, "cancelled": 1}
    assert after.phase_seconds["waiting"] >= 0.05
    assert after.phase_seconds["compile"] >= 0.02
    assert after.phase_seconds["screen"] >= 0.03
    assert after.phase_seconds["finals"] >= 0.04  # ends with the report of the promotion
    assert after.phase_seconds["screen"] >= halfway.phase_seconds["screen"]
    busy = after.phase_seconds["screen"] + after.phase_seconds["finals"]
    assert abs(after.busy_seconds["host-a"] - busy) < 1e-9
    assert after.kernels == {"found": 3, "compiled": 2, "failed": 1}
    assert after.compile_seconds == 7.5
    assert watch.read() == after
    assert Watch(store.database).read().ended == after.ended  # a service that starts later
    assert queue.get(done.id).state == "done"


def test_time_in_which_nobody_had_a_job_is_nobodys(store: Store) -> None:
    queue, watch = Queue(store), Watch(store.database)
    queue.enqueue(Problem(m=8, n=8, k=8))
    dying = present(queue.lease("host-a:1:a", ["any"], ttl_s=0.05))
    dying.progress("screen", 1, 2)
    before = watch.read()
    time.sleep(0.1)
    assert watch.read().abandoned == 1
    second = present(queue.lease("host-b:1:a", ["any"]))
    second.release()
    time.sleep(0.05)
    after = watch.read()
    assert after.phase_seconds == before.phase_seconds
    assert after.abandoned == 0
    assert after.states["waiting"] == 1


def test_a_scrape_is_what_prometheus_reads(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    promote(settings, winner())
    with running(settings) as client:
        client.get("/best?m=256&n=4096&k=4096")
        client.post("/tune", json={"m": 8, "n": 8, "k": 8})
        families = scrape(client)
        assert value(families, "gemmsmith_lookups_total", match="exact") == 1
        assert value(families, "gemmsmith_request_seconds_count", route="/best") == 1
        assert value(families, "gemmsmith_jobs", state="waiting") == 1
        assert value(families, "gemmsmith_jobs_ended_total", outcome="failed") == 0
        assert value(families, "gemmsmith_records", kind="winners") == 1
        for name in ("database", "packs"):
            free = present(value(families, "gemmsmith_disk_free_bytes", volume=name))
            assert free > 0
        age = present(value(families, "gemmsmith_figures_read_timestamp_seconds"))
        assert abs(time.time() - age) < 30
        for family in families.values():
            assert family.documentation, family.name
            assert family.type != "unknown", family.name


def test_a_scrape_does_not_wait_for_a_database_that_is_gone(store: Store) -> None:
    figures = Figures(store)
    figures.refresh(patience_s=30)
    read_at = present(figures.read_at)
    with store.database.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs RENAME TO gone")
    try:
        figures.refresh(patience_s=30)
    finally:
        figures.close()
    assert figures.read_at == read_at
    assert figures.jobs is not None
    figures.refresh()  # closed: harmless


def test_what_an_attempt_builds_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(m=256, n=4096, k=4096)
    settings = new_settings(tmp_path, device="replay:h200")
    record(settings.sweeps, problem)
    compiler = fake_nvcc.toolchain(tmp_path / "toolchain")
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: compiler)
    monkeypatch.setattr(ReplayDevice, "needs_packs", True)
    with Store.open(settings.database) as store:
        queue, watch = Queue(store), Watch(store.database)
        watch.read()  # jobs that were over before the first reading are not followed
        queue.enqueue(problem, effort=Effort.QUICK, device="")
        assert process.run(settings, until_idle=True) == 1
        built = watch.read()
        assert built.ended["done"] == 1
        assert built.kernels["compiled"] > 0
        assert built.kernels["failed"] == 0
        assert built.compile_seconds > 0
        queue.enqueue(problem, effort=Effort.QUICK, device="")
        assert process.run(settings, until_idle=True) == 1
        found = watch.read()
        assert found.kernels["compiled"] == built.kernels["compiled"]
        assert found.kernels["found"] > built.kernels["found"]
        assert found.compile_seconds == built.compile_seconds

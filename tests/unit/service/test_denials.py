"""Job of another keys and idempotency keys; what was denied is in the audit, however often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.http import denials
from service.http.denials import Denials
from tests.support.processes import until
from tests.support.serving import Keyed, keyed, new_settings
from tuner.store import Store
from tuner.store.audit import UNKNOWN, Action, AuditEntry
from tuner.store.keys import Scope

SIZES = {"m": 64, "n": 64, "k": 64}


@pytest.fixture
def service(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyed]:
    monkeypatch.setattr(denials.Denials.__init__, "__defaults__", (0.2,))
    settings = new_settings(tmp_path, database=store_url, require_keys=True)
    scopes = {"ann": Scope.TUNE, "bob": Scope.TUNE, "reader": Scope.READ, "boss": Scope.ADMIN}
    with keyed(settings, **scopes) as running:
        yield running


def denied(service: Keyed) -> list[AuditEntry]:
    return service.store.audit.entries(action=Action.DENIED)


def test_only_its_own_key_or_an_admin_changes_a_job(service: Keyed) -> None:
    job = service.ask("POST", "/tune", "ann", json=SIZES).json()["id"]
    refused = service.ask("DELETE", f"/jobs/{job}", "bob")
    assert (refused.status_code, refused.json()["title"]) == (403, "Job of another key")
    assert service.ask("POST", f"/ui/jobs/{job}/cancel", "bob").status_code == 403
    assert "/cancel" not in service.ask("GET", f"/ui/jobs/{job}", "bob").text
    assert "/cancel" in service.ask("GET", f"/ui/jobs/{job}", "ann").text
    assert service.ask("GET", f"/jobs/{job}", "ann").json()["state"] == "waiting"
    assert service.ask("DELETE", f"/jobs/{job}", "ann").json()["state"] == "cancelled"
    assert service.ask("POST", f"/jobs/{job}/retry", "bob").status_code == 403
    assert "/retry" not in service.ask("GET", f"/ui/jobs/{job}", "bob").text
    again = service.ask("POST", f"/jobs/{job}/retry", "ann")
    assert again.status_code == 202
    assert service.ask("DELETE", again.headers["location"], "boss").status_code == 202
    assert service.ask("POST", f"/jobs/{job}/retry", "boss").status_code == 202


def test_two_keys_do_not_see_each_others_jobs_by_an_idempotency_key(service: Keyed) -> None:
    def order(key: str, m: int) -> httpx.Response:
        return service.ask(
            "POST", "/tune", key, json={**SIZES, "m": m}, headers={"Idempotency-Key": "1"}
        )

    anns, bobs = order("ann", 64), order("bob", 128)
    assert (anns.status_code, bobs.status_code) == (202, 202)
    assert anns.json()["id"] != bobs.json()["id"]
    assert order("ann", 64).json()["id"] == anns.json()["id"]
    assert order("bob", 128).json()["id"] == bobs.json()["id"]


def test_what_is_denied_is_in_the_audit(service: Keyed) -> None:
    service.ask("POST", "/tune", "reader", json=SIZES)
    until(lambda: bool(denied(service)), "the first denial is written")
    for number in range(25):
        service.http.get(f"/jobs/{number}", headers={"Authorization": f"Bearer gsk_{number}"})
    told = "all of them are"
    until(lambda: sum(e.detail["times"] for e in denied(service)) == 26, told)
    for_scope = denied(service)[-1]
    assert (for_scope.actor, for_scope.subject) == ("reader", "POST /tune")
    assert (for_scope.detail["status"], for_scope.detail["times"]) == (403, 1)
    assert for_scope.detail["address"] == "127.0.0.1"
    strangers = [entry for entry in denied(service) if entry.actor == UNKNOWN]
    assert {entry.subject for entry in strangers} == {"GET /jobs/{job_id}"}
    assert {entry.detail["status"] for entry in strangers} == {401}
    listed = service.ask("GET", "/audit?action=denied", "boss").json()["entries"]
    assert all(entry["intact"] for entry in listed)
    assert len(listed) == len(denied(service))
    assert "gsk_" not in repr(denied(service))
    assert service.store.audit.verify().fault is None


def test_denials_without_end_are_few_entries(store: Store) -> None:
    with Denials(store.audit, shortest_s=0.05) as summing:
        begun = time.monotonic()
        number = 0
        while time.monotonic() - begun < 1.0:
            number += 1
            summing.note((UNKNOWN, f"10.0.{number % 256}.{number % 251}", 401), "GET /jobs")

    def entries() -> list[AuditEntry]:
        return store.audit.entries(limit=None)

    assert number > 1_000
    # The end waits for a busy database no longer than for one that does not answer.
    until(lambda: sum(entry.detail["times"] for entry in entries()) == number, "not all are noted")
    # After 0.05, 0.1, 0.2 and 0.4 s, and at the end: 20 each at most.
    assert len(entries()) <= 6 * 20
    assert {entry.detail["address"] for entry in entries()} >= {"others"}

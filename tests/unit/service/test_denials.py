"""Job of another keys and idempotency keys; what was denied is in the audit, however often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from service.http import denials
from service.http.denials import Denials
from tests.support.processes import until
from tests.support.serving import new_settings, running
from tuner.store import Store
from tuner.store.audit import UNKNOWN, Action, AuditEntry
from tuner.store.keys import Scope

SIZES = {"m": 64, "n": 64, "k": 64}


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A service that asks for keys, and its database."""

    http: httpx.Client
    store: Store
    keys: dict[str, str]

    def ask(self, key: str, method: str, path: str, **more: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        headers |= more.pop("headers", {})  # type: ignore[arg-type]
        return self.http.request(method, path, headers=headers, **more)  # type: ignore[arg-type]

    def denied(self) -> list[AuditEntry]:
        return self.store.audit.entries(action=Action.DENIED)


@pytest.fixture
def keyed(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyed]:
    monkeypatch.setattr(denials.Denials.__init__, "__defaults__", (0.2,))
    settings = new_settings(tmp_path, database=store_url, require_keys=True)
    scopes = {"ann": Scope.TUNE, "bob": Scope.TUNE, "reader": Scope.READ, "boss": Scope.ADMIN}
    with Store.open(store_url) as store:
        keys = {name: store.keys.create(name, scope)[1] for name, scope in scopes.items()}
        with running(settings) as http:
            yield Keyed(http=http, store=store, keys=keys)


def test_only_its_own_key_or_an_admin_changes_a_job(keyed: Keyed) -> None:
    job = keyed.ask("ann", "POST", "/tune", json=SIZES).json()["id"]
    refused = keyed.ask("bob", "DELETE", f"/jobs/{job}")
    assert (refused.status_code, refused.json()["title"]) == (403, "Job of another key")
    assert keyed.ask("bob", "POST", f"/ui/jobs/{job}/cancel").status_code == 403
    assert "/cancel" not in keyed.ask("bob", "GET", f"/ui/jobs/{job}").text
    assert "/cancel" in keyed.ask("ann", "GET", f"/ui/jobs/{job}").text
    assert keyed.ask("ann", "GET", f"/jobs/{job}").json()["state"] == "waiting"
    assert keyed.ask("ann", "DELETE", f"/jobs/{job}").json()["state"] == "cancelled"
    assert keyed.ask("bob", "POST", f"/jobs/{job}/retry").status_code == 403
    assert "/retry" not in keyed.ask("bob", "GET", f"/ui/jobs/{job}").text
    again = keyed.ask("ann", "POST", f"/jobs/{job}/retry")
    assert again.status_code == 202
    assert keyed.ask("boss", "DELETE", again.headers["location"]).status_code == 202
    assert keyed.ask("boss", "POST", f"/jobs/{job}/retry").status_code == 202


def test_two_keys_do_not_see_each_others_jobs_by_an_idempotency_key(keyed: Keyed) -> None:
    def order(key: str, m: int) -> httpx.Response:
        return keyed.ask(
            key, "POST", "/tune", json={**SIZES, "m": m}, headers={"Idempotency-Key": "1"}
        )

    anns, bobs = order("ann", 64), order("bob", 128)
    assert (anns.status_code, bobs.status_code) == (202, 202)
    assert anns.json()["id"] != bobs.json()["id"]
    assert order("ann", 64).json()["id"] == anns.json()["id"]
    assert order("bob", 128).json()["id"] == bobs.json()["id"]


def test_what_is_denied_is_in_the_audit(keyed: Keyed) -> None:
    keyed.ask("reader", "POST", "/tune", json=SIZES)
    until(lambda: bool(keyed.denied()), "the first denial is written")
    for number in range(25):
        keyed.http.get(f"/jobs/{number}", headers={"Authorization": f"Bearer gsk_{number}"})
    told = "all of them are"
    until(lambda: sum(e.detail["times"] for e in keyed.denied()) == 26, told)
    for_scope = keyed.denied()[-1]
    assert (for_scope.actor, for_scope.subject) == ("reader", "POST /tune")
    assert (for_scope.detail["status"], for_scope.detail["times"]) == (403, 1)
    assert for_scope.detail["address"] == "127.0.0.1"
    strangers = [entry for entry in keyed.denied() if entry.actor == UNKNOWN]
    assert {entry.subject for entry in strangers} == {"GET /jobs/{job_id}"}
    assert {entry.detail["status"] for entry in strangers} == {401}
    listed = keyed.ask("boss", "GET", "/audit?action=denied").json()["entries"]
    assert all(entry["intact"] for entry in listed)
    assert len(listed) == len(keyed.denied())
    assert "gsk_" not in repr(keyed.denied())
    assert keyed.store.audit.verify().fault is None


def test_denials_without_end_are_few_entries(store: Store) -> None:
    with Denials(store.audit, shortest_s=0.05) as summing:
        begun = time.monotonic()
        number = 0
        while time.monotonic() - begun < 1.0:
            number += 1
            summing.note((UNKNOWN, f"10.0.{number % 256}.{number % 251}", 401), "GET /jobs")
    entries = store.audit.entries(limit=None)
    assert number > 1_000
    assert sum(entry.detail["times"] for entry in entries) == number
    # After 0.05, 0.1, 0.2 and 0.4 s, and at the end: 20 each at most.
    assert len(entries) <= 6 * 20
    assert {entry.detail["address"] for entry in entries} >= {"others"}

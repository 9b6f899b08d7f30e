"""API keys and the audit, on each kind of database."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from gemmsmith.core.problem import Problem
from gemmsmith.signing import Trusted
from tests.support.records import DEVICE, PROBLEM, winner
from tests.support.serving import winner as measured
from tuner.errors import KeyNameTaken, KeyNotFound
from tuner.exchange import export_winners, import_winners
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.audit import Action
from tuner.store.keys import Scope, digest, is_name

H200 = DEVICE.slug


def told(store: Store) -> list[tuple[str, str, str]]:
    return [(entry.actor, entry.action, entry.subject) for entry in store.audit.entries()]


def test_a_key_is_stored_by_its_hash_only(store: Store) -> None:
    key, secret = store.keys.create("ann", Scope.TUNE, job_limit=7)
    assert secret.startswith("gsk_")
    assert len(secret) == 4 + 43  # 32 bytes
    assert secret.startswith(key.prefix)
    assert (key.name, key.scope, key.job_limit, key.expires_at) == ("ann", Scope.TUNE, 7, None)
    assert abs(key.created_at - time.time()) < 60
    active, _ = store.keys.active()
    assert active == {digest(secret.encode()): key}
    with store.database.read() as session:
        rows = [*session.execute(text("SELECT * FROM api_keys")).all()]
        rows += session.execute(text("SELECT * FROM audit")).all()
    assert secret not in repr(rows)
    assert secret[len(key.prefix) :] not in repr(rows)


def test_two_keys_are_never_alike(store: Store) -> None:
    assert store.keys.create("a", Scope.READ)[1] != store.keys.create("b", Scope.READ)[1]


def test_a_name_is_used_once(store: Store) -> None:
    """What names a key, a job say, would otherwise belong to the later one too."""
    first, _ = store.keys.create("ann", Scope.READ)
    store.keys.create("brief", Scope.READ, expires_in_s=0.05)
    with pytest.raises(KeyNameTaken, match="'ann'"):
        store.keys.create("ann", Scope.READ)
    store.keys.revoke("ann")
    time.sleep(0.1)
    for name in ("ann", "brief"):
        with pytest.raises(KeyNameTaken, match=f"'{name}'.*choose another"):
            store.keys.create(name, Scope.READ)
    second, _ = store.keys.create("ann-2", Scope.READ)
    assert [key.id for key in store.keys.list()] == [second.id]
    everything = {key.name: key for key in store.keys.list(inactive=True)}
    assert everything.keys() == {"ann", "ann-2", "brief"}
    assert everything["ann"].id == first.id
    assert everything["ann"].revoked_at is not None
    with pytest.raises(KeyNotFound, match="'eve'"):
        store.keys.revoke("eve")


def test_of_many_at_once_one_gets_the_name(store: Store) -> None:
    def create(_: int) -> bool:
        try:
            store.keys.create("ann", Scope.READ)
        except KeyNameTaken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_an_expired_key_is_not_active(store: Store) -> None:
    store.keys.create("brief", Scope.READ, expires_in_s=0.05)
    key, _ = store.keys.create("long", Scope.READ, expires_in_s=3600)
    assert key.expires_at == pytest.approx(key.created_at + 3600)
    time.sleep(0.1)
    assert [key.name for key in store.keys.list()] == ["long"]
    with pytest.raises(KeyNotFound):
        store.keys.revoke("brief")


def test_pages_of_keys(store: Store) -> None:
    for number in range(5):
        store.keys.create(f"k{number}", Scope.READ)
    first = store.keys.list(limit=2)
    rest = store.keys.list(after=first[-1].id, limit=9)
    assert [key.name for key in [*first, *rest]] == ["k4", "k3", "k2", "k1", "k0"]


def test_use_is_noted(store: Store) -> None:
    key, _ = store.keys.create("ann", Scope.READ)
    other, _ = store.keys.create("bob", Scope.READ)
    store.keys.used([key.id])
    used = {key.name: key.last_used_at for key in store.keys.list()}
    assert used["ann"] is not None
    assert used["bob"] is other.last_used_at is None


def test_a_wider_scope_includes_the_narrower() -> None:
    assert Scope.READ.included == {Scope.READ}
    assert Scope.TUNE.included == {Scope.READ, Scope.TUNE}
    assert Scope.ADMIN.included == set(Scope)


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("ann", True),
        ("ci@example.org", True),
        ("9", True),
        ("a" * 100, True),
        ("a" * 101, False),
        ("", False),
        (".", False),
        ("..", False),
        ("a b", False),
        ("a/b", False),
        ("a\n", False),
        ("ü", False),
        ("local", False),
        ("import", False),
        ("gemmsmith", False),
    ],
)
def test_names_that_keys_may_have(name: str, usable: bool) -> None:
    assert is_name(name) is usable


def test_keys_are_in_the_audit(store: Store) -> None:
    store.keys.create("ann", Scope.ADMIN)
    store.keys.create("bob", Scope.READ, actor="ann")
    store.keys.revoke("bob", actor="ann")
    assert told(store) == [
        ("ann", "key-revoked", "bob"),
        ("ann", "key-created", "bob"),
        ("local", "key-created", "ann"),
    ]
    assert store.audit.entries()[-1].detail["scope"] == "admin"


def test_what_is_served_is_in_the_audit(store: Store) -> None:
    where = f"{PROBLEM} on {H200}"
    store.promote(winner(time=10.0))
    store.promote(winner(time=10.0))  # changes nothing
    store.promote(winner(time=9.0))
    store.promote(replace(winner(time=8.0), replayed=True))  # kept, not served
    store.pin(PROBLEM, H200, 1, actor="ann")
    store.unpin(PROBLEM, H200, actor="ann")
    assert told(store) == [
        ("ann", "unpinned", where),
        ("ann", "pinned", where),
        ("local", "promoted", where),
        ("local", "promoted", where),
    ]
    details = [(e.detail["revision"], e.detail["replaced"]) for e in store.audit.entries()]
    assert details == [(2, 1), (1, 2), (2, 1), (1, None)]


def test_a_jobs_winner_names_the_worker(store: Store) -> None:
    job, _ = Queue(store).enqueue(PROBLEM)
    leased = Queue(store).lease("host:1:abc", [])
    assert leased is not None
    store.promote(replace(winner(), job=job.id))
    (entry,) = store.audit.entries(action=Action.PROMOTED)
    assert entry.actor == "host:1:abc"
    assert entry.detail["job"] == job.id


def test_an_import_is_one_entry(store: Store, tmp_path: Path) -> None:
    for m in range(1, 6):
        store.promote(measured(Problem(m=64 * m, n=4096, k=4096)))
    export_winners(store, tmp_path / "w.jsonl")
    url = f"sqlite:///{tmp_path}/other.db"
    with Store.open(url, create=True) as other:
        import_winners(other, tmp_path / "w.jsonl", Trusted(), unsigned=True)
        import_winners(other, tmp_path / "w.jsonl", Trusted(), unsigned=True)  # adds nothing
        (entry,) = other.audit.entries()
    assert (entry.actor, entry.action) == ("import", "promoted")
    assert entry.subject == str(tmp_path / "w.jsonl")
    assert entry.detail == {"added": 5, "kept": 0, "unbelieved": 0}


def test_a_pack_that_goes_is_in_the_audit_once(store: Store) -> None:
    store.add_pack("abc", "toolchain", [None], 123)
    store.remove_pack("abc")
    store.remove_pack("abc")
    assert told(store) == [("gemmsmith", "pack-removed", "abc")]
    assert store.audit.entries()[0].detail == {"bytes": 123}


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.keys.create("ann", Scope.READ),
        lambda store: store.keys.revoke("bob"),
        lambda store: store.promote(winner(time=5.0)),
        lambda store: store.pin(PROBLEM, H200, 1),
        lambda store: store.remove_pack("abc"),
    ],
)
def test_nothing_changes_without_its_entry(store: Store, change: Callable[[Store], object]) -> None:
    store.keys.create("bob", Scope.READ)
    store.promote(winner())
    store.add_pack("abc", "toolchain", [None], 1)
    before = (store.keys.list(), store.history(PROBLEM, H200), store.winners_packs())
    with store.database.write() as session:
        session.execute(text("ALTER TABLE audit RENAME TO gone"))
    with pytest.raises(Exception, match="audit"):
        change(store)
    assert (store.keys.list(), store.history(PROBLEM, H200), store.winners_packs()) == before
    assert store.counts()["packs"] == 1


def test_entries_are_filtered_and_paged(store: Store) -> None:
    for number in range(5):
        store.keys.create(f"k{number}", Scope.READ, actor="ann" if number % 2 else "bob")
    store.keys.revoke("k0")
    assert [e.subject for e in store.audit.entries(actor="ann")] == ["k3", "k1"]
    assert [e.subject for e in store.audit.entries(action=Action.KEY_REVOKED)] == ["k0"]
    first = store.audit.entries(limit=2)
    rest = store.audit.entries(after=first[-1].id)
    assert [e.id for e in [*first, *rest]] == sorted((e.id for e in [*first, *rest]), reverse=True)
    assert len([*first, *rest]) == 6

"""The audit as a chain, on each kind of database: what is changed or removed shows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import text

from tests.support.records import DEVICE, PROBLEM, winner
from tuner.store import Store
from tuner.store.audit import Action, record
from tuner.store.keys import Scope


def meddle(store: Store, *statements: str) -> None:
    with store.database.write() as session:
        for statement in statements:
            session.execute(text(statement))


@pytest.fixture
def five(store: Store) -> Store:
    """A store whose audit has five entries."""
    for name in "abc":
        store.keys.create(name, Scope.READ)
    store.promote(winner())
    store.pin(PROBLEM, DEVICE.slug, 1, actor="a")
    return store


def test_the_chain_holds_as_it_is_written(five: Store) -> None:
    chain = five.audit.verify()
    assert (chain.entries, chain.fault) == (5, None)
    newest, *older = five.audit.entries()
    assert chain.head == newest.hash
    assert [entry.previous for entry in (newest, *older)] == [*(e.hash for e in older), ""]
    assert all(entry.intact for entry in (newest, *older))


def test_an_empty_audit_is_whole(store: Store) -> None:
    chain = store.audit.verify()
    assert (chain.entries, chain.head, chain.fault) == (0, "", None)


@pytest.mark.parametrize(
    ("statements", "fault", "intact"),
    [
        (("UPDATE audit SET actor = 'eve' WHERE id = 2",), "entry 2 was changed", {1, 3, 4, 5}),
        (("UPDATE audit SET at = at + 1 WHERE id = 5",), "entry 5 was changed", {1, 2, 3, 4}),
        (
            ("DELETE FROM audit WHERE id = 3",),
            "between entry 2 and entry 4, entries were removed or put in",
            {1, 2, 5},
        ),
        (
            ("DELETE FROM audit WHERE id = 1",),
            "between the beginning and entry 2, entries were removed or put in",
            {3, 4, 5},
        ),
        (("DELETE FROM audit WHERE id = 5",), "the newest entry (", {1, 2, 3, 4}),
        (("DELETE FROM audit",), "the newest entry (", set()),
        (
            ("DELETE FROM audit WHERE id > 3", "DELETE FROM audit_head"),
            "nothing says which entry is the newest",
            {1, 2, 3},
        ),
    ],
)
def test_what_was_done_to_it_shows(
    five: Store, statements: tuple[str, ...], fault: str, intact: set[int]
) -> None:
    meddle(five, *statements)
    chain = five.audit.verify()
    assert chain.fault is not None
    assert chain.fault.startswith(fault)
    assert {entry.id for entry in five.audit.entries() if entry.intact} == intact


def test_a_head_that_was_noted_shows_a_chain_made_anew(five: Store) -> None:
    noted = five.audit.verify().head
    assert five.audit.verify(noted).fault is None
    five.keys.create("later", Scope.READ)
    assert five.audit.verify(noted).fault is None
    meddle(five, "DELETE FROM audit", "DELETE FROM audit_head")
    five.keys.create("innocent", Scope.READ)
    assert five.audit.verify().fault is None
    assert five.audit.verify(noted).fault == f"the entry that was noted ({noted}) is missing"


def test_no_head_is_among_the_entries_by_being_empty(five: Store) -> None:
    assert five.audit.verify("").fault == "the entry that was noted () is missing"


def test_writers_at_once_make_one_chain(store: Store, store_url: str) -> None:
    """From two processes' points of view: each store has connections of its own."""
    with Store.open(store_url) as other, ThreadPoolExecutor(8) as pool:

        def add(number: int) -> None:
            which = (store, other)[number % 2]
            which.audit.add(Action.PACK_REMOVED, f"pack {number}", actor="me", number=number)

        assert len(list(pool.map(add, range(60)))) == 60
    chain = store.audit.verify()
    assert (chain.entries, chain.fault) == (60, None)
    assert {entry.detail["number"] for entry in store.audit.entries()} == set(range(60))


def test_what_is_undone_leaves_no_gap(store: Store) -> None:
    store.keys.create("a", Scope.READ)
    with suppress(ZeroDivisionError), store.database.write() as session:
        record(session, Action.PINNED, "nothing", actor="me")
        session.flush()
        raise ZeroDivisionError
    store.keys.create("b", Scope.READ)
    chain = store.audit.verify()
    assert (chain.entries, chain.fault) == (2, None)

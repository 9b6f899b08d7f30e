"""Histories, and what people choose to serve from them, on each database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmsmith.answers.history import Origin
from tests.support.records import DEVICE, PROBLEM, imported, winner
from tuner.errors import NoSuchRevision, NoSuchWinner, NothingToUndo
from tuner.store import Store
from tuner.store.audit import Action

H200 = DEVICE.slug
UNKNOWN = replace(PROBLEM, m=3)


@pytest.fixture
def three(store: Store) -> Store:
    """A store with three revisions of one problem, the last one current."""
    for us in (10.0, 9.0, 8.0):
        store.promote(winner(time=us))
    return store


def served(store: Store) -> tuple[int, bool]:
    stored = store.winner(PROBLEM, H200)
    assert stored is not None
    assert [r.winner for r in store.revisions(PROBLEM, H200) if r.current] == [stored]
    return stored.revision, stored.pinned


def test_a_history_says_which_is_current_and_where_it_comes_from(store: Store) -> None:
    store.promote(replace(winner(time=1.0), replayed=True))
    store.promote(winner(time=10.0))
    imported(store, winner(time=9.0))
    found = [(r.winner.revision, r.origin, r.current) for r in store.revisions(PROBLEM, H200)]
    assert found == [
        (3, Origin.IMPORTED, False),
        (2, Origin.MEASURED, True),
        (1, Origin.REPLAYED, False),
    ]
    assert store.revisions(UNKNOWN, H200) == store.revisions(PROBLEM, "nobody's") == []


def test_a_history_is_read_in_pages(three: Store) -> None:
    first = three.revisions(PROBLEM, H200, limit=2)
    rest = three.revisions(PROBLEM, H200, before=first[-1].winner.revision)
    assert [r.winner.revision for r in (*first, *rest)] == [3, 2, 1]


def test_what_is_pinned_survives_promotions_and_imports(three: Store) -> None:
    assert three.pin(PROBLEM, H200, 2).winner.pinned
    three.promote(winner(time=1.0))
    imported(three, winner(time=2.0))
    imported(three, winner(time=3.0))
    assert served(three) == (2, True)
    three.pin(PROBLEM, H200, 1)
    assert served(three) == (1, True)
    three.unpin(PROBLEM, H200)
    assert served(three) == (4, False)


def test_pinning_what_is_served_changes_its_answer(three: Store) -> None:
    before = three.sequence()
    three.pin(PROBLEM, H200, 3)
    assert served(three) == (3, True)
    assert three.sequence() > before


def test_rolling_back_serves_what_was_served_before(three: Store) -> None:
    imported(three, winner(time=20.0))  # never served: not a step back
    assert three.roll_back(PROBLEM, H200).winner.revision == 2
    three.promote(winner(time=1.0))
    assert served(three) == (2, True)
    three.roll_back(PROBLEM, H200)  # the present one is 2, and 3 was before it
    assert served(three) == (3, True)
    three.unpin(PROBLEM, H200)
    assert served(three) == (5, False)
    three.roll_back(PROBLEM, H200)
    assert served(three) == (3, True)


def test_what_cannot_be_is_refused_and_changes_nothing(store: Store) -> None:
    for change in (store.unpin, store.roll_back):
        with pytest.raises(NoSuchWinner, match="tune it first"):
            change(UNKNOWN, H200)
    with pytest.raises(NoSuchWinner):
        store.pin(UNKNOWN, H200, 1)
    store.promote(winner())
    with pytest.raises(NothingToUndo, match="no other revision"):
        store.roll_back(PROBLEM, H200)
    with pytest.raises(NothingToUndo, match="is pinned"):
        store.unpin(PROBLEM, H200)
    with pytest.raises(NoSuchRevision, match="it has 1"):
        store.pin(PROBLEM, H200, 2)
    assert served(store) == (1, False)
    assert [entry.action for entry in store.audit.entries()] == [Action.PROMOTED]


def test_who_chose_is_in_the_audit(three: Store) -> None:
    three.pin(PROBLEM, H200, 1, actor="anna")
    three.roll_back(PROBLEM, H200, actor="ben")
    three.unpin(PROBLEM, H200)
    entries = three.audit.entries(limit=3)
    assert [(e.action, e.actor, e.detail["revision"], e.detail["replaced"]) for e in entries] == [
        (Action.UNPINNED, "local", 3, 3),
        (Action.ROLLED_BACK, "ben", 3, 1),
        (Action.PINNED, "anna", 1, 3),
    ]
    assert {entry.subject for entry in entries} == {f"{PROBLEM} on {H200}"}

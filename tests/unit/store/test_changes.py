"""What tells that answers may have changed: two readings that agree, on each kind of database."""

from __future__ import annotations

from tests.support.records import PROBLEM, candidate, winner
from tests.support.replacing import replace
from tuner.store import Store


def served(store: Store) -> tuple[int, tuple[int, int, int]]:
    """What is read alone, after it was compared with the marks."""
    found, marks = store.changes.served(), store.changes.marks()
    assert found == (marks.sequence, marks.packs)
    return found


def test_both_readings_agree_on_what_is_served(store: Store) -> None:
    assert served(store) == (0, (0, 0, 0))
    store.promote(winner())
    first, packs = served(store)
    assert first > 0
    assert packs == (0, 0, 0)
    store.promote(winner(replace(PROBLEM, m=2 * PROBLEM.m)))
    second, _ = served(store)
    assert second > first
    store.add_pack("0" * 64, "toolchain", [candidate(1).kernel, candidate(2).kernel], 1000)
    sequence, (newest, count, kernels) = served(store)
    assert (sequence, count, kernels) == (second, 1, 2)
    assert newest > 0
    store.remove_pack("0" * 64)
    assert served(store) == (second, (0, 0, 0))


def test_what_others_wrote_is_seen_at_the_next_reading(store: Store, store_url: str) -> None:
    before = served(store)
    with Store.open(store_url) as other:
        other.promote(winner())
        assert served(store) == served(other) != before

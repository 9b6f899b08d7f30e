"""Winners of many problems, in one query."""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.records import DEVICE, OTHER_DEVICE, winner
from tuner.store import Store
from tuner.store.statement import fingerprint

BASE = Problem(m=256, n=4096, k=4096)
OTHERS = [
    replace(BASE, m=257),
    replace(BASE, n=257),
    replace(BASE, k=257),
    replace(BASE, batch=2),
    replace(BASE, dtype=DType.FP16),
    replace(BASE, layout=Layout.NN),
]


def test_of_many_problems_those_are_found_that_have_a_winner(store: Store) -> None:
    for problem in (BASE, *OTHERS[::2]):
        store.promote(winner(problem, time=20.0))
        store.promote(winner(problem, time=10.0))
    store.promote(replace(winner(OTHERS[1]), device=OTHER_DEVICE))
    winners = store.winners_of([BASE, *OTHERS], DEVICE.slug)
    expected = [store.winner(problem, DEVICE.slug) for problem in (BASE, *OTHERS[::2])]
    assert sorted(winners, key=lambda item: str(item.problem)) == sorted(
        filter(None, expected), key=lambda item: str(item.problem)
    )
    assert {item.revision for item in winners} == {2}


def test_no_problem_and_unknown_ones_find_nothing(store: Store) -> None:
    store.promote(winner(BASE))
    assert store.winners_of([], DEVICE.slug) == []
    assert store.winners_of(OTHERS, DEVICE.slug) == []
    assert store.winners_of([BASE], OTHER_DEVICE.slug) == []


def test_a_problem_asked_for_twice_comes_once_and_thousands_are_no_trouble(store: Store) -> None:
    store.promote(winner(BASE))
    many = [replace(BASE, m=1 + m) for m in range(10_000)]
    assert [item.problem for item in store.winners_of([BASE, *many, BASE], DEVICE.slug)] == [BASE]


def test_winners_that_a_history_shows_are_settled(store: Store) -> None:
    first, second, never = winner(BASE, 20.0), winner(BASE, 10.0), winner(BASE, 5.0)
    elsewhere = replace(first, device=OTHER_DEVICE)
    asked = [(found, fingerprint(found)) for found in (first, second, never, elsewhere)]
    assert store.imports.settled(asked) == set()
    store.promote(first)
    store.promote(second)
    assert store.imports.settled(asked) == {fingerprint(first), fingerprint(second)}
    assert store.imports.settled([]) == set()


def test_a_page_of_winners_is_the_beginning_of_all_of_them(store: Store) -> None:
    for problem in (BASE, *OTHERS):
        store.promote(winner(problem))
        store.promote(replace(winner(problem), device=OTHER_DEVICE))
    for device in (DEVICE.slug, None):
        everything = store.winners(device=device)
        assert store.winners(device=device, limit=3) == everything[:3]
    mine = store.winners(device=DEVICE.slug)
    assert store.winners(device=DEVICE.slug, after=mine[2].problem, limit=2) == mine[3:5]

"""Pages of winners and rankings of trials, alike on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.records import (
    DEVICE,
    ENVIRONMENT,
    OTHER_DEVICE,
    PROBLEM,
    failed_trial,
    trial,
    winner,
)
from tests.support.replacing import replace
from tests.support.types import FLOATS
from tuner.store import Store, listing
from tuner.store.listing import Listed, Order, Search
from tuner.trial import Phase

H200 = DEVICE.slug


def ratio(median: float) -> Ratio:
    return Ratio(median=median, ci_low=median - 0.01, ci_high=median + 0.01)


@pytest.fixture
def known(store: Store) -> Store:
    """Twelve winners, four ratios thrice each, two of them without one; one on another device."""
    for i in range(12):
        problem = Problem(m=2 ** (i % 3), n=64, k=100 + i, dtype=list(FLOATS)[i % 2])
        speedup = None if i in (4, 9) else ratio(1.0 + (i % 4) / 10)
        store.promote(replace(winner(problem, time=50.0 - i), speedup=speedup))
    store.promote(replace(winner(), device=OTHER_DEVICE))
    return store


def turned(store: Store, search: Search, order: Order, limit: int = 2) -> Iterator[Listed]:
    """Everything, page by page."""
    after = None
    while True:
        page = store.listing.winners(H200, search, order, after=after, limit=limit)
        yield from page.items
        after = page.following
        if after is None:
            return


KEYS = {
    Order.GAIN: lambda w: (w.speedup is None, -w.speedup.median if w.speedup else 0, -w.id),
    Order.LOSS: lambda w: (
        w.speedup is None,
        w.speedup.median if w.speedup else 0,
        w.id if w.speedup else -w.id,
    ),
    Order.TIME: lambda w: (-w.median_us, -w.id),
    Order.SIZE: lambda w: (w.problem.dtype, w.problem.layout, w.problem.batch, w.problem),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("order", list(Order))
def test_pages_give_every_winner_once_and_in_order(
    known: Store, order: Order, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(listing, "NARROW", 3)
    found = [*turned(known, Search(), order)]
    assert len({item.id for item in found}) == len(found) == 12
    assert {item.problem for item in found} == {w.problem for w in known.winners(device=H200)}
    in_time = order is Order.TIME and wide  # has no index: the gain instead
    assert found == sorted(found, key=KEYS[Order.GAIN if in_time else order])
    page = known.listing.winners(H200, Search(), order)
    assert page.total == (None if wide else 12)
    assert page.order is (Order.GAIN if in_time else order)


@pytest.mark.parametrize(
    ("search", "count"),
    [
        (Search(m=2), 4),
        (Search(k=103), 1),
        (Search(dtype=DType.BF16), 6),
        (Search(dtype=DType.BF16, m=1), 2),
        (Search(layout=Layout.NT), 0),
        (Search(extents=(64,)), 12),
        (Search(extents=(64, 104)), 1),
        (Search(extents=(104, 105)), 0),
        (Search(batch=2), 0),
    ],
)
def test_a_search_finds_what_meets_it(known: Store, search: Search, count: int) -> None:
    page = known.listing.winners(H200, search, Order.SIZE)
    assert (len(page.items), page.total) == (count, count)


def test_a_line_says_what_is_known_of_the_winner(store: Store) -> None:
    store.promote(winner())
    store.pin(PROBLEM, H200, 1)
    (item,) = store.listing.winners(H200, Search()).items
    stored = store.winner(PROBLEM, H200)
    assert stored is not None
    assert stored.candidate is not None
    assert (item.problem, item.use, item.revision) == (PROBLEM, stored.use, 1)
    assert (item.kernel, item.speedup) == (stored.candidate.kernel, stored.speedup)
    assert (item.median_us, item.baseline_us) == (10.0, 12.0)
    assert (item.pinned, item.replayed, item.stale) == (True, False, False)
    store.gpus.report(DEVICE, replace(ENVIRONMENT, driver="590.1"))
    (item,) = store.listing.winners(H200, Search()).items
    assert item.stale


def test_a_cursor_of_nothing_gives_the_first_page(known: Store) -> None:
    first = known.listing.winners(H200, Search(), limit=3)
    assert known.listing.winners(H200, Search(), limit=3, after=10**9) == first
    assert known.listing.winners("unknown", Search()).items == ()


def test_the_map_and_its_depths(store: Store) -> None:
    for m, n, k in ((2, 8, 64), (1, 16, 64), (1, 8, 64), (1, 8, 32)):
        store.promote(winner(Problem(m=m, n=n, k=k)))
    store.promote(winner(Problem(m=1, n=8, k=64, batch=3)))
    kind = (DType.BF16, Layout.TN)
    assert store.listing.depths(*kind) == [(64, 1, 3), (32, 1, 1), (64, 3, 1)]
    cells = store.listing.map(H200, *kind, k=64, batch=1, limit=10)
    assert [(c.problem.m, c.problem.n) for c in cells] == [(1, 8), (1, 16), (2, 8)]
    assert len(store.listing.map(H200, *kind, k=64, batch=1, limit=2)) == 2


def test_trials_are_ranked_by_their_latest_and_best_evidence(store: Store) -> None:
    def final(number: int, us: float, job: str) -> None:
        one = trial(number, job=job)
        assert one.statistics is not None
        timed = replace(one.statistics, median_us=us)
        store.add_trial(replace(one, phase=Phase.FINAL, statistics=timed))

    for number in range(4):
        store.add_trial(trial(number, job="first"))
    final(3, 9.0, "first")
    final(2, 13.0, "second")
    final(3, 14.0, "second")
    store.add_trial(replace(trial(2, job="third"), cost_s=9.9))
    store.add_trial(failed_trial(7))
    store.add_trial(replace(trial(8), device=OTHER_DEVICE))
    ranking = store.listing.ranking(PROBLEM, H200)
    names = [stored.trial.candidate.kernel.name for stored in ranking.measured]
    assert names == ["kernel_2", "kernel_3", "kernel_0", "kernel_1"]
    assert [stored.trial.job for stored in ranking.finalists] == ["second", "second"]
    assert [stored.trial for stored in ranking.failed] == [failed_trial(7)]
    assert (ranking.measured_total, ranking.failed_total) == (4, 1)
    short = store.listing.ranking(PROBLEM, H200, limit=1)
    assert (len(short.measured), short.measured_total) == (1, 4)
    assert store.listing.ranking(replace(PROBLEM, m=1), H200).measured == ()


def plans(url: str, search: Search, orders: tuple[Order, ...]) -> list[str]:
    """How SQLite answers what is asked for second pages of that search."""
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        asked.append((statement, given))

    with Store.open(url) as store:
        store.promote(winner())
        event.listen(Engine, "before_cursor_execute", note)
        try:
            for order in orders:
                store.listing.winners(H200, search, order)
                store.listing.winners(H200, search, order, after=1)
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        with store.database.connect() as connection:
            return [
                "; ".join(
                    row[-1]
                    for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)
                )
                for statement, given in asked
                if "ORDER BY" in statement
            ]


@pytest.mark.parametrize(
    "search",
    [
        Search(),
        Search(dtype=DType.BF16, n=4096),
        Search(layout=Layout.TN),
        Search(dtype=DType.BF16, layout=Layout.TN, batch=1, m=4096, k=64),
        Search(k=64, extents=(4096,)),
    ],
    ids=["all", "bf16 n", "tn", "m k", "k"],
)
def test_pages_of_many_winners_walk_indexes(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, search: Search
) -> None:
    """Of a wide search nothing is sorted: pages would grow slower with every winner."""
    monkeypatch.setattr(listing, "NARROW", -1)
    steps = plans(sqlite_url, search, (Order.GAIN, Order.LOSS, Order.SIZE))
    assert len(steps) == 10  # by gain and by loss, those with a ratio and those without
    assert [plan for plan in steps if "TEMP B-TREE" in plan or "SCAN winners" in plan] == []


def test_pages_of_few_winners_start_from_their_problems(sqlite_url: str) -> None:
    """However many there are that a narrow search leaves out."""
    steps = plans(sqlite_url, Search(dtype=DType.BF16), tuple(Order))
    assert len(steps) == 14
    assert all("winners USING INDEX uq_winners_current (problem_id=?" in plan for plan in steps)

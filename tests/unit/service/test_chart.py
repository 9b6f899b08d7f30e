"""The chart: predictions cost few queries, and are as true as if everything were read anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event

from gemmsmith.core import neighbours
from gemmsmith.core.config import Match, Use
from gemmsmith.core.problem import DType, Problem
from service.lookup import find, neighbourhood
from service.lookup.neighbourhood import Chart, Charted, Together
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.search.cost_model import AnalyticModel
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
FAR = Problem(m=64, n=512, k=65536)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = new_settings(tmp_path)
    promote(settings, winner(KNOWN))
    with Store.open(settings.database) as opened:
        yield opened


@contextmanager
def statements() -> Iterator[list[str]]:
    """Queries made meanwhile."""
    asked: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT"):
            asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def match(store: Store, drawn: Chart, problem: Problem) -> Match:
    source = Charted(store, drawn)
    found = find.find(
        source, problem, H200, accepted=find.ANY, pack_of=source.pack_for, ranker=AnalyticModel()
    )
    assert found is not None
    return found.match


def test_a_prediction_looks_at_the_marks_and_for_its_kernels_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement for the marks, one where the kernel was not proposed before."""
    monkeypatch.setattr("service.http.app.usable_gpu", lambda: None)
    monkeypatch.setattr("service.lookup.watcher.EVERY_S", 3600.0)
    settings = new_settings(tmp_path)
    promote(settings, winner(KNOWN))

    def ask(http: httpx.Client, m: int) -> None:
        reply = http.get("/best", params={"m": m, "n": FAR.n, "k": FAR.k})
        assert reply.json()["match"] == "predicted"

    with running(settings) as http:
        ask(http, 64)
        for m in range(72, 200, 8):
            with statements() as asked:
                ask(http, m)
            assert len(asked) <= 2, asked


@pytest.mark.parametrize("few", [True, False])
def test_what_is_near_is_found_as_in_the_store(
    store: Store, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        monkeypatch.setattr(neighbourhood, "NEIGHBOURS", 3)
    limit = 3 if few else find.NEIGHBOURS
    chosen = random.Random(20261122)
    drawn = Chart(store)
    for _ in range(20):
        m, n, k = (2 ** chosen.randrange(4, 8) for _ in range(3))
        use = chosen.choice((Use.CUTLASS, Use.CUBLAS))
        store.promote(winner(Problem(m=m, n=n, k=k), us=chosen.random(), use=use))
        asked = Problem(m=8 * chosen.randrange(1, 32), n=n, k=chosen.choice((2 * k, 2 * k + 1)))
        near = store.near_winners(asked, H200.slug, limit, find.REACH)
        drawn.catch_up()
        assert [there.problem for there in drawn.nearest(asked, H200.slug)] == [
            found.problem for found in near
        ]
        answers = neighbours.answering(
            asked, near, lambda found, asked=asked: find.is_legal(found.candidate, asked)
        )
        assert drawn.answering(asked, H200.slug) == (answers and answers.problem)
        for source in (Charted(store, drawn), Together(store, drawn, [asked], H200.slug)):
            beside = source.near_winners(asked, H200.slug, limit, find.REACH)
            assert next(beside, None) == answers
            assert source.winner(asked, H200.slug) == store.winner(asked, H200.slug)


def test_a_neighbour_that_is_another_since_does_not_answer(store: Store) -> None:
    """Its new kernel need not be legal for the question: then the store is asked."""
    drawn, asked = Chart(store), replace(KNOWN, m=4100)
    source = Charted(store, drawn)
    assert next(source.near_winners(asked, H200.slug, 64, find.REACH)).use is Use.CUTLASS
    unlike = winner(replace(KNOWN, k=4095)).candidate
    store.promote(replace(winner(KNOWN, us=1.0), candidate=unlike, use=Use.CUBLAS))
    found = list(source.near_winners(asked, H200.slug, 64, find.REACH))
    assert [(each.problem, each.use) for each in found[1:]] == [(KNOWN, Use.CUBLAS)]


def test_other_kinds_and_devices_are_not_near(store: Store) -> None:
    drawn = Chart(store)
    drawn.catch_up()
    assert drawn.has_near(KNOWN, H200.slug)
    assert not drawn.has_near(KNOWN, "sm90-other")
    assert not drawn.has_near(replace(KNOWN, batch=2), H200.slug)
    assert not drawn.has_near(replace(KNOWN, dtype=DType.FP16), H200.slug)


def test_what_is_promoted_is_near_at_once(store: Store) -> None:
    drawn = Chart(store)
    assert match(store, drawn, FAR) is Match.PREDICTED
    store.promote(winner(replace(FAR, m=128)))
    assert match(store, drawn, FAR) is Match.NEAREST


def test_a_pack_that_comes_or_goes_is_seen_at_once(store: Store) -> None:
    kernel = winner(FAR).candidate.kernel  # type: ignore[union-attr]
    drawn = Chart(store)
    for _ in range(2):
        assert seen(store, drawn, kernel.name) is None
        store.add_pack("0" * 64, "toolchain", [kernel], 1000)
        assert seen(store, drawn, kernel.name) == "0" * 64
        store.remove_pack("0" * 64)


def seen(store: Store, drawn: Chart, kernel: str) -> str | None:
    source = Charted(store, drawn)
    assert source.winner(FAR, H200.slug) is None
    return source.pack_for(kernel)


def test_it_is_drawn_ahead_where_there_are_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Chart(store) as drawn:
        pass
    assert not drawn.has_near(KNOWN, H200.slug)
    monkeypatch.setattr(neighbourhood, "MANY", 1)
    with Chart(store) as drawn:
        pass
    assert drawn.has_near(KNOWN, H200.slug)


def test_another_database_in_its_place_is_drawn_anew(store: Store, tmp_path: Path) -> None:
    for m in (16, 32):
        store.promote(winner(replace(KNOWN, m=m)))
    drawn = Chart(store)
    drawn.catch_up()
    (tmp_path / "other").mkdir()
    settings = new_settings(tmp_path / "other")
    promote(settings, winner(FAR))
    with Store.open(settings.database) as other:
        drawn._store = other
        assert match(other, drawn, replace(FAR, m=128)) is Match.NEAREST
        assert match(other, drawn, KNOWN) is Match.PREDICTED

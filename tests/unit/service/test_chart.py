"""The chart: predictions cost few queries, and are as true as if everything were read again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Match, Use
from gemmsmith.core.problem import DType, Problem
from service.lookup import find
from service.lookup.find import Chart, Charted
from tests.support.present import present
from tests.support.queries import statements
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
FAR = Problem(m=64, n=512, k=65536)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = new_settings(tmp_path)
    promote(settings, winner(KNOWN))
    with Store.open(settings.database) as opened:
        yield opened


def answer(store: Store, drawn: Chart, problem: Problem) -> Answer:
    source = Charted(store, drawn)
    return present(find.find(source, problem, H200, accepted=find.ANY))


def test_a_prediction_looks_at_the_marks_and_for_its_kernels_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement for the marks, one where the kernel was not proposed before."""
    monkeypatch.setattr("service.lookup.watcher.EVERY_S", 3600.0)
    settings = new_settings(tmp_path)
    promote(settings, winner(KNOWN))

    def ask(http: httpx.Client, m: int) -> None:
        reply = http.get("/best", params={"m": m, "n": FAR.n, "k": FAR.k})
        assert reply.json()["match"] == "predicted"

    with running(settings) as http:
        ask(http, 64)
        for m in range(72, 200, 8):
            with statements("SELECT") as asked:
                ask(http, m)
            assert len(asked) <= 2, asked


@pytest.mark.parametrize("few", [True, False])
def test_what_is_near_is_found_as_in_the_store(
    store: Store, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        monkeypatch.setattr(find, "NEIGHBOURS", 3)
    chosen = random.Random(20261122)
    drawn = Chart(store)
    for _ in range(20):
        m, n, k = (2 ** chosen.randrange(4, 8) for _ in range(3))
        use = chosen.choice((Use.CUTLASS, Use.CUBLAS))
        store.promote(winner(Problem(m=m, n=n, k=k), us=chosen.random(), use=use))
        asked = Problem(m=8 * chosen.randrange(1, 32), n=n, k=chosen.choice((2 * k, 2 * k + 1)))
        near = store.near_winners(asked, H200.slug, find.NEIGHBOURS, find.REACH)
        drawn.catch_up()
        expected = [(winner.problem, (winner.use, winner.candidate)) for winner in near]
        assert drawn.near(asked, H200.slug) == expected
        assert store.near(asked, H200.slug)[: len(expected)] == expected
        by_store = find.find(store, asked, H200, accepted=find.ANY)
        assert few or answer(store, drawn, asked) == by_store


def test_a_neighbours_winner_that_was_replaced_meanwhile_is_not_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the chart and the reading: its new kernel need not be legal here."""
    drawn, asked = Chart(store), replace(KNOWN, m=4100)
    drawn.catch_up()
    monkeypatch.setattr(drawn, "catch_up", lambda: None)
    unlike = winner(replace(KNOWN, layout="nn")).candidate
    store.promote(replace(winner(KNOWN, us=1.0), candidate=unlike))
    found = answer(store, drawn, asked)
    assert (found.match, found.measured, found.use) == (Match.NEAREST, KNOWN, Use.CUBLAS)
    assert (found.config, found.revision) == (None, 2)


def test_other_kinds_and_devices_are_not_near(store: Store) -> None:
    drawn = Chart(store)
    drawn.catch_up()
    assert drawn.near(KNOWN, H200.slug)
    assert not drawn.near(KNOWN, "sm90-other")
    assert not drawn.near(replace(KNOWN, batch=2), H200.slug)
    assert not drawn.near(replace(KNOWN, dtype=DType.FP16), H200.slug)


def test_what_is_promoted_is_near_at_once(store: Store) -> None:
    drawn = Chart(store)
    assert answer(store, drawn, FAR).match is Match.PREDICTED
    store.promote(winner(replace(FAR, m=128)))
    assert answer(store, drawn, FAR).match is Match.NEAREST


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
    source.near(FAR, H200.slug)
    assert source.pack_for(kernel) == Charted(store, drawn).pack_for(kernel)
    return source.pack_for(kernel)


def test_it_is_drawn_in_the_background(store: Store) -> None:
    with Chart(store) as drawn:
        pass
    assert drawn.near(KNOWN, H200.slug)


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
        assert answer(other, drawn, replace(FAR, m=128)).match is Match.NEAREST
        assert answer(other, drawn, KNOWN).match is Match.PREDICTED

"""What thousands of winners cost: few queries, little memory, and no more than once."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import httpx
import pytest

from benchmarks import million
from gemmsmith import Problem, Snapshot
from service.lookup.abilities import EVERYTHING
from service.settings import Settings
from tests.support.queries import statements
from tests.support.serving import H200, promote, running, winner
from tests.unit.service.test_cold_answers import many, near
from tests.unit.service.test_snapshots_kept import content, kept
from tuner.store import Store

COUNT = 6000


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder: Path = tmp_path_factory.mktemp("many")
    return many(folder)[0]


def test_a_snapshot_is_written_once_and_takes_little_memory(settings: Settings) -> None:
    with Store.open(settings.database) as store:
        served = kept(store)
        tracemalloc.start()
        try:
            first = served.current(H200.slug, EVERYTHING)
            size, peak = first.length, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(Snapshot.parse(content(first)).rows) >= COUNT
        assert peak < 3 * size + 2**24  # rows, and what is read at a time: not all winners
        began = time.process_time()
        for _ in range(20):
            assert served.current(H200.slug, EVERYTHING) is first
        assert time.process_time() - began < 1.0  # 10 ms
        promote(settings, winner(Problem(m=1, n=8, k=8)))
        began = time.process_time()
        later = served.current(H200.slug, EVERYTHING)
        assert time.process_time() - began < 1.0  # 20 ms; to write all takes 100
        assert later.length > size


def test_neighbours_are_found_without_a_query_for_each(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.lookup.watcher.EVERY_S", 3600.0)
    path = Path(settings.database.removeprefix("sqlite:///"))
    asked = near(million.sample(path, 300), 200, seed=8)
    problems = [{name: getattr(each, name) for name in ("m", "n", "k", "batch", "dtype", "layout")}
                for each in asked]  # fmt: skip

    def ask(http: httpx.Client) -> int:
        reply = http.post("/best:batch", json={"problems": problems}).raise_for_status()
        return reply.text.count('"match":"nearest"')

    with running(settings) as http:
        http.timeout = 120.0
        with statements("SELECT") as made:
            assert ask(http) > 150
    assert len([each for each in made if "winners" in each]) < 10

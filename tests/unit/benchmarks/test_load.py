"""The load benchmark's parts: wrk's figures, the bare route, the database of many winners."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from benchmarks import load, million, servers, wrk
from tuner.store import Store, upgrade

DEVICE = "nvidia-h200-132sm"


def test_without_wrk_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(wrk.WrkMissingError, match="apt install wrk"):
        wrk.run("http://127.0.0.1:9", ["/"], 1)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is missing: apt install wrk")
def test_a_round_has_figures_only_if_every_request_was_answered() -> None:
    with servers.bare(2000) as url:
        found = wrk.run(url, ["/best?a=1", "/best?a=2"], 1)
        assert found.per_second > 10
        assert 0 < found.p50_ms <= found.p99_ms
        with pytest.raises(RuntimeError, match="requests failed"):
            wrk.run(url, ["/best", "/elsewhere"], 1)
    with pytest.raises(RuntimeError, match="wrk ended with 1"):
        wrk.run(url, ["/best"], 1)


def test_figures_are_medians_and_ratios_of_medians() -> None:
    rounds = [
        wrk.Load(per_second=float(n), p50_ms=float(n), p99_ms=float(10 - n)) for n in (1, 8, 2)
    ]
    middle = wrk.Load.median(rounds)
    assert middle == wrk.Load(per_second=2.0, p50_ms=2.0, p99_ms=8.0)
    line = load.compared("x", {"a": rounds, "b": [rounds[1]] * 3}, "a", "b")
    assert line.loads == {"a": middle, "b": rounds[1]}
    assert line.ratios == {"requests": 0.25, "p99": 4.0}
    assert line.ranges == {"requests": (0.125, 1.0), "p99": (1.0, 4.5)}
    assert "requests × 0.25 (0.12 … 1.00), p99 × 4.00 (1.00 … 4.50)" in load.text(line)


def test_workers_and_writers_stand_still_while_others_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "written.db"
    upgrade(f"sqlite:///{path}")
    with servers.writing(path), Store.open(f"sqlite:///{path}") as store:

        def written() -> int:
            before = store.counts()["trials"]
            time.sleep(0.5)
            return store.counts()["trials"] - before

        assert written()
        with servers.standing_still():
            time.sleep(0.2)  # what was under way
            assert not written()
        assert written()


def test_winners_made_up_by_thousands_are_served_as_others_are(tmp_path: Path) -> None:
    path = tmp_path / "many.db"
    million.fill(path, servers.WINNERS[:1], 3000)
    problems = million.sample(path, 500)
    assert 400 < len(set(problems)) <= 500
    with Store.open(f"sqlite:///{path}") as store:
        winners = store.winners_of(problems, DEVICE)
        assert {winner.problem for winner in winners} == set(problems)
        assert store.counts()["winners"] == store.counts()["problems"] > 3000
        assert store.changes.marks().sequence >= 3000
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    database.close()
    with servers.service(path) as url:
        span = load.batch("a batch", url, problems)
    assert 0 < span.median_ms < 10_000
    assert "a batch" in load.text(span)

"""Lookups in memory: their speed, their memory, and refreshes, which never fail."""

from __future__ import annotations

import gc
import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gemmsmith import Choice, DType, Layout, Lookup, Problem, ServiceUnavailable, Snapshot
from tests.support.snapshots import BIG, H200, row, snapshot

OLD = snapshot(row(BIG))
NEW = snapshot(row(BIG, deterministic=False))


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def refreshers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gemmsmith-refresh"]


def ask(lookup: Lookup, problem: Problem = BIG) -> Choice | None:
    return lookup.lookup(
        problem.dtype, problem.layout, problem.m, problem.n, problem.k, problem.batch
    )


def test_a_lookup_returns_the_snapshots_choices() -> None:
    lookup = Lookup(OLD)
    for problem in (BIG, replace(BIG, m=3000), replace(BIG, m=3), replace(BIG, dtype=DType.FP16)):
        assert ask(lookup, problem) == OLD.find(problem)
        assert ask(lookup, problem) == OLD.find(problem)
    assert ask(lookup) is ask(lookup)
    assert lookup.lookup("bf16", "tn", 4096, 4096, 4096) is lookup.lookup(
        DType.BF16, Layout.TN, 4096, 4096, 4096, 1
    )


@pytest.mark.parametrize(
    "asked",
    [
        ("bf16", "tn", 0, 64, 64),
        ("bf16", "tn", -1, 64, 64),
        ("bf16", "tn", 64, 64, 2**31),
        ("fp32", "tn", 64, 64, 64),
        ("bf16", "xx", 64, 64, 64),
        ("fp8_e4m3", "nt", 64, 64, 64),
    ],
)
def test_an_unsupported_problem_is_torchs(asked: tuple[str, str, int, int, int]) -> None:
    assert Lookup(OLD).lookup(*asked) is None


def test_misses_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = Snapshot.find
    monkeypatch.setattr(Snapshot, "find", lambda self, p: (asked.append(p), find(self, p))[1])
    lookup = Lookup(OLD, capacity=4)
    far = [replace(BIG, m=m) for m in (1, 2, 3, 4)]
    for _ in range(5):
        assert [ask(lookup, problem) for problem in far] == [None] * 4
    assert asked == far
    assert ask(lookup, BIG) is not None  # one lookup more than it remembers
    assert ask(lookup, BIG) is not None
    assert len(asked) == 5
    assert len(lookup._choices) <= 4


def test_refreshing_swaps_the_choices() -> None:
    served = [OLD, NEW, NEW]
    lookup = Lookup(OLD, fetch=lambda known: served.pop(0))
    first = ask(lookup)
    assert first is not None
    assert first.deterministic
    assert not lookup.refresh()
    assert ask(lookup) is first
    assert lookup.refresh()
    assert lookup.snapshot is NEW
    second = ask(lookup)
    assert second is not None
    assert not second.deterministic
    assert not lookup.refresh()


def test_a_pinned_lookup_stays() -> None:
    def fetch(known: Snapshot) -> Snapshot:
        raise AssertionError("asked")

    for lookup in (Lookup(OLD, fetch=fetch, interval=0.001, pin=True), Lookup(OLD, interval=0.001)):
        assert not lookup.refresh()
        assert lookup.snapshot is OLD
    assert not refreshers()


@pytest.mark.parametrize("error", [ServiceUnavailable("gone"), RuntimeError("closed")])
def test_failures_are_logged_once_and_never_raised(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    script: list[Exception | Snapshot] = [error, error, NEW, error, error]

    def fetch(known: Snapshot) -> Snapshot:
        now = script.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    lookup = Lookup(OLD, fetch=fetch)
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        assert [lookup.refresh() for _ in range(2)] == [False, False]
        assert lookup.snapshot is OLD
        assert len(caplog.records) == 1
        assert str(error) in caplog.text
        assert [lookup.refresh() for _ in range(3)] == [True, False, False]
        assert lookup.snapshot is NEW
        assert len(caplog.records) == 2


def test_the_background_brings_newer_winners_and_ends() -> None:
    served = [OLD]
    fetched: list[str] = []

    def fetch(known: Snapshot) -> Snapshot:
        fetched.append(known.revision)
        return served[0]

    lookup = Lookup(OLD, fetch=fetch, interval=0.005)
    assert [thread.daemon for thread in refreshers()] == [True]
    wait_for(lambda: len(fetched) > 2)
    served[0] = NEW
    wait_for(lambda: lookup.snapshot is NEW)
    wait_for(lambda: fetched[-1] == NEW.revision)
    lookup.close()
    wait_for(lambda: not refreshers())
    assert ask(lookup) is not None


def test_a_forgotten_lookup_takes_its_thread_with_it() -> None:
    lookup = Lookup(OLD, fetch=lambda known: known, interval=1000)
    assert refreshers()
    del lookup
    gc.collect()
    wait_for(lambda: not refreshers())


def test_lookups_while_it_is_swapped_are_of_one_snapshot_or_the_other() -> None:
    served = [OLD, NEW]
    lookup = Lookup(OLD, fetch=lambda known: served[known is OLD], capacity=8)
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for m in range(4088, 4104):
                choice = ask(lookup, replace(BIG, m=m))
                if (None if choice is None else choice.measured) != (BIG if m == BIG.m else None):
                    wrong.append(choice)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        lookup.refresh()
        choice = ask(lookup)
        assert choice is not None
        assert choice.deterministic == (lookup.snapshot is OLD)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.mark.parametrize("values", [{"interval": 0}, {"interval": -1}, {"capacity": 0}])
def test_senseless_arguments_are_named(values: dict[str, int]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=name):
        Lookup(OLD, fetch=lambda known: known, **values)  # type: ignore[arg-type]


def test_a_hit_takes_less_than_a_microsecond() -> None:
    lookup = Lookup(Snapshot.of(H200, [row(replace(BIG, m=64 * i)) for i in range(1, 300)]))
    problems = [("bf16", "tn", 64 * i, 4096, 4096) for i in range(1, 300)]
    times = []
    for _ in range(30):
        began = time.perf_counter()
        for dtype, layout, m, n, k in problems:
            lookup.lookup(dtype, layout, m, n, k)
        times.append((time.perf_counter() - began) / len(problems))
    assert statistics.median(times) < 5e-6  # 0.2 µs on a quiet machine; tests run on busy ones

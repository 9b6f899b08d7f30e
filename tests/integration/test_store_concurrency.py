"""Eight processes write at once: nothing is lost, nobody is turned away."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise

from tests.support.records import DEVICE, PROBLEM, trial, winner
from tuner.store import Store, current, head

WRITERS = 8
TRIALS = 80


def test_eight_processes_write_at_once(store: Store, store_url: str) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.writer", store_url, str(number), str(TRIALS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(WRITERS)
    ]
    said = [writer.communicate(timeout=240) for writer in writers]
    assert [errors for _, errors in said] == [""] * WRITERS
    assert [out for out, _ in said] == [f"{n} wrote {TRIALS}\n" for n in range(WRITERS)]

    for number in range(WRITERS):
        mine = [stored.trial for stored in store.trials(job=f"writer-{number}")]
        assert [each.candidate.kernel.name for each in mine] == [
            f"kernel_{turn}" for turn in range(TRIALS)
        ]
    assert len(store.trials(job="everybody")) == TRIALS // 10
    counts = store.counts()
    assert counts["trials"] == WRITERS * TRIALS + TRIALS // 10
    assert (counts["kernels"], counts["problems"], counts["devices"]) == (TRIALS, 7, 1)
    promoted = 0
    for found in store.winners():
        history = store.history(found.problem, DEVICE.slug)
        promoted += len(history)
        assert found == history[0]
        assert [entry.revision for entry in history] == list(range(len(history), 0, -1))
    assert promoted == WRITERS * TRIALS // 10
    assert store.sequence() == promoted


def test_a_new_database_opened_by_several_at_once(empty_database_url: str) -> None:
    program = (
        "import sys; from tuner.store import Store; Store.open(sys.argv[1], create=True).close()"
    )
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", program, empty_database_url], stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    said = [opener.communicate(timeout=120)[1] for opener in openers]
    assert said == [""] * len(openers)
    assert current(empty_database_url) == head()


def test_lookups_and_trials_are_fast_enough(store: Store) -> None:
    """Bounds of the fastest tenth: the machine may be busy with other tests."""
    store.promote(winner())
    store.add_trial(trial(0))
    times = [time.perf_counter()]
    for number in range(300):
        store.add_trial(trial(number % 50, job=str(number)))
        times.append(time.perf_counter())
    assert fastest_tenth(times) < 0.02
    store.winner(PROBLEM, DEVICE.slug)
    times = [time.perf_counter()]
    for _ in range(300):
        store.winner(PROBLEM, DEVICE.slug)
        times.append(time.perf_counter())
    assert fastest_tenth(times) < 0.01


def fastest_tenth(times: list[float]) -> float:
    """Seconds that a tenth of the steps between the times take at most."""
    return sorted(after - before for before, after in pairwise(times))[len(times) // 10]

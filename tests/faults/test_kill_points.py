"""A worker killed at every single commit of a job: the next one makes good whatever is left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ledger import verify
from tests.support.records import imported
from tests.support.shipped import SWEEPS, shipped_winners
from tuner.store import Store


@pytest.mark.long
def test_a_worker_may_die_at_any_commit(store: Store, store_url: str) -> None:
    # A replayed winner does not replace a shipped one: the heir must find its own all the same.
    for winner in shipped_winners():
        imported(store, winner)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_points", store_url, str(SWEEPS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    jobs = done.stdout.split()
    assert len(jobs) > 15, "a job has more commits than that"
    assert verify(store_url, jobs) == {"done": len(jobs)}

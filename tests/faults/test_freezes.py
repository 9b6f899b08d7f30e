"""Workers that are frozen, by SIGSTOP, at the worst moments: they hold nobody up, and change
nothing once they have lost their job.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import accepted, distinct_orders
from tests.support.processes import until
from tests.support.records import imported
from tests.support.shipped import SWEEPS, shipped_winners
from tuner.store import Store

SILENT_S = 5.0
"""Instead of `service.worker.supervisor.SILENT_S`."""


@pytest.mark.long
def test_a_worker_may_freeze_before_any_write(store: Store, store_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.freeze_points", store_url, str(SWEEPS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ends = done.stdout.split()
    assert len(ends) > 15, "a job has more writes than that"
    assert {"cancelled", "done"} == set(ends)


@pytest.mark.long
def test_a_worker_frozen_in_a_write_is_replaced(
    store: Store, store_url: str, tmp_path: Path, random: Random
) -> None:
    imported(store, shipped_winners()[0])
    orders = distinct_orders(3, random)
    freeze = tmp_path / "freeze"
    with Fleet(
        store_url,
        tmp_path,
        GEMMSMITH_TEST_FREEZE=str(freeze),
        GEMMSMITH_TEST_SILENT_S=str(SILENT_S),
        GEMMSMITH_TEST_PAUSE_S="0.05",
    ) as fleet:
        fleet.serve(worker=True)
        fleet.wait_until_up()
        fleet.wait_until_ready(1)
        freeze.touch()
        jobs = [accepted(fleet.client, orders[0], "first")]
        until(lambda: not freeze.exists(), "no worker has written")
        frozen_at = time.monotonic()
        jobs += [accepted(fleet.client, order, f"{n}") for n, order in enumerate(orders[1:])]
        waited_s = time.monotonic() - frozen_at
        fleet.wait_until_idle()
        fleet.kill(fleet.processes())
    assert "worker stopped answering; killing it" in fleet.log()
    assert waited_s < SILENT_S + 10
    assert verify(store_url, jobs) == {"done": len(jobs)}

"""The database's clock jumps by an hour, forward and backward, while jobs are tuned."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.support.clocks import Clock
from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import accepted, distinct_orders
from tests.support.records import imported
from tests.support.shipped import shipped_winners
from tuner.store import Store

HOUR_S = 3600.0
ORDERS = 24


@pytest.mark.long
def test_no_job_is_lost_held_up_or_done_twice(
    store: Store, store_url: str, tmp_path: Path, random: Random
) -> None:
    imported(store, shipped_winners()[0])
    orders = distinct_orders(ORDERS, random)
    with (
        closing(Clock(store_url, tmp_path)) as clock,
        Fleet(store_url, tmp_path, GEMMSMITH_TEST_PAUSE_S="0.05", **clock.environ) as fleet,
    ):
        fleet.serve(worker=True)
        fleet.work()
        fleet.wait_until_up()
        fleet.wait_until_ready(2)
        jobs = [accepted(fleet.client, order, str(n)) for n, order in enumerate(orders)]
        for offset_s in (HOUR_S, 0.0, -HOUR_S):
            time.sleep(random.uniform(1.0, 2.0))
            clock.shift(offset_s)
        time.sleep(random.uniform(1.0, 2.0))
        fleet.kill(fleet.processes()[-1:])  # and its lease, by the clock of then, …
        clock.shift(-2 * HOUR_S)  # … ends in an hour
        fleet.work()
        fleet.wait_until_idle()
        fleet.kill(fleet.processes())
    assert verify(store_url, jobs) == {"done": ORDERS}

"""Eight workers at once on one queue: every job is one worker's."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import accepted, distinct_orders
from tests.support.records import imported
from tests.support.shipped import shipped_winners
from tuner.jobs import Queue
from tuner.store import Store

WORKERS = 8
ORDERS = 64


@pytest.mark.long
def test_no_job_is_begun_twice(
    store: Store, store_url: str, tmp_path: Path, random: Random
) -> None:
    imported(store, shipped_winners()[0])
    # Leases as long as in real use: on a machine of two cores a worker may wait for its turn.
    with Fleet(store_url, tmp_path, GEMMSMITH_TEST_TTL_S="60") as fleet:
        fleet.serve()
        fleet.work(WORKERS)
        fleet.wait_until_up()
        fleet.wait_until_ready(WORKERS)
        with ThreadPoolExecutor(WORKERS) as customers:
            orders = distinct_orders(ORDERS, random)
            keys = map(str, range(ORDERS))
            jobs = list(
                customers.map(lambda order, key: accepted(fleet.client, order, key), orders, keys)
            )
        fleet.wait_until_idle()
    assert verify(store_url, jobs) == {"done": ORDERS}
    queue = Queue(store)
    owners = Counter(
        event.data["owner"]
        for job in jobs
        for event in queue.events(job)
        if event.kind == "started"
    )
    assert sum(owners.values()) == ORDERS
    assert len(owners) == WORKERS, owners

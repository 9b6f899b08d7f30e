"""Somebody holds the database's lock for 20 s, while jobs are ordered, tuned and looked up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import Reader, accepted, distinct_orders, is_busy, lookup
from tests.support.records import imported
from tests.support.shipped import recorded_problems, shipped_winners
from tuner.store import Store

HELD_S = 20.0
CUSTOMERS = 60
"""More at once than the service has threads."""

SLOW_S = 5.0
"""Of an answer from memory, on a machine whose cores all have something to do."""


@pytest.mark.long
def test_reads_are_answered_and_writes_wait_or_are_told_to_come_again(
    store: Store, store_url: str, tmp_path: Path, random: Random
) -> None:
    for winner in shipped_winners():
        imported(store, winner)
    problems = recorded_problems()
    orders = distinct_orders(CUSTOMERS, random)
    with Fleet(store_url, tmp_path, GEMMSMITH_TEST_PAUSE_S="0.05") as fleet:
        fleet.serve(worker=True)
        fleet.work()
        fleet.wait_until_up()
        fleet.wait_until_ready(2)
        jobs = [accepted(fleet.client, order, f"early-{n}") for n, order in enumerate(orders[:10])]
        for problem in problems:
            assert fleet.client.get(lookup(problem)).status_code in (200, 404)
        held_at = time.monotonic()
        with (
            lock_held(store_url) as holder,
            ThreadPoolExecutor(CUSTOMERS) as customers,
            Reader(fleet.url, problems, jobs=store.database.is_sqlite) as reader,
        ):
            waiting = [
                customers.submit(accepted, fleet.client, order, f"late-{n}")
                for n, order in enumerate(orders[10:])
            ]
            healthy = ready = 0
            while holder.poll() is None:
                healthy += fleet.client.get("/healthz").status_code == 200
                ready += _says_how_it_is(fleet.client)
                time.sleep(0.5)
            answers, held_s = reader.answers, time.monotonic() - held_at
            late = [each.result() for each in waiting]
        fleet.wait_until_idle()
        fleet.kill(fleet.processes())
    assert held_s >= HELD_S
    assert reader.wrong == []
    assert answers > 5 * HELD_S
    assert reader.slowest_s < SLOW_S
    assert (healthy > 2, ready > 2) == (True, True)
    assert verify(store_url, [*jobs, *late]) == {"done": CUSTOMERS}


@contextmanager
def lock_held(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock by now, for `HELD_S`."""
    command = [sys.executable, "-m", "tests.support.lock_holder", url, str(HELD_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        assert holder.stdout.read() == "let go\n"


def _says_how_it_is(client: httpx.Client) -> bool:
    reply = client.get("/readyz")
    return is_busy(reply) or reply.json()["status"] in ("ok", "degraded")

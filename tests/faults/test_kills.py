"""Workers and the service killed by SIGKILL at random moments, while jobs are ordered and tuned."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.fleet import Fleet
from tests.support.ledger import verify, verify_packs
from tests.support.orders import Reader, accepted, distinct_orders
from tests.support.records import imported
from tests.support.shipped import recorded_problems, shipped_winners
from tuner.store import Store

ORDERS = int(os.environ.get("GEMMSMITH_FAULT_JOBS", "80"))
"""On each kind of database; `make faults` has 200. What is done is ordered once more: there are
136 distinct ones."""

KILLS = ("worker",) * 4 + ("service",) * 3 + ("both",) * 3
FEW = ("worker", "service", "both")


def victims(fleet: Fleet, kind: str, random: Random) -> list[psutil.Process]:
    service, *workers = fleet.processes()
    match kind:
        case "worker":
            return [random.choice(workers)] if workers else []
        case "service":
            return [service]
        case _:
            return [service, *workers]


@pytest.mark.parametrize(
    ("count", "of"),
    [(16, FEW), pytest.param(ORDERS, KILLS, marks=pytest.mark.long)],
    ids=["few", "many"],
)
def test_nothing_is_lost_and_nothing_done_twice(
    store: Store, store_url: str, tmp_path: Path, random: Random, count: int, of: tuple[str, ...]
) -> None:
    imported(store, shipped_winners()[0])  # so that the service knows the device
    orders = distinct_orders(count // 2, random)
    kills = random.sample(of, len(of))
    jobs: list[str] = []

    def send() -> None:
        for number in range(count):
            if number == len(orders):
                fleet.wait_until_idle()
            order = orders[number % len(orders)]
            jobs.append(accepted(fleet.client, order, f"order-{number}"))

    with Fleet(store_url, tmp_path, GEMMSMITH_TEST_NVCC=str(tmp_path / "nvcc")) as fleet:
        fleet.serve(worker=True)
        fleet.work()
        fleet.wait_until_up()
        sender = threading.Thread(target=send)
        with Reader(fleet.url, recorded_problems()) as reader:
            sender.start()
            for kind in kills:
                time.sleep(random.uniform(0.5, 3.5))
                fleet.kill(victims(fleet, kind, random))
                if fleet.service is None or fleet.service.poll() is not None:
                    fleet.serve(worker=True)
                if not fleet.workers:
                    fleet.work()
            sender.join()
            fleet.wait_until_idle()
        fleet.kill(fleet.processes())
    assert len(jobs) == count
    assert len(set(jobs)) == count, "an order that was repeated has made a second job"
    ended = verify(store_url, jobs)
    assert ended["done"] >= count - len(of), ended  # a kill costs an attempt, and there are 3
    assert ended["done"] + ended["failed"] == count
    assert reader.wrong == []
    assert reader.answers > count
    verify_packs(store_url, fleet.packs)
